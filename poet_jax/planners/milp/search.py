"""`MilpPlanner`: keep, rematerialise or page every value at the least cost.

A search asks its sources in turn for plans and bounds, until they are as close as the
gap or time is up. Every plan is repaired, prefetched and judged by the simulator.
"""

import dataclasses
import fnmatch
import itertools
import logging
import numbers
import time
from collections.abc import Iterable, Iterator, Sequence

from poet_jax.core import progress
from poet_jax.core.costs import Costs
from poet_jax.core.errors import BudgetTooSmall
from poet_jax.core.graph import Graph
from poet_jax.core.plan import BasePlanner, Budget, Plan, Status
from poet_jax.planners.evict import improving
from poet_jax.planners.milp.bounds import Bounds
from poet_jax.planners.milp.exact import Exact
from poet_jax.planners.milp.neighbourhoods import Neighbourhoods
from poet_jax.planners.milp.rounds import MANY_NODES, Rounds
from poet_jax.planners.milp.solver import check_solver
from poet_jax.planners.milp.state import Source, State
from poet_jax.planners.planner import (
    Judged,
    budget_too_small,
    floor_bytes,
    is_too_late,
    judge_plan,
    keep_everything,
)

logger = logging.getLogger("poet_jax")

# Up to this many nodes `Exact` is solved; beyond, `Rounds`.
EXACT_NODES = 32


@dataclasses.dataclass(frozen=True)
class MilpPlanner(BasePlanner):
    """The cheapest mix of keeping, rematerialising and paging, with a proven bound.

    Attributes:
      solver: "CBC" or "HIGHS" (`pip install "poet_jax[highs]"`).
      time_limit_seconds: of the whole planning, heuristics included; where no plan
        meets a deadline, a quarter more goes to the fastest one.
      gap: relative distance from the bound at which a plan counts as optimal.
      objective: "energy" (joules) or "time" (seconds).
      remat, paging: False forbids that means.
      keep, never_page, never_remat: patterns of value names, as `fnmatch` reads them
        (`"*/attention/*"`); matching values are neither paged nor rematerialised, not
        paged, or not rematerialised. A node that writes such a value runs once.
      progress: whether a line on the terminal shows how far the planning is.

    Its call raises BudgetTooSmall, where it may take a quarter of the limit more to
    name the smallest budget that works (and as long again for heuristics if it was not
    sure before that nothing fits), and ValueError for a pattern that matches nothing.
    Interrupted by Ctrl-C it returns the best plan that it has, or a heuristic's.
    """

    solver: str = "CBC"
    time_limit_seconds: float = 6.0
    gap: float = 1e-4
    objective: str = "energy"
    remat: bool = True
    paging: bool = True
    keep: tuple[str, ...] = ()
    never_page: tuple[str, ...] = ()
    never_remat: tuple[str, ...] = ()
    progress: bool = dataclasses.field(default=True, repr=False, compare=False)

    def __post_init__(self):
        check_solver(self.solver)
        if self.objective not in ("energy", "time"):
            raise ValueError(
                "`objective` must be 'energy' or 'time', got "
                f"{self.objective!r}; use objective='energy'"
            )
        seconds, gap = self.time_limit_seconds, self.gap
        if not (isinstance(seconds, numbers.Real) and seconds > 0):
            raise ValueError(
                f"`time_limit_seconds` must be more than 0, got {seconds!r}; use for "
                "example time_limit_seconds=6.0"
            )
        if not (isinstance(gap, numbers.Real) and gap >= 0):
            raise ValueError(
                f"`gap` must be 0 or more, got {gap!r}; use for example gap=1e-4"
            )
        for name in ("keep", "never_page", "never_remat"):
            patterns = getattr(self, name)
            single = isinstance(patterns, str)
            object.__setattr__(self, name, (patterns,) if single else tuple(patterns))

    def __call__(
        self, graph: Graph, costs: Costs, budget: Budget, start: Plan | None = None
    ) -> Plan:
        """A plan that costs no more than `start`, one of this planner's, if that
        fits."""
        search = _Search(self, self.restrict(graph), costs, budget)
        if start is not None and list(start.order) == sorted(start.order):
            judged = judge_plan(search.state.graph, costs, start)
            search.state.consider(search.state.repaired(judged))
        search.run()
        return search.plan()

    def hastened(self) -> "MilpPlanner":
        seconds = self.time_limit_seconds / 2
        return dataclasses.replace(self, time_limit_seconds=seconds)

    def restrict(self, graph: Graph) -> Graph:
        """`graph` with the planner's switches and pins as what its parts allow."""
        kept = _matching(graph, "keep", self.keep)
        in_ram = kept | _matching(graph, "never_page", self.never_page)
        once = kept | _matching(graph, "never_remat", self.never_remat)
        at_home = {*graph.stored, *graph.landing}
        pageable = [
            value.pageable and (v in at_home or (self.paging and v not in in_ram))
            for v, value in enumerate(graph.values)
        ]
        repeatable = [
            node.repeatable and self.remat and once.isdisjoint(node.writes)
            for node in graph.nodes
        ]
        same_values = pageable == [value.pageable for value in graph.values]
        if same_values and repeatable == [node.repeatable for node in graph.nodes]:
            return graph
        return dataclasses.replace(
            graph,
            values=tuple(
                dataclasses.replace(value, pageable=is_pageable)
                for value, is_pageable in zip(graph.values, pageable, strict=True)
            ),
            nodes=tuple(
                dataclasses.replace(node, repeatable=is_repeatable)
                for node, is_repeatable in zip(graph.nodes, repeatable, strict=True)
            ),
        )


