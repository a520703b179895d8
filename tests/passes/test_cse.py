"""What is computed twice is computed once, and is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax
from strategies import examples, programs

import poet_jax
from poet_jax.passes import cse, run_passes, unroll

W, X = jnp.eye(8), jnp.ones((4, 8))


def model(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def loss(w, x):
    return jnp.square(model(w, x)).sum()


def count(graph, primitive="dot_general"):
    names = [e.primitive.name for node in graph.nodes for e in node.equations]
    return names.count(primitive)


@examples(40)
@given(case=programs())
def test_results_are_the_same_and_once_is_enough(case):
    step, args = case
    leaves = jax.tree.leaves(args)

    def twice(*args):
        return step(*args), jax.tree.map(lambda x: x * 2, step(*args))

    graph, once = poet_jax.trace(twice, *args), poet_jax.trace(step, *args)
    merged = cse(graph)
    for left, right in zip(merged(*leaves), graph(*leaves), strict=True):
        np.testing.assert_array_equal(left, right)
    assert cse(merged) is merged
    assert len(merged.nodes) < len(graph.nodes) or not cse(once).nodes


@pytest.mark.parametrize("way", ["calls", "scans"])
def test_a_model_that_is_evaluated_twice_is_computed_once(way):
    def deep(w, x):
        if way == "calls":
            return model(w, x)
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=4)[0]

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: deep(w, x).sum())(w)
        return value, gradient, deep(w, x).argmax()

    def plain(w, x):
        return jax.value_and_grad(lambda w: deep(w, x).sum())(w)

    args = jnp.eye(64), jnp.ones((1024, 64))
    graphs = [run_passes(poet_jax.trace(f, *args), [unroll]) for f in (step, plain)]
    assert count(graphs[0]) > count(graphs[1])
    assert count(cse(graphs[0])) == count(graphs[1])


def test_what_checkpoint_and_barriers_set_apart_stays_apart():
    graph = poet_jax.trace(jax.grad(jax.checkpoint(loss)), W, X)
    assert cse(graph) is graph

    def apart(w, x):
        return model(w, x), model(*lax.optimization_barrier((w, x))) + 1

    graph = poet_jax.trace(apart, W, X)
    assert count(cse(graph)) == 4


def test_what_depends_on_no_argument_is_made_where_it_is_read():
    def masked(x):
        for _ in range(2):
            x = jnp.tanh(jnp.where(jnp.tri(8, dtype=bool), x, 0.0))
        return x

    graph = poet_jax.trace(masked, W)
    assert count(graph, "iota") == count(cse(graph), "iota") > 1


def test_each_result_is_an_array_of_its_own():
    def same(x):
        return jnp.tanh(x), jnp.tanh(x)

    graph = cse(poet_jax.trace(same, X))
    assert len(set(graph.outputs)) == 2
