"""Lower bounds by relaxations of few cuts, those of many that say most.

With (6) between any two of its cuts, a relaxation says at least as much as that of any
of its cuts alone, but a dozen of cuts make a program that takes minutes. So the cuts at
which it costs most are looked for, one after the other.
"""

import math
import time
from collections.abc import Collection, Iterator

from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.milp.lift import stage_bytes, summits
from poet_jax.planners.milp.solver import TOGETHER, together
from poet_jax.planners.milp.state import State
from poet_jax.planners.planner import Judged, least_objective

# The cuts to begin with are one from each of so many stretches of the step.
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
    """

    share = 1.0

    def __init__(self, state: State):
        self.state = state
        self._seconds = state.planner.time_limit_seconds * SHARE
        self._took = 0.0  # of these, by the last relaxation
        self.chosen: list[int] = []
        parts = state.graph, state.costs, state.planner.objective
        self.bound = least_objective(*parts)
        self._added: dict[int, float] = {}  # by each other cut, when it was asked last

    def __iter__(self) -> Iterator[tuple[float, Judged | None]]:
        assert self.state.budget is not None
        live = stage_bytes(self.state.graph, self.state.costs)
        limit = self.state.budget.memory_bytes
        self._ask_for([cut for cut in summits(live, STRETCHES) if live[cut] > limit])
        while self._took < self._seconds:
            self._ask_for(self.state.cuts)
            fresh: dict[int, float] = {}
            while (stale := self._stale(fresh)) and self._took < self._seconds:
                few = stale[:TOGETHER]
                for cut, bound in zip(few, together(self._with, few), strict=True):
                    fresh[cut] = self._added[cut] = max(0.0, bound - self.bound)
                    yield bound, None
            cut = max(fresh, key=lambda cut: fresh[cut], default=None)
            if stale or cut is None or fresh[cut] <= WORTH * self.bound:
                return
            self.bound += self._added.pop(cut)
            self.chosen.append(cut)

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
