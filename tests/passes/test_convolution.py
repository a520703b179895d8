"""Filter gradients as matrix products: the numbers of XLA's convolution, fewer
surprises."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import DEVICE, examples

import poet_jax
from poet_jax.passes.cpu import rules
from poet_jax.passes.cpu.convolution import in_parts, is_filter_gradient

NHWC = ("NHWC", "HWIO", "NHWC")


def convolve(image, kernel, numbers=NHWC, strides=(1, 1), padding="SAME", **options):
    return jax.lax.conv_general_dilated(
        image, kernel, strides, padding, dimension_numbers=numbers, **options
    )


# As in the package, but for gradients of small filters.
RULES = tuple(
    dataclasses.replace(rule, applies=is_filter_gradient)
    if rule.name == "filter_gradient"
    else rule
    for rule in rules.RULES
)
cpu_kernels = functools.partial(rules.cpu_kernels, rules=RULES)


def graph_of(fun, *args):
    return cpu_kernels(poet_jax.passes.group(poet_jax.trace(fun, *args)))


def slope_of(convolution, image, kernel):
    """The filter's gradient of a sum of squares."""
    return jax.grad(lambda kernel: (convolution(image, kernel) ** 2).sum())(kernel)


@st.composite
def convolutions(draw):
    """(convolution, image, kernel) in two dimensions, or at times in one."""
    rank = draw(st.sampled_from([2, 2, 1]))

    def sizes(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    ends = st.tuples(st.integers(-1, 2), st.integers(-1, 3))
    padding = draw(
        st.sampled_from(["SAME", "VALID"]) | st.tuples(*[ends] * rank).map(list)
    )
    batch, inputs, outputs = (draw(st.integers(1, 5)) for _ in range(3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    image = rng.normal(size=(batch, *sizes(9, 14), inputs)).astype(np.float32)
    kernel = rng.normal(size=(*sizes(1, 3), inputs, outputs)).astype(np.float32)
    convolution = functools.partial(
        convolve,
        numbers=NHWC if rank == 2 else ("NHC", "HIO", "NHC"),
        strides=sizes(1, 3),
        padding=padding,
        rhs_dilation=sizes(1, 2),
    )
    return convolution, jnp.asarray(image), jnp.asarray(kernel)


def large(image, kernel, **options):
    """(convolution, image, kernel) of these shapes."""
    keys = jax.random.split(jax.random.key(0))
    convolution = functools.partial(convolve, **options)
    return (
        convolution,
        jax.random.normal(keys[0], image),
        jax.random.normal(keys[1], kernel),
    )


@examples(25)
@example(case=large((2, 56, 56, 64), (3, 3, 64, 4)))  # rows come in parts
@given(case=convolutions())
def test_they_are_the_gradients_of_xla_whatever_stride_padding_and_dilation(case):
    """Also of images so large that their rows come in parts."""
    convolution, image, kernel = case
    fun = functools.partial(slope_of, convolution)
    expected = jax.jit(fun)(image, kernel)
    (actual,) = jax.jit(graph_of(fun, image, kernel).__call__)(image, kernel)
    scale = float(jnp.abs(expected).max()) + 1e-6
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * scale)


IMAGE, KERNEL = jnp.ones((4, 16, 16, 4)), jnp.ones((3, 3, 4, 8))


@pytest.mark.parametrize(
    ("options", "are_products"),
    [
        ({"precision": "highest"}, [True, True]),
        ({"strides": (2, 1)}, [True, True]),
        ({"padding": [(-1, 0), (0, 0)]}, [True, False]),
        ({"padding": [(-1, 1), (0, 0)]}, [False, False]),
    ],
)
@pytest.mark.parametrize("numbers", [NHWC, ("NHWC", "OIHW", "NHWC")])
def test_pointwise_convolutions_and_gradients_are_products_but_for_zeros_around_them(
    numbers, options, are_products
):
    rng = np.random.default_rng(0)
    image = rng.normal(size=(2, 5, 7, 3)).astype(np.float32)
    kernel = rng.normal(size=(1, 1, 3, 4)).astype(np.float32)
    kernel = kernel if numbers == NHWC else kernel.transpose(3, 2, 0, 1)

    def fun(image, kernel):
        convolution = functools.partial(convolve, kernel=kernel, numbers=numbers)
        result, transposed = jax.vjp(lambda image: convolution(image, **options), image)
        return transposed(jnp.cos(result))

    graph = cpu_kernels(poet_jax.trace(fun, image, kernel))
    convolutions = [
        e.lowering is not None
        for node in graph.nodes
        for e in node.equations
        if e.primitive.name == "conv_general_dilated"
    ]
    assert convolutions == are_products
    np.testing.assert_allclose(
        jax.jit(graph.__call__)(image, kernel)[0],
        jax.jit(fun)(image, kernel)[0],
        rtol=1e-5,
        atol=1e-5,
    )


@examples(10)
@given(
    padding=st.tuples(*[st.tuples(st.integers(-1, 2), st.integers(-1, 2))] * 2),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    spoilt=st.sampled_from(["image", "kernel"]),
    number=st.sampled_from([np.inf, -np.inf, np.nan]),
)
@example(padding=((0, 1), (0, 0)), dilation=(1, 1), spoilt="kernel", number=np.inf)
@example(padding=((0, 1), (0, 0)), dilation=(2, 1), spoilt="kernel", number=np.inf)
def test_a_number_that_is_not_finite_goes_where_xla_has_it(
    padding, dilation, spoilt, number
):
    rng = np.random.default_rng(0)
    image = rng.normal(size=(2, 5, 7, 3)).astype(np.float32)
    kernel = rng.normal(size=(1, 1, 3, 4)).astype(np.float32)
    {"image": image[:, 2:], "kernel": kernel[0]}[spoilt][0, 0, 1] = number
    fun = functools.partial(convolve, padding=padding, lhs_dilation=dilation)
    (found,) = jax.jit(graph_of(fun, image, kernel).__call__)(image, kernel)
    expected = jax.jit(fun)(image, kernel)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"numbers": ("NCHW", "HWIO", "NCHW")},
        {"feature_group_count": 2},
    ],
)
def test_what_has_channels_first_or_in_groups_is_not_a_product(options):
    channels = 2 if "feature_group_count" in options else 4
    kernel = jnp.ones((1, 1, channels, 4))
    traced = poet_jax.trace(
        functools.partial(convolve, **options), jnp.ones((4, 4, 4, 4)), kernel
    )
    assert not cpu_kernels(traced).is_lowered


