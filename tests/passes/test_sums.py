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
