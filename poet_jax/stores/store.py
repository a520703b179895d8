"""Where pages lie: a file descriptor, and room in it that is given out by sectors."""

import bisect
import collections
import contextlib
import errno
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from typing import IO

from poet_jax.core.errors import PageStoreError

logger = logging.getLogger("poet_jax")

SECTOR_BYTES = 4096  # what every page starts at
_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Store:
    """Room for pages in a file that this process has open.

    A subclass says in `open` which file that is; everything else has defaults. The
    file is opened when it is first needed. Several threads may use a store at a time,
    and `free` may be called for garbage, in the middle of anything.

    Attributes:
      is_direct: whether the file, once open, is read and written past the system's page
        cache (O_DIRECT).
      generation: how often the store was closed. What was allocated before the last
        time is gone.
    """

    is_direct: bool = False

    def __init__(self):
        self.generation = 0
        self._file: IO[bytes] | None = None
        self._lengths: dict[int, int] = {}  # in bytes, by offset
        self._holes: list[tuple[int, int]] = []  # (offset, length), sorted, apart
        self._end = 0  # of what is allocated
        self._size = 0  # of the file, as far as the disk is known to have it
        self._lock = threading.Lock()
        self._leaving: collections.deque[int] = collections.deque()

    def open(self) -> IO[bytes]:
        """A file for reading and writing, empty or not, that only this store uses.

        An OSError of it becomes a PageStoreError. It is closed with the store's end.
        """
        raise NotImplementedError

    @property
    def place(self) -> str:
        """Where the pages are, for messages."""
        return type(self).__name__

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        with self._locked():
            return sum(self._lengths.values())

    def descriptor(self) -> int:
        """The open file's number; PageStoreError if it cannot be opened."""
        with self._locked():
            try:
                return self._descriptor()
            except OSError as error:
                raise PageStoreError(
                    f"{self.place} was to be opened for pages, which failed: "
                    f"{error.strerror}. Nothing was paged. Make it writable, or type "
                    "FileStore(another_folder)."
                ) from error

    def allocate(self, nbytes: int, name: str) -> int:
        """Offset of room for `nbytes`, a multiple of 4096, which is on the disk where
        the system can say so; PageStoreError, naming `name`, if there is none."""
        with self._locked():
            try:
                offset, holes, end = self._found(_whole_sectors(nbytes))
                self._grow(end)
            except OSError as error:
                raise PageStoreError(
                    f"{name!r} ({nbytes} bytes) was to be paged out to {self.place}, "
                    f"which failed: {error.strerror}. The store holds "
                    f"{sum(self._lengths.values())} bytes. {_MORE_ROOM}"
                ) from error
            self._holes, self._end = holes, end
            self._lengths[offset] = nbytes
            return offset

    def free(self, offset: int) -> None:
        """Give back what `allocate` gave since the store was last closed."""
        # Also called for garbage, in the middle of whatever this or another thread
        # does; then whoever has the lock next does it.
        self._leaving.append(offset)
        if self._lock.acquire(blocking=False):
            try:
                self._forget()
            finally:
                self._lock.release()

    def reserve(self, nbytes: int) -> None:
        """Take room on the disk for `nbytes` more than are allocated.

        Raises PageStoreError, and leaves the file as it was, if the disk has less.
        Where the file system cannot say, or what is allocated lies scattered, later
        room may still not be had.
        """
        with self._locked():
            free = sum(length for _, length in self._holes)
            try:
                self._grow(self._end + max(0, _whole_sectors(nbytes) - free))
            except OSError as error:
                raise PageStoreError(
                    f"A step was to page up to {nbytes} bytes to {self.place}, which "
                    f"has no room for them: {error.strerror}. The store holds "
                    f"{sum(self._lengths.values())} bytes, and the step has not begun. "
                    f"{_MORE_ROOM}"
                ) from error

    def close(self) -> None:
        """Forget everything and give the room back; the store may be used again.

        The file stays open, and empty, as long as the store is referred to: a transfer
        that is still under way never meets another file by its number.
        """
        with self._locked():
            self.generation += 1
            self._lengths.clear()
            self._holes.clear()
            self._end = self._size = 0
            if self._file is not None:
                with contextlib.suppress(OSError):  # not every file has a length
                    os.ftruncate(self._file.fileno(), 0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """For one thread at a time, and after all that was to be freed is."""
        with self._lock:
            self._forget()
            yield

    def _descriptor(self) -> int:
        if self._file is None:
            self._file = self.open()
            weakref.finalize(self, self._file.close).atexit = False
        return self._file.fileno()

    def _grow(self, end: int) -> None:
        """Have the file's first `end` bytes on the disk, where it can be told to."""
        descriptor = self._descriptor()
        if end > SECTOR_BYTES * 2**32:  # the sectors that a place can name
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        if end <= self._size or not hasattr(os, "posix_fallocate"):
            return
        before = os.fstat(descriptor).st_size
        try:
            os.posix_fallocate(descriptor, self._size, end - self._size)
        except OSError as error:
            if error.errno in _IS_FULL:
                os.ftruncate(descriptor, before)
                raise
        self._size = end

    def _found(self, nbytes: int) -> tuple[int, list[tuple[int, int]], int]:
        """(offset of the first hole that is large enough, or else of the end; holes and
        end without it)"""
        for index, (offset, length) in enumerate(self._holes):
            if length >= nbytes > 0:
                rest = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                left = [*self._holes[:index], *rest, *self._holes[index + 1 :]]
                return offset, left, self._end
        nbytes = max(nbytes, SECTOR_BYTES)  # no two pages have one offset
        return self._end, self._holes, self._end + nbytes

    def _forget(self) -> None:
        while self._leaving:
            offset = self._leaving.popleft()
            length = self._lengths.pop(offset, None)
            if length is None:
                continue
            size = max(_whole_sectors(length), SECTOR_BYTES)
            bisect.insort(self._holes, (offset, size))
            merged: list[tuple[int, int]] = []
            for hole, size in self._holes:
                if merged and sum(merged[-1]) == hole:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((hole, size))
            self._holes = merged


_MORE_ROOM = (
    "Free some room there, type FileStore(another_folder), or limit the plan with "
    "Budget(store_bytes=...)."
)


class FileStore(Store):
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
        super().__init__()
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

    @property
    def place(self) -> str:
        return repr(self.folder)

    def open(self) -> IO[bytes]:
        file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
        self.is_direct = _make_direct(file.fileno())
        return file


class HostStore(Store):
    """Memory of the host: for accelerators, whose memory is another, and tests.

    Between an accelerator and the host a program moves pages by itself. On the CPU they
    are in an anonymous file in RAM (Linux's memfd), beyond every budget, and take the
    way that those of a `FileStore` take.
    """

    @property
    def place(self) -> str:
        return "host memory"

    def open(self) -> IO[bytes]:
        if not hasattr(os, "memfd_create"):
            raise OSError(
                errno.ENOSYS, "this system has no files in memory (memfd_create)"
            )
        return os.fdopen(os.memfd_create("poet_jax"), "r+b", buffering=0)


def _whole_sectors(nbytes: int) -> int:
    return -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES


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


def _make_direct(descriptor: int) -> bool:
    """Let transfers go past the system's page cache, if it can."""
    try:
        import fcntl

        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except (ImportError, AttributeError, OSError):
        return False
    return True
