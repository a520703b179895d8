"""Compile, load and call `pages.cc`, the C++ library that moves pages.

The library is compiled at the first page, against the headers of the installed jaxlib,
into the folder poet_jax of $XDG_CACHE_HOME or ~/.cache. Importing this module compiles
and loads nothing, so installing needs no compiler.

`page_out` and `page_in` are asynchronous custom calls of XLA on the CPU. One storage
lane per process runs the transfers in program order, overlapped with compute.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import math
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax.core.errors import PageStoreError
from poet_jax.stores.store import SECTOR_BYTES, SKEW_BITS, PagePlace

_SOURCE = pathlib.Path(__file__).with_name("pages.cc")
_OPTIONS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-pthread")
_COMPILERS = ("c++", "g++", "clang++")
_OTHERWISE = (
    "install one (Debian: apt-get install g++), or plan without paging with "
    "MilpPlanner(paging=False)."
)
_MESSAGE_BYTES = 4096

_lock = threading.Lock()
_loaded: "ctypes.CDLL | PageStoreError | None" = None


def problem() -> str:
    """Why pages cannot be moved to files here; empty if they can. May compile."""
    try:
        load()
    except PageStoreError as error:
        return str(error)
    return ""


def load() -> ctypes.CDLL:
    """The library, with its custom calls registered, compiled at the first call.

    Raises PageStoreError if no compiler works; later calls raise the same error without
    trying again.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                _loaded = _registered(_built())
            except PageStoreError as error:
                _loaded = error
            except OSError as error:
                _loaded = PageStoreError(
                    "Paging to files needs a C++ compiler, and the library that it "
                    f"made could not be loaded ({error}); {_OTHERWISE}"
                )
        if isinstance(_loaded, PageStoreError):
            raise PageStoreError(*_loaded.args)
        return _loaded


def _registered(library: ctypes.CDLL) -> ctypes.CDLL:
    flag, size = ctypes.c_int, ctypes.c_int64
    text, pointer = ctypes.c_char_p, ctypes.c_void_p
    library.poet_jax_transfer.argtypes = [
        *(flag, flag, flag, text, pointer, size, size, pointer, text, size)
    ]
    for name in ("poet_jax_page_out", "poet_jax_page_in", "poet_jax_clock"):
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return library


