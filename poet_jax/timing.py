"""Seconds of executables on this machine."""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax import heap
from poet_jax.compile import Executable, Unit, compile_units, is_recycled, on_cpu
from poet_jax.graph import Graph
from poet_jax.progress import counted

# Growth that the system's own bookkeeping may cause is not a node's workspace.
NOTICED_BYTES = 2**20
# Runs that are timed, after one that warms up.
TIMED_RUNS = 3
# Runs that are watched for scratch, if the first one has any.
SCRATCH_RUNS = 3
# More than a processor's caches hold: in a step, most of what a node reads was written
# long ago. With operands in the caches, the nodes of a step took 1 to 5 % less in all.
_CACHES_BYTES = 64 * 2**20


def time_nodes(graph: Graph, executables: Sequence[Executable]) -> np.ndarray:
    """[N] seconds on this machine, each distinct executable run a few times on zeros.

    0 for those with effects, which pricing must not cause, and those that need data.

    What one allocates beyond its reported workspace becomes part of that: on the CPU,
    convolutions have scratch of their own, which XLA does not know of, and which varies
    from run to run with what its threads do at the same time.
    """
    pairs = enumerate(zip(executables, graph.nodes, strict=True))
    distinct = {
        executable: Unit.of(graph, number)
        for number, (executable, node) in pairs
        if node.repeatable and not node.needs_data
    }
    for executable, unit, others in _untimed(distinct, "timing nodes"):
        run = _Run(graph, executable, unit, others, range(len(unit.reads)))
        _measure(executable, run)
        del run  # or its arrays would live beside those of the next one
    return np.array([x.seconds or 0.0 for x in executables], float)


def time_units(
    graph: Graph, units: Sequence[Unit], room_bytes: Sequence[float]
) -> list[float | None]:
    """[U] seconds on this machine, as those of nodes.

    None for one that needs data, or whose arrays do not fit into its `room_bytes`, and
    that was not timed before. Where there is little room, operands of one shape and
    type are the same array; what is bound by memory then takes less than in a step.

    What one allocates beyond its reported workspace becomes part of that, too. It may
    be more than its nodes allocate one by one: what is the result of a node otherwise
    may be scratch in the library that XLA hands several operations to. A run of
    ResNet-50's took 32 MiB so.
    """
    executables = compile_units(graph, units)
    distinct: dict[Executable, Unit] = {}
    firsts: dict[Executable, Sequence[int]] = {}
    for executable, unit, room in zip(executables, units, room_bytes, strict=True):
        needs_data = any(graph.nodes[number].needs_data for number in unit.nodes)
        most_bytes = least_bytes = unit.nbytes(graph)
        first = _alike(graph, unit)
        for number, value in enumerate(unit.reads):
            least_bytes -= graph.values[value].nbytes if first[number] < number else 0
        if least_bytes <= room and not needs_data:
            distinct[executable] = unit
            firsts[executable] = first if most_bytes > room else range(len(first))
    for executable, unit, others in _untimed(distinct, "timing runs of nodes"):
        run = _Run(graph, executable, unit, others, firsts[executable])
        _measure(executable, run)
        del run  # or its arrays would live beside those of the next one
    return [x.seconds for x in executables]


def _measure(executable: Executable, run: "_Run") -> None:
    """Its seconds, and the memory that it takes unless that was measured before."""
    executable.seconds = run.median_seconds()
    for _ in range(0 if executable.is_watched or not on_cpu() else SCRATCH_RUNS):
        grown = heap.growth_bytes(run)
        if grown <= executable.temp_bytes + NOTICED_BYTES:
            break
        executable.workspace_bytes = max(executable.workspace_bytes, grown)
    executable.is_watched = True


def _alike(graph: Graph, unit: Unit) -> list[int]:
    """[reads] the first operand that may be the same array, if both are zeros: one of
    the same shape and type. What the unit writes over is like no other."""
    firsts: dict[Any, int] = {}
    replaced = {old for old, _ in unit.replaces}
    return [
        firsts.setdefault(v if v in replaced else graph.values[v].kind, number)
        for number, v in enumerate(unit.reads)
    ]


def _untimed(
    units: dict[Executable, Unit], what: str
) -> Iterator[tuple[Executable, Unit, np.ndarray]]:
    """Those that were not timed before, with progress, and what fills the caches."""
    others = np.ones(_CACHES_BYTES // 8)
    for executable, unit in counted(units.items(), len(units), what):
        if executable.seconds is None:
            yield executable, unit, others


class _Run:
    """A run of an executable, which can be repeated; a call gives its seconds.

    Each writes into the results of the last, as in the executor, and begins after
    `others` were read, unless it touches little. Operands are zeros, each the
    same array as the first that `firsts` has for it.
    """

    def __init__(
        self,
        graph: Graph,
        executable: Executable,
        unit: Unit,
        others: np.ndarray,
        firsts: Sequence[int],
    ):
        self._executable = executable
        self._operands: list[jax.Array] = []
        for number, (first, v) in enumerate(zip(firsts, unit.reads, strict=True)):
            is_new = first == number
            zeros = (
                jnp.zeros(*graph.values[v].kind) if is_new else self._operands[first]
            )
            self._operands.append(zeros)
        self._into: list[jax.Array] | None = None
        large = on_cpu() and unit.nbytes(graph) >= NOTICED_BYTES
        self._others = others if large else None

    def median_seconds(self) -> float:
        self()
        return statistics.median(self() for _ in range(TIMED_RUNS))

    def __call__(self) -> float:
        if self._others is not None:
            self._others.sum()
        # Zeros are not what the node will see: a NaN that it makes of them is no fault.
        with jax.debug_nans(False), jax.debug_infs(False):
            start = time.perf_counter()
            results = self._executable(*self._operands, into=self._into)
            jax.block_until_ready(results)
            seconds = time.perf_counter() - start
        replacing = self._executable.replacing
        for result, operand in replacing.items():
            self._operands[operand] = results[result]
        self._into = [
            x
            for number, x in enumerate(results)
            if number not in replacing and is_recycled((x.shape, x.dtype))
        ]
        return seconds
