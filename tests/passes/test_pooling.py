"""Gradients of max pooling by comparison: XLA's numbers, also for equal elements,
infinities and what padding surrounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import DEVICE, examples

import poet_jax
from poet_jax.passes.cpu.rules import RULES


def pool(image, window, strides, padding, computation=jax.lax.max):
    start = -jnp.inf if computation is jax.lax.max else jnp.inf
    return jax.lax.reduce_window(
        image, start, computation, (1, *window, 1), (1, *strides, 1), padding
    )


def gradient(fun, image, slope):
    return jax.vjp(fun, image)[1](slope)[0]


@st.composite
def pools(draw):
    """(pool, image, slope, whether windows are apart) with equal elements, and at
    times infinities."""
    window, strides = (
        tuple(draw(st.integers(1, 3)) for _ in range(2)) for _ in range(2)
    )
    ends = st.tuples(st.integers(0, 2), st.integers(0, 2))
    padding = draw(
        st.sampled_from(["SAME", "VALID"])
        | st.tuples(ends, ends).map(lambda x: ((0, 0), *x, (0, 0)))
    )
    sizes = [draw(st.integers(3, 7)) for _ in range(2)]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    elements = [-1.0, 0.0, 1.0, *draw(st.sampled_from([[], [np.inf], [-np.inf] * 9]))]
    image = rng.choice(elements, (draw(st.integers(1, 3)), *sizes, 2))
    computation = draw(st.sampled_from([jax.lax.max, jax.lax.min]))
    fun = functools.partial(
        pool, window=window, strides=strides, padding=padding, computation=computation
    )
    image = jnp.asarray(image, jnp.float32)
    slope = rng.normal(size=jax.eval_shape(fun, image).shape)
    is_apart = all(size <= step for size, step in zip(window, strides, strict=True))
    return fun, image, jnp.asarray(slope, jnp.float32), is_apart


@examples(40)
@given(case=pools())
def test_they_are_the_gradients_of_xla(case):
    fun, image, slope, is_apart = case
    traced = poet_jax.trace(functools.partial(gradient, fun), image, slope)
    graph = poet_jax.passes.cpu_kernels(traced)
    assert graph.is_lowered
    expected = jax.jit(functools.partial(gradient, fun))(image, slope)
    (actual,) = jax.jit(graph.__call__)(image, slope)
    if is_apart:
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [(9, 9), (2, 2)])
def test_large_windows_and_windows_over_images_stay_as_they_are(window):
    over = 2 if window == (2, 2) else 1

    def fun(image):
        return jax.lax.reduce_window(
            image, -jnp.inf, jax.lax.max, (over, *window, 1), (over, 2, 2, 1), "SAME"
        ).sum()

    traced = poet_jax.trace(jax.grad(fun), jnp.ones((2, 9, 9, 1)))
    assert "select_and_scatter_add" in {
        e.primitive.name for node in traced.nodes for e in node.equations
    }
    assert not poet_jax.passes.cpu_kernels(traced).is_lowered


def test_they_need_less_memory_than_a_scatter():
    def fun(image):
        return (pool(image, (2, 2), (2, 2), "VALID") ** 2).sum()

    image = jax.random.normal(jax.random.key(0), (4, 32, 32, 8))
    others = [rule for rule in RULES if rule.name != "pool_gradient"]
    *before, last = poet_jax.passes.PASSES
    assert last is poet_jax.passes.cpu_kernels
    needs = []
    for chosen in (last, functools.partial(last, rules=others)):
        scheduled = poet_jax.schedule(
            jax.grad(fun),
            "1GiB",
            device=DEVICE,
            planner=poet_jax.keep_all,
            executor=poet_jax.HostExecutor(trace=True),  # in stages
            passes=(*before, chosen),
        )
        np.testing.assert_array_equal(scheduled(image), jax.grad(fun)(image))
        needs.append(scheduled.plan(image).compiled_bytes)
    assert needs[0] < needs[1] - 2 * image.nbytes
