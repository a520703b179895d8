"""Clients that are whole programs: solvers, agents, inference and generative models."""

import itertools

import jax
import jax.numpy as jnp
import optax
from clients.case import Client, client, normal
from jax import lax


def dense(*sizes):
    return [
        (normal(a, b, seed=a) / a**0.5, jnp.zeros(b))
        for a, b in itertools.pairwise(sizes)
    ]


def mlp(layers, x):
    for w, b in layers[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def descended(params, gradients, rate=0.05):
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients)


@client
def an_adaptive_solver_and_its_adjoint():
    """Heun's method with a step by the error, in a `while_loop`, and the continuous
    adjoint, solved backwards by the same."""

    def solve(field, y, args, t0, t1):
        sign = jnp.sign(t1 - t0)

        def body(carry):
            t, y, h = carry
            h = jnp.minimum(h, jnp.abs(t1 - t))
            k1 = field(t, y, args)
            k2 = field(
                t + sign * h, jax.tree.map(lambda a, b: a + sign * h * b, y, k1), args
            )
            error = sum(
                jnp.sum((h * (a - b)) ** 2)
                for a, b in zip(jax.tree.leaves(k1), jax.tree.leaves(k2), strict=True)
            )
            error = jnp.sqrt(error) / 1e-2
            new = jax.tree.map(lambda y, a, b: y + sign * h * (a + b) / 2, y, k1, k2)
            good = error <= 1
            y = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, y)
            t = jnp.where(good, t + sign * h, t)
            return t, y, h * jnp.clip(0.9 / jnp.sqrt(error + 1e-9), 0.3, 2.0)

        def goes_on(carry):
            return jnp.abs(t1 - carry[0]) > 1e-6

        return lax.while_loop(goes_on, body, (t0, y, jnp.float32(0.1)))[1]

    def field(t, y, layers):
        return mlp(layers, y)

    @jax.custom_vjp
    def flow(layers, y):
        return solve(field, y, layers, jnp.float32(0), jnp.float32(1))

    def forward(layers, y):
        end = flow(layers, y)
        return end, (layers, end)

    def backward(residuals, cotangent):
        layers, end = residuals

        def augmented(t, state, layers):
            y, a, _ = state
            f, vjp = jax.vjp(lambda y, p: field(t, y, p), y, layers)
            dy, dp = vjp(a)
            return f, -dy, jax.tree.map(jnp.negative, dp)

        zero = jax.tree.map(jnp.zeros_like, layers)
        _, dy, dp = solve(
            augmented, (end, cotangent, zero), layers, jnp.float32(1), jnp.float32(0)
        )
        return dp, dy

    flow.defvjp(forward, backward)

    def step(layers, x):
        value, gradients = jax.value_and_grad(
            lambda layers: jnp.mean((flow(layers, x) - jnp.sin(x)) ** 2)
        )(layers)
        return descended(layers, gradients), value

    batches = [normal(16, 4, seed=n) for n in (1, 2)]
    return Client(step, dense(4, 16, 4), batches)


@client
def ppo_whole_in_a_scan():
    """Rollouts in a pendulum-like world, advantages and epochs, in nested scans."""
    optimizer = optax.adam(3e-3)

    def world(state, action):
        angle, speed = state
        speed = speed + 0.1 * (jnp.sin(angle) + action)
        angle = angle + 0.1 * speed
        return (angle, speed), -(angle**2) - 0.1 * speed**2

    def policy(params, observation):
        return mlp(params["actor"], observation)[..., 0]

    def value(params, observation):
        return mlp(params["critic"], observation)[..., 0]

    def rollout(carry, _):
        params, state, key = carry
        key, noise = jax.random.split(key)
        seen = jnp.stack(state, -1)
        mean = policy(params, seen)
        action = mean + 0.3 * jax.random.normal(noise, mean.shape)
        new, reward = world(state, action)
        log = -((action - mean) ** 2) / 0.18
        return (params, new, key), (seen, action, log, value(params, seen), reward)

    def update(carried, _):
        params, opt_state, state, key = carried
        (_, state, key), (seen, action, log, values, reward) = lax.scan(
            rollout, (params, state, key), None, 16
        )

        def backwards(advantage, x):
            reward, value, following = x
            advantage = reward + 0.95 * following - value + 0.9 * advantage
            return advantage, advantage

        following = jnp.concatenate([values[1:], values[-1:]])
        _, advantages = lax.scan(
            backwards, jnp.zeros(8), (reward, values, following), reverse=True
        )

        def loss(params):
            ratio = jnp.exp(-((action - policy(params, seen)) ** 2) / 0.18 - log)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            gain = jnp.minimum(ratio * advantages, clipped * advantages).mean()
            target = advantages + values
            return jnp.mean((value(params, seen) - target) ** 2) - gain

        def epoch(carried, _):
            params, opt_state = carried
            value, gradients = jax.value_and_grad(loss)(params)
            updates, opt_state = optimizer.update(gradients, opt_state)
            return (optax.apply_updates(params, updates), opt_state), value

        (params, opt_state), losses = lax.scan(epoch, (params, opt_state), None, 3)
        return (params, opt_state, state, key), (losses, reward.mean())

    def step(carried, batch):
        return lax.scan(update, carried, None, 2)

    params = {"actor": dense(2, 16, 1), "critic": dense(2, 16, 1)}
    world_state = normal(8, seed=1), normal(8, seed=2)
    state = params, optimizer.init(params), world_state, jax.random.key(3)
    return Client(step, state, [None, None])


