"""What a node needs in C besides what it reads and writes."""

import dataclasses

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph, Node
from poet_jax.core.in_place import Pairs, replaceable
from poet_jax.core.program import Program
from poet_jax.emit.c99.buffers import Buffer, Step, Unsupported, needed
from poet_jax.emit.c99.expanding import expanded
from poet_jax.emit.c99.nodes import lower_node
from poet_jax.emit.c99.offsets import alive
from poet_jax.emit.c99.programs import RULES, unsupported


def in_c(graph: Graph, costs: Costs) -> Costs:
    """`costs` with the workspace of C in place of XLA's, where C has the operations.

    XLA's convolutions copy operands to other layouts, for example, and those of C read
    them where they lie.
    """
    if any(not node.equations for node in graph.nodes):
        return costs
    inside = expanded(Program(graph, ())).graph
    if unsupported(Program(inside, ())):
        return costs
    over = replaceable(graph)
    workspaces = np.array(
        [
            _workspace_bytes(inside, x, o)
            for x, o in zip(inside.nodes, over, strict=True)
        ],
        np.int64,
    )
    return dataclasses.replace(costs, workspace_bytes=workspaces)


def _workspace_bytes(graph: Graph, node: Node, over: Pairs) -> int:
    """Most bytes of inner arrays at once, less those of results that are not written
    by then. Arrays that only save work are left out, as they are where RAM is short.
    """
    values = [graph.values[v] for v in node.reads]
    buffers = [Buffer(x.name, x.shape, x.dtype.name) for x in values]
    known = dict(zip(node.reads, buffers, strict=True))
    inner = {x for equation in node.equations for x in equation.results}
    try:
        lowering = lower_node(node.equations, known, node.writes, (), 0, inner, RULES)
    except Unsupported:  # which `emit.c` says by name
        return 0
    found = (lowering.where[v] for v in node.writes)
    results = {x for x in found if isinstance(x, Buffer)}
    steps = needed(lowering.steps, results)
    spans = {x: span for x, span in alive(steps).items() if x not in buffers}
    live = np.zeros(len(steps) + 1, np.int64)
    for buffer, (first, last) in spans.items():
        live[first] += buffer.nbytes
        live[len(steps) if buffer in results else last + 1] -= buffer.nbytes
    written = sum(x.nbytes for x in results if x in spans)
    # Operands that the plan writes over, but that C reads after it begins to write.
    read, made = alive([Step((), tuple(buffers), lambda p: []), *steps]), spans
    allowed = {pair for step in steps for pair in step.over}
    apart = 0
    for old, new in over:
        a, b = known[old], lowering.where[new]
        if b in made and read[a][1] - 1 >= made[b][0] and (a, b) not in allowed:
            apart += a.nbytes
    return max(0, int(live.cumsum().max(initial=0)) - written) + apart
