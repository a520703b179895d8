"""What does it take to hand memory from one executable of a step to the next?

    python -m experiments.handover

runs steps with AdamW of three models within budgets, and writes a row for each to
experiments/results/handover/steps.csv: executables, and those that take 1 MiB or more
of the memory that others have freed; median seconds of a step, and those of them in
which its buffers are taken (`Pool.take`); and what that makes for each of those that
take memory, which `poet_jax.host()` assumes as `handover_seconds`. Takes about ten
minutes on two cores.
"""

import csv
import dataclasses
import functools
import pathlib
import statistics
import time
from unittest import mock

import jax
import optax
from absl import app, flags

import poet_jax
from experiments.steps import flax_case, new_state, training_step, unet_case
from poet_jax.executors.buffers import Pool
from poet_jax.simulate import expected_seconds

MODELS = flags.DEFINE_list("models", ["unet", "resnet18", "bert6"], "Names of models.")
BUDGETS = flags.DEFINE_list(
    "budgets", ["100%", "75%", "65%", "35%"], "Budgets; too small ones have no row."
)
STEPS = flags.DEFINE_integer("steps", 10, "Steps of each row, after two.", 1)
TIME_LIMIT = flags.DEFINE_float("time_limit", 10.0, "Seconds for each plan.")
OUTPUT = flags.DEFINE_string(
    "output", "experiments/results/handover", "Folder for the result."
)
CASES = {
    "cnn": functools.partial(flax_case, "cnn", 64, "mnist"),
    "unet": unet_case,
    "resnet18": functools.partial(flax_case, "resnet18", 64, "photos"),
    "bert6": functools.partial(flax_case, "bert6", 8, "text"),
}
COLUMNS = (
    "model", "budget", "budget_bytes", "executables", "taking", "seconds",
    "taking_seconds", "handover_seconds",
)  # fmt: skip


def rows_of(name: str, budgets: list[str]):
    """The rows of one model."""
    case, optimizer = CASES[name](), optax.adamw(1e-3)
    params, rest, batch = case.init()
    fresh_state = functools.partial(new_state, optimizer, params, rest)
    step = training_step(case.loss, optimizer)
    planner = poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value)
    for budget in budgets:
        within = poet_jax.schedule(step, budget, planner=planner, donate_argnums=0)
        try:
            schedule = within.plan(fresh_state(), batch)
        except poet_jax.BudgetTooSmall:
            continue
        seconds, taking_seconds = measure(within, fresh_state(), batch)
        taking = executables_that_take(schedule)
        yield {
            "model": name,
            "budget": budget,
            "budget_bytes": schedule.budget.memory_bytes,
            "executables": schedule.program.computes,
            "taking": taking,
            "seconds": f"{seconds:.4f}",
            "taking_seconds": f"{taking_seconds:.4f}",
            "handover_seconds": f"{taking_seconds / taking:.5f}" if taking else "",
        }


def measure(within, state, batch) -> tuple[float, float]:
    """Median seconds of steps, and of their calls of `Pool.take`."""
    take, taken = Pool.take, 0.0

    def timed_take(*args, **kwargs):
        nonlocal taken
        start = time.perf_counter()
        arrays = take(*args, **kwargs)
        taken += time.perf_counter() - start
        return arrays

    both = []
    with mock.patch.object(Pool, "take", timed_take):
        for _ in range(2 + STEPS.value):  # the first compiles
            taken, start = 0.0, time.perf_counter()
            state, loss = within(state, batch)
            jax.block_until_ready((state, loss))
            both.append((time.perf_counter() - start, taken))
    seconds, taking_seconds = zip(*both[2:], strict=True)
    return statistics.median(seconds), statistics.median(taking_seconds)


def executables_that_take(schedule: poet_jax.Schedule) -> int:
    """How many wait for memory in `expected_seconds`: thousands of seconds, if each
    waits for a thousand."""
    slow = dataclasses.replace(schedule.costs, contention=0.0, handover_seconds=1e3)
    return int(expected_seconds(schedule.program, slow) / 1e3)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if unknown := sorted(set(MODELS.value) - set(CASES)):
        raise app.UsageError(f"--models has {unknown}; the models are {list(CASES)}")
    path = pathlib.Path(OUTPUT.value) / "steps.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for name in MODELS.value:
            for row in rows_of(name, BUDGETS.value):
                writer.writerow(row)
                file.flush()
                print("  ".join(f"{column} {row[column]}" for column in COLUMNS))


if __name__ == "__main__":
    app.run(main)
