"""Where paged values wait: a store keeps arrays by key and gives back the same
bytes."""

import bisect
import collections
import contextlib
import os
import tempfile
import threading
import zlib
from collections.abc import Hashable, Iterator
from typing import Protocol

import numpy as np

from poet_jax.errors import PageStoreError


class PageStore(Protocol):
    """Keeps the bytes of arrays. Several threads may call it at the same time.

    Every method raises PageStoreError, naming the value, if the store cannot do it.
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
    tests."""

    def __init__(self):
        self._pages: dict[Hashable, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in list(self._pages.values()))

    def write(self, key: Hashable, data: np.ndarray, name: str) -> None:
        self._pages[key] = data.copy()

    def read(self, key: Hashable, into: np.ndarray, name: str) -> None:
        into[:] = self._pages[key]

    def delete(self, key: Hashable) -> None:
        del self._pages[key]

    def close(self) -> None:
        self._pages.clear()


class FileStore:
    """One file without a name in `folder`, which vanishes with the process that made
    it.

    The file is opened at the first write. As it has no name, neither an exception nor a
    killed process leaves anything behind. What is read is checked against its length
    and CRC-32. The default folder is the system's one for temporary files.
    """

    def __init__(self, folder: str | os.PathLike | None = None):
        self.folder = os.fspath(folder) if folder is not None else tempfile.gettempdir()
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
        self._file = None
        # offset, length, checksum
        self._pages: dict[Hashable, tuple[int, int, int]] = {}
        self._holes: list[tuple[int, int]] = []  # (offset, length), sorted, apart
        self._end = 0
        self._lock = threading.Lock()
        self._leaving: collections.deque[Hashable] = collections.deque()

    @property
    def nbytes(self) -> int:
        with self._locked():
            return sum(length for _, length, _ in self._pages.values())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """For one thread at a time, and after all that was to be deleted is."""
        with self._lock:
            self._forget()
            yield

    def write(self, key: Hashable, data: np.ndarray, name: str) -> None:
        with self._locked():
            self._write(key, data, name)

    def _write(self, key: Hashable, data: np.ndarray, name: str) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
            offset = self._allocate(data.nbytes)
            self._pages[key] = offset, data.nbytes, zlib.crc32(data.data)
            view, done = data.data, 0
            while done < data.nbytes:
                done += os.pwrite(self._file.fileno(), view[done:], offset + done)
        except OSError as error:
            self._leaving.append(key)
            self._forget()
            held_bytes = sum(length for _, length, _ in self._pages.values())
            raise PageStoreError(
                f"{name!r} ({data.nbytes} bytes) was to be paged out to "
                f"{self.folder!r}, which failed: {error.strerror}. The store held "
                f"{held_bytes} bytes. "
                "Free some room there, type FileStore(another_folder), or limit the "
                "plan with Budget(store_bytes=...)."
            ) from error

    def read(self, key: Hashable, into: np.ndarray, name: str) -> None:
        with self._locked():
            self._read(key, into, name)

    def _read(self, key: Hashable, into: np.ndarray, name: str) -> None:
        offset, length, checksum = self._pages[key]
        done = 0
        try:
            assert self._file is not None
            if length != into.nbytes:
                raise OSError(0, f"{length} bytes were kept, {into.nbytes} asked for")
            while done < length:
                count = os.preadv(
                    self._file.fileno(), [into.data[done:]], offset + done
                )
                if not count:
                    raise OSError(0, f"the file ended after {done} bytes")
                done += count
            if zlib.crc32(into.data) != checksum:
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
            bisect.insort(self._holes, page[:2])
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
            self._end = 0
            if self._file is not None:
                self._file.close()
                self._file = None

    def _allocate(self, nbytes: int) -> int:
        """Offset of the first hole that is large enough, or the end of the file."""
        for index, (offset, length) in enumerate(self._holes):
            if length >= nbytes:
                rest = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                self._holes[index : index + 1] = rest
                return offset
        self._end += nbytes
        return self._end - nbytes
