"""How operations go through blocks of rows: what is cut along which axis."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.equation import Equation
from poet_jax.passes.operations import ELEMENTWISE, REDUCTIONS


def _sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Of products; those of bools are sums as in logic."""
    return (lax.bitwise_or if x.dtype == bool else lax.add)(x, y)


# Operations that combine the results of blocks.
COMBINE = {"dot_general": _sum, **REDUCTIONS}
_ALONG_AXES = frozenset(("argmax", "argmin", *REDUCTIONS))
# Operations that move values along some axes, and may leave others alone.
_MOVES = frozenset(
    "concatenate split pad slice dynamic_slice dynamic_update_slice rev sort top_k "
    "cumsum cumprod cummax cummin cumlogsumexp".split()
)
# Of the parameters of an operation, the one that holds the result's shape.
_SIZES = {
    "broadcast_in_dim": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
}


@dataclasses.dataclass(frozen=True)
class Way:
    """How an operation goes block by block.

    Attributes:
      operands: the axis along which each is cut; None for those read as a whole.
      result: the axis along which the results are; None for one that is combined.
    """

    operands: tuple[int | None, ...]
    result: int | None


def pulled(equation: Equation, axis: int) -> Way | None:
    """What a block of the result along `axis` needs, of operations that fill arrays."""
    (shape, *others) = (x.shape for x in equation.result_shapes)
    shapes = [x.shape for x in equation.operand_shapes]
    if others or equation.lowering is not None:
        return None
    name, params = equation.primitive.name, equation.params
    if name in _MOVES:
        return _beside(equation, axis)
    if name == "broadcast_in_dim":
        dimensions = [int(x) for x in params["broadcast_dimensions"]]
        own = dimensions.index(axis) if axis in dimensions else None
        is_cut = own is not None and shapes[0][own] == shape[axis]
        return Way((own if is_cut else None,), axis)
    if name in ELEMENTWISE or name == "reduce_precision":
        return Way(
            tuple(
                axis if len(x) == len(shape) and x[axis] == shape[axis] else None
                for x in shapes
            ),
            axis,
        )
    if name.startswith("scatter"):
        return _by_rows(equation, 0, axis)
    if name == "gather" and axis in (along := _places(equation)[1]):
        own = along.index(axis)
        return _by_rows(equation, 1, own) or by_indices(equation, (None, own))
    if name == "dot_general":
        ways = (
            product(equation, n, a) for n, x in enumerate(shapes) for a in range(len(x))
        )
        return next((way for way in ways if way.result == axis), None)
    return None


def pushed(equation: Equation, axes: Sequence[int | None]) -> Way | None:
    """How an operation goes block by block whose operands are cut along `axes`."""
    name, params = equation.primitive.name, equation.params
    shapes = [x.shape for x in equation.operand_shapes]
    first, axis = next((n, a) for n, a in enumerate(axes) if a is not None)
    if equation.lowering is not None:
        return None
    if name in _MOVES:
        return _beside(equation, axis)
    if len(equation.result_shapes) != 1:
        return None
    result = equation.result_shapes[0].shape
    if name == "broadcast_in_dim":
        return pulled(equation, int(params["broadcast_dimensions"][axis]))
    if name in ELEMENTWISE or name == "reduce_precision":
        return pulled(equation, axis)
    if name in _ALONG_AXES:
        if axis in params["axes"]:
            return Way((axis,), None) if name in COMBINE else None
        return Way((axis,), axis - sum(x < axis for x in params["axes"]))
    if name == "transpose":
        return Way((axis,), params["permutation"].index(axis))
    if name == "squeeze":
        return Way((axis,), axis - sum(x < axis for x in params["dimensions"]))
    if name == "reshape" and params["dimensions"] is None:
        before = math.prod(shapes[0][:axis])
        for other, size in enumerate(result):
            if math.prod(result[:other]) == before and size == shapes[0][axis]:
                return Way((axis,), other)
    if name == "dot_general":
        return product(equation, first, axis)
    if name == "gather" or name.startswith("scatter"):
        return _by_rows(equation, first, axis)
    return None


