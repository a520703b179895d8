"""Keep every value until its last read: what `jax.jit` would do, and the baseline."""

import time

from poet_jax.graph import Graph
from poet_jax.plan import Budget, Plan, Status
from poet_jax.planners.judge import (
    budget_too_small,
    fits,
    keep_everything,
    least_objective,
)
from poet_jax.price import Costs


def keep_all(
    graph: Graph, costs: Costs, budget: Budget, objective: str = "energy"
) -> Plan:
    """Compute every node once and page nothing.

    The cheapest plan there is wherever it fits, so its status is OPTIMAL, unless it
    waits for arguments on storage. Raises BudgetTooSmall with the bytes it needs.
    """
    since = time.monotonic()
    judged = keep_everything(graph, costs)
    if not fits(judged.usage, budget):
        raise budget_too_small(graph, costs, budget, judged, "keep_all")
    bound = least_objective(graph, costs, objective)
    at_home = graph.stored or graph.landing
    status = Status.HEURISTIC if at_home else Status.OPTIMAL
    return judged.plan(
        "keep_all", since, objective=objective, bound=bound, status=status
    )
