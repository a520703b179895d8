"""What a node of several devices needs of the others' shards."""

import math
from collections.abc import Sequence

from poet_jax.core.equation import Equation
from poet_jax.core.graph import Graph, Node, Value


def gathered_bytes(graph: Graph, node: Node) -> int:
    """Room for what each device gathers of operands that lie apart.

    For its shard of a product, a device needs the matching rows and columns of the
    operands. Along summed axes it needs all of them, unless both operands are cut alike
    there: then each device sums its part, and the sums are added.
    """
    return sum(
        _gathered_bytes(graph, equation)
        for equation in node.equations
        if equation.primitive.name == "dot_general"
    )


def _gathered_bytes(graph: Graph, product: Equation) -> int:
    known = [
        graph.values[x] if isinstance(x, int) else None
        for x in (*product.operands, *product.results)
    ]
    left, right, result = known
    (left_sums, right_sums), (left_batch, right_batch) = product.params[
        "dimension_numbers"
    ]
    batch = len(left_batch)
    free = len(product.result_shapes[0].shape) - batch
    left_free = len(product.operand_shapes[0].shape) - batch - len(left_sums)
    total = 0
    for value, other, sums, others, own_batch, first in (
        (left, right, left_sums, right_sums, left_batch, 0),
        (right, left, right_sums, left_sums, right_batch, left_free),
    ):
        if value is None or value.sharding is None:
            continue
        own, there = _fractions(value), None if other is None else _fractions(other)
        needed = list(own)
        for axis, across in zip(sums, others, strict=True):
            alike = there is not None and there[across] == own[axis]
            needed[axis] = own[axis] if alike else 1.0
        if result is not None:
            of_result = _fractions(result)
            rest = [n for n in range(len(own)) if n not in (*sums, *own_batch)]
            places = [*range(batch), *range(batch + first, batch + free)]
            for axis, place in zip((*own_batch, *rest), places, strict=False):
                needed[axis] = of_result[place]
        share = math.prod(needed)
        if share > math.prod(own):
            total += int(math.prod(value.shape) * share) * value.dtype.itemsize
    return total


def _fractions(value: Value) -> Sequence[float]:
    """Of each axis, how much of it the largest shard has."""
    pairs = zip(value.shard_shape, value.shape, strict=True)
    return [shard / whole if whole else 1.0 for shard, whole in pairs]
