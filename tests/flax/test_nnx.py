"""Budgeted training of nnx modules is the same training as under `nnx.jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from toy import OPTIONS, STAGES, tightest

import poet_jax
from poet_jax.update import Update, lora

OPTIONS = OPTIONS | {"executor": STAGES}
train_step = functools.partial(poet_jax.train_step, **OPTIONS)
schedule = functools.partial(poet_jax.nnx.schedule, **OPTIONS)
LORA, NORM = lora(2), Update({"**/kernel": 0.5}, channels="norm")
TIGHT = "80%"  # every model below repeats or pages something within it
IMAGES = jax.random.normal(jax.random.key(0), (4, 6, 6, 3))
TOKENS = jax.random.randint(jax.random.key(1), (16, 8), 0, 16)
VECTORS = jax.random.normal(jax.random.key(2), (1024, 8))
LABELS = jnp.arange(4) % 3


class Block(nnx.Module):
    """A convolution with BatchNorm beside a shortcut."""

    def __init__(self, width, rngs):
        self.conv = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(x + self.norm(self.conv(x)))


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(4, rngs)])
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Layer(nnx.Module):
    def __init__(self, width, rngs):
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.attention(self.norm(x)))


class Transformer(nnx.Module):
    """Attention with Dropout; the embedding is the output projection too."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.layers = nnx.List([Layer(8, rngs)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


