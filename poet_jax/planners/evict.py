"""Evict, one at a time, the value that is cheapest per byte to bring back."""

import bisect
import dataclasses
import math
import time
from collections.abc import Collection, Iterable, Iterator

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Budget, Free, PageIn, PageOut, Plan, Stages
from poet_jax.core.program import Run
from poet_jax.planners.planner import (
    Judged,
    budget_too_small,
    fits,
    judge,
    keep_everything,
    least_objective,
    objective_of,
    prefetch,
)


def greedy(graph: Graph, costs: Costs, budget: Budget) -> Plan:
    """Page or rematerialise values at the peak until the step fits.

    Raises BudgetTooSmall with the smallest peak that evicting reaches.
    """
    return _plan("greedy", graph, costs, budget, remat=True)


def paging_only(graph: Graph, costs: Costs, budget: Budget) -> Plan:
    """Page values at the peak until the step fits; compute nothing twice.

    Raises BudgetTooSmall with the smallest peak that paging reaches.
    """
    return _plan("paging_only", graph, costs, budget, remat=False)


def _plan(name: str, graph: Graph, costs: Costs, budget: Budget, remat: bool) -> Plan:
    since = time.monotonic()
    judged = evict(graph, costs, budget, remat=remat)
    if not fits(judged.usage, budget):
        raise budget_too_small(graph, costs, budget, judged, name)
    return judged.plan(name, since, bound=least_objective(graph, costs, "energy"))


def evict(graph: Graph, costs: Costs, budget: Budget, *, remat: bool = True) -> Judged:
    """The cheapest state that fits of an eviction sequence, which no budget changes.

    So more budget never costs more joules (without static watts; seconds depend on the
    room for prefetching). Where no state fits, the one with the smallest peak.
    """
    states = improving(graph, costs, budget, "energy", remat)
    return [judged for judged in states if judged is not None][-1]


def improving(
    graph: Graph,
    costs: Costs,
    budget: Budget,
    objective: str,
    remat: bool = True,
    paging: bool = True,
) -> Iterator[Judged | None]:
    """The states of an eviction sequence that are better than those before: leaner
    until one fits, cheaper from then on. None for the others."""
    best_value, least_bytes = math.inf, math.inf
    keep_all = keep_everything(graph, costs)
    for state in evictions(costs, keep_all, objective, remat, paging):
        judged, within = state, state.usage.peak_bytes <= budget.memory_bytes
        if within and state is not keep_all:
            if unhurried(costs, state, objective) >= best_value:
                yield None  # however early its page-ins are issued
                continue
            judged = prefetch(costs, state, budget)
        value, peak_bytes = objective_of(judged.usage, objective), math.inf
        if fits(judged.usage, budget):
            is_better, best_value = value < best_value, min(value, best_value)
        else:
            value, peak_bytes = math.inf, state.usage.peak_bytes
            is_better = best_value == math.inf and peak_bytes < least_bytes
            least_bytes = min(peak_bytes, least_bytes)
        yield judged if is_better else None
        only_adds = objective == "energy" and not costs.static_watts
        if value < math.inf and (only_adds or state is keep_all):
            return


def unhurried(costs: Costs, judged: Judged, objective: str) -> float:
    """The objective of a plan if it never waited for storage."""
    usage = judged.usage
    if objective == "time":
        return usage.compute_seconds
    waits = usage.seconds - usage.compute_seconds
    return usage.joules - costs.static_watts * waits


def evictions(
    costs: Costs,
    judged: Judged,
    objective: str,
    remat: bool = True,
    paging: bool = True,
    memory_bytes: int = 0,
) -> Iterator[Judged]:
    """`judged`, and then with more and more evictions until its peak is within
    `memory_bytes` or nothing is left to evict."""
    eviction = Eviction(costs, judged, remat, paging, objective)
    while True:
        yield judged
        over = judged.usage.peak_bytes - memory_bytes
        if over <= 0 or not eviction.step(judged, over):
            return
        judged = eviction.judged()


