"""Budgets, actions and plans."""

import abc
import dataclasses
import enum
import glob
import html
import json
import math
import numbers
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from poet_jax.core.costs import Costs
from poet_jax.core.errors import PlanInvalid
from poet_jax.core.graph import Graph
from poet_jax.core.representation import brief, html_table
from poet_jax.core.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_percent,
)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a step may use.

    Attributes:
      memory_bytes: bytes of array data alive at any instant.
      seconds: deadline of the step, storage time included; None for none.
      store_bytes: bytes on storage, state that lives there included; None for all that
        the device has (no limit where a planner is called by itself).
    """

    memory_bytes: int
    seconds: float | None = None
    store_bytes: int | None = None

    def __post_init__(self):
        least_of = {"memory_bytes": 1, "seconds": 1e-300, "store_bytes": 0}
        for name, least in least_of.items():
            value: Any = getattr(self, name)
            if value is None and name != "memory_bytes":
                continue
            number = not isinstance(value, bool) and isinstance(value, numbers.Real)
            if not (number and value >= least):  # type: ignore[operator]
                examples = {"memory_bytes": 64 * 2**20, name: 2**30}
                given = ", ".join(f"{n}={x}" for n, x in examples.items())
                raise ValueError(
                    f"`{name}` of a Budget must be a positive number, got {value!r}; "
                    f"use for example Budget({given})"
                )
            kind = float if name == "seconds" or value == math.inf else int
            object.__setattr__(self, name, kind(value))  # type: ignore[arg-type]

    def on_storage_of(self, store_bytes: float, graph: Graph) -> "Budget":
        """This budget, or if it has no limit on storage, one with `store_bytes`, unless
        all values of `graph` have room there."""
        most_bytes = sum(value.nbytes for value in graph.values)
        if self.store_bytes is not None or store_bytes >= most_bytes:
            return self
        return dataclasses.replace(self, store_bytes=int(store_bytes))

    def __str__(self) -> str:
        parts = [format_bytes(self.memory_bytes)]
        if self.seconds is not None:
            parts.append(f"{self.seconds:g} s")
        if self.store_bytes is not None:
            parts.append(f"{format_bytes(self.store_bytes)} of storage")
        return ", ".join(parts)


BudgetLike = Budget | int | float | str


def is_percentage(budget: BudgetLike) -> bool:
    """Whether a budget is a percentage of what keep-all needs."""
    return isinstance(budget, str) and budget.strip().endswith("%")


def check_budget(budget: BudgetLike) -> None:
    """Raise ValueError unless it is "device", or `parse_budget` reads it."""
    if budget != "device":
        parse_budget(budget)


def parse_budget(budget: BudgetLike, keep_all_bytes: int | None = None) -> Budget:
    """A `Budget` from bytes, `"64MiB"`, or `"30%"` of `keep_all_bytes`.

    Without `keep_all_bytes` a percentage is only checked. One of a few bytes is at
    least one. Raises ValueError.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, str):
        if is_percentage(budget):
            fraction = parse_percent(budget)
            nbytes = fraction * (keep_all_bytes or 2**30)
            return Budget(max(1, nbytes + 1e-6))  # type: ignore[arg-type]
        try:
            nbytes = parse_bytes(budget)
        except ValueError as error:
            raise ValueError(
                f'{error} Use "device" for the memory that the device has free.'
            ) from None
        return Budget(nbytes)
    if isinstance(budget, numbers.Real):
        return Budget(budget)  # type: ignore[arg-type]
    raise ValueError(
        "A budget must be a Budget, a number of bytes, a size, or a percentage of what "
        f'keep-all needs, got a {type(budget).__name__}; use for example "64MiB"'
    )


@dataclasses.dataclass(frozen=True)
class Compute:
    """Run a node: everything it reads is in RAM."""

    node: int


@dataclasses.dataclass(frozen=True)
class PageOut:
    """Start a copy of a value to storage; the value stays in RAM."""

    value: int


@dataclasses.dataclass(frozen=True)
class PageIn:
    """Take the RAM for a value and start its copy back from storage."""

    value: int


@dataclasses.dataclass(frozen=True)
class Free:
    """Drop a value from RAM; waits for its copy to storage."""

    value: int


Action = Compute | PageOut | PageIn | Free


