"""Planners after published heuristics, for comparison.

`capuchin` follows Peng et al., "Capuchin" (ASPLOS 2020): page first, and recompute what
paging cannot bring under the budget. `pofo` follows Beaumont et al., "Efficient
Combination of Rematerialization and Offloading" (NeurIPS 2021): checkpoints between
segments that run again, the checkpoints themselves offloaded. Both are plans in the
spirit of those papers, made for graphs instead of chains and judged by this project's
simulator; neither is the authors' code.
"""

import time

from poet_jax.graph import Graph
from poet_jax.plan import Budget, Plan
from poet_jax.planners.greedy import Eviction
from poet_jax.planners.judge import (
    Judged,
    budget_too_small,
    fits,
    judge,
    keep_everything,
    least_objective,
    objective_of,
    prefetch,
)
from poet_jax.planners.sqrt import checkpoints
from poet_jax.price import Costs


class _PageFirst(Eviction):
    """Pages whatever waits at the peak, the largest first; only what cannot be paged
    any more is rematerialised."""

    def options(self, value, stage, life):
        for how, cost in super().options(value, stage, life):
            yield how, 0.0 if how == "page" else cost


def capuchin(graph: Graph, costs: Costs, budget: Budget) -> Plan:
    """Page first, and recompute what does not fit. Raises BudgetTooSmall."""
    since = time.monotonic()
    state = keep_everything(graph, costs)
    judged = _evict(_PageFirst, state, graph, costs, budget, remat=True)
    return _plan("capuchin", judged, since, graph, costs, budget)


def pofo(graph: Graph, costs: Costs, budget: Budget) -> Plan:
    """Checkpoints of the best segment length, offloaded until the step fits.

    The fastest of the lengths 1, 2, 3, 5, 8, ... is taken, as that paper minimises
    time. Raises BudgetTooSmall.
    """
    since = time.monotonic()
    forward = sum(not node.backward for node in graph.nodes)
    lengths = [0, 1]
    while sum(lengths[-2:]) < forward:
        lengths.append(sum(lengths[-2:]) + (len(lengths) == 2))
    best = None
    for length in lengths:
        state = keep_everything(graph, costs)
        if length:
            state = judge(graph, costs, checkpoints(graph, length).actions(graph))
        judged = _evict(Eviction, state, graph, costs, budget, remat=False)
        if best is None or _rank(judged, budget) < _rank(best, budget):
            best = judged
    assert best is not None
    return _plan("pofo", best, since, graph, costs, budget)


def _rank(judged: Judged, budget: Budget) -> tuple[bool, float]:
    """What fits is better, then what is faster; of what does not, what is leaner."""
    late = not fits(judged.usage, budget)
    return late, judged.usage.peak_bytes if late else objective_of(judged.usage, "time")


def _evict(kind, state: Judged, graph, costs, budget, *, remat: bool) -> Judged:
    """Evict until the memory suffices; the last state if it never does."""
    eviction = kind(graph, costs, state, remat, True, "time")
    while state.usage.peak_bytes > budget.memory_bytes:
        over = state.usage.peak_bytes - budget.memory_bytes
        if not eviction.step(state, over):
            return state
        state = eviction.judged()
    return prefetch(graph, costs, state, budget)


def _plan(name, judged: Judged, since, graph, costs, budget) -> Plan:
    if not fits(judged.usage, budget):
        raise budget_too_small(graph, costs, budget, judged, name)
    return judged.plan(name, since, bound=least_objective(graph, costs, "energy"))
