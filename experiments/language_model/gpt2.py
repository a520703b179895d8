"""GPT-2 (Radford et al., 2019)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.language_model.layers import (
    KeysValues,
    attend,
    embedding,
    empty_cache,
    extended,
    linear,
)


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Sizes of a `GPT2`; by default those of the smallest that is published."""

    vocabulary: int = 50_257
    width: int = 768
    layers: int = 12
    heads: int = 12
    positions: int = 1024
    epsilon: float = 1e-5


class GPT2Attention(nnx.Module):
    """Attention whose queries, keys and values are one product."""

    def __init__(self, config: GPT2Config, *, dtype: Any, rngs: nnx.Rngs):
        self.heads, width = config.heads, config.width
        self.c_attn = linear(width, 3 * width, True, dtype=dtype, rngs=rngs)
        self.c_proj = linear(width, width, True, dtype=dtype, rngs=rngs)

    def __call__(self, x, cache, start) -> tuple[jax.Array, KeysValues]:
        query, key, value = (
            part.reshape(*x.shape[:2], self.heads, -1)
            for part in jnp.split(self.c_attn(x), 3, -1)
        )
        cache = extended(cache, key, value, start)
        return self.c_proj(attend(query, *cache, start)), cache


class GPT2MLP(nnx.Module):
    """Two layers with GELU, as its tanh approximation, between them."""

    def __init__(self, config: GPT2Config, *, dtype: Any, rngs: nnx.Rngs):
        width = config.width
        self.c_fc = linear(width, 4 * width, True, dtype=dtype, rngs=rngs)
        self.c_proj = linear(4 * width, width, True, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(nnx.gelu(self.c_fc(x)))


def _layer_norm(config: GPT2Config, *, dtype: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.width, epsilon=config.epsilon, dtype=dtype, param_dtype=dtype, rngs=rngs
    )


class GPT2Layer(nnx.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, config: GPT2Config, *, dtype: Any, rngs: nnx.Rngs):
        self.ln_1 = _layer_norm(config, dtype=dtype, rngs=rngs)
        self.attn = GPT2Attention(config, dtype=dtype, rngs=rngs)
        self.ln_2 = _layer_norm(config, dtype=dtype, rngs=rngs)
        self.mlp = GPT2MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, cache, start) -> tuple[jax.Array, KeysValues]:
        heard, cache = self.attn(self.ln_1(x), cache, start)
        x = x + heard
        return x + self.mlp(self.ln_2(x)), cache


class GPT2(nnx.Module):
    """GPT-2, whose head is its embedding; its methods are those of `Llama`."""

    def __init__(self, config: GPT2Config, *, dtype: Any = jnp.float32, rngs):
        self.config, self.dtype = config, dtype
        make = functools.partial(embedding, dtype=dtype, rngs=rngs)
        self.wte = make(config.vocabulary, config.width)
        self.wpe = make(config.positions, config.width)
        layer = functools.partial(GPT2Layer, config, dtype=dtype, rngs=rngs)
        self.h = nnx.List(layer() for _ in range(config.layers))
        self.ln_f = _layer_norm(config, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.hidden(tokens, None, 0)[0])

    def head(self, x: jax.Array) -> jax.Array:
        return self.wte.attend(x)

    def empty_cache(self, batch: int, positions: int) -> list[KeysValues]:
        heads = self.config.heads
        shape = batch, positions, heads, self.config.width // heads
        return empty_cache(shape, self.config.layers, self.dtype)

    def hidden(
        self, tokens: jax.Array, cache: list[KeysValues] | None, start: jax.Array | int
    ) -> tuple[jax.Array, list[KeysValues]]:
        x = self.wte(tokens) + self.wpe(start + jnp.arange(tokens.shape[1]))
        caches = []
        for number, layer in enumerate(self.h):
            x, kept = layer(x, cache and cache[number], start)
            caches.append(kept)
        return self.ln_f(x), caches
