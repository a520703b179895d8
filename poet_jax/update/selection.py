"""Search for the scheme that gains most within a budget.

`contributions` measures what each item, a pattern of parameters, adds to a score when
it is trained alone (contribution analysis; Lin et al., NeurIPS 2022, section 3.2, and
PockEngine, section 2.2). `search` then chooses items together with their schedule, in
one mixed-integer program: memory is that of a plan with remat and paging, not a sum
over layers.
"""

import dataclasses
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from poet_jax.api.schedule import Schedule
from poet_jax.core.errors import BudgetTooSmall
from poet_jax.core.plan import BasePlanner
from poet_jax.core.units import format_count
from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.milp.lift import crests, summits
from poet_jax.planners.milp.search import MilpPlanner
from poet_jax.planners.milp.solver import xsum
from poet_jax.planners.planner import keep_everything
from poet_jax.update.items import Items
from poet_jax.update.scheme import Update

logger = logging.getLogger("poet_jax")

TOLERANCE = 1e-4  # of the solver, relative to the gain
CUTS = 6  # stages at which the joint program counts memory


@dataclasses.dataclass(frozen=True, eq=False)
class SearchResult:
    """The scheme that a search found.

    Attributes:
      update: the scheme, for `train_step`.
      items: the patterns chosen.
      gain: the sum of their gains.
      bound: proven upper bound on the gain of any choice that fits, with nodes grouped
        as in the step that trains all items.
      schedule: of the step that trains the chosen items, within the budget.
      planned: number of schemes planned.
    """

    update: Update
    items: tuple[str, ...]
    gain: float
    bound: float
    schedule: Schedule
    planned: int

    @classmethod
    def of(
        cls,
        items: Items,
        chosen: frozenset[int],
        schedule: Schedule,
        bound: float,
        planned: int,
    ) -> "SearchResult":
        """What was found of `items`: those with the numbers `chosen`."""
        gain, names = items.gain(chosen), items.names(chosen)
        update, bound = items.update(chosen), max(bound, gain)
        return cls(update, names, gain, bound, schedule, planned)

    def __str__(self) -> str:
        proof = f"none gains over {self.bound:.4g}"
        if self.bound == math.inf:
            proof = "no bound"
        elif self.bound <= self.gain * (1 + TOLERANCE):
            proof = "none gains more"
        items = format_count(len(self.items), "item")
        head = f"{items} of a summed gain of {self.gain:.4g}; {proof}; "
        head += f"{format_count(self.planned, 'scheme')} tried"
        return "\n  ".join((head, *self.items)) + f"\n{self.schedule}"


def contributions(
    score: Callable[[Update | None], float],
    items: Mapping[str, float],
    *,
    always: Mapping[str, float] | None = None,
    path: str | os.PathLike | None = None,
) -> dict[str, float]:
    """Measure what each item adds to a score when it is trained with `always`.

    Args:
      score: trains an update from the start (None for nothing) and returns the quality
        of the result, for example its accuracy.
      items: fractions by pattern, as in an `Update`.
      always: fractions by pattern that every scheme trains, such as a new head.
      path: a file of JSON lines for the scores, from which an interrupted analysis
        continues. Use a file per task.

    Returns the gain of each pattern, which may be negative.
    """
    always = dict(always or {})
    known: dict[str, float] = {}
    file = None if path is None else pathlib.Path(path)
    if file is not None and file.exists():
        lines = file.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):  # drop a row that was cut short
            file.write_text("".join(whole))
        for row in map(json.loads, whole):
            known[json.dumps(row["update"])] = row["score"]

    def scored(fractions: dict[str, float]) -> float:
        fractions = {pattern: float(x) for pattern, x in fractions.items()}
        key = json.dumps(fractions)
        if key not in known:
            known[key] = float(score(Update(fractions) if fractions else None))
            logger.info("score %.4g of %s", known[key], fractions)
            if file is not None:
                with open(file, "a") as appended:
                    row = {"update": fractions, "score": known[key]}
                    appended.write(json.dumps(row) + "\n")
        return known[key]

    base = scored(always)
    return {
        item: scored({**always, item: fraction}) - base
        for item, fraction in items.items()
    }


