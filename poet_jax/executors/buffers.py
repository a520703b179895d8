"""Buffers that results are written into, so that freed memory is used again at once.

Without them every result is a block of the C library's heap, which grows to more than
twice the live arrays, or costs a page fault for every page of every result.
"""

import bisect
import ctypes
from collections import defaultdict
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax import heap
from poet_jax.compile import Kind, nbytes_of

# The size of the process is looked at for limits from here on, as it varies anyway, and
# before instructions that bring at least so much; looking takes up to 0.1 ms.
GUARDED_BYTES = 32 * 2**20
NOTICED_BYTES = 2**20
# No buffer lies idle where a node may need this much beyond the workspace that XLA
# reports: Eigen's convolutions allocate up to 18 MiB of their own.
SCRATCH_BYTES = 16 * 2**20
# What the heap may hold on to between runs: trimming it takes 10 ms.
GROWTH_BYTES = 32 * 2**20


def view(array: jax.Array) -> np.ndarray:
    """[nbytes] the memory of an array of the CPU backend and a plain dtype, as uint8.

    Whoever writes must hold the only reference to the array, and nobody may use the
    view after the array is gone.
    """
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(memory)


# The identity, which JAX computes in place unless somebody has a view of the array.
_adopt = jax.jit(lambda array: array, donate_argnums=0)


class Pool:
    """Idle buffers: arrays whose contents nobody reads any more, by kind.

    A buffer is resident, or hollow: its pages were returned to the system and only its
    address is kept. Which ones go hollow is Belady's choice, those needed last, for a
    program is known ahead.

    Args:
      taken: (instruction, kind) of every buffer that the program takes, in order.
      limit_bytes: the most that arrays, idle buffers and workspaces may occupy.
      on_cpu: whether buffers are host memory. Elsewhere they are deleted instead.
    """

    def __init__(
        self, taken: Iterable[tuple[int, Kind]], limit_bytes: int, on_cpu: bool
    ):
        self._needs: dict[Kind, list[int]] = defaultdict(list)
        for row, kind in taken:
            self._needs[kind].append(row)
        self._limit_bytes, self._on_cpu = limit_bytes, on_cpu
        self._guards = on_cpu and limit_bytes >= GUARDED_BYTES
        self._resident: dict[Kind, list[jax.Array]] = defaultdict(list)
        self._hollow: dict[Kind, list[jax.Array]] = defaultdict(list)
        self.idle_bytes = 0
        self._base_bytes: int | None = None

    def begin(self, live_bytes: int) -> None:
        """Note what the process holds besides `live_bytes` of arrays.

        What the heap keeps of the last run is not that; it is trimmed if the process
        has grown by more, as it takes long.
        """
        if self._guards:
            held_bytes = heap.resident_bytes() - live_bytes - self.idle_bytes
            if self._base_bytes is None or held_bytes > self._base_bytes + GROWTH_BYTES:
                heap.release()
                held_bytes = heap.resident_bytes() - live_bytes - self.idle_bytes
                self._base_bytes = held_bytes
            self._base_bytes = min(self._base_bytes, held_bytes)

    def take(
        self,
        kinds: Sequence[Kind],
        row: int,
        live_bytes: int,
        more_bytes: int = 0,
    ) -> list[jax.Array]:
        """Buffers for instruction `row`, resident.

        There is room for them and for `more_bytes` of workspace and small results,
        beside `live_bytes` of arrays: idle buffers go hollow, also if the process is
        larger than what it should hold, and if that is not enough the heap is trimmed.
        """
        found = [self._pop(kind) for kind in kinds]
        sizes = [nbytes_of(kind) for kind in kinds]
        idle_limit = self._limit_bytes - live_bytes - more_bytes - sum(sizes)
        self._shrink(self.idle_bytes - idle_limit, row)
        new_bytes = more_bytes + sum(
            size
            for size, (_, resident) in zip(sizes, found, strict=True)
            if not resident
        )
        if self._guards and new_bytes >= NOTICED_BYTES:
            excess_bytes = self._excess_bytes(new_bytes)
            if excess_bytes > -SCRATCH_BYTES:
                self._shrink(excess_bytes + SCRATCH_BYTES, row)
                if self._excess_bytes(new_bytes) > 0:
                    heap.release()
        return [
            self._fill(kind, *buffer) for kind, buffer in zip(kinds, found, strict=True)
        ]

    def give(self, array: jax.Array, donated: bool = False) -> None:
        """Keep an array that was freed, or was the caller's until it was donated."""
        if donated:
            array = _adopt(array)
        self._resident[array.shape, array.dtype].append(array)
        self.idle_bytes += array.nbytes

    def end(self) -> None:
        """Keep all buffers for the next run, unless the system needs their pages."""
        for arrays in self._resident.values() if self._on_cpu else ():
            for array in arrays:
                heap.lend_pages(array.unsafe_buffer_pointer(), array.nbytes)

    def release(self) -> None:
        """Return the pages of all buffers; their addresses serve the next run."""
        self._shrink(self.idle_bytes, 0)

    def _excess_bytes(self, new_bytes: int) -> int:
        """How far `new_bytes` more would take the process beyond the limit."""
        held_bytes = heap.resident_bytes() - (self._base_bytes or 0)
        return held_bytes + new_bytes - self._limit_bytes

    def _pop(self, kind: Kind) -> tuple[jax.Array | None, bool]:
        """A buffer, resident if there is one such."""
        if self._resident[kind]:
            self.idle_bytes -= nbytes_of(kind)
            return self._resident[kind].pop(), True
        return (self._hollow[kind].pop() if self._hollow[kind] else None), False

    def _fill(self, kind: Kind, array: jax.Array | None, resident: bool) -> jax.Array:
        """The buffer with pages, a new one if there is none."""
        if array is None:
            return jax.block_until_ready(jnp.empty(*kind))
        if not resident:
            heap.populate_pages(array.unsafe_buffer_pointer(), array.nbytes)
        return array

    def _shrink(self, nbytes: int, row: int) -> None:
        """Make at least `nbytes` hollow, or all."""
        while nbytes > 0 and self.idle_bytes:
            kind = max(
                (kind for kind, buffers in self._resident.items() if buffers),
                key=lambda kind: self._next_need(kind, row),
            )
            array = self._resident[kind].pop()
            self.idle_bytes -= array.nbytes
            nbytes -= array.nbytes
            if self._on_cpu and heap.release_pages(
                array.unsafe_buffer_pointer(), array.nbytes
            ):
                self._hollow[kind].append(array)
            else:
                array.delete()

    def _next_need(self, kind: Kind, row: int) -> float:
        """The instruction that will take the last of the idle buffers of a kind."""
        rows = self._needs[kind]
        number = bisect.bisect_left(rows, row) + len(self._resident[kind]) - 1
        return rows[number] if number < len(rows) else float("inf")
