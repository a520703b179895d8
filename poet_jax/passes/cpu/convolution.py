"""Convolutions as matrix products, or a few images at a time, for XLA's CPU backend.

A 1x1 convolution is a matrix product; XLA copies its image first. A filter's gradient
is a convolution whose filter is as large as the image, which XLA computes fast while
the arrays lie in caches, and else up to four times slower than a product. As a product
of shifted images with the output's gradient it runs at the speed of a matrix product.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.equation import Equation, nbytes_of
from poet_jax.passes.cpu.calls import apart
from poet_jax.passes.cpu.scratch import copied_images

PATCHES_BYTES = 8 * 2**20  # most of shifted images at once
PART_BYTES = 4 * 2**20  # of copied images at once, in parts
CACHED_BYTES = 4 * 2**20  # of shifted images in a processor's caches
LEAST_BYTES = 5 * 2**19  # of images and slopes beyond a processor's caches
LEAST_WORK = 64  # FLOPs per byte, above which another copy costs no time


def is_large(equation: Equation) -> bool:
    """Whether `in_parts` saves memory and time.

    XLA's CPU backend pads all images into a copy that it does not count. The batch must
    be the first dimension, and compute must outweigh memory traffic.
    """
    if not _is_whole(equation):
        return False
    numbers = equation.params["dimension_numbers"]
    image, kernel = equation.operand_shapes
    (result,) = equation.result_shapes
    moved_bytes = nbytes_of(image) + nbytes_of(result)
    copied_bytes = copied_images(equation.params, image, kernel, result)
    flops = 2 * result.size * kernel.size // kernel.shape[numbers.rhs_spec[0]]
    return (
        numbers.lhs_spec[0] == numbers.out_spec[0] == 0
        and image.shape[0] > 1
        and copied_bytes > max(PART_BYTES, nbytes_of(kernel))
        and flops > LEAST_WORK * moved_bytes
    )


def in_parts(params: dict[str, Any], image: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution, a few images at a time, one part after the other.

    Parts are written to where the result lies. A loop over them would prepare the
    kernel for each, and XLA would sum what follows in another order.
    """
    convolution = functools.partial(canonical_convolution, params)
    whole = jax.eval_shape(convolution, image, kernel)
    nbytes = copied_images(params, image, kernel, whole)
    images = math.ceil(len(image) / math.ceil(nbytes / PART_BYTES))
    result, before = lax.empty(whole.shape, whole.dtype), []
    for first in range(0, len(image), images):

        def convolved(operands: Sequence[jax.Array], first: int = first):
            image, kernel = operands
            return [convolution(image[first : first + images], kernel)]

        (part,), before = apart(convolved, [image, kernel], before)
        result = lax.dynamic_update_slice_in_dim(result, part, first, 0)
    return result


def canonical_convolution(
    params: dict[str, Any], image: jax.Array, kernel: jax.Array
) -> jax.Array:
    """`conv_general_dilated` as NHWC x HWIO -> NHWC between transposes.

    XLA's CPU backend does this itself, but not in loops, where other layouts are a
    hundred times slower.
    """
    numbers = params["dimension_numbers"]
    space = range(2, image.ndim)

    def order(spec: Sequence[int], *dimensions: int) -> list[int]:
        return [spec[d] for d in dimensions]

    batch_first, inputs_last = (0, *space, 1), (*space, 1, 0)
    letters = "".join(map(chr, range(ord("a"), ord("a") + len(space))))
    others = {k: x for k, x in params.items() if k != "dimension_numbers"}
    result = lax.conv_general_dilated(
        lax.transpose(image, order(numbers.lhs_spec, *batch_first)),
        lax.transpose(kernel, order(numbers.rhs_spec, *inputs_last)),
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        **others,
    )
    places = order(numbers.out_spec, *batch_first)
    return lax.transpose(result, [places.index(d) for d in range(result.ndim)])


def is_of_floats(equation: Equation) -> bool:
    """Whether it is a convolution of nonempty float32 or float64 arrays."""
    arrays = (*equation.operand_shapes, *equation.result_shapes)
    return (
        equation.primitive.name == "conv_general_dilated"
        and all(x.size for x in arrays)
        and {str(x.dtype) for x in arrays} in ({"float32"}, {"float64"})
    )


