"""Where paged values wait: a store keeps arrays by key and gives back the same
bytes."""

import bisect
import collections
import concurrent.futures
import contextlib
import errno
import logging
import mmap
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from poet_jax.errors import PageStoreError

logger = logging.getLogger("poet_jax")


class PageStore(Protocol):
    """Keeps the bytes of arrays. Several threads may call it at the same time.

    Every method raises PageStoreError, naming the value, if the store cannot do it.
    A store may also have `reserve(nbytes)`, which is called before a step that will
    keep so many more at once: what cannot be had is then missed before anything is
    donated. And it may have `write_array` and `read_array`, as `HostStore` does: where
    arrays are on an accelerator, they are called for a step's pages instead of `write`
    and `read`.
    """

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        ...

    def write(self, key: Hashable, data: np.ndarray, name: str) -> None:
        """Keep a copy of `data`, a contiguous uint8 array, as `key`."""
        ...

    def read(self, key: Hashable, into: np.ndarray, name: str) -> None:
        """Fill `into`, a contiguous uint8 array, with the bytes of `key`."""
        ...

    def delete(self, key: Hashable) -> None:
        """Forget `key`."""
        ...

    def close(self) -> None:
        """Forget everything and release what the store holds; it may be used again."""
        ...


class HostStore:
    """A dictionary of host arrays: for accelerators, whose memory is another, and
    tests.

    An accelerator's arrays are kept in pinned memory, which it reads and writes by
    itself.
    """

    def __init__(self):
        self._pages: dict[Hashable, np.ndarray | jax.Array] = {}

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in list(self._pages.values()))

    def write(self, key: Hashable, data: np.ndarray, name: str) -> None:
        self._pages[key] = data.copy()

    def read(self, key: Hashable, into: np.ndarray, name: str) -> None:
        into[:] = self._pages[key]

    def write_array(self, key: Hashable, array: jax.Array, name: str) -> None:
        """Keep a copy of `array` as `key`."""
        try:
            self._pages[key] = jax.block_until_ready(in_host_memory(array))
        except jax.errors.JaxRuntimeError as error:
            raise PageStoreError(
                f"{name!r} ({array.nbytes} bytes) was to be kept in pinned host "
                f"memory beside {self.nbytes} bytes, which failed: {error}. The "
                "system limits such memory. Limit the plan with "
                "Budget(store_bytes=...)."
            ) from error

    def read_array(self, key: Hashable, name: str) -> jax.Array:
        """What `write_array` kept as `key`, on the accelerator again."""
        page: Any = self._pages[key]
        sharding = page.sharding.with_memory_kind("device")
        return jax.block_until_ready(jax.device_put(page, sharding))

    def delete(self, key: Hashable) -> None:
        del self._pages[key]

    def close(self) -> None:
        self._pages.clear()


def in_host_memory(array: jax.Array) -> jax.Array:
    """A copy of an accelerator's array, in host memory that it writes by itself.

    To NumPy's memory an H200 was seen to write 1.5 GB/s, to such memory 48.
    """
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


# What direct transfers must start and end at, and how much goes at a time, through one
# of two buffers.
SECTOR_BYTES = 4096
CHUNK_BYTES = 4 * 2**20

