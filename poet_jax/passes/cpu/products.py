"""Products that sum over several axes, for XLA's CPU backend.

The gradient of a kernel sums over examples and tokens. XLA sums over one axis of
matrices as they lie in memory; of more it first copies the left operand, so that what
it sums over comes last. That is large where logits are.
"""

import math
from typing import Any

import jax
from jax import lax

from poet_jax.core.equation import Equation, nbytes_of

# Of the left operand. The copy of a smaller one, which stays in a cache, saves time.
LARGE_BYTES = 2**24


def is_large_sum(equation: Equation) -> bool:
    """Whether it sums over the first axes, several, of a large left operand."""
    if equation.primitive.name != "dot_general":
        return False
    (left, right), batch = equation.params["dimension_numbers"]
    array, _ = equation.operand_shapes
    first = tuple(range(len(left)))
    return (
        len(left) > 1
        and not any(batch)
        and equation.params.get("out_sharding") is None
        and (tuple(left), tuple(right)) == (first, first)
        and array.dtype.itemsize >= 4  # XLA copies others to a wider type anyway
        and nbytes_of(array) >= LARGE_BYTES
    )


def by_matrices(params: dict[str, Any], left: jax.Array, right: jax.Array) -> jax.Array:
    """The product of two arrays, reshaped to matrices; it sums over their rows."""
    (axes, _), batch = params["dimension_numbers"]
    count = len(axes)
    rows = math.prod(left.shape[:count])
    product = lax.dot_general(
        left.reshape(rows, -1),
        right.reshape(rows, -1),
        (((0,), (0,)), batch),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    return product.reshape(left.shape[count:] + right.shape[count:])
