"""Training a part of the parameters is masked training of all of them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_three_sentences
from flax import nnx
from toy import STAGES

import poet_jax
import poet_jax.stores.paged
from poet_jax.update import Update, bias_only, full, last_blocks, lora, parse_update

OPTIONS = {
    "planner": poet_jax.greedy,
    "device": poet_jax.devices.RASPBERRY_PI_4,
}
train_step = functools.partial(poet_jax.train_step, **OPTIONS)
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (32, 8))
BATCH = X, jnp.sin(X)
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))
STEPS = 2


class LinenNet(nn.Module):
    """A stem, two blocks and a head, whose names say nothing of their order."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(not train, name="zero_norm")(x)
        x = nn.Dense(12, name="zero")(x)
        for number in range(2):
            x = x + jnp.tanh(nn.Dense(12, name=f"block_{number}")(x))
        return nn.Dense(8, name="after")(x)


class NnxNet(nnx.Module):
    """The same, with the same paths."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.zero = nnx.Linear(8, 12, rngs=rngs)
        self.zero_norm = nnx.BatchNorm(8, rngs=rngs)
        self.block_0 = nnx.Linear(12, 12, rngs=rngs)
        self.block_1 = nnx.Linear(12, 12, rngs=rngs)
        self.after = nnx.Linear(12, 8, rngs=rngs)

    def __call__(self, x):
        x = self.zero(self.zero_norm(x))
        for block in (self.block_0, self.block_1):
            x = x + jnp.tanh(block(x))
        return self.after(x)


def squared_error(model, batch):
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


class Linen:
    """A linen step and its state as parameters, statistics and a loss of both."""

    def __init__(self, update, tx=TX, budget=2**30, **options):
        self.step = train_step(
            LinenNet(), budget, optimizer=tx, update=update, **options
        )
        self.state = self.step.init(KEY, BATCH)

    def run(self):
        self.state, _ = self.step(self.state, BATCH)

    @property
    def params(self):
        return self.state.params

    @property
    def merged(self):
        return self.state.part.merged(self.state.params)

    @property
    def part(self):
        return self.state.part

    @property
    def statistics(self):
        return self.state.collections["batch_stats"]

    @property
    def moments(self):
        return self.state.opt_state

    def reference(self):
        """(loss of parameters and statistics, with the new statistics; both)."""

        def loss(params, statistics):
            out, new = LinenNet().apply(
                {"params": params, "batch_stats": statistics},
                X,
                train=True,
                mutable=["batch_stats"],
            )
            return jnp.mean((out - BATCH[1]) ** 2), new["batch_stats"]

        return loss, self.params, self.statistics

    def plan(self):
        return self.step.plan(self.state, BATCH)


class Nnx:
    """The same of an nnx step."""

    def __init__(self, update, tx=TX, budget=2**30, **options):
        self.model = NnxNet()
        self.step = train_step(
            self.model, budget, optimizer=tx, update=update, **options
        )
        self.step.plan(BATCH)

    def run(self):
        self.step(BATCH)

    @property
    def params(self):
        return nnx.to_pure_dict(nnx.state(self.model, nnx.Param))

    @property
    def merged(self):
        return nnx.to_pure_dict(nnx.state(self.step.merged(), nnx.Param))

    @property
    def part(self):
        return nnx.as_pure(self.step.optimizer.part)

    @property
    def statistics(self):
        return nnx.to_pure_dict(nnx.state(self.model, nnx.BatchStat))

    @property
    def moments(self):
        return nnx.as_pure(self.step.optimizer.opt_state)

    def reference(self):
        graphdef, _, _ = nnx.split(self.model, nnx.Param, nnx.BatchStat)

        def loss(params, statistics):
            model = nnx.merge(graphdef, nnx.State(params), nnx.State(statistics))
            value = squared_error(model, BATCH)
            return value, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

        return loss, self.params, self.statistics

    def plan(self):
        return self.step.plan(BATCH)


def paths(tree):
    return {
        "/".join(
            str(getattr(key, "key", getattr(key, "idx", None))) for key in path
        ): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def copy(tree):
    return jax.tree.map(np.array, tree)


def copy_reference(trainer):
    loss, params, statistics = trainer.reference()
    return loss, copy(params), copy(statistics)


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


KERNELS = ["block_0/kernel", "block_1/kernel"]
BLOCKS = ["block_0/bias", "block_1/bias"]
WHOLE = {
    "bias": (bias_only(), [*BLOCKS, "zero/bias", "zero_norm/bias", "after/bias"]),
    "last block": (
        last_blocks(1),
        ["block_1/bias", "block_1/kernel", "after/bias", "after/kernel"],
    ),
    "patterns": (
        {"block_?/**": 1.0, "**/bias": 0.0, "after/bias": 1.0},
        [*KERNELS, "after/bias"],
    ),
}
WORLDS = pytest.mark.parametrize("world", [Linen, Nnx])


def masked(loss, params, statistics, trained):
    """Full gradients, of which optax sees and updates what is `trained`."""
    mask = jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(str(k.key) for k in path) in trained, params
    )
    tx = optax.chain(
        optax.masked(TX, mask),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda x: not x, mask)),
    )
    return trained_with(tx, loss, params, statistics)


@functools.partial(jax.jit, static_argnums=(0, 1))
def trained_with(tx, loss, trainable, statistics):
    """What optax makes of a tree in some steps, and the statistics after them."""

    def step(carry, _):
        trainable, statistics, moments = carry
        gradients, statistics = jax.grad(loss, has_aux=True)(trainable, statistics)
        updates, moments = tx.update(gradients, moments, trainable)
        return (optax.apply_updates(trainable, updates), statistics, moments), None

    start = trainable, statistics, tx.init(trainable)
    (trainable, statistics, _), _ = jax.lax.scan(step, start, length=STEPS)
    return trainable, statistics


@pytest.mark.parametrize(
    ("world", "name"),
    [
        (Linen, "bias"),
        (Nnx, "bias"),
        (Linen, "last block"),
        (Nnx, "last block"),
        (Nnx, "patterns"),
    ],
)
def test_whole_parameters_are_updated_as_with_a_mask(world, name):
    update, trained = WHOLE[name]
    trainer = world(update)
    loss, params, statistics = copy_reference(trainer)
    expected, statistics = masked(loss, params, statistics, trained)
    for _ in range(STEPS):
        trainer.run()
    assert_close((trainer.params, trainer.statistics), (expected, statistics))
    before, after = paths(params), paths(trainer.params)
    assert {path for path in before if (before[path] != after[path]).any()} == set(
        trained
    )
    for path in before.keys() - set(trained):
        assert before[path].tobytes() == after[path].tobytes()
    sizes = sum(before[path].size for path in trained)
    assert sum(x.size for x in jax.tree.leaves(trainer.moments)) == 2 * sizes + 1


# Channels and adapters.


def trained_part(loss, params, statistics, trainable, merge):
    """The same for a tree of its own, which `merge` puts into the parameters."""

    def whole(trainable, statistics):
        return loss(merge(trainable, params), statistics)

    trainable, statistics = trained_with(TX, whole, trainable, statistics)
    return merge(trainable, params), statistics


def with_rows(params, rows, trainable):
    """`params` with rows of kernels replaced."""

    def put(path, leaf):
        name = "/".join(str(key.key) for key in path)
        if name not in trainable:
            return leaf
        return jnp.asarray(leaf).at[rows[name]].set(trainable[name])

    return jax.tree_util.tree_map_with_path(put, params)


def rows_of(params, channels):
    """Numbers of three of twelve input channels, chosen here."""
    kernels = paths(params)
    if channels == "first":
        return dict.fromkeys(KERNELS, np.arange(3))
    norms = {path: (kernels[path] ** 2).sum(axis=1) for path in KERNELS}
    return {path: np.sort(np.argsort(-norms[path])[:3]) for path in KERNELS}


@WORLDS
@pytest.mark.parametrize(("channels", "budget"), [("first", 2**30), ("norm", "95%")])
def test_channels_are_updated_as_with_sliced_gradients(world, channels, budget):
    update = Update({"block_*/kernel": 0.25}, channels=channels)
    trainer = world(update, budget=budget)
    loss, params, statistics = copy_reference(trainer)
    rows = rows_of(params, channels)
    start = paths(params)
    expected, statistics = trained_part(
        loss,
        params,
        statistics,
        {path: start[path][rows[path]] for path in KERNELS},
        lambda trainable, params: with_rows(params, rows, trainable),
    )
    for _ in range(STEPS):
        trainer.run()
    assert_close((trainer.params, trainer.statistics), (expected, statistics))
    for path, after in paths(trainer.params).items():
        changed = np.zeros(after.shape, bool)
        if path in KERNELS:
            changed[rows[path]] = True
        np.testing.assert_array_equal(after != start[path], changed)
    assert sum(x.size for x in jax.tree.leaves(trainer.moments)) == 2 * 6 * 12 + 1


@WORLDS
def test_adapters_are_updated_as_if_they_were_part_of_the_model(world):
    trainer = world(lora(2))
    loss, params, statistics = copy_reference(trainer)
    adapters = copy(trainer.part.adapters)
    kernels = {*KERNELS, "zero/kernel", "after/kernel"}
    assert adapters.keys() == kernels

    def merge(adapters, params):
        def add(path, leaf):
            name = "/".join(str(key.key) for key in path)
            if name not in adapters:
                return leaf
            a, b = adapters[name]
            return leaf + a @ b

        return jax.tree_util.tree_map_with_path(add, params)

    start = paths(merge(adapters, params))
    expected, statistics = trained_part(loss, params, statistics, adapters, merge)
    for _ in range(STEPS):
        trainer.run()
    assert_close((trainer.merged, trainer.statistics), (expected, statistics))
    for path, after in paths(trainer.params).items():
        assert after.tobytes() == start[path].tobytes()
    assert all((paths(trainer.merged)[path] != start[path]).any() for path in kernels)


def test_everything_is_what_no_update_says():
    prints = []
    for update in (None, full()):
        step = train_step(LinenNet(), 2**30, optimizer=TX, update=update)
        state = jax.eval_shape(step.init, KEY, BATCH)
        prints.append(poet_jax.trace(step.update, state, BATCH).fingerprint)
    assert prints[0] == prints[1]


@WORLDS
def test_statistics_of_batch_norm_may_be_kept(world):
    trainer = world(Update({"**/bias": 1.0}, batch_stats="keep"))
    before = copy(trainer.statistics)
    trainer.run()
    jax.tree.map(np.testing.assert_array_equal, trainer.statistics, before)


def test_state_on_storage_is_updated_in_part():
    store = poet_jax.HostStore()
    update = Update({"block_*/kernel": 0.25, "**/bias": 1.0}, channels="norm")
    expected, paged = (
        Linen(update),
        Linen(update, executor=poet_jax.HostExecutor(store)),
    )
    paged.state = poet_jax.to_storage(paged.state, store, min_bytes=256)
    for trainer in (expected, paged):
        for _ in range(STEPS):
            trainer.run()
    assert isinstance(paged.params["zero"]["kernel"], poet_jax.PagedArray)
    assert_close(jax.tree.map(np.asarray, paged.params), expected.params)


# A step of the user's own.


def loss_of(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean((x - BATCH[1]) ** 2)


def layers():
    kernels = jax.random.split(KEY, 3)
    return {
        "layers": [
            {"kernel": jax.random.normal(key, (8, 8)) / 3, "bias": jnp.zeros(8)}
            for key in kernels
        ]
    }


def test_a_part_is_trained_by_a_step_of_the_users_own():
    params = layers()
    scheme = Update({"layers/1/kernel": 0.5, "layers/2/**": 1.0})
    part = scheme.of(params)
    moments = TX.init(part.split(params))

    def step(state, x):
        params, part, moments = state
        trainable = part.split(params)
        loss, gradients = jax.value_and_grad(
            lambda trainable: loss_of(part.merge(trainable, params), x)
        )(trainable)
        updates, moments = TX.update(gradients, moments, trainable)
        params, part = part.replace(optax.apply_updates(trainable, updates), params)
        return (params, part, moments), loss

    plain = jax.jit(step)((params, part, moments), X)
    before = paths(params)
    scheduled = poet_jax.schedule(step, 2**30, donate_argnums=0, **OPTIONS)
    got = scheduled((params, part, moments), X)
    assert_close(got, plain)
    for path, after in paths(got[0][0]).items():
        changed = np.zeros(after.shape, bool)
        changed[
            : {"layers/1/kernel": 4, "layers/2/kernel": 8, "layers/2/bias": 8}.get(
                path, 0
            )
        ] = True
        np.testing.assert_array_equal(after != before[path], changed)


def test_a_mask_is_what_optax_takes():
    params = layers()
    for update in (bias_only(), last_blocks(1)):
        mask = update.mask(params, X, loss=loss_of)
        trained = {path for path, is_trained in paths(mask).items() if is_trained}
        part = update.of(params, X, loss=loss_of)
        assert trained == {path for path, _ in part.trained}
        optax.masked(TX, mask).init(params)


def test_a_quarter_of_the_channels_saves_a_quarter_of_the_activation():
    """Everything is kept, and the ledger counts bytes as arrays come and go."""
    wide, n = 512, 1024

    def peak(fraction):
        def step(params, x):
            def loss(trainable):
                first, second = part.merge(trainable, params)
                y = jax.nn.gelu(jnp.tanh(x @ first) @ second)
                return jnp.sum(jnp.tanh(y @ first) ** 2)

            trainable = part.split(params)
            gradients = jax.grad(loss)(trainable)
            new = jax.tree.map(lambda t, g: t - 0.1 * g, trainable, gradients)
            return part.merge(new, params)

        params = jnp.ones((8, wide)) / wide, jnp.ones((wide, 8)) / wide
        part = Update({"1": fraction}).of(params)
        scheduled = poet_jax.schedule(
            step,
            "100%",
            donate_argnums=0,
            executor=STAGES,
            **OPTIONS,
        )
        graph = scheduled.plan(params, jnp.ones((n, 8))).graph
        scheduled(params, jnp.ones((n, 8)))
        return scheduled.last_run.peak_bytes, graph

    whole, _ = peak(1.0)
    quarter, graph = peak(0.25)
    saved = [v for v in graph.values if v.shape == (n, wide // 4)]
    assert sum(v.nbytes for v in saved) == n * wide
    assert whole - quarter == pytest.approx(0.75 * 4 * n * wide, rel=0.02)


def test_paths_are_those_of_the_model():
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    params = nnx.state(attention, nnx.Param)
    for tree in (params, nnx.as_pure(params)):
        part = Update({"value/kernel": 1.0, "query/*": 1.0}).of(tree)
        assert dict(part.trained).keys() == {
            "value/kernel",
            "query/bias",
            "query/kernel",
        }


# Bad input.


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: {"**/biases": 1.0}, ["**/biases", "layers/0/bias"]),
        (lambda: {"layers/7/kernel": 1.0}, ["layers/7/kernel", "layers/0/kernel"]),
        (lambda: {"**/bias": 1.5}, ["1.5", "between"]),
        (lambda: {"**/bias": -0.1}, ["-0.1"]),
        (lambda: {"**/bias": float("nan")}, ["nan"]),
        (lambda: {"**/bias": 0.5}, ["0.5", "layers/0/bias", "[8]"]),
        (lambda: {"**/bias": 0.0}, ["nothing"]),
        (lambda: {}, ["nothing"]),
        (lambda: {"**/bias": 1.0, "**": 0.0}, ["nothing", "wider"]),
        (lambda: Update({"**": 1.0}, channels="last"), ["last", "norm"]),
        (lambda: Update({"**": 1.0}, batch_stats="freeze"), ["freeze", "keep"]),
        (lambda: lora(0), ["0", "lora(8)"]),
        (lambda: lora(2, "**/bias"), ["layers/0/bias", "[8]"]),
        (lambda: last_blocks(0), ["0"]),
        (lambda: last_blocks(4), ["4", "3"]),
    ],
)
def test_an_update_that_cannot_be_says_why(make, facts):
    with pytest.raises(ValueError) as caught:
        parse_update(make()).of(layers(), X, loss=loss_of)
    assert_three_sentences(caught.value, *facts)


def test_weight_decay_before_the_model_is_no_use_of_a_block():
    names = ["embed", *(f"blocks_{n}" for n in range(3)), "head"]
    params = {name: {"kernel": jnp.ones((4, 4))} for name in names}

    def loss(params, x):
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        for name in names:
            x = jnp.tanh(x @ params[name]["kernel"])
        return jnp.sum(x) + 1e-4 * decay

    part = last_blocks(1).of(params, X[:, :4], loss=loss)
    assert {path for path, _ in part.trained} == {"blocks_2/kernel", "head/kernel"}


def test_what_cannot_be_an_update_is_named():
    with pytest.raises(TypeError) as caught:
        train_step(LinenNet(), 2**30, update="bias")
    assert_three_sentences(caught.value, "'bias'", "bias_only()")
    with pytest.raises(ValueError) as caught:
        last_blocks(1).of(layers())
    assert_three_sentences(caught.value, "loss=")
    for update in (lora(2), Update({"**/kernel": 0.5})):
        with pytest.raises(ValueError) as caught:
            update.mask(layers())
        assert_three_sentences(caught.value, "split")


def test_an_optimizer_of_all_parameters_is_refused_for_a_part():
    model = NnxNet()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    with pytest.raises(TypeError) as caught:
        train_step(model, 2**30, optimizer=optimizer, update=bias_only())
    assert_three_sentences(caught.value, "optimizer.tx")
    step = train_step(model, 2**30, update=last_blocks(1))
    with pytest.raises(AttributeError) as caught:
        step.optimizer  # noqa: B018
    assert_three_sentences(caught.value, "step.plan(batch)")
