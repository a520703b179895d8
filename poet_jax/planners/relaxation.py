"""A lower bound for graphs whose exact MILP is too large: one choice per gap.

Every gap between two base reads of a value is kept, or ends with the value paged in or
its producer run again. What the producer itself needs is left out, and small values are
taken to be kept without taking room, so every plan for
this order of nodes is a solution, and the minimum is a bound for all of them.
"""

from poet_jax.graph import Graph
from poet_jax.plan import Budget
from poet_jax.planners.judge import keep_all_objective
from poet_jax.planners.solver import Model, xsum
from poet_jax.price import Costs


def relaxed_bound(
    graph: Graph, costs: Costs, budget: Budget, planner, seconds: float
) -> float:
    """Joules or seconds that no plan within `budget` can go below."""
    model = Model(planner.solver, planner.gap / 2)
    nodes = graph.nodes
    nbytes = [int(n) for n in costs.nbytes]
    unit = float(max([*nbytes, 1]))
    reruns = [
        model.add_var() if planner.remat and node.repeatable else None for node in nodes
    ]
    kept_over: list[list] = [[] for _ in nodes]
    page_in, page_out = [], []
    small = {v for v, n in enumerate(nbytes) if n < 1e-4 * budget.memory_bytes}
    for v in sorted(set(range(len(graph.values))) - graph.pinned - small):
        ends = [graph.producer.get(v, -1), *graph.readers[v]]
        ends += [len(nodes)] if v in graph.outputs else []
        rerun = reruns[ends[0]] if ends[0] >= 0 else None
        paging = planner.paging and graph.values[v].pageable
        again, loaded = [], []
        for start, stop in zip(ends, ends[1:], strict=False):
            if stop <= start + 1:
                continue
            x = model.add_var(binary=True)
            ways = [x]
            if rerun is not None:
                again.append(model.add_var(ub=1))
                ways.append(again[-1])
            if paging:
                loaded.append(model.add_var(ub=1))
                ways.append(loaded[-1])
            model += xsum(ways) >= 1
            for stage in range(start + 1, stop):
                kept_over[stage].append(nbytes[v] / unit * x)
        if again:
            model += rerun >= xsum(again)
        if loaded:
            out = model.add_var(ub=1)
            page_out.append((v, out))
            page_in.extend((v, y) for y in loaded)
            for y in loaded:
                model += out >= y
    for stage, kept in enumerate(kept_over):
        present = {*nodes[stage].reads, *nodes[stage].writes} | graph.pinned
        fixed = sum(nbytes[v] for v in present) + int(costs.workspace_bytes[stage])
        model += xsum(kept) <= (budget.memory_bytes - fixed) / unit
    again_seconds = xsum(
        float(costs.seconds[i]) * y for i, y in enumerate(reruns) if y is not None
    )
    storage_seconds = xsum(
        [float(costs.page_in_seconds[v]) * y for v, y in page_in]
        + [float(costs.page_out_seconds[v]) * y for v, y in page_out]
    )
    total = model.add_var()
    model += total >= float(costs.seconds.sum()) + again_seconds
    model += total >= storage_seconds
    value = total
    if planner.objective == "energy":
        joules = [
            (float(costs.joules[i]), y) for i, y in enumerate(reruns) if y is not None
        ]
        joules += [(float(costs.page_in_joules[v]), y) for v, y in page_in]
        joules += [(float(costs.page_out_joules[v]), y) for v, y in page_out]
        value = float(costs.joules.sum()) + costs.static_watts * total
        value += xsum(cost * y for cost, y in joules)
    objective_unit = keep_all_objective(costs, planner.objective) / 1000 or 1.0
    model.objective = value * (1 / objective_unit)
    return model.optimize(seconds).bound * objective_unit
