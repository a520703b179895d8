"""The sparse formulation: one binary for each gap between touches of a value.

The equations carry the numbers of docs/formulation.md. Stage t is base node t with what
is done just for it; stage N needs the outputs. The touches of a value are the stages in
which it may be read or produced; between two of them nothing about it can change, so
one binary for each gap is enough.

    x[v, k]  v stays in RAM over its k-th gap, from touch k to touch k + 1
    r[i, t]  node i runs again in stage t        in[v, t]  v is paged in during stage t
    out[v]   v is written to storage, once, right after it is produced

A value on storage may be in RAM when the step begins (touch -1), if what takes its
place is in RAM when the step ends (stage N): x[v, 0] says so.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from poet_jax.graph import Graph
from poet_jax.in_place import replaceable
from poet_jax.plan import Budget, Compute, PageIn, Stages
from poet_jax.planners.judge import ROUNDING, Judged
from poet_jax.planners.objective import minimise
from poet_jax.planners.solver import Model, xsum
from poet_jax.price import Costs

# Rows about seconds are broken by more than this share of them.
TOLERANCE = 1e-6

# So many plans that wait beyond the deadline are forbidden, one by one.
LATE_PLANS = 30


class Formulation:
    """The MILP over a solver of python-mip; without a budget it minimises the peak.

    `planner` is a MilpPlanner, for its solver, gap and objective.
    """

    def __init__(self, graph: Graph, costs: Costs, budget: Budget | None, planner: Any):
        self.graph, self.costs, self.budget = graph, costs, budget
        self.planner = planner
        self.count = len(graph.nodes)
        self.successors = {} if budget is None else graph.successors
        self.resident: set[int] = set()  # of the last solution
        self.is_relaxation = True  # False once a plan that is late was forbidden
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
        self.late_plans = 0
        self.statistics = {
            "binaries": len(self.x) + len(self.r) + len(self.page_in),
            "rows": self.model.rows,
            "rounds": 0,
        }

    @property
    def has_seconds(self) -> bool:
        """Whether the time of the step matters."""
        assert self.budget is not None
        is_time = self.planner.objective == "time" or self.costs.static_watts > 0
        return is_time or self.budget.seconds is not None

    # What may happen when.

    def reads(self, stage: int) -> tuple[int, ...]:
        if stage < self.count:
            return self.graph.nodes[stage].reads
        return self.graph.returned

    def _candidates(self, stage: int) -> list[int]:
        """C(t): the nodes that may run again in stage t, ascending."""
        return [i for i in range(stage) if self.graph.nodes[i].repeatable]

    def _touches(self) -> dict[int, list[int]]:
        """Stages in which each value may be read or produced; -1 where one starts that
        may be in RAM then.

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
        for v, successor in self.successors.items():
            touches[v].add(-1)
            touches[successor].add(self.count)
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
            for t in stages if self.only_arrives(v) else stages[1:]:
                if v in self.reads(t) or (v, t) in self.readers_in:
                    self.page_in[v, t] = model.add_var(binary=True)
            if v not in graph.stored and any((v, t) in self.page_in for t in stages):
                self.page_out[v] = model.add_var(ub=1)
        for v in graph.landing.keys() - self.page_out:
            self.page_out[v] = model.add_var(ub=1)

    def only_arrives(self, v: int) -> bool:
        """Whether a value is on storage before its first touch, and not in RAM."""
        return v in self.graph.stored and v not in self.successors

    def waits(self, v: int, t: int):
        """What is 1 if `v` is kept over the end of stage t, for the next step if that
        is the last."""
        k = self.touches[v].index(t)
        kept = [self.x[v, k]] if (v, k) in self.x else []
        if t == self.count:
            kept += [self.x[u, 0] for u, w in self.successors.items() if w == v]
        return kept

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
                if k == 0 and not self.only_arrives(v):
                    continue  # produced here, or an argument at the start
                avail = self.avail(v, k)
                if v in self.reads(t):
                    self.model += avail == 1  # (1), (4)
                else:
                    self.model += avail <= 1  # (4) one copy is enough
                    for i in self.readers_in.get((v, t), ()):
                        self.model += self.r[i, t] <= avail  # (2)
                    for kept in self.waits(v, t):
                        self.model += kept <= avail  # (3)
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
                used += self.waits(v, t)
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
            written_over = {old for old, _ in replaceable(self.graph)[t]}
            present = {*node.reads, *node.writes} - written_over
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
        both = (self.graph.initial, self.graph.returned) if self.successors else ()
        for there in both:
            terms = [(self.nbytes[v], self.x[v, 0]) for v in self.successors]
            fixed = sum(self.nbytes[v] for v in set(there) - self.graph.pinned)
            self._add_memory_row(terms, fixed)

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

    def tighten(self, judged: Judged, timely: Judged) -> bool:
        """Add the rows that `judged` breaks; False if it breaks none.

        `timely` is the same with its page-ins issued early.
        """
        if (
            self.budget is not None
            and judged.usage.peak_bytes <= self.budget.memory_bytes
        ):
            return self._stall_rows() or self._forbid_late(timely)
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
                uses += self.waits(v, t)
            if not uses:
                continue
            alive = model.add_var(ub=1)
            terms.append((self.nbytes[v], alive))
            for source in sources + loads:
                for use in uses:
                    model += alive >= source + use + runs - 2
        self._add_memory_row(terms, 0)

    def _stall_rows(self) -> bool:
        """Add the rows (24) that the solution breaks."""
        if not self.has_seconds:
            return False
        found = False
        for outside, terms in self.stalls():
            least = outside + sum(n * self.values[y.idx] for n, y in terms)
            if least > self.values[self.seconds.idx] * (1 + TOLERANCE):
                rows = xsum(float(n) * y for n, y in terms)
                self.model += self.seconds >= rows + float(outside)
                found = True
        return found

    def stalls(self) -> Iterator[tuple[float, list[tuple[float, Any]]]]:
        """(24) Right sides, as a constant and terms, about the solution's page-ins:
        what is written after base node `first` and read for base node `last` moves both
        ways between them, while nothing else need be computed."""
        costs, producer = self.costs, self.graph.producer
        moved = [key for key, y in self.page_in.items() if self.values[y.idx] > 0.5]
        for first in {producer.get(v, -1) for v, _ in moved}:
            for last in {t for _, t in moved if t > first}:
                outside = costs.seconds[: first + 1].sum() + costs.seconds[last:].sum()
                terms = [
                    (costs.seconds[i], y)
                    for (i, t), y in self.r.items()
                    if t <= first or t > last
                ]
                terms += [
                    (costs.page_in_seconds[v], y)
                    for (v, t), y in self.page_in.items()
                    if producer.get(v, -1) >= first and t <= last
                ]
                written = {v: t for v, t in sorted(moved, reverse=True) if t <= last}
                terms += [
                    (costs.page_out_seconds[v], self.page_in[v, t])
                    for v, t in written.items()
                    if producer.get(v, -1) >= first and v in self.page_out
                ]
                yield outside, terms

    def _forbid_late(self, timely: Judged) -> bool:
        """A plan that waits beyond the deadline, with no room to issue its page-ins
        earlier: ask for one that leaves out some of them."""
        assert self.budget is not None
        deadline = self.budget.seconds
        chosen = [y for y in self.page_in.values() if self.values[y.idx] > 0.5]
        if deadline is None or not chosen:
            return False
        if timely.usage.seconds <= deadline * ROUNDING:
            return False
        self.is_relaxation = False
        self.late_plans += 1
        self.model += xsum(chosen) <= len(chosen) - 1
        return self.late_plans < LATE_PLANS

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
            self.model.minimise(self.memory * 1.0)
            return
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
        self.resident = {
            v for v in self.successors if self.values[self.x[v, 0].idx] > 0.5
        }
        stages = Stages.empty(self.graph.with_resident(self.resident))
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
        reads.update((v, self.count) for v in judged.graph.returned)
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
