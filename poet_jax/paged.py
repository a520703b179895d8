"""Arrays that live on storage between steps, and how a graph knows of them."""

import contextlib
import dataclasses
import itertools
import math
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax.errors import PageStoreError
from poet_jax.graph import Graph, Place
from poet_jax.store import PageStore

# Larger arrays are kept in blocks of rows of about this size, which a step can take one
# at a time. Smaller ones than the second number are not worth a transfer.
BLOCK_BYTES = 16 * 2**20
SMALL_BYTES = 2**16

_keys = itertools.count()
# Those with copies of blocks in RAM, if they are still there.
copied: "list[weakref.ref[PagedArray]]" = []


def row_blocks(shape: tuple[int, ...], dtype: Any) -> list[slice]:
    """The rows (first dimension) of each block; all blocks but the last are equal."""
    rows = shape[0] if shape else 1
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    count = max(1, min(rows, math.ceil(nbytes / BLOCK_BYTES)))
    size = max(1, math.ceil(rows / count))
    starts = range(0, max(rows, 1), size)
    return [slice(start, min(start + size, rows)) for start in starts]


class PagedArray:
    """An array that lives in a store: a leaf of a state that does not fit into RAM.

    A function that `poet_jax.schedule` made takes it like a `jax.Array`, pages it in
    where it is read, and gives a new one for it where it is donated. Anything else
    reads it whole, by `np.asarray` or `jnp.asarray`. Its room in the store is free
    again when it is deleted, donated or garbage. Where a plan has room for that, a step
    leaves a copy of it in RAM for the next step, which any other step drops.

    Attributes:
      shape, dtype: as of the array.
      store: where it is.
    """

    def __init__(self, store: PageStore, shape: tuple[int, ...], dtype: Any):
        """Without contents yet; see `PagedArray.of`."""
        if not all(callable(getattr(store, x, None)) for x in ("write", "read")):
            raise TypeError(
                f"An array was to be kept in {store!r}, which is not a page store. A "
                "store has the methods write, read, delete and close. Type for example "
                "store = poet_jax.FileStore(folder)."
            )
        self.store, self.shape, self.dtype = store, tuple(shape), np.dtype(dtype)
        self._blocks = row_blocks(self.shape, self.dtype)
        self._keys = [("state", next(_keys)) for _ in self._blocks]
        self._written: set[Any] = set()
        self._copies: dict[int | None, jax.Array] = {}
        self._release = weakref.finalize(self, _delete, store, self._written)
        self._release.atexit = False

    @classmethod
    def of(cls, array: Any, store: PageStore, name: str = "array") -> "PagedArray":
        """A copy of `array` in `store`, of the type that it has in JAX; PageStoreError,
        naming `name`, if that fails."""
        array = np.asarray(array)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        paged = cls(store, array.shape, array.dtype)
        paged.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8), None, name)
        return paged

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def copied_bytes(self) -> int:
        """How many of its bytes are in RAM, too."""
        return sum(copy.nbytes for copy in self._copies.values())

    def is_deleted(self) -> bool:
        return not self._release.alive

    def delete(self) -> None:
        """Free its room in the store, and in RAM."""
        self._release()
        self._copies.clear()

    def write(self, data: np.ndarray, block: int | None, name: str) -> None:
        """Set all bytes, or those of a row block, from `data` [nbytes] of uint8."""
        for key, part in self._parts(data, block):
            self.store.write(key, part, name)
            self._written.add(key)

    def read(self, into: np.ndarray, block: int | None, name: str) -> None:
        """Fill `into` [nbytes] of uint8 with all bytes, or those of a row block."""
        if self.is_deleted():
            raise RuntimeError(
                f"{name!r} was to be paged in, and that PagedArray has been deleted. A "
                "donated array cannot be used again. Use the one that the step "
                "returned instead of it."
            )
        for key, part in self._parts(into, block):
            try:
                self.store.read(key, part, name)
            except KeyError as error:
                raise PageStoreError(
                    f"{name!r} was to be paged in, and its store does not hold it. A "
                    "store forgets everything when it is closed. Keep it open as long "
                    "as its PagedArrays are in use."
                ) from error

    def keep_copy(self, block: int | None, copy: jax.Array) -> None:
        """Hold `copy`, of all or of a row block, in RAM until it is taken or
        dropped."""
        self._copies[block] = copy
        copied.append(weakref.ref(self))

    def take_copy(self, block: int | None) -> jax.Array | None:
        """The copy in RAM of all, or of a row block, which this does not hold any
        more; None if there is none."""
        return self._copies.pop(block, None)

    def _parts(self, data: np.ndarray, block: int | None) -> Iterable[Any]:
        """(key, its part of `data`) of each block."""
        if block is not None:
            return [(self._keys[block], data)]
        row_bytes = self.nbytes // max(self._blocks[-1].stop, 1)
        return [
            (key, data[rows.start * row_bytes : rows.stop * row_bytes])
            for key, rows in zip(self._keys, self._blocks, strict=True)
        ]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "A PagedArray was asked for as a NumPy array without a copy. It is on "
                "storage, so that every array of it is a copy. Leave copy=False out."
            )
        data = np.empty(self.nbytes, np.uint8)
        self.read(data, None, str(self))
        array = data.view(self.dtype).reshape(self.shape)
        return array if dtype is None else array.astype(dtype)

    def __reduce__(self):
        raise TypeError(
            f"{self} was to be pickled or copied. It is a place in a store, which no "
            "other process has. Save np.asarray of it instead."
        )

    def __repr__(self) -> str:
        gone = ", deleted" if self.is_deleted() else ""
        return f"PagedArray({self.dtype}{list(self.shape)}{gone})"


