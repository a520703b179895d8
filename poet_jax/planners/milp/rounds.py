"""Programs of cuts, round after round: the plan of each says what to ask for next."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Budget
from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.milp.lift import crests, solve
from poet_jax.planners.planner import ROUNDING, Judged, prefetch

# A program with more binaries gets a horizon of so many nodes.
LARGE = 6000
HORIZON = 40

# So often what nodes that run again exceed is left free at the cuts where they do,
# before as much is left free at all.
RESERVING_ROUNDS = 8

# A round has this share of the time limit, and so many seconds at least; three times as
# much where it ended without a solution.
SHARE, LEAST_SECONDS = 1 / 12, 2.0

# Relative gap at which the solver leaves a round as long as plans need more cuts, and
# for the smallest budget.
COARSE_GAP, LEAN_GAP = 3e-3, 3e-4


class Rounds:
    """(lower bound, plan or None) of `Cuts` with more and more cuts.

    They end when a plan fits and little is left to gain, when more cuts do not help, or
    when no time is left.

    Args:
      budget: None for the smallest memory, in bytes.
      planner: a MilpPlanner.
      seconds_left: for all rounds.
      start: a good plan to start from, or None.
      baseline: keep-all, which says where to cut first.

    Attributes:
      statistics: of the last program, with the number of rounds.
      stopped: whether the solver ran out of the last round's time.
      cuts: base nodes at which memory is limited; others may add some.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        budget: Budget | None,
        planner: Any,
        seconds_left: Callable[[], float],
        start: Callable[[], Judged | None],
        baseline: Judged,
    ):
        self.graph, self.costs, self.budget = graph, costs, budget
        self.planner, self.seconds_left, self.start = planner, seconds_left, start
        most = crests(graph, baseline)
        self.cuts = {most.index(max(most))}
        self.asked = budget  # with an earlier deadline once plans wait for storage
        self.horizon: int | None = None
        self.reserve_bytes = 0  # left free at every cut
        self.failing_bytes, self.fitting_bytes = 0, None  # reserves of earlier rounds
        self.reserves: Counter[tuple[int, int]] = Counter()  # see `Cuts`
        self.tries = RESERVING_ROUNDS
        self.share = max(LEAST_SECONDS, planner.time_limit_seconds * SHARE)
        self.gap = max(COARSE_GAP if budget else LEAN_GAP, planner.gap / 2)
        self.statistics = {"rounds": 0}
        self.stopped = False

    def __iter__(self) -> Iterator[tuple[float, Judged | None]]:
        while self.seconds_left() > 1.0:
            program = Cuts(
                self.graph,
                self.costs,
                self.asked,
                self.planner,
                self.cuts,
                self.reserve_bytes,
                self.horizon,
                reserves=self.reserves,
            )
            seconds, begin = min(self.share, self.seconds_left()), time.monotonic()
            size = program.statistics["binaries"]
            many = len(self.cuts) > 1 and size > LARGE
            if self.budget and many and not self.horizon:
                self.horizon = HORIZON
                self.reserve_bytes = self.budget.memory_bytes // 40
                continue
            self.statistics |= program.statistics
            self.statistics["rounds"] += 1
            judged, bound = solve(program, seconds, self.gap, self.start())
            self.stopped = time.monotonic() - begin > 0.9 * seconds
            yield self.proven(bound), judged
            if not self.adapt(judged, bound, self.stopped):
                return

    def proven(self, bound: float) -> float:
        """The bound of the last program, 0 if it is none for all plans."""
        reserving = self.reserve_bytes or self.reserves
        narrowed = reserving or self.horizon or self.asked is not self.budget
        return 0.0 if narrowed else bound

    def may_grow(self) -> bool:
        return not self.horizon or self.statistics["binaries"] < 1.3 * LARGE

    def adapt(self, judged: Judged | None, bound: float, stopped: bool) -> bool:
        """Ask for what the plan of a solution lacked; False if nothing would help.

        Args:
          bound: of the program.
          stopped: whether the solver ran out of the round's time.
        """
        if judged is None:
            self.share *= 3 if stopped else 1
            return self.reserve_less() or stopped
        limit = round(bound) if self.budget is None else self.budget.memory_bytes
        over = judged.usage.peak_bytes - limit
        if over > 0 and self.may_grow():
            new = worst_stages(self.graph, judged, limit) - self.cuts
            if new:
                self.cuts |= new
                if self.horizon and self.fitting_bytes is None:
                    self.reserve_bytes += over // 2
                return True
        if self.budget is None:
            return False
        coarse, self.gap = self.gap, self.planner.gap / 2
        if coarse > self.gap and not stopped:
            return True
        if over > 0:
            self.failing_bytes = self.reserve_bytes
            if self.fitting_bytes is None:
                self.reserve_more(judged, over)
                return True
        elif (late := self.late_seconds(judged)) > 0:
            return self.hurry(late)
        else:
            self.fitting_bytes = self.reserve_bytes
        return self.narrow(stopped)

    def reserve_less(self) -> bool:
        """Half of what is left free, as it leaves no plan."""
        if not (self.reserve_bytes or self.reserves) or not self.tries:
            return False
        self.tries -= 1
        self.reserve_bytes //= 2
        self.reserves = Counter({key: n // 2 for key, n in self.reserves.items()})
        return True

    def reserve_more(self, judged: Judged, over: int) -> None:
        """Leave room for what exceeds the budget between the cuts."""
        assert self.budget is not None
        limit = self.budget.memory_bytes
        if not (self.tries and self.may_grow()):
            self.reserve_bytes += over + limit // 100
            return
        self.tries -= 1
        crest = crests(self.graph, judged)
        for stage in worst_stages(self.graph, judged, limit, 1.0):
            live, again = crest[stage]
            self.cuts.add(stage)
            self.reserves[stage, again] += live - limit

    def narrow(self, stopped: bool) -> bool:
        """The reserve between one that is enough and one that is not; at last a round
        with all the time that is left, if time ended the last one."""
        assert self.budget is not None and self.fitting_bytes is not None
        if self.fitting_bytes - self.failing_bytes > self.budget.memory_bytes // 200:
            self.reserve_bytes = (self.fitting_bytes + self.failing_bytes) // 2
            return True
        if stopped and math.isfinite(self.share):
            self.reserve_bytes, self.share = self.fitting_bytes, math.inf
            return True
        return False

    def late_seconds(self, judged: Judged) -> float:
        """By how much a plan with prefetching misses the deadline; 0 if it does not."""
        assert self.budget is not None
        if self.budget.seconds is None:
            return 0.0
        timely = prefetch(self.costs, judged, self.budget)
        if timely.usage.seconds <= self.budget.seconds * ROUNDING:
            return 0.0
        return timely.usage.seconds - self.budget.seconds

    def hurry(self, late_seconds: float) -> bool:
        """An earlier deadline, and room for pages on their way in."""
        assert self.budget is not None and self.asked is not None
        least, deadline = float(self.costs.seconds.sum()), self.asked.seconds
        assert deadline is not None
        deadline = max(deadline - late_seconds, (deadline + least) / 2)
        if deadline < least * (1 + self.planner.gap):
            return False
        self.asked = dataclasses.replace(self.budget, seconds=deadline)
        self.reserve_bytes += self.budget.memory_bytes // 50
        return True


def worst_stages(
    graph: Graph, judged: Judged, limit: int, between: float = 1.1
) -> set[int]:
    """The stages, some apart, whose base nodes exceed `limit` the most: two, or a few
    in a large graph.

    Where nodes that run again exceed it `between` times, their stages count, too.
    """
    found: list[int] = []
    worst = crests(graph, judged)
    for stage in sorted(range(len(worst)), key=lambda stage: -worst[stage][0]):
        live, node = worst[stage]
        over = live > limit if node == stage else live > between * limit
        apart = all(abs(stage - other) > len(worst) // 40 for other in found)
        if over and apart:
            found.append(stage)
    return set(found[: 2 + len(worst) // 300])
