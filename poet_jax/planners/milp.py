"""The sparse MILP: keep, rematerialise or page every value at the least cost.

The equations carry the numbers of docs/formulation.md. Stage t is base node t with what
is done just for it; stage N needs the outputs. The touches of a value are the stages in
which it may be read or produced; between two of them nothing about it can change, so
one binary for each gap is enough.

    x[v, k]  v stays in RAM over its k-th gap, from touch k to touch k + 1
    r[i, t]  node i runs again in stage t        in[v, t]  v is paged in during stage t
    out[v]   v is written to storage, once, right after it is produced
"""

import dataclasses
import fnmatch
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from poet_jax import progress
from poet_jax.errors import BudgetTooSmall
from poet_jax.graph import Graph
from poet_jax.plan import Budget, Compute, PageIn, Plan, Stages, Status
from poet_jax.planners.cuts import Cuts, crests
from poet_jax.planners.greedy import evict
from poet_jax.planners.judge import (
    Judged,
    budget_too_small,
    fits,
    floor_bytes,
    is_too_late,
    judge,
    keep_everything,
    least_objective,
    objective_of,
    prefetch,
)
from poet_jax.planners.objective import minimise
from poet_jax.planners.repair import evictions, refill
from poet_jax.planners.solver import Model, check_solver, xsum
from poet_jax.price import Costs
from poet_jax.units import format_count, format_joules, format_seconds

logger = logging.getLogger("poet_jax")

# Up to this many nodes the formulation below is solved; beyond, `Cuts`.
EXACT_NODES = 32

# A program of `Cuts` with more binaries gets a horizon, of so many nodes.
LARGE = 6000
HORIZON = 40

# Beyond so many nodes heuristics take longer than `Cuts`, and are asked only if that
# finds no plan, and for all means together.
MANY_NODES = 300

# Relative gap at which the solver leaves a round of `Cuts`.
ROUND_GAP = 3e-4


