"""The gradient of max pooling, for XLA's CPU backend.

XLA computes indices and scatters: about five times the image in memory, and ten times
slower than comparing shifted images.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.equation import Equation

MOST_ELEMENTS = 16  # of a window; each is one more term per element of the image


def is_pool_gradient(equation: Equation) -> bool:
    """Whether `by_comparison` applies: windows of at most `MOST_ELEMENTS`, of one image
    each."""
    if equation.primitive.name != "select_and_scatter_add":
        return False
    params = equation.params
    slope, image = equation.operand_shapes
    return (
        slope.size > 0
        and math.prod(params["window_dimensions"]) <= MOST_ELEMENTS
        and params["window_dimensions"][0] == params["window_strides"][0] == 1
        and not any(params["padding"][0])
        and jnp.issubdtype(image.dtype, jnp.floating)
    )


def by_comparison(params: dict[str, Any], slope: jax.Array, image: jax.Array):
    """[*image.shape] gradient: the slope [images, *windows] at each window's maximum.

    Ties go to XLA's choice; of several NaN it may be another.
    """
    # A loop over images, which XLA does not recompute for each term below.
    winners = lax.map(lambda x: _winner(params, x, slope.shape), image)
    total = None
    for number, offset in enumerate(_offsets(params)):
        mine = jnp.where(winners == number, slope, jnp.zeros((), slope.dtype))
        strides, padding = params["window_strides"], params["padding"]
        sides = zip(offset, image.shape, slope.shape, strides, padding, strict=True)
        ends = [
            (start - low, size + low - start - (count - 1) * step - 1, step - 1)
            for start, size, count, step, (low, _) in sides
        ]
        part = lax.pad(mine, jnp.zeros((), slope.dtype), ends)
        total = part if total is None else total + part
    return total


def _offsets(params: dict[str, Any]) -> list[tuple[int, ...]]:
    """Offsets of a window's elements, in the order of `_winner`."""
    return list(itertools.product(*map(range, params["window_dimensions"])))


def _winner(params: dict[str, Any], image: jax.Array, shape: Sequence[int]):
    """[*windows] number of the selected element in each window of an image."""
    least = -jnp.inf if params["select_prim"] is lax.ge_p else jnp.inf
    around = [(low, high, 0) for low, high in params["padding"][1:]]
    padded = lax.pad(image, jnp.asarray(least, image.dtype), around)
    strides = params["window_strides"][1:]

    def met(offset: Sequence[int]) -> jax.Array:
        stop = [
            start + (count - 1) * step + 1
            for start, count, step in zip(offset, shape[1:], strides, strict=True)
        ]
        return lax.slice(padded, offset, stop, strides)

    (_, *first), *others = _offsets(params)
    best = met(first)
    winner = jnp.zeros(best.shape, jnp.int8)
    for number, (_, *offset) in enumerate(others, 1):
        new = met(offset)
        stays = params["select_prim"].bind(best, new)
        best = jnp.where(stays, best, new)
        winner = jnp.where(stays, winner, jnp.int8(number))
    return winner
