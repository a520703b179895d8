"""A small function to schedule, and `schedule` with a fixed device and planner."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import poet_jax

OPTIONS = {
    "planner": poet_jax.greedy,
    "device": poet_jax.devices.RASPBERRY_PI_4,
}
schedule = functools.partial(poet_jax.schedule, **OPTIONS)
# Planned in stages, also where the function would fit as it is.
STAGES = poet_jax.HostExecutor(trace=True)
W = jnp.eye(16) * 0.9 + 0.01
X = jnp.linspace(-1.0, 1.0, 64 * 16).reshape(64, 16)


def loss(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return (x**2).mean()


gradient = jax.grad(loss)


def tightest(make: Callable[[Any], Any], *args: Any) -> Any:
    """make(budget) with the smallest budget in which `args` can be planned."""
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        make(1).plan(*args)
    return make(caught.value.smallest_bytes)