_MORE_ROOM = (
    "Free some room there, type FileStore(another_folder), or limit the plan with "
    "Budget(store_bytes=...)."
)
_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileStore:
    """One file without a name in `folder`, which vanishes with the process that made
    it.

    The file is opened at the first write. As it has no name, neither an exception nor a
    killed process leaves anything behind. What is read is checked against its length
    and a checksum. The default folder is the system's one for temporary files, or
    /var/tmp where that one is in RAM. A folder in RAM is a warning.

    Transfers go past the system's page cache, which would be RAM beyond every budget,
    or where the file system does not know such transfers, leave nothing in it.
    """

    def __init__(self, folder: str | os.PathLike | None = None):
        self.folder = os.fspath(folder) if folder is not None else _default_folder()
        if not os.path.isdir(self.folder):
            raise PageStoreError(
                f"A FileStore was asked for in {self.folder!r}, which is not a folder. "
                "It needs a folder that exists and is writable. Create it with "
                f"os.makedirs({self.folder!r}), or leave the argument out."
            )
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PageStoreError(
                f"A FileStore was asked for in {self.folder!r}, which is not writable. "
                "It needs a folder that this user may write to. Type another one, or "
                "change its permissions."
            )
        if _is_in_ram(self.folder):
            logger.warning(
                "a FileStore was made in %s, which is in RAM: its pages take memory "
                "that no budget counts. Type poet_jax.FileStore(folder) with a folder "
                "on a disk",
                self.folder,
            )
        # offset, length, checksum
        self._pages: dict[Hashable, tuple[int, int, int]] = {}
        self._holes: list[tuple[int, int]] = []  # (offset, length), sorted, apart
        self._end = 0
        self._reserved_bytes = 0  # of the file, that the disk is known to have
        self._chunks: _Chunks | None = None
        self._lock = threading.Lock()
        self._leaving: collections.deque[Hashable] = collections.deque()

    @property
    def nbytes(self) -> int:
        with self._locked():
            return sum(length for _, length, _ in self._pages.values())

    @property
    def file_bytes(self) -> int:
        """Size of the file, which holds what is kept and room to be used again."""
        with self._locked():
            return self._end

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """For one thread at a time, and after all that was to be deleted is."""
        with self._lock:
            self._forget()
            yield

    def reserve(self, nbytes: int) -> None:
        """Take room on the disk for `nbytes` more than are kept.

        Raises PageStoreError if the disk has less. Where the file system cannot say, or
        what is kept lies scattered, a later write may still find the disk full.
        """
        with self._locked():
            held = sum(_whole_sectors(length) for _, length, _ in self._pages.values())
            size = held + _whole_sectors(nbytes)
            if size <= self._reserved_bytes:
                return
            try:
                if self._chunks is None:
                    self._chunks = _Chunks(self.folder)
                self._chunks.reserve(size)
            except OSError as error:
                raise PageStoreError(
                    f"A step was to page up to {nbytes} bytes to {self.folder!r}, "
                    f"which has no room for them: {error.strerror}. The store holds "
                    f"{held} bytes, and the step has not begun. {_MORE_ROOM}"
                ) from error
            self._reserved_bytes = size

    def write(self, key: Hashable, data: np.ndarray, name: str) -> None:
        with self._locked():
            self._write(key, data, name)

    def _write(self, key: Hashable, data: np.ndarray, name: str) -> None:
        if key in self._pages:
            self._leaving.append(key)
            self._forget()
        try:
            if self._chunks is None:
                self._chunks = _Chunks(self.folder)
            offset = self._allocate(data.nbytes)
            self._pages[key] = offset, data.nbytes, 0
            written = self._chunks.write(data, offset)
            self._pages[key] = offset, data.nbytes, written
        except OSError as error:
            self._leaving.append(key)
            self._forget()
            held_bytes = sum(length for _, length, _ in self._pages.values())
            raise PageStoreError(
                f"{name!r} ({data.nbytes} bytes) was to be paged out to "
                f"{self.folder!r}, which failed: {error.strerror}. The store held "
                f"{held_bytes} bytes. {_MORE_ROOM}"
            ) from error

    def read(self, key: Hashable, into: np.ndarray, name: str) -> None:
        with self._locked():
            self._read(key, into, name)

    def _read(self, key: Hashable, into: np.ndarray, name: str) -> None:
        offset, length, expected = self._pages[key]
        try:
            assert self._chunks is not None
            if length != into.nbytes:
                raise OSError(0, f"{length} bytes were kept, {into.nbytes} asked for")
            if self._chunks.read(into, offset) != expected:
                raise OSError(0, "the bytes are not those that were written")
        except OSError as error:
            raise PageStoreError(
                f"{name!r} ({length} bytes) was to be paged in from {self.folder!r}, "
                f"which failed: {error.strerror}. The step cannot go on without it, "
                "and no wrong bytes were used. Check that disk, or type "
                "FileStore(another_folder)."
            ) from error

    def delete(self, key: Hashable) -> None:
        # Also called for garbage, in the middle of whatever this or another thread
        # does; then whoever has the lock next forgets the key.
        self._leaving.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._forget()
            finally:
                self._lock.release()

    def _forget(self) -> None:
        while self._leaving:
            page = self._pages.pop(self._leaving.popleft(), None)
            if page is None:
                continue
            bisect.insort(self._holes, (page[0], _whole_sectors(page[1])))
            merged: list[tuple[int, int]] = []
            for hole, size in self._holes:
                if merged and sum(merged[-1]) == hole:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((hole, size))
            self._holes = merged

    def close(self) -> None:
        with self._locked():
            self._pages.clear()
            self._holes.clear()
            self._end = self._reserved_bytes = 0
            if self._chunks is not None:
                self._chunks.close()
                self._chunks = None

    def _allocate(self, nbytes: int) -> int:
        """Offset of the first hole that is large enough, or the end of the file."""
        nbytes = _whole_sectors(nbytes)
        for index, (offset, length) in enumerate(self._holes):
            if length >= nbytes:
                rest = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                self._holes[index : index + 1] = rest
                return offset
        self._end += nbytes
        return self._end - nbytes


