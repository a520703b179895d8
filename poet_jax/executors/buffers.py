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


class _Buffer:
    """An idle array, of whose pages the first `held` are in RAM."""

    def __init__(self, array: jax.Array, on_cpu: bool):
        self.array = array
        self.address, self.pages = 0, -(-array.nbytes // heap.PAGE_BYTES)
        if on_cpu:
            pointer = array.unsafe_buffer_pointer()
            self.address, self.pages = heap.whole_pages(pointer, array.nbytes)
        self.held = self.pages

    @property
    def next_page(self) -> int:
        """Address of the first page that is not in RAM."""
        return self.address + self.held * heap.PAGE_BYTES


class Pool:
    """Idle buffers: arrays whose contents nobody reads any more, by kind.

    A buffer keeps its address, and as many of its pages as there is room for. One that
    is taken gets the pages of those that are needed last, which is Belady's choice, for
    a program is known ahead; moving pages costs nothing beside taking new ones.

    Args:
      taken: (instruction, kind) of every buffer that the program takes, in order.
      limit_bytes: the most that arrays, idle buffers and workspaces may occupy.
      on_cpu: whether buffers are host memory. Elsewhere they are deleted instead.

    Attributes:
      idle_bytes: of pages that idle buffers hold.
    """

    def __init__(
        self, taken: Iterable[tuple[int, Kind]], limit_bytes: int, on_cpu: bool
    ):
        self._needs: dict[Kind, list[int]] = defaultdict(list)
        for row, kind in taken:
            self._needs[kind].append(row)
        self._limit_bytes, self._on_cpu = limit_bytes, on_cpu
        self._guards = on_cpu and limit_bytes >= GUARDED_BYTES
        self._idle: dict[Kind, list[_Buffer]] = defaultdict(list)
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
        """Buffers for instruction `row`, all of their pages in RAM.

        There is room for them and for `more_bytes` of workspace and small results,
        beside `live_bytes` of arrays: idle buffers lose pages, also if the process is
        larger than what it should hold, and if that is not enough the heap is trimmed.
        """
        found = [self._pop(kind) for kind in kinds]
        for buffer in found:
            if buffer is not None:
                self._move_pages_to(buffer, row)
        sizes = [nbytes_of(kind) for kind in kinds]
        idle_limit = self._limit_bytes - live_bytes - more_bytes - sum(sizes)
        self._shrink(self.idle_bytes - idle_limit, row)
        new_bytes = more_bytes + sum(
            size if buffer is None else (buffer.pages - buffer.held) * heap.PAGE_BYTES
            for size, buffer in zip(sizes, found, strict=True)
        )
        if self._guards and new_bytes >= NOTICED_BYTES:
            excess_bytes = self._excess_bytes(new_bytes)
            if excess_bytes > -SCRATCH_BYTES:
                self._shrink(excess_bytes + SCRATCH_BYTES, row)
                if self._excess_bytes(new_bytes) > 0:
                    heap.release()
        return [self._fill(*pair) for pair in zip(kinds, found, strict=True)]

    def give(self, array: jax.Array, donated: bool = False) -> None:
        """Keep an array that was freed, or was the caller's until it was donated."""
        if donated:
            array = _adopt(array)
        buffer = _Buffer(array, self._on_cpu)
        self._idle[array.shape, array.dtype].append(buffer)
        self.idle_bytes += buffer.held * heap.PAGE_BYTES

    def end(self) -> None:
        """Keep what the next run can take, unless the system needs its pages.

        Donated arrays that no result replaces would pile up otherwise.
        """
        for kind, buffers in self._idle.items():
            while len(buffers) > len(self._needs[kind]):
                buffer = buffers.pop()
                self.idle_bytes -= buffer.held * heap.PAGE_BYTES
                buffer.array.delete()
            for buffer in buffers if self._on_cpu else ():
                heap.lend_pages(buffer.address, buffer.held)

    def release(self) -> None:
        """Return the pages of all buffers; their addresses serve the next run."""
        self._shrink(self.idle_bytes, 0)

    def _excess_bytes(self, new_bytes: int) -> int:
        """How far `new_bytes` more would take the process beyond the limit."""
        held_bytes = heap.resident_bytes() - (self._base_bytes or 0)
        return held_bytes + new_bytes - self._limit_bytes

    def _pop(self, kind: Kind) -> _Buffer | None:
        """The buffer of a kind that holds most pages."""
        buffers = self._idle[kind]
        if not buffers:
            return None
        buffer = max(buffers, key=lambda buffer: buffer.held)
        buffers.remove(buffer)
        self.idle_bytes -= buffer.held * heap.PAGE_BYTES
        return buffer

    def _fill(self, kind: Kind, buffer: _Buffer | None) -> jax.Array:
        """The buffer with all of its pages, a new one if there is none."""
        if buffer is None:
            return jax.block_until_ready(jnp.empty(*kind))
        if buffer.held < buffer.pages:
            heap.populate_pages(buffer.next_page, buffer.pages - buffer.held)
        return buffer.array

    def _move_pages_to(self, buffer: _Buffer, row: int) -> None:
        """Take the pages that it lacks from idle buffers, as far as they have any."""
        while buffer.held < buffer.pages and self.idle_bytes:
            _, last = self._needed_last(row)
            count = min(buffer.pages - buffer.held, last.held)
            last.held -= count
            self.idle_bytes -= count * heap.PAGE_BYTES
            if not heap.move_pages(last.next_page, buffer.next_page, count):
                heap.release_pages(last.next_page, count)
                heap.populate_pages(buffer.next_page, count)
            buffer.held += count

    def _shrink(self, nbytes: int, row: int) -> None:
        """Take at least `nbytes` of pages from idle buffers, or all."""
        count = -(-nbytes // heap.PAGE_BYTES)
        while count > 0 and self.idle_bytes:
            kind, last = self._needed_last(row)
            taken = min(count, last.held)
            last.held -= taken
            if not self._on_cpu or not heap.release_pages(last.next_page, taken):
                taken += last.held
                self._idle[kind].remove(last)
                last.array.delete()
            self.idle_bytes -= taken * heap.PAGE_BYTES
            count -= taken

    def _needed_last(self, row: int) -> tuple[Kind, _Buffer]:
        """The idle buffer with pages that instruction `row` and the next need last."""
        holding = {
            kind: [x for x in buffers if x.held] for kind, buffers in self._idle.items()
        }
        kind = max(
            (kind for kind, buffers in holding.items() if buffers),
            key=lambda kind: self._next_need(kind, len(holding[kind]), row),
        )
        return kind, min(holding[kind], key=lambda buffer: buffer.held)

    def _next_need(self, kind: Kind, count: int, row: int) -> float:
        """The instruction that will take the last of `count` buffers of a kind."""
        rows = self._needs[kind]
        number = bisect.bisect_left(rows, row) + count - 1
        return rows[number] if number < len(rows) else float("inf")