class Eviction:
    """A staged plan that evicts values: instead of waiting in RAM at the peak, they are
    paged in or made again in the stage of their next read."""

    def __init__(self, costs: Costs, judged: Judged, remat, paging, objective):
        self.graph, self.costs = judged.graph, costs
        self.remat, self.paging = remat, paging
        self.stages = Stages.of(judged.graph, judged.actions)
        energy = objective == "energy"
        watts = costs.static_watts if energy else 1.0
        node_cost = (costs.joules if energy else 0) + watts * costs.seconds
        in_cost = costs.page_in_joules if energy else costs.page_in_seconds
        out_cost = costs.page_out_joules if energy else costs.page_out_seconds
        # Lists are quicker to read than arrays.
        self.nbytes = costs.nbytes.tolist()
        self.node_cost = node_cost.tolist()
        self.in_cost, self.out_cost = in_cost.tolist(), out_cost.tolist()

    def judged(self) -> Judged:
        self.graph = self._used_residents()
        return judge(self.graph, self.costs, self.stages.actions(self.graph))

    def _used_residents(self) -> Graph:
        """The graph without residents that the stages page in all the same: before they
        are read, or for the next step, which does it now."""
        graph, stages = self.graph, self.stages
        begins: dict[int, int] = {}  # the stage of the first read
        idle: set[int] = set()
        for stage, (reruns, page_ins) in enumerate(
            zip(stages.reruns, stages.page_ins, strict=True)
        ):
            new = graph.resident - begins.keys()
            idle |= new & page_ins
            for node in (*reruns, *range(stage, min(stage + 1, len(graph.nodes)))):
                begins.update(
                    dict.fromkeys(new.intersection(graph.nodes[node].reads), stage)
                )
        last = stages.page_ins[-1]
        read = {v for node in stages.reruns[-1] for v in graph.nodes[node].reads}
        for value in graph.resident:
            if graph.successors[value] in last - read:
                idle.add(value)
                stages.page_ins[begins[value]].add(value)
        last -= {graph.successors[value] for value in idle} - read
        return graph.with_resident(graph.resident - idle)

    def step(self, judged: Judged, enough_bytes: int) -> bool:
        """Evict the cheapest values per byte at the peak; False if none is left.

        One at a time, or a few in a large graph, as judging a state takes long there,
        until they have `enough_bytes`.
        """
        scores = []
        life = Life(judged)
        waiting = dict(life.waiting())
        for value, stage in waiting.items():
            for option in self.options(value, stage, life):
                # What else is read there and a repeat makes need not wait either.
                gone = {value, *(v for v in option.made if waiting.get(v) == stage)}
                nbytes = self.total(gone) - self.total(option.held)
                if nbytes >= min(1, self.total([value])):
                    score = option.cost / max(nbytes, 1)
                    scores.append((score, -nbytes, value, stage, option.how))
        evicted: set[int] = set()
        for _, negative_bytes, value, stage, how in sorted(scores):
            if value in evicted:
                continue
            if len(evicted) > len(self.graph.nodes) // 60 or enough_bytes <= 0:
                break
            evicted.add(value)
            enough_bytes += negative_bytes
            if how == "page":
                self.stages.page_ins[stage].add(value)
                self.stages.page_outs.add(value)
                continue
            repeat = self.repeat(value, stage, life, hold=how == "hold")
            assert repeat is not None
            self.stages.reruns[stage] |= repeat.reruns
            self.stages.page_ins[stage] |= repeat.page_ins
            self.stages.page_ins[stage] -= repeat.made
        return bool(evicted)

    def total(self, values: Iterable[int]) -> int:
        return sum([self.nbytes[v] for v in values])

    def options(self, value: int, stage: int, life: "Life") -> "Iterator[Option]":
        """Ways to bring `value` back at `stage`."""
        there = self.stages.page_ins[stage]
        if self.paging and self.graph.values[value].pageable and value not in there:
            out = 0.0 if value in self.stages.page_outs else self.out_cost[value]
            yield Option("page", out + self.in_cost[value], {value})
        if not self.remat or stage == life.stage:
            return  # what runs again in a stage may do so before its peak
        before = self.stages.reruns[stage]
        for how in ("remat", "hold"):
            repeat = self.repeat(value, stage, life, hold=how == "hold")
            if repeat and not (repeat.reruns <= before and repeat.page_ins <= there):
                cost = sum([self.node_cost[n] for n in repeat.reruns - before])
                cost += sum([self.in_cost[v] for v in repeat.page_ins])
                yield Option(how, cost, repeat.made, repeat.held)
                if not repeat.is_deep:
                    return

    def repeat(
        self, value: int, stage: int, life: "Life", hold: bool
    ) -> "_Repeat | None":
        """What must run or be paged in for `value`; None if nothing can.

        With `hold` what its node reads stays in RAM for that.
        """
        repeat = _Repeat()
        stack = [value]
        while stack:
            number = self.graph.producer.get(stack.pop())
            if number is None or not self.graph.nodes[number].repeatable:
                return None
            if number in repeat.reruns:
                continue
            repeat.reruns.add(number)
            repeat.made.update(self.graph.nodes[number].writes)
            if number in self.stages.reruns[stage]:
                continue
            for read in self.graph.nodes[number].reads:
                if life.is_there(read, stage):
                    continue
                if read in self.stages.page_ins[stage]:
                    continue
                if read in self.stages.page_outs:
                    repeat.page_ins.add(read)
                elif hold:
                    repeat.held.add(read)
                else:
                    repeat.is_deep = True
                    stack.append(read)
        return repeat


