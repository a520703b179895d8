"""The sparse MILP: keep, rematerialise or page every value at the least cost.

Small graphs are solved exactly by `Exact`, larger ones by `Rounds`; every plan on the
way is repaired, prefetched and judged by the simulator.
"""

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from poet_jax.core import progress
from poet_jax.core.costs import Costs
from poet_jax.core.errors import BudgetTooSmall
from poet_jax.core.graph import Graph
from poet_jax.core.plan import BasePlanner, Budget, Plan, Status
from poet_jax.core.units import format_count, format_joules, format_seconds
from poet_jax.planners.evict import evict
from poet_jax.planners.milp.bounds import Bounds
from poet_jax.planners.milp.exact import Exact
from poet_jax.planners.milp.neighbourhoods import Neighbourhoods
from poet_jax.planners.milp.rounds import Rounds
from poet_jax.planners.milp.solver import TOGETHER, check_solver
from poet_jax.planners.planner import (
    Judged,
    budget_too_small,
    fits,
    floor_bytes,
    is_too_late,
    judge_plan,
    keep_everything,
    least_objective,
    objective_of,
    prefetch,
)
from poet_jax.planners.repair import evictions, refill

logger = logging.getLogger("poet_jax")

# Up to this many nodes `Exact` is solved; beyond, `Rounds`.
EXACT_NODES = 32

# If the best plan costs more than this times the bound, half of the time is kept for
# choosing parts of it anew.
WIDE = 1.001

# So much of the time goes to a better bound alone, at last.
PROVING = 1 / 10

# Once a round ran out of time, so many of the cuts that bound most are among its own.
FIRST = 2

# Beyond so many nodes heuristics take longer than `Rounds`, and are asked only if that
# finds no plan, and for all means together.
MANY_NODES = 300


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
    name the smallest budget that works (and some seconds for thousands of nodes, or as
    long again for heuristics if it was not sure before that nothing fits), and
    ValueError for a pattern that matches nothing. Interrupted by Ctrl-C it returns the
    best plan that it has, or a heuristic's.
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
                f"MilpPlanner was asked for objective={self.objective!r}. It knows "
                "'energy' and 'time'. Type objective='energy'."
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
        search = _Search(self, self.restrict(graph), costs, budget, start)
        search.run()
        return search.plan()

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
                f"MilpPlanner was asked for {pin}={pattern!r}, which no value of the "
                f"graph is called. Its {len(graph.values)} values are called {names} "
                "and so on. Print Scheduled.plan(*args).graph for all names."
            )
        found |= named
    return found


