"""The front of memory against energy or time: what each budget costs at least."""

import dataclasses
import math
import os
from collections.abc import Iterable

from poet_jax.core.costs import Costs
from poet_jax.core.errors import BudgetTooSmall
from poet_jax.core.graph import Graph
from poet_jax.core.plan import (
    BasePlanner,
    Budget,
    BudgetLike,
    Plan,
    Planner,
    Status,
    parse_budget,
)
from poet_jax.core.simulate import Usage
from poet_jax.core.units import format_bytes, format_joules, format_seconds
from poet_jax.planners.milp.search import MilpPlanner
from poet_jax.planners.planner import (
    fits,
    judge_plan,
    keep_everything,
    least_objective,
)
from poet_jax.viz.figures import new_figure

POINTS = 8  # budgets that are planned where none are given


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """A budget, its plan, and what that uses."""

    budget: Budget
    plan: Plan
    usage: Usage


@dataclasses.dataclass(frozen=True, eq=False)
class Front:
    """Plans for growing budgets, none of which costs more than one before it that keeps
    its limits.

    Attributes:
      points: in order of memory; the first has the smallest budget that was found.
      smallest_bytes: that budget.
      least_bytes: proven: the smallest budget of all lies between this and
        `smallest_bytes`, and is known exactly if they are equal.
      baseline: what keep-all uses.
    """

    points: tuple[Point, ...]
    smallest_bytes: int
    least_bytes: int
    baseline: Usage

    def __str__(self) -> str:
        rows = [("budget", "peak", "time", "energy", "over keep-all", "gap", "status")]
        for point in self.points:
            plan, usage = point.plan, point.usage
            base = self.baseline
            energy = usage.joules / base.joules - 1 if base.joules else 0.0
            late = usage.seconds / base.seconds - 1 if base.seconds else 0.0
            rows.append(
                (
                    format_bytes(point.budget.memory_bytes),
                    format_bytes(usage.peak_bytes),
                    format_seconds(usage.seconds),
                    format_joules(usage.joules),
                    f"{late:+.1%} s, {energy:+.1%} J",
                    f"{plan.gap:.2%}",
                    plan.status.name,
                )
            )
        smallest = f"{format_bytes(self.smallest_bytes)}, proven"
        if self.least_bytes < self.smallest_bytes:
            smallest = (
                f"between {format_bytes(self.least_bytes)} (proven) and "
                f"{format_bytes(self.smallest_bytes)} (found)"
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  " + "  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join(
            [
                f"keep-all: {self.baseline}",
                *lines,
                f"  smallest budget: {smallest}",
            ]
        )

    def plot(self, path: str | os.PathLike) -> None:
        """Draw energy and time over keep-all's against memory, to `path`.

        The file's type follows its name (.png, .svg, .pdf). Needs matplotlib, which
        `pip install "poet_jax[plot]"` brings; raises ImportError without it.
        """
        figure = new_figure(figsize=(6, 4))
        axes = figure.subplots()
        base = self.baseline
        memory = [100 * p.usage.peak_bytes / base.peak_bytes for p in self.points]
        for label, ratios, style in (
            ("energy (modelled)", [p.usage.joules / base.joules for p in self.points],
             "o-"),
            ("time (modelled)", [p.usage.seconds / base.seconds for p in self.points],
             "s--"),
            ("bound on the objective",
             [p.plan.bound / p.plan.objective * p.usage.joules / base.joules
              for p in self.points], ":"),
        ):  # fmt: skip
            axes.plot(memory, [100 * (x - 1) for x in ratios], style, label=label)
        axes.axvline(
            100 * self.least_bytes / base.peak_bytes, color="black", linewidth=0.8
        )
        axes.set_xlabel("memory (% of keep-all)")
        axes.set_ylabel("extra over keep-all (%)")
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)


def pareto(
    graph: Graph,
    costs: Costs,
    budgets: Iterable[BudgetLike] | None = None,
    planner: Planner | None = None,
    store_bytes: float = math.inf,
) -> Front:
    """Plan `graph` for several budgets, from the smallest that works upwards.

    Args:
      graph, costs: what is planned.
      budgets: as anywhere; those below the smallest that works are left out. By default
        eight from that up to keep-all's.
      planner: `MilpPlanner()` by default, which starts each point from the last one.
      store_bytes: room on the device's storage, for budgets that do not say.

    A point costs no more than one with less memory whose plan keeps its limits, and its
    bound is no lower than that of one with more of everything and the same order of
    nodes. Memory in which no plan keeps the other limits of its budget has no point.
    Nothing is compiled. Plans, and what percentages are of, are node by node: as one
    executable the step may need more or less (`Schedule`).

    Raises ValueError for a budget that cannot be read, and BudgetTooSmall if the limits
    of the largest one leave no plan.
    """
    planner = MilpPlanner() if planner is None else BasePlanner.of(planner)
    baseline = keep_everything(graph, costs).usage
    chosen = [parse_budget(budget, baseline.peak_bytes) for budget in budgets or ()]
    smallest_bytes = least_bytes = baseline.peak_bytes
    try:
        planner(graph, costs, Budget(1).on_storage_of(store_bytes, graph))
    except BudgetTooSmall as error:
        smallest_bytes, least_bytes = error.smallest_bytes, error.least_bytes
    if budgets is None:
        step = (baseline.peak_bytes - smallest_bytes) / (POINTS - 1)
        chosen = [Budget(smallest_bytes + round(i * step)) for i in range(1, POINTS)]
    larger = {budget for budget in chosen if budget.memory_bytes > smallest_bytes}
    asked = [Budget(smallest_bytes), *sorted(larger, key=_limits)]
    asked = [budget.on_storage_of(store_bytes, graph) for budget in asked]
    chosen: list[Budget] = []
    plans: list[Plan] = []
    for budget in asked:
        known = [x for x in plans if fits(judge_plan(graph, costs, x).usage, budget)]
        last = min(known, key=lambda plan: plan.objective, default=None)
        try:
            plan = planner(graph, costs, budget, last)
        except BudgetTooSmall:
            is_limited = budget.store_bytes is not None or budget.seconds is not None
            if not is_limited or budget is asked[-1]:
                raise
            continue  # no plan in so little RAM keeps the other limits
        if last is not None and last.objective < plan.objective:
            # Its bound and status are of less memory, where the optimum may be higher.
            bound, status = plan.bound, plan.status
            if last.order != plan.order:
                bound = least_objective(graph, costs, planner.objective)
                status = Status.FEASIBLE
            plan = dataclasses.replace(last, bound=bound, status=status)
        plans.append(plan)
        chosen.append(budget)
    smallest_bytes = chosen[0].memory_bytes
    for number, (budget, plan) in enumerate(zip(chosen, plans, strict=True)):
        bound = max(
            other.bound
            for more, other in zip(chosen, plans, strict=True)
            if other.order == plan.order
            and all(a >= b for a, b in zip(_limits(more), _limits(budget), strict=True))
        )
        plans[number] = dataclasses.replace(plan, bound=min(bound, plan.objective))
    points = [
        Point(budget, plan, judge_plan(graph, costs, plan).usage)
        for budget, plan in zip(chosen, plans, strict=True)
    ]
    return Front(tuple(points), smallest_bytes, least_bytes, baseline)


def _limits(budget: Budget) -> tuple[float, float, float]:
    """Memory, seconds and storage; infinite where there is no limit."""
    seconds, room = budget.seconds, budget.store_bytes
    return (
        budget.memory_bytes,
        math.inf if seconds is None else seconds,
        math.inf if room is None else room,
    )
