"""Reorder the nodes so that memory is freed early."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from poet_jax.core.graph import Graph, Node
from poet_jax.core.in_place import replaceable, replaced

# A node that starts so many times what it ends may still rise: the first update has
# the step counter's scalars, too, and all other updates wait for these.
ROUGHLY = 1.1


def reorder(graph: Graph) -> Graph:
    """The same nodes in an order whose keep-all peak is no higher, usually lower.

    Three passes. A node that starts more bytes than it ends sinks to just before its
    first reader; a node that ends about as many as it starts, or more (an optimizer
    update, a weight's gradient) rises to just after the last of its producers; and a
    gradient that the first pass took to its update rises with that. The first pass is
    made only if it lowers the peak, and none is if they raise it.
    """
    nodes = range(len(graph.nodes))
    candidates = [
        _rise_in_pairs(_in_order(graph, _rise(graph, sequence)))
        for sequence in (nodes, _sink(graph))
    ]
    return min(*candidates, graph, key=_peak)


def _in_order(graph: Graph, sequence: Iterable[int]) -> Graph:
    nodes = tuple(graph.nodes[number] for number in sequence)
    return dataclasses.replace(graph, nodes=nodes)


class _Sequence:
    """Numbers of nodes in an order, and the place of each.

    Attributes:
      numbers: of nodes, in order.
      places: by number.
    """

    def __init__(self, numbers: Iterable[int] = ()):
        self.numbers = list(numbers)
        self.places = {number: place for place, number in enumerate(self.numbers)}

    def insert(self, place: int, *numbers: int) -> None:
        self.numbers[place:place] = numbers
        self._renumber(place)

    def remove(self, start: int, stop: int) -> None:
        del self.numbers[start:stop]
        self._renumber(start)

    def _renumber(self, start: int) -> None:
        for place in range(start, len(self.numbers)):
            self.places[self.numbers[place]] = place


def _sink(graph: Graph) -> list[int]:
    """Move nodes that start more than they end to just before their first reader."""
    result = _Sequence()  # in reverse
    later_reads = set(graph.returned)
    for number in reversed(range(len(graph.nodes))):
        node = graph.nodes[number]
        ended = sum(
            _freeable(graph, v) for v in set(node.reads) if v not in later_reads
        )
        place = len(result.numbers)
        if node.repeatable and _started(graph, node) > ended:
            readers = {n for v in node.writes for n in graph.readers[v]}
            place = max((result.places[n] + 1 for n in readers), default=0)
        result.insert(place, number)
        later_reads.update(node.reads)
    return result.numbers[::-1]


def _rise(graph: Graph, sequence: Iterable[int]) -> list[int]:
    """Move nodes that end about what they start, or more, to just after their last
    producer, or the first reader of what comes from storage."""
    result, returned = _Sequence(), set(graph.returned)
    for number in sequence:
        node, places = graph.nodes[number], result.places
        place = len(result.numbers)
        if node.repeatable:
            brought = (_brings(graph, v, places) for v in set(node.reads))
            earliest = max((n + 1 for n in brought if n is not None), default=0)
            ended = sum(
                _freeable(graph, v)
                for v in set(node.reads) - returned - graph.pinned
                if all(
                    n == number or places.get(n, earliest) < earliest
                    for n in reversed(graph.readers[v])
                )
            )
            if earliest and _started(graph, node) <= ROUGHLY * ended:
                place = earliest
        result.insert(place, number)
    return result.numbers


def _brings(graph: Graph, value: int, places: Mapping[int, int]) -> int | None:
    """The place of the node that brings a value into RAM; None if none does so far."""
    nodes = [graph.producer[value]] if value in graph.producer else []
    if value in graph.stored:
        nodes += graph.readers[value]
    return min((places[n] for n in nodes if n in places), default=None)


def _rise_in_pairs(graph: Graph) -> Graph:
    """Move each update whose gradient nobody else reads, with the node before it that
    makes the gradient, as far up as no moment needs more than a later one does.

    A large gradient waits for its update otherwise, and so do the two values that it is
    made of, which a tight budget has to bring through the rest of the step. A pair does
    not go above another reader of what the update writes over.
    """
    sequence, returned = _Sequence(range(len(graph.nodes))), set(graph.returned)
    profile = _Profile(graph)
    live, later_bytes = profile.of(sequence.numbers)
    places = sequence.places
    for first, second in itertools.pairwise(range(len(graph.nodes))):
        pair = [graph.nodes[first], graph.nodes[second]]
        made = set(pair[0].writes)
        reads = {v for node in pair for v in node.reads} - made
        olds = {old for old, _ in replaced(graph, second, reads)}
        alone = {n for v in made for n in graph.readers[v]} == {second}
        if not (olds and alone and all(node.repeatable for node in pair)):
            continue
        if places[second] != places[first] + 1:  # it went with the node before it
            continue
        above = [graph.producer[v] for v in reads if v in graph.producer]
        above += [n for v in olds for n in graph.readers[v] if n != second]
        earliest = 1 + max((places[n] for n in above), default=-1)
        ended = sum(
            _freeable(graph, v)
            for v in reads - returned
            if all(places[n] <= places[second] for n in graph.readers[v])
        )
        if made & returned or _started(graph, pair[1]) > ROUGHLY * ended:
            continue
        least = live[earliest : places[first]] + _started(graph, pair[0])
        fits = np.flatnonzero(least <= later_bytes[earliest : places[first]])
        if fits.size:
            sequence.remove(places[first], places[second] + 1)
            sequence.insert(earliest + int(fits[0]), first, second)
            live, later_bytes = profile.of(sequence.numbers)
    return _in_order(graph, sequence.numbers)


def _started(graph: Graph, node: Node) -> int:
    """Bytes that stay in RAM after a node; what lands on storage does not."""
    return sum(graph.values[v].nbytes for v in node.writes if v not in graph.landing)


def _freeable(graph: Graph, value: int) -> int:
    return 0 if value in graph.pinned else graph.values[value].nbytes


def _peak(graph: Graph) -> int:
    """Bytes of keep-all, workspaces aside."""
    _, later_bytes = _Profile(graph).of(range(len(graph.nodes)))
    return int(later_bytes[0]) if later_bytes.size else 0


class _Profile:
    """What keep-all needs, workspaces aside, for any order of a graph's nodes."""

    def __init__(self, graph: Graph):
        touches = [
            (number, value)
            for number, node in enumerate(graph.nodes)
            for value in {*node.reads, *node.writes}
        ]
        self.nodes, self.values = np.array(touches, np.int64).reshape(-1, 2).T
        nbytes = np.array([value.nbytes for value in graph.values], np.int64)
        self.initial_bytes = int(nbytes[list(graph.initial)].sum())
        self.starting = nbytes.copy()
        self.starting[list(graph.initial)] = 0
        self.ending = nbytes
        self.ending[list(graph.pinned | set(graph.returned))] = 0
        self.written_over = np.array(
            [
                sum(graph.values[old].nbytes for old, _ in replaceable(graph)[number])
                for number in range(len(graph.nodes))
            ],
            np.int64,
        )

    def of(self, sequence: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """[N] bytes in RAM before each node of a sequence, and the most that it or a
        later one needs."""
        order = np.array(sequence, np.int64)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        touched = places[self.nodes]
        first = np.full(len(self.starting), len(order))
        last = np.full(len(self.starting), -1)
        np.minimum.at(first, self.values, touched)
        np.maximum.at(last, self.values, touched)
        seen = last >= 0
        started, ended = (
            np.bincount(at[seen], nbytes[seen], len(order)).astype(np.int64)
            for at, nbytes in ((first, self.starting), (last, self.ending))
        )
        live = self.initial_bytes + np.cumsum(started - ended) - (started - ended)
        needed = live + started - self.written_over[order]
        return live, np.maximum.accumulate(needed[::-1])[::-1]
