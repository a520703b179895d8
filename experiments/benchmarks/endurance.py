"""Thousands of steps within a budget: nothing may grow.

    python -m experiments.benchmarks.endurance

trains a small network with its state on storage, in a budget that makes it page and
rematerialise, for 2,000 steps, and prints what the process holds after a tenth of them,
halfway and at the end: physical memory without what malloc keeps idle and what the step
left in RAM of its state, bytes in the store, size of its file, threads and open files.
Written to experiments/results/endurance. Takes about three minutes on two cores. Expect
the same numbers each time, but for a few MiB of memory, which it says.
"""

import os
import threading

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from tqdm import tqdm

import poet_jax
from experiments.benchmarks import memory
from experiments.program import program, result_flags, write_result
from experiments.steps import training_step
from poet_jax.core.units import format_bytes

STEPS = flags.DEFINE_integer("steps", 2000, "Steps.", 10)
BUDGET = flags.DEFINE_string("budget", "75%", "Budget of a step.")
result_flags("endurance")
WIDTH, HIDDEN, LAYERS, BATCH = 128, 512, 4, 512


def held(store: poet_jax.FileStore) -> dict[str, int]:
    """What the process holds now."""
    poet_jax.release()
    memory.settle()
    return {
        "resident_bytes": memory.resident_bytes(),
        "store_bytes": store.nbytes,
        "file_bytes": os.stat(store.descriptor()).st_size,
        "threads": threading.active_count(),
        "open_files": len(os.listdir("/proc/self/fd")),
    }


@program
def main() -> None:
    optimizer, store = optax.adamw(1e-4), poet_jax.FileStore()

    def init(key):
        shapes = LAYERS * [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]
        keys = jax.random.split(key, len(shapes))
        params = [
            jax.random.normal(k, shape) / shape[0] ** 0.5
            for k, shape in zip(keys, shapes, strict=True)
        ]
        return params, (), optimizer.init(params)

    def loss_fn(params, rest, x):
        y = x
        for kernel in params:
            y = jnp.tanh(y @ kernel)
        return jnp.mean((y - x) ** 2), rest

    scheduled = poet_jax.schedule(
        training_step(loss_fn, optimizer),
        BUDGET.value,
        donate_argnums=0,
        executor=poet_jax.HostExecutor(store),
        planner=poet_jax.MilpPlanner(time_limit_seconds=10, paging=False),
    )
    state = poet_jax.init_paged(init, store, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    print(scheduled.plan(state, x))
    losses, samples = [], {}
    times = {
        "after_a_tenth": STEPS.value // 10,
        "halfway": STEPS.value // 2,
        "at_the_end": STEPS.value - 1,
    }
    for number in tqdm(range(STEPS.value), unit="step"):
        state, loss = scheduled(state, x)
        losses.append(float(loss))
        samples |= {name: held(store) for name, n in times.items() if n == number}
    run = scheduled.last_run
    assert run is not None
    for name in samples["at_the_end"]:
        show = format_bytes if name.endswith("bytes") else str
        print(f"  {name:15s}", *(f"{show(x[name]):>12s}" for x in samples.values()))
    print(f"  loss            {losses[0]:12.6f} {losses[-1]:12.6f}")
    result = {
        "recomputed": run.recomputed,
        "bytes_paged_in": run.bytes_paged_in,
        "bytes_paged_out": run.bytes_paged_out,
        **samples,
        "losses": [losses[0], losses[-1]],
    }
    write_result("endurance", result)


if __name__ == "__main__":
    app.run(main)
