"""What a search knows, and what its sources of plans and bounds have to be."""

import math
import time
from collections.abc import Iterator
from typing import Any, Protocol

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Budget
from poet_jax.core.units import format_count, format_joules, format_seconds
from poet_jax.planners.evict import evictions
from poet_jax.planners.planner import (
    Judged,
    fits,
    floor_bytes,
    keep_everything,
    least_objective,
    objective_of,
    prefetch,
)
from poet_jax.planners.refill import refill

# So many seconds are left for what follows the search.
SPARE = 1.0


class State:
    """A search's best plan, a lower bound, and the time that is left.

    Args:
      planner: a MilpPlanner.
      graph, costs: what is planned.
      budget: None if the least memory is looked for; then values are bytes.
      seconds: of the search.

    Attributes:
      best: the plan of least value that the simulator accepts, or None.
      leanest: the plan of least memory, within the budget or not.
      bound: no plan has a lower value.
      cuts: base nodes at which programs limit memory.
      solved: whether a program had a solution.
      statistics: of the last program.
    """

    def __init__(
        self,
        planner: Any,
        graph: Graph,
        costs: Costs,
        budget: Budget | None,
        seconds: float,
    ):
        self.planner, self.graph = planner, graph
        self.costs, self.budget = costs, budget
        self.end = self._turn_end = time.monotonic() + seconds - SPARE
        self.bound: float = floor_bytes(graph, costs)
        if budget is not None:
            self.bound = least_objective(graph, costs, planner.objective)
        self.best: Judged | None = None
        self.baseline = self.leanest = keep_everything(graph, costs)
        self.cuts: set[int] = set()
        self.solved = False
        self.statistics: dict[str, int] = {}
        self.consider(self.baseline)

    def value(self, judged: Judged) -> float:
        if self.budget is None:
            return judged.usage.peak_bytes
        return objective_of(judged.usage, self.planner.objective)

    def least(self) -> float:
        """The value of the best plan; infinite without one."""
        return math.inf if self.best is None else self.value(self.best)

    def consider(self, judged: Judged) -> None:
        """Take a plan if it is better, once there is nothing to page in or run again
        for which there is room."""
        if judged.usage.peak_bytes < self.leanest.usage.peak_bytes:
            self.leanest = judged
        if self.budget is None:
            self.best = self.leanest
        elif judged.usage.peak_bytes <= self.budget.memory_bytes:
            judged = refill(self.costs, self.budget, judged, self.planner.objective)
            judged = prefetch(self.costs, judged, self.budget)
            if fits(judged.usage, self.budget) and self.value(judged) < self.least():
                self.best = judged

    def repaired(self, judged: Judged) -> Judged:
        """`judged` with evictions until it fits, or time is up."""
        if self.budget is None:
            return judged
        parts = self.costs, judged, self.planner.objective
        for state in evictions(*parts, memory_bytes=self.budget.memory_bytes):
            judged = state
            if self.is_late():
                break
        return judged

    def raise_bound(self, bound: float) -> None:
        if self.budget is None:  # peaks are multiples of a unit, solvers not exact
            sizes = (self.costs.nbytes, self.costs.workspace_bytes)
            unit = math.gcd(*(int(n) for x in sizes for n in x)) or 1
            bound = math.ceil(bound * (1 - 1e-6) / unit) * unit
        self.bound = max(self.bound, bound)

    def is_optimal(self) -> bool:
        gap = 0.0 if self.budget is None else self.planner.gap * abs(self.least())
        return self.best is not None and self.least() - self.bound <= gap

    def take_turn(self, share: float) -> None:
        """Give a source a share of the time that is left."""
        now = time.monotonic()
        self._turn_end = now + share * max(0.0, self.end - now)

    def seconds_left(self) -> float:
        """Of the source whose turn it is; not above zero if its time is up."""
        return self._turn_end - time.monotonic()

    def is_over(self) -> bool:
        """Whether the gap or the time is reached."""
        return self.is_optimal() or self.is_late()

    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.end

    def __str__(self) -> str:
        """For the progress line."""
        energy = self.planner.objective == "energy"
        show = format_joules if energy else format_seconds
        found, least = "no plan yet", self.least()
        if self.best is not None:
            found = f"{show(least)}, gap {(least - self.bound) / (least or 1):.2%}"
        left = max(0.0, self.end - time.monotonic())
        return (
            f"planning {format_count(len(self.graph.nodes), 'node')}: {found}, bound "
            f"{show(self.bound)}, {left:.0f} s left"
        )


class Source(Protocol):
    """What a search asks for plans and bounds.

    Attributes:
      share: of the time that is left when its turn comes.
    """

    share: float

    def __iter__(self) -> Iterator[tuple[float, Judged | None]]:
        """(a lower bound or 0, a plan that may fit or None), each as soon as it is
        there. It goes on in the source's next turn."""
        ...
