"""Budgeted training of linen modules is the same training as under `jax.jit`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import train_state
from toy import OPTIONS, STAGES, tightest

import poet_jax
from poet_jax.update import lora

OPTIONS = OPTIONS | {"executor": STAGES}
train_step = functools.partial(poet_jax.train_step, **OPTIONS)
schedule = functools.partial(poet_jax.schedule, **OPTIONS)
KEY = jax.random.key(0)
IMAGES = jax.random.normal(KEY, (4, 6, 6, 3)), jnp.arange(4) % 3
VECTORS = jax.random.normal(KEY, (512, 8))
BATCH = VECTORS, jnp.sin(VECTORS)


class MLP(nn.Module):
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = jnp.tanh(nn.Dense(8, param_dtype=self.param_dtype)(x))
        return x


class Normed(nn.Module):
    """A small residual network with BatchNorm."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3))(x)
        y = nn.Conv(4, (3, 3), use_bias=False)(x)
        y = nn.BatchNorm(use_running_average=not train)(y)
        x = nn.relu(x + y)
        return nn.Dense(3)(x.mean((1, 2)))


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(nn.Dense(8)(x)))
        return x


class Tied(nn.Module):
    """The embedding is the output projection too."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(16, 8)
        x = embed(tokens)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return embed.attend(x + nn.Dense(8)(nn.gelu(nn.Dense(32)(x))))


def squared_error(model, batch):
    inputs, targets = batch
    return jnp.mean((model(inputs) - targets) ** 2)


def cross_entropy(model, batch):
    inputs, labels = batch
    logits = model(inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def assert_saves(step):
    """The budget made the latest run repeat or page something."""
    assert step.last_run.recomputed or step.last_run.bytes_paged_in


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def assert_close(got, expected, rtol):
    """Equal in structure and types, and to `rtol` of each array's norm."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b) + 1e-6


def plain_step(module, loss_fn, tx, **call):
    """What a user writes with jax.jit, for a module with or without batch_stats."""

    @jax.jit
    def step(variables, opt_state, batch):
        params, stats = variables["params"], variables.get("batch_stats", {})
        mutable = list(set(variables) - {"params"})

        def loss_of(params):
            changed = {}

            def model(x):
                out, new = module.apply(
                    {"params": params, **({"batch_stats": stats} if stats else {})},
                    x,
                    mutable=mutable,
                    **call,
                )
                changed.update(new)
                return out

            return loss_fn(model, batch), changed

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        update = optax.with_extra_args_support(tx).update
        updates, opt_state = update(gradients, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return {"params": params, **changed}, opt_state, loss

    return step


def assert_trains_alike(module, loss_fn, batch, tx, steps=20, rtol=1e-4, **call):
    """The same losses, and the same state after, as in the user's own loop."""
    step = train_step(module, 2**30, loss_fn=loss_fn, optimizer=tx)
    state = step.init(KEY, batch)
    variables = copy({"params": state.params, **state.collections})
    opt_state = tx.init(variables["params"])
    step = tightest(
        lambda budget: train_step(module, budget, loss_fn=loss_fn, optimizer=tx),
        state,
        batch,
    )
    plain = plain_step(module, loss_fn, tx, **call)
    losses, expected = [], []
    for _ in range(steps):
        state, metrics = step(state, batch)
        variables, opt_state, loss = plain(variables, opt_state, batch)
        losses.append(float(metrics["loss"]))
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    assert losses[-1] < losses[0]
    assert_close({"params": state.params, **state.collections}, variables, 100 * rtol)
    assert_close(state.opt_state, opt_state, 100 * rtol)
    assert int(state.step) == steps
    assert_saves(step)
    return state


def test_twenty_steps_with_batch_norm_are_those_of_jit():
    state = assert_trains_alike(
        Normed(), cross_entropy, IMAGES, optax.sgd(0.05), train=True
    )
    assert set(state.collections) == {"batch_stats"}


def test_twenty_steps_of_a_transformer_with_tied_weights_are_those_of_jit():
    tokens = jax.random.randint(KEY, (4, 8), 0, 16)
    batch = tokens, jnp.roll(tokens, 1)
    state = assert_trains_alike(Tied(), cross_entropy, batch, optax.sgd(0.05))
    assert state.collections == {}


OPTIMIZERS = {
    "clipped and scheduled": optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.sgd(optax.cosine_decay_schedule(0.1, 20), momentum=0.9),
    ),
    "masked": optax.adamw(
        3e-3, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "accumulated": optax.MultiSteps(optax.sgd(0.1), every_k_schedule=3),
    "plateau": optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=1)
    ),
}


