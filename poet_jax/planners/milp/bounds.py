"""Lower bounds by relaxations of few cuts, those of many that say most.

With (6) between any two of its cuts, a relaxation says at least as much as that of any
of its cuts alone, but a dozen of cuts make a program that takes minutes. So the cuts at
which it costs most are looked for, one after the other.
"""

import concurrent.futures
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.milp.lift import crests, summits
from poet_jax.planners.milp.solver import TOGETHER, together
from poet_jax.planners.milp.state import State
from poet_jax.planners.planner import Judged, keep_everything, least_objective

T = TypeVar("T")

# The cuts to begin with are two from each of so many stretches of the step.
STRETCHES = 12

# A relaxation has this share of the time limit.
SHARE = 1 / 20

# A cut that adds less than this share of the bound adds nothing.
WORTH = 1e-7


class Bounds:
    """A source of higher and higher lower bounds.

    This is greedy choice, and lazy (Minoux, 1978): what a cut adds to those that are
    chosen is mostly less than it added to fewer of them, so cuts are asked again in the
    order of what they added last, and the first one that still adds more than the next
    one did is chosen. It ends when none adds anything, or a relaxation takes too long.

    Attributes:
      chosen: base nodes to cut at, and their `bound`.
      together: how many cuts are asked at once.
    """

    share = 1.0
    together = TOGETHER

    def __init__(self, state: State):
        self.state = state
        self._seconds = state.planner.time_limit_seconds * SHARE
        self._took = 0.0  # of these, by the last relaxation
        self.chosen: list[int] = []
        parts = state.graph, state.costs, state.planner.objective
        self.bound = least_objective(*parts)
        self._added: dict[int, float] = {}  # by each other cut, when it was asked last

    def __iter__(self) -> Iterator[tuple[float, Judged | None]]:
        self._ask_for(self._summits())
        while self._took < self._seconds:
            self._ask_for(self.state.cuts)
            fresh: dict[int, float] = {}
            while (stale := self._stale(fresh)) and self._took < self._seconds:
                few = stale[: self.together]
                for cut, bound in zip(few, together(self._with, few), strict=True):
                    fresh[cut] = self._added[cut] = max(0.0, bound - self.bound)
                    yield bound, None
            cut = max(fresh, key=lambda cut: fresh[cut], default=None)
            if stale or cut is None or fresh[cut] <= WORTH * self.bound:
                return
            self.bound += self._added.pop(cut)
            self.chosen.append(cut)

    def beside(self, work: Callable[[], T]) -> tuple[T, float]:
        """What `work` returns, and the highest bound that was found meanwhile."""
        done = threading.Event()

        def highest() -> float:
            bounds = itertools.takewhile(lambda _: not done.is_set(), self)
            return max((bound for bound, _ in bounds), default=0.0)

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            self.together = max(1, TOGETHER - 1)  # `work` takes a processor
            bound = thread.submit(highest)
            try:
                result = work()
            finally:
                done.set()
            self.together = TOGETHER
            return result, bound.result()

    def _summits(self) -> list[int]:
        """Where keep-all exceeds the budget most, and where what a node needs itself,
        which no plan can do without, takes much of that."""
        graph, costs, budget = self.state.graph, self.state.costs, self.state.budget
        assert budget is not None
        live = [nbytes for nbytes, _ in crests(keep_everything(graph, costs))]
        own = costs.workspace_bytes + [
            sum(costs.nbytes[v] for v in {*node.reads, *node.writes})
            for node in graph.nodes
        ]
        cuts = summits(live, STRETCHES) | summits([*(own + live)], STRETCHES)
        return [cut for cut in cuts if live[cut] > budget.memory_bytes]

    def _ask_for(self, cuts: Collection[int]) -> None:
        """Cuts that were not asked for before come first."""
        new = sorted(set(cuts) - {*self.chosen, *self._added})
        self._added = dict.fromkeys(new, math.inf) | self._added

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
        since, state = time.monotonic(), self.state
        parts = state.graph, state.costs, state.budget, state.planner
        program = Cuts(*parts, [*self.chosen, cut], windows=True)
        bound = program.relaxed(self._seconds)
        self._took = time.monotonic() - since
        return bound
