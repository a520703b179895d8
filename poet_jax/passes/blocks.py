"""Values that are too large, a block of their rows at a time: `Graph -> Graph`.

The logits of 2,048 tokens over 128,000 words take a gigabyte, and so do all that a loss
and its gradient make of them. But a token's loss needs the logits of that token alone.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.equation import Equation, Literal, nbytes_of
from poet_jax.core.graph import Graph, Node
from poet_jax.core.stack import Cut
from poet_jax.passes.rewriter import require_single_equations, with_all_before
from poet_jax.passes.rows import COMBINE, Way, by_indices, of_block, pulled, pushed
from poet_jax.passes.splicing import Cutter

# By default, the pass leaves smaller values alone, and values that are one of many: the
# planner keeps or rematerialises these. It leaves a graph alone if blocks save little,
# or make too many nodes for a planner.
LARGE_BYTES = 64 * 2**20
LEAST_SHARE = 1 / 8
LEAST_SAVED = 1 / 3
MOST_NODES = 10_000
BLOCKS = 16


def blockwise(
    graph: Graph, *, large_bytes: int | None = None, blocks: int = BLOCKS
) -> Graph:
    """`graph` with its largest values in blocks along one of their axes.

    It makes products of at least `large_bytes` in blocks; by default, of 64 MiB and an
    eighth of keep-all's peak. Where `large_bytes` are given and no product has so many,
    it begins with other values that are made of small ones, as under `vmap`. What is
    computed from them row by row follows: element-wise operations, reductions and
    slices along other axes, gathers and scatters within rows. Products that sum over
    the rows are added up, and so are sums that rows scatter into one array; where there
    are products, into one smaller than what it sums. Where it can, a block goes through
    all of that before the next one begins. The axis is the one along which nodes need
    least, or without products keep-all; if nodes save no third, nothing changes. Nor
    does it on several devices, where rows lie apart already.

    Sums over the axis are rounded as the sum of the sums over blocks.
    """
    seeds = _seeds(graph, large_bytes) if graph.devices == 1 else []
    if not seeds:
        return graph
    require_single_equations(graph)
    saving_bytes = _floor_bytes(graph) * (1 - LEAST_SAVED)
    need = _floor_bytes if _is_product(graph, seeds[0]) else _peak_bytes
    best, least_bytes = graph, need(graph)
    for axis, size in enumerate(graph.values[seeds[0]].shape):
        if size >= 2:
            cut = _Blocks(graph, seeds, axis, min(blocks, size)).result()
            saves = _floor_bytes(cut) < saving_bytes and len(cut.nodes) <= MOST_NODES
            if saves and (nbytes := need(cut)) < least_bytes:
                best, least_bytes = cut, nbytes
    return best


def _seeds(graph: Graph, large_bytes: int | None) -> list[int]:
    """Large products, all of one shape. If there are none and `large_bytes` are given,
    other large values that are made of small ones."""
    least_bytes = LARGE_BYTES if large_bytes is None else large_bytes
    large = [
        v
        for node in graph.nodes
        if len(node.equations) == 1 and len(node.writes) == 1
        for v in node.writes
        if graph.values[v].nbytes >= least_bytes
    ]
    products = [v for v in large if _is_product(graph, v)]
    if products or large_bytes is None:
        large = products
    else:
        large = [v for v in large if _is_of_small(graph, v)]
    if not large:
        return []
    most = max(large, key=lambda v: graph.values[v].nbytes)
    if large_bytes is None:
        if graph.values[most].nbytes < LEAST_SHARE * _peak_bytes(graph):
            return []
    shape = graph.values[most].shape
    return [v for v in large if graph.values[v].shape == shape]


def _is_product(graph: Graph, value: int) -> bool:
    (equation,) = graph.nodes[graph.producer[value]].equations
    return equation.primitive.name == "dot_general"


def _is_of_small(graph: Graph, value: int) -> bool:
    """Whether all that a large value is made of is smaller than one of its blocks."""
    node, made = graph.nodes[graph.producer[value]], graph.values[value]
    if not made.shape or pulled(node.equations[0], 0) is None:
        return False
    return all(graph.values[v].nbytes * BLOCKS < made.nbytes for v in node.reads)


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


class _Blocks(Cutter):
    def __init__(self, graph: Graph, seeds: Sequence[int], axis: int, blocks: int):
        super().__init__(graph)
        self.seeds, self.axis = set(seeds), axis
        self.is_product = _is_product(graph, seeds[0])
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
        if node.repeatable and node.writes:
            if any(a is not None for a in axes):
                way = self.pushed(equation, axes)
            elif node.writes[0] in self.seeds:
                way = pulled(equation, self.axis)
        if way is not None:
            self.cut(node, way)
        elif node.repeatable and self.is_filled(node):
            self.postponed[node.writes[0]] = node
        elif (way := self.likely(node)) is not None:
            self.cut(node, way)
        else:
            self.emit(node)

    def likely(self, node: Node) -> Way | None:
        """How a reader of postponed values with the products' rows goes by blocks."""
        rows = {
            v
            for v in node.reads
            if v in self.postponed
            and self.values[v].shape[self.axis :][:1] == (self.length,)
        }
        if not (rows and node.repeatable):
            return None
        (equation,) = node.equations
        axes = [self.axis if x in rows else None for x in equation.operands]
        return self.pushed(equation, axes)

    def pushed(self, equation: Equation, axes: Sequence[int | None]) -> Way | None:
        """How an equation goes by blocks, if its operands are cut along `axes`."""
        if (way := pushed(equation, axes)) is not None:
            return way
        way = by_indices(equation, axes)
        if way is None or way.result is not None or not self.is_product:
            return way
        # The sum goes from block to block, and so has to be less than what it sums.
        (total,), rows = equation.result_shapes, equation.operand_shapes[2]
        return way if nbytes_of(total) < nbytes_of(rows) else None

    def is_filled(self, node: Node) -> bool:
        """Whether it makes a large value of small ones, or of one that is made so."""
        if len(node.writes) != 1 or self.values[node.writes[0]].nbytes < self.least:
            return False
        made = self.values[node.writes[0]]
        if not made.shape:
            return False  # a number is as large as a block of a small column
        # A gather's rows may be of an array that is larger than a block of them.
        is_gather = node.equations[0].primitive.name == "gather"
        small = made.nbytes if is_gather else self.least
        return pulled(node.equations[0], 0) is not None and all(
            v in self.postponed or self.values[v].nbytes < small for v in node.reads
        )

    def joined(self, value: Any, pieces: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate(pieces, self.along[value])

    def part(self, value: Any, axis: int, number: int) -> int:
        """A block of a value along an axis."""
        self.fill(value, axis)
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

    def fill(self, value: Any, axis: int) -> None:
        """Make a postponed value in blocks along an axis, after its operands."""
        stack = [(value, axis)]
        while stack:
            value, axis = stack[-1]
            node = self.postponed.get(value)
            way = None if node is None else pulled(node.equations[0], axis)
            if node is None or way is None:
                stack.pop()
                continue
            before = [
                (x, a)
                for x, a in zip(node.equations[0].operands, way.operands, strict=True)
                if a is not None
                and x in self.postponed
                and pulled(self.postponed[x].equations[0], a) is not None
            ]
            if before:
                stack += before
                continue
            stack.pop()
            self.cut(self.postponed.pop(value), way)

    def cut(self, node: Node, way: Way) -> None:
        """Compute a node block by block."""
        (equation,) = node.equations
        read = [equation.results.index(v) for v in node.writes]
        is_chained = way.result is None and equation.primitive.name not in COMBINE
        blocks = []
        for number, (start, stop) in enumerate(self.bounds):
            operands = [
                x
                if isinstance(x, Literal)
                else self.whole(x)
                if axis is None
                else self.part(x, axis, number)
                for x, axis in zip(equation.operands, way.operands, strict=True)
            ]
            if is_chained and blocks:
                (operands[0],) = blocks[-1]
            block = of_block(equation, way, stop - start)
            with self.of_block(number):
                results = self.add(
                    f"{node.name}[{start}-{stop}]",
                    node.backward,
                    lambda *x, block=block: block.bind(x),
                    operands,
                    key=(equation, stop - start),
                )
            blocks.append([results[n] for n in read])
        if way.result is not None:
            for value, *pieces in zip(node.writes, *blocks, strict=True):
                self.split[value], self.along[value] = pieces, way.result
            return
        if is_chained:
            self.instead.update(zip(node.writes, blocks[-1], strict=True))
            return
        combine = COMBINE[equation.primitive.name]
        (value,), ((total,), *others) = node.writes, blocks
        for number, (other,) in enumerate(others, 1):
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
