"""What every planner shares: judging actions, prefetching, and refusing a budget."""

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.errors import BudgetTooSmall
from poet_jax.core.graph import Graph
from poet_jax.core.in_place import replaceable
from poet_jax.core.plan import (
    Action,
    Budget,
    Compute,
    Free,
    PageIn,
    PageOut,
    Plan,
    Stages,
    Status,
)
from poet_jax.core.postpone import postpone
from poet_jax.core.program import (
    Instruction,
    Program,
    Run,
    lower_actions,
    moving,
    walk,
)
from poet_jax.core.simulate import Usage, alive_at_peak, simulate
from poet_jax.core.units import format_bytes, rounded_up
from poet_jax.planners.advice import finer, remedies

# A deadline is met up to what sums of seconds in another order differ by.
ROUNDING = 1 + 1e-9


def objective_of(usage: Usage, objective: str) -> float:
    """The usage's joules ("energy") or seconds ("time")."""
    return usage.joules if objective == "energy" else usage.seconds


def least_objective(graph: Graph, costs: Costs, objective: str) -> float:
    """Every node once, and nothing paged but what lives on storage and cannot wait in
    RAM for the next step: a lower bound on the objective of any plan."""
    read = [v for v in graph.stored.keys() - graph.successors if graph.readers[v]]
    landing = list(graph.landing)
    storage = costs.page_in_seconds[read].sum() + costs.page_out_seconds[landing].sum()
    slowed = costs.seconds.sum() + costs.contention * storage
    seconds = float(max(slowed, storage))
    if objective == "time":
        return seconds
    paging = costs.page_in_joules[read].sum() + costs.page_out_joules[landing].sum()
    return float(costs.joules.sum() + paging) + costs.static_watts * seconds


def fits(usage: Usage, budget: Budget) -> bool:
    return (
        usage.peak_bytes <= budget.memory_bytes
        and (budget.seconds is None or usage.seconds <= budget.seconds * ROUNDING)
        and (budget.store_bytes is None or usage.store_bytes <= budget.store_bytes)
    )


def is_too_late(costs: Costs, budget: Budget) -> bool:
    """Whether the deadline is shorter than one pass over the nodes."""
    least = float(costs.seconds.sum())
    return budget.seconds is not None and least > budget.seconds * ROUNDING


@dataclasses.dataclass
class Judged:
    """Actions with what the simulator says of them."""

    actions: tuple[Action, ...]
    program: Program
    usage: Usage

    @property
    def graph(self) -> Graph:
        """What was planned, with what the plan keeps in RAM between steps."""
        return self.program.graph

    def plan(
        self,
        planner: str,
        since: float,
        *,
        objective: str = "energy",
        bound: float = 0.0,
        status: Status = Status.HEURISTIC,
        statistics: dict[str, int] | None = None,
    ) -> Plan:
        value = objective_of(self.usage, objective)
        return Plan(
            actions=self.actions,
            status=status,
            objective=value,
            bound=min(value, bound),
            planner=planner,
            solve_seconds=time.monotonic() - since,
            statistics=statistics or {},
            resident=self.graph.resident,
        )


def judge(graph: Graph, costs: Costs, actions: Iterable[Action]) -> Judged:
    """Lower and simulate `actions`."""
    actions = tuple(actions)
    program = lower_actions(graph, actions)
    return Judged(actions, program, simulate(program, costs))


def judge_plan(graph: Graph, costs: Costs, plan: Plan) -> Judged:
    """Lower and simulate `plan`, node by node."""
    return judge(graph.with_resident(plan.resident), costs, plan.actions)


def keep_everything(graph: Graph, costs: Costs) -> Judged:
    """Every node once, nothing repeated or paged but what lives on storage."""
    return judge(graph, costs, Stages.empty(graph).actions(graph))


def prefetch(costs: Costs, judged: Judged, budget: Budget) -> Judged:
    """Issue each page-in earlier, so early that it and those behind it are done when
    they are read, and free what goes to storage when it is there, where memory
    allows."""
    given, graph = judged, judged.graph
    if all(isinstance(x, Compute) for x in given.actions):
        return given
    if any(isinstance(x, Free) for x in given.actions):
        judged = judge(graph, costs, moving(given.actions))
    moved = judge(graph, costs, moving(_earlier(costs, judged, budget)))
    later = moved.usage.seconds > judged.usage.seconds
    if later or moved.usage.peak_bytes > budget.memory_bytes:
        moved = judged
    program = postpone(moved.program, costs, budget.memory_bytes)
    actions: list[Action] = []
    for moment in walk(program):
        x = moment.instruction
        actions += [x] if isinstance(x, Free) and moment.waits else moving([x])
    late = judge(graph, costs, actions)

    def worth(judged: Judged) -> tuple[bool, float]:
        return judged.usage.peak_bytes > budget.memory_bytes, judged.usage.seconds

    return min(given, moved, late, key=worth)


def _earlier(costs: Costs, judged: Judged, budget: Budget) -> list[Instruction]:
    """The instructions of a program with each page-in as early as it has to be and as
    memory allows. None overtakes another."""
    instructions = judged.program.instructions
    clock, latest = _latest_starts(instructions, costs)
    stays = [not isinstance(x, PageIn) for x in instructions]
    starts, live = np.array(clock)[stays], judged.usage.live_bytes[stays]
    starts = np.append(starts, clock[-1])
    gone: dict[int, int] = {}  # how many instructions stay before a value may come back
    keys, place, count = [], 0, 0  # of those that stay
    for row, x in enumerate(instructions):
        if not isinstance(x, PageIn):
            keys.append((count, True))
            count += 1
            if isinstance(x, Free | PageOut):
                gone[x.value] = count
            continue
        nbytes = int(costs.nbytes[x.value])
        in_time = np.searchsorted(starts[: count + 1], latest[x.value, row], "right")
        place = max(place, gone.get(x.value, 0), int(in_time) - 1)
        full = np.flatnonzero(live[place:count] + nbytes > budget.memory_bytes)
        place += int(full[-1]) + 1 if full.size else 0
        live[place:count] += nbytes
        keys.append((place, False))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return [instructions[row] for row in order]


