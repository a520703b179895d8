"""Lower bounds by programs of few cuts, those of many that say most.

All cuts together say more than a few in whole numbers, but not in fractions, where a
value may be kept and made again by halves from one cut to the next. So the cuts at
which a relaxation costs most are looked for, one after the other, and their program is
solved.
"""

import concurrent.futures
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from poet_jax.graph import Graph
from poet_jax.plan import Budget
from poet_jax.planners.cuts import Cuts
from poet_jax.planners.solver import TOGETHER
from poet_jax.price import Costs


def bounds(
    graph: Graph,
    costs: Costs,
    budget: Budget,
    planner: Any,
    cuts: Collection[int],
    seconds_left: Callable[[], float],
) -> Iterator[float]:
    """Higher and higher lower bounds on the objective, in its unit.

    Two thirds of the time go to relaxations, the rest to a program in whole numbers.

    Args:
      graph, costs, budget: what is planned.
      planner: a MilpPlanner.
      cuts: base nodes to choose among.
      seconds_left: for all of it.
    """
    parts = graph, costs, budget, planner
    chosen, best, kept = [], 0.0, seconds_left() / 3

    def relaxed(cut: int) -> float:
        if seconds_left() <= kept:
            return 0.0
        return Cuts(*parts, [*chosen, cut]).relaxed(seconds_left())

    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as threads:
        while seconds_left() > kept:
            others = spread(sorted(set(cuts) - {*chosen}))
            found = zip(threads.map(relaxed, others), others, strict=True)
            bound, cut = max(found, default=(0.0, -1))
            if bound <= best:
                break
            best = bound
            chosen.append(cut)
            yield bound
    if chosen and seconds_left() > 0:
        program = Cuts(*parts, chosen)
        yield program.model.optimize(seconds_left()).bound * program.unit


def spread(items: Sequence[int]) -> list[int]:
    """The items in an order whose beginnings are from everywhere: by multiples of the
    golden ratio."""
    places = [number * (math.sqrt(5) - 1) / 2 % 1 for number in range(len(items))]
    return [items[n] for n in np.argsort(np.argsort(places, kind="stable"))]
