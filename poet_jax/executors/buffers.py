"""Buffers that results are written into, so that freed memory is used again at once.

Without them every result is a block of the C library's heap, which grows to more than
twice the live arrays, or costs a page fault for every page of every result.
"""

import bisect
import contextlib
import ctypes
import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax import heap
from poet_jax.compile import RECYCLED_BYTES, Kind, nbytes_of
from poet_jax.executors.lending import lender

# The size of the process is looked at for limits from here on, as it varies anyway, and
# before instructions that bring at least so much; looking takes up to 0.1 ms.
GUARDED_BYTES = 8 * 2**20
NOTICED_BYTES = 2**20
# How much the process may change before the pages of a workspace are asked for. Its
# change is what came less what went, so it may hide as much again.
UNSEEN_BYTES = NOTICED_BYTES // 2
# Scratch of matrix products is in blocks of 160 KiB and more, dozens at a time, which
# would each take pages anew in what tracing and compiling left free of the heap.
HOLE_BYTES = 2**17
# Scratch varies from run to run, so room is left beside what is expected: twice that,
# or a 256th of the limit, and at most this.
SCRATCH_BYTES = 4 * 2**20
# What the process may hold beyond the limit before its heap is trimmed, which takes
# 10 ms; and how much more than before when a run begins.
EXCESS_BYTES = 4 * 2**20
GROWTH_BYTES = 2 * 2**20
# Beyond the largest workspace, as small results may lie where it began; at least
# NOTICED_BYTES of it must be left.
SLACK_BYTES = 8 * 2**20
# Mappings are counted after so many moves, and made fewer if they are more than these,
# or twice what they were when that was done last.
MOVES_PER_COUNT = 500
MOST_MAPPINGS = 16_000
# Where what XLA was given is free, what lies beside it is free by then, or stays.
FREEING_SECONDS = 1e-3
# XLA frees a workspace a tenth of a millisecond after the results are ready, or later
# if others keep the processors busy.
PATIENCE_SECONDS = 0.02


def view(array: jax.Array) -> np.ndarray:
    """[nbytes] the memory of an array of the CPU backend and a plain dtype, as uint8.

    Whoever writes must hold the only reference to the array, and nobody may use the
    view after the array is gone.
    """
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(memory)


def is_row_major(array: jax.Array) -> bool:
    """Whether the memory of an array is in the order that `view` and NumPy expect."""
    described: Any = array
    layout = described.format.layout
    return layout is None or layout.major_to_minor == tuple(range(array.ndim))


# The identity, which JAX computes in place unless somebody has a view of the array.
_adopt = jax.jit(lambda array: array, donate_argnums=0)


