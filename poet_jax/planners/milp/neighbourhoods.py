"""A part of a plan chosen anew while the rest stays as it is, again and again.

This is large neighbourhood search (Shaw, CP 1998) in the program of `Cuts`: all its
binaries but some that are near each other stay as the best plan has them. What is left
takes a solver seconds, however large the graph is.
"""

import concurrent.futures
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Budget
from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.milp.lift import lifted, repeats, values_of
from poet_jax.planners.milp.rounds import HORIZON, worst_stages
from poet_jax.planners.milp.solver import TOGETHER, Solution
from poet_jax.planners.planner import Judged, objective_of

# So many binaries, at most this share of all, are chosen anew at first, near so many
# places at most; then as many as take a solver the first number of seconds. It is
# stopped after the second.
SIZE, SHARE, PLACES = 6000, 0.75, 4
SECONDS, MOST_SECONDS = 3.5, 4.0

# If nothing better was found so often in turn, in all that are chosen at once, that was
# it.
MISSES = 3

# What a solver finds is worth a look if it is better by this share.
WORTH = 1e-6


class Neighbourhoods:
    """Plans that are better than the best one in some part.

    Args:
      graph, costs, budget: what is planned.
      planner: a MilpPlanner.
      best: gives the best plan so far, which fits.
      cuts: base nodes at which memory is limited. Plans may exceed the budget
        elsewhere; the nodes where they do become cuts, too.
      seconds_left: for all of them.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        budget: Budget,
        planner: Any,
        best: Callable[[], Judged],
        cuts: set[int],
        seconds_left: Callable[[], float],
    ):
        self.graph, self.costs, self.budget = graph, costs, budget
        self.planner, self.best, self.cuts = planner, best, cuts
        self.seconds_left = seconds_left
        self.size = float(SIZE)
        self.random = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Judged]:
        misses = 0
        with concurrent.futures.ThreadPoolExecutor(TOGETHER) as threads:
            while misses < MISSES * TOGETHER and self.seconds_left() > 0:
                parts = self.graph, self.costs, self.budget, self.planner, self.cuts
                again = repeats(self.best(), self.cuts)
                program = Cuts(*parts, horizon=HORIZON, again=again)
                if not any(program.model.binary):
                    return
                limit_seconds = min(MOST_SECONDS, self.seconds_left())
                solve = functools.partial(_solve, program, limit_seconds)
                for solution, seconds in threads.map(solve, self.kept(program)):
                    self.size *= (SECONDS / max(seconds, 0.1)) ** 0.2
                    misses += 1
                    best = self.best()
                    value = objective_of(best.usage, self.planner.objective)
                    if solution.objective * program.unit > value * (1 - WORTH):
                        continue
                    judged = lifted(program, solution.values)
                    yield judged
                    misses = misses if self.best() is best else 0
                    limit = self.budget.memory_bytes
                    self.cuts |= worst_stages(self.graph, judged, limit)

    def kept(self, program: Cuts) -> list[dict[int, float]]:
        """`TOGETHER` choices of what stays as it is, values by number of variable."""
        values = {y.idx: x for y, x in values_of(program, self.best())}
        places = self.places(program)
        columns, where = np.array([*places]), np.array([*places.values()], float)
        choices = []
        for _ in range(TOGETHER):
            free = set(columns[self.near(where)].tolist())
            choices.append({n: x for n, x in values.items() if n not in free})
        return choices

    def places(self, program: Cuts) -> dict[int, tuple[int, int]]:
        """(node, segment) of each binary: of a value the node that writes it, or the
        first that reads it."""
        places = {y.idx: key for key, y in program.r.items()}
        for variables in (program.x, program.page_in):
            for (v, segment), y in variables.items():
                first = min(self.graph.readers[v], default=0)
                places[y.idx] = self.graph.producer.get(v, first), segment
        return places

    def near(self, where: np.ndarray) -> np.ndarray:
        """Rows of `where`, [binaries, 2], that are near a few of its nodes, or of its
        segments: `size`, but not all of them."""
        random, where = self.random, where[:, self.random.integers(2)]
        centres = random.choice(where, random.integers(1, PLACES + 1))
        far = np.abs(where[:, None] - centres).min(axis=1)
        order = np.argsort(far + random.random(len(far)) / 2)
        return order[: int(min(self.size, SHARE * len(far)))]


def _solve(
    program: Cuts, seconds: float, kept: dict[int, float]
) -> tuple[Solution, float]:
    """The Solution after at most `seconds`, and how many it took."""
    since = time.monotonic()
    solution = program.model.optimize(seconds, fixed=kept)
    return solution, time.monotonic() - since
