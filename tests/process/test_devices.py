"""Arrays on any of two devices and in any memory."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import SingleDeviceSharding
from processes import CASE
from strategies import DEVICE

import poet_jax
from poet_jax.core.in_place import replaceable

ONE_PROCESS = True
if CASE in os.environ:
    jax.config.update("jax_num_cpu_devices", 2)

policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)


@functools.partial(jax.checkpoint, policy=policy)
def layer(carry, w):
    return jnp.tanh(checkpoint_name(jnp.tanh(carry @ w), "h") @ w.T)


def in_a_scan(ws, x):
    """Residuals of a scan go to the host's memory."""

    def loss(ws):
        last, _ = lax.scan(lambda carry, w: (layer(carry, w), None), x, ws)
        return jnp.sum(jnp.tanh(last @ ws[0]) ** 2)

    return jax.value_and_grad(loss)(ws)


def in_layers(ws, x):
    def loss(ws):
        return jnp.sum(functools.reduce(layer, ws, x) ** 2)

    return jax.value_and_grad(loss)(ws)


def state_on_the_host(state, x):
    here = jax.device_put(state, jax.memory.Space.Device)
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))(here)
    return jax.device_put(here - gradient, jax.memory.Space.Host), gradient.sum()


def everywhere(state, x):
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))(state)
    return state - gradient, gradient.sum()


def arguments(fun, device, memory="device"):
    key = jax.random.key(0)
    shape = (4, 128, 128) if fun in (in_a_scan, in_layers) else (128, 128)
    state = jax.random.normal(key, shape) / 12
    return (
        jax.device_put(state, SingleDeviceSharding(device, memory_kind=memory)),
        jax.device_put(jax.random.normal(key, (512, 128)), device),
    )


def assert_as_jit(fun, args, budget, **jit_options):
    expected = jax.jit(fun, **jit_options)(*args)
    options = jit_options | dict(
        device=DEVICE,
        planner=poet_jax.planners.paging_only,
        executor=poet_jax.HostExecutor(poet_jax.HostStore(), trace=True),  # in stages
    )
    if budget == "least":
        with pytest.raises(poet_jax.BudgetTooSmall) as caught:
            poet_jax.schedule(fun, 1, **options).plan(*args)
        budget = caught.value.smallest_bytes
    found = poet_jax.schedule(fun, budget, **options)(*args)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert one.sharding == other.sharding
        assert jax.typeof(one) == jax.typeof(other)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


budgets = pytest.mark.parametrize("budget", ["1GiB", "least"])
places = pytest.mark.parametrize("number", [0, 1])


@budgets
@pytest.mark.parametrize("fun", [in_a_scan, in_layers])
def test_residuals_may_be_in_the_hosts_memory(fun, budget):
    assert_as_jit(fun, arguments(fun, jax.devices()[0]), budget)


@budgets
@places
def test_state_may_be_in_the_hosts_memory(number, budget):
    device = jax.devices()[number]
    args = arguments(state_on_the_host, device, "pinned_host")
    assert_as_jit(state_on_the_host, args, budget)


@budgets
def test_a_step_runs_where_its_arguments_are(budget):
    assert_as_jit(everywhere, arguments(everywhere, jax.devices()[1]), budget)


@budgets
def test_a_step_runs_on_the_default_device(budget):
    state, x = (np.asarray(x) for x in arguments(everywhere, jax.devices()[0]))
    with jax.default_device(jax.devices()[1]):
        assert_as_jit(everywhere, (state, x), budget)


def test_a_step_runs_where_its_shardings_say():
    there = SingleDeviceSharding(jax.devices()[1])
    args = [np.asarray(x) for x in arguments(everywhere, jax.devices()[0])]
    assert_as_jit(everywhere, args, "1GiB", in_shardings=there, out_shardings=there)


@budgets
def test_one_step_runs_on_one_device_and_then_on_another(budget):
    step = poet_jax.schedule(
        everywhere, "1GiB" if budget == "1GiB" else "90%", device=DEVICE
    )
    for device in (*jax.devices(), jax.devices()[0]):
        args = arguments(everywhere, device)
        state, total = step(*args)
        assert state.devices() == total.devices() == {device}
        np.testing.assert_allclose(state, jax.jit(everywhere)(*args)[0], rtol=1e-4)


def test_what_is_in_the_hosts_memory_is_not_paged_and_not_written_over():
    state, x = arguments(state_on_the_host, jax.devices()[0], "pinned_host")
    fun = jax.jit(state_on_the_host, donate_argnums=0)
    graph = poet_jax.trace(fun, state, x)
    there = [v for v, value in enumerate(graph.values) if value.on_host]
    assert graph.arguments[0] in there and graph.outputs[0] in there
    assert not any(graph.values[v].pageable for v in there)
    for pairs in replaceable(graph):
        assert all((old in there) == (new in there) for old, new in pairs)