def _new_array(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A large one at a page if possible, so that a store can transfer it without a
    copy."""
    empty = _compiled_empty(shape, dtype)
    nbytes = nbytes_of((shape, dtype))
    is_large = nbytes >= RECYCLED_BYTES
    with heap.block_at_a_page(nbytes) if is_large else contextlib.nullcontext():
        return jax.block_until_ready(empty())


@functools.cache
def _compiled_empty(shape: tuple[int, ...], dtype: Any) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.empty(shape, dtype)).lower().compile()


def _count(flags: bytearray, start: int = 0, stop: int | None = None) -> int:
    """How many of the flags are set; `bytearray.count` takes ten times as long."""
    return int(np.count_nonzero(np.frombuffer(flags, bool)[start:stop]))


class _Pages:
    """A block of memory, and which of its pages are in RAM.

    Attributes:
      address: of the first of its pages.
      flags: [pages] 1 for a page in RAM, else 0.
      held: how many are in RAM.
      kept: how many, from the first on, are not to be given away.
    """

    def place(self, address: int, flags: bytearray) -> None:
        self.address, self.flags = address, flags
        self.held, self.kept = _count(flags), 0

    @property
    def spare(self) -> int:
        """How many pages are in RAM and not kept."""
        return _count(self.flags, self.kept) if self.kept else self.held

    def runs(self, flag: int, until: int) -> Iterator[tuple[int, int]]:
        """(address, count) of each run of pages before `until` with this flag."""
        stop = 0
        while (start := self.flags.find(flag, stop, until)) >= 0:
            stop = self.flags.find(1 - flag, start, until)
            stop = until if stop < 0 else stop
            yield self.address + start * heap.PAGE_BYTES, stop - start

    def lacking(self, until: int | None) -> int:
        """How many pages before `until`, or of all, are not in RAM."""
        return len(self.flags[:until]) - _count(self.flags, 0, until)

    def missing(self, until: int) -> tuple[int, int]:
        """(address, count) of the first pages before `until` that are not in RAM."""
        return next(self.runs(0, until), (0, 0))

    def gain(self, address: int, count: int) -> None:
        start = (address - self.address) // heap.PAGE_BYTES
        self.flags[start : start + count] = b"\1" * count
        self.held += count

    def fill(self, until: int) -> None:
        """Take pages anew for those before `until` that are not in RAM.

        Each gap becomes one mapping of the kernel's again. It is as many as there were
        moves otherwise, and each later request takes as much longer: a U-Net's step
        took a seventh more time after 100 steps.
        """
        for gap in self.runs(0, until):
            if heap.moves_pages():
                heap.renew_pages(*gap)
            heap.populate_pages(*gap)
            self.gain(*gap)

    def recall(self) -> None:
        """Take back what was lent and is still in RAM; what is not is known now."""
        self.place(self.address, heap.pages_in_ram(self.address, len(self.flags)))
        for run in self.runs(1, len(self.flags)):
            heap.recall_pages(*run)

    def gain_from(self, source: "_Pages", until: int) -> int:
        """Take spare pages of `source` for the first ones before `until` that are not
        in RAM; how many."""
        address, count = self.missing(until)
        taken, count = source.lose(count)
        if not heap.move_pages(taken, address, count):
            heap.release_pages(taken, count)
            heap.populate_pages(address, count)
        self.gain(address, count)
        return count

    def lose(self, count: int) -> tuple[int, int]:
        """(address, count) of the last spare pages, at most `count`, to be taken."""
        stop = self.flags.rfind(1, self.kept) + 1
        start = self.flags.rfind(0, self.kept, stop) + 1
        start = max(start, self.kept, stop - count)
        self.flags[start:stop] = bytes(stop - start)
        self.held -= stop - start
        return self.address + start * heap.PAGE_BYTES, stop - start


class _Buffer(_Pages):
    """An idle array."""

    def __init__(self, array: jax.Array):
        self.array = array
        pointer = array.unsafe_buffer_pointer()
        address, count = heap.whole_pages(pointer, array.nbytes)
        self.place(address, bytearray(b"\1" * count))

    def delete(self) -> None:
        self.array.delete()


class Workspace(_Pages):
    """The block of the heap in which XLA finds room for its workspaces, and what it
    calls for scratch.

    It is freed while an executable runs, and taken back with the pages that it has
    then. XLA takes it because other free blocks that are large enough are occupied.
    """

    def __init__(self, nbytes: int):
        self._nbytes = nbytes + NOTICED_BYTES
        self._block = self._given = self._asked = 0
        self._unseen_bytes = 0  # of pages that may have come or gone
        self.place(0, bytearray())
        self._occupied: list[int] = []
        self._occupied_since: list[int] = []  # or all would be looked for again
        self._elsewhere: list[int] = []
        self._begin()

    def _begin(self) -> None:
        """Take a new block, where an earlier one was if that is free again."""
        heap.free_all(self._occupied_since)
        nbytes = self._nbytes + SLACK_BYTES
        self._unseen_bytes = NOTICED_BYTES
        self._hold(heap.allocate(nbytes), nbytes)
        self._occupy()

    def _occupy(self) -> None:
        """Leave no hole of the heap for scratch."""
        heap.free_all(self._occupied_since)
        holes = heap.occupy_holes(2 * self._nbytes, HOLE_BYTES)
        (self._occupied_since if self._occupied else self._occupied).extend(holes)

    def _hold(self, block: int, nbytes: int) -> None:
        self._block = block
        begin = block + heap.LEAD_BYTES  # an aligned block begins there
        address, count = heap.whole_pages(begin, block + nbytes - begin if block else 0)
        shift = (address - self.address) // heap.PAGE_BYTES
        before = min(max(0, -shift), count)
        known = self.flags[max(0, shift) :][: count - before]
        self._unseen_bytes += (count - len(known)) * heap.PAGE_BYTES
        if self._unseen_bytes < UNSEEN_BYTES:
            after = count - before - len(known)
            flags = bytearray(before) + known + bytes(after)
        else:
            flags = heap.pages_in_ram(address, count)
            self._unseen_bytes = 0
        self.place(address, flags)

    @property
    def is_lent(self) -> bool:
        return not self._block

    def take(self, change_bytes: int = NOTICED_BYTES) -> int:
        """Take back what is free of the block, or a new one if that is too little; by
        how many pages the block has grown meanwhile, as far as that was looked at.

        To ask for its pages takes a third of a millisecond, so it is done once those
        that may have come or gone amount to UNSEEN_BYTES.
        """
        self._unseen_bytes += abs(change_bytes)
        same = self._retake()
        if not same:
            self._replace()
        heap.free_all(self._elsewhere)
        grown = max(0, self.held - self._given) if same else 0
        if same and change_bytes - grown * heap.PAGE_BYTES > NOTICED_BYTES:
            self._occupy()  # others have freed blocks since, and scratch lay there
        return grown

    def _retake(self) -> bool:
        least, most = self._nbytes, self._nbytes + SLACK_BYTES
        start = time.perf_counter()
        while (waited := time.perf_counter() - start) < PATIENCE_SECONDS:
            if block := self._near(least):  # or XLA has it still
                heap.free(block)
                for nbytes in range(most, least - 1, -NOTICED_BYTES):
                    if block := self._near(nbytes):
                        self._hold(block, nbytes)
                        return True
            if waited > FREEING_SECONDS and self._hold_beginning():
                return False
            time.sleep(max(1e-4, waited / 4))
        return False

    def _near(self, nbytes: int) -> int:
        """A block where this one was, or 0 if the next is elsewhere."""
        block = heap.allocate(nbytes)
        if abs(block - self.address) <= SLACK_BYTES:
            return block
        heap.free(block)
        return 0

    def _hold_beginning(self) -> bool:
        """Take back most of what XLA was given, if it is free.

        Then what keeps the rest from being one block is not freed soon: to align a
        block, glibc cuts bytes off its end, which a thread of XLA's keeps for itself.
        """
        most, least = self._asked + SLACK_BYTES, self._asked // 2
        for nbytes in range(most, least, -NOTICED_BYTES):
            block = heap.allocate(nbytes)
            start = block - self.address
            if -SLACK_BYTES <= start <= NOTICED_BYTES and start + nbytes > least:
                self._hold(block, nbytes)
                return True
            heap.free(block)
        return False

    def _replace(self) -> None:
        """Take a new block, and the pages of what could be taken back of this one."""
        block, self._block = self._block, 0
        old = _Pages()
        old.place(self.address, self.flags if block else bytearray())
        if block:  # what is left beside it is not counted any more
            heap.release_blocks()
        else:
            heap.release()
        self._begin()
        until = old.held
        while old.held and self.missing(until)[1]:
            self.gain_from(old, until)
        while old.held:
            heap.release_pages(*old.lose(old.held))
        self._occupied_since.append(block)  # or it would be a hole

    def keep(self, nbytes: int) -> None:
        """Return all of its pages to the system but the first `nbytes`."""
        self.kept = min(-(-nbytes // heap.PAGE_BYTES), len(self.flags))
        while self.spare:
            heap.release_pages(*self.lose(self.spare))
        self.kept = 0

    def give(self, nbytes: int) -> None:
        """Let XLA find it, and no better fit for `nbytes` or a part of that, such as
        others have freed since."""
        heap.free(self._block)
        self._block, self._given, self._asked = 0, self.held, nbytes
        begin = self.address - heap.LEAD_BYTES
        while nbytes >= NOTICED_BYTES:
            self._elsewhere += heap.clear_way(nbytes, begin, SLACK_BYTES)
            nbytes //= 2

    def __del__(self, free_all=heap.free_all) -> None:  # `heap` may be gone at the end
        free_all(
            [*self._occupied, *self._occupied_since, *self._elsewhere, self._block]
        )


class Pool:
    """Idle buffers: arrays whose contents nobody reads any more, by kind.

    A buffer keeps its address, and as many of its pages as there is room for. One that
    is taken gets the pages of those that are needed last, which is Belady's choice, for
    a program is known ahead; moving pages costs nothing beside taking new ones. The
    workspace of executables is a buffer, too.

    Args:
      taken: (instruction, kind) of every buffer that the program takes, in order.
      limit_bytes: the most that arrays, idle buffers and workspaces may occupy.
      on_cpu: whether arrays are in host memory. Elsewhere nothing is kept and nothing
        is looked at.
      workspaces: bytes of the workspace of each computing instruction.

    Attributes:
      idle_bytes: of pages that idle buffers hold.
      rests_since: `time.monotonic()` when the last run ended; None while one lasts, and
        once the idle buffers are lent to the system.
    """

    def __init__(
        self,
        taken: Iterable[tuple[int, Kind]],
        limit_bytes: int,
        on_cpu: bool,
        workspaces: Mapping[int, int] = MappingProxyType({}),
    ):
        self._needs: dict[Kind | None, list[int]] = defaultdict(list)
        for row, kind in taken:
            self._needs[kind].append(row)
        large = {row: n for row, n in workspaces.items() if n >= NOTICED_BYTES}
        self._needs[None] = sorted(large)
        self._limit_bytes = limit_bytes
        self._shares = on_cpu and heap.returns_pages()
        self._guards = self._shares and limit_bytes >= GUARDED_BYTES
        self._spared_bytes = min(SCRATCH_BYTES, limit_bytes // 256)
        self._idle: dict[Kind | None, list[Any]] = defaultdict(list)
        self.idle_bytes = 0
        self._base_bytes: int | None = None
        self._others_bytes = 0
        self._file_bytes = 0
        self._largest_bytes = max(large.values(), default=0)
        self._workspace: Workspace | None = None
        self._user = 0  # the instruction that it was lent to
        self._given_bytes = 0  # held then, and of small results
        self._scratch: dict[int, int] = {}  # bytes beyond what an instruction asks for
        self._moves = self._most_mappings = 0
        self._lending = threading.Lock()
        self._is_lent = False
        self.rests_since: float | None = None

    def begin(self, live_bytes: int) -> None:
        """Take back what was lent, and note what the process holds besides that and
        `live_bytes` of arrays.

        What the heap keeps of the last run is not that: it gives back what is free if
        the process has grown.
        """
        with self._lending:
            self.rests_since = None
            was_lent, self._is_lent = self._is_lent, False
        if not self._guards:
            return
        heap.refuse_huge_pages()
        if was_lent:
            buffers = list(itertools.chain(*self._idle.values()))
            for buffer in buffers:
                buffer.recall()
            self.idle_bytes = heap.PAGE_BYTES * sum(buffer.held for buffer in buffers)
        if self._has_grown(live_bytes):
            heap.release_blocks()
        self._trim_while(lambda: self._has_grown(live_bytes))
        base_bytes, held_bytes = self._base_bytes, self._held_beside(live_bytes)
        if (
            base_bytes is None
            or not base_bytes <= held_bytes <= base_bytes + GROWTH_BYTES
        ):
            self._base_bytes = held_bytes
        self._others_bytes = 0

    def _has_grown(self, live_bytes: int) -> bool:
        return self._held_beside(live_bytes) > (self._base_bytes or 0) + GROWTH_BYTES

    def _trim_while(self, is_large: Callable[[], bool]) -> None:
        """Trim the heap, and again after XLA's threads have freed what they used."""
        for seconds in (0.0, heap.SETTLING_SECONDS):
            if is_large():
                time.sleep(seconds)
                heap.release()

    def _held_beside(self, live_bytes: int) -> int:
        """Memory of its own that the process holds besides; that of files is noted."""
        held_bytes, file_bytes = heap.held_bytes()
        self._file_bytes = max(self._file_bytes, file_bytes)
        return held_bytes - live_bytes - self.idle_bytes

    def take(
        self,
        kinds: Sequence[Kind],
        row: int,
        live_bytes: int,
        more_bytes: int = 0,
        workspace_bytes: int = 0,
    ) -> list[jax.Array]:
        """Buffers for instruction `row`, all of their pages in RAM.

        There is room for them, for a workspace and for `more_bytes` of small results,
        beside `live_bytes` of arrays: idle buffers lose pages, also if the process is
        larger than what it should hold, and if that is not enough the heap gives back
        what is free.
        The workspace is XLA's until the next call.
        """
        self._regain()
        found = [self._pop(kind) for kind in kinds]
        needing: list[tuple[_Pages, int]] = [(x, len(x.flags)) for x in found if x]
        new_bytes = more_bytes
        new_bytes += sum(
            nbytes_of(k) for k, x in zip(kinds, found, strict=True) if not x
        )
        scratch_bytes = self._scratch.get(row, 0)
        new_bytes += scratch_bytes
        workspace = self._reserve(workspace_bytes)
        spared_bytes = min(SCRATCH_BYTES, max(self._spared_bytes, 2 * scratch_bytes))
        if workspace:
            needing.append((workspace, workspace.kept))
            if row not in self._scratch:  # as much again as it asks for
                missing_bytes = heap.PAGE_BYTES * workspace.lacking(None)
                spared_bytes = max(missing_bytes, workspace_bytes)
            self._user, self._scratch[row] = row, scratch_bytes
        else:
            new_bytes += workspace_bytes
        for pages, until in needing:
            self._move_pages_to(pages, until, row)
            new_bytes += heap.PAGE_BYTES * pages.lacking(until)
        sizes = sum(map(nbytes_of, kinds))
        beside = live_bytes + sizes + more_bytes + workspace_bytes + scratch_bytes
        self._shrink(self.idle_bytes + beside - self._limit_bytes, row)
        if self._guards and (workspace or new_bytes >= NOTICED_BYTES):
            excess_bytes = self._excess_bytes(new_bytes)
            if excess_bytes > -spared_bytes:
                self._shrink(excess_bytes + spared_bytes, row)
                self._make_room(new_bytes)
        for pages, until in needing:
            pages.fill(until)
        arrays = [
            x.array if x else _new_array(*kind)
            for kind, x in zip(kinds, found, strict=True)
        ]
        if workspace:  # not before, or a new array would lie in it
            workspace.give(workspace_bytes)
            self._given_bytes = heap.held_bytes()[0] + more_bytes
        return arrays

    def _make_room(self, new_bytes: int) -> None:
        """Have the heap give back what is free, if the process is still too large.

        What is left then is what somebody else has taken since the run began: to trim
        the heap again before each instruction would not help.
        """
        if self._excess_bytes(new_bytes) <= self._others_bytes:
            return
        heap.release_blocks()
        most_bytes = self._others_bytes + EXCESS_BYTES
        self._trim_while(lambda: self._excess_bytes(new_bytes) > most_bytes)
        excess_bytes = self._excess_bytes(new_bytes)
        if excess_bytes > most_bytes:
            self._others_bytes = excess_bytes

    def give(self, array: jax.Array, donated: bool = False) -> None:
        """Keep an array that was freed, or was the caller's until it was donated.

        What the caller still computes from such an array is waited for.
        """
        if donated:
            array = jax.block_until_ready(_adopt(array))
        buffer = _Buffer(array)
        self._idle[array.shape, array.dtype].append(buffer)
        self.idle_bytes += buffer.held * heap.PAGE_BYTES

    def end(self) -> None:
        """Keep what the next run can take, and lend it to the system after a pause.

        Donated arrays that no result replaces would pile up otherwise.
        """
        self._regain()
        for kind, buffers in self._idle.items():
            while len(buffers) > len(self._needs[kind]):
                buffer = buffers.pop()
                self.idle_bytes -= buffer.held * heap.PAGE_BYTES
                buffer.delete()
        if self._moves >= MOVES_PER_COUNT:
            self._moves = 0
            if heap.count_mappings() > self._most_mappings:
                self._renew()
                count = heap.count_mappings()
                self._most_mappings = min(2 * count, MOST_MAPPINGS)
        self.rests_since = time.monotonic()
        lender.watch(self)

    def lend(self, since: float) -> None:
        """Let the system take the pages of idle buffers if it runs short of memory, and
        if no run has begun since then."""
        with self._lending:
            if self.rests_since != since:
                return
            for buffer in itertools.chain(*self._idle.values()):
                heap.lend_pages(buffer.address, len(buffer.flags))
            self.rests_since, self._is_lent = None, True

    def release(self) -> None:
        """Return the pages of all buffers; their addresses serve the next run."""
        with self._lending:
            self._regain()
            self._shrink(self.idle_bytes, 0)

    def _renew(self) -> None:
        """Leave no page in RAM, and each buffer a single mapping."""
        for buffer in itertools.chain(*self._idle.values()):
            heap.renew_pages(buffer.address, len(buffer.flags))
            buffer.place(buffer.address, bytearray(len(buffer.flags)))
        self.idle_bytes = 0

    def _regain(self) -> None:
        """Take the workspace back after the executable that used it.

        What it grew by is scratch, or was once, and so is what the process grew by:
        XLA frees scratch, and the heap keeps it for now. But others free blocks, too,
        and then it has grown by theirs, so what is expected of an instruction fades.
        """
        workspace = self._workspace
        if workspace is None or not workspace.is_lent:
            return
        elsewhere_bytes = heap.held_bytes()[0] - self._given_bytes
        self.idle_bytes -= workspace.spare * heap.PAGE_BYTES
        grown_pages = workspace.take(elsewhere_bytes)
        grown_bytes = max(grown_pages * heap.PAGE_BYTES, elsewhere_bytes)
        expected_bytes = self._scratch[self._user] * 31 // 32
        self._scratch[self._user] = max(grown_bytes, expected_bytes)
        workspace.kept = 0
        self.idle_bytes += workspace.held * heap.PAGE_BYTES

    def _reserve(self, nbytes: int) -> Workspace | None:
        """The workspace, of which so many bytes are not idle; None for a small one."""
        if nbytes < NOTICED_BYTES or not self._shares or not heap.is_shared():
            return None
        if self._workspace is None:
            self._workspace = Workspace(self._largest_bytes)
            self._idle[None] = [self._workspace]
        else:
            self.idle_bytes -= self._workspace.held * heap.PAGE_BYTES
        pages = -(-nbytes // heap.PAGE_BYTES)
        self._workspace.kept = min(pages, len(self._workspace.flags))
        self.idle_bytes += self._workspace.spare * heap.PAGE_BYTES
        return self._workspace

    def _excess_bytes(self, new_bytes: int) -> int:
        """How far `new_bytes` more would take the process beyond the limit.

        Pages of files that come on top count; those that the system drops, as it does
        when memory is short, make no room.
        """
        held_bytes, file_bytes = heap.held_bytes()
        held_bytes += max(0, file_bytes - self._file_bytes) - (self._base_bytes or 0)
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

    def _move_pages_to(self, pages: _Pages, until: int, row: int) -> None:
        """Take the pages that it lacks from idle buffers, as far as they have any."""
        while self.idle_bytes and pages.missing(until)[1]:
            _, last = self._needed_last(row)
            self.idle_bytes -= pages.gain_from(last, until) * heap.PAGE_BYTES
            self._moves += 1

    def _shrink(self, nbytes: int, row: int) -> None:
        """Take at least `nbytes` of pages from idle buffers, or all."""
        count = -(-nbytes // heap.PAGE_BYTES)
        while count > 0 and self.idle_bytes:
            kind, last = self._needed_last(row)
            address, taken = last.lose(count)
            if not heap.release_pages(address, taken):
                taken += last.held
                self._idle[kind].remove(last)
                last.delete()
            self.idle_bytes -= taken * heap.PAGE_BYTES
            count -= taken

    def _needed_last(self, row: int) -> tuple[Kind | None, Any]:
        """The idle buffer with pages that instruction `row` and the next need last."""
        last, latest = None, -1.0
        for kind, buffers in self._idle.items():
            holding = [x for x in buffers if x.spare]
            if holding:
                need = self._next_need(kind, len(holding), row)
                if need > latest:
                    last, latest = (kind, holding), need
        assert last is not None, "no idle buffer has pages"
        kind, holding = last
        return kind, min(holding, key=lambda buffer: buffer.held)

    def _next_need(self, kind: Kind | None, count: int, row: int) -> float:
        """The instruction that will take the last of `count` buffers of a kind."""
        rows = self._needs[kind]
        number = bisect.bisect_left(rows, row) + count - 1
        return rows[number] if number < len(rows) else float("inf")
