"""A part of a plan chosen anew while the rest stays as it is, again and again.

This is large neighbourhood search (Shaw, CP 1998) in the program of `Cuts`: all its
binaries but some that are near each other stay as the best plan has them. What is left
takes a solver seconds, however large the graph is.
"""

import time
from collections.abc import Iterator

import numpy as np

from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.milp.lift import lifted, repeats, values_of
from poet_jax.planners.milp.rounds import HORIZON, worst_stages
from poet_jax.planners.milp.solver import TOGETHER, Solution, together
from poet_jax.planners.milp.state import State
from poet_jax.planners.planner import Judged

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
    """A source of plans that are better than the best one in some part.

    Plans may exceed the budget where no cut is; the nodes where they do become cuts.
    """

    share = 4 / 5

    def __init__(self, state: State):
        self.state = state
        self.size = float(SIZE)
        self.random = np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[float, Judged | None]]:
        state, misses = self.state, 0
        assert state.budget is not None
        while state.best is not None and misses < MISSES * TOGETHER:
            parts = state.graph, state.costs, state.budget, state.planner, state.cuts
            again = repeats(state.best, state.cuts)
            program = Cuts(*parts, horizon=HORIZON, again=again)
            if not any(program.model.binary):
                return

            def solve(
                kept: dict[int, float], program: Cuts = program
            ) -> tuple[Solution, float]:
                since = time.monotonic()
                seconds = min(MOST_SECONDS, max(1.0, state.seconds_left()))
                solution = program.model.optimize(seconds, fixed=kept)
                return solution, time.monotonic() - since

            for solution, seconds in together(solve, self.kept(program)):
                self.size *= (SECONDS / max(seconds, 0.1)) ** 0.2
                misses += 1
                best = state.best
                found = solution.objective * program.unit
                if solution.values is None or found > state.least() * (1 - WORTH):
                    yield 0.0, None
                    continue
                judged = lifted(program, solution.values)
                yield 0.0, state.repaired(judged)
                misses = misses if state.best is best else 0
                limit = state.budget.memory_bytes
                state.cuts |= worst_stages(judged, limit)

    def kept(self, program: Cuts) -> list[dict[int, float]]:
        """`TOGETHER` choices of what stays as it is, values by number of variable."""
        assert self.state.best is not None
        values = {y.idx: x for y, x in values_of(program, self.state.best)}
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
        graph = self.state.graph
        places = {y.idx: key for key, y in program.r.items()}
        for variables in (program.x, program.page_in):
            for (v, segment), y in variables.items():
                first = min(graph.readers[v], default=0)
                places[y.idx] = graph.producer.get(v, first), segment
        return places

    def near(self, where: np.ndarray) -> np.ndarray:
        """Rows of `where`, [binaries, 2], that are near a few of its nodes, or of its
        segments: `size`, but not all of them."""
        random, where = self.random, where[:, self.random.integers(2)]
        centres = random.choice(where, random.integers(1, PLACES + 1))
        far = np.abs(where[:, None] - centres).min(axis=1)
        order = np.argsort(far + random.random(len(far)) / 2)
        return order[: int(min(self.size, SHARE * len(far)))]
