"""The objective of every linear program here: joules or seconds of the whole step."""

from collections.abc import Mapping
from typing import Any

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Budget
from poet_jax.planners.milp.solver import Model, xsum
from poet_jax.planners.planner import least_objective


def minimise(
    model: Model,
    graph: Graph,
    costs: Costs,
    budget: Budget,
    objective: str,
    reruns: Mapping[tuple[int, int], Any],
    page_ins: Mapping[tuple[int, int], Any],
    page_outs: Mapping[int, Any],
) -> tuple[float, Any]:
    """Set the model's objective from its variables and add rows (8).

    Args:
      objective: "energy" or "time".
      reruns: variables by node and any second number.
      page_ins: variables by value and any second number.
      page_outs: variables by value; those of values that land on storage are 1.

    Returns the joules or seconds that count as one in the model, and its variable of
    seconds.
    """
    transfers = [
        (costs.page_in_seconds, costs.page_in_joules, v, y)
        for (v, _), y in page_ins.items()
    ] + [
        (costs.page_out_seconds, costs.page_out_joules, v, y)
        for v, y in page_outs.items()
    ]
    for v in graph.landing:
        model += page_outs[v] >= 1
    seconds = model.add_var()
    again = xsum(float(costs.seconds[i]) * y for (i, _), y in reruns.items())
    storage = [float(cost[v]) * y for cost, _, v, y in transfers]
    slowed = costs.contention * xsum(storage)
    model += seconds >= float(costs.seconds.sum()) + again + slowed  # (8)
    model += seconds >= xsum(storage)
    if budget.seconds is not None:
        model += seconds <= budget.seconds
    value = seconds
    if objective == "energy":
        joules = [float(costs.joules[i]) * y for (i, _), y in reruns.items()]
        joules += [float(cost[v]) * y for _, cost, v, y in transfers]
        value = float(costs.joules.sum()) + costs.static_watts * seconds + xsum(joules)
    # Solvers stop at absolute differences too, so keep-all counts as 1000.
    least = least_objective(graph, costs, objective)
    unit = least / 1000 or 1.0
    model.minimise(value * (1 / unit), least / unit)
    return unit, seconds
