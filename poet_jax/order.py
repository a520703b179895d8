"""Reorder the nodes so that memory is freed early; the planner keeps this order."""

import dataclasses

from poet_jax.graph import Graph, Node
from poet_jax.in_place import replaceable


def order(graph: Graph) -> Graph:
    """The same nodes in an order whose keep-all peak is no higher, usually lower.

    Two passes move one node at a time. A node that starts more bytes than it ends sinks
    to just before its first reader; a node that ends at least as many as it starts (an
    optimizer update, a weight's gradient) rises to just after the last of its
    producers. The given order is returned if that did not lower the peak.
    """
    sequence = _rise(graph, _sink(graph, list(graph.nodes)))
    ordered = dataclasses.replace(graph, nodes=tuple(sequence))
    return ordered if _peak(ordered) < _peak(graph) else graph


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
    """Move nodes that end at least what they start to just after their last producer,
    or the first reader of what comes from storage."""
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
            if earliest and _started(graph, node) <= ended:
                place = earliest
        result.insert(place, node)
    return result


def _started(graph: Graph, node: Node) -> int:
    """Bytes that stay in RAM after a node; what lands on storage does not."""
    return sum(graph.values[v].nbytes for v in node.writes if v not in graph.landing)


def _freeable(graph: Graph, value: int) -> int:
    return 0 if value in graph.pinned else graph.values[value].nbytes


def _peak(graph: Graph) -> int:
    """Bytes of keep-all, workspaces aside."""
    last: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for value in (*node.reads, *node.writes):
            last[value] = position
    last.update(dict.fromkeys(graph.returned, len(graph.nodes)))
    present = set(graph.initial)
    live = sum(graph.values[v].nbytes for v in graph.initial)
    peak = live
    for position, node in enumerate(graph.nodes):
        new = {*node.reads, *node.writes} - present  # what is read comes from storage
        present |= new
        live += sum(graph.values[v].nbytes for v in new)
        written_over = (old for old, _ in replaceable(graph)[position])
        peak = max(peak, live - sum(graph.values[v].nbytes for v in written_over))
        live -= sum(
            _freeable(graph, v)
            for v in {*node.reads, *node.writes}
            if last[v] == position
        )
    return peak
