"""Products that sum over several axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import poet_jax
from poet_jax.devices import RASPBERRY_PI_4
from poet_jax.devices.price import price
from poet_jax.passes import cpu_kernels


def summed(left, right):
    return jnp.einsum("ab...,abc->...c", left, right)


@pytest.mark.parametrize("rest", [(2048,), (64, 32)])
def test_a_product_over_examples_and_tokens_copies_no_large_array(rest):
    keys = jax.random.split(jax.random.key(0))
    left = jax.random.normal(keys[0], (16, 128, *rest))
    right = jax.random.normal(keys[1], (16, 128, 4))
    traced = poet_jax.trace(summed, left, right)
    before, after = (
        price(graph, RASPBERRY_PI_4).workspace_bytes.max()
        for graph in (traced, cpu_kernels(traced))
    )
    assert before - after >= left.nbytes
    step = poet_jax.schedule(summed, "100%", passes=(cpu_kernels,))
    compiled = step.plan(left, right).compile().xla.memory_analysis()
    assert compiled.temp_size_in_bytes < left.nbytes / 2
    np.testing.assert_allclose(
        step(left, right), summed(left, right), rtol=1e-4, atol=1e-3
    )


def test_small_arrays_are_copied_as_that_saves_time():
    traced = poet_jax.trace(summed, jnp.ones((4, 8, 16)), jnp.ones((4, 8, 4)))
    assert not cpu_kernels(traced).is_lowered