@client
def stochastic_variational_inference():
    """A Bayesian regression with a mean-field guide, and samples by `vmap`."""
    x = normal(64, 5, seed=3)
    y = x @ normal(5, seed=4) + 0.1 * normal(64, seed=5)

    def log_normal(value, mean, scale):
        return -(((value - mean) / scale) ** 2) / 2 - jnp.log(scale)

    def elbo(guide, key):
        scale = jax.nn.softplus(guide["scale"])
        weights = guide["mean"] + scale * jax.random.normal(key, (5,))
        prior = log_normal(weights, 0.0, 1.0).sum()
        entropy = -log_normal(weights, guide["mean"], scale).sum()
        noise = jax.nn.softplus(guide["noise"])
        return log_normal(y, x @ weights, noise).sum() + prior + entropy

    def step(state, _):
        guide, key = state
        key, *keys = jax.random.split(key, 9)
        value, gradients = jax.value_and_grad(
            lambda guide: -jax.vmap(elbo, (None, 0))(guide, jnp.stack(keys)).mean()
        )(guide)
        return (descended(guide, gradients, 1e-3), key), value

    guide = {"mean": jnp.zeros(5), "scale": jnp.zeros(5), "noise": jnp.zeros(())}
    return Client(step, (guide, jax.random.key(1)), [None, None])


@client
def a_vae_whose_epoch_is_a_fori_loop():
    optimizer = optax.adam(1e-3)
    data = jax.nn.sigmoid(normal(64, 20, seed=6))

    def loss(params, x, key):
        mean, log_scale = jnp.split(mlp(params["encoder"], x), 2, axis=-1)
        z = mean + jnp.exp(log_scale) * jax.random.normal(key, mean.shape)
        logits = mlp(params["decoder"], z)
        fit = optax.sigmoid_binary_cross_entropy(logits, x).sum(-1)
        prior = (mean**2 + jnp.exp(2 * log_scale) - 2 * log_scale - 1).sum(-1) / 2
        return (fit + prior).mean()

    def step(state, _):
        def body(i, carried):
            params, opt_state, key, total = carried
            key, draw = jax.random.split(key)
            x = lax.dynamic_slice_in_dim(data, i * 32, 32)
            value, gradients = jax.value_and_grad(loss)(params, x, draw)
            updates, opt_state = optimizer.update(gradients, opt_state)
            return optax.apply_updates(params, updates), opt_state, key, total + value

        *state, total = lax.fori_loop(0, 2, body, (*state, jnp.float32(0)))
        return tuple(state), total

    params = {"encoder": dense(20, 24, 8), "decoder": dense(4, 24, 20)}
    state = params, optimizer.init(params), jax.random.key(2)
    return Client(step, state, [None, None])


@client
def a_unet_with_linear_attention():
    def conv(w, x, stride=1):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=dimensions
        )

    def attention(w, x):
        b, h, width, c = x.shape
        q, k, v = jnp.split(x.reshape(b, -1, c) @ w, 3, axis=-1)
        q, k = jax.nn.softmax(q, -1), jax.nn.softmax(k, 1)
        context = jnp.einsum("bnd,bne->bde", k, v)
        return x + jnp.einsum("bnd,bde->bne", q, context).reshape(x.shape)

    def net(params, x):
        first = jax.nn.silu(conv(params["in"], x))
        low = jax.nn.silu(conv(params["down"], first, 2))
        low = attention(params["attention"], low)
        up = jax.image.resize(low, first.shape, "nearest")
        joined = jnp.concatenate([first, jax.nn.silu(conv(params["up"], up))], -1)
        return conv(params["out"], joined)

    def step(state, x):
        params, key = state
        key, noise_key, time_key = jax.random.split(key, 3)
        noise = jax.random.normal(noise_key, x.shape)
        t = jax.random.uniform(time_key, (len(x), 1, 1, 1))
        noisy = jnp.sqrt(1 - t) * x + jnp.sqrt(t) * noise

        def loss(params):
            return jnp.mean((net(params, noisy) - noise) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return (descended(params, gradients), key), value

    params = {
        "in": normal(3, 3, 3, 8, seed=1) / 5,
        "down": normal(3, 3, 8, 8, seed=2) / 8,
        "attention": normal(8, 24, seed=3) / 3,
        "up": normal(3, 3, 8, 8, seed=4) / 8,
        "out": normal(3, 3, 16, 3, seed=5) / 12,
    }
    batches = [normal(4, 16, 16, 3, seed=n) for n in (7, 8)]
    return Client(step, (params, jax.random.key(4)), batches)


def noisy_layers(key, count=1):
    """A step with a key in its state, of whatever kind."""

    def step(state, x):
        weights, key = state
        key, *draws = jax.random.split(key, count + 1)

        def loss(weights):
            hidden = x
            for w, draw in zip(weights, draws, strict=True):
                mask = jax.random.bernoulli(draw, 0.8, hidden.shape)
                hidden = jnp.where(mask, jnp.tanh(hidden @ w), 0.0)
            return jnp.mean(hidden**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return (descended(weights, gradients), key), value

    weights = [normal(24, 24, seed=n) / 5 for n in range(count)]
    return Client(step, (weights, key), [normal(128, 24, seed=n) for n in (5, 6)])


@client
def keys_of_the_old_kind():
    return noisy_layers(jax.random.PRNGKey(0))


@client
def keys_of_the_new_kind():
    return noisy_layers(jax.random.key(0), count=2)


@client
def keys_of_another_generator():
    return noisy_layers(jax.random.key(0, impl="rbg"))
