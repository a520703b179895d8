"""A U-Net's step within a third of its memory, again and again: does it slow down?

    python -m experiments.drift

runs ten steps, then three of `jax.jit`, twelve times, and writes as many rows to
experiments/results/drift/unet.csv: median seconds of both, without the first step of
ten, and their ratio; how far the process's high-water mark (VmHWM) rose in ten steps
over what the process held besides the step's arguments, less the budget; and the
mappings that the kernel keeps of the process. Takes about three minutes on two cores.
Seconds vary from run to run, by a tenth or, with a filter gradient in its slower mode,
by half; expect no row to be worse than the first ones by more.
"""

import csv
import functools
import pathlib
import statistics
import time

import jax
import optax
from absl import app, flags
from tqdm import tqdm

import poet_jax
from experiments import memory
from experiments.steps import new_state, training_step, unet_case
from poet_jax import heap

ROWS = flags.DEFINE_integer("rows", 12, "Rows of ten steps each.", 1)
BUDGET = flags.DEFINE_string("budget", "35%", "Budget of a step.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 30.0, "Seconds for the plan.")
OUTPUT = flags.DEFINE_string(
    "output", "experiments/results/drift", "Folder for the result."
)
STEPS_PER_ROW, JIT_STEPS_PER_ROW = 10, 3
COLUMNS = (
    "steps", "budget_bytes", "seconds", "jit_seconds", "ratio", "beyond_bytes",
    "mappings",
)  # fmt: skip


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    case, optimizer = unet_case(), optax.adamw(1e-3)
    params, rest, batch = case.init()
    fresh_state = functools.partial(new_state, optimizer, params, rest)
    step = training_step(case.loss, optimizer)
    planner = poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value)
    within = poet_jax.schedule(step, BUDGET.value, planner=planner, donate_argnums=0)
    schedule = within.plan(fresh_state(), batch)
    print(schedule)
    budget_bytes = schedule.budget.memory_bytes
    plain = jax.jit(step, donate_argnums=0)

    def timed(run, state):
        start = time.perf_counter()
        state, loss = run(state, batch)
        jax.block_until_ready((state, loss))
        return time.perf_counter() - start, state

    _, ours = timed(within, fresh_state())  # compiles
    _, theirs = timed(plain, fresh_state())
    arguments_bytes = sum(x.nbytes for x in jax.tree.leaves((ours, batch)))
    path = pathlib.Path(OUTPUT.value) / "unet.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for number in tqdm(range(1, ROWS.value + 1), unit="row"):
            time.sleep(0.1)  # what XLA frees a little after the results are ready
            poet_jax.release()  # what jax.jit left in the heap, too
            base_bytes = memory.resident_bytes() - arguments_bytes
            memory.reset_high_water()
            seconds, plain_seconds = [], []
            for _ in range(STEPS_PER_ROW):
                taken, ours = timed(within, ours)
                seconds.append(taken)
            rise_bytes = memory.high_water_bytes() - base_bytes
            for _ in range(JIT_STEPS_PER_ROW):
                taken, theirs = timed(plain, theirs)
                plain_seconds.append(taken)
            median = statistics.median(seconds[1:])
            plain_median = statistics.median(plain_seconds)
            row = {
                "steps": number * STEPS_PER_ROW,
                "budget_bytes": budget_bytes,
                "seconds": f"{median:.3f}",
                "jit_seconds": f"{plain_median:.3f}",
                "ratio": f"{median / plain_median:.3f}",
                "beyond_bytes": rise_bytes - budget_bytes,
                "mappings": heap.count_mappings(),
            }
            writer.writerow(row)
            tqdm.write("  ".join(f"{name} {row[name]}" for name in COLUMNS))


if __name__ == "__main__":
    app.run(main)