def test_the_gradient_is_replaced_and_nothing_else():
    graph = graph_of(functools.partial(slope_of, convolve), IMAGE, KERNEL)
    lowered = [e.lowering is not None for n in graph.nodes for e in n.equations
               if e.primitive.name == "conv_general_dilated"]  # fmt: skip
    assert sorted(lowered) == [False, True]


@pytest.mark.parametrize(
    ("convolution", "image", "kernel"),
    [
        (convolve, IMAGE.astype(jnp.bfloat16), KERNEL.astype(jnp.bfloat16)),
        (
            functools.partial(convolve, feature_group_count=2),
            IMAGE,
            jnp.ones((3, 3, 2, 8)),
        ),
        (
            functools.partial(convolve, numbers=("NCHW", "OIHW", "NCHW")),
            jnp.ones((4, 4, 16, 16)),
            jnp.ones((8, 4, 3, 3)),
        ),
        (convolve, IMAGE[:0], KERNEL),
    ],
    ids=["bfloat16", "groups", "channels first", "no images"],
)
def test_what_it_does_not_cover_stays_as_it_was(convolution, image, kernel):
    assert not graph_of(
        functools.partial(slope_of, convolution), image, kernel
    ).is_lowered


def test_what_lies_in_caches_is_left_to_xla():
    slope = functools.partial(slope_of, convolve)
    for images, is_lowered in ((4, False), (256, True)):
        graph = poet_jax.trace(slope, jnp.ones((images, *IMAGE.shape[1:])), KERNEL)
        assert rules.cpu_kernels(graph).is_lowered == is_lowered


@pytest.mark.parametrize("trace", [False, True], ids=["whole", "planned"])
def test_it_is_a_pass_that_can_be_left_out(trace):
    def fun(kernel, image):
        return slope_of(convolve, jnp.tanh(convolve(image, kernel[..., :4])), kernel)

    schedule = functools.partial(
        poet_jax.schedule,
        fun,
        "1GiB",
        device=DEVICE,
        planner=poet_jax.greedy,
        executor=poet_jax.HostExecutor(trace=trace),
    )
    with_it, without = (
        schedule(),
        schedule(passes=(poet_jax.passes.group, poet_jax.passes.reorder)),
    )
    args = KERNEL * 0.01, jax.random.normal(jax.random.key(0), (32, 56, 56, 4))
    assert with_it.plan(*args).graph.is_lowered
    assert not without.plan(*args).graph.is_lowered
    expected = jax.jit(fun)(*args)
    for scheduled in (with_it, without):
        for _ in range(2):
            np.testing.assert_allclose(
                scheduled(*args), expected, rtol=1e-4, atol=1e-4 * abs(expected).max()
            )
    prints = {s.plan(*args).graph.fingerprint for s in (with_it, without)}
    assert len(prints) == 2


