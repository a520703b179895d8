"""Slices of products become products of slices: `Graph -> Graph`, of single equations.

A step that trains a part of a kernel reads a part of its gradient, which is a product
of a saved activation with another array. The part is the product of a part of the
activation, which is all that needs to be saved. After PockEngine (Zhu et al., MICRO
2023, section 3.2), where the graph of a sparse update is pruned before it is compiled.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from poet_jax.core.equation import Equation, Literal
from poet_jax.core.graph import Graph, Node
from poet_jax.passes.operations import ELEMENTWISE
from poet_jax.passes.rewriter import Rewriter

PRODUCTS = ("dot_general", "conv_general_dilated")


def push_slices(graph: Graph) -> Graph:
    """`graph`, of `trace`, with less to compute and to save where only parts are read.

    - A slice, or a gather of indices along one axis, of a matrix product or of a
      convolution is taken of its operand instead, through transposes, reshapes, casts
      and elementwise equations between them, if nothing else reads the whole. The part
      of a saved activation is taken where the whole is last read in the forward pass,
      unless the backward pass reads the whole, too.
    - A part that is written back to where it was read is nothing.

    Results are the same sums, in which rounding may differ. What is dead after that is
    removed. Raises ValueError for a graph whose nodes hold several equations.
    """
    narrower = _Narrower(graph)
    for number in range(len(graph.nodes)):
        narrower.skip_writing_back(number)
    for number in reversed(range(len(graph.nodes))):
        narrower.move_cut(number)
    return narrower.result()


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A part of an array along one axis: `size` from `start`, or of some indices.

    Attributes:
      indices: the value that holds them, [size, 1].
      mode: of the gather.
    """

    axis: int
    start: int
    size: int
    indices: int | None = None
    mode: Any = None

    def along(self, axis: int) -> "_Cut":
        return dataclasses.replace(self, axis=axis)

    def __call__(self, array: jax.Array, indices: Any = None) -> jax.Array:
        if indices is None:
            limit = self.start + self.size
            return lax.slice_in_dim(array, self.start, limit, axis=self.axis)
        others = tuple(d for d in range(array.ndim) if d != self.axis)
        return lax.gather(
            array,
            indices,
            lax.GatherDimensionNumbers(others, (self.axis,), (self.axis,)),
            tuple(1 if d == self.axis else n for d, n in enumerate(array.shape)),
            mode=self.mode,
        )


