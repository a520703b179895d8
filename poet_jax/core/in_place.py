"""Results written over operands that nobody needs any more."""

import functools
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from poet_jax.core.graph import Graph, Node

Pairs = tuple[tuple[int, int], ...]  # (old, new) values: one is written over the other

# Each element of their result depends on others than the operand's at its place.
NOT_IN_PLACE = ("dot_general", "conv_general_dilated", "transpose", "rev", "gather")

# Their result is their first operand, but for a part.
UPDATES = ("dynamic_update_slice", "scatter")

_known: "weakref.WeakKeyDictionary[Graph, _InPlace]" = weakref.WeakKeyDictionary()


def replaceable(graph: Graph) -> tuple[Pairs, ...]:
    """[N] what each node may write over, (old, new), if nodes run in this order."""
    return _in_place(graph).replaceable


def replaced(graph: Graph, number: int, dead: Collection[int]) -> Pairs:
    """Pairs (old, new) of values: a node writes `new`, and may write it over `old`, one
    of `dead`, which nobody reads after it, of the same shape and type, and a donated
    argument in RAM or what the node changes a part of.

    So an optimizer's update takes no more memory than the state that it replaces, and
    neither does a loop that writes to a buffer row by row. State on storage that was
    paged in is not written over: XLA makes such a buffer anew.
    """
    return _in_place(graph).replaced(number, dead)


def versions(graph: Graph) -> set[int]:
    """Values that lie where an argument did and a result will, one after the other, if
    nodes run in this order."""
    over = {new: old for made in replaceable(graph) for old, new in made}
    found: set[int] = set()
    for value in graph.returned:
        chain: list[int] = []
        while value in over:
            chain.append(value)
            value = over[value]
        if value in graph.donated:
            found.update(chain)
    return found


class _InPlace:
    """What nodes may write over; of a graph, which it does not keep alive."""

    def __init__(self, graph: Graph):
        self._graph: Any = weakref.proxy(graph)
        paged = graph.stored.keys() - graph.resident
        free = (graph.donated | graph.resident) - paged.union(graph.returned)
        made = graph.producer.keys() - free.union(graph.returned)
        self.olds = [
            free.intersection(node.reads) | made.intersection(_updated(node))
            if node.equations
            else frozenset()
            for node in graph.nodes
        ]
        self._pairs: dict[tuple[int, frozenset[int]], Pairs] = {}

    def replaced(self, number: int, dead: Collection[int]) -> Pairs:
        if not self.olds[number]:
            return ()
        key = number, frozenset(self.olds[number].intersection(dead))
        if key not in self._pairs:
            node = self._graph.nodes[number]
            self._pairs[key] = pairs(self._graph, [node], node.writes, key[1])
        return self._pairs[key]

    @functools.cached_property
    def replaceable(self) -> tuple[Pairs, ...]:
        readers = self._graph.readers
        return tuple(
            self.replaced(number, [v for v in olds if readers[v][-1] == number])
            for number, olds in enumerate(self.olds)
        )


def _updated(node: Node) -> Iterable[Any]:
    """Values that the node copies, with a part of each changed."""
    for equation in node.equations:
        if equation.primitive.name.startswith(UPDATES):
            yield equation.operands[0]


def _in_place(graph: Graph) -> _InPlace:
    if graph not in _known:
        _known[graph] = _InPlace(graph)
    return _known[graph]


def pairs(
    graph: Graph, nodes: Sequence[Node], writes: Sequence[int], free: Iterable[int]
) -> Pairs:
    """(old, new) for each of `writes` that can be over one of the operands `free`: a
    value of the same shape and type, not read after the result is made.

    Of several the one read last, as an update's own old value is: XLA would copy one
    that is read later, and that takes more time than the update.
    """
    last_read, written = _places(nodes)
    operands = defaultdict(list)
    for value in sorted(free, reverse=True):
        operands[_memory(graph, value)].append(value)
    replaced: dict[int, int] = {}
    for value in sorted(writes, key=written.__getitem__):
        olds = operands[_memory(graph, value)]
        dead = [old for old in olds if last_read.get(old, 0) <= written[value]]
        if dead and _is_plain(graph.values[value].dtype):
            replaced[value] = max(dead, key=lambda old: last_read.get(old, 0))
            olds.remove(replaced[value])
    return tuple((replaced[v], v) for v in writes if v in replaced)


def _memory(graph: Graph, value: int) -> Any:
    """Equal for values that can take each other's place."""
    if value in graph.seats:
        return graph.seats[value]
    return graph.values[value].room


def _is_plain(dtype: Any) -> bool:
    """Whether arrays of `dtype` are in memory what their shape and itemsize say.

    PRNG keys are not, nor are types of less than a byte, which XLA packs.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits >= 8
    return True


def _places(nodes: Iterable[Node]) -> tuple[dict[Any, int], dict[Any, int]]:
    """Of each value: the equation that reads it last, or the next one if that could not
    write over it, and the one that writes it."""
    last_read: dict[Any, int] = {}
    written: dict[Any, int] = {}
    place = 0
    for node in nodes:
        for equation in node.equations:
            place += 1
            after = equation.primitive.name in NOT_IN_PLACE
            last_read.update(dict.fromkeys(equation.reads, place + after))
            written.update(dict.fromkeys(equation.results, place))
    return last_read, written
