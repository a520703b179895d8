"""What would lower the memory that a function needs, each with its bytes."""

import math
from collections import Counter
from typing import Any

from poet_jax.core.graph import Graph, Value
from poet_jax.core.units import format_bytes

LEAST_SHARE = 0.02  # of the need; less is not worth a word
LARGE_SHARE = 0.2  # of the need, of a value that is worth cutting


def remedies(graph: Graph, need_bytes: int) -> list[str]:
    """What to use for less memory, what saves most first, with about how much that
    is."""
    about_loops, kept_bytes = _largest_loop(graph)
    found = {
        "donate_argnums for the state that the step replaces": _replaceable(graph),
        about_loops: kept_bytes,
    }
    if graph.devices == 1:
        found["poet_jax.to_storage for the state"] = _movable(graph)
        found |= _largest_product(graph, need_bytes)
    worth = {name: n for name, n in found.items() if n > LEAST_SHARE * need_bytes}
    return [
        f"{name} ({format_bytes(worth[name])})"
        for name in sorted(worth, key=lambda name: -worth[name])
    ]


def _nbytes(value: Value) -> int:
    """Of an array, whoever has room for it."""
    if value.dtype is None:
        return value.nbytes
    return value.dtype.itemsize * math.prod(value.shard_shape)


def _replaceable(graph: Graph) -> int:
    """Bytes of results that could take the place of arguments that are not donated."""
    kept: Counter[Any] = Counter(
        graph.values[v].room
        for v in graph.arguments
        if v not in graph.donated and v not in graph.stored
    )
    saved = 0
    for v in graph.returned:
        room = graph.values[v].room
        if v in graph.producer and kept[room] and graph.values[v].dtype is not None:
            kept[room] -= 1
            saved += _nbytes(graph.values[v])
    return saved


def _movable(graph: Graph) -> int:
    """Bytes of donated state in RAM, but for the largest array, which is read."""
    state = [
        _nbytes(graph.values[v])
        for v in graph.arguments
        if v in graph.donated and v not in graph.stored
    ]
    return sum(state) - max(state, default=0)


def _largest_product(graph: Graph, need_bytes: int) -> dict[str, int]:
    """What to do about the largest product, if it is a large part of the need, and how
    many bytes it has."""
    products = [
        (_nbytes(graph.values[v]), node.name)
        for node in graph.nodes
        if any(e.primitive.name == "dot_general" for e in node.equations)
        for v in node.writes
    ]
    nbytes, name = max(products, default=(0, ""))
    if nbytes < LARGE_SHARE * need_bytes or name.endswith("]"):  # a block
        return {}
    blockwise = f"functools.partial(poet_jax.passes.blockwise, large_bytes={nbytes})"
    return {f"{blockwise} in passes= for blocks of {name}, if its rows allow": nbytes}


def _largest_loop(graph: Graph) -> tuple[str, int]:
    """What to do about the loop that keeps most for another one, and how many bytes.

    A loop in pieces has a node for each, named by its first and last iteration.
    """
    loops = {
        n: node.name
        for n, node in enumerate(graph.nodes)
        if any(e.primitive.name in ("scan", "while") for e in node.equations)
    }
    returned = set(graph.returned)
    kept = [
        (
            sum(
                _nbytes(graph.values[v])
                for v in graph.nodes[n].writes
                if v not in returned and not loops.keys().isdisjoint(graph.readers[v])
            ),
            name,
        )
        for n, name in loops.items()
    ]
    nbytes, name = max(kept, default=(0, ""))
    whole, _, _ = name.rpartition("[")
    if not name.endswith("]"):
        return f"jax.checkpoint in the body of {name}", nbytes
    pieces = sum(x.startswith(f"{whole}[") for x in set(loops.values()))
    unroll = f"functools.partial(poet_jax.passes.unroll, most_pieces={2 * pieces})"
    return f"{unroll} in passes=, for shorter pieces of {whole}", nbytes // 2
