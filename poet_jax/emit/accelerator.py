"""Stages on GPUs and TPUs, between barriers, which their compilers honour."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from poet_jax.graph import Equation, Literal, Node


def apart(
    body: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    after: Sequence[jax.Array],
) -> list[jax.Array]:
    """`body(operands)`, begun once the arrays `after` are there."""
    return body(tied(operands, after))


def tied(operands: Sequence[Any], after: Sequence[jax.Array]) -> list[Any]:
    """`operands`, known once the arrays `after` are there."""
    return lax.optimization_barrier((list(operands), list(after)))[0]


def evaluate(
    node: Node, operands: Sequence[Any], after: Sequence[jax.Array] = ()
) -> tuple[Any, ...]:
    """A node's equations. What is made of constants alone waits for `after`."""

    def bind(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if after and all(isinstance(x, Literal) for x in equation.operands):
            operands = tied(operands, after)
        return equation.bind(operands)

    return node(*operands, bind=bind)


def page_out(array: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
    """A copy in the host's memory, made once the arrays `after` are there."""
    (held,), _ = lax.optimization_barrier(([array], list(after)))
    return jax.device_put(held, jax.memory.Space.Host)


def page_in(page: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
    """The device's copy of a page, made once the arrays `after` are there."""
    (held,), _ = lax.optimization_barrier(([page], list(after)))
    return jax.device_put(held, jax.memory.Space.Device)
