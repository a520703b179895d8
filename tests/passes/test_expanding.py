"""What expands arguments is computed for each reader, and is the same."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from strategies import examples, programs

import poet_jax
from poet_jax.passes import expand_at_use, group


def decoded(codes, x):
    kernel = codes.astype(jnp.float32) * 0.1
    return jnp.tanh(jnp.tanh(x @ kernel) @ kernel)


def slopes(codes, x):
    return jax.grad(lambda x: decoded(codes, x).sum())(x)


CODES = jnp.ones((64, 64), jnp.int8)
X = jnp.ones((4, 64))


@examples(40)
@given(case=programs())
def test_results_are_the_same_and_once_is_enough(case):
    step, args = case
    graph = group(poet_jax.trace(step, *args))
    expanded = expand_at_use(graph)
    for left, right in zip(
        expanded(*jax.tree.leaves(args)), graph(*jax.tree.leaves(args)), strict=True
    ):
        np.testing.assert_array_equal(left, right)
    assert expand_at_use(expanded) is expanded


def test_no_two_nodes_read_the_same_decoded_kernel():
    graph = expand_at_use(group(poet_jax.trace(slopes, CODES, X)))
    kernels = [v for v, value in enumerate(graph.values) if value.nbytes == 2**14]
    assert len(kernels) == 4  # two products, each of them with a gradient
    assert all(len(graph.readers[v]) == 1 for v in kernels)


def test_keep_all_needs_room_for_one_decoded_kernel():
    device = poet_jax.devices.RASPBERRY_PI_4
    plan = poet_jax.schedule(slopes, 2**20, device=device).plan(CODES, X)
    held = CODES.nbytes + 8 * X.nbytes
    assert plan.baseline.peak_bytes <= held + 4 * CODES.nbytes