@st.composite
def depthwise(draw):
    """(convolution, image, kernel), at times of the last one's gradient for images."""
    rank = draw(st.sampled_from([2, 2, 1]))

    def sizes(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    ends = st.tuples(st.integers(-1, 2), st.integers(-1, 3))
    padding = draw(
        st.sampled_from(["SAME", "VALID"]) | st.tuples(*[ends] * rank).map(list)
    )
    batch, channels = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([np.float32, np.float32, np.float16]))
    image = rng.normal(size=(batch, *sizes(9, 14), channels)).astype(dtype)
    kernel = rng.normal(size=(*sizes(1, 3), 1, channels)).astype(dtype)
    convolution = functools.partial(
        convolve,
        numbers=NHWC if rank == 2 else ("NHC", "HIO", "NHC"),
        strides=sizes(1, 3),
        padding=padding,
        rhs_dilation=sizes(1, 2),
        feature_group_count=channels,
    )
    return convolution, jnp.asarray(image), jnp.asarray(kernel)


@examples(30)
@example(
    case=large((4, 64, 64, 32), (3, 3, 1, 32), feature_group_count=32)
)  # images come in parts
@given(case=depthwise())
def test_depthwise_convolutions_and_both_gradients_are_those_of_xla(case):
    """Also of images that come in parts; nothing else than floats of full precision is
    touched."""
    convolution, image, kernel = case
    shape = jax.eval_shape(convolution, image, kernel).shape
    slope = np.cos(np.arange(math.prod(shape))).reshape(shape).astype(image.dtype)

    def fun(image, kernel):
        result, transposed = jax.vjp(convolution, image, kernel)
        return result, *transposed(slope)

    graph = cpu_kernels(poet_jax.trace(fun, image, kernel))
    with jax.numpy_rank_promotion("raise"):
        results = jax.jit(graph.__call__)(image, kernel)
    lowered = [
        e.lowering is not None
        for node in graph.nodes
        for e in node.equations
        if e.primitive.name == "conv_general_dilated"
    ]
    assert lowered == [image.dtype == jnp.float32] * 3
    for result, expected in zip(results, jax.jit(fun)(image, kernel), strict=True):
        scale = float(jnp.abs(expected).max()) + 1e-6
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "options",
    [
        {"feature_group_count": 2},
        {"feature_group_count": 4, "numbers": ("NCHW", "HWIO", "NCHW")},
    ],
)
def test_what_mixes_channels_or_has_them_first_is_not_depthwise(options):
    inputs = 4 // options["feature_group_count"]
    kernel = jnp.ones((2, 2, inputs, 4))
    traced = poet_jax.trace(
        functools.partial(convolve, **options), jnp.ones((4, 4, 4, 4)), kernel
    )
    assert not cpu_kernels(traced).is_lowered


def wide(image, kernel):
    """What has one convolution, of the backward pass."""
    return jax.grad(lambda image: convolve(image, kernel).mean())(jnp.tanh(image))