def drop_copies() -> None:
    """Leave every `PagedArray` on storage alone."""
    while copied:
        with contextlib.suppress(IndexError):  # another thread was first
            if paged := copied.pop()():
                paged._copies.clear()


def in_ram(tree: Any) -> Any:
    """`tree` with ordinary arrays instead of `PagedArray`s."""

    def read(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, PagedArray) else leaf

    return jax.tree.map(read, tree)


def _delete(store: PageStore, keys: set[Any]) -> None:
    while keys:
        with contextlib.suppress(KeyError):  # the store was closed
            store.delete(keys.pop())


def at_home(graph: Graph, paged: Collection[int]) -> Graph:
    """`graph` with the flat arguments numbered in `paged` on storage.

    An output takes the home of the donated argument that it replaces: as under
    `jax.jit`, the first of its shape and dtype that is no earlier one's, in RAM or not.
    Small donated arguments are not freed during the step, so that a step that fails
    leaves the whole state as it was.
    """
    stored = {graph.arguments[leaf]: Place(leaf) for leaf in sorted(paged)}
    outputs = list(enumerate(graph.outputs))
    unpaired = {
        leaf: v
        for leaf, v in outputs
        if v in graph.producer and graph.values[v].pageable
    }
    landing: dict[int, Place] = {}
    for value in graph.arguments:
        if value not in graph.donated or value in graph.outputs:
            continue
        for leaf, output in unpaired.items():
            if graph.values[output].kind == graph.values[value].kind:
                if value in stored:
                    landing[output] = Place(leaf, replaces=stored[value].leaf)
                del unpaired[leaf]
                break
    donated = {
        v for v in graph.donated if v in stored or graph.values[v].nbytes >= SMALL_BYTES
    }
    return dataclasses.replace(
        graph, stored=stored, landing=landing, donated=frozenset(donated)
    )


def land(graph: Graph, min_bytes: int) -> Graph:
    """`graph` with computed outputs of at least `min_bytes` on storage at the end."""
    landing: dict[int, Place] = {}
    for leaf, value in enumerate(graph.outputs):
        described = graph.values[value]
        large = described.nbytes >= min_bytes and described.pageable
        if large and value in graph.producer and value not in landing:
            landing[value] = Place(leaf)
    return dataclasses.replace(graph, landing=landing)
