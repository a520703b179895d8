"""Rules of thumb: keep everything, or checkpoint every sqrt(N)-th node."""

import math
import time

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Budget, Plan, Stages, Status
from poet_jax.planners.planner import (
    budget_too_small,
    fits,
    judge,
    keep_everything,
    least_objective,
)


def keep_all(graph: Graph, costs: Costs, budget: Budget) -> Plan:
    """Compute every node once and page nothing.

    The cheapest plan there is wherever it fits, so its status is OPTIMAL, unless it
    waits for arguments on storage. Raises BudgetTooSmall with the bytes it needs.
    """
    since = time.monotonic()
    judged = keep_everything(graph, costs)
    if not fits(judged.usage, budget):
        raise budget_too_small(graph, costs, budget, judged, "keep_all")
    bound = least_objective(graph, costs, "energy")
    at_home = graph.stored or graph.landing
    status = Status.HEURISTIC if at_home else Status.OPTIMAL
    return judged.plan("keep_all", since, bound=bound, status=status)


def sqrt(graph: Graph, costs: Costs, budget: Budget) -> Plan:
    """Keep only what crosses a segment; run each segment again before its backward.

    The F forward nodes are cut into sqrt(F) segments. Keep-all is returned where it
    fits. Raises BudgetTooSmall with the bytes that this one schedule needs. Chen et al.
    2016, arXiv 1604.06174.
    """
    since = time.monotonic()
    judged = keep_everything(graph, costs)
    if not fits(judged.usage, budget):
        segments = judge(graph, costs, checkpoints(graph).actions(graph))
        if segments.usage.peak_bytes < judged.usage.peak_bytes:
            judged = segments
    if not fits(judged.usage, budget):
        raise budget_too_small(graph, costs, budget, judged, "sqrt")
    return judged.plan("sqrt", since, bound=least_objective(graph, costs, "energy"))


def checkpoints(graph: Graph, length: int | None = None) -> Stages:
    """Segments of `length` forward nodes, sqrt(F) by default, that run again each."""
    stages = Stages.empty(graph)
    backward = [number for number, node in enumerate(graph.nodes) if node.backward]
    forward = backward[0] if backward else len(graph.nodes)
    if length is None:
        length = max(1, math.isqrt(max(forward - 1, 0)) + 1)
    for start in range(0, forward - length, length):
        segment = range(start, start + length)
        inside = {v for n in segment for v in graph.nodes[n].writes}
        dropped = {
            v
            for v in inside
            if graph.nodes[graph.producer[v]].repeatable
            and v not in graph.leaving
            and any(r >= forward for r in graph.readers[v])
            and not any(start + length <= r < forward for r in graph.readers[v])
        }
        if not dropped:
            continue
        first = min(r for v in dropped for r in graph.readers[v] if r >= forward)
        needed = set(dropped)
        for number in reversed(segment):
            node = graph.nodes[number]
            if node.repeatable and needed.intersection(node.writes):
                stages.reruns[first].add(number)
                needed.update(inside.intersection(node.reads))
    return stages
