"""Where a C program's values lie on the board's storage, and what lies there first."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from poet_jax.core.graph import Graph
from poet_jax.core.plan import PageIn, PageOut
from poet_jax.core.program import Program

SECTOR_BYTES = 512  # of an SD card: each array begins at one


@dataclasses.dataclass(frozen=True)
class Storage:
    """A place on storage for each value that is paged.

    New state takes the place of the old one. A row block lies where its rows are.

    Attributes:
      begins: where each value begins, in bytes.
      state_bytes: of the arguments that are on storage between steps. They come first.
      nbytes: of all.
    """

    begins: dict[int, int]
    state_bytes: int
    nbytes: int

    @classmethod
    def of(cls, program: Program) -> "Storage":
        graph, begins, end = program.graph, {}, 0
        homes: dict[int, int] = {}
        rows = _block_bytes(graph)
        for v, place in sorted(graph.stored.items(), key=lambda item: item[1].leaf):
            if place.block is None:
                begins[v] = homes[place.leaf] = end
                end = _next_sector(end + graph.values[v].nbytes)
        for v, place in graph.stored.items():
            if place.block is not None:
                begins[v] = homes[place.leaf] + place.block * rows[place.leaf]
        state_bytes = end
        paged = [x.value for x in program.instructions if isinstance(x, _PAGES)]
        for v in dict.fromkeys((*sorted(graph.landing), *paged)):
            place = graph.landing.get(v)
            if v in begins:
                continue
            if place is not None and place.replaces is not None:
                leaf = place.replaces
                begins[v] = homes[leaf] + (place.block or 0) * rows.get(leaf, 0)
            else:
                begins[v] = end
                end = _next_sector(end + graph.values[v].nbytes)
        return cls(begins, state_bytes, end)

    def image(self, graph: Graph, arrays: Mapping[int, np.ndarray]) -> bytes:
        """The part of the storage that holds state, given that by flat argument."""
        image = bytearray(self.state_bytes)
        for leaf, array in arrays.items():
            begin = self.begins[graph.arguments[leaf]]
            data = np.ascontiguousarray(array).tobytes()
            image[begin : begin + len(data)] = data
        return bytes(image)


_PAGES = PageIn | PageOut


def _next_sector(nbytes: int) -> int:
    return -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES


def _block_bytes(graph: Graph) -> dict[int, int]:
    """By flat argument that is cut, bytes of its row blocks: of all but the last."""
    found: dict[int, int] = defaultdict(int)
    for places, of in ((graph.stored, "leaf"), (graph.landing, "replaces")):
        for v, place in places.items():
            leaf = getattr(place, of)
            if place.block is not None and leaf is not None:
                found[leaf] = max(found[leaf], graph.values[v].nbytes)
    return found


def overwritten(program: Program, storage: Storage) -> int | None:
    """A value that is read from storage after new state was written there, if any."""
    graph = program.graph
    written: list[tuple[int, int, int]] = []
    for x in program.instructions:
        if not isinstance(x, _PAGES):
            continue
        start = storage.begins[x.value]
        stop = start + graph.values[x.value].nbytes
        if isinstance(x, PageOut) and x.value in graph.landing:
            written.append((start, stop, x.value))
        elif isinstance(x, PageIn) and any(
            max(start, a) < min(stop, b) and v != x.value for a, b, v in written
        ):
            return x.value
    return None


def replaced_leaves(graph: Graph) -> dict[int, int]:
    """By flat result that lands on storage, the flat argument whose place it takes."""
    return {
        place.leaf: place.replaces
        for place in graph.landing.values()
        if place.replaces is not None
    }


def results_of(graph: Graph, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Flat results for flat arguments, whose row blocks are values of the graph."""
    known: dict[int, jax.Array] = {
        v: jnp.asarray(x) for v, x in graph.constants.items()
    }
    known |= dict(zip(graph.arguments, leaves, strict=True))
    starts: dict[int, int] = defaultdict(int)
    for v, place in sorted(graph.stored.items(), key=lambda item: item[1].block or 0):
        if place.block is not None:
            start = starts[place.leaf]
            starts[place.leaf] += graph.values[v].shape[0]
            whole = leaves[place.leaf]
            known[v] = lax.slice_in_dim(whole, start, starts[place.leaf])
    for node in graph.nodes:
        results = node(*(known[v] for v in node.reads))
        known.update(zip(node.writes, results, strict=True))
    parts = {
        leaf: [v for _, v in sorted(blocks)]
        for leaf, blocks in _landed_blocks(graph).items()
    }
    return [
        jnp.concatenate([known[part] for part in parts[leaf]])
        if leaf in parts
        else known[v]
        for leaf, v in enumerate(graph.results)
    ]


def _landed_blocks(graph: Graph) -> dict[int, list[tuple[int, int]]]:
    """By flat result, (number, value) of its row blocks."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for v, place in graph.landing.items():
        if place.block is not None:
            found[place.leaf].append((place.block, v))
    return found


def is_cut(graph: Graph) -> bool:
    """Whether row blocks of what is on storage are values of their own."""
    places: Iterable = (*graph.stored.values(), *graph.landing.values())
    return any(place.block is not None for place in places)


__all__ = ["Storage", "is_cut", "overwritten", "replaced_leaves", "results_of"]
