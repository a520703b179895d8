"""Files of weights in the format of safetensors: written whole, read where needed."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import IO, Any

import jax
import numpy as np

from poet_jax.core.errors import PageStoreError
from poet_jax.stores.store import Store, make_direct

# https://huggingface.co/docs/safetensors, "Format": 8 bytes with the length of a JSON
# object, that object, then the bytes of the arrays, in C order and little-endian.
_LENGTH_BYTES = 8
_DTYPES = {
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_KEYS = "poet_jax.keys"  # metadata: implementations of the PRNG keys, by name, as JSON


@dataclasses.dataclass(frozen=True)
class Described:
    """An array in a file: where its bytes start, its shape and its dtype.

    `key_impl` names the implementation of the PRNG keys whose data it is; None for any
    other array.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    key_impl: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    path: str | os.PathLike, arrays: Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    """As `poet_jax.save_paged`."""
    path = pathlib.Path(path)
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    header: dict[str, Any] = {}
    keys: dict[str, str] = {}
    end = 0
    for name, array in arrays.items():
        _require_named_array(name, array)
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            keys[name] = str(jax.random.key_impl(array))
            array = jax.random.key_data(array)
        code = codes.get(str(array.dtype))
        if code is None:
            raise ValueError(
                f"{name!r} is {array.dtype}{list(array.shape)}, which a file of "
                "safetensors cannot hold. Leave it out, or convert it."
            )
        start, end = end, end + array.nbytes
        shape = list(array.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    noted = {**metadata, _KEYS: json.dumps(keys)} if keys else dict(metadata)
    if noted:
        header = {"__metadata__": noted, **header}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    new = path.with_name(f"{path.name}.new")
    with _locked(new) as file:
        try:
            file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
            for name, array in arrays.items():
                array = jax.random.key_data(array) if name in keys else array
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException as error:
            new.unlink(missing_ok=True)
            if isinstance(error, OSError):
                error.filename = os.fspath(path)  # a write does not know it
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too
    finally:
        os.close(folder)


def _require_named_array(name: Any, array: Any) -> None:
    if not isinstance(name, str) or name == "__metadata__":
        raise ValueError(
            f"{name!r} cannot name an array: in a file of safetensors names are "
            'strings, and "__metadata__" is the text of metadata=. Use another name, '
            'such as "layer1/kernel".'
        )
    if not (hasattr(array, "dtype") and hasattr(array, "nbytes")):
        raise ValueError(
            f"{name!r} is a {type(array).__name__}, and a file of safetensors holds "
            "arrays, each by its name. Write jnp.asarray(value) for a number, an item "
            "for each array of a tree, and metadata= for text."
        )


def _locked(path: pathlib.Path) -> IO[bytes]:
    """The file at `path`, made empty once no other process writes it."""
    import fcntl  # not on Windows

    while True:
        file = open(path, "ab")
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            # Whoever had the lock before has renamed or removed what was opened.
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                file.truncate(0)
                return file
        file.close()


class WeightsFile(Store):
    """The arrays of a file in the format of safetensors. The file is never written.

    Attributes:
      arrays: what the file has, by name.

    Raises FileNotFoundError without the file, and ValueError for a damaged one.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__()
        self._path = os.fspath(path)
        if not os.path.isfile(self._path):
            raise FileNotFoundError(
                f"{self._path!r} is not a file. Give the path of a file in the format "
                "of safetensors."
            )
        with open(self._path, "rb") as file:
            self._state = _state(file)
            self.arrays = _arrays(self._path, file)

    @property
    def place(self) -> str:
        return repr(self._path)

    def open(self) -> IO[bytes]:
        file = open(self._path, "rb", buffering=0)
        self.is_direct = make_direct(file.fileno())
        return file

    def descriptor(self) -> int:
        """As of `Store`. Raises PageStoreError for a file that has changed."""
        descriptor = super().descriptor()
        if self._file is not None and _state(self._file) != self._state:
            raise PageStoreError(
                f"{self._path!r} has changed since it was loaded, so what it has now "
                "may be other arrays. Load it again, and write new weights to a file "
                "of their own."
            )
        return descriptor

    def allocate(self, nbytes: int, name: str) -> int:
        raise PageStoreError(
            f"{name!r} ({nbytes} bytes) cannot be paged out to {self._path!r}, which "
            "is only read. Use poet_jax.FileStore() for pages."
        )

    def reserve(self, nbytes: int) -> None:
        self.allocate(nbytes, "pages of a step")


def _state(file: IO[bytes]) -> tuple[int, ...]:
    """What differs when a file is written to."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _arrays(path: str, file: IO[bytes]) -> dict[str, Described]:
    """What the header of a file says, checked. Raises ValueError."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    start = _LENGTH_BYTES + length
    if not 2 <= length <= size - _LENGTH_BYTES:
        raise _damaged(path, f"its header of {length} bytes is not in its {size} bytes")
    try:
        header = json.loads(file.read(length))
        keys = _key_impls(header.get("__metadata__"))
        described = {
            name: _described(name, array, start, size, keys.get(name))
            for name, array in header.items()
            if name != "__metadata__"
        }
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header is not one ({error!r})") from error
    end = max((x.offset + x.nbytes for x in described.values()), default=start)
    if end != size:
        raise _damaged(path, f"its arrays end at byte {end} of {size}")
    return described


def _key_impls(metadata: Any) -> dict[str, str]:
    """Implementations of PRNG keys, by name; none where metadata is of others."""
    try:
        keys = json.loads(metadata[_KEYS])
    except (TypeError, LookupError, ValueError):
        return {}
    return keys if isinstance(keys, dict) else {}


def _described(
    name: str, array: Mapping[str, Any], start: int, end: int, key_impl: str | None
) -> Described:
    kind, (first, last) = array["dtype"], array["data_offsets"]
    if kind not in _DTYPES:
        raise ValueError(f"{name!r} is of type {kind!r}, which JAX has not")
    dtype, shape = jax.numpy.dtype(_DTYPES[kind]), tuple(array["shape"])
    for number in (first, last, *shape):
        if type(number) is not int or abs(number) > sys.maxsize:
            raise ValueError(f"{name!r} has {number!r} in its shape or data_offsets")
    found = Described(start + first, shape, dtype, key_impl)
    if min((first, *found.shape)) < 0 or last - first != found.nbytes:
        raise ValueError(
            f"{name!r} is {dtype}{list(found.shape)} and has {last - first} bytes"
        )
    if start + last > end:
        raise ValueError(f"{name!r} ends at byte {start + last} of {end}")
    return found


def _damaged(path: str, problem: str) -> ValueError:
    return ValueError(
        f"{path!r} cannot be read as safetensors: {problem}. A file that is cut short, "
        "as by a broken download, is damaged. Fetch or write it again."
    )
