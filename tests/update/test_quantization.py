"""Frozen kernels of few bits: their error, and training beside them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_three_sentences
from flax import nnx

import poet_jax
from poet_jax.update import Quantized, Update, last_blocks, lora, quantized

KINDS = {"int8": 127, "int4": 7}
WIDTH, DEPTH = 128, 4
BATCH = (
    jax.random.normal(jax.random.key(1), (16, WIDTH)),
    jnp.arange(16) % 10,
)
OPTIONS = {"planner": poet_jax.greedy, "device": poet_jax.devices.RASPBERRY_PI_4}


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(DEPTH):
            x = x + jnp.tanh(nn.Dense(WIDTH, name=f"block_{number}")(x))
        return nn.Dense(10, name="head")(x)


class NnxNet(nnx.Module):
    """The same, with the same paths."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        for number in range(DEPTH):
            setattr(self, f"block_{number}", nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        for number in range(DEPTH):
            x = x + jnp.tanh(getattr(self, f"block_{number}")(x))
        return self.head(x)


def linen(update, budget=2**30, **options):
    """A linen step and its state."""
    step = poet_jax.train_step(LinenNet(), budget, update=update, **OPTIONS | options)
    return step, step.init(jax.random.key(0), BATCH)


def kernels(params):
    return {name: params[name]["kernel"] for name in params}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 3), "float32"),
        ((65, 2), "float32"),
        ((128, 5), "bfloat16"),
        ((3, 3, 31), "float32"),
    ],
)
def test_numbers_are_within_half_a_scale(shape, dtype, kind):
    kernel = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    kernel = kernel.at[..., 0].set(0.0)
    few = quantized(kernel, kind)
    back = jax.jit(Quantized.dequantized)(few)
    assert (back.shape, back.dtype) == (kernel.shape, kernel.dtype)
    error = np.abs(np.float32(back) - np.float32(kernel)).reshape(-1, shape[-1])
    scales = np.repeat(few.scales, few.codes.shape[1], 1).reshape(-1, shape[-1])
    if kind == "int4":  # two rows in a byte
        scales = np.repeat(scales, 2, 0)
    rounding = 2**-7 if dtype == "bfloat16" else 2**-22
    largest = scales[: len(error)] * KINDS[kind]
    assert (error <= largest * (0.5 / KINDS[kind] + rounding)).all()
    assert not error[:, 0].any()


def test_small_halves_are_as_near_as_large_ones():
    """A scale of them is no number of their type."""
    kernel = jax.random.uniform(jax.random.key(0), (64, 8), minval=-1e-4, maxval=1e-4)
    kernel = kernel.astype(jnp.float16)
    error = jnp.abs(quantized(kernel, "int8").dequantized() - kernel).max()
    assert error <= 1.1 * jnp.abs(kernel).max() / 254


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_a_kernel_takes_its_bits_and_half_a_bit_of_scales(kind, bits):
    few = quantized(jnp.ones((256, 64)), kind)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(few))
    assert nbytes * 8 == few.size * (bits + 0.5)


@pytest.mark.parametrize(("kind", "budget"), [("int8", "100%"), ("int4", "least")])
def test_adapters_learn_as_beside_the_same_kernels_as_floats(kind, budget):
    step, state = linen(lora(2, quantize=kind))
    if budget == "least":
        with pytest.raises(poet_jax.BudgetTooSmall) as raised:
            linen(lora(2, quantize=kind), "1%")[0].plan(state, BATCH)
        step, _ = linen(lora(2, quantize=kind), raised.value.smallest_bytes)
    tx = optax.adamw(1e-3)
    params = jax.tree.map(jnp.copy, state.part.merged(state.params))
    assert all(isinstance(x, jax.Array) for x in kernels(params).values())

    def loss(adapters):
        def added(name, kernel):
            a, b = adapters[f"{name}/kernel"]
            return kernel + a @ b

        whole = {
            name: {"kernel": added(name, leaves["kernel"]), "bias": leaves["bias"]}
            for name, leaves in params.items()
        }
        predictions = LinenNet().apply({"params": whole}, BATCH[0])
        return optax.softmax_cross_entropy_with_integer_labels(
            predictions, BATCH[1]
        ).mean()

    @jax.jit
    def plain(adapters, moments):
        updates, moments = tx.update(jax.grad(loss)(adapters), moments, adapters)
        return optax.apply_updates(adapters, updates), moments

    expected = jax.tree.map(jnp.copy, state.part.adapters)
    codes = [np.array(x.codes) for x in kernels(state.params).values()]
    moments = tx.init(expected)
    for _ in range(2):
        state, _ = step(state, BATCH)
        expected, moments = plain(expected, moments)
    for path, (a, b) in state.part.adapters.items():
        np.testing.assert_allclose(a, expected[path].a, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(b, expected[path].b, rtol=1e-3, atol=1e-5)
    for before, after in zip(codes, kernels(state.params).values(), strict=True):
        np.testing.assert_array_equal(before, after.codes)


@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_keeps_a_decoded_kernel(kind):
    plain, few = (
        step.plan(state, BATCH)
        for step, state in (linen(lora(2)), linen(lora(2, quantize=kind)))
    )
    saved = 1 - (int(kind[-1]) + 0.5) / 32
    kernel = WIDTH * WIDTH * 4
    most = plain.baseline.peak_bytes - DEPTH * saved * kernel + kernel
    assert few.baseline.peak_bytes <= most + 0.1 * kernel  # scales of the head


def test_an_nnx_model_is_quantized_in_place_and_merged_to_floats():
    model = NnxNet()
    before = np.array(model.block_0.kernel[...])
    step = poet_jax.train_step(
        model, 2**30, update=last_blocks(1, quantize="int8"), **OPTIONS
    )
    first = step(BATCH)
    held = [getattr(model, f"block_{n}").kernel.get_value() for n in range(DEPTH)]
    assert [isinstance(x, Quantized) for x in held] == [True] * (DEPTH - 1) + [False]
    assert isinstance(model.head.kernel.get_value(), jax.Array)
    assert step(BATCH) < first
    merged = step.merged()
    np.testing.assert_allclose(merged.block_0.kernel[...], before, atol=2e-3)
    assert merged(BATCH[0]).shape == (16, 10)


@pytest.mark.parametrize("update", [None, lora(2)], ids=["all", "lora"])
def test_a_merged_model_outlives_the_steps_that_follow(update):
    step = poet_jax.train_step(NnxNet(), 2**30, update=update, **OPTIONS)
    step(BATCH)
    merged = step.merged()
    before = np.array(merged(BATCH[0]))
    step(BATCH)
    np.testing.assert_array_equal(merged(BATCH[0]), before)
    assert not np.array_equal(step.merged()(BATCH[0]), before)


@pytest.mark.parametrize("pattern", ["**", "**/bias"])
def test_what_cannot_be_quantized_is_named(pattern):
    scheme = Update({"head/*": 1.0}, quantize={pattern: "int8"})
    with pytest.raises(ValueError, match="bias.*float32") as raised:
        linen(scheme)
    assert_three_sentences(raised.value)


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="'int8' or 'int4'.*'int2'") as raised:
        lora(8, quantize="int2")
    assert_three_sentences(raised.value)
