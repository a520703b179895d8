"""Common subexpressions are computed once.

XLA merges equal operations of a whole program, but keeps stages apart. A function that
evaluates its model twice, for the loss and for a metric, or for a gradient and for what
is derived from it, would compute twice what it computes once under `jax.jit`.
"""

from typing import Any

from poet_jax.core.equation import Literal
from poet_jax.core.graph import Graph, Node
from poet_jax.core.rebuilding import with_nodes

# In the names of nodes that `jax.checkpoint` asks to compute again.
RECOMPUTED = "rematted_computation"


def cse(graph: Graph) -> Graph:
    """`graph`, of single equations, without those that repeat an earlier one.

    What `jax.checkpoint` or an `optimization_barrier` sets apart stays apart. So does
    what depends on no argument, as a mask: to keep it may cost more than to make it.
    """
    found = _Found(graph)
    nodes = [node for node in map(found.visit, graph.nodes) if node is not None]
    return graph if len(nodes) == len(graph.nodes) else with_nodes(graph, nodes)


class _Found:
    """What was computed so far.

    Attributes:
      first: the values that an equation writes, by all that they depend on.
      same: the first value that is equal, of each value that is not computed again.
      varying: values that depend on an argument.
    """

    def __init__(self, graph: Graph):
        self.first: dict[Any, tuple[int, ...]] = {}
        self.same: dict[int, int] = {}
        self.varying = {x for v in graph.arguments for x in graph.pieces(v)}
        self.leaving = set(graph.leaving)

    def visit(self, node: Node) -> Node | None:
        """`node`, reading the first of equal values; None if it repeats another."""
        node = node.renamed(self.same)
        if self.varying.isdisjoint(node.reads):
            return node
        self.varying.update(node.writes)
        key = _key(node)
        if key is None:
            return node
        if key not in self.first:
            self.first[key] = node.writes
        elif self.leaving.isdisjoint(node.writes):  # each result is an array of its own
            self.same.update(zip(node.writes, self.first[key], strict=True))
            return None
        return node


def _key(node: Node) -> Any:
    """Equal for nodes that compute the same; None for one that is to stay."""
    if len(node.equations) != 1 or not node.repeatable or RECOMPUTED in node.name:
        return None
    (equation,) = node.equations
    if equation.primitive.name == "optimization_barrier":
        return None
    try:
        params = frozenset(equation.params.items())
    except TypeError:  # one has no hash
        return None
    return (
        equation.primitive,
        params,
        tuple(x.key if isinstance(x, Literal) else x for x in equation.operands),
        tuple(equation.results.index(v) for v in node.writes),
        equation.context,
    )