@pytest.mark.usefixtures("standard_promotion")  # rates and averages of optax do
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_see_what_they_see_under_jit(name):
    assert_trains_alike(MLP(), squared_error, BATCH, OPTIMIZERS[name])


@pytest.mark.usefixtures("standard_promotion")
def test_bfloat16_parameters_keep_their_type_and_float32_moments():
    """Rounding of bfloat16 is 2^-9, and XLA may skip some of it inside a fusion."""
    tx = optax.adam(1e-2, mu_dtype=jnp.float32)
    module = MLP(jnp.bfloat16)
    state = assert_trains_alike(module, squared_error, BATCH, tx, steps=5, rtol=2**-8)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    moments = jax.tree.leaves(state.opt_state[0].mu)
    assert {x.dtype for x in moments} == {jnp.dtype("float32")}


def test_the_first_steps_gradients_are_jaxs():
    """One step of SGD with rate 1 subtracts the gradient."""

    def make(budget):
        return train_step(MLP(), budget, optimizer=optax.sgd(1.0))

    before = make(1).init(KEY, BATCH)
    params = copy(before.params)
    expected = jax.grad(
        lambda params: squared_error(
            lambda x: MLP().apply({"params": params}, x), BATCH
        )
    )(params)
    after, _ = tightest(make, before, BATCH)(before, BATCH)
    got = jax.tree.map(jnp.subtract, params, after.params)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, got, expected))
    assert error <= 1e-5 * optax.tree.norm(expected)


def test_dropout_draws_the_bits_of_jit_and_new_ones_each_step():
    """The step's own update under jax.jit draws from the same keys."""

    def loss_fn(model, batch):
        out = model(batch[0])
        return jnp.mean((out - batch[1]) ** 2), {"dropped": out == 0}

    def make(budget):
        optimizer = optax.sgd(0.05)
        return train_step(Dropped(), budget, loss_fn=loss_fn, optimizer=optimizer)

    state = make("1GiB").init(KEY, BATCH)
    expected_state = copy(state)
    tight = tightest(make, state, BATCH)
    plain, masks = jax.jit(tight.update), []
    for _ in range(20):
        state, metrics = tight(state, BATCH)
        expected_state, expected = plain(expected_state, BATCH)
        np.testing.assert_array_equal(metrics["dropped"], expected["dropped"])
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-4)
        masks.append(metrics["dropped"])
    assert_saves(tight)
    assert (masks[0] != masks[1]).any() and (masks[1] != masks[2]).any()
    assert_close(state.params, expected_state.params, 1e-3)


def test_a_model_called_twice_draws_twice_and_may_be_told_to_evaluate():
    def loss_fn(model, batch):
        first, second = model(batch[0]), model(batch[0])
        sure = model(batch[0], train=False)
        return first.mean(), {"first": first, "second": second, "sure": sure}

    step = train_step(Dropped(), "1GiB", loss_fn=loss_fn)
    _, metrics = step(step.init(KEY, BATCH), BATCH)
    assert (metrics["first"] == 0).any() and not (metrics["sure"] == 0).any()
    assert (metrics["first"] != metrics["second"]).any()


