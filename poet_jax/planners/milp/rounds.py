"""Programs of cuts, round after round: the plan of each says what to ask for next."""

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from poet_jax.planners.milp.bounds import Bounds
from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.milp.lift import crests, lifted, values_of
from poet_jax.planners.milp.state import State
from poet_jax.planners.planner import ROUNDING, Judged, prefetch

# Beyond so many nodes evicting takes longer than a round.
MANY_NODES = 300

# A program of more than LARGE binaries is solved with a horizon; see `Cuts`.
LARGE, HORIZON = 6000, 40

# So many rounds reserve room only where nodes run again; later ones at every cut.
RESERVING_ROUNDS = 8

# A round has this share of the time limit, and so many seconds at least; three times as
# much where it ended without a solution.
SHARE, LEAST_SECONDS = 1 / 12, 2.0

# After a round whose time ran out, the next gets so many of the cuts that bound most.
FIRST = 2

# Relative gap at which the solver leaves a round as long as plans need more cuts.
COARSE_GAP = 3e-3

# The solver starts from the best plan if that costs at most so many times the bound. A
# worse start leads it astray.
GOOD = 1.02


class Rounds:
    """A source: `Cuts` with more and more cuts.

    They end when a plan fits, or when more cuts do not help. Where two lanes make the
    time of a large graph, the first rounds do without paging, which is far quicker to
    solve, until a plan fits or none is found. A round has one processor, so `bounds`
    are looked for beside it.
    """

    share = 1 / 2

    def __init__(self, state: State, bounds: Bounds | None = None):
        self.state, self.budget, self.bounds = state, state.budget, bounds
        self.graph = state.graph
        planner, is_large = state.planner, len(state.graph.nodes) > MANY_NODES
        if self.budget and is_large and planner.remat and planner.objective == "time":
            unpaged = dataclasses.replace(planner, paging=False)
            self.graph = unpaged.restrict(state.graph)
        most = crests(state.baseline)
        state.cuts.add(most.index(max(most)))
        self.asked = self.budget  # with an earlier deadline once plans wait for storage
        self.horizon: int | None = None
        self.reserve_bytes, self.tries = 0, RESERVING_ROUNDS
        self.reserves: Counter[tuple[int, int]] = Counter()  # both as of `Cuts`
        limit = state.planner.time_limit_seconds
        self.seconds = max(LEAST_SECONDS, limit * SHARE)
        self.gap = max(COARSE_GAP if self.budget else 0.0, state.planner.gap / 2)
        self.rounds = 0

    def __iter__(self) -> Iterator[tuple[float, Judged | None]]:
        state, goes_on = self.state, True
        while goes_on:
            program = self.program()
            seconds, begin = self.seconds_of_round(), time.monotonic()
            solving = functools.partial(
                program.model.optimize, seconds, self.start(program)
            )
            if self.bounds is None:
                solution = solving()
            else:
                solution, other = self.bounds.beside(solving)
                state.raise_bound(other)
            stopped = time.monotonic() - begin > 0.9 * seconds
            bound, judged = solution.bound * program.unit, None
            if solution.values is not None:
                state.solved, judged = True, lifted(program, solution.values)
            yield self.proven(bound), judged and state.repaired(judged)
            goes_on = self.adapt(judged, bound, stopped)
            if stopped and self.bounds is not None:
                state.cuts.update(self.bounds.chosen[:FIRST])

    def program(self) -> Cuts:
        """Of all cuts, with a horizon if it is large otherwise."""
        state = self.state
        program = Cuts(
            self.graph,
            state.costs,
            self.asked,
            state.planner,
            state.cuts,
            reserve_bytes=self.reserve_bytes,
            reserves=self.reserves,
            horizon=self.horizon,
        )
        is_large = program.statistics["binaries"] > LARGE and len(state.cuts) > 1
        if self.budget and self.horizon is None and is_large:
            self.horizon = HORIZON
            return self.program()
        program.model.gap = self.gap
        self.rounds += 1
        state.statistics |= program.statistics | {"rounds": self.rounds}
        return program

    def start(self, program: Cuts) -> list[tuple[Any, float]]:
        """The best plan as a solution, for the solver to start from if it is good."""
        best = self.state.best
        if best is None or self.state.least() > GOOD * self.state.bound:
            return []
        return values_of(program, best)

    def seconds_of_round(self) -> float:
        return max(1.0, min(self.seconds, self.state.seconds_left()))

    def proven(self, bound: float) -> float:
        """The bound of the last program, 0 if it is none for all plans."""
        reserving = self.reserve_bytes or self.reserves
        narrowed = reserving or self.horizon or self.asked is not self.budget
        return 0.0 if narrowed or self.is_unpaged else bound

    def adapt(self, judged: Judged | None, bound: float, stopped: bool) -> bool:
        """Ask for what the plan of a solution lacked; False if nothing would help.

        Args:
          bound: of the program.
          stopped: whether the solver ran out of the round's time.
        """
        if judged is None:
            if self.is_unpaged:
                return self.page()
            self.seconds *= 3 if stopped else 1
            return stopped
        limit = round(bound) if self.budget is None else self.budget.memory_bytes
        over = judged.usage.peak_bytes - limit
        if over > 0 and self.cut(judged, limit):
            return True
        if self.budget is None:
            return False
        if self.is_unpaged and over <= 0:
            return self.page()
        coarse, self.gap = self.gap, self.state.planner.gap / 2
        if coarse > self.gap and not stopped:
            return True
        if over > 0:
            self.reserve(judged, over)
            return True
        late = self.late_seconds(judged)
        return late > 0 and self.hurry(late)

    @property
    def is_unpaged(self) -> bool:
        """Whether the programs do without paging."""
        return self.graph is not self.state.graph

    def page(self) -> bool:
        """Page from now on, with nothing left free."""
        self.graph, self.reserve_bytes = self.state.graph, 0
        self.reserves.clear()
        return True

    def cut(self, judged: Judged, limit: int) -> bool:
        """Cut where a plan exceeds the limit most; False if that is no news."""
        new = worst_stages(judged, limit) - self.state.cuts
        self.state.cuts |= new
        return bool(new)

    def reserve(self, judged: Judged, over: int) -> None:
        """Leave room for what exceeds the budget between cuts, as nodes run again."""
        assert self.budget is not None
        limit, worst = self.budget.memory_bytes, crests(judged)
        self.tries -= 1
        if self.tries < 0 or self.horizon:
            self.reserve_bytes += over + limit // 100
            return
        for stage in worst_stages(judged, limit):
            live, again = worst[stage]
            self.reserves[stage, again] += live - limit

    def late_seconds(self, judged: Judged) -> float:
        """By how much a plan with prefetching misses the deadline; 0 if it does not."""
        assert self.budget is not None
        if self.budget.seconds is None:
            return 0.0
        seconds = prefetch(self.state.costs, judged, self.budget).usage.seconds
        is_late = seconds > self.budget.seconds * ROUNDING
        return seconds - self.budget.seconds if is_late else 0.0

    def hurry(self, late_seconds: float) -> bool:
        """Ask for an earlier deadline; False if that is hopeless."""
        assert self.budget is not None and self.asked is not None
        least, deadline = float(self.state.costs.seconds.sum()), self.asked.seconds
        assert deadline is not None
        deadline = max(deadline - late_seconds, (deadline + least) / 2)
        self.asked = dataclasses.replace(self.budget, seconds=deadline)
        return deadline >= least * (1 + self.state.planner.gap)


def worst_stages(judged: Judged, limit: int) -> set[int]:
    """The stages, some apart, that exceed `limit` the most: two, or a few in a large
    graph."""
    found: list[int] = []
    worst = crests(judged)
    for stage in sorted(range(len(worst)), key=lambda stage: -worst[stage][0]):
        apart = all(abs(stage - other) > len(worst) // 40 for other in found)
        if worst[stage][0] > limit and apart:
            found.append(stage)
    return set(found[: 2 + len(worst) // 300])