class MLP(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32, dropout=0.0):
        make = functools.partial(nnx.Linear, rngs=rngs, param_dtype=dtype)
        self.layers = nnx.List([make(8, 8), make(8, 8)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = self.dropout(jnp.tanh(layer(x)))
        return x


class Tied(nnx.Module):
    """One layer under two names."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)
        self.third = self.first

    def __call__(self, x):
        return self.third(jnp.tanh(self.second(jnp.tanh(self.first(x)))))


def cross_entropy(model, batch):
    inputs, labels = batch
    logits = model(inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def squared_error(model, batch):
    inputs, targets = batch
    return jnp.mean((model(inputs) - targets) ** 2)


def with_aux(model, batch):
    loss = squared_error(model, batch)
    return loss, {"double": 2 * loss}


def plain_step(loss_fn, has_aux=False):
    """What a user writes with nnx.jit."""

    @nnx.jit
    def step(model, optimizer, batch):
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=has_aux)
        loss, gradients = grad_fn(model, batch)
        optimizer.update(model, gradients)
        return loss

    return step


def assert_saves(step):
    """The budget made the latest run repeat or page something."""
    assert step.last_run.recomputed or step.last_run.bytes_paged_in


def assert_same_state(got, expected, rtol=1e-4):
    a, b = nnx.to_pure_dict(nnx.state(got)), nnx.to_pure_dict(nnx.state(expected))
    paths, tree = jax.tree.flatten(a)
    assert tree == jax.tree.structure(b)
    for x, y in zip(paths, jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= rtol * np.linalg.norm(y) + 1e-6


def assert_trains_alike(make_model, loss_fn, batch, tx, steps=20, rtol=1e-4):
    """The same losses, and the same model and optimizer after, as under nnx.jit."""
    model, reference = make_model(nnx.Rngs(0)), make_model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(reference, tx, wrt=nnx.Param)
    step = tightest(
        lambda budget: train_step(model, budget, loss_fn=loss_fn, optimizer=tx), batch
    )
    plain = plain_step(loss_fn)
    losses = [float(step(batch)) for _ in range(steps)]
    expected = [float(plain(reference, optimizer, batch)) for _ in range(steps)]
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    assert losses[-1] < losses[0]
    assert_same_state(model, reference, rtol=100 * rtol)
    assert_same_state(step.optimizer, optimizer, rtol=100 * rtol)
    assert_saves(step)
    return step


MODELS = {
    "resnet": (ResNet, cross_entropy, (IMAGES, LABELS)),
    "transformer": (Transformer, cross_entropy, (TOKENS, jnp.roll(TOKENS, 1))),
    "mlp": (MLP, squared_error, (VECTORS, jnp.sin(VECTORS))),
    "tied": (Tied, squared_error, (VECTORS, jnp.sin(VECTORS))),
}


@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_of_sgd_are_those_of_nnx_jit(name):
    """BatchNorm's statistics and Dropout's keys are part of what is compared."""
    assert_trains_alike(*MODELS[name], optax.sgd(0.05))


def test_the_first_steps_gradients_are_jaxs():
    """One step of SGD with rate 1 subtracts the gradient."""
    make_model, loss_fn, batch = MODELS["tied"]
    model, before = make_model(nnx.Rngs(0)), make_model(nnx.Rngs(0))
    plain = nnx.jit(nnx.grad(loss_fn))
    expected = nnx.to_pure_dict(plain(make_model(nnx.Rngs(0)), batch))
    step = tightest(
        lambda budget: train_step(
            model, budget, loss_fn=loss_fn, optimizer=optax.sgd(1.0)
        ),
        batch,
    )
    step(batch)
    got = jax.tree.map(
        jnp.subtract,
        *(nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (before, model)),
    )
    error = optax.tree.norm(jax.tree.map(jnp.subtract, got, expected))
    assert error <= 1e-5 * optax.tree.norm(expected)


def decay_mask(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


OPTIMIZERS = {
    "clipped and scheduled": optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.sgd(optax.cosine_decay_schedule(0.1, 20), momentum=0.9),
    ),
    "masked": optax.adamw(3e-3, weight_decay=0.1, mask=decay_mask),
}


@pytest.mark.usefixtures("standard_promotion")  # rates and averages of optax do
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_see_what_they_see_under_nnx_jit(name):
    assert_trains_alike(*MODELS["mlp"], OPTIMIZERS[name])


def test_dropout_draws_the_same_bits():
    make = functools.partial(MLP, dropout=0.5)

    def loss_fn(model, batch):
        return squared_error(model, batch), model(batch[0]) == 0

    model, reference = make(nnx.Rngs(0)), make(nnx.Rngs(0))
    batch = MODELS["mlp"][2]
    step = train_step(model, TIGHT, loss_fn=loss_fn)
    plain = plain_step(loss_fn, has_aux=True)
    optimizer = nnx.Optimizer(reference, optax.adamw(1e-3), wrt=nnx.Param)
    masks = []
    for _ in range(3):
        _, mask = step(batch)
        _, expected = plain(reference, optimizer, batch)
        np.testing.assert_array_equal(mask, expected)
        masks.append(mask)
    assert (masks[0] != masks[1]).any()


def test_an_optimizer_of_the_users_own_is_updated_in_place():
    model, reference = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    other = nnx.Optimizer(reference, optax.adam(1e-2), wrt=nnx.Param)
    batch = MODELS["mlp"][2]
    step = train_step(model, "95%", loss_fn=squared_error, optimizer=optimizer)
    kernel = model.layers[0].kernel
    plain = plain_step(squared_error)
    for _ in range(3):
        step(batch)
        plain(reference, other, batch)
    assert step.model is model and step.optimizer is optimizer
    assert model.layers[0].kernel is kernel
    assert int(optimizer.step[...]) == 3
    assert_same_state(model, reference)
    assert_same_state(optimizer, other)


def test_only_what_the_optimizer_was_made_for_is_trained():
    def is_bias(path, value):
        return "bias" in path

    model, reference = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=is_bias)
    train_step(model, "1GiB", optimizer=optimizer)((VECTORS, jnp.sin(VECTORS)))
    for layer, before in zip(model.layers, reference.layers, strict=True):
        np.testing.assert_array_equal(layer.kernel[...], before.kernel[...])
        assert (layer.bias[...] != before.bias[...]).any()


def test_auxiliary_outputs_are_returned():
    model, reference = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(0))
    batch = MODELS["mlp"][2]
    loss, aux = train_step(model, "1GiB", loss_fn=with_aux)(batch)
    np.testing.assert_allclose(loss, squared_error(reference, batch), rtol=1e-5)
    np.testing.assert_allclose(aux["double"], 2 * loss, rtol=1e-6)


@pytest.mark.parametrize(
    ("labels", "loss_fn"), [(LABELS, cross_entropy), (None, squared_error)]
)
def test_two_arguments_are_enough(labels, loss_fn):
    """adamw(1e-3), and a loss by the kind of labels; test_linen.py leaves the device
    and the planner out too."""
    if labels is None:
        labels = jnp.ones((4, 8))
    model, reference = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(reference, optax.adamw(1e-3), wrt=nnx.Param)
    step = train_step(model, 2**30)
    batch = VECTORS[:4], labels
    losses = [step(batch) for _ in range(3)]
    plain = plain_step(loss_fn)
    expected = [plain(reference, optimizer, batch) for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.usefixtures("standard_promotion")
def test_bfloat16_parameters_keep_their_type_and_float32_moments():
    """Rounding of bfloat16 is 2^-9, and XLA may skip some of it inside a fusion."""
    tx = optax.adam(1e-2, mu_dtype=jnp.float32)
    make_model = functools.partial(MLP, dtype=jnp.bfloat16)
    _, loss_fn, batch = MODELS["mlp"]
    step = assert_trains_alike(make_model, loss_fn, batch, tx, steps=5, rtol=2**-8)
    kinds = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(step.model, nnx.Param))}
    assert kinds == {jnp.dtype(jnp.bfloat16)}
    moments = step.optimizer.opt_state[0].mu
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype("float32")}


def test_tied_weights_stay_tied():
    model = Tied(nnx.Rngs(0))
    train_step(model, "1GiB")((VECTORS, jnp.sin(VECTORS)))
    assert model.first is model.third
    assert model.first.kernel is model.third.kernel


@pytest.mark.usefixtures("standard_promotion")  # a metric of flax does
def test_a_step_with_two_optimizers_and_metrics():
    """Two models of one loss, as in adversarial training, and a metric."""

    def step(models, optimizers, metrics, batch, rate):
        def loss_fn(first, second):
            return rate * squared_error(lambda x: second(first(x)), batch)

        loss, gradients = nnx.value_and_grad(loss_fn, argnums=(0, 1))(*models)
        for model, optimizer, gradient in zip(
            models, optimizers, gradients, strict=True
        ):
            optimizer.update(model, gradient)
        metrics.update(values=loss)
        return loss

    def start():
        models = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(1))
        optimizers = (
            nnx.Optimizer(models[0], optax.sgd(0.1), wrt=nnx.Param),
            nnx.Optimizer(models[1], optax.adam(1e-2), wrt=nnx.Param),
        )
        return models, optimizers, nnx.metrics.Average()

    batch = MODELS["mlp"][2]
    got, expected = start(), start()
    scheduled, plain = schedule(step, TIGHT), nnx.jit(step)
    for rate in np.linspace(0.5, 1.0, 20, dtype=np.float32):
        np.testing.assert_allclose(
            scheduled(*got, batch, rate),
            plain(*expected, batch, rate),
            rtol=1e-4,
        )
    for a, b in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert_same_state(a, b, rtol=1e-3)
    np.testing.assert_allclose(got[2].compute(), expected[2].compute(), rtol=1e-4)
    assert_saves(scheduled)


def test_a_python_number_is_an_argument_and_no_part_of_the_plan():
    calls = []

    def planner(*args):
        calls.append(1)
        return poet_jax.greedy(*args)

    def scaled(model, x, factor):
        return factor * model(x)

    model = MLP(nnx.Rngs(0))
    scheduled = schedule(scaled, "1GiB", planner=planner)
    for factor in (1.0, 2.0, 3.0):
        np.testing.assert_allclose(
            scheduled(model, VECTORS, factor), factor * model(VECTORS), rtol=1e-5
        )
    assert len(calls) == 1


def test_a_plan_of_shapes_is_the_plan_of_arrays():
    model = MLP(nnx.Rngs(0))
    step = train_step(model, "95%", loss_fn=squared_error)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    shape = jax.ShapeDtypeStruct(VECTORS.shape, VECTORS.dtype)
    plan = step.plan((shape, shape))
    assert step.plan((VECTORS, VECTORS)) is plan
    assert step.last_run is None
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    step((VECTORS, VECTORS))
    assert step.last_run.peak_bytes == plan.compiled_bytes


def test_evaluation_mode_is_planned_for_itself_and_said_in_a_short_line(caplog):
    model = MLP(nnx.Rngs(0), dropout=0.5)
    scheduled = schedule(lambda model, x: model(x), "1GiB")
    assert (scheduled(model, VECTORS) == 0).any()
    model.eval()
    np.testing.assert_allclose(
        scheduled(model, VECTORS), model(VECTORS), rtol=1e-5, atol=1e-6
    )
    assert not (scheduled(model, VECTORS) == 0).any()
    (record,) = (r for r in caplog.records if "again" in r.getMessage())
    assert len(record.getMessage()) < 1000


def test_what_a_loss_fn_changes_in_the_model_stays_changed():
    class Counting(MLP):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
            self.mode = "new"

        def __call__(self, x):
            self.calls[...] += 1
            self.mode = "used"
            return super().__call__(x)

    model = Counting(nnx.Rngs(0))
    step = train_step(model, "1GiB")
    for _ in range(3):
        step((VECTORS, VECTORS))
    assert int(model.calls[...]) == 3 and model.mode == "used"


class Replaced(MLP):
    def __call__(self, x):
        self.layers[0] = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        return super().__call__(x)


class Renewed(MLP):
    def __call__(self, x):
        self.more = nnx.Param(jnp.ones(8))
        return super().__call__(x) * self.more


@pytest.mark.parametrize("kind", [Replaced, Renewed])
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"update": LORA}])
def test_a_loss_fn_that_changes_what_is_trained_is_refused(kind, options):
    """The gradients belong to the old variables."""
    model = kind(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    with pytest.raises(poet_jax.CannotTrace, match="loss_fn replaces, adds or removes"):
        train_step(model, "1GiB", **options)((VECTORS, VECTORS))
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.usefixtures("standard_promotion")
def test_an_optimizer_that_looks_at_the_loss_is_given_it():
    """Also where it is called every other step."""
    tx = optax.chain(optax.sgd(0.05), optax.contrib.reduce_on_plateau(patience=1))
    tx = optax.MultiSteps(tx, 2).gradient_transformation()
    options = {"optimizer": tx, "loss_fn": lambda m, b: jnp.mean((m(b[0]) - b[1]) ** 2)}
    model, other = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(0))
    step = train_step(model, "1GiB", **options)
    optimizer = nnx.Optimizer(other, tx, wrt=nnx.Param)

    @nnx.jit
    def plain(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(options["loss_fn"])(model, batch)
        optimizer.update(model, gradients, value=loss)
        return loss

    batch = VECTORS, VECTORS
    pairs = [(step(batch), plain(other, optimizer, batch)) for _ in range(4)]
    np.testing.assert_allclose(*np.transpose(pairs), rtol=1e-5)


@pytest.mark.parametrize(
    "update",
    [None, LORA, lora(2, quantize="int8"), NORM],
    ids=["all", "lora", "quantized", "norm"],
)
def test_an_abstract_model_is_planned_as_the_model_is(update):
    def planned(model):
        step = train_step(model, "1GiB", update=update)
        usage = step.plan((VECTORS, VECTORS)).usage
        return usage.peak_bytes, usage.seconds

    abstract = nnx.eval_shape(lambda: MLP(nnx.Rngs(0)))
    assert planned(abstract) == planned(MLP(nnx.Rngs(0)))


def test_an_error_leaves_the_model_as_it_was():
    model = MLP(nnx.Rngs(0))
    step = train_step(model, 1000)
    with pytest.raises(poet_jax.BudgetTooSmall):
        step((VECTORS, VECTORS))
    model(VECTORS)


NO_KEYS = nnx.Not(nnx.RngKey)


class Counter(nnx.Module):
    """Counts its calls in an attribute, keeps an array that is no Variable, and grows
    and loses parts."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs)])
        self.sums, self.table = nnx.data(jnp.zeros(3)), nnx.data(jnp.ones(3))
        self.calls, self.fresh = 0, True

    def __call__(self, x):
        self.calls += 1
        if self.fresh:
            del self.fresh_only
            self.fresh, self.last = False, nnx.BatchStat(jnp.zeros(3))
            self.layers.append(nnx.Linear(3, 3, rngs=nnx.Rngs(1)))
        y = self.dropout(self.layers[0](self.layer(x))) + self.table
        self.sums = self.sums + y.sum(0)
        self.last[...] = y[0]
        return y


def test_what_a_step_leaves_in_its_modules_is_what_nnx_jit_leaves():
    """Arrays, static attributes, new and removed parts; keyword arguments, too."""

    def step(model, x, *, scale):
        model.eval()
        model.layer.kernel[...] *= 0.9
        return scale * model(x).sum()

    def trained(wrap):
        model, wrapped = Counter(nnx.Rngs(0)), wrap(step)
        model.fresh_only = 1
        results = [wrapped(model, VECTORS, scale=jnp.float32(2)) for _ in range(3)]
        return results, model

    (expected, reference), (results, model) = (
        trained(nnx.jit),
        trained(schedule("1GiB")),
    )
    np.testing.assert_allclose(results, expected, rtol=1e-6)
    assert nnx.graphdef(model) == nnx.graphdef(reference)
    assert (model.calls, model.dropout.deterministic, len(model.layers)) == (3, True, 2)
    parts = nnx.state(model), nnx.state(reference)
    leaves, others = (jax.tree.leaves(nnx.filter_state(x, NO_KEYS)) for x in parts)
    for leaf, other in zip(leaves, others, strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-6)


def tie(model):
    model.a.kernel = model.b.kernel


def retype(model):
    model.a.bias = nnx.BatchStat(model.a.bias[...] + 1)


def move(model):
    if "c" not in model:
        model.c = model.a
        del model.a
    model.c.kernel[...] *= 2


def swap(model):
    model.a, model.b = model.b, model.a


def refer(model):
    model.me = model


def replace(model):
    model.a = nnx.Linear(8, 8, rngs=nnx.Rngs(2))
    model.table = nnx.data(model.table + 1)


@pytest.mark.parametrize("change", [tie, retype, move, swap, refer, replace])
def test_objects_are_those_that_nnx_jit_leaves(change):
    """The same objects stand at the same paths, with the same types."""

    def left(wrap):
        layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(n)) for n in range(2)]
        model = nnx.Dict(a=layers[0], b=layers[1], table=nnx.data(jnp.ones(8)))
        before = [x for _, x in nnx.iter_graph(model) if nnx.graph.is_graph_node(x)]
        step = wrap(lambda model, x: (change(model), model.b(x).sum())[1])
        totals = [step(model, VECTORS) for _ in range(2)]
        after = dict(nnx.iter_graph(model))
        same = {p: [x is old for old in before] for p, x in after.items()}
        return nnx.graphdef(model), same, nnx.as_pure(nnx.state(model)), totals

    *expected, state, totals = left(nnx.jit)
    *found, our_state, our_totals = left(schedule("1GiB"))
    assert found == expected
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, (our_state, our_totals), (state, totals))


