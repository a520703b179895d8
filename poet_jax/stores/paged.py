"""Arrays that live on storage between steps, and how a graph refers to them."""

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
from poet_jax.stores.store import SECTOR_BYTES, PagePlace, Store, whole_sectors

BLOCK_BYTES = 16 * 2**20  # about the size of the row blocks of a larger array
SMALL_BYTES = 2**16  # smaller arrays are not worth a transfer

copied: "list[weakref.ref[PagedArray]]" = []  # arrays that may hold copies in RAM


def row_blocks(
    shape: tuple[int, ...], dtype: Any, most_bytes: int = BLOCK_BYTES
) -> list[slice]:
    """Rows (first dimension) of each block of about so many bytes, equally many in all
    blocks but the last."""
    rows = shape[0] if shape else 1
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    count = max(1, min(rows, math.ceil(nbytes / most_bytes)))
    size = max(1, math.ceil(rows / count))
    starts = range(0, max(rows, 1), size)
    return [slice(start, min(start + size, rows)) for start in starts]


def block_bytes(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """Bytes of each of `row_blocks`."""
    row_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
    blocks = row_blocks(shape, dtype)
    return tuple((rows.stop - rows.start) * row_bytes for rows in blocks)


class PagedArray:
    """An array in a store, for state that does not fit in RAM.

    Pass it to a scheduled function like a `jax.Array`: the step pages it in where it is
    read, and returns a new one where it is donated. `np.asarray` and `jnp.asarray` read
    all of it. Its room in the store is freed when it is deleted, donated or garbage
    collected. If the plan has room, a step leaves a copy in RAM for the next step; any
    other step drops that copy.

    Attributes:
      shape, dtype: of the array.
      store: its Store.
      block_bytes: [B] bytes of its row blocks, each with a place of its own.
    """

    def __init__(
        self,
        store: Store,
        shape: tuple[int, ...],
        dtype: Any,
        name: str = "array",
        *,
        offset: int | None = None,
    ):
        """Allocate room without contents; `PagedArray.of` copies an array.

        With `offset`, in bytes, the array is what a store that is only read has from
        there on; no checksum of that is known. Raises PageStoreError, naming `name`, if
        there is no room.
        """
        if not isinstance(store, Store):
            raise TypeError(
                "`store` must be a poet_jax.stores.Store, got "
                f"{store!r}; use poet_jax.FileStore(folder)"
            )
        self.store, self.shape, self.dtype = store, tuple(shape), np.dtype(dtype)
        self.block_bytes = block_bytes(self.shape, self.dtype)
        is_new = offset is None
        starts, end = [], 0
        for nbytes in self.block_bytes:
            starts.append(whole_sectors(end) if is_new else end)
            end = starts[-1] + nbytes
        self._generation = store.generation
        first = store.allocate(end, name) if offset is None else offset
        self._offsets = [first + start for start in starts]
        self._checksums = [0 if is_new else None] * len(starts)
        self._copies: dict[int | None, jax.Array] = {}
        self._release = weakref.finalize(self, _free, store, first, self._generation)
        self._release.atexit = False

    @classmethod
    def of(cls, array: Any, store: Store, name: str = "array") -> "PagedArray":
        """Copy `array` into `store`, in JAX's dtype for it. Raises PageStoreError,
        naming `name`."""
        array = np.asarray(array)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        paged = cls(store, array.shape, array.dtype, name)
        paged.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8), name)
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
        """Bytes of its copies in RAM."""
        return sum(copy.nbytes for copy in self._copies.values())

    def is_deleted(self) -> bool:
        return not self._release.alive

    def delete(self) -> None:
        """Free its room in the store and its copies in RAM."""
        self._release()
        self._copies.clear()

    def places(self, block: int | None = None, name: str = "array") -> list[PagePlace]:
        """The rows of one row block, or of all, for `library.page_in` and `page_out`.

        Raises RuntimeError for a deleted array and PageStoreError for a closed store,
        naming `name`.
        """
        if self.is_deleted():
            raise RuntimeError(
                f"{name!r} cannot be paged in: its PagedArray has been deleted. A step "
                "deletes the arrays donated to it; use those that it returned."
            )
        if self._generation != self.store.generation:
            raise PageStoreError(
                f"{name!r} cannot be paged in: its store was closed, and forgets "
                "everything then. Keep the store open while its PagedArrays are in use."
            )
        return [
            self.store.page_at(self._offsets[k], self._checksums[k])
            for k in self._numbers(block)
        ]

    def set_checksums(self, block: int | None, checksums: Sequence[int]) -> None:
        """Record the checksums of what was written to one row block, or to all."""
        for k, checksum in zip(self._numbers(block), checksums, strict=True):
            self._checksums[k] = int(checksum)

    def write(self, data: np.ndarray, name: str) -> None:
        """Write all of `data`, uint8 [nbytes]. Raises PageStoreError, naming `name`."""
        written = [
            library.write(place, part, name) for part, place in self._parts(data, name)
        ]
        self.set_checksums(None, written)

    def read(self, into: np.ndarray, name: str) -> None:
        """Fill `into`, uint8 [nbytes]. Raises as `places`, naming `name`."""
        for part, place in self._parts(into, name):
            library.read(place, part, name)

    def keep_copy(self, block: int | None, copy: jax.Array) -> None:
        """Hold a copy of one row block, or of all, until it is taken or dropped."""
        self._copies[block] = copy
        copied.append(weakref.ref(self))

    def take_copy(self, block: int | None) -> jax.Array | None:
        """Hand over the copy of one row block, or of all; None without one."""
        return self._copies.pop(block, None)

    def _numbers(self, block: int | None) -> range:
        return (
            range(len(self.block_bytes)) if block is None else range(block, block + 1)
        )

    def _parts(
        self, data: np.ndarray, name: str
    ) -> Iterator[tuple[np.ndarray, PagePlace]]:
        """(its part of `data`, its place) of each block."""
        start = 0
        for nbytes, place in zip(
            self.block_bytes, self.places(None, name), strict=True
        ):
            yield data[start : start + nbytes], place
            start += nbytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "A PagedArray cannot become a NumPy array without a copy: it is on "
                "storage. Leave copy=False out."
            )
        # Transfers to page-aligned memory need no copy.
        memory = np.empty(self.nbytes + SECTOR_BYTES, np.uint8)
        data = memory[-memory.ctypes.data % SECTOR_BYTES :][: self.nbytes]
        self.read(data, str(self))
        array = data.view(self.dtype).reshape(self.shape)
        return array if dtype is None else array.astype(dtype)

    def __reduce__(self):
        raise TypeError(
            f"{self} cannot be pickled or copied: it is a place in this process's "
            "store. Save np.asarray of it instead."
        )

    def __repr__(self) -> str:
        gone = ", deleted" if self.is_deleted() else ""
        return f"PagedArray({self.dtype}{list(self.shape)}{gone})"


