"""Calls that XLA's CPU backend keeps apart, and in order.

Its last common-subexpression elimination comes after `optimization_barrier` is gone, so
that a barrier holds nothing there. A call that must not be inlined is one instruction.
It starts when all its operands are computed, and shares no work with other calls.
Buffer assignment looks into it, so it updates arguments in place.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


def apart(
    body: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    after: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Run `body(operands)` after the arrays `after` are computed.

    Returns its results, and what the next call is to be `after`.
    """

    def part(operands: Sequence[jax.Array], token: jax.Array):
        # Makes the results depend on the token, or JAX would drop it as unused.
        operands, token = lax.optimization_barrier((operands, token))
        return body(operands), token + 1

    called = jax.jit(part)(list(operands), token_of(after))
    results, token = cast(Any, set_xla_metadata(called, inlineable="false"))
    return results, [token]


def token_of(arrays: Sequence[jax.Array]) -> jax.Array:
    """A uint32 computed from all arrays, which keep their memory until then."""
    token = jnp.uint32(0)
    for x in (x for x in arrays if x.size):
        first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
        is_token = x.dtype == token.dtype
        token += (
            first if is_token else (first != jnp.zeros_like(first)).astype("uint32")
        )
    return token