@pytest.mark.parametrize(
    ("aux", "name"), [({"double": 2.0}, "double"), (jnp.arange(3), "aux")]
)
def test_auxiliary_outputs_are_metrics(aux, name):
    def loss_fn(model, batch):
        return squared_error(model, batch), aux

    step = train_step(MLP(), "1GiB", loss_fn=loss_fn)
    _, metrics = step(step.init(KEY, BATCH), BATCH)
    assert set(metrics) == {"loss", name}
    expected = aux["double"] if isinstance(aux, dict) else aux
    np.testing.assert_array_equal(metrics[name], expected)


def test_the_loss_among_the_metrics_is_what_was_minimised():
    def loss_fn(model, batch):
        error = squared_error(model, batch)
        return 2 * error, {"loss": error}

    step = train_step(MLP(), "1GiB", loss_fn=loss_fn)
    state = step.init(KEY, BATCH)
    params = copy(state.params)
    _, metrics = step(state, BATCH)
    single = squared_error(lambda x: MLP().apply({"params": params}, x), BATCH)
    np.testing.assert_allclose(metrics["loss"], 2 * single, rtol=1e-6)


@pytest.mark.parametrize(
    ("module", "loss_fn", "batch", "call", "options"),
    [
        (Normed(), cross_entropy, IMAGES, {"train": True}, OPTIONS),
        (MLP(), squared_error, BATCH, {}, {}),
    ],
)
def test_two_arguments_are_enough(module, loss_fn, batch, call, options):
    """adamw(1e-3), and a loss by the kind of labels; the second is planned for
    this machine, as measured."""
    step = poet_jax.train_step(module, 2**30, **options)
    state = step.init(KEY, batch)
    tx = optax.adamw(1e-3)
    variables = copy({"params": state.params, **state.collections})
    opt_state = tx.init(variables["params"])
    plain = plain_step(module, loss_fn, tx, **call)
    for _ in range(3):
        state, metrics = step(state, batch)
        variables, opt_state, loss = plain(variables, opt_state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)