class _Narrower(Rewriter):
    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.saved: dict[int, int] = {}  # a part, and what it is a part of

    def skip_writing_back(self, number: int) -> None:
        """An array with a part of it put where it was is the array."""
        node = self.nodes.get(number)
        if node is None or not node.writes or self.is_output(node.writes[0]):
            return
        (equation,) = node.equations
        if equation.primitive.name == "dynamic_update_slice":
            whole, part, *starts = self.operands(node)
            read = self.maker(part, "slice", "dynamic_slice")
            if read is None or self.operands(read)[0] != whole:
                return
            window = _window(read.equations[0], self.operands(read))
            if window is not None and window[0] == _numbers(starts):
                self.replace(node.writes[0], whole)
        elif equation.primitive.name == "scatter":
            whole, indices, part = self.operands(node)
            read = self.maker(part, "gather")
            if read is None or equation.params["update_jaxpr"] is not None:
                return
            source, where = self.operands(read)
            taken, put = (
                x.equations[0].params["dimension_numbers"] for x in (read, node)
            )
            if (
                source == whole
                and _cut(read.equations[0], [source, where])
                and taken.offset_dims == put.update_window_dims
                and taken.collapsed_slice_dims == put.inserted_window_dims
                and taken.start_index_map == put.scatter_dims_to_operand_dims
                and self.is_same(where, indices)
            ):
                self.replace(node.writes[0], whole)

    def is_same(self, a: Any, b: Any) -> bool:
        """Whether two values are made in the same way from the same values."""
        if isinstance(a, Literal) or isinstance(b, Literal):
            return isinstance(a, Literal) and isinstance(b, Literal) and a.key == b.key
        first, second = self.maker(a), self.maker(b)
        if a == b or first is None or second is None:
            return a == b
        one, other = first.equations[0], second.equations[0]
        return (
            first.repeatable
            and len(one.results) == 1
            and one.primitive is other.primitive
            and repr(one.params) == repr(other.params)
            and all(map(self.is_same, self.operands(first), self.operands(second)))
        )

    def move_cut(self, number: int) -> None:
        """Replace a slice of a product by a product of a slice."""
        node = self.nodes.get(number)
        if node is None or not node.writes:
            return
        operands = self.operands(node)
        cut = _cut(node.equations[0], operands)
        if cut is None or not self.reaches_product(operands[0], cut.axis):
            return
        if cut.indices is None or self.hoist(cut.indices):
            self.replace(node.writes[0], self.part(operands[0], cut, node))

    def hoist(self, value: int) -> bool:
        """Let what depends on arguments only be made first; whether it does."""
        node = self.maker(value)
        if node is None:
            return True
        if self.place[self.producer[value]][0] < 0:
            return True  # it is first already
        reads = [x for x in self.operands(node) if not isinstance(x, Literal)]
        if not (node.repeatable and all([self.hoist(v) for v in reads])):
            return False
        number = self.producer[value]
        anchor, own = self.place[number]
        # Before all others, in the order that they were in.
        self.place[number] = (anchor - len(self.graph.nodes), own)
        return True

    def reaches_product(self, value: Any, axis: int) -> bool:
        """Whether a part of `value`, which has one reader, is a product of a part."""
        node = self.maker(value)
        if node is None or self.is_output(value) or len(self.readers[value]) > 1:
            return False
        (equation,) = node.equations
        origins = _origins(equation, axis)
        if equation.primitive.name in PRODUCTS:
            return bool(origins)
        operands = self.operands(node)
        return any(self.reaches_product(operands[n], d) for n, d in origins)

    def part(self, value: int, cut: _Cut, like: Node) -> int:
        """A part of `value`: made from parts if that reaches a product, else taken."""
        if not self.reaches_product(value, cut.axis):
            return self.taken(value, cut, like)
        node = self.nodes[self.producer[value]]
        (equation,) = node.equations
        operands = self.operands(node)
        for n, axis in _origins(equation, cut.axis):
            if not isinstance(operands[n], Literal):
                operands[n] = self.part(operands[n], cut.along(axis), node)
        if equation.primitive.name in ("reshape", "squeeze"):
            sizes = list(equation.result_shapes[0].shape)
            sizes[cut.axis] = cut.size
            return self.add(lambda x: lax.reshape(x, sizes), operands, node)
        return self.bind(equation, operands, node)

    def taken(self, value: int, cut: _Cut, like: Node) -> int:
        """A part of `value`, which may be saved instead of the whole."""
        maker = self.maker(value)
        if maker is not None:
            (equation,) = maker.equations
            dims = equation.params.get("broadcast_dimensions", (cut.axis,))
            if cut.axis not in dims:
                shape = list(equation.result_shapes[0].shape)
                shape[cut.axis] = cut.size
                params = equation.params | {"shape": tuple(shape)}
                equation = dataclasses.replace(equation, params=params)
                return self.bind(equation, self.operands(maker), like)
        operands = [value] if cut.indices is None else [value, cut.indices]
        if maker is None or maker.backward or not like.backward:
            return self.add(cut, operands, like)
        # In the forward pass, after all else that reads the whole there.
        readers = self.readers[value]
        forward = [self.place[n][0] for n in readers if not self.nodes[n].backward]
        anchor = min(max([self.anchor(maker), *forward]), self.anchor(like))
        part = self.add(cut, operands, like, anchor, False)
        self.saved[part] = value
        return part

    def result(self) -> Graph:
        """A part of what the backward pass reads whole, too, is taken there."""
        parts = {self.producer[part] for part in self.saved}
        for part, value in self.saved.items():
            number = self.producer[part]
            others = self.readers[value] - parts
            if number in self.nodes and any(self.nodes[n].backward for n in others):
                first = min(self.place[n][0] for n in self.readers[part])
                self.place[number] = first, number
                node = dataclasses.replace(self.nodes[number], backward=True)
                self.nodes[number] = node
        return super().result()


