"""Arrays that live on storage between steps, and how a graph knows of them."""

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import poet_jax.stores.library as library
from poet_jax.core.errors import PageStoreError
from poet_jax.core.graph import Graph, Place
from poet_jax.stores.store import SECTOR_BYTES, Store

# Larger arrays are kept in blocks of rows of about this size, which a step can take one
# at a time. Smaller ones than the second number are not worth a transfer.
BLOCK_BYTES = 16 * 2**20
SMALL_BYTES = 2**16

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


def block_bytes(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """Bytes of each of `row_blocks`."""
    row_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
    return tuple(
        (rows.stop - rows.start) * row_bytes for rows in row_blocks(shape, dtype)
    )


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
      block_bytes: of each of its row blocks, which lie one after another in the store,
        each from a sector on.
    """

    def __init__(
        self, store: Store, shape: tuple[int, ...], dtype: Any, name: str = "array"
    ):
        """Room for it, without contents yet; see `PagedArray.of`. PageStoreError,
        naming `name`, if there is no room."""
        if not isinstance(store, Store):
            raise TypeError(
                f"An array was to be kept in {store!r}, which is not a store. A store "
                "is an object of a subclass of poet_jax.stores.Store. Type for example "
                "store = poet_jax.FileStore(folder)."
            )
        self.store, self.shape, self.dtype = store, tuple(shape), np.dtype(dtype)
        self.block_bytes = block_bytes(self.shape, self.dtype)
        starts, end = [], 0
        for nbytes in self.block_bytes:
            starts.append(-(-end // SECTOR_BYTES) * SECTOR_BYTES)
            end = starts[-1] + nbytes
        self._generation = store.generation
        offset = store.allocate(end, name)
        self._offsets = [offset + start for start in starts]
        self._checksums = [0] * len(starts)
        self._copies: dict[int | None, jax.Array] = {}
        self._release = weakref.finalize(self, _free, store, offset, self._generation)
        self._release.atexit = False

    @classmethod
    def of(cls, array: Any, store: Store, name: str = "array") -> "PagedArray":
        """A copy of `array` in `store`, of the type that it has in JAX; PageStoreError,
        naming `name`, if that fails."""
        array = np.asarray(array)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        paged = cls(store, array.shape, array.dtype, name)
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

    def places(
        self, block: int | None = None, name: str = "array"
    ) -> list[tuple[int, int, int, int]]:
        """(descriptor, sector, flags, checksum) of a row block, or of each of them.

        These are rows of what `library.page_in` and `page_out` take. Raises
        RuntimeError if the array was deleted, and PageStoreError if its store was
        closed, naming `name`.
        """
        if self.is_deleted():
            raise RuntimeError(
                f"{name!r} was to be paged in, and that PagedArray has been deleted. A "
                "donated array cannot be used again. Use the one that the step "
                "returned instead of it."
            )
        if self._generation != self.store.generation:
            raise PageStoreError(
                f"{name!r} was to be paged in, and its store does not hold it. A "
                "store forgets everything when it is closed. Keep it open as long "
                "as its PagedArrays are in use."
            )
        descriptor, flags = self.store.descriptor(), int(self.store.is_direct)
        return [
            (descriptor, self._offsets[k] // SECTOR_BYTES, flags, self._checksums[k])
            for k in self._numbers(block)
        ]

    def set_checksums(self, block: int | None, checksums: Sequence[int]) -> None:
        """Say what was written to a row block, or to each of them."""
        for k, checksum in zip(self._numbers(block), checksums, strict=True):
            self._checksums[k] = int(checksum)

    def write(self, data: np.ndarray, block: int | None, name: str) -> None:
        """Set all bytes, or those of a row block, from `data` [nbytes] of uint8."""
        written = [
            library.write(descriptor, flags, part, sector * SECTOR_BYTES, name)
            for part, (descriptor, sector, flags, _) in self._parts(data, block, name)
        ]
        self.set_checksums(block, written)

    def read(self, into: np.ndarray, block: int | None, name: str) -> None:
        """Fill `into` [nbytes] of uint8 with all bytes, or those of a row block."""
        for part, (descriptor, sector, flags, checksum) in self._parts(
            into, block, name
        ):
            offset = sector * SECTOR_BYTES
            library.read(descriptor, flags, part, offset, checksum, name)

    def keep_copy(self, block: int | None, copy: jax.Array) -> None:
        """Hold `copy`, of all or of a row block, in RAM until it is taken or
        dropped."""
        self._copies[block] = copy
        copied.append(weakref.ref(self))

    def take_copy(self, block: int | None) -> jax.Array | None:
        """The copy in RAM of all, or of a row block, which this does not hold any
        more; None if there is none."""
        return self._copies.pop(block, None)

    def _numbers(self, block: int | None) -> range:
        if block is None:
            return range(len(self.block_bytes))
        return range(block, block + 1)

    def _parts(
        self, data: np.ndarray, block: int | None, name: str
    ) -> Iterator[tuple[np.ndarray, tuple[int, int, int, int]]]:
        """(its part of `data`, its place) of each block."""
        start = 0
        numbers, places = self._numbers(block), self.places(block, name)
        for k, place in zip(numbers, places, strict=True):
            yield data[start : start + self.block_bytes[k]], place
            start += self.block_bytes[k]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "A PagedArray was asked for as a NumPy array without a copy. It is on "
                "storage, so that every array of it is a copy. Leave copy=False out."
            )
        # From a page of memory on, transfers need no copy.
        memory = np.empty(self.nbytes + SECTOR_BYTES, np.uint8)
        data = memory[-memory.ctypes.data % SECTOR_BYTES :][: self.nbytes]
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


def _free(store: Store, offset: int, generation: int) -> None:
    if store.generation == generation:
        store.free(offset)


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
