"""What passes do is priced graph by graph, and what they cannot do is said."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from toy import OPTIONS, W, X, gradient, schedule

import poet_jax
from poet_jax.api.effects import applied

PASSES = poet_jax.passes.PASSES


def test_each_row_is_what_a_schedule_with_the_passes_so_far_starts_from():
    def fun(w, x):
        return w - 0.1 * gradient(w, x)[:8].sum(0)

    rows = schedule(fun, 2**30).effects(W, X).rows
    assert [row.name for row in rows] == ["trace", *(x.__name__ for x in PASSES)]
    for number in (0, 1, 4, len(PASSES)):
        planned = schedule(fun, 2**30, passes=PASSES[:number]).plan(W, X)
        row, baseline = rows[number], planned.baseline
        assert row.nodes == len(planned.graph.nodes)
        assert row.peak_bytes == baseline.peak_bytes >= row.floor_bytes
        assert (row.seconds, row.joules) == (baseline.seconds, baseline.joules)


def test_a_table_has_the_passes_given_and_says_where_seconds_are_from():
    passes = (functools.partial(poet_jax.passes.group), poet_jax.passes.reorder)
    some = {"dot_float32": [(1.0, 1e-9)], "moved": [(1.0, 1e-9)]}
    for rates, words in ((some, "calibrated"), ({}, "modelled from")):
        device = dataclasses.replace(OPTIONS["device"], rates=rates)
        graph = poet_jax.trace(lambda w, x: jnp.tanh(x @ w), W, X)
        table = str(poet_jax.api.effects.effects(graph, passes, device)).splitlines()
        assert [line.split()[0] for line in table[:4]] == [
            "after",
            "trace",
            "group",
            "reorder",
        ]
        assert device.name in table[4] and words in table[4]
        assert len(table) == 5  # nothing is applied


PARAMS = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 4)), "c": jnp.ones(4)}


def remark_of(tx):
    """Of a step of two layers and a bias."""

    def step(params, state, x):
        def loss(params):
            y = jnp.tanh(x @ params["a"]) @ params["b"]
            return jnp.sum(jnp.tanh(y + params["c"]))

        gradients = jax.grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        norm = optax.tree.norm(gradients)  # to look at only
        return optax.apply_updates(params, updates), state, norm

    return applied(poet_jax.trace(step, PARAMS, tx.init(PARAMS), jnp.ones((2, 4))))


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.adamw(1e-3),
        optax.lamb(1e-3),
        optax.chain(optax.clip(1.0), optax.adam(1e-3)),
        optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1, momentum=0.9)),
    ],
    ids=["sgd", "adamw", "lamb", "clip", "block rms"],
)
def test_gradients_that_are_updated_one_by_one_wait_for_none(tx):
    assert remark_of(tx) == (
        "reorder: each of 3 gradients can be applied as soon as it exists."
    )


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        optax.apply_if_finite(optax.sgd(0.1), 3),
        optax.chain(optax.sgd(0.1), optax.clip_by_global_norm(1.0)),
    ],
    ids=["global norm", "if finite", "norm of updates"],
)
def test_gradients_that_wait_for_one_another_are_counted(tx):
    remark = remark_of(tx)
    nbytes = sum(x.nbytes for x in PARAMS.values())
    assert f"3 of 3 gradients, {nbytes} B, cannot be applied" in remark
    assert "needs 3 of them" in remark


def test_some_may_wait_and_others_not():
    transforms = {
        "tied": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        "free": optax.sgd(0.1),
    }
    tx = optax.multi_transform(transforms, {"a": "tied", "b": "tied", "c": "free"})
    assert "2 of 3 gradients, 256 B" in remark_of(tx)


def test_a_gradient_alone_is_applied_by_nobody():
    assert applied(poet_jax.trace(gradient, W, X)) == ""


def test_flax_steps_have_effects():
    batch = jnp.ones((8, 4)), jnp.ones((8, 4))
    options = OPTIONS | {
        "passes": (poet_jax.passes.group,),
        "optimizer": optax.sgd(0.1),
    }
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    step = poet_jax.train_step(model, 2**30, **options)
    other = poet_jax.train_step(nn.Dense(4), 2**30, **options)
    state = jax.eval_shape(other.init, jax.random.key(0), batch)
    for rows, planned in (
        (step.effects(batch).rows, step.plan(batch)),
        (other.effects(state, batch).rows, other.plan(state, batch)),
    ):
        assert rows[1].peak_bytes == planned.baseline.peak_bytes
    modules = poet_jax.nnx.schedule(lambda model, x: model(x), 2**30, **OPTIONS)
    x = batch[0]
    assert modules.effects(model, x).rows[-1].nodes == len(
        modules.plan(model, x).graph.nodes
    )
