"""The C++ file that moves pages: built, loaded, and as functions that JAX can trace.

`pages.cc` is compiled when the first page is to be moved, against the headers of the
jaxlib that loads it, into the folder poet_jax of XDG_CACHE_HOME or of ~/.cache. So the
package installs without a compiler. Importing this module compiles, loads and starts
nothing. Its custom calls are XLA's on the CPU: `page_out` and `page_in` return at once,
and one storage lane a process does the transfers in the order in which XLA comes to
them, beside what XLA computes meanwhile.
"""

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

_SOURCE = pathlib.Path(__file__).with_name("pages.cc")
_OPTIONS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-pthread")
_COMPILERS = ("c++", "g++", "clang++")
_TARGETS = ("page_out", "page_in", "clock")
_OTHERWISE = (
    "install one (Debian: apt-get install g++), or plan without paging with "
    "MilpPlanner(paging=False)."
)
_MESSAGE_BYTES = 4096

_lock = threading.Lock()
_loaded: "ctypes.CDLL | PageStoreError | None" = None


def problem() -> str:
    """Why pages cannot be moved to files here; empty if they can. Builds the library if
    need be."""
    try:
        load()
    except PageStoreError as error:
        return str(error)
    return ""


def load() -> ctypes.CDLL:
    """The library, with its custom calls known to XLA, once a process.

    Raises PageStoreError if there is no compiler, or it failed; what was found the
    first time is what every later call finds.
    """
    global _loaded
    if isinstance(_loaded, ctypes.CDLL):
        return _loaded
    with _lock:
        if _loaded is None:
            try:
                _loaded = _registered(_built())
            except PageStoreError as error:
                _loaded = error
            except OSError as error:
                _loaded = PageStoreError(
                    "Paging to files needs a C++ compiler, and what the one that was "
                    f"found made could not be used ({error}); {_OTHERWISE}"
                )
    if isinstance(_loaded, PageStoreError):
        raise PageStoreError(*_loaded.args)
    return _loaded


def _registered(library: ctypes.CDLL) -> ctypes.CDLL:
    transfer = library.poet_jax_transfer
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    flags, text = [ctypes.c_int] * 3, ctypes.c_char_p
    transfer.argtypes = [
        *flags,
        text,
        pointer,
        integer,
        integer,
        pointer,
        text,
        integer,
    ]
    transfer.restype = ctypes.c_int
    for name in _TARGETS:
        handler = getattr(library, f"poet_jax_{name}")
        jax.ffi.register_ffi_target(
            f"poet_jax_{name}", jax.ffi.pycapsule(handler), platform="cpu"
        )
    return library


