"""A frozen scale in a frozen kernel: the same gradients from fewer arrays."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_three_sentences
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from strategies import examples
from toy import OPTIONS

import poet_jax
from poet_jax.update import Update, bias_only, full

CHANNELS = 4
X = jax.random.normal(jax.random.key(0), (2, 6, 6, CHANNELS))


class LinenNet(nn.Module):
    """Residual blocks of a convolution and BatchNorm."""

    blocks: int = 2
    kernel: tuple = (3, 3)
    groups: int = 1

    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(self.blocks):
            y = nn.Conv(
                CHANNELS, self.kernel, use_bias=False, feature_group_count=self.groups
            )(x)
            x = nn.relu(x + nn.BatchNorm(not train)(y))
        return x


class NnxNet(nnx.Module):
    """The same."""

    def __init__(self, blocks=2, kernel=(3, 3)):
        rngs = nnx.Rngs(0)
        self.convs = nnx.List(
            nnx.Conv(CHANNELS, CHANNELS, kernel, use_bias=False, rngs=rngs)
            for _ in range(blocks)
        )
        self.norms = nnx.List(nnx.BatchNorm(CHANNELS, rngs=rngs) for _ in range(blocks))

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nn.relu(x + norm(conv(x)))
        return x


def scrambled(tree):
    """Scales, statistics and biases that are neither ones nor zeros."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    draws = [
        jax.random.uniform(k, x.shape, x.dtype, 0.5, 1.5) if x.ndim == 1 else x
        for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, draws)


def linen_step(scheme, train=False, **options):
    """(step, its parameters) of one update of a part."""
    net = LinenNet(**options)
    variables = scrambled(net.init(jax.random.key(0), X))
    rest = {"batch_stats": variables["batch_stats"]}

    def forward(params):
        mutable = ["batch_stats"] if train else []
        return net.apply({"params": params, **rest}, X, train, mutable=mutable)[0]

    return step_of(forward, scheme, variables["params"])


def nnx_step(scheme, train=False, **options):
    model = NnxNet(**options)
    model.set_attributes(use_running_average=not train)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params, rest = scrambled(nnx.as_pure((params, rest)))

    def forward(params):
        return nnx.merge(graphdef, params, rest)(X)

    return step_of(forward, scheme, params)


def step_of(forward, scheme, params):
    part = scheme.of(params)

    def step(params):
        gradients = jax.grad(
            lambda trainable: jnp.sum(jnp.sin(forward(part.merge(trainable, params))))
        )(part.split(params))
        new = jax.tree.map(lambda x, g: x - 0.1 * g, part.split(params), gradients)
        return part.replace(new, params)[0]

    return step, params


STEPS = pytest.mark.parametrize("step", [linen_step, nnx_step])


def scalings(graph):
    """Products in the backward pass that are as large as an image."""
    return sum(
        node.backward and node.equations[0].primitive.name == "mul"
        for node in graph.nodes
        for v in node.writes
        if graph.values[v].shape == X.shape
    )


@STEPS
@examples(2)
@given(blocks=st.integers(1, 3), side=st.integers(1, 3), donate=st.booleans())
def test_a_folded_step_is_the_step(step, blocks, side, donate):
    """To rounding; what is frozen, to the bit."""
    fun, params = step(bias_only(), blocks=blocks, kernel=(side, 3))
    jitted = jax.jit(fun, donate_argnums=0 if donate else ())
    before = poet_jax.trace(jitted, params)
    after = poet_jax.passes.fold_scales(before)
    # The gradient goes through all convolutions but the first.
    assert scalings(before) - scalings(after) == blocks - 1
    leaves, tree = jax.tree.flatten(params)
    got, expected = jax.jit(lambda *x: (after(*x), before(*x)))(*leaves)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree.unflatten(got)):
        if "bias" not in jax.tree_util.keystr(path):
            old = dict(jax.tree_util.tree_leaves_with_path(params))[path]
            np.testing.assert_array_equal(leaf, old)


@STEPS
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (full(), {}),
        (Update({"**/kernel": 1.0}), {}),
        (Update({"**/scale": 1.0}), {"blocks": 1}),
        (bias_only(), {"train": True}),
    ],
    ids=["everything", "kernels", "scales", "batch statistics"],
)
def test_where_weights_are_trained_or_a_batch_normalises_nothing_changes(
    step, scheme, options
):
    traced = poet_jax.trace(*step(scheme, **options))
    assert poet_jax.passes.fold_scales(traced) is traced