def drop_copies() -> None:
    """Free all copies of `PagedArray`s in RAM."""
    while copied:
        with contextlib.suppress(IndexError):  # another thread was first
            if paged := copied.pop()():
                paged._copies.clear()


def copied_to_ram(tree: Any) -> Any:
    """`tree` with arrays of its own, each `PagedArray` read into an ordinary one."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, PagedArray):
            return jnp.asarray(leaf)
        return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(copy, tree)


def _free(store: Store, offset: int, generation: int) -> None:
    if store.generation == generation:
        store.free(offset)


def at_home(
    graph: Graph, paged: Collection[int], least_bytes: int = SMALL_BYTES
) -> Graph:
    """`graph` with the flat arguments numbered in `paged` on storage.

    An output is written to the place of the donated argument that it replaces. As in
    `jax.jit`, an argument is replaced by the first output of its shape and dtype that
    no earlier argument took. Donated arguments below `least_bytes` are not freed during
    the step, so that a failed step leaves the whole state intact.
    """
    stored = {graph.arguments[leaf]: Place(leaf) for leaf in sorted(paged)}
    unpaired = {
        leaf: v
        for leaf, v in enumerate(graph.results)
        if v in graph.producer and graph.values[v].pageable
    }
    landing: dict[int, Place] = {}
    for value in graph.arguments:
        kept = value not in graph.donated or value in graph.references
        if kept or value in graph.outputs:
            continue
        for leaf, output in unpaired.items():
            if graph.values[output].kind == graph.values[value].kind:
                if value in stored:
                    landing[output] = Place(leaf, replaces=stored[value].leaf)
                del unpaired[leaf]
                break
    donated = frozenset(
        v for v in graph.donated if v in stored or graph.values[v].nbytes >= least_bytes
    ).union(graph.references)
    return dataclasses.replace(graph, stored=stored, landing=landing, donated=donated)


def land(graph: Graph, min_bytes: int) -> Graph:
    """`graph` with computed outputs of at least `min_bytes` paged out at its end."""
    landing: dict[int, Place] = {}
    for leaf, value in enumerate(graph.outputs):
        described = graph.values[value]
        large = described.nbytes >= min_bytes and described.pageable
        if large and value in graph.producer:
            landing.setdefault(value, Place(leaf))
    return dataclasses.replace(graph, landing=landing)