def test_a_step_with_wide_convolutions_may_be_transformed_and_traced_over():
    """Also after it ran alone: what XLA compiled cannot be part of another."""
    keys = jax.random.split(jax.random.key(0))
    image = jax.random.normal(keys[0], (2, 8, 8, 16))
    kernel = jax.random.normal(keys[1], (3, 3, 16, 16))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
    scheduled = poet_jax.schedule(
        wide, "1GiB", device=DEVICE, planner=poet_jax.keep_all
    )
    for _ in range(2):
        expected = wide(image, kernel)
        close(scheduled(image, kernel), expected)
        close(jax.jit(scheduled)(image, kernel), expected)
        close(jax.jit(lambda: scheduled(image, kernel))(), expected)
        value, _ = jax.value_and_grad(lambda *x: scheduled(*x).sum())(image, kernel)
        close(value, expected.sum())
        each = jax.vmap(scheduled, in_axes=(0, None))(jnp.stack([image] * 2), kernel)
        close(each, jnp.stack([expected] * 2))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "VALID", "strides": (1, 2)},
        {"padding": [(1, 3), (0, 2)], "rhs_dilation": (2, 1)},
    ],
)
def test_images_have_nothing_to_do_with_each_other(options):
    """A few at a time give the same numbers."""
    keys = jax.random.split(jax.random.key(0))
    image = jax.random.normal(keys[0], (9, 64, 64, 64))
    kernel = jax.random.normal(keys[1], (3, 3, 64, 64)) / 24
    convolution = functools.partial(convolve, **options)
    graph = cpu_kernels(poet_jax.trace(convolution, image, kernel))
    (changed,) = [e.lowering for n in graph.nodes for e in n.equations]
    assert changed is in_parts
    (got,) = jax.jit(lambda *args: graph(*args))(image, kernel)
    expected = jax.jit(convolution)(image, kernel)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_large_images_are_not_copied_at_once():
    """Those of the forward pass; XLA copies 24 MiB of them otherwise."""
    image, kernel = jnp.ones((16, 64, 64, 96)), jnp.ones((3, 3, 96, 32))

    def loss(kernel, image):
        return (jnp.tanh(convolve(image, kernel)) ** 2).sum()

    graph = cpu_kernels(poet_jax.trace(jax.grad(loss), kernel, image))
    nodes = [n for n in graph.nodes if n.equations[0].lowering is in_parts]
    assert [node.backward for node in nodes] == [False]
    workspaces = [
        poet_jax.price(x, DEVICE).workspace_bytes.max()
        for x in (
            poet_jax.trace(convolve, image, kernel),
            cpu_kernels(poet_jax.trace(convolve, image, kernel)),
        )
    ]
    assert workspaces[1] < image.nbytes * 2 / 3
    # XLA copies them up to JAX 0.10.
    assert workspaces[0] >= image.nbytes or jax.__version_info__ >= (0, 11)


@pytest.mark.parametrize(
    ("image", "kernel"),
    [
        ((1, 256, 256, 64), (3, 3, 64, 64)),  # one image
        ((8, 32, 32, 64), (3, 3, 64, 64)),  # 2 MiB
        ((16, 64, 64, 96), (3, 3, 96, 8)),  # little work
    ],
)
def test_what_is_not_worth_it_is_computed_at_once(image, kernel):
    graph = poet_jax.trace(convolve, jnp.zeros(image), jnp.zeros(kernel))
    assert not cpu_kernels(graph).is_lowered


def test_what_is_summed_of_large_convolutions_rounds_as_under_jit():
    """BatchNorms between them: XLA sums in another order what it has to reshape."""

    def normalised(x):
        mean = x.mean((0, 1, 2))
        variance = (x * x).mean((0, 1, 2)) - mean**2
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5), mean, variance

    def forward(image, *kernels):
        first, *moments = normalised(convolve(image, kernels[0]))
        second, *others = normalised(convolve(jax.nn.relu(first), kernels[1]))
        return jax.nn.relu(second + image), moments, others

    keys = jax.random.split(jax.random.key(0), 3)
    image = jax.random.normal(keys[0], (64, 32, 32, 64))
    kernels = [jax.random.normal(key, (3, 3, 64, 64)) / 24 for key in keys[1:]]
    scheduled = poet_jax.schedule(forward, "100%", device=DEVICE)
    assert scheduled.plan(image, *kernels).graph.is_lowered
    results = scheduled(image, *kernels), jax.jit(forward)(image, *kernels)
    for got, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "image, kernel",
    [
        ((2, 8, 8, 4), (3, 3, 4, 0)),
        ((0, 8, 8, 4), (3, 3, 4, 4)),
        ((2, 8, 8, 0), (1, 1, 0, 4)),
    ],
)
def test_a_convolution_of_nothing_is_left_as_it_is(image, kernel):
    def fun(image, kernel):
        return convolve(image, kernel), slope_of(convolve, image, kernel)

    args = jnp.ones(image), jnp.ones(kernel)
    scheduled = poet_jax.schedule(fun, "1GiB", device=DEVICE, planner=poet_jax.greedy)
    for got, expected in zip(scheduled(*args), jax.jit(fun)(*args), strict=True):
        np.testing.assert_array_equal(got, expected)
