"""Passes that users bring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import DEVICE

import poet_jax
from poet_jax.passes import PASSES, Rewriter


def sums_by_differences(graph):
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.equations[0].primitive.name == "add":
            terms = rewriter.operands(node)
            new = rewriter.add(lambda a, b: a - (-b), terms, like=node)
            rewriter.replace(node.writes[0], new)
    return rewriter.result()


@pytest.mark.parametrize("budget", ["100%", "1GiB"])
def test_what_a_pass_puts_in_runs_where_the_budget_covers_jit(budget):
    def fun(x, w):
        return jnp.sin(x @ w) + jnp.cos(x)

    x = jnp.linspace(0.0, 1.0, 64 * 64).reshape(64, 64)
    passes = (sums_by_differences, *PASSES)
    step = poet_jax.schedule(fun, budget, device=DEVICE, passes=passes)
    text = step.plan(x, x).compile().xla.as_text()
    plain = jax.jit(fun).lower(x, x).compile().as_text()
    assert " subtract(" in text and " subtract(" not in plain
    np.testing.assert_allclose(step(x, x), fun(x, x), rtol=1e-5, atol=1e-6)


def test_a_pass_that_only_groups_leaves_jits_own_program():
    def fun(x, w):
        return jnp.sin(x @ w) + jnp.cos(x)

    x = jnp.ones((64, 64))
    passes = (poet_jax.passes.group,)
    step = poet_jax.schedule(fun, "1GiB", device=DEVICE, passes=passes)
    text = step.plan(x, x).compile().xla.as_text()
    plain = jax.jit(fun).lower(x, x).compile().as_text()
    assert text.splitlines()[1:] == plain.splitlines()[1:]
