"""The published search for a scheme, beside that of `poet_jax.update.search`.

Lin et al. (NeurIPS 2022), section 3.2.
"""

import functools
import math
import random
from collections.abc import Mapping
from typing import Any

from poet_jax.planners.planner import fits, keep_everything
from poet_jax.update.items import Items
from poet_jax.update.selection import SearchResult


def evolve(
    step: Any,
    *args: Any,
    gains: Mapping[str, float],
    generations: int = 40,
    population: int = 32,
    seed: int = 0,
) -> SearchResult:
    """The best of subsets that are recombined and mutated, with the arguments of
    `search`.

    One that exceeds memory or deadline without remat and paging is worth nothing. The
    best is then planned as by `search`; its bound is infinite.
    """
    items = Items(step.array_step(*args), gains)
    drawn = random.Random(seed)

    @functools.cache
    def worth(chosen: frozenset[int]) -> float:
        if not fits(keep_everything(*items.restricted(chosen)).usage, items.budget):
            return -1.0
        return items.gain(chosen)

    def fitter() -> frozenset[int]:
        return max(drawn.sample(generation, 2), key=worth)

    def child() -> frozenset[int]:
        one, other = fitter(), fitter()
        mixed = {k for k in items.all if k in (one if drawn.random() < 0.5 else other)}
        flipped = {k for k in items.all if drawn.random() < 1 / len(items.all)}
        return frozenset(mixed ^ flipped)

    generation = [
        frozenset(k for k in items.all if drawn.random() < share / population)
        for share in range(population)
    ]
    for _ in range(generations):
        fittest = max(generation, key=worth)
        generation = [fittest, *(child() for _ in range(population - 1))]
    best = max(generation, key=worth)
    best = best if worth(best) >= 0 else frozenset()
    planned = worth.cache_info().currsize
    return SearchResult.of(items, best, items.schedule(best), math.inf, planned)
