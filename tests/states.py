"""The state of a small network on storage, and steps that train it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from toy import OPTIONS

import poet_jax
from poet_jax.stores.paged import PagedArray

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
}


X = jnp.linspace(-1.0, 1.0, 64 * 128).reshape(64, 128)


def case(name="adamw", layers=3):
    """(init, step) of a small network with an optimizer."""
    optimizer = OPTIMIZERS[name]

    def init(key):
        keys = jax.random.split(key, layers)
        params = {f"w{i}": jax.random.normal(k, (128, 128)) for i, k in enumerate(keys)}
        params["bias"] = jnp.zeros(128)
        return params, optimizer.init(params)

    def loss(params, x):
        for i in range(layers):
            x = jnp.tanh(x @ params[f"w{i}"] / 12 + params["bias"])
        return (x**2).mean()

    def step(state, x):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return init, step


def schedule(step, budget, store, **options):
    options = OPTIONS | options | {"executor": poet_jax.HostExecutor(store)}
    return poet_jax.schedule(step, budget, donate_argnums=0, **options)


def values(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_close(got, expected):
    for a, b in zip(values(got), values(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def state_bytes(state):
    return sum(x.nbytes for x in jax.tree.leaves(state) if isinstance(x, PagedArray))


class Failing(poet_jax.HostStore):
    """Has room for so many arrays more."""

    left = 10**9

    def allocate(self, nbytes, name):
        self.left -= 1
        if self.left < 0:
            raise poet_jax.PageStoreError(f"no room for {name!r}")
        return super().allocate(nbytes, name)


MILP = poet_jax.MilpPlanner(time_limit_seconds=5, progress=False)


def resident_case(budget="150%", store=None):
    """(step, state, store) of which a plan keeps some in RAM between steps."""
    init, fun = case("momentum")
    store = store or poet_jax.HostStore()
    state = poet_jax.init_paged(init, store, jax.random.key(0), min_bytes=4096)
    return schedule(fun, budget, store, planner=MILP), state, store


def copied_bytes(tree):
    return sum(
        leaf.copied_bytes
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, PagedArray)
    )
