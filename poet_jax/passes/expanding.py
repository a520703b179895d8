"""What expands arguments is computed anew wherever it is read.

A quantized kernel is the example: decoded it is several times as large as its codes,
which are in RAM anyway, and the backward pass reads it again. A plan could repeat the
decoding, but keep-all would hold every decoded kernel at the end of the forward pass.
"""

import dataclasses

from poet_jax.core.equation import Inner, Name
from poet_jax.core.graph import Graph, Node
from poet_jax.core.rebuilding import with_nodes
from poet_jax.passes.grouping import TINY_BYTES
from poet_jax.passes.operations import is_light

EXPANDED = 2  # times the bytes that are read


def expand_at_use(graph: Graph) -> Graph:
    """`graph`, of `group`, with a node of its own for each reader of what expands
    arguments.

    That is one value, of at least twice the bytes of the arguments and constants that
    it is computed from, by loops over these. A plan does not count the copies as
    rematerialised.
    """
    values, nodes = list(graph.values), []
    for number, node in enumerate(graph.nodes):
        names: dict[Name, int] = {}
        for value in node.reads:
            maker = graph.producer.get(value)
            if maker is None or number == graph.readers[value][0]:
                continue
            if _expands(graph, graph.nodes[maker]):
                names[value] = len(values)
                values.append(values[value])
                nodes.append(_copy(graph.nodes[maker], names[value], node.backward))
        nodes.append(node.renamed(names))
    if len(values) == len(graph.values):
        return graph
    return with_nodes(dataclasses.replace(graph, values=tuple(values)), nodes)


def _expands(graph: Graph, node: Node) -> bool:
    """Whether a node makes one large value of arguments and constants, in loops."""
    if len(node.writes) > 1 or not is_light(node):
        return False
    if not graph.producer.keys().isdisjoint(node.reads):
        return False
    if graph.leaving.intersection(node.writes):
        return False
    made, read = (
        sum(graph.values[v].nbytes for v in some) for some in (node.writes, node.reads)
    )
    return made > TINY_BYTES and made >= EXPANDED * read


def _copy(node: Node, written: int, backward: bool) -> Node:
    """`node` with another value in place of the one that it writes."""
    names: dict[Name, Name] = {
        x: Inner() for equation in node.equations for x in equation.results
    }
    names[node.writes[0]] = written
    return dataclasses.replace(node.renamed(names), backward=backward)
