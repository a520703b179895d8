"""Sums in other forms: those of XLA, but for rounding where there are many terms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

import poet_jax


@examples(40)
@given(data=st.data())
def test_short_sums_are_the_sums_of_xla(data):
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    dtype = data.draw(st.sampled_from([np.float32, np.float16, np.int32]))
    rng = np.random.default_rng(0)
    array = jnp.asarray(8 * rng.normal(size=shape), dtype)

    def fun(array):
        return jax.lax.reduce_sum(array, sorted(axes))

    graph = poet_jax.passes.cpu_kernels(poet_jax.trace(fun, array))
    count = np.prod([shape[axis] for axis in axes], dtype=int)
    is_short = 1 < count <= 4 and len(shape) - 1 not in axes and dtype is np.float32
    assert graph.is_lowered == is_short
    np.testing.assert_array_equal(
        jax.jit(graph.__call__)(array)[0], jax.jit(fun)(array)
    )


def test_the_gradient_of_upsampling_needs_no_copy_of_the_image():
    """Of a part of an image, as in a U-Net."""

    def fun(image):
        large = jnp.repeat(jnp.repeat(image, 2, 1), 2, 2)
        return (jnp.concatenate([large, -large], 3) ** 2).sum()

    image = jax.random.normal(jax.random.key(0), (4, 32, 32, 8))
    workspaces = []
    for is_changed in (True, False):
        graph = poet_jax.passes.group(poet_jax.trace(jax.grad(fun), image))
        graph = poet_jax.passes.cpu_kernels(graph) if is_changed else graph
        compiled = (
            jax.jit(lambda image, graph=graph: graph(image)[0]).lower(image).compile()
        )
        workspaces.append(compiled.memory_analysis().temp_size_in_bytes)
        np.testing.assert_allclose(compiled(image), jax.grad(fun)(image), rtol=1e-6)
    # XLA makes one up to JAX 0.11, with its own sums.
    more = image.nbytes if jax.__version_info__ < (0, 12) else -1
    assert workspaces[0] < workspaces[1] - more


@pytest.mark.parametrize(
    ("shape", "axes", "is_large"),
    [
        ((6, 2**14 + 1), (0,), True),
        ((6, 2**14), (0,), False),
        ((5, 3, 160, 130), (1, 0), True),
        ((9, 1, 2**15), (1,), False),
        ((0, 2**15), (0,), False),
    ],
)
def test_a_sum_over_a_batch_is_a_product_where_results_are_large(shape, axes, is_large):
    array = jax.random.normal(jax.random.key(0), shape)

    def fun(array):
        return jax.lax.reduce_sum(array, axes)

    graph = poet_jax.passes.cpu_kernels(poet_jax.trace(fun, array))
    assert graph.is_lowered == is_large
    with jax.default_matmul_precision("bfloat16"):
        (found,) = jax.jit(graph.__call__)(array)
    np.testing.assert_allclose(found, fun(array), rtol=1e-5, atol=1e-5)


def test_a_sum_over_a_batch_is_fused_with_what_makes_its_operand():
    def fun(array):
        return jax.lax.reduce_sum(array * array, (0,))

    array = jnp.ones((6, 2**15))
    graph = poet_jax.passes.group(poet_jax.trace(fun, array))
    assert not poet_jax.passes.cpu_kernels(graph).is_lowered


@examples(40)
@given(data=st.data())
def test_weighted_sums_are_the_sums_of_xla(data):
    """Weights of some of the first axes, before or after the array, repeated by hand or
    as `lax.mul` does it."""
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    count = data.draw(st.integers(1, len(shape)))
    kept = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    is_explicit, is_left = data.draw(st.booleans()), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([np.float32, np.float16, np.int32]))
    rng = np.random.default_rng(0)
    array = jnp.asarray(8 * rng.normal(size=shape), dtype)
    sizes = [n if axis in kept else 1 for axis, n in enumerate(shape)]
    weights = jnp.asarray(8 * rng.normal(size=sizes), dtype)

    def fun(array, weights):
        if is_explicit:
            weights = jax.lax.broadcast_in_dim(weights, shape, range(len(shape)))
        factors = (weights, array) if is_left else (array, weights)
        return jax.lax.reduce_sum(jax.lax.mul(*factors), range(count))

    traced = poet_jax.trace(fun, array, weights)
    graph = poet_jax.passes.weighted_sums(traced)
    has_others = any(n != 1 for n in sizes[count:])
    is_product = count < len(shape) and not has_others and dtype is np.float32
    assert (graph is not traced) == is_product
    with jax.default_matmul_precision("bfloat16"):
        (found,) = jax.jit(graph.__call__)(array, weights)
    expected = np.asarray(fun(array, weights))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_a_weighted_sum_of_another_type_stays_as_it_is():
    def fun(array, weights):
        weights = jnp.broadcast_to(weights[:, None], array.shape)
        return jax.lax.mul(array, weights, out_dtype=jnp.float32).sum(0)

    shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((6, 8), (6,)))
    traced = poet_jax.trace(fun, *shapes)
    assert poet_jax.passes.weighted_sums(traced) is traced


def test_a_weighted_sum_is_fused_with_what_makes_its_array():
    def fun(array, weights):
        return (jnp.tanh(array) * weights[:, None]).sum(0)

    traced = poet_jax.trace(fun, jnp.ones((6, 8)), jnp.ones(6))
    assert poet_jax.passes.weighted_sums(traced) is traced


def test_gradients_clipped_by_example_are_summed_by_products():
    def fun(weights, x):
        loss = lambda weights, x: (jnp.tanh(x @ weights) ** 2).sum()  # noqa: E731
        each = jax.vmap(jax.grad(loss), (None, 0))(weights, x)
        norms = jnp.sqrt((each**2).sum((1, 2)))
        return (each * jnp.minimum(1, 1 / norms)[:, None, None]).mean(0)

    weights, x = jax.random.normal(jax.random.key(0), (2, 8, 8))
    graph = poet_jax.passes.weighted_sums(poet_jax.trace(fun, weights, x))
    (found,) = jax.jit(graph.__call__)(weights, x)
    np.testing.assert_allclose(found, fun(weights, x), rtol=1e-4, atol=1e-6)
    assert all(
        equation.primitive.name != "reduce_sum" or len(equation.params["axes"]) > 1
        for node in graph.nodes
        for equation in node.equations
        if equation.result_shapes[0].shape == weights.shape
    )