def _built() -> ctypes.CDLL:
    """The library from the cache folder, compiled there if need be.

    The file is named after everything that its contents depend on.
    """
    compiler, version = _compiler()
    jaxlib = importlib.metadata.version("jaxlib")
    key = "\0".join(
        (_SOURCE.read_text(), jaxlib, version, platform.machine(), *_OPTIONS)
    )
    name = f"pages-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    path = pathlib.Path(home) / "poet_jax" / name
    with contextlib.suppress(OSError):  # not there yet, or broken
        return ctypes.CDLL(str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            os.replace(_compile(compiler, folder), path)
        return ctypes.CDLL(str(path))
    except PageStoreError:
        raise
    except OSError:  # the home is read-only, or mounted noexec
        with tempfile.TemporaryDirectory(prefix="poet_jax-") as folder:
            return ctypes.CDLL(_compile(compiler, folder))


def _compiler() -> tuple[list[str], str]:
    """(command, first line of its --version) of $CXX or the first known compiler."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in filter(None, (chosen, *([name] for name in _COMPILERS))):
        if shutil.which(command[0]):
            done = _run(*command, "--version")
            if done.returncode == 0:
                return command, done.stdout.partition("\n")[0]
    raise PageStoreError(
        f"Paging to files needs a C++ compiler, and none of $CXX, "
        f"{', '.join(_COMPILERS)} was found; {_OTHERWISE}"
    )


def _compile(compiler: list[str], folder: str) -> str:
    path = os.path.join(folder, "pages.so")
    headers = f"-I{jax.ffi.include_dir()}"
    done = _run(*compiler, *_OPTIONS, headers, str(_SOURCE), "-o", path)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise PageStoreError(
            f"Paging to files needs a C++17 compiler, and {shlex.join(compiler)} "
            f"failed: {said!r}; {_OTHERWISE}"
        )
    return path


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


def page_out(
    x: jax.Array,
    after: jax.Array,
    places: jax.Array,
    *,
    row: int,
    name: str,
    blocks: Sequence[int] | None = None,
) -> jax.Array:
    """Write `x` to a file, overlapped with compute; starts once `after` is computed.

    Args:
      x: stays in memory until it is written.
      after: only orders the call; stays in memory as long as `x`.
      places: uint32 [P, 4], the same for all pages of a program, each row as
        `Store.page_at` makes it. The checksum is not read here.
      row: of `places` for the first block; the other blocks take the rows after it.
      name: of `x` in error messages.
      blocks: [B] bytes of the parts of `x` with places of their own; None for one.

    Returns:
      uint32 [B, 6] per block: its checksum, the steady clock's nanoseconds when its
      transfer began and ended (each as low and high half), and 0. Available when all
      bytes are on storage. XLA drops a call whose record nobody reads.

    A failed transfer fails the program that this is traced into; see `page_error`.
    """
    return _call("page_out", _record(x.nbytes, blocks))(
        x, after, places, **_attributes(x.nbytes, row, name, blocks)
    )


def page_in(
    kind: tuple[Sequence[int], Any],
    after: jax.Array,
    written: jax.Array | None,
    places: jax.Array,
    *,
    row: int,
    name: str,
    blocks: Sequence[int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Read an array that `page_out` wrote; starts once `after` is computed.

    Args:
      kind: (shape, dtype) of the array.
      after: only orders the call.
      written: the record of the `page_out` in the same program, for its checksums; None
        if the checksums are those in `places`.
      places, row, name, blocks: as for `page_out`.

    Returns:
      (the array, uint32 [B, 6] as from `page_out`). A checksum that is known and
      differs fails the program.
    """
    array = jax.ShapeDtypeStruct(*kind)
    nbytes = math.prod(array.shape) * array.dtype.itemsize
    x, record = _call("page_in", (array, _record(nbytes, blocks)))(
        after,
        places,
        places if written is None else written,
        **_attributes(nbytes, row, name, blocks),
    )
    return x, record


def operand(places: Sequence[PagePlace]) -> jax.Array:
    """uint32 [P, 4] for programs, also where the user guards transfers of arrays: these
    are no data of a step."""
    with jax.transfer_guard("allow"):
        return jnp.asarray(np.array(places, np.uint32))


def load_page(
    kind: tuple[Sequence[int], Any],
    places: Sequence[PagePlace],
    name: str,
    blocks: Sequence[int] | None,
) -> jax.Array:
    """Read the array at `places`, [B] rows as for `page_in`, into memory of its own.

    Raises PageStoreError, naming `name`.
    """
    shape, dtype = kind
    program = _loader((tuple(shape), dtype), None if blocks is None else tuple(blocks))
    try:
        return jax.block_until_ready(program(operand(places)))
    except (RuntimeError, ValueError) as error:
        failure = page_error(error)
        if failure is None:
            raise
        text = str(failure).replace(f"{_LOADED!r}", f"{name!r}", 1)
        raise PageStoreError(text) from error


_LOADED = "loaded"  # stands for any name, so that one program serves all arrays


@functools.cache
def _loader(kind: tuple[tuple[int, ...], Any], blocks: tuple[int, ...] | None) -> Any:
    def load(places: jax.Array) -> jax.Array:
        after = jnp.uint32(0)
        return page_in(kind, after, None, places, row=0, name=_LOADED, blocks=blocks)[0]

    return jax.jit(load)


def clock(*after: jax.Array) -> jax.Array:
    """Steady clock's nanoseconds once `after` is computed: uint32 [2], low, high half.

    XLA keeps the memory of `after` until then. So nothing reuses the operand of a
    `page_out` too early, and nothing that reads the clock starts before the `page_in`s
    among `after`.
    """
    return _call("clock", jax.ShapeDtypeStruct((2,), np.uint32))(*after)


def _call(name: str, results: Any) -> Any:
    load()
    # No side effects for JAX: they would slow dispatch, and raise the error again when
    # the process exits.
    return jax.ffi.ffi_call(f"poet_jax_{name}", results)


def _record(nbytes: int, blocks: Sequence[int] | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1 if blocks is None else len(blocks), 6), np.uint32)


def _attributes(
    nbytes: int, row: int, name: str, blocks: Sequence[int] | None
) -> dict[str, Any]:
    sizes = (nbytes,) if blocks is None else blocks
    return {"row": np.int64(row), "name": name, "blocks": np.array(sizes, np.int64)}


def page_error(error: BaseException) -> PageStoreError | None:
    """The error of a failed `page_out` or `page_in`, taken from its program's error.

    None if the program failed for another reason. Pass a JaxRuntimeError, or the
    ValueError of `jax.jit`'s fast path.
    """
    found = re.search(r"poet_jax: ([^\n]*)", str(error))
    return PageStoreError(found[1]) if found else None


def write(place: PagePlace, data: np.ndarray, name: str) -> int:
    """Write `data`, contiguous uint8 [nbytes], on this thread; returns its checksum.

    Raises PageStoreError, naming `name`.
    """
    return _transfer(True, place, data, name)


def read(place: PagePlace, into: np.ndarray, name: str) -> None:
    """Fill `into`, contiguous uint8 [nbytes], on this thread, and verify the checksum.

    Raises PageStoreError, naming `name`, if the transfer or the check fails.
    """
    _transfer(False, place, into, name)


def _transfer(out: bool, place: PagePlace, data: np.ndarray, name: str) -> int:
    assert data.flags.c_contiguous and data.dtype == np.uint8
    descriptor, sector, flags, checksum = place
    offset = sector * SECTOR_BYTES + (flags >> SKEW_BITS)
    result = ctypes.c_uint32(checksum)
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    memory, address = (data.ctypes.data, data.nbytes), ctypes.addressof(result)
    failed = load().poet_jax_transfer(
        *(out, descriptor, flags, name.encode(), *memory, offset),
        *(address, message, _MESSAGE_BYTES),
    )
    if failed:
        raise PageStoreError(message.value.decode(errors="replace"))
    return result.value
