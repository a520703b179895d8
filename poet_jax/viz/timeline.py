"""RAM over a step, as planned, and what fills it."""

import dataclasses

import numpy as np

from poet_jax.core.plan import Free, PageIn
from poet_jax.core.planned import Planned
from poet_jax.core.program import Run, walk
from poet_jax.viz.table import decisions

KINDS = ("argument", "keep", "remat", "page")


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """What is in RAM from each of E moments on, in order of time.

    Attributes:
      seconds: [E] from the start of the step. Dips that take no time are left out;
        peaks that take none are there, so that two moments may be the same.
      live_bytes: [E] all of it, workspace included.
      layers: [E] bytes of values by what was decided for them, for each of `KINDS`.
    """

    seconds: np.ndarray
    live_bytes: np.ndarray
    layers: dict[str, np.ndarray]


def timeline(planned: Planned) -> Timeline:
    """The moments of the program.

    A page-in takes its RAM when it is issued, which is when the compute lane gets
    there, and not when its transfer starts.
    """
    program, usage, graph = planned.program, planned.usage, planned.program.graph
    kinds = dict.fromkeys(graph.initial, "argument") | decisions(program)
    held: dict[str, int] = dict.fromkeys(KINDS, 0)
    resident: set[int] = set()
    moments: list[tuple[float, int, tuple[int, ...]]] = []

    def move(value: int, arrives: bool) -> None:
        if arrives != (value in resident):
            resident.symmetric_difference_update({value})
            sign = 1 if arrives else -1
            held[kinds[value]] += sign * graph.values[value].nbytes

    def note(seconds: float, live: int | None = None) -> None:
        layers = tuple(held.values())
        live = sum(layers) if live is None else live
        while moments and moments[-1][0] == seconds and moments[-1][1] <= live:
            moments.pop()
        moments.append((seconds, live, layers))

    for value in graph.initial:
        move(value, True)
    clock = 0.0
    note(clock)
    rows = zip(usage.start_seconds, usage.stop_seconds, usage.live_bytes, strict=True)
    for moment, (start, stop, live) in zip(walk(program), rows, strict=True):
        for value in moment.leaves:
            move(value, False)
        for value in moment.arrives:
            move(value, True)
        match moment.instruction:
            case Run():
                note(float(start), int(live))
                note(clock := float(stop))
            case Free():
                note(clock := float(stop))
            case PageIn():
                note(clock)
    seconds, totals, layers = zip(*moments, strict=True)
    columns = zip(*layers, strict=True)
    return Timeline(
        np.array(seconds),
        np.array(totals, np.int64),
        dict(zip(KINDS, map(np.array, columns), strict=True)),
    )
