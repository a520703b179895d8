"""A graph that is made anew, node by node, with functions in place of some nodes."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from poet_jax.core.equation import Inner, Literal
from poet_jax.core.graph import Graph, Node, Value
from poet_jax.core.rebuilding import without_dead_code
from poet_jax.core.trace import trace_part
from poet_jax.passes.rewriter import ends


class Splicer(abc.ABC):
    """What passes that cut nodes into pieces have in common.

    Attributes:
      values, constants, nodes: of the new graph, which begins with all values and
        constants of the old one and without nodes.
      instead: old values by what they are now.
      parts: functions as graphs, and the numbers here of their constants; traced once
        for all pieces of one key.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.values = list(graph.values)
        self.constants = dict(graph.constants)
        self.nodes: list[Node] = []
        self.instead: dict[Any, Any] = {}
        self.parts: dict[Any, tuple[Graph, dict[int, int]]] = {}

    def result(self) -> Graph:
        for node in self.graph.nodes:
            self.visit(node)
        return without_dead_code(
            dataclasses.replace(
                self.graph,
                **ends(self.graph, self.whole),
                values=tuple(self.values),
                nodes=tuple(self.ordered()),
                constants=self.constants,
            )
        )

    @abc.abstractmethod
    def visit(self, node: Node) -> None:
        """Add a node of the old graph, or what stands in its place."""

    def ordered(self) -> Iterable[Node]:
        """The new graph's nodes, once all of them are there."""
        return self.nodes

    def whole(self, value: Any) -> Any:
        """What a value is now."""
        return self.instead.get(value, value)

    def emit(self, node: Node) -> None:
        """Add a node as it is, of what it reads now."""
        self.nodes.append(node.renamed({v: self.whole(v) for v in node.reads}))

    def add(
        self,
        name: str,
        backward: bool,
        fun: Callable,
        operands: Sequence[Any],
        key: tuple = (),
    ) -> list[Any]:
        """Values of `fun(*operands)`; functions of one `key`, if any, are the same."""
        if not key or key not in self.parts:
            avals = [
                x.value if isinstance(x, Literal) else self.values[x].aval
                for x in operands
            ]
            self.parts[key] = trace_part(fun, *avals), {}
        return self.splice(self.parts[key], operands, name, backward)

    def splice(
        self,
        part: tuple[Graph, dict[int, int]],
        operands: Sequence[Any],
        name: str,
        backward: bool,
        is_opened: bool = False,
    ) -> list[Any]:
        """What `operands` make of a part; its nodes become nodes of this graph, named
        after themselves, too, if it `is_opened`.

        They may run again, as the loop may.
        """
        graph, constants = part
        for v, array in graph.constants.items():
            if v not in constants:
                constants[v] = self.value(graph.values[v], graph.values[v].name)
                self.constants[constants[v]] = array
        known: dict[Any, Any] = {**constants}
        known.update(zip(graph.arguments, operands, strict=True))
        for node in graph.nodes:
            scope = f"{name}/{node.name}" if is_opened else name
            for v in node.writes:
                known[v] = self.value(graph.values[v], scope)
            known |= {
                x: Inner() for e in node.equations for x in e.results if x not in known
            }
            equations = [
                dataclasses.replace(e, unknown=frozenset()) if e.unknown else e
                for e in (e.renamed(known) for e in node.equations)
            ]
            writes = [known[v] for v in node.writes]
            self.nodes.append(Node.of(scope, equations, writes, backward))
        return [known[v] for v in graph.outputs]

    def value(self, value: Value, name: str) -> int:
        number = len(self.values)
        self.values.append(dataclasses.replace(value, name=f"{name}.{number}"))
        return number


class Cutter(Splicer):
    """A `Splicer` whose values may be in pieces.

    Attributes:
      split: pieces of values that are made in pieces.
      postponed: nodes that make what is not needed so far.
    """

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.split: dict[Any, list[Any]] = {}
        self.postponed: dict[Any, Node] = {}

    @abc.abstractmethod
    def joined(self, value: Any, pieces: Sequence[jax.Array]) -> jax.Array:
        """A value of `split` as a whole, of its pieces."""

    def whole(self, value: Any) -> Any:
        """What a value is now, which is made if it is not there as a whole."""
        value = super().whole(value)
        stack = [value] if value in self.postponed else []
        while stack:  # in its own loop: there may be more of them than Python's frames
            node = self.postponed.get(stack[-1])
            missing = [v for v in node.reads if v in self.postponed] if node else []
            stack += missing
            if not missing and (last := stack.pop()) in self.postponed:
                self.emit(self.postponed.pop(last))
        if value in self.split:
            (self.instead[value],) = self.add(
                self.values[value].name,
                False,
                lambda *pieces: self.joined(value, pieces),
                self.split[value],
            )
            return self.instead[value]
        return value