def search(
    step: Any, *args: Any, gains: Mapping[str, float], time_limit_seconds: float = 300.0
) -> SearchResult:
    """Choose the items of most gain that can be trained within the step's budget.

    Args:
      step: a `train_step` that trains all items, with an `Update` of fractions; it does
        not run. A percentage budget is of what this step needs. Pass
        `Budget(memory_bytes, seconds)` to bound the step's time as well.
      args: of the step: (batch) for nnx, (state, batch) for linen; arrays or shapes.
      gains: by pattern of the update, as from `contributions`. Other patterns of the
        update are always trained.
      time_limit_seconds: for all programs together.

    Every candidate is planned as it would run, so the result fits. Leave out an
    optimizer that makes updates depend on all gradients, such as clipping by global
    norm, as it ties all items together.

    Raises BudgetTooSmall if not even the patterns always trained fit. Raises ValueError
    for gains of unknown patterns and for those that are not finite. Raises it, too, if
    no gain is above 0 and no pattern is always trained, for a step without an `Update`
    of fractions (those of `last_blocks` and `lora` have none), and for state on
    storage.
    """
    since = time.monotonic()
    arrays = step.array_step(*args)
    planner = MilpPlanner(solver=BasePlanner.of(arrays.scheduled.planner).solver)
    items = Items(arrays, gains)
    graph, costs = items.graph, items.costs
    live = [nbytes for nbytes, _ in crests(keep_everything(graph, costs))]
    cuts = summits(live, CUTS)
    refused: list[frozenset[int]] = []

    def seconds_left() -> float:
        return time_limit_seconds - (time.monotonic() - since)

    def proposed(least: float) -> tuple[frozenset[int] | None, float]:
        """(items that gain `least` and fit by the program, a bound on any gain)."""
        program = Cuts(graph, costs, items.budget, planner, cuts, choice=items.choice)
        assert program.chosen is not None
        y = program.chosen.items
        for chosen in refused:  # (14) supersets need no less memory
            program.model += xsum(y[k] for k in chosen) <= len(chosen) - 1
        unit, most = program.chosen.unit, items.gain(items.all)
        program.model += program.chosen.loss() <= (most - least) / unit
        seconds = min(seconds_left(), time_limit_seconds / 10)
        solution = program.model.optimize(max(2.0, seconds))
        limit = most - solution.bound * unit
        if solution.values is None:
            return None, least if solution.infeasible else limit
        return frozenset(k for k in items.all if solution.values[y[k].idx] > 0.5), limit

    best: frozenset[int] = frozenset()
    schedule: Schedule | None = None
    bound, planned = items.gain(items.all), 0
    is_proven = True  # whether all of `refused` are proven not to fit
    while schedule is None or seconds_left() > 0:
        least = items.gain(best) * (1 + TOLERANCE)
        chosen, limit = proposed(least)
        if is_proven:
            bound = min(bound, max(limit, least))
        if chosen is None and schedule is not None:
            break  # nothing gains more, or time is up
        chosen = chosen or frozenset()
        if schedule is not None and items.gain(chosen) <= least:
            break  # a gain within the solver's tolerance
        while schedule is None or items.gain(chosen) > least:
            planned += 1
            try:
                best, schedule = chosen, items.schedule(chosen)
                break
            except BudgetTooSmall as error:
                if not chosen:
                    raise
                is_proven &= error.least_bytes > items.budget.memory_bytes
                logger.info("do not fit together: %s", ", ".join(items.names(chosen)))
                refused.append(chosen)
                chosen -= {items.least_worth(chosen)}
    return SearchResult.of(items, best, schedule, bound, planned)