def _numbers(operands: Iterable[Any]) -> tuple[int, ...] | None:
    """The values of literals; None if one is not."""
    operands = list(operands)
    if not all(isinstance(x, Literal) for x in operands):
        return None
    return tuple(int(np.asarray(x.value)) for x in operands)


def _window(
    equation: Equation, operands: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(starts, sizes) of a slice that is known before it runs."""
    params = equation.params
    if equation.primitive.name == "dynamic_slice":
        starts = _numbers(operands[1:])
        return None if starts is None else (starts, tuple(params["slice_sizes"]))
    if params["strides"] is not None and any(n != 1 for n in params["strides"]):
        return None
    return tuple(params["start_indices"]), equation.result_shapes[0].shape


def _cut(equation: Equation, operands: Sequence[Any]) -> _Cut | None:
    """What an equation takes of its first operand, if that is a part along one axis."""
    name = equation.primitive.name
    if name not in ("slice", "dynamic_slice", "gather"):
        return None
    shape = equation.operand_shapes[0].shape
    if name == "gather":
        numbers, sizes = (
            equation.params[x] for x in ("dimension_numbers", "slice_sizes")
        )
        indices = operands[1]
        if len(numbers.collapsed_slice_dims) != 1 or isinstance(indices, Literal):
            return None
        (axis,) = numbers.collapsed_slice_dims
        others = tuple(d for d in range(len(shape)) if d != axis)
        along_axis = (
            numbers.start_index_map == (axis,)
            and numbers.offset_dims == others
            and not numbers.operand_batching_dims
            and all(sizes[d] == shape[d] for d in others)
            and equation.operand_shapes[1].ndim == 2
            and equation.result_shapes[0].shape[axis] < shape[axis]
            # Others make up values where an index is out of bounds.
            and equation.params["mode"]
            in (lax.GatherScatterMode.PROMISE_IN_BOUNDS, lax.GatherScatterMode.CLIP)
        )
        size = equation.result_shapes[0].shape[axis] if along_axis else 0
        mode = equation.params["mode"]
        return _Cut(axis, 0, size, indices, mode) if along_axis else None
    window = _window(equation, operands)
    if window is None:
        return None
    axes = [d for d, size in enumerate(window[1]) if size != shape[d]]
    if len(axes) != 1:
        return None
    (axis,) = axes
    start, size = (x[axis] for x in window)
    return _Cut(axis, min(max(start, 0), shape[axis] - size), size)  # as JAX does


def _origins(equation: Equation, axis: int) -> list[tuple[int, int]]:
    """(operand, its axis) that an axis of the result comes from; empty if a part along
    it is not the result of parts of these operands."""
    name, params = equation.primitive.name, equation.params
    shapes = [shape.shape for shape in equation.operand_shapes]
    result = equation.result_shapes[0].shape
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        origins = [[(0, left), (1, right)] for left, right in zip(*batch, strict=True)]
        for side in (0, 1):
            bound = {*contracted[side], *batch[side]}
            free = [d for d in range(len(shapes[side])) if d not in bound]
            origins += [[(side, d)] for d in free]
        return origins[axis]
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        if params["batch_group_count"] != 1:
            return []
        if axis == numbers.out_spec[0]:
            return [(0, numbers.lhs_spec[0])]
        if axis == numbers.out_spec[1] and params["feature_group_count"] == 1:
            return [(1, numbers.rhs_spec[0])]
        return []
    if name == "transpose":
        return [(0, params["permutation"][axis])]
    if name == "squeeze" or (name == "reshape" and params["dimensions"] is None):
        before = math.prod(result[:axis])
        return [
            (0, d)
            for d, size in enumerate(shapes[0])
            if size == result[axis] and math.prod(shapes[0][:d]) == before
        ][:1]
    if name in ELEMENTWISE and all(shape in ((), result) for shape in shapes):
        return [(n, axis) for n, shape in enumerate(shapes) if shape]
    return []