def test_grouped_convolutions_and_gradients_alone_stay():
    fun, params = linen_step(bias_only(), groups=2)
    traced = poet_jax.trace(fun, params)
    assert poet_jax.passes.fold_scales(traced) is traced
    fun, params = linen_step(bias_only())
    # Nothing says that what is not returned stays as it is.
    traced = poet_jax.trace(lambda p: jax.tree.map(jnp.negative, fun(p)), params)
    assert poet_jax.passes.fold_scales(traced) is traced


@pytest.mark.parametrize(
    ("size", "scale", "read_twice", "folds"),
    [
        (8, (1, 1, 1, 4), False, True),
        (8, (), False, True),
        (1, (1, 1, 1, 4), False, False),
        (8, (8, 1, 1, 1), False, False),
        (8, (4,), False, True),
        (1, (4,), False, False),
        (8, (1, 1, 1, 4), True, False),
    ],
    ids=[
        "channels",
        "scalar",
        "large kernel",
        "images",
        "spread",
        "both spread",
        "read",
    ],
)
def test_it_pays_only_where_an_array_goes(size, scale, read_twice, folds):
    def fun(x, scale, kernel):
        given = scale
        if scale.ndim == 1:
            scale = lax.broadcast_in_dim(scale, (8, 8, 8, 4), (3,))
        scaled = jnp.cos(x) * scale
        out = lax.conv_general_dilated(
            scaled, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return out, given, kernel, jnp.sum(scaled) if read_twice else 0.0

    image = jax.random.normal(jax.random.key(2), (8, size, size, 4))
    args = image, jnp.full(scale, 1.5, "float32"), jnp.ones((3, 3, 4, 4))
    before = poet_jax.trace(fun, *args)
    after = poet_jax.passes.fold_scales(before)
    assert (after is not before) == folds
    got, expected = jax.jit(lambda *x: (after(*x)[0], before(*x)[0]))(*args)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "result", "pixel", "scale", "weight"),
    [
        ("float32", "float32", 3, 0.5, 2),
        ("bfloat16", "bfloat16", 3, 0.5, 2),
        ("float16", "float16", 1e-4, 1e4, 1e4),
        ("float16", "float16", 1e4, 1e-4, 1e-4),
        ("int8", "int32", 3, 50, 3),
        ("int8", "int8", 3, 50, 3),
    ],
)
def test_only_what_has_the_range_for_it_is_scaled_elsewhere(
    dtype, result, pixel, scale, weight
):
    def fun(x, scale, kernel):
        out = lax.conv_general_dilated(
            x * scale,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            preferred_element_type=result,
        )
        return out, scale, kernel

    shapes = (2, 4, 4, 3), (1, 1, 1, 3), (1, 1, 3, 2)
    args = [*map(jnp.full, shapes, (pixel, scale, weight), (dtype,) * 3)]
    before = poet_jax.trace(fun, *args)
    after = poet_jax.passes.fold_scales(before)
    assert (after is before) == (dtype in ("float16", "int8"))
    np.testing.assert_allclose(after(*args)[0], before(*args)[0])


def test_a_step_within_a_budget_needs_less_of_it():
    """A pass that can be left out, by XLA's count of a step that ran."""
    batch = jnp.tile(X, (64, 1, 1, 1))
    runs = []
    for without in ((), (poet_jax.passes.fold_scales,)):
        model = NnxNet(blocks=3)
        model.eval()
        passes = tuple(x for x in poet_jax.passes.PASSES if x not in without)
        step = poet_jax.train_step(
            model,
            "1GiB",
            optimizer=optax.sgd(0.1),
            update=bias_only(),
            passes=passes,
            **OPTIONS,
        )
        loss = step((batch, batch))
        peak_bytes = step.last_run.peak_bytes
        runs.append((loss, nnx.to_pure_dict(nnx.state(model)), peak_bytes))
    (loss, state, peak_bytes), (plain_loss, plain_state, plain_bytes) = runs
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        state,
        plain_state,
    )
    assert plain_bytes - peak_bytes > batch.nbytes / 2


def test_a_graph_of_groups_is_refused():
    graph = poet_jax.passes.group(poet_jax.trace(lambda x: jnp.sin(x) * 2, jnp.ones(9)))
    with pytest.raises(ValueError) as caught:
        poet_jax.passes.fold_scales(graph)
    assert_three_sentences(caught.value, "passes=")
