"""The step whose plan is drawn in docs/tutorials; `make figures` draws it.

Everything in the figure is planned: nothing runs.
"""

import jax
import jax.numpy as jnp

import poet_jax


def loss_fn(weights, x, y):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def step(weights, x, y):
    loss, gradients = jax.value_and_grad(loss_fn)(weights, x, y)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


def make_step():
    """As `python -m poet_jax explain` takes it."""
    planner = poet_jax.MilpPlanner(time_limit_seconds=10)
    device = poet_jax.devices.JETSON_TX2
    train = poet_jax.schedule(
        step, "52MiB", donate_argnums=0, device=device, planner=planner
    )
    data = jax.ShapeDtypeStruct((8192, 256), jnp.float32)
    return train, [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4, data, data
