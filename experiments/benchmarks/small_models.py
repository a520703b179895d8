"""Training steps of 5 to 300 ms, as people write them with flax and optax.

Each is a `TrainingStep` on one batch of real data, in float32 unless it says bfloat16:
that is what activations are then, while parameters and moments stay float32. The
milliseconds are the least of 20 steps of `jax.jit` on two cores that had two or three
times as much other work, and the losses the first and the last of these.

| | ms | MiB | losses || | ms | MiB | losses |
|---|---|---|---||---|---|---|---|
| encoder2 | 51 | 15 | 2.58, 0.001 || vit | 138 | 47 | 2.60, 0.004 |
| encoder4 | 113 | 29 | 2.29, 0.003 || mixer | 187 | 35 | 5.32, 1.00 |
| encoder6 | 138 | 43 | 3.22, 0.001 || gru_unrolled | 20 | 8 | 2.08, 1.42 |
| encoder2_bfloat16 | 90 | 16 | 2.58, 0.001 || gru_scan | 21 | 6 | 2.08, 1.42 |
| encoder4_bfloat16 | 181 | 32 | 2.29, 0.003 || cnn | 114 | 18 | 2.50, 0.01 |
| encoder6_bfloat16 | 286 | 47 | 3.22, 0.001 || unet | 59 | 11 | 1.42, 0.90 |
| gpt2 | 48 | 16 | 6.31, 0.37 || lora | 75 | 23 | 2.54, 0.001 |
| gpt4_bfloat16 | 111 | 32 | 6.01, 0.50 || accumulated | 51 | 18 | 2.58, 0.02 |
| gpt6 | 141 | 43 | 5.78, 0.62 || | | | |

  encoder{2,4,6}, encoder{2,4,6}_bfloat16
      Encoder of 2, 4 or 6 layers, width 128, 4 heads, dropout 0.1, that classifies 4
      windows of 64 bytes of text; AdamW.
  gpt2, gpt4_bfloat16, gpt6
      Causal decoder of the same size that says the next byte of 4 windows; AdamW with
      warm-up and clipped gradients.
  vit
      Vision transformer of 4 layers, width 128, dropout 0.1, on 8 images of 32x32x3
      in patches of 4x4; AdamW with clipped gradients.
  mixer
      MLP-mixer of 4 layers, width 128, that says the noise in 8 noisy images in
      patches of 4x4, noise and times drawn anew in each step; Adam.
  gru_unrolled, gru_scan
      GRU of width 128 that reads 16 bytes of 32 windows in a Python loop, or in
      `nnx.RNN`, and classifies them; Adam.
  cnn
      Convolutions with BatchNorm in linen, widths 16, 32 and 64, on 16 images; SGD
      with momentum.
  unet
      U-Net of 3 levels, widths 16, 32 and 64, with group norm and an embedding of
      time, that says the noise in 4 noisy images of 32x32x3; Adam.
  lora
      Encoder of 4 layers in which only adapters of rank 4 and the head are trained,
      the rest being frozen by `optax.multi_transform`; AdamW.
  accumulated
      Encoder of 2 layers whose gradients `optax.MultiSteps` adds up over 4 steps.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.data import load_dataset
from experiments.models import loss_fn
from experiments.steps import Case, TrainingStep, nnx_case

WIDTH, HEADS, DROPOUT = 128, 4, 0.1
PATCH, LENGTH, BYTES = 4, 64, 256
TIMES = 64  # numbers in an embedding of time


class Attention(nnx.Module):
    def __init__(self, linear, causal: bool, dtype, rngs: nnx.Rngs):
        self.to_qkv = linear(WIDTH, 3 * WIDTH, dtype=dtype, rngs=rngs)
        self.to_out = linear(WIDTH, WIDTH, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)
        self.causal = causal

    def __call__(self, x):
        batch, length, _ = x.shape
        qkv = self.to_qkv(x).reshape(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
        if self.causal:
            mask = jnp.tril(jnp.ones((length, length), bool))
            scores = jnp.where(mask, scores, -1e9)
        weights = self.dropout(jax.nn.softmax(scores.astype(jnp.float32)))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(x.dtype), v)
        return self.to_out(mixed.reshape(x.shape))


class Block(nnx.Module):
    """Attention and a feed-forward network, normalised before."""

    def __init__(self, linear, causal: bool, dtype, rngs: nnx.Rngs):
        self.attention = Attention(linear, causal, dtype, rngs)
        self.norms = nnx.List(
            [nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs) for _ in range(2)]
        )
        self.up = linear(WIDTH, 4 * WIDTH, dtype=dtype, rngs=rngs)
        self.down = linear(4 * WIDTH, WIDTH, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norms[0](x)))
        hidden = jax.nn.gelu(self.up(self.norms[1](x)))
        return x + self.dropout(self.down(hidden))


class Transformer(nnx.Module):
    """Logits of whole inputs, or of every position where it is causal."""

    def __init__(
        self,
        layers: int,
        classes: int,
        *,
        embed: Callable[..., Any],
        length: int,
        causal: bool = False,
        dtype=jnp.float32,
        linear: Callable[..., Any] = nnx.Linear,
    ):
        rngs = nnx.Rngs(params=0, dropout=1)
        self.embed = embed(dtype=dtype, rngs=rngs)
        noise = jax.random.normal(rngs.params(), (length, WIDTH))
        self.positions = nnx.Param(0.02 * noise)
        self.blocks = nnx.List(
            [Block(linear, causal, dtype, rngs) for _ in range(layers)]
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, classes, rngs=rngs)
        self.causal = causal

    def __call__(self, inputs):
        x = self.embed(inputs)
        x = x.reshape(x.shape[0], -1, WIDTH) + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x if self.causal else x.mean(axis=1))


def patches_to(width: int) -> Callable[..., Any]:
    """An embedding of patches of images."""
    patch = (PATCH, PATCH)
    return functools.partial(nnx.Conv, 3, width, patch, strides=patch)


def encoder(
    layers: int,
    dtype=jnp.float32,
    *,
    optimizer: optax.GradientTransformation | None = None,
    linear: Callable[..., Any] = nnx.Linear,
) -> TrainingStep:
    data = load_dataset("text", length=LENGTH)
    make = functools.partial(
        Transformer,
        layers,
        data.num_classes,
        embed=functools.partial(nnx.Embed, BYTES, WIDTH),
        length=LENGTH,
        dtype=dtype,
        linear=linear,
    )
    case = nnx_case(make, loss_fn, lambda: next(data.batches(4, 0, 1)))
    return TrainingStep.of(case, optimizer or optax.adamw(1e-3))


def gpt(layers: int, dtype=jnp.float32) -> TrainingStep:
    data = load_dataset("text", length=LENGTH, next_byte=True)
    make = functools.partial(
        Transformer,
        layers,
        BYTES,
        embed=functools.partial(nnx.Embed, BYTES, WIDTH),
        length=LENGTH,
        causal=True,
        dtype=dtype,
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 5, 1000)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    case = nnx_case(make, loss_fn, lambda: next(data.batches(4, 0, 1)))
    return TrainingStep.of(case, optimizer)


def vit() -> TrainingStep:
    data = load_dataset("photos")
    make = functools.partial(
        Transformer,
        4,
        data.num_classes,
        embed=patches_to(WIDTH),
        length=(32 // PATCH) ** 2,
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    case = nnx_case(make, loss_fn, lambda: next(data.batches(8, 0, 1)))
    return TrainingStep.of(case, optimizer)


def embedded(times):
    """Sines and cosines of times in [0, 1]: [batch, TIMES]."""
    angles = times[:, None] * jnp.exp(jnp.linspace(0, math.log(1000), TIMES // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Mixer(nnx.Module):
    """Noise in images, from what tokens and channels say in turn."""

    def __init__(self, layers: int = 4, size: int = 32):
        rngs = nnx.Rngs(params=0)
        tokens = (size // PATCH) ** 2
        self.noise = nnx.Rngs(1)
        self.embed = patches_to(WIDTH)(rngs=rngs)
        self.time = nnx.Linear(TIMES, WIDTH, rngs=rngs)
        self.norms = nnx.List(
            [nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2 * layers)]
        )
        self.over_tokens, self.over_channels = (
            nnx.List(
                [
                    nnx.Sequential(
                        nnx.Linear(width, hidden, rngs=rngs),
                        jax.nn.gelu,
                        nnx.Linear(hidden, width, rngs=rngs),
                    )
                    for _ in range(layers)
                ]
            )
            for width, hidden in ((tokens, 2 * tokens), (WIDTH, 4 * WIDTH))
        )
        self.head = nnx.Linear(WIDTH, PATCH * PATCH * 3, rngs=rngs)

    def __call__(self, images, times):
        x = self.embed(images)
        batch, rows, columns, _ = x.shape
        x = x.reshape(batch, -1, WIDTH) + self.time(embedded(times))[:, None]
        parts = zip(self.over_tokens, self.over_channels, strict=True)
        for number, (over_tokens, over_channels) in enumerate(parts):
            mixed = over_tokens(self.norms[2 * number](x).swapaxes(1, 2))
            x = x + mixed.swapaxes(1, 2)
            x = x + over_channels(self.norms[2 * number + 1](x))
        x = self.head(x).reshape(batch, rows, columns, PATCH, PATCH, 3)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(images.shape)


class NormConv(nnx.Module):
    """Group norm, SiLU and a convolution, to which the time may add."""

    def __init__(self, before: int, width: int, rngs: nnx.Rngs):
        self.norm = nnx.GroupNorm(before, num_groups=8, rngs=rngs)
        self.conv = nnx.Conv(before, width, (3, 3), rngs=rngs)
        self.time = nnx.Linear(TIMES, width, rngs=rngs)

    def __call__(self, x, time):
        x = self.conv(jax.nn.silu(self.norm(x)))
        return x + self.time(time)[:, None, None]


class UNet(nnx.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)):
        rngs = nnx.Rngs(params=0)
        self.noise = nnx.Rngs(1)
        self.stem = nnx.Conv(3, widths[0], (3, 3), rngs=rngs)
        before = (widths[0], *widths)
        self.down = nnx.List(
            [
                NormConv(a, b, rngs)
                for pair in zip(before, widths, strict=False)
                for a, b in (pair, pair[1:] * 2)
            ]
        )
        self.up = nnx.List(
            [
                NormConv(a + b, b, rngs)
                for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
            ]
        )
        self.head = nnx.Conv(widths[0], 3, (3, 3), rngs=rngs)

    def __call__(self, images, times):
        time, x, skips = embedded(times), self.stem(images), []
        for number, block in enumerate(self.down):
            if number and number % 2 == 0:
                skips.append(x)
                x = nnx.avg_pool(x, (2, 2), (2, 2))
            x = block(x, time)
        for block in self.up:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = block(jnp.concatenate([x, skips.pop()], axis=-1), time)
        return self.head(x)


def denoising_loss(module, images):
    """How far the module is from the noise in noisy images (Ho et al. 2020)."""
    times = jax.random.uniform(module.noise(), images.shape[:1])
    noise = jax.random.normal(module.noise(), images.shape)
    angle = (math.pi / 2) * times[:, None, None, None]
    noisy = jnp.cos(angle) * images + jnp.sin(angle) * noise
    return jnp.mean((module(noisy, times) - noise) ** 2)


def denoiser(make: Callable[[], nnx.Module], batch_size: int) -> TrainingStep:
    photos = load_dataset("photos")
    case = nnx_case(
        make, denoising_loss, lambda: next(photos.batches(batch_size, 0, 1))[0]
    )
    return TrainingStep.of(case, optax.adam(1e-3))


class Recurrent(nnx.Module):
    def __init__(self, classes: int, in_a_scan: bool, width: int = 128):
        rngs = nnx.Rngs(params=0)
        self.embed = nnx.Embed(BYTES, width, rngs=rngs)
        self.cell = nnx.GRUCell(width, width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)
        self.in_a_scan = in_a_scan

    def __call__(self, tokens):
        inputs = self.embed(tokens)
        state = jnp.zeros_like(inputs[:, 0])
        if self.in_a_scan:
            return self.head(nnx.RNN(self.cell)(inputs, initial_carry=state)[:, -1])
        for place in range(inputs.shape[1]):
            state, _ = self.cell(state, inputs[:, place])
        return self.head(state)


def gru(in_a_scan: bool) -> TrainingStep:
    data = load_dataset("text", length=16)
    make = functools.partial(Recurrent, data.num_classes, in_a_scan)
    case = nnx_case(make, loss_fn, lambda: next(data.batches(32, 0, 1)))
    return TrainingStep.of(case, optax.adam(1e-3))


class CNN(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        for width in (16, 32, 64):
            for _ in range(2):
                x = nn.Conv(width, (3, 3), use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(self.classes)(x.mean(axis=(1, 2)))


def cnn() -> TrainingStep:
    photos = load_dataset("photos")
    module = CNN(photos.num_classes)

    def init():
        batch = jax.tree.map(jnp.asarray, next(photos.batches(16, 0, 1)))
        variables = module.init(jax.random.key(0), batch[0])
        return variables["params"], variables["batch_stats"], batch

    def loss(params, statistics, batch):
        variables = {"params": params, "batch_stats": statistics}
        images, labels = batch
        logits, new = module.apply(variables, images, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), new["batch_stats"]

    return TrainingStep.of(Case(init, loss), optax.sgd(0.05, momentum=0.9))


def lora() -> TrainingStep:
    def kind(path, _) -> str:
        words = jax.tree_util.keystr(path)
        return "trained" if "lora" in words or "head" in words else "frozen"

    transforms = {"trained": optax.adamw(3e-3), "frozen": optax.set_to_zero()}
    optimizer = optax.multi_transform(
        transforms, functools.partial(jax.tree.map_with_path, kind)
    )
    linear = functools.partial(nnx.LoRALinear, lora_rank=4)
    return encoder(4, optimizer=optimizer, linear=linear)


def accumulated() -> TrainingStep:
    optimizer = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4)
    return encoder(2, optimizer=optimizer.gradient_transformation())


SMALL_STEPS: dict[str, Callable[[], TrainingStep]] = {
    "encoder2": functools.partial(encoder, 2),
    "encoder4": functools.partial(encoder, 4),
    "encoder6": functools.partial(encoder, 6),
    "encoder2_bfloat16": functools.partial(encoder, 2, jnp.bfloat16),
    "encoder4_bfloat16": functools.partial(encoder, 4, jnp.bfloat16),
    "encoder6_bfloat16": functools.partial(encoder, 6, jnp.bfloat16),
    "gpt2": functools.partial(gpt, 2),
    "gpt4_bfloat16": functools.partial(gpt, 4, jnp.bfloat16),
    "gpt6": functools.partial(gpt, 6),
    "vit": vit,
    "mixer": functools.partial(denoiser, Mixer, 8),
    "gru_unrolled": functools.partial(gru, False),
    "gru_scan": functools.partial(gru, True),
    "cnn": cnn,
    "unet": functools.partial(denoiser, UNet, 4),
    "lora": lora,
    "accumulated": accumulated,
}