def _matching(graph: Graph, pin: str, patterns: Iterable[str]) -> set[int]:
    """The values that a pattern names; ValueError for one that names none."""
    found = set()
    for pattern in patterns:
        named = {
            v
            for v, value in enumerate(graph.values)
            if fnmatch.fnmatchcase(value.name, pattern)
        }
        if not named:
            names = ", ".join(repr(value.name) for value in graph.values[:3])
            raise ValueError(
                f"{pin}={pattern!r} matches no value of the graph. Its "
                f"{len(graph.values)} values are {names} and so on. Print "
                "Scheduled.plan(*args).graph for all names."
            )
        found |= named
    return found


class _Evictions:
    """A source: what evicting with both means comes to, and with each alone, by the
    planner's objective and by energy; in a graph of many nodes, no more of them once a
    program led to a plan."""

    share = 1 / 4

    def __init__(self, state: State, budget: Budget):
        self.few = len(state.graph.nodes) <= MANY_NODES
        self._answers = self._evict(state, budget)

    def __iter__(self) -> Iterator[tuple[float, Judged | None]]:
        return self._answers  # wherever they go on

    def _evict(
        self, state: State, budget: Budget
    ) -> Iterator[tuple[float, Judged | None]]:
        planner = state.planner
        parts = state.graph, state.costs, budget
        objectives = dict.fromkeys((planner.objective, "energy"))
        remat, paging = planner.remat, planner.paging
        means = sorted({(remat, paging), (remat, False), (False, paging)}, reverse=True)
        for objective, allowed in itertools.product(objectives, means):
            for judged in improving(*parts, objective, *allowed):
                if state.solved and state.best is not None and not self.few:
                    return
                yield 0.0, judged


def ask(state: State, sources: Sequence[Source]) -> None:
    """Ask sources in turn for plans and bounds until the gap or the time is reached, or
    none says more."""
    asked = [(source.share, iter(source)) for source in sources]
    while asked and not state.is_over():
        for turn in tuple(asked):
            share, answers = turn
            state.take_turn(share)
            for bound, judged in answers:
                state.raise_bound(bound)
                if judged is not None:
                    state.consider(judged)
                if state.is_over():
                    return
                if state.seconds_left() <= 0:
                    break
            else:
                asked.remove(turn)


