"""Where paged values wait: a store keeps arrays by number and gives back the same
bytes."""

import bisect
import os
import tempfile
import zlib
from typing import Protocol

import numpy as np

from poet_jax.errors import PageStoreError


class PageStore(Protocol):
    """Keeps the bytes of arrays. The executor calls it from one thread at a time.

    Every method raises PageStoreError, naming the value, if the store cannot do it.
    """

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        ...

    def write(self, key: int, data: np.ndarray, name: str) -> None:
        """Keep a copy of `data`, a contiguous uint8 array, as `key`."""
        ...

    def read(self, key: int, into: np.ndarray, name: str) -> None:
        """Fill `into`, a contiguous uint8 array, with the bytes of `key`."""
        ...

    def delete(self, key: int) -> None:
        """Forget `key`."""
        ...

    def close(self) -> None:
        """Forget everything and release what the store holds; it may be used again."""
        ...


class HostStore:
    """A dictionary of host arrays: for accelerators, whose memory is another, and
    tests."""

    def __init__(self):
        self._pages: dict[int, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in self._pages.values())

    def write(self, key: int, data: np.ndarray, name: str) -> None:
        self._pages[key] = data.copy()

    def read(self, key: int, into: np.ndarray, name: str) -> None:
        into[:] = self._pages[key]

    def delete(self, key: int) -> None:
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
        self._pages: dict[int, tuple[int, int, int]] = {}  # offset, length, checksum
        self._holes: list[tuple[int, int]] = []  # (offset, length), sorted, apart
        self._end = 0

    @property
    def nbytes(self) -> int:
        return sum(length for _, length, _ in self._pages.values())

    def write(self, key: int, data: np.ndarray, name: str) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
            offset = self._allocate(data.nbytes)
            self._pages[key] = offset, data.nbytes, zlib.crc32(data.data)
            view, done = data.data, 0
            while done < data.nbytes:
                done += os.pwrite(self._file.fileno(), view[done:], offset + done)
        except OSError as error:
            if key in self._pages:
                self.delete(key)
            raise PageStoreError(
                f"{name!r} ({data.nbytes} bytes) was to be paged out to "
                f"{self.folder!r}, which failed: {error.strerror}. The store held "
                f"{self.nbytes} bytes. "
                "Free some room there, type FileStore(another_folder), or limit the "
                "plan with Budget(store_bytes=...)."
            ) from error

    def read(self, key: int, into: np.ndarray, name: str) -> None:
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

    def delete(self, key: int) -> None:
        offset, length, _ = self._pages.pop(key)
        bisect.insort(self._holes, (offset, length))
        merged: list[tuple[int, int]] = []
        for hole, size in self._holes:
            if merged and sum(merged[-1]) == hole:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((hole, size))
        self._holes = merged

    def close(self) -> None:
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