def _beside(equation: Equation, axis: int) -> Way | None:
    """An operation of `_MOVES` that moves nothing along the axis."""
    params = equation.params
    moved = (params.get("axis"), params.get("dimension"), *params.get("dimensions", ()))
    padding = params.get("padding_config")
    if axis in moved or (padding and padding[axis] != (0, 0, 0)):
        return None
    operands = tuple(axis if x.shape else None for x in equation.operand_shapes)
    arrays = (x.shape for x in (*equation.operand_shapes, *equation.result_shapes))
    sizes = {x[axis] for x in arrays if x}
    return Way(operands, axis) if len(sizes) == 1 else None


def product(equation: Equation, first: int, axis: int) -> Way:
    """A product of matrices one of which is cut."""
    contracted, batch = equation.params["dimension_numbers"]
    own, other = contracted[first], contracted[1 - first]

    def both(axes: int) -> tuple[int, ...]:
        return (axis, axes) if first == 0 else (axes, axis)

    if axis in own:
        return Way(both(other[own.index(axis)]), None)
    if axis in batch[first]:
        place = batch[first].index(axis)
        return Way(both(batch[1 - first][place]), place)
    ranks = [len(x.shape) for x in equation.operand_shapes]
    free = [x for x in range(ranks[first]) if x not in (*own, *batch[first])]
    place = len(batch[0]) + free.index(axis)
    if first == 1:
        place += ranks[0] - len(contracted[0]) - len(batch[0])
    return Way((axis, None) if first == 0 else (None, axis), place)


def _places(equation: Equation) -> tuple[Sequence[int], Sequence[int]]:
    """Of a gather or a scatter, which axes of the indices are rows, and where the axes
    of the indices are in the results, or in the updates."""
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "gather":
        sides, window = numbers.start_indices_batching_dims, numbers.offset_dims
        (out,) = equation.result_shapes
    else:
        sides = numbers.scatter_indices_batching_dims
        window, out = numbers.update_window_dims, equation.operand_shapes[2]
    return sides, [x for x in range(len(out.shape)) if x not in window]


def by_indices(equation: Equation, axes: Sequence[int | None]) -> Way | None:
    """A gather from a whole array, or a sum into one, by indices that are cut."""
    name = equation.primitive.name
    if name not in ("gather", "scatter-add", "scatter_add"):
        return None
    sides, along = _places(equation)
    axis = axes[1]
    if axis is None and axes[-1] in along:
        axis = along.index(axes[-1])
    if axis is None or axis in sides or axis == len(along):
        return None
    if name == "gather":
        return Way((None, axis), along[axis])
    return Way((None, axis, along[axis]), None)


def _by_rows(equation: Equation, first: int, axis: int) -> Way | None:
    """A gather or a scatter that moves nothing from one row to another."""
    name = equation.primitive.name
    rows = equation.params["dimension_numbers"].operand_batching_dims
    sides, along = _places(equation)
    own = rows if first == 0 else sides
    if first < 2 and axis in own:
        place = own.index(axis)
        outer = along[sides[place]]
        if name == "gather":
            return Way((rows[place], sides[place]), outer)
        return Way((rows[place], sides[place], outer), rows[place])
    return _whole_rows(equation, first, axis)


def _whole_rows(equation: Equation, first: int, axis: int) -> Way | None:
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
        return Way((inner, None), outer)
    if shapes[2][outer] != shapes[0][inner]:
        return None
    return Way((inner, None, outer), inner)


def of_block(equation: Equation, way: Way, size: int) -> Equation:
    """The operation for a block of `size` rows."""
    params, name = dict(equation.params), equation.primitive.name

    def resized(shape: Sequence[int], axis: int) -> tuple[int, ...]:
        return (*shape[:axis], size, *shape[axis + 1 :])

    if name in _SIZES and way.result is not None:
        params[_SIZES[name]] = resized(params[_SIZES[name]], way.result)
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
