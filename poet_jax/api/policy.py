"""The nearest to a plan that `jax.checkpoint` can express."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax

from poet_jax.core.costs import Costs
from poet_jax.core.equation import Equation
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Stages
from poet_jax.core.program import Program
from poet_jax.core.simulate import Usage
from poet_jax.core.units import format_bytes
from poet_jax.planners.planner import judge
from poet_jax.viz.table import aligned, decisions

_MOST_LISTED = 10


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """A policy for `jax.checkpoint`, by the names of `checkpoint_name`.

    Give it as `jax.checkpoint(loss, policy=policy)`.

    Attributes:
      saved: names of the values that wait in the device's memory.
      offloaded: names of those that wait in the host's.
      recomputed: names of those that are made again, as all values without a name are.
      usage: modelled, of the step with this policy around all of its forward pass, if
        what is made again is made when it is first read, and once.
      planned: modelled, of the plan.
    """

    saved: tuple[str, ...]
    offloaded: tuple[str, ...]
    recomputed: tuple[str, ...]
    usage: Usage
    planned: Usage

    @property
    def policy(self) -> Callable[..., Any]:
        """As JAX makes it: `save_and_offload_only_these_names`."""
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.saved),
            names_which_can_be_offloaded=list(self.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """Whether `jax.checkpoint` saves the result of an operation."""
        return self.policy(primitive, *avals, **params)

    def __str__(self) -> str:
        def listed(names: tuple[str, ...]) -> str:
            return ", ".join(names) or "nothing"

        return "\n  ".join(
            [
                f"saves {listed(self.saved)}; offloads {listed(self.offloaded)}; "
                f"makes again {listed((*self.recomputed, 'what has no name'))}",
                *aligned("plan", "policy", self.usage, self.planned),
            ]
        )


def checkpoint_policy(
    program: Program, costs: Costs, planned: Usage
) -> CheckpointPolicy:
    """See `Schedule.checkpoint_policy`."""
    graph, made = program.graph, decisions(program)
    first = _first_backward(graph)
    named = {
        name: {v for v in values if _waits(graph, v, first)}
        for name, values in _named(graph).items()
    }
    if not named:
        raise ValueError(_without_names(graph, made, first))
    groups: dict[str, list[str]] = {"keep": [], "page": [], "remat": []}
    for name, values in named.items():
        nbytes = dict.fromkeys(groups, 0)
        nbytes["remat"] = 1  # if none of them waits for the backward pass
        for v in values:
            nbytes[made.get(v, "keep")] += graph.values[v].nbytes
        groups[max(groups, key=nbytes.__getitem__)].append(name)
    kept, paged = (
        {v for name in groups[kind] for v in named[name]} for kind in ("keep", "page")
    )
    stages = _stages(graph, first, kept - paged, paged)
    usage = judge(graph, costs, stages.actions(graph)).usage
    saved, offloaded, recomputed = map(tuple, groups.values())
    return CheckpointPolicy(saved, offloaded, recomputed, usage, planned)


def _first_backward(graph: Graph) -> int:
    backward = (number for number, node in enumerate(graph.nodes) if node.backward)
    return next(backward, len(graph.nodes))


def _waits(graph: Graph, value: int, first: int) -> bool:
    """Whether the forward pass makes a value that is read after it."""
    made = graph.producer.get(value, first) < first
    return made and any(reader >= first for reader in graph.readers[value])


def _named(graph: Graph) -> dict[str, set[int]]:
    """The graph's values with each name; none for a name inside a node, such as in the
    body of a loop."""
    found: dict[str, set[int]] = {}
    for node in graph.nodes:
        outside = {*node.reads, *node.writes}
        for equation in node.equations:
            for name in _names(equation):
                found.setdefault(name, set())
            if equation.primitive.name == "name":
                values = (*equation.operands, *equation.results)
                here = (v for v in values if isinstance(v, int) and v in outside)
                found[equation.params["name"]].update(here)
    return dict(sorted(found.items()))


def _names(equation: Equation) -> Iterator[str]:
    """Those that an equation, or one in its bodies, gives."""
    if equation.primitive.name == "name":
        yield equation.params["name"]
    for body, _ in equation.inner:
        for inside in body:
            yield from _names(inside)


def _stages(graph: Graph, first: int, kept: set[int], paged: set[int]) -> Stages:
    """The forward pass, which keeps and pages these values; what the rest of the step
    reads of the others is made again for its first read."""
    stages = Stages.empty(graph)
    stages.page_outs |= paged
    away = {
        v
        for number, node in enumerate(graph.nodes[:first])
        if node.repeatable
        for v in node.writes
        if v not in kept and v not in graph.leaving
    }

    for stage in range(first, len(graph.nodes)):
        wanted = list(graph.nodes[stage].reads)
        while wanted:
            value = wanted.pop()
            if value not in away:
                continue
            if value in paged:
                stages.page_ins[stage].add(value)
                away.remove(value)
                continue
            number = graph.producer[value]
            stages.reruns[stage].add(number)
            away.difference_update(graph.nodes[number].writes)
            wanted += graph.nodes[number].reads
    return stages


def _without_names(graph: Graph, made: dict[int, str], first: int) -> str:
    """What to name, where there are no names."""
    waiting = sorted(_kept(graph, made, first), reverse=True)[:_MOST_LISTED]
    listed = "; ".join(f"{name} ({format_bytes(nbytes)})" for nbytes, name in waiting)
    return (
        "A policy of jax.checkpoint goes by names, and the function names no value. "
        "Name values with jax.ad_checkpoint.checkpoint_name(x, name). The plan keeps "
        f"these for the backward pass: {listed or 'none'}."
    )


def _kept(graph: Graph, made: dict[int, str], first: int) -> Iterator[tuple[int, str]]:
    """(bytes, where it is made) of what the plan keeps for the backward pass."""
    nbytes: dict[str, int] = defaultdict(int)
    for v, decision in made.items():
        if decision == "keep" and _waits(graph, v, first):
            nbytes[graph.nodes[graph.producer[v]].name] += graph.values[v].nbytes
    return ((n, name) for name, n in nbytes.items())
