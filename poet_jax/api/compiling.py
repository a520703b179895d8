"""What compiles a step: a user's function as it is, or a plan of it in stages."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from poet_jax.api.function import Function
from poet_jax.api.paging import apart
from poet_jax.api.processes import Processes
from poet_jax.core.costs import Costs
from poet_jax.core.device import DeviceProfile
from poet_jax.core.graph import Graph
from poet_jax.core.program import Program
from poet_jax.core.rebuilding import map_equations
from poet_jax.devices.price import price
from poet_jax.emit import emit
from poet_jax.emit.executor import HostExecutor, Step, signal
from poet_jax.emit.paged_step import PagedStep
from poet_jax.passes.cpu.scratch import node_scratch
from poet_jax.planners.planner import keep_everything

# Those of `jax.jit` that a paged step is compiled with.
PAGED_OPTIONS = "keep_unused", "inline", "compiler_options"


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """What compiles a step.

    Attributes:
      build: compiles a program whose runs are stages.
      whole: compiles the function as `jax.jit` does; None where that cannot run.
      scratch: [N] bytes that libraries allocate for each node without XLA's knowledge.
      in_stages: whether stages run even where `whole` fits.
      stages_first: whether stages run where they have room for all values, even if
        `whole` fits.
      processes: that run the step together, and so have to have one plan.
      refinable: passes that can cut the graph finer; see `compile_within`.
    """

    build: Callable[[Program], Step | PagedStep]
    whole: Callable[[], Step] | None
    scratch: Sequence[int]
    in_stages: bool = False
    stages_first: bool = False
    processes: Processes = Processes()
    refinable: Set[str] = frozenset()


# From so many bytes on, stages were measured to take a CPU less time than the function
# as a whole, in less memory. Below, other forms of operations have to save this share
# of the modelled seconds.
LARGE_BYTES = 2 * 2**20
SAVED = 0.1
# Stages that hold so many times the function's own equations take long to compile.
GROWN = 2


def prefers_stages(
    traced: Graph, graph: Graph, costs: Costs, device: DeviceProfile
) -> bool:
    """Whether a graph that passes made is better run in stages than `traced` as a
    whole, if both fit."""
    if graph.rewritten or not graph.on_cpu:
        return graph.rewritten
    if graph.equation_count > GROWN * _own_count(traced):
        return False
    if keep_everything(graph, costs).usage.peak_bytes >= LARGE_BYTES:
        return True
    if not graph.is_lowered:
        return False
    plain = map_equations(graph, lambda e: dataclasses.replace(e, lowering=None))
    return costs.seconds.sum() <= (1 - SAVED) * price(plain, device).seconds.sum()


def _own_count(traced: Graph) -> int:
    """Equations of a function, and of the branches of its conds, which are opened."""
    conds = (
        e for node in traced.nodes for e in node.equations if e.primitive.name == "cond"
    )
    inner = sum(len(body) for e in conds for body, _ in e.inner)
    return traced.equation_count + inner


def target_for(
    function: Function,
    executor: HostExecutor,
    device: DeviceProfile,
    *,
    key: Any,
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    traced: Graph,
    graph: Graph,
    costs: Costs,
) -> Target:
    """What compiles `function` for arguments of one key.

    `jitted` is the function under `jax.jit` for these, `traced` its graph, and `graph`
    what passes made of that.
    """
    scratch, scratch_bytes = _scratch(graph)
    is_timed = executor.trace and not apart(graph, function.options)

    def whole() -> Step:
        own_bytes = _scratch(traced)[1]
        return Step(
            jitted,
            args,
            kwargs,
            graph,
            scratch_bytes=own_bytes,
            signal=signal(traced),
        )

    def build(program: Program) -> Step | PagedStep:
        emitted = emit(program, trace=is_timed)
        if emitted.records or graph.stored:
            options = function.options
            return PagedStep(
                emitted,
                executor.store,
                function.leaves(args, kwargs),
                scratch_bytes=scratch_bytes,
                jit_options={x: options[x] for x in PAGED_OPTIONS if x in options},
            )
        return Step(
            function.flat_for(key, emitted, graph.out_tree),
            args,
            kwargs,
            graph,
            scratch_bytes=scratch_bytes,
            recomputed=program.recomputed,
            signal=signal(traced),
        )

    processes = function.processes(args, kwargs)
    return Target(
        build,
        None if graph.stored else whole,
        scratch,
        in_stages=executor.trace,
        stages_first=processes.agree(
            lambda: prefers_stages(traced, graph, costs, device)
        ),
        processes=processes,
    )


def _scratch(graph: Graph) -> tuple[list[int], int]:
    """What libraries allocate for each node without XLA's knowledge, and the most."""
    scratch = [node_scratch(node) if graph.on_cpu else 0 for node in graph.nodes]
    return scratch, max(scratch, default=0)
