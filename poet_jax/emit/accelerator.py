"""Stages on GPUs and TPUs, between barriers, which their compilers honour."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from poet_jax.core.graph import Node


def apart(
    body: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    after: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Run `body(operands)` after the arrays `after` are computed.

    Returns its results, and what the next stage is to be `after`.
    """
    if after:
        operands, _ = lax.optimization_barrier((list(operands), list(after)))
    results = body(operands)
    return results, results[:1] or list(after)


def evaluate(node: Node, operands: Sequence[Any]) -> tuple[Any, ...]:
    """A node's equations."""
    return node(*operands)


def page_out(array: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
    """A copy in the host's memory, made once the arrays `after` are there."""
    (held,), _ = lax.optimization_barrier(([array], list(after)))
    return jax.device_put(held, jax.memory.Space.Host)


def page_in(page: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
    """The device's copy of a page, made once the arrays `after` are there."""
    (held,), _ = lax.optimization_barrier(([page], list(after)))
    return jax.device_put(held, jax.memory.Space.Device)
