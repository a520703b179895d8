"""Sums over axes that are apart in memory, for XLA's CPU backend.

Short sums, as in the gradient of `jnp.repeat`, XLA computes axis by axis from a copy of
the array. Sums over a batch, as in the gradient of what all examples share, it computes
element by element of the result, which is slow where an example is large.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.equation import Equation

MOST_TERMS = 4  # of a short sum
LARGE = 2**14  # elements of a result


def is_short_sum(equation: Equation) -> bool:
    """Whether it adds at most `MOST_TERMS` elements that are apart in memory."""
    array, axes = _summed(equation)
    return (
        array is not None
        and 1 < math.prod(array.shape[axis] for axis in axes) <= MOST_TERMS
        and array.ndim - 1 not in axes
    )


def is_sum_of_batch(equation: Equation) -> bool:
    """Whether it adds large arrays that lie one after the other in memory."""
    array, axes = _summed(equation)
    if array is None or sorted(axes) != list(range(len(axes))) or not array.size:
        return False
    return math.prod(array.shape[len(axes) :]) > LARGE


def _summed(equation: Equation) -> tuple[Any, tuple[int, ...]]:
    """What it adds along which axes; None for another operation or dtype."""
    if equation.primitive.name != "reduce_sum":
        return None, ()
    (array,) = equation.operand_shapes
    is_plain = array.dtype in (jnp.dtype("float32"), jnp.dtype("float64"))
    return array if is_plain else None, equation.params["axes"]


def by_additions(params: dict[str, Any], array: jax.Array) -> jax.Array:
    """The sum of an array over `params["axes"]`, in XLA's order."""
    terms = [array]
    for axis in sorted(params["axes"], reverse=True):
        terms = [
            lax.index_in_dim(term, index, axis, keepdims=False)
            for index in range(array.shape[axis])
            for term in terms
        ]
    return functools.reduce(operator.add, terms)


def by_product(params: dict[str, Any], array: jax.Array) -> jax.Array:
    """The sum of an array over its first axes, as a product with ones."""
    axes = tuple(range(len(params["axes"])))
    ones = jnp.ones(array.shape[: len(axes)], array.dtype)
    numbers = (axes, axes), ((), ())
    return lax.dot_general(ones, array, numbers, precision=lax.Precision.HIGHEST)
