"""Stores for pages: a file, and the allocation of its sectors."""

import abc
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

SECTOR_BYTES = 4096  # every page that is written starts at a multiple of this

# (descriptor, sector, flags, checksum), as `Store.page_at` makes it and pages.cc reads.
PagePlace = tuple[int, int, int, int]
DIRECT, UNKNOWN = 1, 2  # flags: past the page cache; of a checksum that is not known
SKEW_BITS = 8  # of the flags below the page's offset in its sector
_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Store(abc.ABC):
    """Room for pages in a file that this process has open.

    A subclass implements `open`, which is called at the first use. Stores are thread
    safe, and the garbage collector may call `free` at any time.

    Attributes:
      is_direct: whether the open file bypasses the page cache (O_DIRECT).
      generation: how often the store was closed; closing frees all that was allocated.
    """

    is_direct: bool = False

    def __init__(self):
        self.generation = 0
        self._file: IO[bytes] | None = None
        self._lengths: dict[int, int] = {}  # in bytes, by offset
        self._holes: list[
            tuple[int, int]
        ] = []  # (offset, length), sorted, not adjacent
        self._end = 0  # of the last allocation
        self._size = 0  # of the file's part that is allocated on disk
        self._lock = threading.Lock()
        self._leaving: collections.deque[int] = collections.deque()

    @abc.abstractmethod
    def open(self) -> IO[bytes]:
        """Open a file for reading and writing that only this store uses.

        An OSError becomes a PageStoreError. The file is closed with the store.
        """

    @property
    def place(self) -> str:
        """Where the pages are, for error messages."""
        return type(self).__name__

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        with self._locked():
            return sum(self._lengths.values())

    def descriptor(self) -> int:
        """The open file's descriptor. Raises PageStoreError if it cannot be opened."""
        with self._locked():
            try:
                return self._descriptor()
            except OSError as error:
                raise PageStoreError(
                    f"{self.place} cannot be opened for pages: "
                    f"{error.strerror or error}. Make it writable, or use "
                    "FileStore(another_folder)."
                ) from error

    def page_at(self, offset: int, checksum: int | None = 0) -> PagePlace:
        """What `library` moves a page by that starts at `offset`, in bytes.

        Only a page that is never written may start within a sector, or have None as a
        checksum that is not known. Raises PageStoreError if the file cannot be opened.
        """
        descriptor = self.descriptor()
        sector, skew = divmod(offset, SECTOR_BYTES)
        flags = DIRECT * self.is_direct | UNKNOWN * (checksum is None)
        return descriptor, sector, flags | skew << SKEW_BITS, checksum or 0

    def allocate(self, nbytes: int, name: str) -> int:
        """Allocate `nbytes`, on disk where the system can; returns their offset, a
        multiple of 4096. Raises PageStoreError, naming `name`, if there is no room."""
        with self._locked():
            try:
                offset, holes, end = self._found(whole_sectors(nbytes))
                self._grow(end)
            except OSError as error:
                raise PageStoreError(
                    f"{name!r} ({nbytes} bytes) cannot be paged out to {self.place}: "
                    f"{error.strerror or error}. The store holds "
                    f"{sum(self._lengths.values())} bytes. {_MORE_ROOM}"
                ) from error
            self._holes, self._end = holes, end
            self._lengths[offset] = nbytes
            return offset

    def free(self, offset: int) -> None:
        """Free an allocation made since the store was last closed."""
        # The garbage collector calls this while any thread, this one included, may hold
        # the lock; its next holder then frees.
        self._leaving.append(offset)
        if self._lock.acquire(blocking=False):
            try:
                self._forget()
            finally:
                self._lock.release()

    def reserve(self, nbytes: int) -> None:
        """Allocate disk space for `nbytes` beyond those allocated.

        Raises PageStoreError, and leaves the file unchanged, if the disk is too full.
        No guarantee where the file system cannot preallocate or holes are scattered.
        """
        with self._locked():
            free = sum(length for _, length in self._holes)
            try:
                self._grow(self._end + max(0, whole_sectors(nbytes) - free))
            except OSError as error:
                raise PageStoreError(
                    f"{self.place} has no room for the {nbytes} bytes that the step "
                    f"may page out: {error.strerror or error}. It holds "
                    f"{sum(self._lengths.values())} bytes; the step has not begun. "
                    f"{_MORE_ROOM}"
                ) from error

    def close(self) -> None:
        """Free all pages and their disk space; the store may be used again.

        The file stays open and empty while the store is alive, so that no transfer in
        flight meets another file under its descriptor.
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
        """Hold the lock, after freeing what `free` could not."""
        with self._lock:
            self._forget()
            yield

    def _descriptor(self) -> int:
        if self._file is None:
            self._file = self.open()
            weakref.finalize(self, self._file.close).atexit = False
        return self._file.fileno()

    def _grow(self, end: int) -> None:
        """Allocate the file's first `end` bytes on disk, where the system can."""
        descriptor = self._descriptor()
        if end > SECTOR_BYTES * 2**32:  # the uint32 of a place
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
        """First fit: (offset, holes and end after allocating there)."""
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
            size = max(whole_sectors(length), SECTOR_BYTES)
            bisect.insort(self._holes, (offset, size))
            merged: list[tuple[int, int]] = []
            for hole, size in self._holes:
                if merged and sum(merged[-1]) == hole:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((hole, size))
            self._holes = merged