@dataclasses.dataclass(frozen=True)
class MilpPlanner:
    """The cheapest mix of keeping, rematerialising and paging, with a proven bound.

    Attributes:
      solver: "CBC" or "HIGHS" (`pip install "poet_jax[highs]"`).
      time_limit_seconds: of the whole planning, heuristics included.
      gap: relative distance from the bound at which a plan counts as optimal.
      objective: "energy" (joules) or "time" (seconds).
      remat, paging: False forbids that means.
      keep, never_page, never_remat: patterns of value names, as `fnmatch` reads them
        (`"*/attention/*"`); matching values are neither paged nor rematerialised, not
        paged, or not rematerialised. A node that writes such a value runs once.
      progress: whether a line on the terminal shows how far the planning is.

    Its call raises BudgetTooSmall, and ValueError for a pattern that matches nothing.
    Interrupted by Ctrl-C it returns the best plan that it has, if any.
    """

    solver: str = "CBC"
    time_limit_seconds: float = 60.0
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
        """A plan that costs no more than `start`, where that is one that fits."""
        since = time.monotonic()
        search = _Search(self, self.restrict(graph), costs, budget, since)
        return search.plan(start)

    def restrict(self, graph: Graph) -> Graph:
        """`graph` with the planner's switches and pins as what its parts allow."""
        kept = _matching(graph, "keep", self.keep)
        in_ram = kept | _matching(graph, "never_page", self.never_page)
        once = kept | _matching(graph, "never_remat", self.never_remat)
        at_home = {*graph.stored, *graph.landing}
        return dataclasses.replace(
            graph,
            values=tuple(
                dataclasses.replace(
                    value,
                    pageable=value.pageable
                    and (v in at_home or (self.paging and v not in in_ram)),
                )
                for v, value in enumerate(graph.values)
            ),
            nodes=tuple(
                dataclasses.replace(
                    node,
                    repeatable=node.repeatable
                    and self.remat
                    and once.isdisjoint(node.writes),
                )
                for node in graph.nodes
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
    """One call of the planner: an incumbent that the simulator accepts, and a bound."""

    def __init__(self, planner: MilpPlanner, graph, costs, budget, since: float):
        self.planner, self.graph, self.costs = planner, graph, costs
        self.budget, self.since = budget, since
        self.bound = least_objective(graph, costs, planner.objective)
        self.best: Judged | None = None
        self.solver_found = False  # a plan, however good
        self.statistics: dict[str, int] = {}

    def seconds_left(self) -> float:
        limit = self.planner.time_limit_seconds
        return max(1.0, limit - (time.monotonic() - self.since))

    def value(self, judged: Judged) -> float:
        return objective_of(judged.usage, self.planner.objective)

    def consider(self, judged: Judged) -> None:
        if fits(judged.usage, self.budget) and (
            self.best is None or self.value(judged) < self.value(self.best)
        ):
            self.best = judged

    def is_optimal(self) -> bool:
        if self.best is None:
            return False
        value = self.value(self.best)
        return value - self.bound <= self.planner.gap * abs(value)

    def __str__(self) -> str:
        """For the progress line."""
        energy = self.planner.objective == "energy"
        show = format_joules if energy else format_seconds
        found = "no plan yet"
        if self.best is not None:
            value = self.value(self.best)
            found = f"{show(value)}, gap {(value - self.bound) / (value or 1):.2%}"
        return (
            f"planning {format_count(len(self.graph.nodes), 'node')}: {found}, bound "
            f"{show(self.bound)}, {self.seconds_left():.0f} s left"
        )

    def plan(self, start: Plan | None) -> Plan:
        self.consider(keep_everything(self.graph, self.costs))
        if start is not None and self.best is None:
            self.consider_repaired(judge(self.graph, self.costs, start.actions))
        try:
            with progress.line(self.__str__, self.planner.progress):
                if not (self.is_optimal() or is_too_late(self.costs, self.budget)):
                    self.search()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            logger.warning("planning was interrupted: the best plan so far is used")
        if self.best is None:
            raise self.too_small()
        return self.best.plan(
            "MilpPlanner",
            self.since,
            objective=self.planner.objective,
            bound=self.bound,
            status=Status.OPTIMAL if self.is_optimal() else Status.FEASIBLE,
            statistics=self.statistics,
        )

    def search(self) -> None:
        """Heuristics, then programs; the other way round for many nodes."""
        many = len(self.graph.nodes) > MANY_NODES
        if not many:
            self.heuristics()
        if not self.is_optimal():
            self.solve()
            if many and self.best is None:
                self.heuristics()
            if self.best is not None and not self.solver_found:
                solver = self.planner.solver
                logger.warning("%s found no plan; the best heuristic's is used", solver)

    def heuristics(self) -> None:
        """Evictions with each means alone and both, for an incumbent to start from."""
        for remat, paging in self.modes():
            self.consider_repaired(
                evict(
                    self.graph,
                    self.costs,
                    self.budget,
                    remat=remat,
                    paging=paging,
                    objective=self.planner.objective,
                )
            )

    def modes(self) -> list[tuple[bool, bool]]:
        """The (remat, paging) to try: both, and each alone."""
        remat, paging = self.planner.remat, self.planner.paging
        if len(self.graph.nodes) > MANY_NODES:
            return [(remat, paging)]
        return sorted({(remat, paging), (remat, False), (False, paging)})

    def solve(self) -> None:
        if self.budget.memory_bytes >= floor_bytes(self.graph, self.costs):
            if len(self.graph.nodes) <= EXACT_NODES:
                self.solve_exactly()
            else:
                self.solve_by_cuts()

    def solve_exactly(self) -> None:
        """Solve with in-stage memory rows added until the simulator agrees."""
        program = Formulation(self.graph, self.costs, self.budget, self.planner)
        self.statistics = program.statistics
        while True:
            stages, bound = program.solve(self.seconds_left(), self.best)
            if program.is_relaxation:
                self.raise_bound(bound)
            if stages is None:
                return
            self.solver_found = True
            judged = judge(self.graph, self.costs, stages.actions(self.graph))
            self.consider(prefetch(self.graph, self.costs, judged, self.budget))
            done = self.is_optimal() or self.seconds_left() <= 1.0
            if done or not program.tighten(judged):
                return

    def solve_by_cuts(self) -> None:
        """Solve with cuts added where plans exceed the budget, until one does not."""
        for bound, judged in self.rounds(self.budget):
            self.raise_bound(bound)
            if judged is not None:
                self.solver_found = True
                self.consider_repaired(judged)
            if self.is_optimal():
                return

    def consider_repaired(self, judged: Judged) -> None:
        """`judged` with evictions until it fits, and then with what there is room
        for."""
        parts = self.graph, self.costs, self.budget
        objective = self.planner.objective
        states = evictions(*parts, judged, objective)
        while (state := next(states, None)) and self.seconds_left() > 1.0:
            judged = state
        if fits(judged.usage, self.budget):
            judged = refill(*parts, judged, objective)
        self.consider(prefetch(self.graph, self.costs, judged, self.budget))

    def rounds(self, budget: Budget | None) -> Iterator[tuple[float, Judged | None]]:
        """(lower bound, plan or None) of `Cuts` with more and more cuts.

        They end when a plan fits, or when more cuts do not help.
        """
        graph, costs = self.graph, self.costs
        baseline = crests(graph, keep_everything(graph, costs))
        cuts = {baseline.index(max(baseline))}
        reserve_bytes, failing, fitting, horizon = 0, 0, None, None
        deadline = (budget and budget.seconds) or 0.0
        asked = budget  # with an earlier deadline once plans wait for storage
        gap = ROUND_GAP
        share = max(5.0, self.planner.time_limit_seconds / 6)
        self.statistics["rounds"] = 0
        while self.seconds_left() > 1.0:
            program = Cuts(
                graph, costs, asked, self.planner, cuts, reserve_bytes, horizon
            )
            size = program.statistics["binaries"]
            if budget and len(cuts) > 1 and not horizon and size > LARGE:
                horizon, reserve_bytes = HORIZON, budget.memory_bytes // 40
                continue
            self.statistics |= program.statistics
            self.statistics["rounds"] += 1
            seconds = min(share, self.seconds_left())
            judged, bound = program.solve(seconds, gap, self.start())
            is_bound = not (reserve_bytes or horizon or asked is not budget)
            yield bound if is_bound else 0.0, judged
            if judged is None:
                return
            limit = round(bound) if budget is None else budget.memory_bytes
            over = judged.usage.peak_bytes - limit
            new = self.worst_stages(judged, limit) - cuts
            if over > 0 and new and (not horizon or size < 1.3 * LARGE):
                cuts |= new
                if horizon and fitting is None:
                    reserve_bytes += over // 2
                continue
            if budget is None:
                return
            if over <= 0 and (late := self.late_seconds(judged)) > 0:
                least = float(costs.seconds.sum())
                deadline = max(deadline - late, (deadline + least) / 2)
                if deadline < least * (1 + self.planner.gap):
                    return
                asked = dataclasses.replace(budget, seconds=deadline)
                reserve_bytes += limit // 50  # room for pages on their way in
                continue
            if over <= 0:
                fitting = reserve_bytes
            else:  # what exceeds the budget lies between the cuts
                failing = reserve_bytes
            if fitting is None:
                reserve_bytes += over + limit // 100
            elif fitting - failing > limit // 200:
                reserve_bytes = (fitting + failing) // 2
            elif gap > self.planner.gap / 2:
                reserve_bytes = fitting
                gap, share = self.planner.gap / 2, self.seconds_left()
            else:
                return

    def late_seconds(self, judged: Judged) -> float:
        """By how much a plan with prefetching misses the deadline; 0 if it does not."""
        deadline = self.budget.seconds
        if deadline is None:
            return 0.0
        timely = prefetch(self.graph, self.costs, judged, self.budget)
        return max(0.0, timely.usage.seconds - deadline)

    def start(self) -> Judged | None:
        """The best plan, if it is good: a bad one leads the solver astray."""
        if self.best is None or self.value(self.best) > 1.02 * self.bound:
            return None
        return self.best

    def worst_stages(self, judged: Judged, limit: int) -> set[int]:
        """The stages, some apart, whose base nodes exceed `limit` the most: two, or a
        few in a large graph.

        Where nodes that run again exceed it by a lot, their stages count, too.
        """
        found: list[int] = []
        worst = crests(self.graph, judged)
        for stage in sorted(range(len(worst)), key=lambda stage: -worst[stage][0]):
            live, node = worst[stage]
            over = live > limit if node == stage else live > 1.1 * limit
            apart = all(abs(stage - other) > len(worst) // 40 for other in found)
            if over and apart:
                found.append(stage)
        return set(found[: 2 + len(worst) // 300])

    def raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def too_small(self) -> BudgetTooSmall:
        """The error with the leanest plan: proven if it reaches a lower bound on
        bytes."""
        graph, costs = self.graph, self.costs
        leanest = min(
            (
                evict(graph, costs, Budget(1), remat=remat, paging=paging)
                for remat, paging in self.modes()
            ),
            key=lambda judged: judged.usage.peak_bytes,
        )
        least = floor_bytes(graph, costs)
        if leanest.usage.peak_bytes > least and len(graph.nodes) > EXACT_NODES:
            for bound, judged in self.rounds(None):
                # Solvers keep rows up to a tolerance.
                least = max(least, int(bound * (1 - 1e-6)))
                if judged and judged.usage.peak_bytes < leanest.usage.peak_bytes:
                    leanest = judged
        elif leanest.usage.peak_bytes > least:
            program = Formulation(graph, costs, None, self.planner)
            while True:
                stages, bound = program.solve(self.seconds_left(), leanest)
                least = max(least, round(bound))
                if stages is None:
                    break
                judged = judge(graph, costs, stages.actions(graph))
                if judged.usage.peak_bytes < leanest.usage.peak_bytes:
                    leanest = judged
                if leanest.usage.peak_bytes <= least or self.seconds_left() <= 1.0:
                    break
                if not program.tighten(judged):
                    break
        return budget_too_small(
            graph, costs, self.budget, leanest, "MilpPlanner", least_bytes=least
        )


class Formulation:
    """The MILP over a solver of python-mip; without a budget it minimises the peak."""

    def __init__(
        self, graph: Graph, costs: Costs, budget: Budget | None, planner: MilpPlanner
    ):
        self.graph, self.costs, self.budget = graph, costs, budget
        self.planner = planner
        self.count = len(graph.nodes)
        self.is_relaxation = True  # False once a deadline was tightened
        self.model = Model(planner.solver, planner.gap / 2)
        self.nbytes = [int(n) for n in costs.nbytes]
        self.pinned_bytes = sum(self.nbytes[v] for v in graph.pinned)
        self.candidates = [self._candidates(t) for t in range(self.count + 1)]
        self.touches = self._touches()
        self._variables()
        self._presence_rows()
        self._memory_rows()
        self._store_rows()
        self._objective()
        self.tightened: set[tuple[int, int]] = set()
        self.statistics = {
            "binaries": len(self.x) + len(self.r) + len(self.page_in),
            "rows": len(self.model.rows),
            "rounds": 0,
        }

    # What may happen when.

    def reads(self, stage: int) -> tuple[int, ...]:
        if stage < self.count:
            return self.graph.nodes[stage].reads
        return self.graph.returned

    def _candidates(self, stage: int) -> list[int]:
        """C(t): the nodes that may run again in stage t, ascending."""
        return [i for i in range(stage) if self.graph.nodes[i].repeatable]

    def _touches(self) -> dict[int, list[int]]:
        """Stages in which each value may be read or produced; -1 where an argument
        starts.

        Values that are always in RAM have none.
        """
        graph = self.graph
        touches: dict[int, set[int]] = defaultdict(set)
        for stage in range(self.count + 1):
            for v in self.reads(stage):
                touches[v].add(stage)
            for i in self.candidates[stage]:
                for v in (*graph.nodes[i].reads, *graph.nodes[i].writes):
                    touches[v].add(stage)
        for v in {*graph.initial, *graph.producer}:
            touches[v].add(graph.producer.get(v, -1))
        return {v: sorted(s) for v, s in touches.items() if v not in graph.pinned}

    def _variables(self) -> None:
        graph, model = self.graph, self.model
        self.x = {
            (v, k): model.add_var(binary=True)
            for v, stages in self.touches.items()
            for k in range(len(stages) - 1)
        }
        self.r = {
            (i, t): model.add_var(binary=True)
            for t in range(self.count + 1)
            for i in self.candidates[t]
        }
        self.page_in, self.page_out = {}, {}
        self.readers_in: dict[tuple[int, int], list[int]] = {}
        for t in range(self.count + 1):
            for i in self.candidates[t]:
                for v in graph.nodes[i].reads:
                    self.readers_in.setdefault((v, t), []).append(i)
        for v, stages in self.touches.items():
            worth = self.nbytes[v] or v in graph.stored
            if not (graph.values[v].pageable and worth):
                continue
            for t in stages if v in graph.stored else stages[1:]:
                if v in self.reads(t) or (v, t) in self.readers_in:
                    self.page_in[v, t] = model.add_var(binary=True)
            if v not in graph.stored and any((v, t) in self.page_in for t in stages):
                self.page_out[v] = model.add_var(ub=1)
        for v in graph.landing.keys() - self.page_out:
            self.page_out[v] = model.add_var(ub=1)

    def avail(self, v: int, k: int):
        """avail(v, t) at touch k: kept since the last touch, paged in or run again."""
        t = self.touches[v][k]
        terms = [self.x[v, k - 1]] if k else []
        if (v, t) in self.page_in:
            terms.append(self.page_in[v, t])
        if (self.graph.producer.get(v), t) in self.r:
            terms.append(self.r[self.graph.producer[v], t])
        return xsum(terms)

    def _presence_rows(self) -> None:
        for v, stages in self.touches.items():
            for k, t in enumerate(stages):
                if k == 0 and v not in self.graph.stored:
                    continue  # produced here, or an argument at the start
                avail = self.avail(v, k)
                if v in self.reads(t):
                    self.model += avail == 1  # (1), (4)
                else:
                    self.model += avail <= 1  # (4) one copy is enough
                    for i in self.readers_in.get((v, t), ()):
                        self.model += self.r[i, t] <= avail  # (2)
                    if (v, k) in self.x:
                        self.model += self.x[v, k] <= avail  # (3)
                if (v, t) in self.page_in:
                    if v in self.page_out:
                        self.model += self.page_in[v, t] <= self.page_out[v]  # (5)
                    if v not in self.reads(t):
                        readers = [self.r[i, t] for i in self.readers_in[v, t]]
                        self.model += self.page_in[v, t] <= xsum(readers)  # (6)
        for i, t in self.r:
            used = []  # (7) a rerun whose results nobody takes is idle
            for v in self.graph.nodes[i].writes:
                if v in self.reads(t):
                    break
                k = self.touches[v].index(t)
                used += [self.x[v, k]] if (v, k) in self.x else []
                used += [self.r[j, t] for j in self.readers_in.get((v, t), ())]
            else:
                self.model += self.r[i, t] <= xsum(used)

    def _crossing(self, stage: int):
        """Bytes kept over the whole of a stage in which they are not touched."""
        return [(self.nbytes[v], self.x[v, k]) for v, k in self.crossing[stage]]

    def _memory_rows(self) -> None:
        self.covered: set[tuple[int, ...]] = set()
        self.memory_rows: list[tuple[list[tuple[int, Any]], int]] = []
        self.crossing: list[list[tuple[int, int]]] = [[] for _ in range(self.count + 1)]
        for v, stages in self.touches.items():
            for k, (start, stop) in enumerate(zip(stages, stages[1:], strict=False)):
                for stage in range(start + 1, stop):
                    self.crossing[stage].append((v, k))
        # In units of the largest number, so that no coefficient is far from one.
        self.unit = float(max([*self.nbytes, 1]))
        if self.budget is None:
            self.memory = self.model.add_var()
        else:
            self.memory: Any = self.budget.memory_bytes / self.unit
        for t in range(self.count):
            node = self.graph.nodes[t]
            present = {*node.reads, *node.writes}
            terms = self._crossing(t)
            for v, stages in self.touches.items():
                if v in present or t not in stages:
                    continue
                k = stages.index(t)
                if (v, k) in self.x:
                    terms.append((self.nbytes[v], self.x[v, k]))
            present -= self.graph.pinned
            fixed = sum(self.nbytes[v] for v in present)
            fixed += int(self.costs.workspace_bytes[t])
            self._add_memory_row(terms, fixed)  # (8)

    def _add_memory_row(self, terms: list[tuple[int, Any]], fixed: int) -> None:
        """Bytes of the variables in `terms` that are 1, and `fixed`, fit the budget."""
        fixed += self.pinned_bytes
        total = xsum(nbytes / self.unit * variable for nbytes, variable in terms)
        self.model += total + fixed / self.unit <= self.memory
        self.memory_rows.append((terms, fixed))

    def _cover_rows(self) -> bool:
        """(12) Forbid what broke a memory row by less than the solver's tolerance."""
        assert self.budget is not None
        before = len(self.covered)
        for terms, fixed in self.memory_rows:
            chosen = [(n, y) for n, y in terms if self.values[y.idx] > 0.5]
            key = tuple(variable.idx for _, variable in chosen)
            over = sum(n for n, _ in chosen) + fixed > self.budget.memory_bytes
            if chosen and over and key not in self.covered:
                self.covered.add(key)
                self.model += xsum(y for _, y in chosen) <= len(chosen) - 1
        return len(self.covered) > before

    def tighten(self, judged: Judged) -> bool:
        """Add the rows that `judged` breaks; False if it breaks none."""
        if (
            self.budget is not None
            and judged.usage.peak_bytes <= self.budget.memory_bytes
        ):
            return self._tighten_deadline(judged)
        limit = (
            self.values[self.memory.idx] * self.unit
            if self.budget is None
            else self.budget.memory_bytes
        )
        moments = []
        computed: set[int] = set()
        for row, instruction in enumerate(judged.program.instructions):
            if not isinstance(instruction, Compute):
                continue
            again = instruction.node in computed
            computed.add(instruction.node)
            if again and judged.usage.live_bytes[row] > limit:
                moment = instruction.node, len(computed)
                if moment not in self.tightened:
                    self.tightened.add(moment)
                    moments.append(moment)
        if not moments and self.budget is not None:
            return self._cover_rows()
        for moment in moments:
            self._in_stage_rows(*moment)
        return bool(moments)

    def _in_stage_rows(self, j: int, t: int) -> None:
        """(9) RAM while node j runs again in stage t."""
        graph, model = self.graph, self.model
        node = graph.nodes[j]
        runs = self.r[j, t]
        own = {*node.reads, *node.writes} - graph.pinned
        need = sum(self.nbytes[v] for v in own) + int(self.costs.workspace_bytes[j])
        terms = [*self._crossing(t), (need, runs)]
        for v, stages in self.touches.items():
            if v in own or t not in stages or stages[0] >= t:
                continue
            k = stages.index(t)
            sources = [self.x[v, k - 1]]
            producer = graph.producer.get(v, -1)
            if producer < j and (producer, t) in self.r:
                sources.append(self.r[producer, t])
            readers = self.readers_in.get((v, t), ())
            loads = [
                self.page_in[v, t] + self.r[i, t] - 1
                for i in readers
                if i < j and (v, t) in self.page_in
            ]
            if v in self.reads(t):
                uses = [1]
            else:
                uses = [self.r[i, t] for i in readers if i > j]
                uses += [self.x[v, k]] if (v, k) in self.x else []
            if not uses:
                continue
            alive = model.add_var(ub=1)
            terms.append((self.nbytes[v], alive))
            for source in sources + loads:
                for use in uses:
                    model += alive >= source + use + runs - 2
        self._add_memory_row(terms, 0)

    def _tighten_deadline(self, judged: Judged) -> bool:
        """A plan that stalls beyond the deadline: ask for one that is faster by
        that."""
        if self.budget is None or self.budget.seconds is None or not self.deadline:
            return False
        late = judged.usage.seconds - self.budget.seconds
        if late <= 0 or self.deadline <= 0:
            return False
        self.is_relaxation = False
        self.deadline -= late
        self.model += self.seconds <= self.deadline
        return True

    def _store_rows(self) -> None:
        """(10) Room on storage: what is still to be paged in at or after a stage."""
        if self.budget is None or self.budget.store_bytes is None:
            return
        stored = defaultdict(list)
        home_bytes = self.graph.stored_bytes
        for v in self.page_out.keys() - self.graph.landing:
            later = [t for t in self.touches[v] if (v, t) in self.page_in]
            for stage in range(max(self.touches[v][0], 0), later[-1]):
                held = self.model.add_var(ub=1)
                for t in later:
                    if t > stage:
                        self.model += held >= self.page_in[v, t]
                stored[stage].append(self.nbytes[v] / self.unit * held)
        for terms in stored.values():
            room_bytes = self.budget.store_bytes - home_bytes
            self.model += xsum(terms) <= room_bytes / self.unit

    def _objective(self) -> None:
        """Joules or seconds of the whole step; (11) seconds are at least each
        lane's."""
        if self.budget is None:
            self.objective_unit = self.unit
            self.model.objective = self.memory * 1.0
            return
        self.deadline = self.budget.seconds
        self.objective_unit, self.seconds = minimise(
            self.model,
            self.graph,
            self.costs,
            self.budget,
            self.planner.objective,
            self.r,
            self.page_in,
            self.page_out,
        )

    def solve(self, seconds: float, start: Judged | None):
        """(stages or None, a lower bound in the objective's unit)."""
        self.statistics["rounds"] += 1
        known = [] if start is None else self._start(start)
        solution = self.model.optimize(seconds, known)
        bound = solution.bound * self.objective_unit
        if solution.values is None:
            return None, bound
        self.values = solution.values
        stages = Stages.empty(self.graph)
        for (i, t), variable in self.r.items():
            if self.values[variable.idx] > 0.5:
                stages.reruns[t].add(i)
        for (v, t), variable in self.page_in.items():
            if self.values[variable.idx] > 0.5:
                stages.page_ins[t].add(v)
                stages.page_outs.add(v)
        return stages, bound

    def _start(self, judged: Judged):
        """The plan `judged` as values of the binaries, as far as it has such values."""
        computed: set[int] = set()
        reruns: set[tuple[int, int]] = set()
        page_ins: list[tuple[int, int]] = []
        reads: set[tuple[int, int]] = set()
        for action in judged.actions:
            stage = len(computed)
            match action:
                case Compute(number):
                    if number in computed:
                        reruns.add((number, stage))
                    computed.add(number)
                    reads.update((v, stage) for v in self.graph.nodes[number].reads)
                case PageIn(value):
                    page_ins.append((value, stage))
        reads.update((v, self.count) for v in self.graph.returned)
        arrived = set()
        for v, stage in page_ins:  # prefetched: it counts where it is first read
            later = [t for u, t in reads if u == v and t >= stage]
            if later:
                arrived.add((v, min(later)))
        start = [(y, float(key in reruns)) for key, y in self.r.items()]
        start += [(y, float(key in arrived)) for key, y in self.page_in.items()]
        for v, stages in self.touches.items():
            new = {
                t
                for t in stages
                if (v, t) in arrived or (self.graph.producer.get(v), t) in reruns
            }
            used = {t for t in stages if (v, t) in reads}
            kept = False
            for k in range(len(stages) - 2, -1, -1):
                after = stages[k + 1]
                kept = after not in new and (kept or after in used)
                start.append((self.x[v, k], float(kept)))
        return start
