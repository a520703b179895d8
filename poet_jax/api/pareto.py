"""The Pareto front of memory against energy or time."""

import contextlib
import dataclasses
import html
import math
import os
from collections.abc import Iterable
from typing import Any

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
from poet_jax.core.representation import brief, html_table
from poet_jax.core.simulate import Usage
from poet_jax.core.units import format_bytes, format_joules, format_seconds
from poet_jax.planners.milp.search import MilpPlanner
from poet_jax.planners.planner import fits, judge_plan, keep_everything, least_objective
from poet_jax.viz.figures import as_svg, drawn

POINTS = 8  # budgets that are planned where none are given
HEIGHT = 3.4  # inches of a front's figure


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """A budget, its plan, and the plan's usage."""

    budget: Budget
    plan: Plan
    usage: Usage

    __repr__ = brief


@dataclasses.dataclass(frozen=True, eq=False)
class Front:
    """Plans for growing budgets; a plan costs no more than one of a smaller budget.

    Attributes:
      points: in order of memory, from the smallest budget found.
      smallest_bytes: that budget.
      least_bytes: proven lower bound on a budget that works.
      baseline: usage of keep-all (no remat, no paging).
    """

    points: tuple[Point, ...]
    smallest_bytes: int
    least_bytes: int
    baseline: Usage

    __repr__ = brief

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  " + "  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join(
            (f"keep-all: {self.baseline}", *lines, f"  {self._smallest()}")
        )

    def _repr_html_(self) -> str:
        """Table and figure, for a notebook; without matplotlib there is no figure."""
        head, *rows = self._rows()
        ends = f"keep-all: {self.baseline}", self._smallest()
        parts = [html_table(head, rows), *(f"<p>{html.escape(x)}</p>" for x in ends)]
        with contextlib.suppress(ImportError):
            parts.append(as_svg(HEIGHT, self._draw))
        return "".join(parts)

    def _rows(self) -> list[tuple[str, ...]]:
        """Head and points of a table."""
        rows = [("budget", "peak", "time", "energy", "over keep-all", "gap", "status")]
        for point in self.points:
            plan, usage = point.plan, point.usage
            base = self.baseline
            energy = _ratio(usage.joules, base.joules) - 1
            late = _ratio(usage.seconds, base.seconds) - 1
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
        return rows

    def _smallest(self) -> str:
        smallest = format_bytes(self.smallest_bytes)
        if self.least_bytes < self.smallest_bytes:
            least = format_bytes(self.least_bytes)
            return f"smallest budget: between {least} (proven) and {smallest} (found)"
        return f"smallest budget: {smallest}, proven"

    def plot(self, path: str | os.PathLike) -> None:
        """Plot extra energy and time over keep-all against memory, to `path`.

        The suffix sets the format (.png, .svg, .pdf). Raises ImportError without
        matplotlib: `pip install "poet_jax[plot]"`.
        """
        with drawn(path, HEIGHT) as figure:
            self._draw(figure)

    def _draw(self, figure: Any) -> None:
        base = self.baseline
        memory = [_ratio(p.usage.peak_bytes, base.peak_bytes) for p in self.points]
        energy = [_ratio(p.usage.joules, base.joules) for p in self.points]
        time = [_ratio(p.usage.seconds, base.seconds) for p in self.points]
        bound = [
            (1 - p.plan.gap) * joules
            for p, joules in zip(self.points, energy, strict=True)
        ]
        lines = {
            "energy (modelled)": (energy, "o-"),
            "time (modelled)": (time, "s--"),
            "bound on the objective": (bound, ":"),
        }
        axes = figure.subplots()
        for label, (ratios, style) in lines.items():
            extra = [100 * (x - 1) for x in ratios]
            axes.plot([100 * x for x in memory], extra, style, label=label)
        least = _ratio(self.least_bytes, base.peak_bytes)
        axes.axvline(100 * least, color="black", linewidth=0.8)
        axes.set_xlabel("memory (% of keep-all)")
        axes.set_ylabel("extra over keep-all (%)")
        axes.legend()


def pareto(
    graph: Graph,
    costs: Costs,
    budgets: Iterable[BudgetLike] | None = None,
    planner: Planner | None = None,
    store_bytes: float = math.inf,
) -> Front:
    """Plan `graph` for several budgets, from the smallest that works upwards.

    Args:
      graph, costs: to plan.
      budgets: by default eight, from the smallest that works to keep-all's peak. Those
        below the smallest are left out.
      planner: `MilpPlanner()` by default, which starts each point from the last one.
      store_bytes: room on storage, for budgets that do not set it.

    A point reuses the plan of a smaller budget if that is cheaper and within its
    limits, and the bound of a larger one with the same order of nodes. A budget whose
    other limits leave no plan has no point. Nothing is compiled: plans and percentages
    are node by node, and the compiled step (`Schedule`) may need more or less.

    Raises ValueError for an invalid budget, and BudgetTooSmall if the largest one has
    no plan.
    """
    if isinstance(budgets, str):
        raise ValueError(
            f"`budgets` must be several budgets, got {budgets!r}; use for example "
            f"budgets=[{budgets!r}]"
        )
    budgets = None if budgets is None else list(budgets)
    if "device" in (budgets or ()):
        raise ValueError(
            'A graph and its costs are on no device, so "device" is no budget for '
            "them. Sizes, percentages and `Budget`s are. Use for example "
            'budgets=["64MiB"], or schedule(fun, "device").pareto(*args).'
        )
    planner = MilpPlanner() if planner is None else BasePlanner.of(planner)
    baseline = keep_everything(graph, costs).usage
    most_bytes = max(1, baseline.peak_bytes)  # as no budget is smaller
    chosen = [parse_budget(budget, most_bytes) for budget in budgets or ()]
    smallest_bytes = least_bytes = 1
    try:
        planner(graph, costs, Budget(1).on_storage_of(store_bytes, graph))
    except BudgetTooSmall as error:
        smallest_bytes, least_bytes = error.smallest_bytes, error.least_bytes
    if budgets is None:
        step = (most_bytes - smallest_bytes) / (POINTS - 1)
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
            continue  # no plan of so little memory keeps the other limits
        if last is not None and last.objective < plan.objective:
            # Its own bound and status are of less memory.
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


def front_rows(front: Front) -> list[dict[str, Any]]:
    """A row for each point of a front, in SI units; seconds and joules are modelled."""
    base = front.baseline
    return [
        {
            "budget_bytes": point.budget.memory_bytes,
            "peak_bytes": point.usage.peak_bytes,
            "seconds": point.usage.seconds,
            "joules": point.usage.joules,
            "bytes_paged_in": point.usage.bytes_paged_in,
            "bytes_paged_out": point.usage.bytes_paged_out,
            "gap": point.plan.gap,
            "status": point.plan.status.name,
            "keep_all_bytes": base.peak_bytes,
            "keep_all_seconds": base.seconds,
            "keep_all_joules": base.joules,
        }
        for point in front.points
    ]


def _ratio(used: float, base: float) -> float:
    """`used` over what keep-all uses; 1 where keep-all uses nothing."""
    return used / base if base else 1.0


def _limits(budget: Budget) -> tuple[float, float, float]:
    """(memory, seconds, storage), infinite without a limit."""
    seconds, room = (
        math.inf if x is None else x for x in (budget.seconds, budget.store_bytes)
    )
    return budget.memory_bytes, seconds, room
