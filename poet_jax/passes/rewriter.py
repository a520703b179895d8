"""A traced graph, of one equation per node, that is being changed node by node."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from poet_jax.core.equation import Equation, Literal
from poet_jax.core.graph import Graph, Node
from poet_jax.core.rebuilding import without_dead_code
from poet_jax.core.trace import trace


def require_single_equations(graph: Graph) -> None:
    """Raise ValueError for a graph whose nodes hold several equations."""
    if any(len(node.equations) > 1 for node in graph.nodes):
        raise ValueError(
            "A pass over single equations was given a graph whose nodes hold "
            "several. It sees them one by one, before they are grouped. Put it "
            "before group in passes=."
        )


def ends(graph: Graph, now: Callable[[int], int]) -> dict[str, Any]:
    """What leaves a graph, with `now(value)` for each value, as its attributes."""
    return {
        "outputs": tuple(map(now, graph.outputs)),
        "landing": {now(v): place for v, place in graph.landing.items()},
        "stacks": {
            v: dataclasses.replace(stack, values=tuple(map(now, stack.values)))
            for v, stack in graph.stacks.items()
        },
    }


def with_all_before(
    number: int, before: Mapping[int, Sequence[int]], done: set[int]
) -> Iterator[int]:
    """`number` after its predecessors in `before`, and theirs, in an order that works.

    Skips what is `done`, and adds the rest to it.
    """
    stack = [number]
    while stack:
        missing = [n for n in before[stack[-1]] if n not in done]
        if missing:
            stack += missing
            continue
        number = stack.pop()
        if number not in done:
            done.add(number)
            yield number


class Rewriter:
    """What passes over single equations have in common.

    ValueError for a graph whose nodes hold several equations.

    Attributes:
      nodes: by number; a node keeps its number, and new ones get the next.
      place: where each is to stand, (number of an old node, own number): a new one
        right after the old one, among new ones as they were made; what it reads comes
        first.
      producer: number of the node that makes each value.
      readers: [V] numbers of the nodes that read each value.
    """

    def __init__(self, graph: Graph):
        require_single_equations(graph)
        self.graph = graph
        self.values = list(graph.values)
        self.nodes = dict(enumerate(graph.nodes))
        self.place = {number: (number, 0) for number in self.nodes}
        self.producer = dict(graph.producer)
        self.readers = [set(numbers) for numbers in graph.readers]
        self._outputs = set(graph.leaving)
        self._is_changed = False
        self._instead: dict[int, int] = {}  # what a value was replaced by
        self._made: dict[tuple, int] = {}  # new values by what computes them

    def result(self, rewritten: bool = True) -> Graph:
        """The graph as it is now, without dead code; the given one if unchanged.

        `rewritten` is False where XLA does as much for the function as a whole.
        """
        if not self._is_changed:
            return self.graph
        place = self.place.__getitem__
        nodes = {n: self._renamed(self.nodes[n]) for n in sorted(self.nodes, key=place)}
        makers = {v: n for n, node in nodes.items() for v in node.writes}
        before = {
            n: sorted((makers[v] for v in node.reads if v in makers), key=place)[::-1]
            for n, node in nodes.items()
        }
        done: set[int] = set()
        order = [x for n in nodes for x in with_all_before(n, before, done)]
        return without_dead_code(
            dataclasses.replace(
                self.graph,
                values=tuple(self.values),
                nodes=tuple(nodes[number] for number in order),
                rewritten=rewritten or self.graph.rewritten,
                **ends(self.graph, self._now),
            )
        )

    def operands(self, node: Node) -> list[Any]:
        """Of its equation: values of the graph, or `Literal`s."""
        return [
            self._now(x) if isinstance(x, int) else x
            for x in node.equations[0].operands
        ]

    def maker(self, value: Any, *names: str) -> Node | None:
        """The node that makes a value, if its primitive is one of `names`, or any."""
        number = None if isinstance(value, Literal) else self.producer.get(value)
        node = None if number is None else self.nodes.get(number)
        if node is None or (names and node.equations[0].primitive.name not in names):
            return None
        return node

    def is_output(self, value: int) -> bool:
        return value in self._outputs

    def anchor(self, node: Node) -> int:
        """The old node that a node is, or stands after."""
        return self.place[self.producer[node.writes[0]]][0]

    def replace(self, old: int, new: int) -> None:
        """Let all that reads `old` read `new`, and drop what nobody needs then."""
        if {old, new} <= self._outputs:
            return  # each output is an array of the caller's own
        self._is_changed = True
        self._instead[old] = new
        self.readers[new] |= self.readers[old]
        if old in self._outputs:
            self._outputs.add(new)
        self._drop(self.producer[old])

    def rewrite(self, node: Node, equation: Equation, name: str) -> None:
        """Let another equation make what a node does, and drop what nobody needs
        then."""
        self._is_changed = True
        number = self.producer[node.writes[0]]
        made = Node.of(name, [equation], node.writes, node.backward)
        for value in made.reads:
            self.readers[value].add(number)
        self._drop(number, set(made.reads))
        self.nodes[number] = made

    def bind(self, equation: Equation, operands: Sequence[Any], like: Node) -> int:
        """The value of an equation of one result, of other operands."""

        def fun(*arrays):
            given = iter(arrays)
            (result,) = equation.bind(
                [x.value if isinstance(x, Literal) else next(given) for x in operands]
            )
            return result

        return self.add(fun, [x for x in operands if not isinstance(x, Literal)], like)

    def add(
        self,
        fun: Callable,
        operands: Sequence[int],
        like: Node,
        anchor: int | None = None,
        backward: bool | None = None,
    ) -> int:
        """The value of `fun(*operands)`, by nodes that are new if there are none yet.

        They stand after the node `like`, or after `anchor`, and belong to the backward
        pass if `like` does, or as `backward` says.
        """
        operands = [self._now(v) for v in operands]
        anchor = self.anchor(like) if anchor is None else anchor
        backward = like.backward if backward is None else backward
        small = trace(fun, *(self.values[v].aval for v in operands))
        known = dict(zip(small.arguments, operands, strict=True))
        for node in small.nodes:
            ((equation,), (written,)) = node.equations, node.writes
            given = equation.renamed(known).operands
            key = (
                equation.primitive,
                repr(sorted(equation.params.items())),
                tuple(x.key if isinstance(x, Literal) else x for x in given),
            )
            made = self.maker(self._made.get(key))
            if made is not None:
                (known[written],) = made.writes
                number = self.producer[known[written]]
                self.place[number] = min(self.place[number], (anchor, number))
                continue
            scope = like.name.rpartition("/")[0]
            name = f"{scope}/{equation.primitive.name}".removeprefix("/")
            value, number = len(self.values), len(self.place)
            known[written] = self._made[key] = value
            self.values.append(
                dataclasses.replace(small.values[written], name=f"{name}.{value}")
            )
            made = Node.of(name, [equation.renamed(known)], [value], backward)
            self.nodes[number] = made
            self.place[number] = (anchor, number)
            self.producer[value] = number
            self.readers.append(set())
            for read in made.reads:
                self.readers[read].add(number)
        return known[small.outputs[0]]

    def _now(self, value: int) -> int:
        while value in self._instead:
            value = self._instead[value]
        return value

    def _drop(self, number: int, still_read: Collection[int] = ()) -> None:
        node = self.nodes.pop(number)
        for value in {self._now(v) for v in node.reads}.difference(still_read):
            self.readers[value].discard(number)
            maker = self.maker(value)
            if maker is not None and self._is_dead(maker):
                self._drop(self.producer[value])

    def _is_dead(self, node: Node) -> bool:
        return node.repeatable and not any(
            self.readers[v] or v in self._outputs for v in node.writes
        )

    def _renamed(self, node: Node) -> Node:
        """The node with what it reads now."""
        return node.renamed({v: self._now(v) for v in node.reads if v in self._instead})
