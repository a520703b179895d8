"""Group the equations that XLA would fuse, so that a node is worth scheduling.

Every expensive equation is a node of its own; the light equations between expensive
ones form one node per connected component. Nine rules keep the groups useful:

- A value of at most `TINY_BYTES` does not tie two groups together: a step counter would
  otherwise join every parameter's update into one node.
- Where a group that expands tiny values meets a large value of a group before it, as
  the sums of the areas of boxes meet their overlaps, the two are one.
- A light equation that reads nothing but arguments joins its first consumer, so that
  the decay of a moment is part of the update and not a copy that waits for it.
- A broadcast of a tiny value is repeated inside every node that reads it, and so is a
  `pvary`, which moves nothing.
- A slice that the backward pass takes of what the forward pass made stays there, as
  the slice would be saved beside the whole otherwise.
- In a sum of expensive results, as of the gradients of several batches, each addition
  after the first is a node, as all of them would have to be there at once otherwise.
  Small results of large reductions are added in the same way, such as the gradients of
  a parameter that several parts of a batch read.
- A product that is only read transposed, as the gradient of a kernel is, is taken the
  other way around: an update that read it across its rows would take several times as
  long.
- A group that holds many large values at once, as a long chain of light equations and
  its backward pass would, is cut where least is alive.
- A group that updates parts of a large array again and again, as loops do with a buffer
  or a cache, is cut before each update of what other groups read, as all versions would
  have to be there at once otherwise.

Groups are numbered by depth, and every edge between two groups leads to a greater
depth, so merging never makes a cycle.
"""

import dataclasses
import graphlib
import heapq
import itertools
from collections.abc import Iterable

from poet_jax.core.graph import Graph, Node
from poet_jax.core.rebuilding import with_nodes
from poet_jax.passes.operations import HEAVY

TINY_BYTES = 4096
SMALL = 16  # A sum is small if it reads so many times what it writes.
# What a group may hold inside, in terms of what its largest equation reads and writes:
# those of common layers and optimizers, forward and backward, hold 2.3 at most.
MOST_HELD = 2.5


def is_heavy(node: Node) -> bool:
    """Whether the node's one equation is worth a node of its own, whatever it joins."""
    (equation,) = node.equations
    heavy = equation.primitive.name in HEAVY or bool(equation.inner)
    return heavy or not node.repeatable


@dataclasses.dataclass(eq=False)
class _Group:
    depth: int
    heavy: bool
    members: list[int]


def group(graph: Graph, *, max_equations: int | None = None) -> Graph:
    """A graph with fewer, larger nodes that computes the same, for a graph of `trace`.

    With `max_equations`, no node has more, but for broadcasts that are repeated in it.
    Raises ValueError if that is less than one.
    """
    if max_equations is None:
        max_equations = len(graph.nodes)
    elif max_equations < 1:
        raise ValueError(f"max_equations must be at least 1, got {max_equations}.")
    return _Coarsener(graph, max_equations).result()


