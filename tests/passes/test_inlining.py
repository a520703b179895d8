"""Residuals that the backward pass computes again: less is kept, the numbers stay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given
from jax import lax
from strategies import budgeted_graphs, examples, programs

import poet_jax


def coarse(fun, *args):
    return poet_jax.passes.group(poet_jax.trace(fun, *args))


def saved_bytes(graph) -> int:
    """What the backward pass reads of the forward pass's results."""
    late, made, saved = set(), set(), set()
    for number, node in enumerate(graph.nodes):
        if node.backward or made.intersection(node.reads):
            late.add(number)
            made.update(node.writes)
            saved.update(
                v for v in node.reads if graph.producer.get(v, number) < number
            )
    saved = {v for v in saved if graph.producer[v] not in late}
    return sum(graph.values[v].nbytes for v in saved)


@examples(60)
@given(case=programs())
def test_no_more_is_saved_and_results_are_the_same_but_for_rounding(case):
    step, args = case
    graph = coarse(step, *args)
    less = poet_jax.passes.inline_cheap(graph)
    assert saved_bytes(less) <= saved_bytes(graph)
    for left, right in zip(
        less(*jax.tree.leaves(args)), jax.tree.leaves(step(*args)), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=2e-4, atol=1e-5)


@examples(30)
@given(case=budgeted_graphs())
def test_an_instance_which_nobody_runs_is_left_as_it_is(case):
    nodes = tuple(dataclasses.replace(n, equations=()) for n in case[0].nodes)
    graph = dataclasses.replace(case[0], nodes=nodes)
    assert poet_jax.passes.inline_cheap(graph) is graph


