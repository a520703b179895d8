"""Planners: `(graph, costs, budget) -> Plan`."""

from poet_jax.planners.evict import greedy, paging_only
from poet_jax.planners.milp.search import MilpPlanner
from poet_jax.planners.paper import PaperPlanner
from poet_jax.planners.simple import keep_all, sqrt

__all__ = [
    "MilpPlanner",
    "PaperPlanner",
    "greedy",
    "keep_all",
    "paging_only",
    "sqrt",
]
