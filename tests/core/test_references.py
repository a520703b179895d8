"""Mutable references are written to as under `jax.jit`, in order, once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from strategies import DEVICE

import poet_jax

X = jax.random.normal(jax.random.key(0), (256, 256))


def whole(ref, x):
    ref[...] += jnp.tanh(x @ x / 16)
    return ref[...] @ x


def rows(ref, x):
    for i in range(4):
        old = ref[64 * i : 64 * i + 64]
        ref[64 * i : 64 * i + 64] = jnp.tanh(x[64 * i : 64 * i + 64] @ x / 16) + old
        ref[i, 3] += 1.0
    return ref[...] @ x, ref[0]


def loop(ref, x):
    total = jax.new_ref(0.0)

    def body(i, carry):
        ref[i] = ref[i] * 2 + x[i]
        total[...] += ref[i].sum()
        return carry + ref[i, 0]

    carry = lax.fori_loop(0, 5, body, 0.0)
    return carry, total[...], lax.cond(carry > 0, lambda: ref[...], lambda: ref[...])


def old(ref, x):
    """What a reference held goes out, and what it holds is used again."""
    held = ref[...]
    ref[...] = x * 2
    return held, jnp.sin(ref[...] @ held)


def read(ref, x):
    return jnp.sin(ref[...] @ x) + ref[0]


def accumulate(ref, x):
    """Gradients of microbatches, summed in place."""
    for part in jnp.split(x, 4):
        gradient = jax.grad(lambda w, part=part: jnp.sum(jnp.tanh(part @ w) ** 2))(x)
        ref[...] += gradient
    return jnp.sum(ref[...])


def inner(ref, x):
    made = jax.new_ref(jnp.zeros_like(x))
    for i in range(3):
        made[...] += jnp.tanh(x * i @ x / 16)
    ref[...] = jax.freeze(made)
    return x.sum()


FUNCTIONS = (whole, rows, loop, old, read, accumulate, inner)


def least(fun, args, **options):
    try:
        poet_jax.schedule(fun, 1, **options).plan(*args)
    except poet_jax.BudgetTooSmall as error:
        return error.smallest_bytes


@pytest.mark.parametrize("closed", [False, True], ids=["argument", "closed over"])
@pytest.mark.parametrize("budget", ["1GiB", "least"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_references_hold_what_they_do_under_jit(function, budget, closed):
    ref = jax.new_ref(jnp.ones_like(X))
    fun, args = function, (ref, X)
    if closed:
        fun, args = (lambda x: function(ref, x)), (X,)
    expected = [jax.jit(fun)(*args), ref[...], jax.jit(fun)(*args), ref[...]]
    # In stages, whatever the budget.
    options = dict(
        device=DEVICE,
        planner=poet_jax.greedy,
        executor=poet_jax.HostExecutor(poet_jax.HostStore(), trace=True),
    )
    if budget == "least":
        budget = least(fun, args, **options)
    step = poet_jax.schedule(fun, budget, **options)
    ref[...] = jnp.ones_like(X)
    found = [step(*args), ref[...], step(*args), ref[...]]
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-4)


def test_what_a_reference_holds_is_replaced_in_place():
    """State in a reference takes no more memory than donated state."""

    def update(w, x):
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    def through(ref, x):
        ref[...] = update(ref[...], x)

    ref = jax.new_ref(X)
    options = dict(device=DEVICE, planner=poet_jax.greedy)
    plan = poet_jax.schedule(through, "1GiB", **options).plan(ref, X)
    donated = functools.partial(poet_jax.schedule, update, "1GiB", donate_argnums=0)
    assert plan.compiled_bytes == donated(**options).plan(X, X).compiled_bytes
    costs, graph = plan.costs, plan.graph
    assert plan.baseline.peak_bytes <= donated(**options).plan(X, X).baseline.peak_bytes
    assert costs.nbytes[graph.arguments[0]] == X.nbytes


def test_a_function_of_references_may_run_again():
    """Only what the caller sees is an effect."""

    def summed(x):
        made = jax.new_ref(jnp.zeros_like(x))
        made[0] = x[0]
        return lax.fori_loop(0, 3, lambda i, c: c + made[i], x[0])

    graph = poet_jax.trace(summed, X)
    assert all(node.repeatable for node in graph.nodes)


def test_an_array_and_a_reference_to_one_are_planned_apart():
    def fun(x):
        return x[...] * 2

    step = poet_jax.schedule(fun, "1GiB", device=DEVICE, planner=poet_jax.keep_all)
    np.testing.assert_array_equal(step(X), step(jax.new_ref(X)))


def test_references_are_written_beside_state_on_storage():
    store = poet_jax.HostStore()
    ref = jax.new_ref(jnp.zeros(()))
    big = jnp.ones((512, 512))

    def step(state, count):
        count[...] += 1
        return state * 0.5 + count[...]

    scheduled = poet_jax.schedule(
        step,
        "64MiB",
        device=DEVICE,
        donate_argnums=0,
        executor=poet_jax.HostExecutor(store),
    )
    state = poet_jax.to_storage(big, store)
    for count in (1, 2):
        expected = np.asarray(state) * 0.5 + count
        state = scheduled(state, ref)
        np.testing.assert_allclose(np.asarray(state), expected)
        assert ref[...] == count