def _built() -> ctypes.CDLL:
    compiler, version = _compiler()
    described = (
        _SOURCE.read_text(),
        importlib.metadata.version("jaxlib"),
        version,
        platform.machine(),
        *_OPTIONS,
    )
    key = hashlib.sha256("\0".join(described).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    path = pathlib.Path(home) / "poet_jax" / f"pages-{key}.so"
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # not there yet, or broken
        pass
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = _compile(compiler, pathlib.Path(folder) / path.name)
            os.replace(made, path)
        return ctypes.CDLL(str(path))
    except PageStoreError:
        raise
    except OSError:  # a home that cannot be written to, or does not run programs
        with tempfile.TemporaryDirectory(prefix="poet_jax-") as folder:
            return ctypes.CDLL(
                str(_compile(compiler, pathlib.Path(folder) / "pages.so"))
            )


def _compiler() -> tuple[list[str], str]:
    """(command, first line of what it says of its version)"""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in filter(None, (chosen, *([name] for name in _COMPILERS))):
        if shutil.which(command[0]):
            said = subprocess.run(
                [*command, "--version"], capture_output=True, text=True
            )
            if said.returncode == 0:
                return command, said.stdout.partition("\n")[0]
    raise PageStoreError(
        "Paging to files needs a C++ compiler, and none of $CXX, c++, g++, clang++ was "
        f"found; {_OTHERWISE}"
    )


def _compile(compiler: list[str], path: pathlib.Path) -> pathlib.Path:
    files = [f"-I{jax.ffi.include_dir()}", str(_SOURCE), "-o", str(path)]
    done = subprocess.run(
        [*compiler, *_OPTIONS, *files], capture_output=True, text=True
    )
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise PageStoreError(
            f"Paging to files needs a C++ compiler that knows C++17, and "
            f"{shlex.join(compiler)} said: {said!r}; "
            f"{_OTHERWISE}"
        )
    return path


def page_out(
    x: jax.Array,
    after: jax.Array,
    places: jax.Array,
    *,
    row: int,
    name: str,
    blocks: Sequence[int] | None = None,
) -> jax.Array:
    """Write `x` to a file, beside what is computed meanwhile, once `after` is there.

    Args:
      x: what is written; it stays in memory until it is.
      after: an array whose contents do not matter, and which stays in memory, too.
      places: uint32 [P, 4], the same for all pages of a program: (descriptor, offset in
        sectors of 4096 bytes, flags, checksum). Bit 0 of the flags says that the
        descriptor is open with O_DIRECT. The checksum does not matter here.
      row: of `places`, where the first block goes; the next rows are the others'.
      name: what errors call `x`.
      blocks: bytes of each part of `x` that has a place of its own, B in all; None for
        one part.

    Returns:
      uint32 [B, 6] for each block: its checksum, the nanoseconds on the steady clock
      at which its transfer began and stopped (each as low and high half), and 0. It is
      there when all bytes are on storage.

    Somebody has to read that: XLA leaves a call out whose results nobody needs. A
    failure is one of the program that this is traced into; `page_error` reads it.
    """
    return _call("page_out", _record(x.nbytes, blocks))(
        x,
        after,
        places,
        **_attributes(x.nbytes, row, name, blocks),
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
    """What a `page_out` wrote, read once `after` is there.

    Args:
      kind: (shape, dtype) of it.
      after: an array whose contents do not matter.
      written: what the `page_out` returned, if it is of the same program, with the
        checksums of what is read; None if they are those in `places`.
      places, row, name, blocks: as of `page_out`.

    Returns:
      (the array, uint32 [B, 6] as of `page_out`). Bytes that are not those that were
      written are a failure of the program.
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


def load_page(
    kind: tuple[Sequence[int], Any],
    places: Sequence[tuple[int, int, int, int]],
    name: str,
    blocks: Sequence[int] | None = None,
) -> jax.Array:
    """What lies at `places`, [B], as a new array; the rest is as for `page_in`.

    XLA reads it into the array's own memory, so that it is in RAM once. Raises
    PageStoreError, naming `name`.
    """
    shape, dtype = kind
    program = _loader((tuple(shape), dtype), None if blocks is None else tuple(blocks))
    try:
        return jax.block_until_ready(program(np.array(places, np.uint32)))
    except (RuntimeError, ValueError) as error:
        failure = page_error(error)
        if failure is None:
            raise
        text = str(failure).replace(f"{_LOADED!r}", f"{name!r}", 1)
        raise PageStoreError(text) from error


_LOADED = "loaded"  # for any name: a program that has one is compiled for that alone


@functools.cache
def _loader(kind: tuple[tuple[int, ...], Any], blocks: tuple[int, ...] | None) -> Any:
    def load(places: jax.Array) -> jax.Array:
        page, _ = page_in(
            kind, jnp.uint32(0), None, places, row=0, name=_LOADED, blocks=blocks
        )
        return page

    return jax.jit(load)


def clock(*after: jax.Array) -> jax.Array:
    """The steady clock's nanoseconds once all of `after` are there: uint32 [2], low and
    high half.

    XLA keeps the memory of `after` until then. So the operand of a `page_out` is not
    given to what is computed meanwhile, which would have to wait for it, and what waits
    for this does not begin before the `page_in`s that are asked for by then.
    """
    return _call("clock", jax.ShapeDtypeStruct((2,), np.uint32))(*after)


def _call(name: str, results: Any) -> Any:
    load()
    # Without side effects for JAX, which would dispatch the program more slowly and
    # raise its error once more when the process ends.
    return jax.ffi.ffi_call(f"poet_jax_{name}", results)


def _record(nbytes: int, blocks: Sequence[int] | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1 if blocks is None else len(blocks), 6), np.uint32)


def _attributes(
    nbytes: int, row: int, name: str, blocks: Sequence[int] | None
) -> dict[str, Any]:
    sizes = (nbytes,) if blocks is None else blocks
    return {"row": np.int64(row), "name": name, "blocks": np.array(sizes, np.int64)}


def page_error(error: BaseException) -> PageStoreError | None:
    """What a failed `page_out` or `page_in` said, found in the error of its program;
    None if that failed for another reason.

    That error is a JaxRuntimeError, or a ValueError where `jax.jit` calls a program by
    its fast path.
    """
    found = re.search(r"poet_jax: ([^\n]*)", str(error))
    return PageStoreError(found[1]) if found else None


def write(descriptor: int, flags: int, data: np.ndarray, offset: int, name: str) -> int:
    """Write `data`, contiguous uint8 [nbytes], on this thread; its checksum.

    `flags` are as in the `places` of `page_out`, `offset` is in bytes. Raises
    PageStoreError, naming `name`.
    """
    return _transfer(True, descriptor, flags, data, offset, 0, name)


def read(
    descriptor: int,
    flags: int,
    into: np.ndarray,
    offset: int,
    checksum: int,
    name: str,
) -> None:
    """Fill `into`, contiguous uint8 [nbytes], on this thread, with what has `checksum`.

    Raises PageStoreError, naming `name`, if that fails or the bytes are others.
    """
    _transfer(False, descriptor, flags, into, offset, checksum, name)


def _transfer(
    out: bool,
    descriptor: int,
    flags: int,
    data: np.ndarray,
    offset: int,
    checksum: int,
    name: str,
) -> int:
    assert data.flags.c_contiguous and data.dtype == np.uint8
    result, message = (
        ctypes.c_uint32(checksum),
        ctypes.create_string_buffer(_MESSAGE_BYTES),
    )
    failed = load().poet_jax_transfer(
        out,
        descriptor,
        flags,
        name.encode(),
        data.ctypes.data,
        data.nbytes,
        offset,
        ctypes.addressof(result),
        message,
        _MESSAGE_BYTES,
    )
    if failed:
        raise PageStoreError(message.value.decode(errors="replace"))
    return result.value
