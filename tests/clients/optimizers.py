"""Clients of optax."""

import jax
import jax.numpy as jnp
import optax
from clients.case import Client, client, normal
from optax import contrib

BATCHES = [(normal(128, 16, seed=n), normal(128, 8, seed=n + 9)) for n in (1, 2, 3)]


def parameters(sizes=(16, 24, 8)):
    return [
        {"w": normal(*shape, seed=n) / shape[0] ** 0.5, "b": jnp.zeros(shape[1])}
        for n, shape in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
    ]


def loss_fn(params, batch):
    x, y = batch
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - y) ** 2)


def trained_by(optimizer):
    def step(state, batch):
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = parameters()
    return Client(step, (params, optimizer.init(params)), BATCHES)


@client
def adamw_with_clipping_and_a_schedule():
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
    return trained_by(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)))


@client
def multi_steps():
    return trained_by(optax.MultiSteps(optax.adamw(1e-2), 2))


@client
def muon():
    return trained_by(contrib.muon(1e-2))


@client
def schedule_free():
    return trained_by(contrib.schedule_free_adamw(1e-2))


@client
def sam():
    optimizer = contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
    return trained_by(optimizer)


@client
def lookahead():
    optimizer = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(parameters())

    def step(state, batch):
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss_fn)(params.fast, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return Client(step, (params, optimizer.init(params)), BATCHES, {})


@client
def lbfgs_with_a_zoom_line_search():
    optimizer = optax.lbfgs(memory_size=2)

    def step(state, batch):
        params, opt_state = state

        def value_fn(params):
            return loss_fn(params, batch)

        value, gradients = optax.value_and_grad_from_state(value_fn)(
            params, state=opt_state
        )
        updates, opt_state = optimizer.update(
            gradients, opt_state, params, value=value, grad=gradients, value_fn=value_fn
        )
        return (optax.apply_updates(params, updates), opt_state), value

    params = parameters((16, 8))
    return Client(step, (params, optimizer.init(params)), BATCHES[:1] * 2)


@client
def gradients_clipped_by_example():
    optimizer = optax.sgd(0.1)

    def step(state, batch):
        params, opt_state = state
        one = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))
        gradients = one(params, jax.tree.map(lambda x: x[:32, None], batch))
        norms = jnp.sqrt(
            sum(jnp.sum(g.reshape(32, -1) ** 2, 1) for g in jax.tree.leaves(gradients))
        )
        factors = jnp.minimum(1.0, 0.1 / norms)
        clipped = jax.tree.map(
            lambda g: jnp.einsum("b...,b->...", g, factors) / 32, gradients
        )
        updates, opt_state = optimizer.update(clipped, opt_state)
        return (optax.apply_updates(params, updates), opt_state), norms

    params = parameters()
    return Client(step, (params, optimizer.init(params)), BATCHES)
