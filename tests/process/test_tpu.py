"""The TPU compiler keeps to plans for chips that are not there."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from processes import CASE

import poet_jax

pytest.importorskip("libtpu")


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch):
    if CASE in os.environ:
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        # Nothing reads what was compiled for a chip that is not there.
        jax.config.update("jax_enable_compilation_cache", False)


def step(w, x):
    def loss(w):
        h = x
        for _ in range(12):
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return w - jax.grad(loss)(w)


def test_a_step_for_a_chip_that_is_not_there_keeps_to_the_budget():
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", chips_per_host_bounds=(2, 2, 1)
    )
    chip = SingleDeviceSharding(topology.devices[0])
    w, x = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=chip)
        for shape in ((1024, 1024), (8192, 1024))
    )
    jitted = jax.jit(step, donate_argnums=0).lower(w, x).compile().memory_analysis()
    budget = jitted.argument_size_in_bytes + jitted.temp_size_in_bytes // 2
    scheduled = poet_jax.schedule(
        step, budget, donate_argnums=0, device=poet_jax.devices.TPU_V5E
    )
    schedule = scheduled.lower(w, x)
    found = schedule.compile().xla.memory_analysis()
    assert schedule.graph.platform == "tpu" and not schedule.graph.is_lowered
    assert found.argument_size_in_bytes + found.temp_size_in_bytes <= budget