class _Coarsener:
    def __init__(self, graph: Graph, max_equations: int):
        self.graph, self.max_equations = graph, max_equations
        self.heavy = [is_heavy(node) for node in graph.nodes]
        self.free = {n for n in range(len(graph.nodes)) if self.is_free(n)}
        self.group: dict[int, _Group] = {}
        self.rooted = self.reading_only_arguments()
        self.effect_depth = -1  # of the group of the last effect
        # (group, the one before it, bytes) that `waiting` has found not to be one
        self.apart: set[tuple[_Group, _Group, int]] = set()

    def nbytes(self, value: int) -> int:
        return self.graph.values[value].nbytes

    def is_tiny(self, value: int) -> bool:
        return self.nbytes(value) <= TINY_BYTES

    def is_free(self, number: int) -> bool:
        """A broadcast of tiny operands, or a change of a type alone: repeated wherever
        it is read."""
        node = self.graph.nodes[number]
        name = node.equations[0].primitive.name
        return (
            name == "pvary"
            or name in ("broadcast_in_dim", "iota")
            and all(self.is_tiny(v) for v in node.reads)
        ) and not any(v in self.graph.leaving for v in node.writes)

    def reads(self, number: int) -> Iterable[int]:
        """Values that node `number` reads once free nodes are repeated inside it."""
        for value in self.graph.nodes[number].reads:
            producer = self.graph.producer.get(value)
            if producer in self.free:
                yield from self.reads(producer)
            else:
                yield value

    def producers(self, number: int) -> Iterable[tuple[int, int]]:
        """(value, node) for each read that a node writes."""
        for value in self.reads(number):
            if value in self.graph.producer:
                yield value, self.graph.producer[value]

    def is_next_term(self, number: int) -> bool:
        """Whether it adds a result of its own to a sum of others, read here only."""
        node = self.graph.nodes[number]
        if not self.is_addition(number):
            return False
        makers = [(v, self.graph.producer.get(v)) for v in node.reads]
        return len(makers) == 2 and any(
            self.is_term(term)
            and (self.is_sum(total) or self.is_small(total))
            and len(self.graph.readers[v]) == 1
            for (v, total), (_, term) in (makers, makers[::-1])
            if total is not None and term is not None
        )

    def is_addition(self, number: int) -> bool:
        name = self.graph.nodes[number].equations[0].primitive.name
        return name in ("add", "add_any")

    def is_term(self, number: int) -> bool:
        return self.heavy[number] or self.is_small(number)

    def is_small(self, number: int) -> bool:
        """Whether it is a sum that reads `SMALL` times what it writes, such as the
        gradient of a bias."""
        node = self.graph.nodes[number]
        name = node.equations[0].primitive.name
        if name not in ("reduce_sum", "reshape") or len(node.reads) != 1:
            return False
        read, written = (self.nbytes(v) for v in (*node.reads, *node.writes))
        maker = self.graph.producer.get(node.reads[0])
        if read == written and maker is not None:
            return self.is_small(maker)
        return name == "reduce_sum" and read >= SMALL * written > TINY_BYTES

    def is_sum(self, number: int) -> bool:
        node = self.graph.nodes[number]
        makers = (self.graph.producer.get(v) for v in node.reads)
        return self.is_addition(number) and any(
            n is not None and self.is_term(n) for n in makers
        )

    def is_all_tiny(self, number: int) -> bool:
        node = self.graph.nodes[number]
        return all(self.is_tiny(v) for v in (*self.reads(number), *node.writes))

    def reading_only_arguments(self) -> set[int]:
        """Light nodes all of whose ancestors are arguments, constants or such nodes."""
        rooted: set[int] = set()
        for number in range(len(self.graph.nodes)):
            if number in self.free or self.heavy[number]:
                continue
            if all(producer in rooted for _, producer in self.producers(number)):
                rooted.add(number)
        return rooted

    def result(self) -> Graph:
        for number in range(len(self.graph.nodes)):
            if number not in self.free and number not in self.rooted:
                self.place(number)
        for number in sorted(self.rooted, reverse=True):
            self.place_before_consumers(number)
        return with_nodes(self.graph, self.sorted_nodes())

    def place(self, number: int) -> None:
        """Put a node into the deepest of its producers' groups if the edges there
        tie."""
        edges = [
            (v, self.group[p])
            for v, p in self.producers(number)
            if p not in self.rooted
        ]
        depth = max((g.depth for _, g in edges), default=-1)
        deepest = [(v, g) for v, g in edges if g.depth == depth]
        if not self.graph.nodes[number].repeatable:  # deeper than the effect before it
            depth = max(depth, self.effect_depth)
            self.effect_depth = depth + 1
        alone = self.heavy[number] or self.is_next_term(number)
        if alone or not deepest or not self.ties(number, deepest):
            self.group[number] = _Group(depth + 1, self.heavy[number], [number])
            return
        target, *others = list(dict.fromkeys(g for _, g in deepest))
        for other in (*others, *self.waiting(target, edges)):
            target.members.extend(other.members)
            for member in other.members:
                self.group[member] = target
        target.members.append(number)
        self.group[number] = target

    def ties(self, number: int, edges: list[tuple[int, _Group]]) -> bool:
        """Whether `number` may join, and so unite, the groups its deepest edges lead
        to.

        All of them must be light, and each joined by a large value, or by a tiny one
        that comes from the only group read there or from a group of tiny values only.
        """
        node = self.graph.nodes[number]
        if any(g.heavy for _, g in edges):
            return False
        if node.backward and node.equations[0].primitive.name == "slice":
            makers = (self.graph.producer[v] for v, _ in edges)
            if not all(self.graph.nodes[n].backward for n in makers):
                return False
        groups = {g for _, g in edges}
        tiny = self.is_all_tiny(number)
        return all(
            any(
                not self.is_tiny(v)
                or (
                    tiny and (len(groups) == 1 or all(map(self.is_all_tiny, g.members)))
                )
                for v, group in edges
                if group is g
            )
            for g in groups
        )

    def waiting(self, target: _Group, edges: list[tuple[int, _Group]]) -> set[_Group]:
        """Light groups one less deep than `target` that have a large value for it, and
        are read by nothing else yet, if `target` only expands tiny values."""
        found = set()
        for v, g in edges:
            key = target, g, self.nbytes(v)
            if g.depth != target.depth - 1 or g.heavy or self.is_tiny(v):
                continue
            if g in found or key in self.apart:
                continue
            if self.readers(g) <= {g, target} and self.expands(*key):
                found.add(g)
            else:
                self.apart.add(key)
        return found

    def readers(self, group: _Group) -> set[_Group]:
        """The groups so far that read what `group` writes."""
        return {
            self.group[reader]
            for member in group.members
            for value in self.graph.nodes[member].writes
            for reader in self.all_readers(value)
            if reader in self.group
        }

    def expands(self, group: _Group, before: _Group, nbytes: int) -> bool:
        """Whether `group` reads tiny values only, and `before` reduces none of them
        from a value of `nbytes` or more."""
        read = {v for n in group.members for v in self.reads(n)}
        read -= {v for n in group.members for v in self.graph.nodes[n].writes}
        reduced: set[int] = set()
        for number in sorted(before.members):
            touched = {*self.reads(number), *self.graph.nodes[number].writes}
            if touched & reduced or max(map(self.nbytes, touched)) >= nbytes:
                reduced.update(self.graph.nodes[number].writes)
        return all(map(self.is_tiny, read)) and read.isdisjoint(reduced)

    def place_before_consumers(self, number: int) -> None:
        """Put a node that reads only arguments into its one shallowest consumer's
        group."""
        consumers = {
            self.group[reader]
            for value in self.graph.nodes[number].writes
            for reader in self.all_readers(value)
        }
        if not consumers:
            self.group[number] = _Group(0, False, [number])
            return
        depth = min(g.depth for g in consumers)
        first, *others = [g for g in consumers if g.depth == depth]
        if first.heavy or others:
            self.group[number] = _Group(depth - 1, False, [number])
        else:
            first.members.append(number)
            self.group[number] = first

    def all_readers(self, value: int) -> Iterable[int]:
        for reader in self.graph.readers[value]:
            if reader in self.free:
                for written in self.graph.nodes[reader].writes:
                    yield from self.all_readers(written)
            else:
                yield reader

    def sorted_nodes(self) -> list[Node]:
        """The groups as nodes, in an order close to the given one; effects keep
        theirs."""
        groups = list(dict.fromkeys(self.group.values()))
        before: dict[_Group, set[_Group]] = {g: set() for g in groups}
        for number, group in self.group.items():
            before[group].update(self.group[p] for _, p in self.producers(number))
        effects = [
            self.group[n] for n, x in enumerate(self.graph.nodes) if not x.repeatable
        ]
        for first, second in zip(effects, effects[1:], strict=False):
            before[second].add(first)
        for group, predecessors in before.items():
            predecessors.discard(group)
        sorter = graphlib.TopologicalSorter(before)
        sorter.prepare()
        position = {g: (max(g.members), i) for i, g in enumerate(groups)}
        ready, nodes = [], []
        while sorter.is_active():
            for group in sorter.get_ready():
                heapq.heappush(ready, (position[group], group))
            _, group = heapq.heappop(ready)
            nodes.extend(self.pieces(sorted(group.members)))
            sorter.done(group)
        return nodes

    def pieces(self, members: list[int]) -> Iterable[Node]:
        """One node of the members, or several of consecutive ones: four at least, since
        each adds to what is alive no more than it touches, and one for each version of
        a large array that other groups read."""
        first = 0
        for place, number in enumerate(members):
            if self.replaces_what_leaves(number, members[first]):
                yield from self.lean_pieces(members[first:place])
                first = place
        yield from self.lean_pieces(members[first:])

    def lean_pieces(self, members: list[int]) -> Iterable[Node]:
        """As `pieces`, of members without such a version."""
        alive = self.alive_bytes(members)
        largest = max(self.touched_bytes(n) for n in members)
        few = len(members) <= self.max_equations
        if few and max(alive) <= MOST_HELD * largest:
            yield self.merge(members)
            return
        edge = max(1, len(members) // 4)
        cut = min(range(edge - 1, len(members) - edge), key=alive.__getitem__) + 1
        yield from self.lean_pieces(members[:cut])
        yield from self.lean_pieces(members[cut:])

    def replaces_what_leaves(self, number: int, first: int) -> bool:
        """Whether it updates a part of a large array that its group makes, at `first`
        or later, and that other groups read, too."""
        node, group = self.graph.nodes[number], self.group[number]
        if node.equations[0].primitive.name != "dynamic_update_slice":
            return False
        old = node.equations[0].operands[0]
        if not isinstance(old, int):
            return False
        maker = self.graph.producer.get(old, -1)
        if maker < first or self.group.get(maker) is not group or self.is_tiny(old):
            return False
        return any(self.group[n] is not group for n in self.all_readers(old))

    def touched_bytes(self, number: int) -> int:
        node = self.graph.nodes[number]
        touched = (*self.reads(number), *node.writes)
        return sum(self.nbytes(v) for v in touched)

    def alive_bytes(self, members: list[int]) -> list[int]:
        """Of values that only members read, what is alive after each member."""
        place = {n: i for i, n in enumerate(members)}
        change = [0] * (len(members) + 1)
        for number in members:
            for value in self.graph.nodes[number].writes:
                readers = set(self.all_readers(value))
                if value in self.graph.leaving or not readers <= place.keys():
                    continue
                nbytes = self.graph.values[value].nbytes
                last = max((place[n] for n in readers), default=place[number])
                change[place[number]] += nbytes
                change[last] -= nbytes
        return list(itertools.accumulate(change))

    def merge(self, members: list[int]) -> Node:
        """One node of the members' equations, free nodes repeated before their
        readers."""
        nodes = self.graph.nodes
        inside = set(members)
        order: list[int] = []

        def append(number: int) -> None:
            for value in nodes[number].reads:
                producer = self.graph.producer.get(value)
                if producer in self.free and producer not in order:
                    append(producer)
            order.append(number)

        for member in members:
            append(member)
        outside = self.graph.leaving
        writes = tuple(
            v
            for n in members
            for v in nodes[n].writes
            if v in outside or not inside.issuperset(self.all_readers(v))
        )
        equations = [nodes[n].equations[0] for n in order]
        main = nodes[members[-1]]
        extra = f"+{len(members) - 1}" if len(members) > 1 else ""
        return Node.of(main.name + extra, equations, writes, main.backward)
