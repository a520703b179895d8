"""Arrays that are another one read in another order, for C: `Graph -> Graph`."""

import dataclasses

from poet_jax.core.graph import Graph, Node

# What C reads with strides, which may be negative.
VIEWS = frozenset(["rev", "transpose"])


def views_at_use(graph: Graph) -> Graph:
    """`graph` with reversed and transposed values made in the nodes that read them.

    A gradient with respect to the input of a convolution reads its kernel reversed. A
    program of C reads the kernel itself then, where XLA would write another array.
    """
    nodes: list[Node | None] = list(graph.nodes)
    for number, node in enumerate(graph.nodes):
        if not _is_view(graph, node):
            continue
        for reader in graph.readers[node.writes[0]]:
            old = nodes[reader]
            assert old is not None, "what reads a view is after it"
            equations = (*node.equations, *old.equations)
            nodes[reader] = Node.of(old.name, equations, old.writes, old.backward)
        nodes[number] = None
    return dataclasses.replace(graph, nodes=tuple(x for x in nodes if x is not None))


def _is_view(graph: Graph, node: Node) -> bool:
    return (
        node.repeatable
        and len(node.reads) == len(node.writes) == 1
        and {x.primitive.name for x in node.equations} <= VIEWS
        and bool(node.equations)
        and all(x.lowering is None for x in node.equations)
        and graph.leaving.isdisjoint(node.writes)
    )
