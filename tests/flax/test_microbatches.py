"""A batch in parts: the gradients of the whole, in the memory of a part."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_three_sentences
from flax import nnx
from toy import OPTIONS, STAGES

import poet_jax
from poet_jax.passes import PASSES, blockwise

BATCH = (
    jax.random.normal(jax.random.key(0), (16, 32)),
    jax.random.normal(jax.random.key(1), (16, 4)),
)
SGD = optax.sgd(0.1)


def with_errors(model, batch):
    """The default loss, and the error of each example."""
    x, y = batch
    errors = jnp.mean((model(x) - y) ** 2, -1)
    return jnp.mean(errors), {"errors": errors, "largest": jnp.mean(jnp.abs(errors))}


class Linen(nn.Module):
    dropout: float = 0.0
    normed: bool = False

    @nn.compact
    def __call__(self, x, train):
        x = nn.tanh(nn.Dense(64)(x))
        if self.normed:
            x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(4)(x)


def nnx_model(*norms):
    rngs = nnx.Rngs(0)
    first, last = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)
    return nnx.Sequential(first, nnx.tanh, *norms, last)


def trained(library, budget="100%", batch=BATCH, loss_fn=with_errors, **options):
    """(parameters, result, step) after two steps."""
    options = OPTIONS | {"optimizer": SGD, "loss_fn": loss_fn} | options
    if library == "nnx":
        model = nnx_model()
        step = poet_jax.train_step(model, budget, **options)
        for _ in range(2):
            result = step(batch)
        return nnx.as_pure(nnx.state(model, nnx.Param)), result, step
    step = poet_jax.train_step(Linen(), budget, **options)
    state = step.init(jax.random.key(0), batch)
    for _ in range(2):
        state, result = step(state, batch)
    return state.params, result, step


@functools.cache
def trained_at_once(library):
    return trained(library, "1GiB")[:2]


@pytest.mark.parametrize("library", ["nnx", "linen"])
@pytest.mark.parametrize("count", [2, 16])
def test_gradients_of_the_parts_are_those_of_the_batch(library, count):
    expected = trained_at_once(library)
    found = trained(library, microbatches=count)[:2]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_auto_takes_the_fewest_that_fit(library):
    x, y = (jnp.tile(a, (33, 1)) for a in BATCH)
    passes = [p for p in PASSES if p is not blockwise]
    least = {}
    for count in (1, 2):
        with pytest.raises(poet_jax.BudgetTooSmall) as caught:
            trained(library, 1, (x, y), None, microbatches=count, passes=passes)
        least[count] = caught.value.smallest_bytes
        is_told = 'microbatches="auto" (about' in str(caught.value)
        assert is_told == (count == 1)
    assert least[2] < 0.8 * least[1]
    for budget, count in ((least[1], 1), (int(least[2] * 1.02), 2)):
        options = {"microbatches": "auto", "passes": passes}
        step = trained(library, budget, (x, y), None, **options)[2]
        assert step.microbatches == count


def test_each_part_has_dropout_of_its_own():
    def loss_fn(model, batch):
        y = model(batch[0])
        return jnp.mean(y), y[:, 0]

    same = jnp.ones((2, 32)), jnp.ones((2, 4))
    step = poet_jax.train_step(
        Linen(dropout=0.5),
        "1GiB",
        loss_fn=loss_fn,
        microbatches=2,
        executor=STAGES,
        optimizer=SGD,
        **OPTIONS,
    )
    state = step.init(jax.random.key(0), same)
    _, metrics = step(state, same)
    assert len(set(np.asarray(metrics["aux"]).tolist())) == 2


def refused(library, batch=BATCH, model=None, loss_fn=with_errors, **options):
    options = OPTIONS | {"loss_fn": loss_fn} | options
    with pytest.raises(poet_jax.CannotTrace) as caught:
        if library == "nnx":
            poet_jax.train_step(model or nnx_model(), "100%", **options)(batch)
        else:
            step = poet_jax.train_step(model or Linen(), "100%", **options)
            step(step.init(jax.random.key(0), batch), batch)
    return caught.value.__cause__ or caught.value


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_what_parts_would_compute_otherwise_is_refused_by_name(library):
    norm = nnx.BatchNorm(64, rngs=nnx.Rngs(0))
    normed = {"nnx": nnx_model(norm), "linen": Linen(normed=True)}[library]
    error = refused(library, model=normed, microbatches=2)
    assert_three_sentences(error, "mean", "microbatches=1")
    assert_three_sentences(refused(library, microbatches=3), "(16, 32)", "3 equal")

    def counting(model, batch):
        return with_errors(model, batch)[0], jnp.arange(3)

    error = refused(library, loss_fn=counting, microbatches=2)
    assert_three_sentences(error, "int32", "leave it out")


@pytest.mark.parametrize("microbatches", [0, -1, "many", 1.5, None])
def test_no_number_of_parts_is_refused(microbatches):
    with pytest.raises(ValueError, match="microbatches=4"):
        poet_jax.train_step(Linen(), "100%", microbatches=microbatches)
