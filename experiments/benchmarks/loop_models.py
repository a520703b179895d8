"""Models whose steps go through loops, and how a scan may be written."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from experiments.steps import Case, TrainingStep

Scan = Callable[..., Any]  # as `lax.scan`, of (body, carry, rows, length)


def plain(body, carry, rows, length):
    return lax.scan(body, carry, rows, length)


def checkpoint(body, carry, rows, length):
    """A scan that keeps what one iteration hands to the next."""
    return lax.scan(jax.checkpoint(body), carry, rows, length)


def loop(body, carry, rows, length):
    """A Python loop over a list of `length` rows, each a pytree."""
    results = []
    for row in rows:
        carry, result = body(carry, row)
        results.append(result)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *results)


def nested(body, carry, rows, length):
    """Two scans, the inner one checkpointed, of about equal lengths."""
    inner = max(n for n in range(1, math.isqrt(length) + 1) if length % n == 0)
    outer = length // inner

    @jax.checkpoint
    def part(carry, rows):
        return lax.scan(body, carry, rows, inner)

    split = jax.tree.map(lambda x: x.reshape(outer, inner, *x.shape[1:]), rows)
    carry, results = lax.scan(part, carry, split, outer)
    return carry, jax.tree.map(lambda x: x.reshape(length, *x.shape[2:]), results)


def gpt(
    layers: int,
    scan: Scan,
    width: int = 128,
    heads: int = 4,
    words: int = 256,
    length: int = 128,
    dtype: Any = jnp.float32,
    apart: bool = False,
):
    """A causal decoder that says the next of 8 x `length` random words.

    It computes in `dtype`; parameters and moments are float32. If layers lie `apart`,
    as for `loop`, each has arrays of its own instead of a part of stacked ones.
    """

    def init():
        keys = iter(jax.random.split(jax.random.key(0), 8))

        def draw(*shape):
            return jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

        block = {
            "qkv": draw(layers, width, 3 * width),
            "out": draw(layers, width, width) / layers,
            "up": draw(layers, width, 4 * width),
            "down": draw(layers, 4 * width, width) / layers,
            "scales": jnp.ones((layers, 2, width)),
        }
        if apart:
            block = [{name: x[n] for name, x in block.items()} for n in range(layers)]
        params = {"block": block, "words": draw(words, width)}
        return params, (), jax.random.randint(next(keys), (8, length + 1), 0, words)

    def norm(x, scale):
        return scale * x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def layer(x, p):
        q, k, v = jnp.split(norm(x, p["scales"][0]) @ p["qkv"], 3, -1)
        shape = *x.shape[:2], heads, width // heads
        q, k, v = (y.reshape(shape) for y in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x, p["scales"][1]) @ p["up"]) @ p["down"], None

    def loss(params, rest, tokens):
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        x = params["words"][tokens[:, :-1]]
        x, _ = scan(layer, x, params["block"], layers)
        logits = (x @ params["words"].T).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses), rest

    return TrainingStep.of(Case(init, loss), optax.adamw(1e-3))


def lstm(scan: Scan, steps: int = 1000, width: int = 128, batch: int = 16):
    """An LSTM that adds up the marked ones of a sequence of numbers."""

    def init():
        key = jax.random.key(0)
        numbers = jax.random.uniform(key, (steps, batch, 1))
        marked = jax.random.bernoulli(key, 2 / steps, numbers.shape)
        rows = jnp.concatenate([numbers, marked], -1)
        kernel = jax.random.normal(key, (2 + width, 4 * width)) / math.sqrt(width)
        return (kernel, jnp.zeros((width, 1))), (), rows

    def loss(params, rest, rows):
        kernel, head = params

        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ kernel, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((batch, width))
        (h, _), _ = scan(cell, (zeros, zeros), rows, steps)
        total = jnp.sum(rows[..., 0] * rows[..., 1], 0)
        return jnp.mean((jnp.squeeze(h @ head, -1) - total) ** 2), rest

    return TrainingStep.of(Case(init, loss), optax.adam(1e-3))


def ode(scan: Scan, steps: int = 2000, width: int = 64, batch: int = 64):
    """A field of velocities that carries one cloud of points to another."""

    def init():
        keys = jax.random.split(jax.random.key(0), 4)
        params = {
            "up": jax.random.normal(keys[0], (2, width)),
            "mid": jax.random.normal(keys[1], (width, width)) / math.sqrt(width),
            "down": jax.random.normal(keys[2], (width, 2)) / width,
        }
        return params, (), jax.random.normal(keys[3], (batch, 2))

    def loss(params, rest, start):
        def velocity(x):
            return jnp.tanh(jnp.tanh(x @ params["up"]) @ params["mid"]) @ params["down"]

        def heun(x, _):
            first = velocity(x)
            second = velocity(x + first / steps)
            return x + (first + second) / (2 * steps), None

        end, _ = scan(heun, start, None, steps)
        return jnp.mean((end - jnp.sign(start)) ** 2), rest

    return TrainingStep.of(Case(init, loss), optax.adam(1e-3))


def wave(scan: Scan, steps: int = 10_000, points: int = 64):
    """A wave equation whose speed at each point is fitted to the final field."""

    def init():
        grid = jnp.arange(points)
        place = (grid[:, None] - points / 2) ** 2 + (grid - points / 3) ** 2
        return jnp.full((points, points), 0.2, jnp.float32), (), jnp.exp(-place / 20.0)

    def loss(speed, rest, start):
        def leap(carry, _):
            now, before = carry
            around = sum(jnp.roll(now, by, axis) for by in (1, -1) for axis in (0, 1))
            return (2 * now - before + speed * (around - 4 * now), now), None

        (end, _), _ = scan(leap, (start, start), None, steps)
        return jnp.mean((end - jnp.roll(start, 5, 0)) ** 2), rest

    return TrainingStep.of(Case(init, loss), optax.adam(1e-3))


def by_blocks(scan: Scan, block, rows, count: int = 16):
    """The sum of `block(rows)` over blocks of the rows, if the scan is not `plain`."""
    if scan is plain:
        return block(rows)
    split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)

    def add(total, rows):
        return total + block(rows), None

    return scan(add, jnp.float32(0), split, count)[0]


def vocabulary(scan: Scan, words: int = 128_000, tokens: int = 2048, width: int = 128):
    """The loss of a language model: logits of each token over all words."""

    def init():
        keys = jax.random.split(jax.random.key(0), 3)
        kernel = jax.random.normal(keys[0], (words, width)) / math.sqrt(width)
        labels = jax.random.randint(keys[1], (tokens,), 0, words)
        return kernel, (), (jax.random.normal(keys[2], (tokens, width)), labels)

    def loss(kernel, rest, batch):
        def of_tokens(rows):
            x, labels = rows
            losses = optax.softmax_cross_entropy_with_integer_labels(
                jnp.tanh(x) @ kernel.T, labels
            )
            return jnp.sum(losses)

        return by_blocks(scan, of_tokens, batch) / tokens, rest

    return TrainingStep.of(Case(init, loss), optax.sgd(0.1))


def attention(scan: Scan, tokens: int = 8192, heads: int = 2, width: int = 64):
    """Causal attention over a long sequence, with scores of all pairs."""

    def init():
        keys = jax.random.split(jax.random.key(0), 2)
        kernel = jax.random.normal(keys[0], (width, 3 * width)) / math.sqrt(width)
        return kernel, (), jax.random.normal(keys[1], (tokens, width))

    def loss(kernel, rest, x):
        shape = tokens, heads, width // heads
        q, k, v = (y.reshape(shape) for y in jnp.split(x @ kernel, 3, -1))

        def of_queries(rows):
            q, places = rows
            scores = jnp.einsum("qhd,khd->hqk", q, k) / math.sqrt(shape[-1])
            scores = jnp.where(jnp.arange(tokens) <= places[:, None], scores, -jnp.inf)
            mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, -1), v)
            return jnp.sum((mixed.reshape(-1, width) - 1) ** 2)

        total = by_blocks(scan, of_queries, (q, jnp.arange(tokens)))
        return total / x.size, rest

    return TrainingStep.of(Case(init, loss), optax.sgd(0.1))


MODELS: Mapping[str, Callable[[Scan], TrainingStep]] = {
    **{f"gpt{n}": lambda scan, n=n: gpt(n, scan) for n in (12, 24, 48)},
    "lstm": lstm,
    "ode": ode,
    "wave": wave,
    "vocabulary": vocabulary,
    "attention": attention,
}
