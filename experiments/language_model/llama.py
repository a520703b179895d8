"""Llama (Touvron et al., 2023), and with options Qwen2 and Gemma.

Rotary embeddings are those of Su et al. (2021), grouped queries those of Ainslie et al.
(EMNLP 2023).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from experiments.language_model.layers import (
    KeysValues,
    attend,
    embedding,
    empty_cache,
    extended,
    linear,
)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and choices of a `Llama`.

    Attributes:
      kv_heads: heads of keys and values; divides `heads`.
      mlp_width: width between the two halves of the MLP.
      positions: the longest sequence.
      epsilon: of the norms.
      theta: base of the rotary embeddings.
      tied: the head is the embedding.
      qkv_bias: biases of queries, keys and values, as in Qwen2.
      gemma: Gemma's norms, which scale by `1 + scale`, its GELU instead of SiLU, and
        embeddings times the root of the width.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    positions: int = 2048
    epsilon: float = 1e-5
    theta: float = 10_000.0
    tied: bool = False
    qkv_bias: bool = False
    gemma: bool = False


def rotary(positions: jax.Array, size: int, theta: float) -> KeysValues:
    """Cosines and sines, [length, 1, size] float32, of the angles at positions."""
    half = np.arange(0, size, 2, dtype=np.float32) / size
    frequencies = jnp.asarray(theta**-half, jnp.float32)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    angles = jnp.concatenate([angles, angles], -1)[:, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotated(x: jax.Array, angles: KeysValues) -> jax.Array:
    """x [batch, length, heads, size] turned; pairs are half a head apart."""
    cosines, sines = (table.astype(x.dtype) for table in angles)
    first, second = jnp.split(x, 2, -1)
    return x * cosines + jnp.concatenate([-second, first], -1) * sines


class RMSNorm(nnx.Module):
    """Division by the root of the mean square, in float32, and a scale."""

    def __init__(self, config: LlamaConfig, *, dtype: Any):
        self.epsilon, self.gemma = config.epsilon, config.gemma
        initial = jnp.zeros if config.gemma else jnp.ones
        self.scale = nnx.Param(initial(config.width, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.square(wide).mean(-1, keepdims=True)
        wide = wide * lax.rsqrt(mean + self.epsilon)
        if self.gemma:
            return (wide * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)
        return wide.astype(x.dtype) * self.scale[...]


class LlamaAttention(nnx.Module):
    """Attention of `heads` queries to `kv_heads` keys and values."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        make = functools.partial(linear, dtype=dtype, rngs=rngs)
        inner, narrow = (
            heads * config.head_dim for heads in (config.heads, config.kv_heads)
        )
        self.q_proj = make(config.width, inner, config.qkv_bias)
        self.k_proj = make(config.width, narrow, config.qkv_bias)
        self.v_proj = make(config.width, narrow, config.qkv_bias)
        self.o_proj = make(inner, config.width, False)

    def __call__(self, x, angles, cache, start) -> tuple[jax.Array, KeysValues]:
        query, key, value = (
            part(x).reshape(*x.shape[:2], -1, self.config.head_dim)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotated(query, angles), rotated(key, angles)
        cache = extended(cache, key, value, start)
        return self.o_proj(attend(query, *cache, start)), cache


class LlamaMLP(nnx.Module):
    """A gated MLP."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        make = functools.partial(linear, bias=False, dtype=dtype, rngs=rngs)
        self.gate = nnx.gelu if config.gemma else nnx.silu
        self.gate_proj = make(config.width, config.mlp_width)
        self.up_proj = make(config.width, config.mlp_width)
        self.down_proj = make(config.mlp_width, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.gate(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nnx.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config, dtype=dtype)
        self.self_attn = LlamaAttention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config, dtype=dtype)
        self.mlp = LlamaMLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, angles, cache, start) -> tuple[jax.Array, KeysValues]:
        heard, cache = self.self_attn(self.input_layernorm(x), angles, cache, start)
        x = x + heard
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Llama(nnx.Module):
    """A decoder in the manner of Llama; see `LlamaConfig`."""

    def __init__(self, config: LlamaConfig, *, dtype: Any = jnp.float32, rngs):
        self.config, self.dtype = config, dtype
        make = functools.partial(LlamaLayer, config, dtype=dtype, rngs=rngs)
        self.embed_tokens = embedding(
            config.vocabulary, config.width, dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List(make() for _ in range(config.layers))
        self.norm = RMSNorm(config, dtype=dtype)
        sizes = config.width, config.vocabulary
        self.lm_head = nnx.data(
            None if config.tied else linear(*sizes, False, dtype=dtype, rngs=rngs)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, length, vocabulary]."""
        return self.head(self.hidden(tokens, None, 0)[0])

    def head(self, x: jax.Array) -> jax.Array:
        """Logits [..., vocabulary] of x [..., width]."""
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)

    def empty_cache(self, batch: int, positions: int) -> list[KeysValues]:
        """Room for keys and values in each layer."""
        config = self.config
        shape = batch, positions, config.kv_heads, config.head_dim
        return empty_cache(shape, config.layers, self.dtype)

    def hidden(
        self, tokens: jax.Array, cache: list[KeysValues] | None, start: jax.Array | int
    ) -> tuple[jax.Array, list[KeysValues]]:
        """What the head reads, [batch, length, width], and each layer's cache.

        The tokens are at positions from `start` on, and the cache has those before.
        """
        config = self.config
        x = self.embed_tokens(tokens)
        if config.gemma:
            x = x * jnp.asarray(config.width**0.5, x.dtype)
        positions = start + jnp.arange(tokens.shape[1])
        angles = rotary(positions, config.head_dim, config.theta)
        caches = []
        for number, layer in enumerate(self.layers):
            x, kept = layer(x, angles, cache and cache[number], start)
            caches.append(kept)
        return self.norm(x), caches