class Feedforward(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(x)
        return nn.Dense(64)(nn.gelu(nn.Dense(256)(x)))


def test_of_a_gelu_its_argument_is_saved_and_nothing_else():
    """[512, 256]: kept are the argument, and the result for the next kernel's gradient.

    Of the layer norm, [512, 64], its argument is an argument of the step, so what is
    left is the result, for the first kernel's gradient, and the statistics of each row.
    """
    model, x = Feedforward(), jnp.linspace(-1, 1, 512 * 64).reshape(512, 64)
    params = model.init(jax.random.key(0), x)
    optimizer = optax.adamw(1e-3)

    def step(params, moments, x):
        def loss(params):
            return (model.apply(params, x) ** 2).mean()

        slopes = jax.grad(loss)(params)
        updates, moments = optimizer.update(slopes, moments, params)
        return optax.apply_updates(params, updates), moments

    args = params, optimizer.init(params), x
    graph = coarse(step, *args)
    less = poet_jax.passes.inline_cheap(graph)
    row = 512 * 4
    loss_bytes = 64 * row  # the derivative of the square reads the result
    most = 2 * 256 * row + 64 * row + loss_bytes + 8 * row
    assert saved_bytes(less) <= most < saved_bytes(graph) - 3 * 256 * row
    expected = jax.tree.leaves(jax.jit(step)(*args))
    for left, right in zip(less(*jax.tree.leaves(args)), expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [0.01, 1.0, 1e3, 1e30])
def test_of_a_softmax_its_result_and_the_sums_are_saved(scale):
    """[256, 512], and two numbers for each row; also where most terms are zero."""

    def loss(scores, values):
        return (jax.nn.softmax(scores * scale) @ values).mean()

    keys = jax.random.split(jax.random.key(0), 2)
    args = jax.random.normal(keys[0], (256, 512)), jax.random.normal(keys[1], (512, 8))
    graph = coarse(jax.grad(loss, (0, 1)), *args)
    less = poet_jax.passes.inline_cheap(graph)
    assert saved_bytes(graph) >= 2 * 256 * 512 * 4
    assert saved_bytes(less) <= 256 * (512 + 2) * 4
    expected = jax.jit(jax.grad(loss, (0, 1)))(*args)
    for left, right in zip(less(*args), expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-7 * scale)


def test_what_is_divided_by_the_sum_of_others_is_saved():
    """Its quotient may vanish where it counts, as here, where sums are of columns."""
    high = jnp.arange(64) < 32
    exponents = jnp.where(high, 56.8, -35.0) + jnp.linspace(0, 0.01, 64)
    x, low = jnp.broadcast_to(exponents, (64, 64)), ~high[:, None]

    def loss(x, weights):
        terms = jnp.exp(x @ jnp.eye(64))  # not an argument, which is kept anyway
        return ((terms / terms.sum(0)[:, None]) @ weights * low.astype(x.dtype)).sum()

    args = x, jnp.where(low, jnp.ones((64, 8)), 0.0)
    graph = coarse(jax.grad(loss, (0, 1)), *args)
    slope, _ = poet_jax.passes.inline_cheap(graph)(*args)
    expected, _ = jax.jit(jax.grad(loss, (0, 1)))(*args)
    assert (jnp.isfinite(expected) & (expected != 0))[:32, 32:].all()
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


def test_what_is_divided_by_two_sums_is_saved():
    """As in a dual softmax: one quotient may vanish where the other one counts."""
    x = jnp.linspace(-1, 1, 512 * 512).reshape(512, 512)
    x = x.at[:, 0].set(60.0).at[:, 1:].add(-45.0)  # along rows one term is all

    def loss(x, weights):
        terms = jnp.exp(x @ jnp.eye(512))
        parts = (terms / terms.sum(d, keepdims=True) for d in (0, 1))
        return sum(jnp.sin(part @ weights).mean() for part in parts)

    args = x, jax.random.normal(jax.random.key(0), (512, 8))
    graph = coarse(jax.grad(loss, (0, 1)), *args)
    slope, _ = poet_jax.passes.inline_cheap(graph)(*args)
    expected, _ = jax.jit(jax.grad(loss, (0, 1)))(*args)
    slope, expected = slope[:, 1:], expected[:, 1:]
    assert (expected != 0).mean() > 0.9
    np.testing.assert_allclose(slope, expected, atol=1e-4 * jnp.abs(expected).max())


def logarithm(scores, weights):
    """Of numerators, whose derivative alone the backward pass has to compute."""
    shifted = scores - lax.stop_gradient(scores.max(1, keepdims=True))
    terms = jnp.exp(shifted)
    products = jnp.sin((terms / terms.sum(1, keepdims=True)) @ weights)
    return products.sum() + (jnp.log(terms) * lax.stop_gradient(products)).sum()


def overflowing(scores, weights):
    """Without the maximum taken off: sums are infinite."""
    terms = jnp.exp(scores + 84)
    return jnp.sin((terms / terms.sum(1, keepdims=True)) @ weights).sum()


@pytest.mark.parametrize("of_scores", [logarithm, overflowing])
def test_a_numerator_is_not_made_again_where_the_quotient_may_be_nothing(of_scores):
    def loss(x, weights):
        return of_scores(x @ jnp.eye(512), weights)

    x = jnp.where(jnp.arange(512) < 256, 0.0, -86.0) + jnp.zeros((512, 1))
    args = x, jax.random.normal(jax.random.key(0), (512, 512))
    graph = coarse(jax.grad(loss, (0, 1)), *args)
    slope, _ = poet_jax.passes.inline_cheap(graph)(*args)
    expected, _ = jax.jit(jax.grad(loss, (0, 1)))(*args)
    assert jnp.isfinite(expected).all()
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-6)


def test_a_node_that_only_has_an_effect_stays():
    def loss(x):
        jax.debug.print("{}", x[0, 0])
        return ((jax.nn.gelu(x @ x) @ x) ** 2).sum()

    x = jnp.ones((64, 64)) / 64
    graph = coarse(jax.grad(loss), x)
    less = poet_jax.passes.inline_cheap(graph)
    assert saved_bytes(less) < saved_bytes(graph)
    assert sum(not node.repeatable for node in less.nodes) == 1