def _default_folder() -> str:
    folder, other = tempfile.gettempdir(), "/var/tmp"
    usable = os.path.isdir(other) and os.access(other, os.W_OK | os.X_OK)
    if _is_in_ram(folder) and usable and not _is_in_ram(other):
        return other
    return folder


def _is_in_ram(folder: str) -> bool:
    """Whether the folder's file system keeps files in memory, where Linux says so."""
    path = os.path.join(os.path.realpath(folder), "")
    try:
        with open("/proc/self/mounts") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return False
    above = [m for m in mounts if path.startswith(os.path.join(m[0], ""))]
    # Of several at one place the last one counts.
    longest = max((len(place) for place, _ in above), default=0)
    kinds = [kind for place, kind in above if len(place) == longest]
    return kinds[-1:] in (["tmpfs"], ["ramfs"])


def checksum(data: np.ndarray, before: int = 0) -> int:
    """CRC-32 of the sums of each sector's 64-bit words, after what is summed up in
    `before`.

    It differs for any one word that differs, and for sectors in another order. A CRC of
    all bytes would take several times as long as moving them.
    """
    whole = data.nbytes // SECTOR_BYTES * SECTOR_BYTES
    words = data[:whole].view(np.uint64).reshape(-1, SECTOR_BYTES // 8)
    sums = words.sum(axis=1, dtype=np.uint64)
    return zlib.crc32(data[whole:].data, zlib.crc32(sums.data, before))


def _whole_sectors(nbytes: int) -> int:
    return -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES


def _is_sectors(data: np.ndarray) -> bool:
    return not (data.ctypes.data % SECTOR_BYTES or data.nbytes % SECTOR_BYTES)


class _Chunks:
    """A nameless file, read and written a chunk at a time.

    A chunk that does not start and end at a sector of memory goes through one of two
    buffers that do. One chunk is summed up, and copied if need be, while another is on
    its way.
    """

    def __init__(self, folder: str):
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)
        self._descriptor = self.file.fileno()
        self._is_direct = _make_direct(self._descriptor)
        # Memory of its own starts at a page.
        maps = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(2)]
        self._buffers = [np.frombuffer(x, np.uint8) for x in maps]
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "poet_jax-file")

    def reserve(self, size: int) -> None:
        """Have the file's first `size` bytes on the disk, where it can be told to."""
        if not hasattr(os, "posix_fallocate"):
            return
        before = os.fstat(self._descriptor).st_size
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            os.ftruncate(self._descriptor, before)
            if error.errno in _IS_FULL:
                raise

    def write(self, data: np.ndarray, offset: int) -> int:
        """The checksum of what was written."""
        total, under_way = 0, collections.deque[concurrent.futures.Future]()
        try:
            for number, start in enumerate(range(0, data.nbytes, CHUNK_BYTES)):
                if len(under_way) == 2:
                    under_way[0].result()
                    under_way.popleft()
                part = data[start : start + CHUNK_BYTES]
                sectors = part
                if not _is_sectors(part):
                    sectors = self._buffers[number % 2][: _whole_sectors(part.nbytes)]
                    sectors[: part.nbytes] = part
                total = checksum(sectors[: part.nbytes], total)
                alone = part.nbytes == data.nbytes
                under_way.append(self._start(alone, self._put, sectors, offset + start))
            for future in under_way:
                future.result()
        finally:  # nobody else holds the memory
            concurrent.futures.wait(under_way)
        if not self._is_direct:
            os.fdatasync(self._descriptor)  # only then can the cache let go
            self._forget(offset, data.nbytes)
        return total

    def read(self, into: np.ndarray, offset: int) -> int:
        """The checksum of what was read."""
        starts = range(0, into.nbytes, CHUNK_BYTES)
        parts = [into[start : start + CHUNK_BYTES] for start in starts]
        sectors = [
            part
            if _is_sectors(part)
            else self._buffers[number % 2][: _whole_sectors(part.nbytes)]
            for number, part in enumerate(parts)
        ]

        def fetch(number: int) -> concurrent.futures.Future:
            length, place = parts[number].nbytes, offset + starts[number]
            alone = len(parts) == 1
            return self._start(alone, self._get, sectors[number], place, length)

        total, under_way = 0, collections.deque(map(fetch, range(len(parts[:2]))))
        try:
            for number, (part, fetched) in enumerate(zip(parts, sectors, strict=True)):
                under_way[0].result()
                under_way.popleft()
                total = checksum(fetched[: part.nbytes], total)
                if fetched is not part:
                    part[:] = fetched[: part.nbytes]
                if number + 2 < len(parts):
                    under_way.append(fetch(number + 2))
        finally:  # nobody else holds the memory
            concurrent.futures.wait(under_way)
        if not self._is_direct:
            self._forget(offset, into.nbytes)
        return total

    def _start(
        self, alone: bool, transfer: Callable[..., None], *args: Any
    ) -> concurrent.futures.Future:
        """A chunk's transfer; one without others has nothing to go on beside."""
        if not alone:
            return self._worker.submit(transfer, *args)
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(transfer(*args))
        return future

    def _put(self, data: np.ndarray, offset: int) -> None:
        done = 0
        while done < data.nbytes:
            count = os.pwrite(self._descriptor, data.data[done:], offset + done)
            done += self._whole(count, "written")

    def _get(self, into: np.ndarray, offset: int, length: int) -> None:
        done = 0
        while done < length:
            count = os.preadv(self._descriptor, [into.data[done:]], offset + done)
            if not count:
                raise OSError(0, f"the file ended after {offset + done} bytes")
            done += count if done + count >= length else self._whole(count, "read")

    def _whole(self, count: int, verb: str) -> int:
        """How much of a short transfer counts: the next one starts at a sector, too."""
        if self._is_direct:
            count -= count % SECTOR_BYTES
        if not count:
            raise OSError(errno.EIO, f"not even a sector could be {verb}")
        return count

    def _forget(self, offset: int, nbytes: int) -> None:
        """Drop pages from the system's cache, where it can be told to."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(
                self._descriptor,
                offset,
                _whole_sectors(nbytes),
                os.POSIX_FADV_DONTNEED,
            )

    def close(self) -> None:
        self._worker.shutdown()
        self.file.close()


def _make_direct(descriptor: int) -> bool:
    """Let transfers go past the system's page cache, if it can."""
    try:
        import fcntl

        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except (ImportError, AttributeError, OSError):
        return False
    return True