def _latest_starts(
    instructions: Sequence[Instruction], costs: Costs
) -> tuple[list[float], dict[tuple[int, int], float]]:
    """When each instruction starts if nothing waits, and by (value, row) when a page-in
    has to start for that."""
    clock, now = [], 0.0
    for x in instructions:
        clock.append(now)
        if isinstance(x, Run):
            now += float(costs.seconds[list(x.nodes)].sum())
    latest = {}
    free_until = math.inf  # the storage lane, before what comes later
    for row in reversed(range(len(instructions))):
        match instructions[row]:
            case PageIn(value):
                free_until = min(clock[row], free_until)
                free_until -= float(costs.page_in_seconds[value])
                latest[value, row] = free_until
            case PageOut(value):
                start = free_until - float(costs.page_out_seconds[value])
                if start >= clock[row]:  # or the page-ins behind it go first
                    free_until = start
    return clock, latest


def budget_too_small(
    graph: Graph,
    costs: Costs,
    budget: Budget,
    smallest: Judged,
    planner: str,
    *,
    least_bytes: int | None = None,
    fastest: Plan | None = None,
    compiled_bytes: int = 0,
) -> BudgetTooSmall:
    """The error for a budget under that of `smallest`, the leanest plan of a planner.

    `least_bytes` is proven to be needed; by default the planner has no leaner plan.
    `fastest` is for a deadline that is missed: what fits without one, soonest.
    `compiled_bytes` is what that leanest plan needs by the compiler's own count.
    """
    peak, alive = alive_at_peak(smallest.program, costs, smallest.usage)
    node = "the start of the step" if peak is None else peak.name
    names = [graph.values[v].name for v in alive]
    largest = ", ".join(
        f"{graph.values[v].name} ({format_bytes(int(costs.nbytes[v]))})"
        for v in alive[:3]
    )
    planned = least = smallest.usage.peak_bytes
    proven = f"needs {least} bytes ({format_bytes(least)})"
    if least_bytes is None or least_bytes >= least:
        proven = f"{planner} {proven}"
    else:
        proven = f"The leanest plan that {planner} found {proven}"
        if 0 < least_bytes <= (compiled_bytes or least_bytes):
            proven += bounded(least_bytes)
    if compiled_bytes and compiled_bytes != planned:
        least = compiled_bytes
        proven += f", and compiled {least} bytes ({format_bytes(least)})"
    # Compiled, a plan may need less than it does by the simulator, and another too.
    bound = min(least, planned if least_bytes is None else least_bytes)
    exact = least == planned and bound >= planned
    limits = ""
    if budget.memory_bytes >= least:
        limits = (
            f", {smallest.usage.seconds:.3g} s and "
            f"{format_bytes(smallest.usage.store_bytes)} of storage"
        )
    problem = (
        f"{proven}{limits}, at {node!r}, where {largest} are among the {len(alive)} "
        "values alive"
    )
    wanted = f"a budget of at least {least}"
    seconds = None
    if fastest is not None:
        seconds = fastest.objective
        problem = (
            f"The fastest plan that {planner} found for that memory takes "
            f"{seconds:.6g} s, longer than that deadline, and none takes under "
            f"{fastest.bound:.6g} s"
        )
    elif is_too_late(costs, budget):
        seconds = float(costs.seconds.sum())
        problem = (
            f"Computing every node once takes {seconds:.6g} s, longer than that "
            "deadline"
        )
    if seconds is not None:
        wanted = f"Budget(seconds=...) of at least {rounded_up(seconds)}"
    elif limits:
        wanted = "more memory, seconds= or store_bytes="
    advice = [wanted, "a smaller batch", *remedies(graph, least, peak, alive)]
    if planner != "MilpPlanner":
        advice.append("poet_jax.MilpPlanner(), which may find a leaner plan")
    return BudgetTooSmall(
        f"A budget of {budget} is too small. {problem}.",
        tuple(advice),
        smallest_bytes=least,
        planned_bytes=planned,
        is_compiled=compiled_bytes > 0,
        exact=exact,
        least_bytes=least if exact else int(bound),
        node=node,
        values=tuple(names),
        plan=smallest.plan(
            planner,
            time.monotonic(),
            bound=least_objective(graph, costs, "energy"),
        ),
        finer={} if limits else finer(graph, planned, peak, alive, budget.memory_bytes),
    )


def bounded(least_bytes: int) -> str:
    """What an error says of a bound on the memory of plans."""
    return f", and by the model no plan in stages needs under {least_bytes}"


def floor_bytes(graph: Graph, costs: Costs) -> int:
    """No plan needs less: pinned values and what each node reads, writes and works in,
    where it cannot write over what it reads."""
    nbytes = costs.nbytes
    pinned = sum(int(nbytes[v]) for v in graph.pinned)

    def total(values: Iterable[int]) -> int:
        return pinned + sum(int(nbytes[v]) for v in set(values) - graph.pinned)

    nodes: Sequence[int] = [
        total({*node.reads, *node.writes} - {old for old, _ in replaceable(graph)[n]})
        + int(costs.workspace_bytes[n])
        for n, node in enumerate(graph.nodes)
    ]
    return max(*nodes, total(graph.initial), total(graph.returned), 0)