class _Search:
    """One call of the planner.

    Args:
      planner, graph, costs, budget: what is asked.
    """

    def __init__(
        self, planner: MilpPlanner, graph: Graph, costs: Costs, budget: Budget
    ):
        self.since = time.monotonic()
        self.planner, self.budget = planner, budget
        limit = planner.time_limit_seconds
        self.state = state = State(planner, graph, costs, budget, limit)
        self.evictions = _Evictions(state, budget)
        if graph.successors:
            resident = graph.with_resident(graph.successors)
            state.consider(keep_everything(resident, costs))

    def is_hopeless(self) -> bool:
        """Whether no plan can fit, whatever it does."""
        least_bytes = floor_bytes(self.state.graph, self.state.costs)
        below = self.budget.memory_bytes < least_bytes
        return below or is_too_late(self.state.costs, self.budget)

    def run(self) -> None:
        """Look for plans until the gap or the time is reached."""
        state = self.state
        if state.is_optimal() or self.is_hopeless():
            return
        try:
            with progress.line(state.__str__, self.planner.progress):
                ask(state, self.sources(state))
                self.evict()
            if state.best is not None and not (state.is_optimal() or state.solved):
                solver = self.planner.solver
                logger.warning("%s found no plan; the best heuristic's is used", solver)
        except KeyboardInterrupt:
            # It may have been interrupted, too.
            self.evictions = _Evictions(state, self.budget)
            self.evict()
            if state.best is None:
                raise
            state.statistics["interrupted"] = 1
            logger.warning("planning was interrupted: the best plan so far is used")

    def sources(self, state: State) -> list[Source]:
        if len(state.graph.nodes) <= EXACT_NODES:
            return [self.evictions, Exact(state)]
        if state.budget is None:
            return [Rounds(state), self.evictions]
        bounds = Bounds(state)
        rounds = Rounds(state, bounds)
        plans = [self.evictions, rounds]
        if not self.evictions.few:
            plans.reverse()
        return [*plans, Neighbourhoods(state), bounds]

    def evict(self) -> None:
        """If no plan fits yet: the leanest one with evictions until it does, or a
        heuristic's, in as much time again at most."""
        state = self.state
        state.end = time.monotonic() + self.planner.time_limit_seconds
        if state.best is None and state.leanest is not state.baseline:
            state.consider(state.repaired(state.leanest))
        answers = iter(self.evictions)
        while state.best is None and state.end > time.monotonic():
            if (answer := next(answers, None)) is None:
                return
            if answer[1] is not None:
                state.consider(answer[1])

    def plan(self) -> Plan:
        """The best plan. Raises BudgetTooSmall if there is none."""
        state, fastest = self.state, self.fastest()
        if state.best is None:
            error = self.too_small(fastest)  # the leanest plan may be within the budget
            if state.best is None:
                raise error
        return state.best.plan(
            "MilpPlanner",
            self.since,
            objective=self.planner.objective,
            bound=state.bound,
            status=Status.OPTIMAL if state.is_optimal() else Status.FEASIBLE,
            statistics=state.statistics,
        )

    def seconds_left(self) -> float:
        """For what the error of a budget says: a quarter of the limit, or more."""
        limit = self.planner.time_limit_seconds
        return max(limit - (time.monotonic() - self.since), limit / 4)

    def fastest(self) -> Plan | None:
        """If no plan meets the deadline: the fastest for the same memory, considered.

        Raises BudgetTooSmall if there is none for that memory.
        """
        if self.state.best is not None or self.budget.seconds is None:
            return None
        planner = dataclasses.replace(
            self.planner, objective="time", time_limit_seconds=self.seconds_left()
        )
        budget = dataclasses.replace(self.budget, seconds=None)
        graph, costs = self.state.graph, self.state.costs
        search = _Search(planner, graph, costs, budget)
        search.run()
        plan = search.plan()
        self.state.consider(judge_plan(graph, costs, plan))
        return plan

    def too_small(self, fastest: Plan | None) -> BudgetTooSmall:
        """The error with the leanest plan: proven if it reaches a lower bound on
        bytes."""
        graph, costs = self.state.graph, self.state.costs
        lean = State(self.planner, graph, costs, None, self.seconds_left())
        lean.consider(self.state.leanest)
        ask(lean, self.sources(lean))
        self.state.consider(lean.leanest)
        return budget_too_small(
            graph,
            costs,
            self.budget,
            lean.leanest,
            "MilpPlanner",
            least_bytes=int(lean.bound),
            fastest=fastest,
        )
