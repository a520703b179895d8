"""Reorder the nodes so that memory is freed early."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

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
    nodes = list(graph.nodes)
    candidates = [
        _rise_in_pairs(_with_nodes(graph, _rise(graph, sequence)))
        for sequence in (nodes, _sink(graph, nodes))
    ]
    return min(*candidates, graph, key=_peak)


def _with_nodes(graph: Graph, nodes: Iterable[Node]) -> Graph:
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _sink(graph: Graph, sequence: list[Node]) -> list[Node]:
    """Move nodes that start more than they end to just before their first reader."""
    result: list[Node] = []  # in reverse
    later_reads = set(graph.returned)
    for node in reversed(sequence):
        ended = sum(
            _freeable(graph, v) for v in set(node.reads) if v not in later_reads
        )
        started = _started(graph, node)
        place = len(result)
        if node.repeatable and started > ended:
            writes = set(node.writes)
            readers = [
                i for i, other in enumerate(result) if writes.intersection(other.reads)
            ]
            place = readers[-1] + 1 if readers else 0
        result.insert(place, node)
        later_reads.update(node.reads)
    return result[::-1]


def _rise(graph: Graph, sequence: list[Node]) -> list[Node]:
    """Move nodes that end about what they start, or more, to just after their last
    producer, or the first reader of what comes from storage."""
    result: list[Node] = []
    for index, node in enumerate(sequence):
        place = len(result)
        if node.repeatable:
            brought = set(node.reads)
            earliest = 0
            for position, other in enumerate(result, start=1):
                brings = {*other.writes, *graph.stored.keys() & set(other.reads)}
                if brought & brings:
                    brought -= brings
                    earliest = position
            still_read = set(graph.returned)
            for other in (*result[earliest:], *sequence[index + 1 :]):
                still_read.update(other.reads)
            reads = set(node.reads) - still_read
            ended = sum(_freeable(graph, v) for v in reads)
            if earliest and _started(graph, node) <= ROUGHLY * ended:
                place = earliest
        result.insert(place, node)
    return result


def _rise_in_pairs(graph: Graph) -> Graph:
    """Move each update whose gradient nobody else reads, with the node before it that
    makes the gradient, as far up as no moment needs more than a later one does.

    A large gradient waits for its update otherwise, and so do the two values that it is
    made of, which a tight budget has to bring through the rest of the step. A pair does
    not go above another reader of what the update writes over.
    """
    sequence, returned = list(range(len(graph.nodes))), set(graph.returned)
    for first, second in itertools.pairwise(range(len(graph.nodes))):
        pair = [graph.nodes[first], graph.nodes[second]]
        made = set(pair[0].writes)
        reads = {v for node in pair for v in node.reads} - made
        olds = {old for old, _ in replaced(graph, second, reads)}
        alone = {n for v in made for n in graph.readers[v]} == {second}
        if not (olds and alone and all(node.repeatable for node in pair)):
            continue
        places = {number: place for place, number in enumerate(sequence)}
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
        live, needed = _profile(graph, sequence)
        later_bytes = list(itertools.accumulate(reversed(needed), max))[::-1]
        for place in range(earliest, places[first]):
            if live[place] + _started(graph, pair[0]) <= later_bytes[place]:
                del sequence[places[first] : places[second] + 1]
                sequence[place:place] = [first, second]
                break
    return _with_nodes(graph, (graph.nodes[number] for number in sequence))


def _started(graph: Graph, node: Node) -> int:
    """Bytes that stay in RAM after a node; what lands on storage does not."""
    return sum(graph.values[v].nbytes for v in node.writes if v not in graph.landing)


def _freeable(graph: Graph, value: int) -> int:
    return 0 if value in graph.pinned else graph.values[value].nbytes


def _peak(graph: Graph) -> int:
    """Bytes of keep-all, workspaces aside."""
    return max(_profile(graph, range(len(graph.nodes)))[1], default=0)


def _profile(graph: Graph, sequence: Sequence[int]) -> tuple[list[int], list[int]]:
    """[N] bytes in RAM before each node of a sequence and while it runs, in keep-all,
    workspaces aside."""
    nodes = [graph.nodes[number] for number in sequence]
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for value in (*node.reads, *node.writes):
            last[value] = place
    last.update(dict.fromkeys(graph.returned, len(nodes)))
    present = set(graph.initial)
    live = sum(graph.values[v].nbytes for v in graph.initial)
    before, needed = [], []
    for place, (number, node) in enumerate(zip(sequence, nodes, strict=True)):
        before.append(live)
        touched = {*node.reads, *node.writes}
        new = touched - present  # what is read comes from storage
        present |= new
        live += sum(graph.values[v].nbytes for v in new)
        written_over = (old for old, _ in replaceable(graph)[number])
        needed.append(live - sum(graph.values[v].nbytes for v in written_over))
        live -= sum(_freeable(graph, v) for v in touched if last[v] == place)
    return before, needed
