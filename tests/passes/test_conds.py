"""A `cond` in parts computes what the whole does, and needs less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from strategies import examples

import poet_jax
from poet_jax.passes import open_conds

LARGE, SMALL = (128, 160), (3,)
CLIP = optax.clip_by_global_norm(1.0)


def ways(arrays, scalar, total):
    """Results of one array or several, of none, and given arrays as they are."""
    first, second = arrays
    return [
        lambda: first,
        lambda: first * scalar + 1,
        lambda: jnp.tanh(second) - jnp.sin(scalar),
        lambda: first * second,
        lambda: first / (1 + jnp.sqrt(jnp.square(second).sum())),
        lambda: jnp.zeros_like(first),
        lambda: lax.cond(scalar > 0.1, lambda: second, lambda: -first),
        lambda: lax.cond(True, lambda: first, lambda: second),
        lambda: first * jnp.minimum(total, scalar),
        lambda: jnp.full_like(first, total),
    ]


@examples(30)
@given(data=st.data())
def test_parts_of_a_cond_compute_what_the_whole_does(data):
    """Of arrays that are donated or not, returned several times, and read later."""
    shapes = data.draw(st.lists(st.sampled_from([LARGE, SMALL]), min_size=1))
    kinds = st.lists(st.integers(0, 9), min_size=len(shapes), max_size=len(shapes))
    branches = data.draw(st.lists(kinds, min_size=1, max_size=3))
    is_known, index = data.draw(st.booleans()), data.draw(st.integers(-1, 3))
    rng = np.random.default_rng(0)
    pairs = [jnp.asarray(rng.normal(size=(2, *s)), jnp.float32) for s in shapes]

    def fun(pairs, index, scalar):
        def branch(kinds, pairs, scalar):
            total = sum(jnp.square(first).sum() for first, _ in pairs)
            return [
                ways(arrays, scalar, total)[kind]()
                for kind, arrays in zip(kinds, pairs, strict=True)
            ]

        made = [functools.partial(branch, x) for x in branches]
        halves = [tuple(x) for x in pairs]
        results = lax.switch(index, made, halves, scalar)
        return results, [x + 1 for x in results], results[0]

    if is_known:
        fun = functools.partial(fun, index=index)
    rest = {"scalar": jnp.float32(0.3)} | ({} if is_known else {"index": index})
    expected = jax.jit(fun)(pairs, **rest)
    jitted = jax.jit(fun, donate_argnums=0 if data.draw(st.booleans()) else ())
    traced = poet_jax.trace(jitted, pairs, **rest)
    graph = open_conds(traced)
    found = jax.jit(graph.__call__)(*jax.tree.leaves(((pairs,), rest)))
    for got, wanted in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    kept = {*graph.arguments, *graph.constants} - graph.donated
    assert len({*graph.outputs} - kept) == len(graph.outputs)
    names = [e.primitive.name for node in graph.nodes for e in node.equations]
    has_inner = any(6 in kinds for kinds in branches)
    assert "cond" not in names or has_inner or not is_known


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


@pytest.mark.parametrize(
    ("wrapped", "waits"),
    [
        (lambda opt: optax.MultiSteps(opt, 4), False),
        (lambda opt: optax.MultiSteps(opt, 4, optax.skip_not_finite), True),
        (lambda opt: optax.apply_if_finite(opt, 5), True),
        (lambda opt: optax.apply_if_finite(optax.chain(CLIP, opt), 5), True),
    ],
    ids=["MultiSteps", "MultiSteps-skip", "apply_if_finite", "clipped"],
)
def test_an_optimizer_that_may_skip_a_step_needs_no_memory_for_all_updates(
    wrapped, waits
):
    """It needs all gradients at once only if their values tell whether it skips."""
    optimizer = wrapped(optax.adam(1e-2))

    @jax.numpy_dtype_promotion("standard")  # optax mixes dtypes
    def step(state, x):
        ws, opt_state = state
        gradients = jax.grad(layers)(ws, x)
        updates, opt_state = optimizer.update(gradients, opt_state, ws)
        return optax.apply_updates(ws, updates), opt_state

    ws = list(0.1 * jax.random.normal(jax.random.key(0), (6, 128, 128)))
    state, x = (ws, optimizer.init(ws)), jnp.ones((8, 128))
    in_budget = functools.partial(
        poet_jax.schedule, step, planner=poet_jax.greedy, donate_argnums=0
    )
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        in_budget(1).plan(state, x)
    held_bytes = sum(a.nbytes for a in jax.tree.leaves(state))
    gradients = len(ws) if waits else 3  # at once
    budget = held_bytes + (gradients + 2) * ws[0].nbytes
    assert caught.value.smallest_bytes <= budget
    scheduled, plain = in_budget(budget), jax.jit(step)
    for _ in range(4):
        before, state = state, scheduled(jax.tree.map(jnp.copy, state), x)
        for got, wanted in zip(
            *map(jax.tree.leaves, (state, plain(before, x))), strict=True
        ):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_a_cond_with_an_effect_stays_as_it_is():
    def fun(x, y):
        def branch(x, y):
            jax.debug.print("here")
            return x * 2, y * 3

        return lax.cond(True, branch, lambda x, y: (x, y), x, y)

    traced = poet_jax.trace(fun, jnp.ones(LARGE), jnp.ones(LARGE))
    assert open_conds(traced) is traced


def test_results_that_share_work_stay_together():
    def fun(x, w):
        def branch(x, w):
            y = x @ w
            return y + 1, y - 1

        return lax.cond(x[0, 0] > 0, branch, lambda x, w: (x, x), x, w)

    traced = poet_jax.trace(fun, jnp.ones((160, 160)), jnp.ones((160, 160)))
    assert len(open_conds(traced).nodes) == len(traced.nodes)


def test_a_branch_may_return_a_number_that_is_given():
    def fun(x):
        return lax.cond(True, lambda x, n: (x + 1, n), lambda x, n: (x, n * 2), x, 3)

    for got, wanted in zip(
        poet_jax.schedule(fun, "100%")(jnp.ones(LARGE)),
        jax.jit(fun)(jnp.ones(LARGE)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)
        assert got.weak_type == wanted.weak_type


def test_a_branch_may_be_known_by_a_long_computation():
    def fun(x):
        turn = jnp.int32(0)
        for _ in range(400):
            turn = (turn + 1) % 3
        return lax.switch(turn, [jnp.sin, lambda x: x * 2, jnp.cos], x)

    graph = open_conds(poet_jax.trace(fun, jnp.ones(8)))
    assert {e.primitive.name for e in graph.nodes[-1].equations} == {"mul"}
