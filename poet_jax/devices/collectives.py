"""What the nodes of a step on several devices need of each other's shards.

For its shard of a product, a device needs the matching rows and columns of the
operands. Along summed axes it needs all of them, unless both operands are cut alike
there: then each device sums its part, and the sums are added. In the body of a
`shard_map`, collectives say what is exchanged.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from poet_jax.core.equation import Equation, nbytes_of, unrolled
from poet_jax.core.graph import Graph, Node, Value


def gathered_bytes(graph: Graph, node: Node) -> int:
    """Room for what each device gathers of operands that lie apart."""
    return sum(
        operand.nbytes(operand.needed)
        for product in _products(graph, node)
        for operand in product
        if operand.is_gathered
    )


def received_bytes(graph: Graph, node: Node) -> int:
    """What each device receives: the parts of operands that it lacks, and for sums of
    parts those of the others.

    Of n devices that have parts of a sum, each receives (n - 1) / n of it where the
    result is cut (a reduce-scatter), and twice that where it is whole (an all-reduce),
    as around a ring (Patarasuk and Yuan, JPDC 2009).
    """
    total = sum(
        _exchanged_bytes(inner, equation.params["mesh"]) * runs
        for equation in node.equations
        if equation.primitive.name == "shard_map"
        for inner, runs in unrolled([equation])
    )
    for left, right in _products(graph, node):
        for operand in (left, right):
            if operand.is_gathered:
                total += operand.nbytes(operand.needed) - operand.nbytes(operand.own)
        parts, result = round(1 / left.summed), left.result
        if parts > 1 and result is not None:
            whole = left.kept * right.kept * result.dtype.itemsize
            is_cut = math.prod(result.shard_shape) * result.dtype.itemsize < whole
            total += int((1 if is_cut else 2) * whole * (parts - 1) / parts)
    return total


def _exchanged_bytes(equation: Equation, mesh: Any) -> int:
    """What each device receives in a collective, around a ring of n devices; 0 for any
    other equation."""
    params = equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    n = math.prod(mesh.shape.get(axis, 1) for axis in axes)
    given, made = (
        sum(map(nbytes_of, shapes))
        for shapes in (equation.operand_shapes, equation.result_shapes)
    )
    match equation.primitive.name.removesuffix("_invariant"):
        case "psum" | "pmax" | "pmin":
            return 2 * given * (n - 1) // n
        case "all_gather" | "all_to_all":
            return made * (n - 1) // n
        case "reduce_scatter":
            return given * (n - 1) // n
        case "ppermute":
            return given
    return 0


@dataclasses.dataclass(frozen=True)
class _Operand:
    """Of a product.

    Attributes:
      value: the array; None for a literal.
      own, needed: of each axis, how much a device has and needs.
      summed: how much of the summed axes it adds up, of those that are cut alike.
      kept: elements along the axes that a device keeps of it in the product.
      result: of the product; None if it is not a value of the graph.
    """

    value: Value | None
    own: Sequence[float]
    needed: Sequence[float]
    summed: float
    kept: float
    result: Value | None

    @property
    def is_gathered(self) -> bool:
        return math.prod(self.needed) > math.prod(self.own)

    def nbytes(self, share: Sequence[float]) -> int:
        assert self.value is not None
        return int(nbytes_of(self.value) * math.prod(share))


def _products(graph: Graph, node: Node) -> Iterator[tuple[_Operand, _Operand]]:
    for equation in node.equations:
        if equation.primitive.name == "dot_general":
            yield _product(graph, equation)


def _product(graph: Graph, product: Equation) -> tuple[_Operand, _Operand]:
    known = [
        graph.values[x] if isinstance(x, int) else None
        for x in (*product.operands, *product.results)
    ]
    left, right, result = known
    sums, batches = product.params["dimension_numbers"]
    shapes = [x.shape for x in product.operand_shapes]
    batch = len(batches[0])
    free = len(product.result_shapes[0].shape) - batch
    left_free = len(shapes[0]) - batch - len(sums[0])
    owns = [
        _fractions(x, shape) for x, shape in zip((left, right), shapes, strict=True)
    ]
    operands = []
    for side, first in ((0, 0), (1, left_free)):
        own, other, shape = owns[side], owns[1 - side], shapes[side]
        needed, summed = list(own), 1.0
        for axis, across in zip(sums[side], sums[1 - side], strict=True):
            alike = known[1 - side] is not None and other[across] == own[axis]
            needed[axis] = own[axis] if alike else 1.0
            summed *= needed[axis]
        rest = [n for n in range(len(own)) if n not in (*sums[side], *batches[side])]
        if result is not None:
            of_result = _fractions(result, result.shape)
            places = [*range(batch), *range(batch + first, batch + free)]
            for axis, place in zip((*batches[side], *rest), places, strict=False):
                needed[axis] = of_result[place]
        axes = [*rest, *batches[side]] if side == 0 else rest
        kept = math.prod(own[n] * shape[n] for n in axes)
        operands.append(_Operand(known[side], own, needed, summed, kept, result))
    return operands[0], operands[1]


def _fractions(value: Value | None, shape: Sequence[int]) -> Sequence[float]:
    """Of each axis, how much of it the largest shard has."""
    if value is None:
        return [1.0] * len(shape)
    pairs = zip(value.shard_shape, value.shape, strict=True)
    return [shard / whole if whole else 1.0 for shard, whole in pairs]
