"""Lower bounds by relaxations of few cuts, those of many that say most.

With (6) between any two of its cuts, a relaxation says at least as much as that of any
of its cuts alone, but a dozen of cuts make a program that takes minutes. So the cuts at
which it costs most are looked for, one after the other.
"""

import concurrent.futures
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Budget
from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.milp.lift import stage_bytes, summits
from poet_jax.planners.milp.solver import TOGETHER
from poet_jax.planners.planner import least_objective

# The cuts to begin with are two from each of so many stretches of the step.
STRETCHES = 12

# A cut that adds less than this share of the bound adds nothing.
WORTH = 1e-7


class Bounds:
    """Higher and higher lower bounds on the objective, in its unit.

    This is greedy choice, and lazy (Minoux, 1978): what a cut adds to those that are
    chosen is mostly less than it added to fewer of them, so cuts are asked again in the
    order of what they added last, and the first one that still adds more than the next
    one did is chosen.

    Args:
      graph, costs, budget: what is planned.
      planner: a MilpPlanner. A relaxation has a twentieth of its time.

    Attributes:
      chosen: base nodes to cut at, and their `bound`.
    """

    def __init__(self, graph: Graph, costs: Costs, budget: Budget, planner: Any):
        self._parts = graph, costs, budget, planner
        self._seconds = planner.time_limit_seconds / 20
        self._took = 0.0  # of these, by the last relaxation
        self.chosen: list[int] = []
        self.bound = least_objective(graph, costs, planner.objective)
        self._added: dict[int, float] = {}  # by each other cut, when it was asked last

    def over(
        self,
        cuts: Collection[int],
        seconds_left: Callable[[], float],
        together: int = TOGETHER,
    ) -> Iterator[float]:
        """Choose among these base nodes, too, until none adds anything, or a relaxation
        takes too long; so many are asked at once. `cuts` may grow meanwhile."""
        if not self._added:
            self._ask_for(self._summits())

        def may_ask() -> bool:
            return self._took < min(self._seconds, seconds_left())

        with concurrent.futures.ThreadPoolExecutor(together) as threads:
            while may_ask():
                self._ask_for(set(cuts))
                fresh: dict[int, float] = {}
                while (stale := self._stale(fresh)) and may_ask():
                    few = stale[:together]
                    for cut, bound in zip(
                        few, threads.map(self._with, few), strict=True
                    ):
                        fresh[cut] = self._added[cut] = max(0.0, bound - self.bound)
                        yield bound
                cut = max(fresh, key=lambda cut: fresh[cut], default=None)
                if stale or cut is None or fresh[cut] <= WORTH * self.bound:
                    return
                self.bound += self._added.pop(cut)
                self.chosen.append(cut)

    def _summits(self) -> list[int]:
        """Where keep-all exceeds the budget most, and where what a node needs itself,
        which no plan can do without, takes much of that."""
        graph, costs, budget, _ = self._parts
        live = stage_bytes(graph, costs)
        own = costs.workspace_bytes + [
            sum(costs.nbytes[v] for v in {*node.reads, *node.writes})
            for node in graph.nodes
        ]
        cuts = summits(live, STRETCHES) | summits([*(own + live)], STRETCHES)
        return [cut for cut in cuts if live[cut] > budget.memory_bytes]

    def _ask_for(self, cuts: Collection[int]) -> None:
        """Cuts that were not asked for before come first."""
        new = sorted(set(cuts) - {*self.chosen, *self._added})
        self._added = dict.fromkeys(spread(new), math.inf) | self._added

    def _stale(self, fresh: dict[int, float]) -> list[int]:
        """The cuts that may add more than any of `fresh`, the one that added most
        first."""
        most = max(fresh.values(), default=-1.0)
        hopeful = [
            cut
            for cut, added in self._added.items()
            if cut not in fresh and added > most
        ]
        return sorted(hopeful, key=lambda cut: -self._added[cut])

    def _with(self, cut: int) -> float:
        """The bound with one more cut; 0 if that takes too long."""
        since = time.monotonic()
        program = Cuts(*self._parts, [*self.chosen, cut], windows=True)
        bound = program.relaxed(self._seconds)
        self._took = time.monotonic() - since
        return bound


def spread(items: Sequence[int]) -> list[int]:
    """The items in an order whose beginnings are from everywhere: by multiples of the
    golden ratio."""
    places = [number * (math.sqrt(5) - 1) / 2 % 1 for number in range(len(items))]
    return [items[n] for n in np.argsort(np.argsort(places, kind="stable"))]