def _is_whole(equation: Equation) -> bool:
    """Whether it is a convolution of floats without groups."""
    params = equation.params
    return (
        is_of_floats(equation)
        and params["feature_group_count"] == params["batch_group_count"] == 1
    )


def is_pointwise(equation: Equation) -> bool:
    """Whether it is a 1x1 convolution with channels last, and without both strides and
    padding, or zeros around the image.

    XLA multiplies those by the kernel, which makes NaN of an infinite one, unless it
    also dilates the image, as for the gradient of a convolution with strides.
    """
    if not _is_whole(equation):
        return False
    params, numbers = equation.params, equation.params["dimension_numbers"]
    image, kernel = equation.operand_shapes
    last = (0, image.ndim - 1, *range(1, image.ndim - 1))
    is_dilated = set(params["lhs_dilation"]) - {1}
    is_padded = any(map(any, params["padding"])) or is_dilated
    is_surrounded = max(map(max, params["padding"]), default=0) > 0
    return (
        all(kernel.shape[d] == 1 for d in numbers.rhs_spec[2:])
        and tuple(numbers.lhs_spec) == tuple(numbers.out_spec) == last
        and not (is_padded and set(params["window_strides"]) - {1})
        and not (is_surrounded and not is_dilated)
    )


def as_one_product(params: dict[str, Any], image: jax.Array, kernel: jax.Array):
    """[..., outputs] of an image [..., inputs] and a 1x1 kernel."""
    outputs, inputs, *_ = params["dimension_numbers"].rhs_spec
    flat = kernel.reshape([kernel.shape[d] for d in sorted((outputs, inputs))])
    steps = (1, *params["window_strides"], 1)
    product = lax.dot_general(
        lax.slice(image, [0] * image.ndim, image.shape, steps),
        flat,
        (((image.ndim - 1,), (int(inputs > outputs),)), ((), ())),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    return padded(params, product)


def is_filter_gradient(equation: Equation) -> bool:
    """Whether the filter has more places in space than the result, as in a gradient
    for [batch, ..., channels], which sums over the batch."""
    if not _is_whole(equation) or set(equation.params["lhs_dilation"]) - {1}:
        return False
    numbers = equation.params["dimension_numbers"]
    image, filters = equation.operand_shapes
    (result,) = equation.result_shapes
    batch_summed = (image.ndim - 1, 0, *range(1, image.ndim - 1))
    places = math.prod(result.shape[d] for d in numbers.out_spec[2:])
    elements = math.prod(filters.shape[d] for d in numbers.rhs_spec[2:])
    specs = tuple(numbers.lhs_spec), tuple(numbers.rhs_spec)
    return places < elements and specs == (batch_summed, batch_summed)


def is_large_filter_gradient(equation: Equation) -> bool:
    """Whether it is a filter's gradient for more images than caches hold."""
    if not is_filter_gradient(equation):
        return False
    image, slope = equation.operand_shapes
    return (image.size + slope.size) * image.dtype.itemsize >= LEAST_BYTES


def as_matrix_product(params: dict[str, Any], image: jax.Array, slope: jax.Array):
    """Filter gradient of image [batch, ..., inputs] and slope [batch, ..., outputs], in
    the result layout of `params`, those of conv_general_dilated."""
    steps, dilation = params["window_strides"], params["rhs_dilation"]
    batch, *space, outputs = slope.shape
    inputs = image.shape[-1]
    # One place per element of the filter.
    places = result_sizes(params, image.shape[1:-1], space)
    taps = math.prod(places)
    row_bytes = taps * inputs * math.prod(space[1:]) * image.dtype.itemsize
    gradient_bytes = taps * inputs * outputs * image.dtype.itemsize
    rows = divisor(space[0], CACHED_BYTES // row_bytes)
    most_bytes = min(PATCHES_BYTES, max(image.nbytes, gradient_bytes))
    images = divisor(batch, most_bytes // (row_bytes * space[0]))

    # XLA transposes the first factor of a sum over rows; make it the smaller one.
    slope_first = outputs <= taps * inputs

    def product(image, slope):
        """[outputs, taps * inputs] if `slope_first`, else its transpose."""
        sizes = slope.shape[-1 - len(space) : -1]
        patches = jnp.concatenate(
            [*shifted(image, places, steps, sizes, dilation)], axis=-1
        )
        summed = tuple(range(slope.ndim - 1))
        first, second, precision = patches, slope, params["precision"]
        if slope_first:
            first, second = second, first
            precision = precision[::-1] if isinstance(precision, tuple) else precision
        return lax.dot_general(
            first,
            second,
            ((summed, summed), ((), ())),
            precision=precision,
            preferred_element_type=params["preferred_element_type"],
        )

    def add_images(total, part):
        image, slope = part
        return total + product(padded(params, image), slope), None

    def add_image_by_rows(total, part):
        image, slope = padded(params, part[0]), part[1]
        height = (rows - 1) * dilation[0] + (places[0] - 1) * steps[0] + 1

        def add_rows(total, part):
            first, slope = part
            here = lax.dynamic_slice_in_dim(image, first * dilation[0], height)
            return total + product(here, slope), None

        tiles = slope.reshape(-1, rows, *slope.shape[1:])
        starts = jnp.arange(0, space[0], rows)
        total, _ = lax.scan(add_rows, total, (starts, tiles))
        return total, None

    shape = (taps * inputs, outputs)
    total = jnp.zeros(shape[::-1] if slope_first else shape, image.dtype)
    if rows < space[0]:
        total, _ = lax.scan(add_image_by_rows, total, (image, slope))
    else:
        parts = image, slope
        if images > 1:  # XLA would copy for a dimension of one
            parts = [x.reshape(-1, images, *x.shape[1:]) for x in parts]
        total, _ = lax.scan(add_images, total, parts)
    total = total.T if slope_first else total
    return filter_result(params, total.reshape(*places, inputs, outputs))


def result_sizes(
    params: dict[str, Any], image: Sequence[int], filters: Sequence[int]
) -> tuple[int, ...]:
    """Spatial sizes of a convolution's result, from those of image and filter."""
    return tuple(
        (low + size + (size - 1) * (between - 1) + high - (length - 1) * spread - 1)
        // step
        + 1
        for size, between, (low, high), length, spread, step in zip(
            image,
            params["lhs_dilation"],
            params["padding"],
            filters,
            params["rhs_dilation"],
            params["window_strides"],
            strict=True,
        )
    )


def shifted(
    image: jax.Array,
    places: Sequence[int],
    apart: Sequence[int],
    sizes: Sequence[int],
    steps: Sequence[int],
) -> Iterator[jax.Array]:
    """The windows [..., *sizes, channels] of an image, `apart` from one another at each
    of `places`, with elements `steps` apart; per dimension of space."""
    for place in itertools.product(*map(range, places)):
        window = (
            slice(at * far, at * far + (size - 1) * step + 1, step)
            for at, far, size, step in zip(place, apart, sizes, steps, strict=True)
        )
        yield image[(..., *window, slice(None))]


def filter_result(params: dict[str, Any], gradient: jax.Array) -> jax.Array:
    """A gradient [*places, inputs, outputs] in the result layout of `params`."""
    spec = params["dimension_numbers"].out_spec
    space = gradient.ndim - 2
    order = [space, space + 1, *range(space)]
    return jnp.transpose(gradient, [order[spec.index(d)] for d in range(len(order))])


def padded(params: dict[str, Any], image: jax.Array) -> jax.Array:
    """An image [..., *space, channels], dilated and zero-padded."""
    sides = zip(params["padding"], params["lhs_dilation"], strict=True)
    ends = [(low, high, dilation - 1) for (low, high), dilation in sides]
    around = [(0, 0, 0)] * (image.ndim - 1 - len(ends))
    return lax.pad(image, jnp.zeros((), image.dtype), [*around, *ends, (0, 0, 0)])


def divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`, or 1."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(most, 1))