class Status(enum.Enum):
    """How good a plan is; the value is a sentence to print."""

    OPTIMAL = "Optimal: no staged plan for this order of nodes costs less."
    FEASIBLE = "Feasible: within the budget; how far from optimal is the gap."
    HEURISTIC = "Heuristic: within the budget, with no claim to be the best."


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do, and how good that is.

    Attributes:
      actions: every `Compute`, `PageOut` and `PageIn` in order. `lower` adds the frees;
        a value whose copy to storage need not be waited for at once has its `Free`.
      status: what is proven.
      objective: the whole step's joules, or seconds, under the rules of `simulate`.
      bound: no staged plan (see `Stages`) for its `order` has a lower objective.
      gap: (objective - bound) / objective.
      planner: who made it.
      solve_seconds: how long that took.
      statistics: numbers of the solve: binaries, rows, rounds.
      resident: values on storage that are in RAM, too, from one step to the next.
    """

    actions: tuple[Action, ...]
    status: Status
    objective: float
    bound: float
    planner: str
    solve_seconds: float = 0.0
    statistics: dict[str, int] = dataclasses.field(default_factory=dict)
    resident: frozenset[int] = frozenset()

    __repr__ = brief

    @property
    def order(self) -> tuple[int, ...]:
        """The nodes in the order in which they run first: the graph's, mostly."""
        computes = (x.node for x in self.actions if isinstance(x, Compute))
        return tuple(dict.fromkeys(computes))

    @property
    def gap(self) -> float:
        return (self.objective - self.bound) / self.objective if self.objective else 0.0

    def __str__(self) -> str:
        return (
            f"plan by {self.planner} in {self.solve_seconds:.1f} s: {self._counts()}\n"
            f"  objective {self.objective:.6g}, bound {self.bound:.6g}, "
            f"gap {self.gap:.2%}. {self.status.value}"
        )

    def _counts(self) -> str:
        kinds = ((Compute, "compute"), (PageOut, "page-out"), (PageIn, "page-in"))
        return ", ".join(
            format_count(sum(type(action) is kind for action in self.actions), word)
            for kind, word in kinds
        )

    def _repr_html_(self) -> str:
        rows = [
            ("actions", self._counts()),
            ("objective", f"{self.objective:.6g}"),
            ("bound", f"{self.bound:.6g}"),
            ("gap", f"{self.gap:.2%}"),
            ("planned in", format_seconds(self.solve_seconds)),
        ]
        table = html_table(("plan", self.planner), rows)
        return f"{table}<p>{html.escape(self.status.value)}</p>"


class Planner(Protocol):
    """Decides what to keep, rematerialise or page. Raises BudgetTooSmall.

    Any function of these arguments is one. `BasePlanner` says more of itself.
    """

    def __call__(self, graph: Graph, costs: Costs, budget: Budget) -> Plan: ...


class BasePlanner(abc.ABC):
    """What a planner says of itself. Of a function these are the defaults.

    Attributes:
      objective: what its plans minimise, "energy" (joules) or "time" (seconds).
      solver: of its programs, if it solves any: "CBC" or "HIGHS".
      keep, never_page, never_remat: patterns of value names on which its plans depend.
    """

    objective: str = "energy"
    solver: str = "CBC"
    keep: tuple[str, ...] = ()
    never_page: tuple[str, ...] = ()
    never_remat: tuple[str, ...] = ()

    @abc.abstractmethod
    def __call__(
        self, graph: Graph, costs: Costs, budget: Budget, start: Plan | None = None
    ) -> Plan:
        """A plan; `start`, an earlier one that may fit, is a hint. Raises
        BudgetTooSmall."""

    def hastened(self) -> "BasePlanner":
        """This planner with half the time, for a plan that has to be made again."""
        return self

    @staticmethod
    def of(planner: Planner) -> "BasePlanner":
        """`planner` itself, or one that calls it and has the defaults."""
        return planner if isinstance(planner, BasePlanner) else _Called(planner)


class _Called(BasePlanner):
    """A function as a planner."""

    def __init__(self, function: Planner):
        self.function = function

    def __call__(
        self, graph: Graph, costs: Costs, budget: Budget, start: Plan | None = None
    ) -> Plan:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return checked(graph, self.function(graph, costs, budget), name)


def checked(graph: Graph, plan: Any, name: str) -> Plan:
    """`plan`, which `name` returned. Raises PlanInvalid if it cannot be of `graph`."""
    if (problem := _problem(graph, plan)) is None:
        return plan
    raise PlanInvalid(
        f"{name} returned {problem}. Return a poet_jax.Plan as poet_jax.greedy does: "
        "a tuple of Compute, PageOut, PageIn and Free, a poet_jax.Status, and numbers."
    )


_KINDS = {"actions": tuple, "status": Status, "resident": frozenset}
_KINDS |= {"objective": numbers.Real, "bound": numbers.Real, "statistics": dict}


def _problem(graph: Graph, plan: Any) -> str | None:
    if not isinstance(plan, Plan):
        return f"a {type(plan).__name__}"
    for field, kind in _KINDS.items():
        if not isinstance(value := getattr(plan, field), kind):
            return f"a Plan whose `{field}` is a {type(value).__name__}"
    nodes, values = len(graph.nodes), len(graph.values)
    counts = {Compute: nodes, PageOut: values, PageIn: values, Free: values}
    for x in plan.actions:
        number = x.node if type(x) is Compute else getattr(x, "value", -1)
        whole = hasattr(number, "__index__")
        if not whole or not 0 <= number < counts.get(type(x), 0):
            return f"a Plan with {x!r} for a graph of {nodes} nodes, {values} values"
    if unknown := plan.resident - graph.successors.keys():
        return f"a Plan with the resident {set(unknown)}, not in graph.successors"
    return None