class _Search:
    """One call of the planner: an incumbent that the simulator accepts, and a bound.

    Args:
      planner, graph, costs, budget: what is asked.
      start: a plan to begin with, if it is in this order of nodes.
    """

    def __init__(
        self,
        planner: MilpPlanner,
        graph: Graph,
        costs: Costs,
        budget: Budget,
        start: Plan | None = None,
    ):
        self.planner, self.graph = planner, graph
        self.costs, self.budget = costs, budget
        self.since = time.monotonic()
        self.limit_seconds = planner.time_limit_seconds
        self.bound = least_objective(graph, costs, planner.objective)
        self.floor_bytes = floor_bytes(graph, costs)
        self.best: Judged | None = None
        self.solver_found = False  # a plan, however good
        self.bounds = Bounds(graph, costs, budget, planner)
        self.evictions: dict[tuple[bool, bool], Judged] = {}  # by (remat, paging)
        self.baseline = self.leanest = keep_everything(graph, costs)
        self.kept_seconds = 0.0  # for what comes after the rounds
        self.statistics: dict[str, int] = {}
        self.consider(self.baseline)
        if graph.successors:
            resident = graph.with_resident(graph.successors)
            self.consider(keep_everything(resident, costs))
        if start is not None and list(start.order) == sorted(start.order):
            self.consider_repaired(judge_plan(graph, costs, start))

    def seconds_left(self) -> float:
        return max(1.0, self.limit_seconds - (time.monotonic() - self.since))

    def value(self, judged: Judged) -> float:
        return objective_of(judged.usage, self.planner.objective)

    def consider(self, judged: Judged) -> None:
        if fits(judged.usage, self.budget) and (
            self.best is None or self.value(judged) < self.value(self.best)
        ):
            self.best = judged

    def least(self) -> float:
        """The objective of the best plan; infinite without one."""
        return math.inf if self.best is None else self.value(self.best)

    def is_optimal(self) -> bool:
        if self.best is None:
            return False
        return self.least() - self.bound <= self.planner.gap * abs(self.least())

    def is_wide(self) -> bool:
        """Whether there is much between the best plan and the bound."""
        return self.least() > WIDE * self.bound

    def is_hopeless(self) -> bool:
        """Whether no plan can fit, whatever it does."""
        below = self.budget.memory_bytes < self.floor_bytes
        return below or is_too_late(self.costs, self.budget)

    def __str__(self) -> str:
        """For the progress line."""
        energy = self.planner.objective == "energy"
        show = format_joules if energy else format_seconds
        found = "no plan yet"
        if self.best is not None:
            value = self.value(self.best)
            found = f"{show(value)}, gap {(value - self.bound) / (value or 1):.2%}"
        left = self.planner.time_limit_seconds - (time.monotonic() - self.since)
        return (
            f"planning {format_count(len(self.graph.nodes), 'node')}: {found}, bound "
            f"{show(self.bound)}, {max(left, 0.0):.0f} s left"
        )

    def run(self) -> None:
        """Look for plans until the gap or the time is reached."""
        try:
            with progress.line(self.__str__, self.planner.progress):
                if not (self.is_optimal() or self.is_hopeless()):
                    self.search()
        except KeyboardInterrupt:
            if self.best is None:
                self.heuristics()
            if self.best is None:
                raise
            self.statistics["interrupted"] = 1
            logger.warning("planning was interrupted: the best plan so far is used")

    def plan(self) -> Plan:
        """The best plan. Raises BudgetTooSmall if there is none."""
        fastest = self.fastest()
        if self.best is None:
            error = self.too_small(fastest)  # the leanest plan may be within the budget
            if self.best is None:
                raise error
        return self.best.plan(
            "MilpPlanner",
            self.since,
            objective=self.planner.objective,
            bound=self.bound,
            status=Status.OPTIMAL if self.is_optimal() else Status.FEASIBLE,
            statistics=self.statistics,
        )

    def fastest(self) -> Plan | None:
        """If no plan meets the deadline: the fastest for the same memory, considered.

        Raises BudgetTooSmall if there is none for that memory.
        """
        if self.best is not None or self.budget.seconds is None:
            return None
        limit = self.planner.time_limit_seconds
        planner = dataclasses.replace(
            self.planner,
            objective="time",
            time_limit_seconds=max(self.seconds_left(), limit / 4),
        )
        budget = dataclasses.replace(self.budget, seconds=None)
        search = _Search(planner, self.graph, self.costs, budget)
        search.run()
        plan = search.plan()
        self.consider(judge_plan(self.graph, self.costs, plan))
        return plan

    def search(self) -> None:
        """Heuristics, then programs; the other way round for many nodes."""
        many = len(self.graph.nodes) > MANY_NODES
        if not many:
            self.heuristics()
        if not self.is_optimal():
            self.solve()
            if many and self.best is None:
                self.limit_seconds *= 2
                self.heuristics(lambda: self.seconds_left() <= 1.0)
            if self.best is not None and not self.solver_found:
                solver = self.planner.solver
                logger.warning("%s found no plan; the best heuristic's is used", solver)

    def heuristics(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Evictions with each means alone and both, for an incumbent to start from; no
        more of them once they have one and took a quarter of the time."""
        enough = 0.75 * self.limit_seconds
        for remat, paging in self.modes():
            if self.best is not None and self.seconds_left() < enough:
                return
            self.consider_repaired(self.evicted(remat, paging, is_over))

    def evicted(
        self, remat: bool, paging: bool, is_over: Callable[[], bool] = lambda: False
    ) -> Judged:
        """What `evict` finds, asked once; again if it was over before it was done."""
        if (remat, paging) in self.evictions:
            return self.evictions[remat, paging]
        judged = evict(
            self.graph,
            self.costs,
            self.budget,
            remat=remat,
            paging=paging,
            objective=self.planner.objective,
            is_over=is_over,
        )
        if not is_over():
            self.evictions[remat, paging] = judged
        if judged.usage.peak_bytes < self.leanest.usage.peak_bytes:
            self.leanest = judged
        return judged

    def modes(self) -> list[tuple[bool, bool]]:
        """The (remat, paging) to try: both, and each alone."""
        remat, paging = self.planner.remat, self.planner.paging
        if len(self.graph.nodes) > MANY_NODES:
            return [(remat, paging)]
        return sorted({(remat, paging), (remat, False), (False, paging)}, reverse=True)

    def solve(self) -> None:
        if len(self.graph.nodes) > EXACT_NODES:
            self.solve_by_cuts()
            return
        for bound, judged in self.exact(self.budget):
            self.learn(bound, judged)
            if self.is_optimal():
                return

    def learn(self, bound: float, judged: Judged | None) -> None:
        """What a program says."""
        self.raise_bound(bound)
        if judged is not None:
            self.solver_found = True
            self.consider_repaired(judged)

    def solve_by_cuts(self) -> None:
        """Solve with cuts added where plans exceed the budget, until one does not, and
        choose parts of the best plan anew, and prove it; then all once more in the time
        left."""
        rounds = self.rounds(self.budget)
        proving = PROVING * self.planner.time_limit_seconds
        for kept in (self.limit_seconds / 2, 0.0):
            self.kept_seconds = max(min(kept, self.seconds_left() / 2), proving)
            self.solve_rounds(rounds)
            if self.is_optimal() or self.best is None:
                return
            self.kept_seconds = proving
            self.improve(rounds.cuts)
            if self.is_optimal():
                return
            for bound in self.bounds.over(rounds.cuts, lambda: self.seconds_left() - 1):
                self.raise_bound(bound)
                if self.is_optimal():
                    return

    def solve_rounds(self, rounds: Rounds) -> None:
        """Consider the plans of rounds, and look for better bounds beside them if the
        first one leaves a gap."""
        is_proving = False
        with contextlib.ExitStack() as beside:
            for bound, judged in rounds:
                self.learn(bound, judged)
                if self.is_optimal():
                    return
                if self.is_wide() and not is_proving:
                    is_proving = True
                    beside.enter_context(self.proving(rounds.cuts))
                if rounds.stopped:
                    rounds.cuts.update(self.bounds.chosen[:FIRST])

    @contextlib.contextmanager
    def proving(self, cuts: set[int]) -> Iterator[None]:
        """Look for a better bound in a thread meanwhile.

        It counts from the end on, so that what happens meanwhile does not depend on
        how long anything takes.
        """
        is_over = threading.Event()

        def seconds_left() -> float:
            return 0.0 if is_over.is_set() else math.inf

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            bounds = self.bounds.over(cuts, seconds_left, max(1, TOGETHER - 1))
            best = thread.submit(lambda: max(bounds, default=0.0))
            try:
                yield
            finally:
                is_over.set()
        self.raise_bound(best.result())

    def improve(self, cuts: set[int]) -> None:
        """Choose parts of the best plan anew."""

        def best() -> Judged:
            assert self.best is not None
            return self.best

        def seconds_left() -> float:
            return self.seconds_left() - max(self.kept_seconds, 1.0)

        parts = self.graph, self.costs, self.budget, self.planner
        for judged in Neighbourhoods(*parts, best, cuts, seconds_left):
            self.consider_repaired(judged)
            if self.is_optimal():
                return

    def seconds_for_rounds(self) -> float:
        """Without those that are kept, unless there is little to improve."""
        if self.best is None or not self.is_wide():
            return self.seconds_left()
        return max(1.0, self.seconds_left() - self.kept_seconds)

    def consider_repaired(self, judged: Judged) -> None:
        """`judged` with evictions until it fits, and then with what there is room
        for."""
        parts = self.costs, self.budget
        objective = self.planner.objective
        states = evictions(*parts, judged, objective)
        while (state := next(states, None)) and self.seconds_left() > 1.0:
            judged = state
        if fits(judged.usage, self.budget):
            judged = refill(*parts, judged, objective)
        self.consider(prefetch(self.costs, judged, self.budget))

    def rounds(self, budget: Budget | None) -> Rounds:
        def seconds_for_bytes() -> float:
            return self.seconds_left() - self.kept_seconds

        left = self.seconds_for_rounds if budget else seconds_for_bytes
        parts = self.graph, self.costs, budget, self.planner, left
        rounds = Rounds(*parts, self.start, self.baseline)
        self.statistics = rounds.statistics
        return rounds

    def exact(self, budget: Budget | None) -> Exact:
        parts = self.graph, self.costs, budget, self.planner, self.seconds_left
        program = Exact(*parts, lambda: self.best)
        self.statistics = program.statistics
        return program

    def start(self) -> Judged | None:
        """The best plan, if it is good: a bad one leads the solver astray."""
        if self.best is None or self.value(self.best) > 1.02 * self.bound:
            return None
        return self.best

    def raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def too_small(self, fastest: Plan | None) -> BudgetTooSmall:
        """The error with the leanest plan: proven if it reaches a lower bound on
        bytes."""
        graph, costs = self.graph, self.costs
        elapsed, limit = time.monotonic() - self.since, self.planner.time_limit_seconds
        self.limit_seconds = max(limit, elapsed + limit / 4)
        least, leanest = self.floor_bytes, self.leanest
        for bound, judged in self.lean():
            least = max(least, bound)
            if judged and judged.usage.peak_bytes < leanest.usage.peak_bytes:
                leanest = judged
            if leanest.usage.peak_bytes <= least:
                break
        self.consider(prefetch(costs, leanest, self.budget))
        return budget_too_small(
            graph,
            costs,
            self.budget,
            leanest,
            "MilpPlanner",
            least_bytes=least,
            fastest=fastest,
        )

    def lean(self) -> Iterator[tuple[int, Judged | None]]:
        """(bytes that every plan needs, a plan that needs few or None): of heuristics,
        then of programs; the other way round, half of the time each, for many nodes."""
        many = len(self.graph.nodes) > MANY_NODES
        self.kept_seconds = self.seconds_left() / 2 if many else 0.0

        def is_over() -> bool:
            return many and self.seconds_left() <= 1.0

        heuristics = ((0, self.evicted(*means, is_over)) for means in self.modes())
        if many:
            return itertools.chain(self.lean_by_programs(), heuristics)
        return itertools.chain(heuristics, self.lean_by_programs())

    def lean_by_programs(self) -> Iterator[tuple[int, Judged | None]]:
        """As `lean`, by programs whose minimum no plan's peak is below.

        Each peak is a multiple of a unit, while solvers are not exact.
        """
        sizes = (self.costs.nbytes, self.costs.workspace_bytes)
        unit = math.gcd(*(int(n) for x in sizes for n in x)) or 1
        exact = len(self.graph.nodes) <= EXACT_NODES
        for bound, judged in self.exact(None) if exact else self.rounds(None):
            off = unit / 2 if exact else 1e-6 * bound
            yield math.ceil((bound - off) / unit) * unit, judged
