"""Planners after published heuristics, for comparison.

`capuchin` follows Peng et al., "Capuchin" (ASPLOS 2020): page first, and recompute what
paging cannot bring under the budget. `pofo` follows Beaumont et al., "Efficient
Combination of Rematerialization and Offloading" (NeurIPS 2021): checkpoints between
segments that run again, the checkpoints themselves offloaded; segments are of one
length, where the paper's dynamic program chooses each. Both are plans in the spirit of
those papers, made for graphs instead of chains and judged by this project's simulator;
neither is the authors' code.
"""

import bisect
import dataclasses
import functools
import time

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Budget, Plan
from poet_jax.planners.evict import Eviction
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
from poet_jax.planners.simple import checkpoints


class _PageFirst(Eviction):
    """Pages whatever waits at the peak, the largest first; only what cannot be paged
    any more is rematerialised."""

    def options(self, value, stage, life):
        for option in super().options(value, stage, life):
            is_page = option.how == "page"
            yield dataclasses.replace(option, cost=0.0) if is_page else option


def capuchin(graph: Graph, costs: Costs, budget: Budget) -> Plan:
    """Page first, and recompute what does not fit. Raises BudgetTooSmall."""
    since = time.monotonic()
    state = keep_everything(graph, costs)
    eviction = _PageFirst(costs, state, True, True, "time")
    judged = _evict(eviction, state, budget)
    return _plan("capuchin", judged, since, graph, costs, budget)


class _OffloadCheckpoints(Eviction):
    """Pages what segments keep that run again, and nothing else."""

    def __init__(self, costs, state, checkpoints: set[int]):
        super().__init__(costs, state, False, True, "time")
        self.checkpoints = checkpoints

    def options(self, value, stage, life):
        return super().options(value, stage, life) if value in self.checkpoints else ()


def pofo(graph: Graph, costs: Costs, budget: Budget) -> Plan:
    """Segments that run again, their checkpoints offloaded until the step fits.

    For each length 2, 3, 5, 8, ... as many of the first segments run again as it takes;
    what the others keep stays in RAM. The fastest is taken, as that paper minimises
    time, and keep-all where it fits. Raises BudgetTooSmall.
    """
    since = time.monotonic()
    best = keep_everything(graph, costs)
    forward = sum(not node.backward for node in graph.nodes)
    lengths = [2, 3]
    while sum(lengths[-2:]) <= forward // 2:
        lengths.append(sum(lengths[-2:]))
    for length in () if fits(best.usage, budget) else lengths:
        first = functools.partial(_first_again, graph, costs, budget, length)
        ends = range(length, max(forward, length + 1), length)
        few = bisect.bisect_left(
            ends, True, key=lambda end: fits(first(end).usage, budget)
        )
        judged = first(ends[min(few, len(ends) - 1)])
        best = min(best, judged, key=lambda state: _rank(state, budget))
    return _plan("pofo", best, since, graph, costs, budget)


def _first_again(graph, costs, budget, length: int, end: int) -> Judged:
    """The segments before node `end` run again, and of their values those are paged
    that their ends keep."""
    stages = checkpoints(graph, length)
    for nodes in stages.reruns:
        nodes.difference_update(range(end, len(graph.nodes)))
    again = set().union(*stages.reruns)
    once = {*range(end)} - again if again else ()
    kept = {v for n in once for v in graph.nodes[n].writes}
    state = judge(graph, costs, stages.actions(graph))
    return _evict(_OffloadCheckpoints(costs, state, kept), state, budget)


def _rank(judged: Judged, budget: Budget) -> tuple[bool, float]:
    """What fits is better, then what is faster; of what does not, what is leaner."""
    late = not fits(judged.usage, budget)
    return late, judged.usage.peak_bytes if late else objective_of(judged.usage, "time")


def _evict(eviction: Eviction, state: Judged, budget: Budget) -> Judged:
    """Evict until the memory suffices; the last state if it never does."""
    while state.usage.peak_bytes > budget.memory_bytes:
        over = state.usage.peak_bytes - budget.memory_bytes
        if not eviction.step(state, over):
            return state
        state = eviction.judged()
    return prefetch(eviction.costs, state, budget)


def _plan(name, judged: Judged, since, graph, costs, budget) -> Plan:
    if not fits(judged.usage, budget):
        raise budget_too_small(graph, costs, budget, judged, name)
    return judged.plan(name, since, bound=least_objective(graph, costs, "energy"))
