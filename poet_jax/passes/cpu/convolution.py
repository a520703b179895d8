"""Convolutions as matrix products, or an image at a time, for XLA's CPU backend.

A convolution with a kernel of one element is one, and XLA copies its image first. The
gradient for a filter is itself a convolution, whose filter is the output's gradient
and as large as the image. XLA on the CPU computes such a one at a few GFLOP/s, at times
ten times slower than the convolution that it belongs to. As a matrix product of the
shifted images with the output's gradient it is as fast as any other.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.graph import Equation
from poet_jax.passes.cpu.scratch import scratch_bytes

# Of shifted images at once, but no more than of images or of the gradient: a small
# workspace, and each part of the sum is worth adding.
PATCHES_BYTES = 8 * 2**20
# What a processor's caches hold of shifted images; those of one image may be more.
CACHED_BYTES = 4 * 2**20
# What has to be computed with each byte that is read or written so that moving it once
# more takes no time worth mentioning.
LEAST_WORK = 64


def is_large(equation: Equation) -> bool:
    """Whether it is a convolution of images that are better not copied at once.

    XLA's CPU backend copies all images that such a convolution reads, padded, and tells
    nobody. The batch has to be the first dimension, and much has to be computed with
    what is read and written.
    """
    if not _is_whole(equation):
        return False
    numbers = equation.params["dimension_numbers"]
    image, kernel = equation.operand_shapes
    (result,) = equation.result_shapes
    moved_bytes = (image.size + result.size) * image.dtype.itemsize
    flops = 2 * result.size * kernel.size // kernel.shape[numbers.rhs_spec[0]]
    return (
        numbers.lhs_spec[0] == numbers.out_spec[0] == 0
        and image.shape[0] > 1
        and scratch_bytes(equation) > PATCHES_BYTES
        and flops > LEAST_WORK * moved_bytes
    )


def by_images(params: dict[str, Any], image: jax.Array, kernel: jax.Array):
    """XLA's convolution of one image at a time.

    Of several at a time results would have to be reshaped. XLA moves that into sums
    that read them, such as a BatchNorm's, which round otherwise then.
    """
    return lax.map(
        lambda one: canonical_convolution(params, one[None], kernel)[0], image
    )


def canonical_convolution(
    params: dict[str, Any], image: jax.Array, kernel: jax.Array
) -> jax.Array:
    """`conv_general_dilated` as NHWC x HWIO -> NHWC between transposes.

    XLA's CPU backend brings convolutions to that form itself, but only those of the
    entry computation; others it computes a hundred times slower.
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
    """Whether it is a convolution in float32 or float64 of arrays that hold
    something."""
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


def _is_plain(equation: Equation) -> bool:
    """Whether it is a convolution of floats, of an image as it is, without groups."""
    return _is_whole(equation) and all(d == 1 for d in equation.params["lhs_dilation"])


def is_pointwise(equation: Equation) -> bool:
    """Whether each element of the result is made of one place of the image, or of
    none; with channels last, and without strides of an image with padding."""
    if not _is_whole(equation):
        return False
    params, numbers = equation.params, equation.params["dimension_numbers"]
    image, kernel = equation.operand_shapes
    last = (0, image.ndim - 1, *range(1, image.ndim - 1))
    moves = any(map(any, params["padding"])) or any(
        d > 1 for d in params["lhs_dilation"]
    )
    return (
        all(kernel.shape[d] == 1 for d in numbers.rhs_spec[2:])
        and tuple(numbers.lhs_spec) == tuple(numbers.out_spec) == last
        and not (moves and any(step > 1 for step in params["window_strides"]))
    )


def as_one_product(params: dict[str, Any], image: jax.Array, kernel: jax.Array):
    """[..., outputs] of [..., inputs] and a kernel of one element in space."""
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
    """Whether it slides a filter to fewer places than the filter has elements."""
    if not _is_plain(equation):
        return False
    numbers = equation.params["dimension_numbers"]
    image, filters = equation.operand_shapes
    (result,) = equation.result_shapes
    last = image.ndim - 1
    places = math.prod(result.shape[d] for d in numbers.out_spec[2:])
    elements = math.prod(filters.shape[d] for d in numbers.rhs_spec[2:])
    return (
        places < elements
        # [batch, ..., channels], of which the batch is summed over
        and tuple(numbers.lhs_spec) == (last, 0, *range(1, last))
        and tuple(numbers.rhs_spec) == (last, 0, *range(1, last))
    )


def as_matrix_product(params: dict[str, Any], image: jax.Array, slope: jax.Array):
    """The convolution of [batch, ..., inputs] with [batch, ..., outputs] over batch and
    space, in the layout that `params` of conv_general_dilated give."""
    steps, dilation = params["window_strides"], params["rhs_dilation"]
    batch, *space, outputs = slope.shape
    inputs = image.shape[-1]
    # One place for each element of the filter whose gradient this is.
    places = result_sizes(params, image.shape[1:-1], space)
    taps = math.prod(places)
    row_bytes = taps * inputs * math.prod(space[1:]) * image.dtype.itemsize
    gradient_bytes = taps * inputs * outputs * image.dtype.itemsize
    rows = divisor(space[0], CACHED_BYTES // row_bytes)
    most_bytes = min(PATCHES_BYTES, max(image.nbytes, gradient_bytes))
    images = divisor(batch, most_bytes // (row_bytes * space[0]))

    # XLA transposes the first factor of a sum over rows, so that is the smaller one.
    slope_first = outputs <= taps * inputs

    def product(image, slope):
        """[outputs, taps * inputs] of parts of padded images and of the slope if
        `slope_first`, else its transpose."""
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
        if images > 1:  # XLA copies what gets a dimension of one
            parts = [x.reshape(-1, images, *x.shape[1:]) for x in parts]
        total, _ = lax.scan(add_images, total, parts)
    total = total.T if slope_first else total
    return filter_result(params, total.reshape(*places, inputs, outputs))


def result_sizes(
    params: dict[str, Any], image: Sequence[int], filters: Sequence[int]
) -> tuple[int, ...]:
    """Sizes in space of a convolution's result, from those of image and filter."""
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
    """[..., *sizes, channels] of an image for each of `places` that are `apart`: what
    lies `steps` from one to the next, in each dimension of space."""
    for place in itertools.product(*map(range, places)):
        window = (
            slice(at * far, at * far + (size - 1) * step + 1, step)
            for at, far, size, step in zip(place, apart, sizes, steps, strict=True)
        )
        yield image[(..., *window, slice(None))]


def filter_result(params: dict[str, Any], gradient: jax.Array) -> jax.Array:
    """[*places, inputs, outputs] in the layout that was asked for."""
    spec = params["dimension_numbers"].out_spec
    space = gradient.ndim - 2
    order = [space, space + 1, *range(space)]
    return jnp.transpose(gradient, [order[spec.index(d)] for d in range(len(order))])


def padded(params: dict[str, Any], image: jax.Array) -> jax.Array:
    """The image, [..., *space, channels], dilated and with zeros around it."""
    ends = [
        (low, high, dilation - 1)
        for (low, high), dilation in zip(
            params["padding"], params["lhs_dilation"], strict=True
        )
    ]
    around = [(0, 0, 0)] * (image.ndim - 1 - len(ends))
    return lax.pad(image, jnp.zeros((), image.dtype), [*around, *ends, (0, 0, 0)])


def divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`, or 1."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(most, 1))
