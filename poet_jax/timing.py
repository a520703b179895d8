"""Seconds of executables on this machine."""

import statistics
import time
from collections.abc import Iterator, Sequence

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
        run = _Run(graph, executable, unit, others)
        executable.seconds = run.median_seconds()
        for _ in range(SCRATCH_RUNS if on_cpu() else 0):
            grown = heap.growth_bytes(run)
            if grown <= executable.temp_bytes + NOTICED_BYTES:
                break
            executable.workspace_bytes = max(executable.workspace_bytes, grown)
        del run  # or its arrays would live beside those of the next one
    return np.array([x.seconds or 0.0 for x in executables], float)


def time_units(graph: Graph, units: Sequence[Unit]) -> list[float]:
    """[U] seconds on this machine, as those of nodes."""
    executables = compile_units(graph, units)
    distinct = dict(zip(executables, units, strict=True))
    for executable, unit, others in _untimed(distinct, "timing runs of nodes"):
        executable.seconds = _Run(graph, executable, unit, others).median_seconds()
    return [x.seconds or 0.0 for x in executables]


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
    `others` were read, unless it touches little.
    """

    def __init__(
        self, graph: Graph, executable: Executable, unit: Unit, others: np.ndarray
    ):
        self._executable = executable
        values = [graph.values[v] for v in unit.reads]
        self._operands = [jnp.zeros(value.shape, value.dtype) for value in values]
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