def test_the_same_key_makes_the_same_state():
    step = train_step(MLP(), "1GiB")
    first, second = (step.init(KEY, BATCH) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    assert first.key == second.key
    shapes = jax.eval_shape(step.init, KEY, BATCH)
    assert jax.tree.structure(shapes) == jax.tree.structure(first)


def test_a_plan_of_shapes_is_the_plan_of_arrays():
    step = train_step(MLP(), "95%")
    state = step.init(KEY, BATCH)
    plan = step.plan(*jax.eval_shape(lambda *args: args, state, BATCH))
    assert step.plan(state, BATCH) is plan
    assert step.last_run is None
    state, _ = step(state, BATCH)
    assert step.last_run.peak_bytes == plan.compiled_bytes


def test_the_state_that_is_given_is_consumed():
    step = train_step(MLP(), "1GiB")
    state = step.init(KEY, BATCH)
    step(state, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert not BATCH[0].is_deleted()


def test_a_train_state_of_flax_trains_alike_with_donation():
    def step(state, batch):
        def loss_of(params):
            return squared_error(lambda x: state.apply_fn({"params": params}, x), batch)

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    module, tx = MLP(), optax.sgd(0.1, momentum=0.9)

    def start():
        params = module.init(KEY, VECTORS)["params"]
        return train_state.TrainState.create(
            apply_fn=module.apply, params=params, tx=tx
        )

    state, expected_state = start(), start()
    scheduled = tightest(
        lambda budget: schedule(step, budget, donate_argnums=0), state, BATCH
    )
    plain = jax.jit(step, donate_argnums=0)
    for _ in range(20):
        before = state
        state, loss = scheduled(state, BATCH)
        expected_state, expected = plain(expected_state, BATCH)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
    assert_close(state.params, expected_state.params, 1e-3)
    assert int(state.step) == 20
    assert_saves(scheduled)


def test_a_function_of_trees_needs_no_flax():
    def step(params, batch):
        def loss_of(params):
            x, y = batch
            for layer in params:
                x = jnp.tanh(x @ layer["w"] + layer["b"])
            return ((x - y) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    def start():
        keys = jax.random.split(KEY, 3)
        return [{"w": jax.random.normal(k, (8, 8)), "b": jnp.zeros(8)} for k in keys]

    params, expected_params = start(), start()
    scheduled = tightest(
        lambda budget: schedule(step, budget, donate_argnums=0), params, BATCH
    )
    for _ in range(20):
        params, loss = scheduled(params, BATCH)
        expected_params, expected = jax.jit(step)(expected_params, BATCH)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert_close(params, expected_params, 1e-3)
    assert_saves(scheduled)


def test_several_optimizers_in_a_step_of_the_users_own():
    txs = optax.sgd(0.1), optax.adam(1e-2)

    def step(params, opt_states, batch):
        def loss_of(params):
            first, second = params
            return squared_error(
                lambda x: MLP().apply(second, MLP().apply(first, x)), batch
            )

        loss, gradients = jax.value_and_grad(loss_of)(params)
        new = []
        for tx, p, s, g in zip(txs, params, opt_states, gradients, strict=True):
            updates, s = tx.update(g, s, p)
            new.append((optax.apply_updates(p, updates), s))
        params, opt_states = zip(*new, strict=True)
        return params, opt_states, loss

    params = tuple(MLP().init(jax.random.key(i), VECTORS) for i in range(2))
    opt_states = tuple(tx.init(p) for tx, p in zip(txs, params, strict=True))
    expected_params, expected_states = copy((params, opt_states))
    scheduled = schedule(step, "90%", donate_argnums=(0, 1))
    for _ in range(20):
        params, opt_states, loss = scheduled(params, opt_states, BATCH)
        expected_params, expected_states, expected = jax.jit(step)(
            expected_params, expected_states, BATCH
        )
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert_close(params, expected_params, 1e-3)


def test_a_loss_fn_that_never_calls_the_model_is_refused():
    step = train_step(MLP(), "1GiB", loss_fn=lambda model, batch: batch[0].mean())
    with pytest.raises(TypeError, match="never called the model"):
        step.init(KEY, BATCH)


def test_an_optimizer_that_starts_from_the_parameters_shares_their_arrays():
    model, batch = nn.Dense(4), (jnp.ones((8, 4)), jnp.zeros((8, 4)))
    optimizer = optax.contrib.mechanize(optax.adam(1e-2))
    step = poet_jax.train_step(
        model,
        "1GiB",
        optimizer=optimizer,
        planner=poet_jax.greedy,
        device=poet_jax.devices.RASPBERRY_PI_4,
    )
    state = step.init(jax.random.key(0), batch)
    leaves = jax.tree.leaves(state)
    assert len(set(map(id, leaves))) < len(leaves)
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


class Coded(nn.Module):
    """A module with a method that takes no `train`."""

    def setup(self):
        self.dense = nn.Dense(8)
        self.calls = self.variable("counts", "calls", lambda: jnp.zeros(()))

    def __call__(self, x, train):
        return self.code(x) if train else x

    def code(self, x):
        self.calls.value += 1
        return jnp.tanh(self.dense(x))


def test_a_loss_may_read_the_variables_and_call_any_method():
    def loss_fn(model, batch):
        error = jnp.square(model(batch[0], method="code") - batch[1]).mean()
        decay = sum(jnp.square(x).sum() for x in jax.tree.leaves(model.params))
        return error + 1e-3 * decay, sum(jax.tree.leaves(model.collections))

    step = train_step(Coded(), "1GiB", loss_fn=loss_fn, optimizer=optax.sgd(0.1))
    state, losses = step.init(KEY, BATCH), []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert metrics["aux"] == 4


class Sown(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        self.sow("losses", "size", jnp.mean(x**2))
        return x


@pytest.mark.parametrize("microbatches", [1, 2])
def test_sown_losses_begin_anew_in_each_step(microbatches):
    def loss_fn(model, batch):
        error = jnp.square(model(batch[0]) - batch[1]).mean()
        return error + sum(jax.tree.leaves(model.collections["losses"]))

    def loss(params):
        variables = {"params": params}
        y, sown = Sown().apply(variables, BATCH[0], mutable=["losses"])
        return jnp.square(y - BATCH[1]).mean() + sown["losses"]["size"][0]

    options = {"loss_fn": loss_fn, "microbatches": microbatches}
    step = train_step(Sown(), "1GiB", optimizer=optax.sgd(0.1), **options)
    state = step.init(KEY, BATCH)
    params = copy(state.params)
    for _ in range(3):
        state, metrics = step(state, BATCH)
        expected, gradient = jax.value_and_grad(loss)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    assert state.collections == {}


class Counted(nn.Module):
    """One collection holds a sown value and a variable."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        self.sow("state", "size", jnp.mean(x**2))
        calls = self.variable("state", "calls", lambda: jnp.zeros(()))
        calls.value += 1
        return x * calls.value


def test_variables_beside_what_is_sown_are_carried_on():
    def loss_fn(model, batch):
        error = jnp.square(model(batch[0]) - batch[1]).mean()
        return error, model.collections["state"]["calls"]

    step = train_step(Counted(), "1GiB", loss_fn=loss_fn)
    state = step.init(KEY, BATCH)
    for calls in (2, 3, 4):
        state, metrics = step(state, BATCH)
        assert metrics["aux"] == calls
    assert state.collections == {"state": {"calls": 4}}


def test_a_scheme_is_refused_alike_with_state_on_storage(tmp_path):
    messages = []
    for store in (None, poet_jax.FileStore(tmp_path)):
        step = train_step(MLP(), "1GiB", update={"head/*": 1.0})
        with pytest.raises(ValueError, match="No parameter matches") as caught:
            step.init(KEY, BATCH, store=store)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


class Placed(nn.Module):
    """Takes `train` by position, as do its methods."""

    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(8)(x) if train else x

    def again(self, x, train):
        return self(x, train)


@pytest.mark.parametrize("way", [{}, {"method": "again"}, {"method": Placed.again}])
def test_train_may_be_given_by_position(way):
    def loss_fn(model, batch):
        given, default = model(batch[0], True, **way), model(batch[0], **way)
        return jnp.square(given - default).mean() + model(batch[0], False, **way).mean()

    step = train_step(Placed(), "1GiB", loss_fn=loss_fn)
    _, metrics = step(step.init(KEY, BATCH), BATCH)
    np.testing.assert_allclose(metrics["loss"], VECTORS.mean(), rtol=1e-4)


@pytest.mark.parametrize("option", [{"mutable": ["a"]}, {"rngs": {}}])
def test_what_the_step_gives_a_call_is_refused_by_name(option):
    def loss_fn(model, batch):
        return model(batch[0], **option).mean()

    with pytest.raises(TypeError, match=f"gives its own {next(iter(option))}"):
        train_step(MLP(), "1GiB", loss_fn=loss_fn).init(KEY, BATCH)


@pytest.mark.parametrize(
    "update",
    [None, lora(2), lora(2, quantize="int8")],
    ids=["all", "lora", "quantized"],
)
def test_a_state_that_went_through_bytes_trains_on(update):
    def keyless(state):
        return state.replace(key=jax.random.key_data(state.key))

    step = train_step(MLP(), "1GiB", update=update, optimizer=optax.adam(0.1))
    state, _ = step(step.init(KEY, BATCH), BATCH)
    saved = serialization.to_bytes(keyless(state))
    other = step.init(jax.random.key(1), BATCH)
    again = serialization.from_bytes(keyless(other), saved)
    again = again.replace(key=jax.random.wrap_key_data(again.key))
    losses = [float(step(x, BATCH)[1]["loss"]) for x in (again, state)]
    assert losses[0] == losses[1]
