"""Values that are too large, a block of their rows at a time: `Graph -> Graph`.

The logits of 2,048 tokens over 128,000 words take a gigabyte, and so do all that a loss
and its gradient make of them. But a token's loss needs the logits of that token alone.
"""

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.equation import Equation, Literal
from poet_jax.core.graph import Graph, Node
from poet_jax.core.stack import Cut
from poet_jax.passes.operations import ELEMENTWISE, REDUCTIONS
from poet_jax.passes.rewriter import require_single_equations, with_all_before
from poet_jax.passes.splicing import Cutter

# Unless told what is large, the pass leaves smaller values alone, and those that are
# one of many, which the planner keeps or rematerialises. It also leaves a graph alone
# that needs nearly as much in blocks, or has too many nodes for a planner then.
LARGE_BYTES = 64 * 2**20
LEAST_SHARE = 1 / 8
LEAST_SAVED = 1 / 3
MOST_NODES = 10_000
BLOCKS = 16


def _sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Of products; those of bools are sums as in logic."""
    return (lax.bitwise_or if x.dtype == bool else lax.add)(x, y)


# Operations that combine the results of blocks.
_COMBINE = {"dot_general": _sum, **REDUCTIONS}
_ALONG_AXES = frozenset(("argmax", "argmin", *REDUCTIONS))


def blockwise(
    graph: Graph, *, large_bytes: int | None = None, blocks: int = BLOCKS
) -> Graph:
    """`graph` with its largest values in blocks along one of their axes.

    It makes products of at least `large_bytes` in blocks; by default, of 64 MiB and an
    eighth of keep-all's peak. What is computed from them row by row follows:
    element-wise operations, reductions along other axes, gathers and scatters within
    rows. Products that sum over the rows are added up. Where it can, a block goes
    through all of that before the next one begins. The axis is the one along which
    nodes need least; if none saves a third, nothing changes. Nor does it on several
    devices, where rows lie apart already.

    Sums over the axis are rounded as the sum of the sums over blocks.
    """
    seeds = _seeds(graph, large_bytes) if graph.devices == 1 else []
    if not seeds:
        return graph
    require_single_equations(graph)
    best, least_bytes = graph, _floor_bytes(graph) * (1 - LEAST_SAVED)
    for axis, size in enumerate(graph.values[seeds[0]].shape):
        if size >= 2:
            cut = _Blocks(graph, seeds, axis, min(blocks, size)).result()
            nbytes = _floor_bytes(cut)
            if nbytes < least_bytes and len(cut.nodes) <= MOST_NODES:
                best, least_bytes = cut, nbytes
    return best


def _seeds(graph: Graph, large_bytes: int | None) -> list[int]:
    """Large products, all of one shape."""
    least_bytes = LARGE_BYTES if large_bytes is None else large_bytes
    large = [
        node.writes[0]
        for node in graph.nodes
        if len(node.equations) == 1
        and len(node.writes) == 1
        and graph.values[node.writes[0]].nbytes >= least_bytes
        and node.equations[0].primitive.name == "dot_general"
    ]
    if not large:
        return []
    most = max(large, key=lambda v: graph.values[v].nbytes)
    if large_bytes is None:
        if graph.values[most].nbytes < LEAST_SHARE * _peak_bytes(graph):
            return []
    shape = graph.values[most].shape
    return [v for v in large if graph.values[v].shape == shape]


def _peak_bytes(graph: Graph) -> int:
    """In RAM at once beside arguments, if every value is kept until its last read."""
    live = peak = 0
    for number, node in enumerate(graph.nodes):
        live += sum(graph.values[v].nbytes for v in node.writes)
        peak = max(peak, live)
        live -= sum(
            graph.values[v].nbytes
            for v in (*node.reads, *node.writes)
            if v in graph.producer
            and v not in graph.leaving
            and (graph.readers[v] or (number,))[-1] == number
        )
    return peak


def _floor_bytes(graph: Graph) -> int:
    """What the node with the largest operands and results needs beside arguments."""
    fixed = {*graph.arguments, *graph.constants}

    def nbytes(node: Node) -> int:
        return sum(graph.values[v].nbytes for v in {*node.reads, *node.writes} - fixed)

    return max(map(nbytes, graph.nodes), default=0)


@dataclasses.dataclass(frozen=True)
class _Way:
    """How an operation goes block by block.

    Attributes:
      operands: the axis along which each is cut; None for those read as a whole.
      result: the axis along which the result is; None for one that is combined.
    """

    operands: tuple[int | None, ...]
    result: int | None


def _pulled(equation: Equation, axis: int) -> _Way | None:
    """What a block of the result along `axis` needs, of operations that fill arrays."""
    (shape, *others) = (x.shape for x in equation.result_shapes)
    shapes = [x.shape for x in equation.operand_shapes]
    if others or equation.lowering is not None:
        return None
    name, params = equation.primitive.name, equation.params
    if name == "broadcast_in_dim":
        dimensions = [int(x) for x in params["broadcast_dimensions"]]
        own = dimensions.index(axis) if axis in dimensions else None
        is_cut = own is not None and shapes[0][own] == shape[axis]
        return _Way((own if is_cut else None,), axis)
    if name in ELEMENTWISE or name == "reduce_precision":
        return _Way(
            tuple(
                axis if len(x) == len(shape) and x[axis] == shape[axis] else None
                for x in shapes
            ),
            axis,
        )
    if name in ("scatter-add", "scatter_add"):
        return _by_rows(equation, 0, axis)
    return None


def _way(equation: Equation, axes: Sequence[int | None]) -> _Way | None:
    """How an operation goes block by block whose operands are cut along `axes`."""
    if equation.lowering is not None or len(equation.result_shapes) != 1:
        return None
    name, params = equation.primitive.name, equation.params
    shapes = [x.shape for x in equation.operand_shapes]
    ((result,), (first, axis)) = (
        [x.shape for x in equation.result_shapes],
        next((n, a) for n, a in enumerate(axes) if a is not None),
    )
    if name == "broadcast_in_dim":
        return _pulled(equation, int(params["broadcast_dimensions"][axis]))
    if name in ELEMENTWISE or name == "reduce_precision":
        return _pulled(equation, axis)
    if name in _ALONG_AXES:
        if axis in params["axes"]:
            return _Way((axis,), None) if name in _COMBINE else None
        return _Way((axis,), axis - sum(x < axis for x in params["axes"]))
    if name == "transpose":
        return _Way((axis,), params["permutation"].index(axis))
    if name == "squeeze":
        return _Way((axis,), axis - sum(x < axis for x in params["dimensions"]))
    if name == "reshape" and params["dimensions"] is None:
        before = math.prod(shapes[0][:axis])
        for other, size in enumerate(result):
            if math.prod(result[:other]) == before and size == shapes[0][axis]:
                return _Way((axis,), other)
    if name == "dot_general":
        return _product(equation, first, axis)
    if name in ("gather", "scatter-add", "scatter_add"):
        return _by_rows(equation, first, axis)
    return None


def _product(equation: Equation, first: int, axis: int) -> _Way:
    """A product of matrices one of which is cut."""
    contracted, batch = equation.params["dimension_numbers"]
    own, other = contracted[first], contracted[1 - first]

    def both(axes: int) -> tuple[int, ...]:
        return (axis, axes) if first == 0 else (axes, axis)

    if axis in own:
        return _Way(both(other[own.index(axis)]), None)
    if axis in batch[first]:
        place = batch[first].index(axis)
        return _Way(both(batch[1 - first][place]), place)
    ranks = [len(x.shape) for x in equation.operand_shapes]
    free = [x for x in range(ranks[first]) if x not in (*own, *batch[first])]
    place = len(batch[0]) + free.index(axis)
    if first == 1:
        place += ranks[0] - len(contracted[0]) - len(batch[0])
    return _Way((axis, None) if first == 0 else (None, axis), place)


def _by_rows(equation: Equation, first: int, axis: int) -> _Way | None:
    """A gather or a scatter that moves nothing from one row to another."""
    name, params = equation.primitive.name, equation.params
    numbers = params["dimension_numbers"]
    rows = numbers.operand_batching_dims
    if name == "gather":
        sides, window = numbers.start_indices_batching_dims, numbers.offset_dims
        out = len(equation.result_shapes[0].shape)
    else:
        sides, window = (
            numbers.scatter_indices_batching_dims,
            numbers.update_window_dims,
        )
        out = len(equation.operand_shapes[2].shape)
    along = [x for x in range(out) if x not in window]  # of results, or updates
    own = rows if first == 0 else sides
    if first < 2 and axis in own:
        place = own.index(axis)
        outer = along[sides[place]]
        if name == "gather":
            return _Way((rows[place], sides[place]), outer)
        return _Way((rows[place], sides[place], outer), rows[place])
    return _whole_rows(equation, first, axis)


def _whole_rows(equation: Equation, first: int, axis: int) -> _Way | None:
    """A gather or a scatter of windows that span the axis."""
    name, params = equation.primitive.name, equation.params
    numbers = params["dimension_numbers"]
    shapes = [x.shape for x in equation.operand_shapes]
    if name == "gather":
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        moved, window = numbers.start_index_map, numbers.offset_dims
        sizes = params["slice_sizes"]
    else:
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        moved, window = numbers.scatter_dims_to_operand_dims, numbers.update_window_dims
        sizes = shapes[0]
    if first == 1 or (first == 2 and axis not in window):
        return None
    kept = [x for x in range(len(shapes[0])) if x not in gone]
    inner = axis if first == 0 else kept[window.index(axis)]
    if inner not in kept or inner in moved or sizes[inner] != shapes[0][inner]:
        return None
    outer = window[kept.index(inner)]
    if name == "gather":
        return _Way((inner, None), outer)
    if shapes[2][outer] != shapes[0][inner]:
        return None
    return _Way((inner, None, outer), inner)


def _of_block(equation: Equation, way: _Way, size: int) -> Equation:
    """The operation for a block of `size` rows."""
    params, name = dict(equation.params), equation.primitive.name

    def resized(shape: Sequence[int], axis: int) -> tuple[int, ...]:
        return (*shape[:axis], size, *shape[axis + 1 :])

    if name == "broadcast_in_dim" and way.result is not None:
        params["shape"] = resized(params["shape"], way.result)
    elif name == "reshape" and way.result is not None:
        params["new_sizes"] = resized(params["new_sizes"], way.result)
    elif name == "gather" and way.operands[0] is not None:
        own = way.operands[0]
        if params["slice_sizes"][own] == equation.operand_shapes[0].shape[own] != 1:
            params["slice_sizes"] = resized(params["slice_sizes"], own)
    elif name == "dot_general" and way.result is None:
        params["preferred_element_type"] = _summed_as(equation.result_shapes[0].dtype)
    return dataclasses.replace(equation, params=params)


def _summed_as(dtype: Any) -> Any:
    """In what blocks are added up: as in one product, halves are rounded once."""
    is_half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if is_half else dtype


class _Blocks(Cutter):
    def __init__(self, graph: Graph, seeds: Sequence[int], axis: int, blocks: int):
        super().__init__(graph)
        self.seeds, self.axis = set(seeds), axis
        self.length = graph.values[seeds[0]].shape[axis]
        self.bounds = Cut.of(self.length, blocks).bounds
        # Bytes of a block: values as large as that are not kept whole.
        self.least = graph.values[seeds[0]].nbytes // len(self.bounds)
        self.along: dict[Any, int] = {}  # of each value in blocks, the axis
        self.slices: dict[tuple[int, int, int], int] = {}
        self.block: dict[int, int] = {}  # of each new node of a block, its number

    def visit(self, node: Node) -> None:
        (equation,) = node.equations
        axes = [self.along.get(x) for x in equation.operands]
        way = None
        if node.repeatable and len(node.writes) == 1:
            if any(a is not None for a in axes):
                way = _way(equation, axes)
            elif node.writes[0] in self.seeds:
                way = self.seeded(equation)
        if way is not None:
            self.cut(node, way)
        elif node.repeatable and self.is_filled(node):
            self.postponed[node.writes[0]] = node
        else:
            self.emit(node)

    def seeded(self, equation: Equation) -> _Way | None:
        """The way that gives a product in blocks of `axis`."""
        for first, shape in enumerate(equation.operand_shapes):
            for axis in range(len(shape.shape)):
                way = _product(equation, first, axis)
                if way.result == self.axis:
                    return way
        return None

    def is_filled(self, node: Node) -> bool:
        """Whether it makes a large value of small ones, or of one that is made so."""
        if len(node.writes) != 1 or self.values[node.writes[0]].nbytes < self.least:
            return False
        return _pulled(node.equations[0], 0) is not None and all(
            v in self.postponed or self.values[v].nbytes < self.least
            for v in node.reads
        )

    def joined(self, value: Any, pieces: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate(pieces, self.along[value])

    def part(self, value: Any, axis: int, number: int) -> int:
        """A block of a value along an axis."""
        if value in self.postponed:
            node = self.postponed[value]
            if (way := _pulled(node.equations[0], axis)) is not None:
                del self.postponed[value]
                return self.cut(node, way)[number]
        if self.along.get(value) == axis:
            return self.split[value][number]
        whole = self.whole(value)
        key = whole, axis, number
        if key not in self.slices:
            start, stop = self.bounds[number]
            with self.of_block(number):
                (self.slices[key],) = self.add(
                    f"{self.values[whole].name}[{start}-{stop}]",
                    False,
                    lambda x: lax.slice_in_dim(x, start, stop, axis=axis),
                    [whole],
                )
        return self.slices[key]

    def cut(self, node: Node, way: _Way) -> list[int]:
        """Compute a node block by block."""
        (equation,), (value,) = node.equations, node.writes
        results = []
        for number, (start, stop) in enumerate(self.bounds):
            operands = [
                x
                if isinstance(x, Literal)
                else self.whole(x)
                if axis is None
                else self.part(x, axis, number)
                for x, axis in zip(equation.operands, way.operands, strict=True)
            ]
            block = _of_block(equation, way, stop - start)
            with self.of_block(number):
                results += self.add(
                    f"{node.name}[{start}-{stop}]",
                    node.backward,
                    lambda *x, block=block: block.bind(x)[0],
                    operands,
                    key=(equation, stop - start),
                )
        if way.result is not None:
            self.split[value], self.along[value] = results, way.result
            return results
        combine = _COMBINE[equation.primitive.name]
        total, *others = results
        for number, other in enumerate(others, 1):
            with self.of_block(number):
                (total,) = self.add(
                    node.name, node.backward, combine, [total, other], key=(equation,)
                )
        dtype = equation.result_shapes[0].dtype
        if self.values[total].dtype != dtype:
            (total,) = self.add(
                node.name, node.backward, lambda x: x.astype(dtype), [total]
            )
        self.instead[value] = total
        return results

    @contextlib.contextmanager
    def of_block(self, number: int) -> Iterator[None]:
        """Nodes that are added meanwhile belong to a block."""
        first = len(self.nodes)
        yield
        self.block.update(dict.fromkeys(range(first, len(self.nodes)), number))

    def ordered(self) -> Iterator[Node]:
        """The nodes, a block after the other as far as they depend on no later one."""
        made = {v: n for n, node in enumerate(self.nodes) for v in node.writes}
        before = {
            number: [made[v] for v in node.reads if v in made]
            for number, node in enumerate(self.nodes)
        }
        done: set[int] = set()
        for number in range(len(self.nodes)):
            if number in self.block and number not in done:
                for ready in self.ready(before, done):
                    for n in with_all_before(ready, before, done):
                        yield self.nodes[n]
            for n in with_all_before(number, before, done):
                yield self.nodes[n]

    def ready(
        self, before: Mapping[int, Sequence[int]], done: Collection[int]
    ) -> list[int]:
        """Nodes of blocks that need no later block, block by block."""
        latest: list[int] = []
        for number, nodes in before.items():
            own = -1 if number in done else self.block.get(number, -1)
            latest.append(max((own, *(latest[n] for n in nodes if n not in done))))
        ready = [
            number
            for number, block in self.block.items()
            if number not in done and latest[number] == block
        ]
        return sorted(ready, key=lambda number: (self.block[number], number))
