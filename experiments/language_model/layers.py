"""What the decoders share: attention, a cache of its keys and values, and layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

# Keys and values of the tokens so far, [batch, positions, kv_heads, head_dim] each.
KeysValues = tuple[jax.Array, jax.Array]


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, start: jax.Array | int
) -> jax.Array:
    """Causal attention, [batch, length, heads * head_dim].

    Args:
      query: [batch, length, heads, head_dim] of positions from `start` on.
      key, value: [batch, keys, kv_heads, head_dim] of positions from 0 on. Each serves
        as many heads of `query`, next to one another.
    """
    batch, length, heads, size = query.shape
    groups = query.reshape(batch, length, key.shape[2], -1, size)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", groups, key) * size**-0.5
    scores = scores.astype(jnp.float32)
    past = jnp.arange(key.shape[1]) <= start + jnp.arange(length)[:, None]
    scores = jnp.where(past, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    result = jnp.einsum("bkgqs,bskd->bqkgd", weights, value)
    return result.reshape(batch, length, heads * size)


def extended(
    cache: KeysValues | None, key: jax.Array, value: jax.Array, start: jax.Array | int
) -> KeysValues:
    """`key` and `value`, written into a cache at positions from `start` on if any."""
    if cache is None:
        return key, value
    old_key, old_value = cache
    place = (0, start, 0, 0)
    return (
        lax.dynamic_update_slice(old_key, key, place),
        lax.dynamic_update_slice(old_value, value, place),
    )


def empty_cache(shape: tuple[int, ...], layers: int, dtype: Any) -> list[KeysValues]:
    """Room of `shape` for keys and values in each of `layers`."""
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers)]


def linear(
    inputs: int, outputs: int, bias: bool, *, dtype: Any, rngs: nnx.Rngs
) -> nnx.Linear:
    """A linear layer."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        rngs=rngs,
    )


def embedding(number: int, width: int, *, dtype: Any, rngs: nnx.Rngs) -> nnx.Embed:
    """A vector for each of `number` tokens."""
    return nnx.Embed(number, width, dtype=dtype, param_dtype=dtype, rngs=rngs)
