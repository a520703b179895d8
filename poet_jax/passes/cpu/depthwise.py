"""Depthwise convolutions as sums over their taps, for XLA's CPU backend.

XLA computes a depthwise convolution, and the gradient for its filter, channel by
channel: ten to a hundred times slower than adding shifted images.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.equation import Equation, nbytes_of
from poet_jax.passes.cpu.convolution import (
    divisor,
    filter_result,
    is_of_floats,
    padded,
    result_sizes,
    shifted,
)

MOST_TAPS = 64  # each tap is one more term to compile
CACHED_BYTES = 2**19  # of images and results in one core's cache


def is_depthwise(equation: Equation) -> bool:
    """Whether it is a depthwise convolution with channels last and at most `MOST_TAPS`
    taps."""
    if not is_of_floats(equation):
        return False
    params, numbers = equation.params, equation.params["dimension_numbers"]
    image, kernel = equation.operand_shapes
    channels = image.shape[-1]
    return (
        tuple(numbers.lhs_spec) == tuple(numbers.out_spec) == _channels_last(image)
        and params["feature_group_count"] == channels > 1
        and kernel.shape[numbers.rhs_spec[0]] == channels
        and kernel.size <= MOST_TAPS * channels
    )


def is_depthwise_gradient(equation: Equation) -> bool:
    """Whether it is the filter's gradient of a depthwise convolution."""
    if not is_of_floats(equation):
        return False
    params, numbers = equation.params, equation.params["dimension_numbers"]
    image, slope = equation.operand_shapes
    (result,) = equation.result_shapes
    channels = image.shape[-1]
    batch, features, *space = _channels_last(image)
    return (
        tuple(numbers.lhs_spec) == (features, batch, *space)
        and tuple(numbers.rhs_spec) == (features, batch, *space)
        and params["batch_group_count"] == channels == slope.shape[-1] > 1
        and all(d == 1 for d in params["lhs_dilation"])
        and result.size <= MOST_TAPS * channels
    )


def _channels_last(image: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """(batch, channels, *space) dimensions."""
    return 0, image.ndim - 1, *range(1, image.ndim - 1)


def as_sum_over_taps(params: dict[str, Any], image: jax.Array, kernel: jax.Array):
    """[batch, ..., channels] of an image [batch, ..., channels] and its filter."""
    outputs, inputs, *space = params["dimension_numbers"].rhs_spec
    kernel = jnp.transpose(kernel, (*space, inputs, outputs))
    *taps, _, channels = kernel.shape
    sizes = result_sizes(params, image.shape[1:-1], taps)
    windows = taps, params["rhs_dilation"], sizes, params["window_strides"]

    def of_images(part):
        met = shifted(padded(params, part), *windows)
        rows = kernel.reshape(-1, *[1] * (image.ndim - 1), channels)
        return functools.reduce(operator.add, map(operator.mul, met, rows))

    return _map_parts(params, of_images, image).reshape(-1, *sizes, channels)


def as_sums_over_images(params: dict[str, Any], image: jax.Array, slope: jax.Array):
    """Depthwise filter gradient of image and slope, [batch, ..., channels], in the
    result layout of `params`, those of conv_general_dilated."""
    *space, channels = slope.shape[1:]
    places = result_sizes(params, image.shape[1:-1], space)
    apart, steps = params["window_strides"], params["rhs_dilation"]

    def of_images(image, slope):
        image = padded(params, image)

        def at_place(number):
            """[channels] sums of slope times image, for one tap."""
            place = jnp.unravel_index(number, places)
            starts = [at * far for at, far in zip(place, apart, strict=True)]
            reach = [(n - 1) * step + 1 for n, step in zip(space, steps, strict=True)]
            shape = image.shape[0], *reach, channels
            met = lax.dynamic_slice(image, [0, *starts, 0], shape)
            met = met[(slice(None), *(slice(None, None, step) for step in steps))]
            terms = (met * slope).reshape(-1, channels)
            # Faster than a sum over rows, and more exact than the convolution.
            return jnp.ones(len(terms), terms.dtype) @ terms

        return lax.map(at_place, jnp.arange(math.prod(places)))

    total = _map_parts(params, of_images, image, slope).sum(0)
    return filter_result(params, total.reshape(*places, 1, channels))


def _map_parts(
    params: dict[str, Any], fun: Callable[..., jax.Array], image: jax.Array, *others
) -> jax.Array:
    """[parts, ...] of `fun` on parts of images that fit the cache, with the same rows
    of `others`."""
    one = jax.eval_shape(lambda x: padded(params, x), image[:1])
    one_bytes = 2 * nbytes_of(one)  # with its result
    images = divisor(image.shape[0], CACHED_BYTES // one_bytes)

    def part(first):
        arrays = (image, *others)
        return fun(*(lax.dynamic_slice_in_dim(x, first, images) for x in arrays))

    return lax.map(part, jnp.arange(0, image.shape[0], images))