def test_a_traced_array_is_no_plain_attribute():
    def step(model, x):
        model.total = x.sum()
        return model.total

    model = MLP(nnx.Rngs(0))
    with pytest.raises(poet_jax.CannotTrace, match="Assign nnx.data"):
        schedule(step, "1GiB")(model, VECTORS)
    assert not hasattr(model, "total")


def test_a_scheduled_method_binds_as_one():
    class Model(MLP):
        @schedule(budget="1GiB")
        def total(self, x, *, scale):
            return scale * self(x).sum()

    model = Model(nnx.Rngs(0))
    np.testing.assert_allclose(
        model.total(VECTORS, scale=2.0), 2 * model(VECTORS).sum(), rtol=1e-5
    )


def test_static_arguments_of_modules_are_refused_with_what_to_write_instead():
    for name in ("static_argnames", "static_argnums", "donate_argnums"):
        with pytest.raises(TypeError, match=f"no {name}.*functools.partial"):
            schedule(lambda model, x: model(x), "1GiB", **{name: ()})


@pytest.mark.parametrize("trace", [True, False], ids=["stages", "whole"])
def test_a_clone_shares_arrays_with_its_model(trace):
    """Such as a target network; and an argument may be an array of the model, too."""

    def step(model, target, kernel):
        gradients = nnx.grad(lambda m: (m(VECTORS) ** 2).mean())(model)
        params = nnx.state(model, nnx.Param)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        nnx.update(model, new)
        old = nnx.state(target, nnx.Param)
        nnx.update(target, jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, old, new))
        return kernel.sum()

    executor = poet_jax.HostExecutor(trace=trace)
    ours = schedule(step, "1GiB", executor=executor)
    states = []
    for run in (ours, nnx.jit(step)):
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        target = nnx.clone(model)
        for _ in range(2):
            total = run(model, target, model.kernel[...])
        states.append((nnx.state(model), nnx.state(target), total))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *states)
