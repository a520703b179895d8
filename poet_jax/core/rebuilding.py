"""Graphs made of others: of other nodes, without dead code, or inside a node."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from poet_jax.core.equation import Equation, Inner, Literal, Name
from poet_jax.core.graph import Graph, Node


def with_nodes(graph: Graph, nodes: Iterable[Node]) -> Graph:
    """`graph` with `nodes` instead of its own, and values numbered without gaps.

    What no node reads or writes is a value no more: it is `Inner` where equations name
    it.
    """
    nodes = tuple(nodes)
    used = {*graph.arguments, *graph.constants, *graph.outputs}
    for stack in graph.stacks.values():
        used.update(stack.values)
    for node in nodes:
        used.update(node.reads, node.writes)
    new = {old: number for number, old in enumerate(sorted(used))}
    names: dict[Any, Name] = {**new}
    for node in nodes:
        for equation in node.equations:
            for x in equation.results:
                names.setdefault(x, x if isinstance(x, Inner) else Inner())

    def rename(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(new[v] for v in values)

    return dataclasses.replace(
        graph,
        values=tuple(graph.values[v] for v in sorted(used)),
        nodes=tuple(
            dataclasses.replace(
                n,
                reads=rename(n.reads),
                writes=rename(n.writes),
                equations=tuple(e.renamed(names) for e in n.equations),
            )
            for n in nodes
        ),
        arguments=rename(graph.arguments),
        outputs=rename(graph.outputs),
        constants={new[v]: array for v, array in graph.constants.items()},
        donated=frozenset(rename(graph.donated)),
        references=rename(graph.references),
        stacks={
            new[v]: dataclasses.replace(
                stack,
                values=rename(stack.values),
                over=None if stack.over is None else new[stack.over],
            )
            for v, stack in graph.stacks.items()
        },
        stored={new[v]: place for v, place in graph.stored.items() if v in new},
        landing={new[v]: place for v, place in graph.landing.items() if v in new},
    )


def body(graph: Graph, names: Mapping[int, Name | Literal]) -> list[Equation]:
    """The equations of a graph, to be inside a node of another one.

    `names` are those of its arguments and outputs there; all else is `Inner`.
    """
    known: dict[Any, Any] = {v: Inner() for v in graph.constants} | dict(names)
    equations = [e for node in graph.nodes for e in node.equations]
    for equation in equations:
        for x in equation.results:
            known.setdefault(x, Inner())
    return [e.renamed(known) for e in equations]


def map_equations(graph: Graph, change: Callable[[Equation], Equation]) -> Graph:
    """`graph` with `change(equation)` in place of each equation."""
    nodes = tuple(
        dataclasses.replace(node, equations=tuple(map(change, node.equations)))
        for node in graph.nodes
    )
    return dataclasses.replace(graph, nodes=nodes)


def without_dead_code(graph: Graph) -> Graph:
    """Drop results that no output depends on, and nodes without others or effects."""
    needed = {*graph.leaving, *graph.references}
    kept = []
    for node in reversed(graph.nodes):
        writes = tuple(v for v in node.writes if v in needed)
        if not writes and not any(e.has_effect for e in node.equations):
            continue
        kept.append(dataclasses.replace(node, writes=writes))
        needed.update(node.reads)
    constants = {v: array for v, array in graph.constants.items() if v in needed}
    nodes = tuple(kept[::-1])
    return with_nodes(
        dataclasses.replace(graph, nodes=nodes, constants=constants), nodes
    )
