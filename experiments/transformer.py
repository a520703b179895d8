"""BERT (Devlin et al., NAACL 2019), mean-pooled, and GPT (Radford et al., 2018).

Each is there in flax nnx and in flax linen.

Tokens are int32 [batch, length]. Logits are [batch, num_classes], of a causal model
[batch, length, vocabulary].
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a transformer; its inputs are tokens [batch, length].

    Attributes:
      num_classes: logits per example, ignored by a causal model.
      pre_norm: LayerNorm before each sublayer instead of after the residual sum.
      causal: attend to the past only, and predict a token at every position.
    """

    vocabulary: int
    num_classes: int
    layers: int
    width: int
    heads: int
    length: int
    dropout: float
    pre_norm: bool
    causal: bool


def _attend(query, key, value, heads: int, causal: bool) -> jax.Array:
    """Scaled dot-product attention of [batch, length, width] over `heads` heads."""
    batch, length, width = query.shape
    query, key, value = (
        x.reshape(batch, length, heads, width // heads) for x in (query, key, value)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // heads) ** 0.5
    if causal:
        past = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(past, scores, jnp.finfo(scores.dtype).min)
    result = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return result.reshape(batch, length, width)


_POSITION_INIT = nn.initializers.normal(0.02)


class NnxAttention(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs):
        self.config = config
        linear = functools.partial(nnx.Linear, config.width, config.width, rngs=rngs)
        self.query, self.key, self.value, self.out = (linear() for _ in range(4))

    def __call__(self, x):
        heads, causal = self.config.heads, self.config.causal
        x = _attend(self.query(x), self.key(x), self.value(x), heads, causal)
        return self.out(x)


class NnxFeedForward(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs):
        self.up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class NnxTransformer(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs):
        self.config = config
        width = config.width
        self.token = nnx.Embed(config.vocabulary, width, rngs=rngs)
        self.position = nnx.Param(_POSITION_INIT(rngs.params(), (config.length, width)))
        self.sublayers, self.norms = nnx.List(), nnx.List()
        for _ in range(config.layers):
            self.sublayers.append(NnxAttention(config, rngs=rngs))
            self.sublayers.append(NnxFeedForward(config, rngs=rngs))
        for _ in range(2 * config.layers + 1):
            self.norms.append(nnx.LayerNorm(width, rngs=rngs))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.head = nnx.data(
            None if config.causal else nnx.Linear(width, config.num_classes, rngs=rngs)
        )

    def __call__(self, tokens):
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        # The norm left over: BERT's after the embeddings, GPT's before the logits.
        if not self.config.pre_norm:
            x = self.norms[-1](x)
        x = self.dropout(x)
        for sublayer, norm in zip(self.sublayers, self.norms, strict=False):
            if self.config.pre_norm:
                x = x + self.dropout(sublayer(norm(x)))
            else:
                x = norm(x + self.dropout(sublayer(x)))
        if self.config.pre_norm:
            x = self.norms[-1](x)
        return self.token.attend(x) if self.head is None else self.head(x.mean(axis=1))


class LinenAttention(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x):
        query, key, value = (nn.Dense(self.config.width)(x) for _ in range(3))
        x = _attend(query, key, value, self.config.heads, self.config.causal)
        return nn.Dense(self.config.width)(x)


class LinenFeedForward(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x):
        width = self.config.width
        return nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(x)))


class LinenTransformer(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, tokens, train: bool = True):
        config = self.config
        token = nn.Embed(config.vocabulary, config.width)
        shape = (config.length, config.width)
        position = self.param("position", _POSITION_INIT, shape)
        dropout = nn.Dropout(config.dropout, deterministic=not train)
        x = token(tokens) + position[: tokens.shape[1]]
        if not config.pre_norm:
            x = nn.LayerNorm(name="embedding_norm")(x)
        x = dropout(x)
        for number in range(2 * config.layers):
            norm = nn.LayerNorm(name=f"norm_{number}")
            attends = number % 2 == 0
            sublayer = (LinenAttention if attends else LinenFeedForward)(config)
            if config.pre_norm:
                x = x + dropout(sublayer(norm(x)))
            else:
                x = norm(x + dropout(sublayer(x)))
        if config.pre_norm:
            x = nn.LayerNorm(name="final_norm")(x)
        if config.causal:
            return token.attend(x)
        return nn.Dense(config.num_classes)(x.mean(axis=1))
