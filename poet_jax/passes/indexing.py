"""What is indexed by `arange`, row by row: `Graph -> Graph`, before `blockwise`.

`x[jnp.arange(len(x)), labels]` takes one element of each row, as `take_along_axis`
does. But its equation says only that it takes elements anywhere.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from poet_jax.core.graph import Graph, Node
from poet_jax.passes.operations import is_light
from poet_jax.passes.rewriter import Rewriter

MOST_BYTES = 2**20  # of each array that is computed to know what indices are
# Of their dimension numbers: axes of the operand that results lack, those that columns
# of the indices move along, and those that are rows, with these axes of the indices.
_GATHER = (
    "collapsed_slice_dims",
    "start_index_map",
    "operand_batching_dims",
    "start_indices_batching_dims",
)
_SCATTER = (
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "operand_batching_dims",
    "scatter_indices_batching_dims",
)


def index_by_row(graph: Graph) -> Graph:
    """`graph`, of `trace`, with gathers and scatters that say what they do row by row.

    Of the columns of their indices, it drops those that depend on no argument and count
    an axis of the operand along one of the indices. This axis is a batch axis then.

    Returns `graph` unchanged on several devices. Raises ValueError for a graph whose
    nodes hold several equations.
    """
    indexer = _Indexer(graph)
    if graph.devices == 1:
        for number in range(len(graph.nodes)):
            indexer.index(number)
    return indexer.result(rewritten=False)


class _Indexer(Rewriter):
    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.known: dict[int, np.ndarray | None] = {}  # columns; None if unknown

    def index(self, number: int) -> None:
        """Let a gather or a scatter have its rows as batch axes."""
        node = self.nodes[number]
        if not _moves(node):
            return
        ((equation,), (written,)) = node.equations, node.writes
        operand, indices, *others = self.operands(node)
        stacked = self.maker(indices, "concatenate")
        if stacked is None:
            return
        columns = self.operands(stacked)
        fields = _GATHER if equation.primitive.name == "gather" else _SCATTER
        numbers = equation.params["dimension_numbers"]
        gone, moved, rows, sides = (getattr(numbers, field) for field in fields)
        if [self.values[x].shape[-1] for x in columns] != [1] * len(moved):
            return
        batch, left = dict(zip(rows, sides, strict=True)), {}
        for axis, column in zip(moved, columns, strict=True):
            size = equation.operand_shapes[0].shape[axis]
            side = self.counted(column, size, batch.values()) if axis in gone else None
            if side is None:
                left[axis] = column
            else:
                batch[axis] = side
        if not left or len(left) == len(moved):
            return
        rows = tuple(sorted(batch))
        gone = tuple(axis for axis in gone if axis not in batch)
        given = gone, tuple(left), rows, tuple(batch[axis] for axis in rows)
        numbers = numbers._replace(**dict(zip(fields, given, strict=True)))
        # The columns that are left may be unsorted where all columns are sorted.
        changed = {"dimension_numbers": numbers, "indices_are_sorted": False}
        by_row = dataclasses.replace(equation, params=equation.params | changed)
        indices, *more = left.values()
        if more:
            indices = self.bind(stacked.equations[0], [indices, *more], node)
        self.replace(written, self.bind(by_row, [operand, indices, *others], node))

    def counted(self, column: int, size: int, taken: Collection[int]) -> int | None:
        """The axis, not one of `taken`, along which a column is `arange(size)`."""
        shape = self.values[column].shape
        axes = [
            axis
            for axis, length in enumerate(shape[:-1])
            if length == size > 1 and axis not in taken
        ]
        if axes and column not in self.known:
            self.known[column] = self.computed(column)
        if not axes or (known := self.known[column]) is None:
            return None
        counts = np.indices(shape, sparse=True)
        return next((axis for axis in axes if np.all(known == counts[axis])), None)

    def computed(self, value: int) -> np.ndarray | None:
        """A value, if light operations make it of constants."""
        constants: dict[int, Any] = {}
        numbers, todo = set(), [value]
        while todo:
            read = todo.pop()
            constant = self.graph.constants.get(read)
            number = self.graph.producer.get(read)
            if self.values[read].nbytes > MOST_BYTES:
                return None
            if isinstance(constant, jax.Array | np.ndarray):
                constants[read] = constant
            elif number is None or not is_light(self.graph.nodes[number]):
                return None
            elif number not in numbers:
                numbers.add(number)
                todo += self.graph.nodes[number].reads

        def fun() -> jax.Array:
            made = dict(constants)
            for number in sorted(numbers):
                node = self.graph.nodes[number]
                results = node(*(made[x] for x in node.reads))
                made.update(zip(node.writes, results, strict=True))
            return made[value]

        return np.asarray(jax.jit(fun).lower().compile()())


def _moves(node: Node) -> bool:
    """Whether it is a gather or a scatter."""
    name = node.equations[0].primitive.name if len(node.writes) == 1 else ""
    return name == "gather" or name.startswith("scatter")
