"""Evict, one at a time, the value that is cheapest per byte to bring back."""

import bisect
import time

from poet_jax.graph import Graph
from poet_jax.plan import Budget, Compute, PageIn, Plan, Stages
from poet_jax.planners.judge import (
    Judged,
    budget_too_small,
    fits,
    judge,
    keep_all_objective,
    keep_everything,
    objective_of,
    prefetch,
)
from poet_jax.price import Costs
from poet_jax.program import Free


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
        raise budget_too_small(graph, costs, budget, judged, name, exact=True)
    return judged.plan(name, since, bound=keep_all_objective(costs, "energy"))


def evict(
    graph: Graph,
    costs: Costs,
    budget: Budget,
    *,
    remat: bool = True,
    paging: bool = True,
    objective: str = "energy",
) -> Judged:
    """The cheapest state that fits of an eviction sequence, which no budget changes.

    So more budget never costs more joules (without static watts; seconds depend on the
    room for prefetching). Where no state fits, the one with the smallest peak is
    returned.
    """
    eviction = _Eviction(graph, costs, remat, paging, objective)
    state = leanest = keep_everything(graph, costs)
    if fits(state.usage, budget):
        return state  # nothing is cheaper
    best = None
    while True:
        judged = state
        if state.usage.peak_bytes <= budget.memory_bytes:
            judged = prefetch(graph, costs, state, budget)
        if fits(judged.usage, budget):
            value = objective_of(judged.usage, objective)
            if best is None or value < objective_of(best.usage, objective):
                best = judged
        if state.usage.peak_bytes < leanest.usage.peak_bytes:
            leanest = state
        if not eviction.step(state):
            return best or leanest
        state = judge(graph, costs, eviction.stages().actions(graph))


class _Eviction:
    """Which gaps between two reads of a value are bridged without RAM, and how.

    A gap is (value, stage of the read that ends it).
    """

    def __init__(self, graph: Graph, costs: Costs, remat, paging, objective):
        self.graph, self.costs = graph, costs
        self.remat, self.paging = remat, paging
        self.evicted: dict[tuple[int, int], str] = {}
        self.touches = [list(readers) for readers in graph.readers]
        for value in set(graph.outputs):
            self.touches[value].append(len(graph.nodes))
        energy = objective == "energy"
        watts = costs.static_watts if energy else 1.0
        self.node_cost = (costs.joules if energy else 0) + watts * costs.seconds
        self.in_cost = costs.page_in_joules if energy else costs.page_in_seconds
        self.out_cost = costs.page_out_joules if energy else costs.page_out_seconds

    def gap(self, value: int, stage: int) -> tuple[int, int] | None:
        """The gap of `value` that spans `stage`, ending at or after it."""
        touches = self.touches[value]
        index = bisect.bisect_left(touches, stage)
        return (value, touches[index]) if index < len(touches) else None

    def paged(self) -> set[int]:
        return {value for (value, _), how in self.evicted.items() if how == "page"}

    def step(self, judged: Judged) -> bool:
        """Evict the cheapest values alive at the peak; False if none is left.

        One at a time, or a few in a large graph, as judging a state takes long there.
        """
        stage, alive = self.at_peak(judged)
        paged = self.paged()
        scores = []
        for value in alive:
            gap = self.gap(value, stage)
            produced = self.graph.producer.get(value, -1)
            if (
                gap is None
                or gap in self.evicted
                or gap[1] == stage
                or produced >= stage
            ):
                continue
            nbytes = int(self.costs.nbytes[value])
            for how, cost in self.options(value, gap[1], paged):
                scores.append((cost / max(nbytes, 1), -nbytes, value, gap[1], how))
        chosen: dict[tuple[int, int], str] = {}
        for _, _, value, ends, how in sorted(scores):
            if len(chosen) <= len(self.graph.nodes) // 60:
                chosen.setdefault((value, ends), how)
        self.evicted.update(chosen)
        return bool(chosen)

    def options(self, value: int, stage: int, paged: set[int]):
        """(how, cost) of bringing `value` back at `stage`."""
        if self.paging and self.graph.values[value].pageable:
            out = 0.0 if value in paged else float(self.out_cost[value])
            yield "page", out + float(self.in_cost[value])
        if self.remat:
            reruns, page_ins = set(), set()
            if self.bring_back(value, stage, reruns, page_ins, paged):
                yield (
                    "remat",
                    sum(float(self.node_cost[n]) for n in reruns)
                    + sum(float(self.in_cost[v]) for v in page_ins),
                )

    def bring_back(self, value, stage, reruns, page_ins, paged) -> bool:
        """Collect what must run or be paged in for `value`; False if nothing can."""
        stack = [value]
        while stack:
            number = self.graph.producer.get(stack.pop())
            if number is None or not self.graph.nodes[number].repeatable:
                return False
            if number in reruns:
                continue
            reruns.add(number)
            for read in self.graph.nodes[number].reads:
                gap = self.gap(read, stage)
                if read in self.graph.pinned or (
                    gap is not None and gap not in self.evicted
                ):
                    continue
                if read in paged:
                    page_ins.add(read)
                else:
                    stack.append(read)
        return True

    def stages(self) -> Stages:
        stages = Stages.empty(self.graph)
        stages.page_outs = paged = self.paged()
        for (value, stage), how in self.evicted.items():
            if how == "page":
                stages.page_ins[stage].add(value)
            else:
                self.bring_back(
                    value, stage, stages.reruns[stage], stages.page_ins[stage], paged
                )
        for stage, reruns in enumerate(stages.reruns):
            written = {v for n in reruns for v in self.graph.nodes[n].writes}
            stages.page_ins[stage] -= written
        return stages

    def at_peak(self, judged: Judged) -> tuple[int, set[int]]:
        """The base stage of the peak, and the values alive there that may be
        dropped."""
        alive = set(self.graph.initial)
        computed: set[int] = set()
        for x in judged.program.instructions[: judged.usage.peak_instruction]:
            match x:
                case Compute(number):
                    computed.add(number)
                    alive.update(self.graph.nodes[number].writes)
                case PageIn(value):
                    alive.add(value)
                case Free(value):
                    alive.remove(value)
        return len(computed), alive - self.graph.pinned
