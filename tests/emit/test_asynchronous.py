"""JAX returns before it has computed: what is under way is neither read too
early nor written over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import OPTIONS

import poet_jax

N = 512  # arrays of 1 MiB, whose memory is used again
VALUES = np.linspace(0.0, 1.0, N * N, dtype=np.float32).reshape(N, N)


@jax.jit
def slow(read_late, z):
    """`read_late + 7`, half a second after JAX has returned."""
    z = jax.lax.fori_loop(0, 60, lambda _, z: jnp.tanh(z @ z / 30), z)
    return read_late + 7 + 0 * z[0, 0]


@pytest.fixture(autouse=True, scope="module")
def compiled():
    jax.block_until_ready(slow(VALUES, VALUES))


@pytest.fixture
def options():
    return OPTIONS | {"executor": poet_jax.HostExecutor(poet_jax.HostStore())}


def test_an_argument_that_is_not_there_yet_is_waited_for(options):
    """Within the least budget, where pages go to storage and come back."""

    def step(moments, x):
        def loss(x):
            y = x
            for _ in range(4):
                y = jnp.tanh(y @ x / 500)
            return (y**2).mean()

        return moments * 2 - jax.grad(loss)(x)

    x = jnp.array(VALUES)
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        poet_jax.schedule(step, 1, donate_argnums=0, **options).plan(x, x)
    budget = caught.value.smallest_bytes
    scheduled = poet_jax.schedule(step, budget, donate_argnums=0, **options)
    assert scheduled.plan(x, x).usage.bytes_paged_out
    expected = np.asarray(jax.jit(step)(slow(x, x), x))
    for _ in range(2):
        moments = slow(x, x)
        np.testing.assert_allclose(scheduled(moments, x), expected, rtol=1e-5)


def test_what_the_caller_computes_from_a_donated_array_is_right(options):
    """A page is read, and a result is written, where that array was."""

    def paged(donated, moments, x):
        return moments * 2, x.sum()

    def in_ram(donated, x):
        y = jnp.tanh(x @ x.T)
        return jnp.concatenate([y, y, y, y], 0), x.sum()

    executor = options["executor"]
    scheduled = poet_jax.schedule(paged, "1GiB", donate_argnums=(0, 1), **options)
    ram = poet_jax.schedule(in_ram, "100%", donate_argnums=0, **options)
    wide = jnp.ones((N // 2, 2 * N))
    for _ in range(2):
        donated = jnp.array(VALUES)
        moments = poet_jax.to_storage(VALUES, executor.store)
        late = slow(donated, VALUES)
        new, _ = scheduled(donated, moments, wide)
        np.testing.assert_array_equal(late, VALUES + 7)
        np.testing.assert_array_equal(new, VALUES * 2)
        donated = jnp.array(VALUES)
        late = slow(donated, VALUES)
        ram(donated, wide)
        np.testing.assert_array_equal(late, VALUES + 7)


def test_a_donated_array_that_is_not_there_yet_is_not_written_later(options):
    def step(unread, moments, x):
        return moments * 2, x.sum()

    scheduled = poet_jax.schedule(step, "1GiB", donate_argnums=(0, 1), **options)
    for _ in range(2):
        moments = poet_jax.to_storage(VALUES, options["executor"].store)
        new, _ = scheduled(slow(VALUES, VALUES), moments, VALUES)
        np.testing.assert_array_equal(new, VALUES * 2)
