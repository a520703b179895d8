"""A program of `jax.distributed`: two processes with two devices each train together.

    python two_processes.py <port> <process>

It prints what both should agree on, as JSON.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import poet_jax

PORT, PROCESS = sys.argv[1], int(sys.argv[2])
LAYERS, WIDTH, ROWS = 3, 64, 4096


def loss(weights, x):
    h = x
    for up, down in weights:
        h = h + jnp.tanh(h @ up) @ down
    return jnp.mean(h**2)


def placed(array, sharding):
    """An array of all processes, from what each of them has."""
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )


def planner(graph, costs, budget):
    """One that only the first process may ask."""
    assert PROCESS == 0
    return poet_jax.greedy(graph, costs, budget)


def fails(graph, costs, budget):
    """With an error that cannot be sent to another process."""
    error = KeyError("no plan")
    error.reason = lambda: None
    raise error


def error_of(budget, planner, *args):
    try:
        poet_jax.schedule(jax.grad(loss), budget, planner=planner).plan(*args)
    except Exception as error:
        return [type(error).__name__, getattr(error, "smallest_bytes", 0)]


def main():
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{PORT}", 2, PROCESS)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    random = np.random.default_rng(0)
    weights = [
        tuple(
            placed(random.normal(size=shape).astype(np.float32) / 16, whole)
            for shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        )
        for _ in range(LAYERS)
    ]
    x = placed(random.normal(size=(ROWS, WIDTH)).astype(np.float32), rows)
    step = poet_jax.schedule(jax.grad(loss), "75%", planner=planner)
    schedule = step.plan(weights, x)
    got, expected = step(weights, x), jax.jit(jax.grad(loss))(weights, x)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        a, b = (np.asarray(array.addressable_data(0)) for array in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    assert schedule.compiled_bytes <= schedule.budget.memory_bytes
    # One that this process runs alone asks nobody.
    alone = poet_jax.schedule(jnp.tanh, "1MiB", planner=poet_jax.greedy)
    if PROCESS == 1:
        alone(jnp.ones(4))
    agreed = {
        "plan": repr(schedule.plan.actions),
        "objective": schedule.plan.objective,
        "again": schedule.program.recomputed,
        "bytes": schedule.compiled_bytes,
        "device": poet_jax.schedule(loss, "device").budget_for(weights, x),
        "too small": error_of(1, poet_jax.greedy, weights, x),
        "fails": error_of("75%", fails, weights, x),
    }
    print(json.dumps(agreed))


if __name__ == "__main__":
    main()
