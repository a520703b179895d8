"""Large updates of state on storage, one block of rows at a time: `Graph -> Graph`.

The update of a table of 94 MB reads it, its gradient and its moments and writes all but
the gradient again: 650 MB at once, or a few megabytes if it goes from block to block.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.extend.core.primitives as jex

from poet_jax.graph import Equation, Graph, Literal, Node, Place, Value
from poet_jax.paged import row_blocks

# Equations whose parameters hold no shape, and whose results at an index depend on
# their operands at that index alone.
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp "
    "convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp "
    "exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max "
    "min mul ne neg nextafter not or pow real rem round rsqrt select_n sign sin sinh "
    "sqrt square stop_gradient sub tan tanh xor".split()
)


def stream(graph: Graph) -> Graph:
    """`graph` with elementwise updates of stored arrays in blocks of their rows.

    A node is cut into one for each row block if what it writes besides scalars is
    large, lands on storage and is read by nobody. It reads the blocks of what is on
    storage, too, and rows of what is whole in RAM. Results are those of the node, to
    the bit.
    """
    return _Streamer(graph).result() if graph.landing else graph


class _Streamer:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.values = list(graph.values)
        self.stored = dict(graph.stored)
        self.landing = dict(graph.landing)
        self.parts: dict[tuple[int, int], int] = {}  # (stored value, block)

    def result(self) -> Graph:
        nodes: list[Node] = []
        for node in self.graph.nodes:
            nodes.extend(self.blocks(node) if self.is_streamed(node) else [node])
        return dataclasses.replace(
            self.graph,
            values=tuple(self.values),
            nodes=tuple(nodes),
            stored=self.stored,
            landing=self.landing,
        )

    def is_streamed(self, node: Node) -> bool:
        large = self.large(node)
        if not (large and node.repeatable):
            return False
        shape, rows = self.values[large[0]].shape, self._rows(large[0])
        unread = all(
            v in self.graph.landing
            and not self.graph.readers[v]
            and self.graph.outputs.count(v) == 1
            and self._rows(v) == rows
            for v in large
        )
        own = {n for n, v in enumerate(node.reads) if v not in self.graph.stored}
        return (
            unread
            and len(rows) > 1
            and all(_is_by_rows(x, shape, own) for x in node.equations)
        )

    def large(self, node: Node) -> list[int]:
        """What it writes besides scalars."""
        return [v for v in node.writes if self.values[v].shape]

    def _rows(self, value: int) -> list[slice]:
        return row_blocks(self.values[value].shape, self.values[value].dtype)

    def blocks(self, node: Node) -> Iterator[Node]:
        """The node for one row block after the other."""
        large = self.large(node)
        for number, block in enumerate(self._rows(large[0])):
            yield self.block(node, self.values[large[0]].shape, number, block)
        for value in large:
            del self.landing[value]

    def block(self, node: Node, shape: tuple, number: int, rows: slice) -> Node:
        part_shape = (rows.stop - rows.start, *shape[1:])
        reads = list(node.reads)
        equations: list[Equation] = []
        local = itertools.count(
            1 + max((x for e in node.equations for x in e.results), default=0)
        )
        sliced: dict[tuple[int, int], int] = {}  # (operand, dimension): local number

        def part_of(operand: int, dimension: int) -> int:
            """The rows of an operand, along one of its dimensions."""
            if operand >= len(node.reads):
                return operand  # made here, of the block's shape
            value = node.reads[operand]
            if dimension == 0 and self.has_block(value, number, rows):
                reads[operand] = self.part(value, number, part_shape)
                return operand
            if (operand, dimension) not in sliced:
                sliced[operand, dimension] = next(local)
                equations.append(
                    _slice(
                        operand,
                        sliced[operand, dimension],
                        self.values[value],
                        rows,
                        dimension,
                    )
                )
            return sliced[operand, dimension]

        for equation in node.equations:
            operands = []
            for x, described in zip(
                equation.operands, equation.operand_shapes, strict=True
            ):
                if described.shape and not isinstance(x, Literal):
                    x = part_of(x, _dimension(equation))
                operands.append(x)
            equations.append(_for_rows(equation, shape, part_shape, operands))
        outputs, writes = [], []
        for value, output in zip(node.writes, node.outputs, strict=True):
            if self.values[value].shape:
                place = self.graph.landing[value]
                writes.append(self.new(value, number, part_shape))
                self.landing[writes[-1]] = Place(place.leaf, number)
            elif number == 0:
                writes.append(value)
            else:
                continue  # a scalar, which the first block gives
            outputs.append(output)
        return dataclasses.replace(
            node,
            name=f"{node.name}[{rows.start}:{rows.stop}]",
            reads=tuple(reads),
            writes=tuple(writes),
            outputs=tuple(outputs),
            equations=tuple(equations),
        )

    def has_block(self, value: int, number: int, rows: slice) -> bool:
        """Whether exactly these rows of a value are a block on storage."""
        blocks = self._rows(value)
        return (
            value in self.graph.stored
            and number < len(blocks)
            and blocks[number] == rows
        )

    def part(self, value: int, number: int, shape: tuple) -> int:
        """A row block of a stored value, as a value of its own."""
        if (value, number) not in self.parts:
            part = self.new(value, number, shape)
            self.parts[value, number] = part
            self.stored[part] = Place(self.graph.stored[value].leaf, number)
        return self.parts[value, number]

    def new(self, value: int, number: int, shape: tuple) -> int:
        whole = self.values[value]
        nbytes = whole.nbytes // whole.shape[0] * shape[0]
        name = f"{whole.name}[{number}]"
        self.values.append(
            dataclasses.replace(whole, name=name, nbytes=nbytes, shape=shape)
        )
        return len(self.values) - 1


def _is_by_rows(equation: Equation, shape: tuple[int, ...], own: set[int]) -> bool:
    """Whether its results are of `shape` or scalars, and made index by index.

    `own` holds the numbers of what its node reads in RAM, which may also be transposed.
    """
    shapes = {x.shape for x in equation.result_shapes}
    if equation.lowering is not None or not shapes <= {shape, ()}:
        return False
    name = equation.primitive.name
    operands = {x.shape for x in equation.operand_shapes}
    if name == "transpose":
        return equation.operands[0] in own and shapes == {shape}
    return name in {*ELEMENTWISE, "broadcast_in_dim"} and operands <= {shape, ()}


def _dimension(equation: Equation) -> int:
    """The dimension of its operands that becomes the rows of its results."""
    if equation.primitive.name == "transpose":
        return equation.params["permutation"][0]
    return 0


def _for_rows(
    equation: Equation, shape: tuple, part_shape: tuple, operands: list
) -> Equation:
    """The equation over a block of rows, of other operands."""

    def cut(described: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if described.shape != shape:
            return described
        return jax.ShapeDtypeStruct(part_shape, described.dtype)

    params = equation.params
    if params.get("shape") == shape:
        params = params | {"shape": part_shape}
    return dataclasses.replace(
        equation,
        params=params,
        operands=tuple(operands),
        operand_shapes=tuple(map(cut, equation.operand_shapes)),
        result_shapes=tuple(map(cut, equation.result_shapes)),
    )


def _slice(
    operand: int, result: int, described: Value, rows: slice, dimension: int
) -> Equation:
    """Rows of a local operand, along a dimension, as another local value."""
    whole = jax.ShapeDtypeStruct(described.shape, described.dtype)
    starts, limits = [0] * len(whole.shape), list(whole.shape)
    starts[dimension], limits[dimension] = rows.start, rows.stop
    sizes = (stop - start for start, stop in zip(starts, limits, strict=True))
    return Equation(
        jex.slice_p,
        {
            "start_indices": tuple(starts),
            "limit_indices": tuple(limits),
            "strides": None,
        },
        (operand,),
        (result,),
        (whole,),
        (jax.ShapeDtypeStruct(tuple(sizes), whole.dtype),),
    )
