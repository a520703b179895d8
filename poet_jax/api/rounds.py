"""Finer graphs of a step, one after the other, where it does not fit."""

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from poet_jax.api.planning import Compilation
from poet_jax.api.schedule import Schedule
from poet_jax.core.errors import BudgetTooSmall
from poet_jax.passes import Pass, refinable_of, with_options


class Attempt(NamedTuple):
    """What became of the graph that some passes make."""

    passes: Sequence[Pass]
    compilation: Compilation
    found: Schedule | BudgetTooSmall


def in_rounds(
    passes: Sequence[Pass],
    attempt: Callable[[Sequence[Pass], Set[str], Compilation | None], Attempt],
) -> Schedule:
    """A schedule that fits, with loops, large values and groups cut finer if need be.

    Graphs get finer as long as their plans get leaner, or another pass may cut. If none
    fits, the one of the leanest plan is compiled, and the first one, in which XLA may
    fuse more: the error tells what works.

    `attempt(passes, refinable, earlier)` plans a graph, after an earlier one. Names of
    passes that may cut finer are `refinable`: where one of them would help, a plan far
    above the budget is not compiled.
    """
    failed: list[tuple[Attempt, BudgetTooSmall]] = []

    def schedule(passes: Sequence[Pass], refinable: Set[str]) -> Schedule | None:
        made = attempt(passes, refinable, failed[-1][0].compilation if failed else None)
        if isinstance(made.found, Schedule):
            return made.found
        if made.found.smallest_bytes <= made.compilation.limits.memory_bytes:
            raise made.found  # something else than memory does not fit
        failed.append((made, made.found))
        return None

    refinable = frozenset(refinable_of(passes))
    options: dict[str, dict[str, int]] = {}
    finer = passes
    while True:
        if (found := schedule(finer, refinable)) is not None:
            return found
        *earlier, error = (error for _, error in failed)
        more = {name: x for name, x in error.finer.items() if name in refinable}
        is_leaner = all(error.planned_bytes < x.planned_bytes for x in earlier)
        if not more or not (is_leaner or more.keys() - options.keys()):
            break  # an option of another pass may cut what is in pieces by now
        for name, option in more.items():
            options.setdefault(name, {}).update(option)
        finer = with_options(passes, options)
    leanest, _ = min(failed, key=lambda x: x[1].planned_bytes)
    for chosen in (leanest.passes, passes):
        if not any(x.is_compiled for made, x in failed if made.passes is chosen):
            if (found := schedule(chosen, frozenset())) is not None:
                return found
    compiled = [x for _, x in failed if x.is_compiled] or [error]
    least = min(compiled, key=lambda x: x.smallest_bytes)
    tried = [x for made, _ in failed for x in made.passes]
    raise failed[-1][0].compilation.told(least, tried) from least.__cause__