_MORE_ROOM = (
    "Free disk space, use FileStore(another_folder), or limit the plan with "
    "Budget(store_bytes=...)."
)


class FileStore(Store):
    """An unnamed temporary file in `folder`, which vanishes with the process.

    Neither an exception nor a killed process leaves a file behind. Every page read is
    verified by length and checksum. The default folder is the system's temporary one,
    or /var/tmp where that is in RAM; a folder in RAM gives a warning. Transfers bypass
    the page cache (O_DIRECT) where they can, and else leave nothing in it, as it is RAM
    that no budget counts.

    Raises PageStoreError for a folder that does not exist or is not writable.
    """

    def __init__(self, folder: str | os.PathLike | None = None):
        super().__init__()
        self.folder = os.fspath(folder) if folder is not None else _default_folder()
        if not os.path.isdir(self.folder):
            raise PageStoreError(
                f"FileStore: {self.folder!r} is not a folder. Create it with "
                f"os.makedirs({self.folder!r}), or leave the argument out."
            )
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PageStoreError(
                f"FileStore: {self.folder!r} is not writable. Use another folder, or "
                "change its permissions."
            )
        if _is_in_ram(self.folder):
            logger.warning(
                "the FileStore's folder is %s, which is in RAM: its pages take memory "
                "that no budget counts. Use poet_jax.FileStore(folder) with a folder "
                "on a disk",
                self.folder,
            )

    @property
    def place(self) -> str:
        return repr(self.folder)

    def open(self) -> IO[bytes]:
        file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
        self.is_direct = make_direct(file.fileno())
        return file


class HostStore(Store):
    """Host memory: for accelerators, which have memory of their own, and for tests.

    On an accelerator XLA moves the pages. On the CPU they go to an anonymous file in
    RAM (Linux's memfd), which no budget counts, in the same way as to a `FileStore`.
    """

    @property
    def place(self) -> str:
        return "host memory"

    def open(self) -> IO[bytes]:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memfd_create")
        return os.fdopen(os.memfd_create("poet_jax"), "r+b", buffering=0)


def whole_sectors(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of a sector."""
    return -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES


def _default_folder() -> str:
    folder, other = tempfile.gettempdir(), "/var/tmp"
    usable = os.path.isdir(other) and os.access(other, os.W_OK | os.X_OK)
    if _is_in_ram(folder) and usable and not _is_in_ram(other):
        return other
    return folder


def _is_in_ram(folder: str) -> bool:
    """Whether the folder is on a tmpfs or ramfs, by Linux's list of mounts."""
    path = os.path.join(os.path.realpath(folder), "")
    try:
        with open("/proc/self/mounts") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return False
    above = [m for m in mounts if path.startswith(os.path.join(m[0], ""))]
    # Of several mounts at one place the last one counts.
    _, kind = max(reversed(above), key=lambda mount: len(mount[0]), default=("", ""))
    return kind in ("tmpfs", "ramfs")


def make_direct(descriptor: int) -> bool:
    """Bypass the page cache from now on; False if the system cannot."""
    try:
        import fcntl

        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except (ImportError, AttributeError, OSError):
        return False
    return True
