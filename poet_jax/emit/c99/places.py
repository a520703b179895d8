"""Operations that move elements: parts of arrays, and tables; and random bits."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from poet_jax.core.equation import Equation
from poet_jax.emit.c99.buffers import Buffer, NoForm, Pointer, Step, strides
from poet_jax.emit.c99.contractions import table
from poet_jax.emit.c99.index import Index, counters, linear
from poet_jax.emit.c99.loops import stretched
from poet_jax.emit.c99.nests import Pointwise
from poet_jax.emit.c99.nodes import Lowering

Modes = lax.GatherScatterMode


def together(steps: Sequence[Step], over: Sequence[tuple[Buffer, Buffer]] = ()) -> Step:
    """Steps that write one array, as one. The first of them copies what it is over."""

    def render(pointer: Pointer) -> list[str]:
        lines: list[str] = []
        for number, step in enumerate(steps):
            is_copy = number == 0 and any(pointer(a) == pointer(b) for a, b in over)
            if not is_copy:
                lines += ["{", *step.render(pointer), "}"]
        return lines

    writes = tuple(dict.fromkeys(x for step in steps for x in step.writes))
    reads = dict.fromkeys(x for step in steps for x in step.reads)
    reads = tuple(x for x in reads if x not in writes)
    return Step(reads, writes, render, tuple(over), steps[0].run)


def _loop(lowering: Lowering, dims: Sequence[int]) -> Pointwise:
    return Pointwise(dims, lowering.where.__getitem__)


def concatenate(lowering: Lowering, equation: Equation) -> None:
    (result,) = equation.result_shapes
    axis, start = equation.params["dimension"], 0
    parts = []
    buffer = lowering.result(equation)
    for operand, aval in zip(equation.operands, equation.operand_shapes, strict=True):
        loop = _loop(lowering, aval.shape)
        rank = len(aval.shape)
        form = linear(rank, counters(aval.shape), strides(result.shape))
        form = form.plus(start * strides(result.shape)[axis])
        start += aval.shape[axis]
        if math.prod(aval.shape):
            loop.store(
                buffer, loop.body.at(operand, aval.shape, loop.body.identity), form
            )
            parts.append(loop.step(lowering.run))
    if parts:
        lowering.push(together(parts))
    else:
        lowering.push(Step((), (buffer,), lambda pointer: [], run=lowering.run))


def pad(lowering: Lowering, equation: Equation) -> None:
    operand, value = equation.operands
    aval, filling = equation.operand_shapes
    (result,) = equation.result_shapes
    buffer = lowering.result(equation)
    fill = _loop(lowering, result.shape)
    fill.store(buffer, fill.body.at(value, filling.shape, Index(len(result.shape), ())))
    dims, firsts, forms = [], [], []
    for size, new, (low, _, inner) in zip(
        aval.shape, result.shape, equation.params["padding_config"], strict=True
    ):
        step = inner + 1
        first = max(0, math.ceil(-low / step))
        last = min(size - 1, (new - 1 - low) // step)
        dims.append(max(0, last - first + 1))
        firsts.append(first)
        forms.append((step, low))
    inside = _loop(lowering, dims)
    places = [c.plus(first) for c, first in zip(counters(dims), firsts, strict=True)]
    targets = [
        (place * step).plus(low)
        for place, (step, low) in zip(places, forms, strict=True)
    ]
    if math.prod(dims):
        element = inside.body.at(operand, aval.shape, Index(len(dims), tuple(places)))
        target = linear(len(dims), targets, strides(result.shape))
        inside.store(buffer, element, target)
        steps = [fill.step(lowering.run), inside.step(lowering.run)]
    else:
        steps = [fill.step(lowering.run)]
    lowering.push(together(steps))


def _offset(
    loop: Pointwise,
    equation: Equation,
    first: int,
    shape: Sequence[int],
    sizes: Sequence[int],
) -> str:
    """C for where a slice starts whose starts are the operands from `first` on."""
    text = ""
    for axis, (size, part) in enumerate(zip(shape, sizes, strict=True)):
        operand = equation.operands[first + axis]
        dtype = equation.operand_shapes[first + axis].dtype.name
        if size == part:
            continue
        start = loop.body.at(operand, (), Index(len(loop.dims), (), None))
        if dtype.startswith("u"):
            start = f"(int32_t)poet_min_i_u({start}, {size - part}u)"
        clamped = f"poet_min_i(poet_max_i({start}, 0), {size - part})"
        text += f" + {clamped} * {strides(shape)[axis]}"
    return text


def dynamic_slice(lowering: Lowering, equation: Equation) -> None:
    shape = equation.operand_shapes[0].shape
    sizes = equation.params["slice_sizes"]
    array = lowering.buffer(equation, 0)
    lowering.flush()
    loop = _loop(lowering, sizes)
    extra = _offset(loop, equation, 1, shape, sizes)
    form = linear(len(sizes), counters(sizes), strides(shape))
    element = loop.body.load(array, form, extra)
    loop.store(lowering.result(equation), element)
    lowering.push(loop.step(lowering.run))


def dynamic_update_slice(lowering: Lowering, equation: Equation) -> None:
    array, update = equation.operand_shapes[:2]
    old = lowering.buffer(equation, 0)
    lowering.flush()
    copy = _loop(lowering, array.shape)
    text = copy.body.load(old, copy.body.identity.linear(array.shape))
    inside = _loop(lowering, update.shape)
    extra = _offset(inside, equation, 2, array.shape, update.shape)
    index = inside.body.identity
    element = inside.body.at(equation.operands[1], update.shape, index)
    buffer = lowering.result(equation)
    copy.store(buffer, text)
    rank = len(update.shape)
    form = linear(rank, counters(update.shape), strides(array.shape))
    inside.store(buffer, element, form, extra)
    is_apart = all(x is not old for x, *_ in inside.body.loads)
    steps = [copy.step(lowering.run), inside.step(lowering.run)]
    lowering.push(together(steps, [(old, buffer)] if is_apart else []))


def _fill_bits(value: Any, dtype: str) -> int:
    """The bytes of what stands for elements outside an array, as a number."""
    if value is None:
        if dtype == "float32":
            return 0x7FC00000
        if dtype == "bool":
            return 1
        info = np.iinfo(dtype)
        value = info.max if dtype.startswith("u") else info.min
    return int.from_bytes(np.asarray(value, dtype).tobytes(), "little")


def _indices(lowering: Lowering, equation: Equation) -> tuple[Buffer, dict[str, Any]]:
    aval = equation.operand_shapes[1]
    if aval.dtype.name not in ("int32", "uint32"):
        raise NoForm
    buffer = lowering.buffer(equation, 1)
    is_unsigned = int(aval.dtype.name == "uint32")
    return buffer, {"is_unsigned": is_unsigned, "at_start": 1}


def gather(lowering: Lowering, equation: Equation) -> None:
    params = equation.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    array, indices = equation.operand_shapes
    (result,) = equation.result_shapes
    packed = strides(result.shape)
    batch = [x for x in range(len(result.shape)) if x not in numbers.offset_dims]
    inside = [
        axis
        for axis in range(len(array.shape))
        if axis not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    at, fields = _indices(lowering, equation)
    fields |= _slices(
        array.shape,
        indices.shape,
        numbers.start_index_map,
        dict(
            zip(
                numbers.start_indices_batching_dims,
                numbers.operand_batching_dims,
                strict=True,
            )
        ),
        inside,
        sizes,
        [packed[x] for x in batch],
        [packed[x] for x in numbers.offset_dims],
    )
    dtype = array.dtype
    is_filled = params["mode"] == Modes.FILL_OR_DROP
    fields |= {"clips": int(not is_filled), "itemsize": dtype.itemsize}
    bits = _fill_bits(params["fill_value"], dtype.name)
    source = lowering.buffer(equation, 0)
    buffer = lowering.result(equation)

    def render(pointer: Pointer) -> list[str]:
        return [
            table("poet_slices", "k0", fields),
            f"static const uint{8 * dtype.itemsize}_t fill = {bits}u;",
            f"poet_gather({pointer(buffer)}, {pointer(source)}, "
            f"(const int32_t *){pointer(at)}, &fill, &k0);",
        ]

    if buffer.size:
        lowering.push(Step((source, at), (buffer,), render, (), lowering.run))


def _slices(
    array: Sequence[int],
    indices: Sequence[int],
    index_map: Sequence[int],
    batching: dict[int, int],
    inside: Sequence[int],
    sizes: Sequence[int],
    packed_batch: Sequence[int],
    packed_window: Sequence[int],
) -> dict[str, Any]:
    """The fields of a `poet_slices` that gather and scatter share."""
    if max(len(indices) - 1, len(inside), len(index_map)) > 8:
        raise NoForm
    steps = strides(array)
    array_batch = [
        steps[batching[axis]] if axis in batching else 0
        for axis in range(len(indices) - 1)
    ]
    return {
        "batch_loops": len(indices) - 1,
        "batch": tuple(indices[:-1]),
        "packed_batch": tuple(packed_batch),
        "at_batch": strides(indices)[:-1],
        "array_batch": tuple(array_batch),
        "window_loops": len(inside),
        "window": tuple(sizes[axis] for axis in inside),
        "packed_window": tuple(packed_window),
        "array_window": tuple(steps[axis] for axis in inside),
        "starts": len(index_map),
        "limit": tuple(array[axis] - sizes[axis] for axis in index_map),
        "array_start": tuple(steps[axis] for axis in index_map),
    }


_COMBINES = {
    ("add", "float32"): "add_f",
    ("add", "int32"): "add_i",
    ("add", "uint32"): "add_i",
    ("mul", "float32"): "mul_f",
    ("max", "float32"): "max_f",
    ("min", "float32"): "min_f",
}


def scatter(lowering: Lowering, equation: Equation) -> None:
    params = equation.params
    numbers = params["dimension_numbers"]
    array, indices, updates = equation.operand_shapes
    kind = equation.primitive.name.partition("-")[2] or "set"
    if kind == "set":
        combine = "set" if array.dtype.itemsize == 4 else "set_bytes"
        if array.dtype.itemsize not in (1, 4):
            raise NoForm
    elif (kind, array.dtype.name) in _COMBINES:
        combine = _COMBINES[kind, array.dtype.name]
    else:
        raise NoForm
    left_out = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    inside = [axis for axis in range(len(array.shape)) if axis not in left_out]
    sizes = [1] * len(array.shape)
    for axis, window in zip(inside, numbers.update_window_dims, strict=True):
        sizes[axis] = updates.shape[window]
    packed = strides(updates.shape)
    batch = [
        x for x in range(len(updates.shape)) if x not in numbers.update_window_dims
    ]
    at, fields = _indices(lowering, equation)
    fields |= _slices(
        array.shape,
        indices.shape,
        numbers.scatter_dims_to_operand_dims,
        dict(
            zip(
                numbers.scatter_indices_batching_dims,
                numbers.operand_batching_dims,
                strict=True,
            )
        ),
        inside,
        sizes,
        [packed[x] for x in batch],
        [packed[x] for x in numbers.update_window_dims],
    )
    clips = int(params["mode"] == Modes.CLIP)
    fields |= {"clips": clips, "itemsize": array.dtype.itemsize}
    source = lowering.buffer(equation, 2)
    lowering.flush()
    copy = _loop(lowering, array.shape)
    operand = equation.operands[0]
    text = copy.body.at(operand, array.shape, copy.body.identity)
    loads = {x for x, *_ in copy.body.loads}
    found = lowering.where.get(operand)
    buffer = lowering.result(equation)
    copy.store(buffer, text)

    def render(pointer: Pointer) -> list[str]:
        return [
            table("poet_slices", "k0", fields),
            f"poet_scatter({pointer(buffer)}, {pointer(source)}, "
            f"(const int32_t *){pointer(at)}, poet_combine_{combine}, &k0);",
        ]

    adding = Step((source, at), (buffer,), render, (), lowering.run)
    over = []
    if isinstance(found, Buffer) and loads == {found} and found not in (source, at):
        over = [(found, buffer)]
    steps = [copy.step(lowering.run)]
    lowering.push(together([*steps, adding] if source.size else steps, over))


def threefry(lowering: Lowering, equation: Equation) -> None:
    """Two results of each pair of counters, by a key of two words."""
    (result, _) = equation.result_shapes
    lowering.flush()
    loop = _loop(lowering, result.shape)
    words = []
    for operand, aval in zip(equation.operands, equation.operand_shapes, strict=True):
        index = stretched(loop.body.identity, aval.shape, result.shape, loop.dims)
        words.append(loop.body.at(operand, aval.shape, index))
    loop.body.lines.append(f"uint32_t x = {words[2]}, y = {words[3]};")
    loop.body.lines.append(f"poet_threefry(&x, &y, {words[0]}, {words[1]});")
    for number, text in enumerate("xy"):
        loop.store(lowering.result(equation, number), text)
    lowering.push(loop.step(lowering.run))


def count(lowering: Lowering, equation: Equation) -> None:
    """Numbers of elements in order, in two words."""
    (result, _) = equation.result_shapes
    lowering.flush()
    loop = _loop(lowering, result.shape)
    token = loop.body.access(loop.body.identity.linear(result.shape))
    loop.store(lowering.result(equation, 0), "0")
    loop.store(lowering.result(equation, 1), f"(uint32_t)({token})")
    lowering.push(loop.step(lowering.run))


RULES = {
    "concatenate": concatenate,
    "pad": pad,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "scatter": scatter,
    **{f"scatter-{kind}": scatter for kind in ("add", "mul", "max", "min")},
    "threefry2x32": threefry,
    "iota_2x32_shape": count,
}
