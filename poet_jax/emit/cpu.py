"""Stages on XLA's CPU backend, as branches.

Its last common-subexpression elimination comes after `optimization_barrier` is gone, so
that a barrier holds nothing there. Branches of a conditional are never merged, and run
in the order in which their predicates become known.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from poet_jax.convolution import canonical_convolution
from poet_jax.graph import Equation, Literal, Node


def apart(
    body: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    after: Sequence[jax.Array],
) -> list[jax.Array]:
    """`body(operands)`, begun once the arrays `after` are there."""
    shapes = jax.eval_shape(body, operands)

    def nothing(operands: Sequence[jax.Array]) -> list[jax.Array]:
        return [_blank(x) for x in shapes]

    return lax.cond(_true(after), body, nothing, operands)


def tied(operands: Sequence[Any], after: Sequence[jax.Array]) -> list[Any]:
    """`operands`, known once the arrays `after` are there.

    So the compiler sees that what is written over an argument comes after all that
    reads it, and need not copy it. The choice is part of what reads an operand.
    """
    true = _true(after)
    return [lax.select(jnp.broadcast_to(true, x.shape), x, _blank(x)) for x in operands]


def _blank(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of this shape and type, for a branch that is never taken."""
    if not jnp.issubdtype(shape.dtype, jax.dtypes.extended):
        if getattr(shape, "weak_type", False):  # branches agree on that, too
            weak = jnp.broadcast_to(np.zeros((), shape.dtype).item(), shape.shape)
            if weak.dtype == shape.dtype:
                return weak
        return jnp.zeros(shape.shape, shape.dtype)
    kinds: list[Any] = []

    def bits_of(key: jax.Array) -> jax.Array:
        kinds.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    bits = jax.eval_shape(bits_of, shape)
    zeros = jnp.zeros(bits.shape, bits.dtype)
    return jax.random.wrap_key_data(zeros, impl=kinds[0])


def _true(arrays: Sequence[jax.Array]) -> jax.Array:
    """True, which the compiler cannot know before it has one element of each array."""
    return known(arrays) != 0


def known(arrays: Sequence[jax.Array]) -> jax.Array:
    """An odd uint32 that depends on one element of each array."""
    found = jnp.uint32(1)
    for x in arrays:
        first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
        found |= (first != 0).astype(jnp.uint32)
    return found


def evaluate(
    node: Node, operands: Sequence[Any], after: Sequence[jax.Array] = ()
) -> tuple[Any, ...]:
    """A node's equations, with convolutions as XLA computes them fast in a branch.

    What is made of constants alone is made once the arrays `after` are there. The
    compiler would make it first of all, and hold it until it is read.
    """

    def bind(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if after and all(isinstance(x, Literal) for x in equation.operands):
            operands = [_unknown(x, after) for x in operands]
        name = equation.primitive.name
        if name == "conv_general_dilated" and equation.lowering is None:
            return (canonical_convolution(equation.params, *operands),)
        return equation.bind(operands)

    return node(*operands, bind=bind)


def _unknown(scalar: Any, after: Sequence[jax.Array]) -> jax.Array:
    """`scalar`, which the compiler cannot know before the arrays `after` are there."""
    scalar = jnp.asarray(scalar)
    return lax.select(_true(after), scalar, (scalar == 0).astype(scalar.dtype))
