"""Clients of Flax, Equinox, and of libraries that transform functions."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from clients.case import KEY, Client, client, normal
from flax import nnx
from flax.training import dynamic_scale, train_state

IMAGES = [(normal(8, 12, 12, 3, seed=n), jnp.arange(8) % 4) for n in (1, 2)]
TOKENS = [jnp.arange(96).reshape(4, 24) * n % 31 for n in (5, 7)]


def cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


@client
def nnx_with_batch_norm_and_dropout():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)
            self.last = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.first(x)))
            x = nnx.relu(self.norm(self.drop(x)))
            return self.last(x.mean((1, 2)))

    @nnx.jit
    def make():
        model = Net(nnx.Rngs(0))
        tx = optax.sgd(1e-2, momentum=0.9)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    graphdef, state = nnx.split(make())

    def step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        x, y = batch
        loss, gradients = nnx.value_and_grad(lambda m: cross_entropy(m(x), y))(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return Client(step, state, IMAGES)


@client
def nnx_layers_in_a_scan():
    @nnx.jit
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return nnx.Linear(16, 16, rngs=rngs)

    layers = make(nnx.Rngs(0))
    graphdef, params = nnx.split(layers)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return jnp.tanh(layer(x))

    def step(params, batch):
        def loss(params):
            return jnp.mean((forward(batch, nnx.merge(graphdef, params)) - 1) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return Client(step, params, [normal(64, 16, seed=n) for n in (1, 2)])


@client
def linen_with_mutable_collections():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            seen = self.variable("counters", "seen", lambda: jnp.zeros((), jnp.int32))
            seen.value += x.shape[0]
            x = nn.Conv(8, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            x = nn.Dropout(0.2, deterministic=not train)(x)
            self.sow("intermediates", "mean", x.mean())
            return nn.Dense(4)(x.mean((1, 2)))

    model, optimizer = Net(), optax.sgd(0.1, momentum=0.9)
    init = jax.jit(functools.partial(model.init, train=True))
    variables = init({"params": KEY, "dropout": KEY}, IMAGES[0][0])
    params = variables.pop("params")
    variables.pop("intermediates", None)

    def step(state, batch):
        params, variables, opt_state, key = state
        key, dropout = jax.random.split(key)
        x, y = batch

        def loss(params):
            logits, changed = model.apply(
                {"params": params, **variables},
                x,
                train=True,
                rngs={"dropout": dropout},
                mutable=["batch_stats", "counters", "intermediates"],
            )
            return cross_entropy(logits, y), changed

        (value, changed), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        seen = changed.pop("intermediates")
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, changed, opt_state, key), (value, seen)

    state = params, variables, optimizer.init(params), jax.random.key(7)
    return Client(step, state, IMAGES)


@client
def linen_layers_in_a_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(16)(nn.relu(nn.Dense(32)(x))), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(32, 16)(tokens)
            layers = nn.scan(
                nn.remat(Layer), {"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = layers()(x, None)
            return nn.Dense(32)(x)

    model = Net()
    params = jax.jit(model.init)(KEY, TOKENS[0])
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def step(state, tokens):
        params, opt_state = state

        def loss(params):
            return cross_entropy(model.apply(params, tokens)[:, :-1], tokens[:, 1:])

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), opt_state), value

    return Client(step, (params, optimizer.init(params)), TOKENS)


@client
def train_state_with_dynamic_scale_in_float16():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(32, dtype=jnp.float16)(x))
            return nn.Dense(4, dtype=jnp.float16)(x)

    class State(train_state.TrainState):
        scale: Any

    model = Net()
    x = normal(128, 16)
    params = jax.jit(model.init)(KEY, x)["params"]
    state = State.create(
        apply_fn=model.apply,
        params=params,
        tx=optax.sgd(1e-2, momentum=0.9),
        scale=dynamic_scale.DynamicScale(scale=jnp.float32(2**16)),
    )

    def step(state, batch):
        x, y = batch

        def loss(params):
            logits = state.apply_fn({"params": params}, x)
            return cross_entropy(logits.astype(jnp.float32), y)

        scale, is_finite, value, gradients = state.scale.value_and_grad(loss)(
            state.params
        )
        new = state.apply_gradients(grads=gradients)

        def chosen(new, old):
            return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

        return new.replace(
            params=chosen(new.params, state.params),
            opt_state=chosen(new.opt_state, state.opt_state),
            scale=scale,
        ), value

    batches = [(normal(128, 16, seed=n), jnp.arange(128) % 4) for n in (1, 2)]
    return Client(step, state, batches)


@client
def equinox_filtered_with_state():
    """As `eqx.filter_jit` splits a model: arrays are traced, and all else is not."""
    import equinox as eqx

    class Net(eqx.Module):
        layers: list
        norm: eqx.nn.BatchNorm
        name: str = "net"

        def __init__(self, key):
            keys = jax.random.split(key, 2)
            self.layers = [eqx.nn.Linear(12, 12, key=k) for k in keys]
            self.norm = eqx.nn.BatchNorm(12, axis_name="batch", mode="batch")

        def __call__(self, x, state):
            x = jax.nn.gelu(self.layers[0](x))
            x, state = self.norm(x, state)
            return self.layers[1](x), state

    model, state = eqx.nn.make_with_state(Net)(KEY)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def step(carried, x):
        arrays, state = carried

        def loss(arrays):
            model = eqx.combine(arrays, static)
            batched = jax.vmap(
                model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
            )
            y, new = batched(x, state)
            return jnp.mean((y - x) ** 2), new

        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
        arrays = jax.tree.map(lambda p, g: p - 0.1 * g, arrays, gradients)
        return (arrays, state), value

    batches = [normal(32, 12, seed=n) for n in (1, 2)]
    return Client(step, (arrays, state), batches, {})


@client
def functions_transformed_as_in_haiku():
    """Parameters are found by name while a function runs."""

    class Transformed(NamedTuple):
        init: Any
        apply: Any

    frames: list[dict[str, Any]] = []

    def parameter(name, shape):
        frame = frames[-1]
        if name not in frame["params"]:
            frame["key"], key = jax.random.split(frame["key"])
            frame["params"][name] = jax.random.normal(key, shape) / shape[0] ** 0.5
        return frame["params"][name]

    def transform(fun):
        def init(key, *args):
            frames.append({"params": {}, "key": key})
            fun(*args)
            return frames.pop()["params"]

        def apply(params, *args):
            frames.append({"params": dict(params), "key": None})
            try:
                return fun(*args)
            finally:
                frames.pop()

        return Transformed(init, apply)

    @transform
    def net(x):
        for number in range(3):
            x = jax.nn.elu(x @ parameter(f"linear_{number}", (24, 24)))
        return x

    batches = [normal(256, 24, seed=n) for n in (1, 2)]
    params = jax.jit(net.init)(KEY, batches[0])

    def step(params, x):
        def loss(params):
            return jnp.mean((net.apply(params, x) - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return {k: params[k] - 0.1 * gradients[k] for k in params}, value

    return Client(step, params, batches)


@client
def pixels_in_bytes_and_data_closed_over():
    generator = np.random.default_rng(0)
    mean = generator.normal(size=(14, 14)).astype(np.float32)  # an array of NumPy's
    scale = jnp.asarray(generator.uniform(1, 2, (14, 14)), jnp.float32)
    weights = {"w": normal(196, 64) / 14, "b": jnp.zeros(64)}

    def step(weights, batch):
        pixels, labels = batch
        x = ((pixels / np.float32(255) - mean) / scale).reshape(len(pixels), -1)

        def loss(weights):
            hidden = jnp.tanh(x @ weights["w"] + weights["b"])
            return cross_entropy(hidden[:, :10], labels)

        value, gradients = jax.value_and_grad(loss)(weights)
        new = jax.tree.map(lambda p, g: p - g, weights, gradients)
        return new, (value, pixels.max())

    batches = [
        (
            generator.integers(0, 256, (64, 14, 14), np.uint8),
            generator.integers(0, 10, 64, np.int32),
        )
        for _ in range(2)
    ]
    return Client(step, weights, batches)
