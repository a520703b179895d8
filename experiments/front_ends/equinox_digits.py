"""An Equinox module on digits within a budget, beside jax.jit.

Command:  python -m experiments.front_ends.equinox_digits
Needs:    pip install -e ".[front_ends]", of that only Equinox.
Expect:   about a minute; a peak below 85 % of keep-all's; the losses of jax.jit.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from experiments.front_ends import digits

keys = jax.random.split(jax.random.key(0), 4)
model = eqx.nn.Sequential(
    [
        eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Conv2d(16, 16, 3, padding=1, key=keys[1]),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Conv2d(16, 16, 3, padding=1, key=keys[2]),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Lambda(jnp.ravel),
        eqx.nn.Linear(1024, 10, key=keys[3]),
    ]
)
params, static = eqx.partition(model, eqx.is_inexact_array)
optimizer = optax.adam(1e-3)
state = params, optimizer.init(params)


def loss_of(params, images, labels):
    model = eqx.combine(params, static)
    logits = jax.vmap(model)(jnp.moveaxis(images, -1, 1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def step(state, images, labels):
    params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
    updates, moments = optimizer.update(gradients, moments, params)
    return (eqx.apply_updates(params, updates), moments), loss


def trained(state):
    """The module again, from the state of the last step."""
    return eqx.combine(state[0], static)


if __name__ == "__main__":
    digits.main(step, state)
