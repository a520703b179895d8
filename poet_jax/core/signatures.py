"""Which nodes compute the same, and so take equally long."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from poet_jax.core.equation import Literal
from poet_jax.core.graph import Graph, Node


def node_form(node: Node) -> Any:
    """Equal for nodes that differ in names alone, as those of equal layers of a loop.

    It compares parameters and shapes by identity, which copies of an equation share, so
    it is for nodes that are there at the same time.
    """
    places: dict[Any, int] = {}

    def placed(names: Iterable[Any]) -> tuple[int, ...]:
        return tuple(
            -1 if isinstance(x, Literal) else places.setdefault(x, len(places))
            for x in names
        )

    equations = tuple(
        (
            e.primitive,
            id(e.params),
            id(e.operand_shapes),
            id(e.result_shapes),
            id(e.lowering),
            placed(e.operands),
            placed(e.results),
        )
        for e in node.equations
    )
    # A graph that was not traced has no equations, and nodes of any size.
    return equations and (equations, placed(node.writes)) or id(node)


def node_signature(graph: Graph, node: Node) -> str:
    """A hash of a node's operations and shapes, the same in every process.

    Nodes with equal signatures take equally long; names and constants do not count.
    """
    reads = [(graph.values[v].shape, str(graph.values[v].dtype)) for v in node.reads]
    places: dict[Any, int] = {}

    def place(x: Any) -> int | str:
        if isinstance(x, Literal):
            return "constant"
        return places.setdefault(x, len(places))

    list(map(place, node.reads))
    equations = [
        (*e.operation, list(map(place, e.operands)), list(map(place, e.results)))
        for e in node.equations
    ]
    # A graph that was not traced has neither shapes nor equations.
    name = "" if equations else node.name
    data = json.dumps([name, reads, equations, list(map(place, node.writes))])
    return hashlib.sha256(data.encode()).hexdigest()[:16]
