"""Large state on storage, one block of rows at a time: `Graph -> Graph`.

The update of a table of 94 MB reads it, its gradient and its moments and writes all but
the gradient again: 650 MB at once, or a few megabytes if it goes from block to block.
An embedding gathers rows of such a table, and its gradient is a scatter to rows: both
need no more than a block either.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.equation import Equation, Literal, Name
from poet_jax.core.graph import Graph, Node, Place
from poet_jax.core.rebuilding import body
from poet_jax.core.trace import trace
from poet_jax.passes.operations import ELEMENTWISE
from poet_jax.stores.paged import BLOCK_BYTES, row_blocks

# What may happen to indices out of bounds, so that blocks can do the same.
_GATHER_MODES = (
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.FILL_OR_DROP,
)
_SCATTER_MODES = (
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    lax.GatherScatterMode.FILL_OR_DROP,
)


def stream_state(graph: Graph, most_bytes: int = BLOCK_BYTES) -> Graph:
    """`graph` with large arrays on storage read and written in blocks of their rows,
    of about `most_bytes`. A `PagedArray` has blocks of the default.

    - An elementwise update becomes a node for each row block if what it writes besides
      scalars is large, lands on storage and is read by nobody. It reads the blocks of
      what is on storage, too, and rows of what is whole in RAM.
    - A scatter to rows that only such an update reads, as is the gradient of an
      embedding, is part of it: each block takes what falls into its rows.
    - A gather of rows goes from block to block if nothing needs the whole array.

    Results are those of the nodes, to the bit.
    """
    if not (graph.stored or graph.landing):
        return graph
    return _Streamer(graph, most_bytes).result()


class _Streamer:
    def __init__(self, graph: Graph, most_bytes: int):
        self.graph, self.most_bytes = graph, most_bytes
        self.values = list(graph.values)
        self.stored = dict(graph.stored)
        self.landing = dict(graph.landing)
        self.parts: dict[tuple[int, int], int] = {}  # (stored value, block)

    def result(self) -> Graph:
        updates, within = self.updates()
        gathers = self.gathers(updates)
        nodes: list[Node] = []
        for number, node in enumerate(self.graph.nodes):
            if number in updates:
                nodes.extend(self.update_blocks(updates[number]))
            elif number in gathers:
                nodes.extend(self.gather_blocks(node))
            elif number not in within:
                nodes.append(node)
        return dataclasses.replace(
            self.graph,
            values=tuple(self.values),
            nodes=tuple(nodes),
            stored=self.stored,
            landing=self.landing,
        )

    def updates(self) -> tuple[dict[int, Node], set[int]]:
        """Updates by number, with their scatters; and numbers of these scatters."""
        updates: dict[int, Node] = {}
        within: set[int] = set()
        for number, node in enumerate(self.graph.nodes):
            joined, scatters = node, []
            for value in node.reads:
                if self.is_own_scatter(value, number):
                    scatters.append(self.graph.producer[value])
                    joined = _joined(self.graph.nodes[scatters[-1]], joined)
            if scatters and self.is_update(joined):
                updates[number] = joined
                within.update(scatters)
            elif self.is_update(node):
                updates[number] = node
        return updates, within

    def is_own_scatter(self, value: int, reader: int) -> bool:
        """Whether a scatter to rows makes `value`, and for this reader only."""
        number = self.graph.producer.get(value)
        if number is None or value in self.graph.outputs:
            return False
        node = self.graph.nodes[number]
        return (
            self.graph.readers[value] == (reader,)
            and node.writes == (value,)
            and node.repeatable
            and bool(node.equations)
            and _is_row_scatter(node.equations[-1])
            and node.equations[-1].results == node.writes
        )

    def is_update(self, node: Node) -> bool:
        large = self.large(node)
        lands = self.graph.landing.keys() >= set(large)  # as no key does
        if not (large and lands and node.repeatable):
            return False
        shape, rows = self.values[large[0]].shape, self._rows(large[0])
        unread = all(
            not self.graph.readers[v]
            and self.graph.outputs.count(v) == 1
            and self.values[v].shape == shape
            and self._rows(v) == rows
            for v in large
        )
        own = set(node.reads) - self.graph.stored.keys()
        return (
            unread
            and len(rows) > 1
            and all(_is_by_rows(x, shape, own) for x in node.equations)
        )

    def large(self, node: Node) -> list[int]:
        """What it writes besides scalars."""
        return [v for v in node.writes if self.values[v].shape]

    def _rows(self, value: int) -> list[slice]:
        return row_blocks(*self.values[value].kind, self.most_bytes)

    def gathers(self, updates: dict[int, Node]) -> set[int]:
        """Numbers of gathers from arrays whose readers all go block by block."""
        tables: dict[int, int] = {}
        for number, node in enumerate(self.graph.nodes):
            table = _gathered_from(node)
            if table in self.graph.stored and len(self._rows(table)) > 1:
                tables[number] = table
        return {
            number
            for number, table in tables.items()
            if all(
                reader in updates
                and self._rows(table) == self._rows(self.large(updates[reader])[0])
                or tables.get(reader) == table
                for reader in self.graph.readers[table]
            )
        }

    def gather_blocks(self, node: Node) -> Iterator[Node]:
        """The gather from one row block after the other.

        Each also takes what is beyond its rows, from wherever, which the next corrects.
        """
        table, (result,) = _gathered_from(node), node.writes
        assert table is not None
        place, equation = node.reads.index(table), node.equations[-1]
        indexing = dataclasses.replace(
            node, equations=node.equations[:-1], writes=equation.operands[1:]
        )
        before: list[int] = []
        for number, rows in enumerate(self._rows(table)):

            def gathered(*arrays, rows=rows):
                given, before = arrays[: len(node.reads)], arrays[len(node.reads) :]
                (indices,) = indexing(*given)
                return _gathered_rows(equation, given[place], indices, rows, *before)

            reads = [*node.reads, *before]
            reads[place] = self.part(table, number, rows)
            is_last = rows.stop == self.values[table].shape[0]
            written = result if is_last else self.new(result, number, None)
            yield self.node(gathered, node, rows, reads, [written])
            before = [written]

    def update_blocks(self, node: Node) -> Iterator[Node]:
        """The update of one row block after the other."""
        large = self.large(node)
        shape = self.values[large[0]].shape
        for number, rows in enumerate(self._rows(large[0])):
            reads = [
                self.part(v, number, rows) if self.has_block(v, number, rows) else v
                for v in node.reads
            ]
            made, writes = [], []
            for value in node.writes:
                if self.values[value].shape:
                    place = self.graph.landing[value]
                    writes.append(self.new(value, number, rows))
                    self.landing[writes[-1]] = dataclasses.replace(place, block=number)
                elif number == 0:
                    writes.append(value)
                else:
                    continue  # a scalar, which the first block gives
                made.append(value)

            def updated(*arrays, rows=rows, made=made):
                return _updated_rows(node, shape, rows, arrays, made)

            yield self.node(updated, node, rows, reads, writes)
        for value in large:
            del self.landing[value]

    def has_block(self, value: int, number: int, rows: slice) -> bool:
        """Whether exactly these rows of a value are a block on storage."""
        if value not in self.graph.stored:
            return False
        blocks = self._rows(value)
        return number < len(blocks) and blocks[number] == rows

    def part(self, value: int, number: int, rows: slice) -> int:
        """A row block of a stored value, as a value of its own."""
        if (value, number) not in self.parts:
            part = self.new(value, number, rows)
            self.parts[value, number] = part
            self.stored[part] = Place(self.graph.stored[value].leaf, number)
        return self.parts[value, number]

    def new(self, value: int, number: int, rows: slice | None) -> int:
        """Some rows of a value, or all, as a value of its own."""
        whole = self.values[value]
        shape, nbytes = whole.shape, whole.nbytes
        if rows is not None:
            shape = (rows.stop - rows.start, *shape[1:])
            nbytes = nbytes // whole.shape[0] * shape[0]
        self.values.append(
            dataclasses.replace(
                whole, name=f"{whole.name}[{number}]", nbytes=nbytes, shape=shape
            )
        )
        return len(self.values) - 1

    def node(
        self,
        fun: Callable,
        like: Node,
        rows: slice,
        reads: list[int],
        writes: list[int],
    ) -> Node:
        """A node of what `fun` does with [R] arrays; reads that it ignores are none."""
        small = trace(fun, *(self.values[v].aval for v in reads))
        names = dict(zip(small.arguments, reads, strict=True))
        names |= dict(zip(small.outputs, writes, strict=True))
        name = f"{like.name}[{rows.start}:{rows.stop}]"
        return Node.of(name, body(small, names), writes, like.backward)


def _updated_rows(
    node: Node,
    shape: tuple[int, ...],
    rows: slice,
    arrays: tuple[jax.Array, ...],
    made: list[int],
) -> list[jax.Array]:
    """What an update of arrays of `shape` has `made`, each for some rows only.

    `arrays` are what the node reads, whole or these rows of it.
    """
    part_shape = (rows.stop - rows.start, *shape[1:])
    known: dict[Name, Any] = dict(zip(node.reads, arrays, strict=True))
    sliced: dict[tuple[Name, int], jax.Array] = {}  # (operand, dimension): its rows

    def part(operand: Name, described: jax.ShapeDtypeStruct, dimension: int):
        """The rows of an operand, along one of its dimensions."""
        array = known[operand]
        if operand not in node.reads or array.shape != described.shape:
            return array  # has been cut
        if (operand, dimension) not in sliced:
            sliced[operand, dimension] = lax.slice_in_dim(
                array, rows.start, rows.stop, axis=dimension
            )
        return sliced[operand, dimension]

    for equation in node.equations:
        operands: list[Any] = [
            x.value if isinstance(x, Literal) else known[x] for x in equation.operands
        ]
        params = equation.params
        if _is_row_scatter(equation):
            operands[1] = _widened(operands[1]) - rows.start
            params = params | {"mode": lax.GatherScatterMode.FILL_OR_DROP}
        elif _holds(equation, shape):
            dimension = _dimension(equation)
            for n, described in enumerate(equation.operand_shapes):
                x = equation.operands[n]
                if described.shape and not isinstance(x, Literal):
                    operands[n] = part(x, described, dimension)
            if params.get("shape") == shape:
                params = params | {"shape": part_shape}
        results = dataclasses.replace(equation, params=params).bind(operands)
        known.update(zip(equation.results, results, strict=True))
    return [known[v] for v in made]


def _gathered_rows(
    equation: Equation,
    part: jax.Array,
    indices: jax.Array,
    rows: slice,
    before: jax.Array | None = None,
) -> jax.Array:
    """What a gather takes of the rows of `part`, the others being as in `before`."""
    params = equation.params
    if params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        params = params | {"mode": lax.GatherScatterMode.CLIP}
    indices = _widened(indices)
    gather = dataclasses.replace(equation, params=params)
    (taken,) = gather.bind([part, indices - rows.start])
    if before is None:
        return taken
    from_here_on = lax.squeeze(indices >= rows.start, [indices.ndim - 1])
    numbers: lax.GatherDimensionNumbers = equation.params["dimension_numbers"]
    others = [d for d in range(taken.ndim) if d not in numbers.offset_dims]
    mask = lax.broadcast_in_dim(from_here_on, taken.shape, others)
    return lax.select(mask, taken, before)


def _widened(indices: jax.Array) -> jax.Array:
    """Indices in a type that holds the number of every row."""
    return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices


def _joined(first: Node, second: Node) -> Node:
    """One node of two, for what only the second one reads of the first."""
    equations = (*first.equations, *second.equations)
    return Node.of(second.name, equations, second.writes, second.backward)


def _holds(equation: Equation, shape: tuple[int, ...]) -> bool:
    """Whether an operand or a result is of `shape`."""
    return any(
        x.shape == shape for x in (*equation.operand_shapes, *equation.result_shapes)
    )


def _is_by_rows(equation: Equation, shape: tuple[int, ...], own: set[Any]) -> bool:
    """Whether what it makes of `shape` is made index by index, or is a scatter.

    `own` holds the numbers of what its node reads in RAM, which may also be transposed.
    """
    if not _holds(equation, shape):
        return True
    shapes = {x.shape for x in equation.result_shapes}
    if equation.lowering is not None or shapes != {shape}:
        return False
    if _is_row_scatter(equation):
        _, *others = equation.operand_shapes
        return equation.operands[0] not in own and all(x.shape != shape for x in others)
    name = equation.primitive.name
    operands = {x.shape for x in equation.operand_shapes}
    if name == "transpose":
        return equation.operands[0] in own
    return name in {*ELEMENTWISE, "broadcast_in_dim"} and operands <= {shape, ()}


def _dimension(equation: Equation) -> int:
    """The dimension of its operands that becomes the rows of its results."""
    if equation.primitive.name == "transpose":
        return equation.params["permutation"][0]
    return 0


def _is_row_scatter(equation: Equation) -> bool:
    """Whether it adds rows to those of its first operand, wherever indices say."""
    if equation.primitive.name != "scatter-add" or equation.lowering is not None:
        return False
    numbers = equation.params["dimension_numbers"]
    table, indices, updates = equation.operand_shapes
    return (
        numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
        and not numbers.operand_batching_dims
        and tuple(updates.shape[d] for d in numbers.update_window_dims)
        == table.shape[1:]
        and equation.params["mode"] in _SCATTER_MODES
        and jnp.issubdtype(indices.dtype, jnp.signedinteger)
    )


def _gathered_from(node: Node) -> int | None:
    """The value of which a node gathers rows; None if it does anything else."""
    if not (node.equations and node.repeatable and len(node.writes) == 1):
        return None
    *others, equation = node.equations
    if equation.primitive.name != "gather" or equation.lowering is not None:
        return None
    numbers, (operand, _) = equation.params["dimension_numbers"], equation.operands
    table, indices = equation.operand_shapes
    gathers_rows = (
        numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and tuple(equation.params["slice_sizes"][1:]) == table.shape[1:]
        and equation.params["mode"] in _GATHER_MODES
        and jnp.issubdtype(indices.dtype, jnp.signedinteger)
        and equation.results == node.writes
    )
    if not (isinstance(operand, int) and operand in node.reads and gathers_rows):
        return None
    return None if any(operand in x.operands for x in others) else operand
