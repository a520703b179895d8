"""Stages on GPUs and TPUs, between barriers, which their compilers honour."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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


def page_buffer(pages: int, kind: tuple[tuple[int, ...], Any]) -> jax.Array:
    """Room in the host's memory for pages of one shape and type.

    It has two rows at least, or XLA would know which one is read.
    """
    shape, dtype = kind
    zeros = jnp.zeros((max(2, pages), *shape), dtype)
    return jax.device_put(zeros, jax.memory.Space.Host)


def page_out(
    buffer: jax.Array, row: int, array: jax.Array, after: Sequence[jax.Array]
) -> jax.Array:
    """`buffer` with a page, copied once the arrays `after` are there."""
    (held,), _ = lax.optimization_barrier(([array], list(after)))
    page = jax.device_put(held, jax.memory.Space.Host)
    return lax.dynamic_update_index_in_dim(buffer, page, row, 0)


def page_in(buffer: jax.Array, row: int, after: Sequence[jax.Array]) -> jax.Array:
    """The device's copy of a page, made once the arrays `after` are there.

    XLA removes a barrier on an array in the host's memory. So the row to read is a
    number behind a barrier.
    """
    number, _ = lax.optimization_barrier((jnp.int32(row), list(after)))
    page = lax.dynamic_index_in_dim(buffer, number, keepdims=False)
    return jax.device_put(page, jax.memory.Space.Device)