def plan_to_dict(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Everything that `plan_from_dict` needs, as JSON types."""
    return {
        "graph": graph.fingerprint,
        "actions": [[type(x).__name__, *vars(x).values()] for x in plan.actions],
        "status": plan.status.name,
        "objective": plan.objective,
        "bound": plan.bound,
        "planner": plan.planner,
        "solve_seconds": plan.solve_seconds,
        "statistics": plan.statistics,
        "resident": sorted(plan.resident),
    }


def plan_from_dict(graph: Graph, data: dict[str, Any]) -> Plan:
    """The plan saved for `graph`. Raises PlanInvalid if it is another graph's."""
    if data["graph"] != graph.fingerprint:
        raise PlanInvalid(
            f"A plan for graph {data['graph']} was loaded for graph {graph.fingerprint}"
            ". A plan fits only the function, shapes and dtypes that it was made for. "
            "Plan again with Scheduled.plan(...), or load it where it was saved."
        )
    kinds = {kind.__name__: kind for kind in (Compute, PageOut, PageIn, Free)}
    return Plan(
        actions=tuple(kinds[kind](number) for kind, number in data["actions"]),
        status=Status[data["status"]],
        objective=data["objective"],
        bound=data["bound"],
        planner=data["planner"],
        solve_seconds=data["solve_seconds"],
        statistics=data["statistics"],
        resident=frozenset(data["resident"]),
    )


def save_json(path: str | os.PathLike, data: dict[str, Any]) -> None:
    """Write `data` beside `path` and move it there, so that no half a file is left.

    What a process that was killed left of the same file goes.
    """
    path = pathlib.Path(path)
    for part in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        if not _is_running(part.name.split(".")[-2]):
            part.unlink(missing_ok=True)
    temporary = f"{path}.{os.getpid()}.part"
    try:
        with open(temporary, "w") as file:
            json.dump(data, file)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except OSError:
        return True  # another user's
    return True


@dataclasses.dataclass
class Stages:
    """A plan by base stage, the form in which planners decide: a staged plan.

    Stage t is what happens from just after base node t-1 to base node t itself; stage N
    is the end of the step, where the outputs are needed. In a stage each node runs at
    most once, in base order, and each value arrives at most once: kept from before,
    produced or paged in.

    Attributes:
      reruns: [N+1] nodes run again in each stage, in base order.
      page_ins: [N+1] values paged in, each just before its first read there.
      page_outs: values on storage: written there once, right after they are produced,
        or there from the start.
    """

    reruns: list[set[int]]
    page_ins: list[set[int]]
    page_outs: set[int]

    @classmethod
    def empty(cls, graph: Graph) -> "Stages":
        """Every node once; what is only on storage is paged in for its first read."""
        stages = range(len(graph.nodes) + 1)
        page_ins: list[set[int]] = [set() for _ in stages]
        for value in graph.stored.keys() - graph.resident:
            if graph.readers[value]:
                page_ins[graph.readers[value][0]].add(value)
        page_outs = {*graph.stored, *graph.landing}
        return cls([set() for _ in stages], page_ins, page_outs)

    @classmethod
    def of(cls, graph: Graph, actions: Iterable[Action]) -> "Stages":
        """The staged plan of `actions`; what a stage does is put in its own order."""
        stages = cls.empty(graph)
        for page_ins in stages.page_ins:
            page_ins.clear()
        stage = 0
        for action in actions:
            match action:
                case Compute(number):
                    if number == stage:
                        stage += 1
                    else:
                        stages.reruns[stage].add(number)
                case PageIn(value):
                    stages.page_ins[stage].add(value)
                case PageOut(value):
                    stages.page_outs.add(value)
        return stages

    def actions(self, graph: Graph) -> tuple[Action, ...]:
        """The actions in order; reruns come in base order within their stage."""
        outs = self.page_outs - graph.stored.keys()
        actions: list[Action] = [PageOut(v) for v in graph.initial if v in outs]
        for stage, reruns in enumerate(self.reruns):
            waiting = set(self.page_ins[stage])

            def page_in(reads: Sequence[int], waiting: set[int] = waiting) -> None:
                for value in reads:
                    if value in waiting:
                        waiting.remove(value)
                        actions.append(PageIn(value))

            for node in sorted(reruns):
                page_in(graph.nodes[node].reads)
                actions.append(Compute(node))
            if stage < len(graph.nodes):
                page_in(graph.nodes[stage].reads)
                page_in(sorted(waiting))
                actions.append(Compute(stage))
                actions.extend(
                    PageOut(v) for v in graph.nodes[stage].writes if v in self.page_outs
                )
            else:
                page_in(sorted(waiting))
        return tuple(actions)