@dataclasses.dataclass
class _Repeat:
    """What brings a value back by running its node again.

    Attributes:
      reruns: nodes that run; made: what they write.
      page_ins: what is paged in for that; held: what stays in RAM for that.
      is_deep: whether nodes run for what its own node reads.
    """

    reruns: set[int] = dataclasses.field(default_factory=set)
    made: set[int] = dataclasses.field(default_factory=set)
    page_ins: set[int] = dataclasses.field(default_factory=set)
    held: set[int] = dataclasses.field(default_factory=set)
    is_deep: bool = False


@dataclasses.dataclass(frozen=True)
class Option:
    """A way to bring a value back.

    Attributes:
      how: "page", "remat", or "hold" for a repeat of its node alone.
      cost: in the objective's unit.
      made: values that come with it.
      held: values that have to stay in RAM for it.
    """

    how: str
    cost: float
    made: Collection[int]
    held: Collection[int] = ()


class Life:
    """When the values of a program are in RAM and who reads them next, by stage."""

    def __init__(self, judged: Judged):
        self.graph = graph = judged.program.graph
        self.peak = judged.usage.peak_instruction
        self.reads: list[list[tuple[int, int]]] = [[] for _ in graph.values]
        self.spans: list[list[int]] = [[] for _ in graph.values]  # came, left, came ...
        for value in graph.initial:
            self.spans[value].append(-1)
        self.begins = [0]  # the first row of each stage
        fresh = False
        for row, x in enumerate(judged.program.instructions):
            if fresh and not isinstance(x, Free | PageOut):
                self.begins.append(row)
                fresh = False
            stage = len(self.begins) - 1
            match x:
                case Run((number,)):
                    for value in x.reads:
                        self.reads[value].append((row, stage))
                    for value in x.writes:
                        if len(self.spans[value]) % 2 == 0:
                            self.spans[value].append(row)
                    for value, _ in x.over:
                        self.spans[value].append(row)
                    fresh = number == stage
                case PageIn(value):
                    if len(self.spans[value]) % 2 == 0:
                        self.spans[value].append(row)
                case Free(value):
                    self.spans[value].append(row)
        end = len(judged.program.instructions)
        while len(self.begins) <= len(graph.nodes):
            self.begins.append(end)
        self.stage = bisect.bisect_right(self.begins, self.peak) - 1
        for value in graph.returned:
            self.reads[value].append((end, len(graph.nodes)))

    def waiting(self) -> Iterator[tuple[int, int]]:
        """(value, stage of its next read) of what waits in RAM at the peak."""
        for value, reads in enumerate(self.reads):
            if value in self.graph.pinned or not self._is_there(value, self.peak):
                continue
            index = bisect.bisect_left(reads, (self.peak, -1))
            if index == len(reads) or reads[index][0] == self.peak:
                continue
            stage = reads[index][1]
            # What a stage makes, or has read before, is there for the rest of it.
            is_first = index == 0 or reads[index - 1][1] < stage
            if stage > self.stage or (is_first and self.is_there(value, stage)):
                yield value, stage

    def waits(self, value: int, row: int) -> list[tuple[int, int, int]]:
        """(first row, last row, value) of what would be in RAM, and is not, if a value
        did not have to come at a row.

        It would wait from when it was freed, if anybody reads it then, or from the step
        before if it comes from its home on storage.
        """
        spans, reads = self.spans[value], self.reads[value]
        if self.is_first(value, row):
            new = self.graph.successors[value]
            return [(0, row, value), (self.spans[new][-1], self.begins[-1], new)]
        index = bisect.bisect_left(spans, row)
        last = spans[index + 1] if index + 1 < len(spans) else math.inf
        read = bisect.bisect_left(reads, (row, -1))
        if read == len(reads) or reads[read][0] > last:
            return []
        return [(spans[index - 1], row, value)]

    def is_first(self, value: int, row: int) -> bool:
        """Whether a value that comes at a row was not in RAM before."""
        return self.spans[value][0] == row

    def is_there(self, value: int, stage: int) -> bool:
        """Whether a value is in RAM when a stage begins."""
        return self._is_there(value, self.begins[stage])

    def _is_there(self, value: int, row: int) -> bool:
        return bisect.bisect_left(self.spans[value], row) % 2 == 1
