"""Measured steps: time and memory of whole training steps within budgets.

    python -m experiments.benchmarks.step_benchmark
    python -m experiments.benchmarks.step_benchmark --only_missing
    python -m experiments.benchmarks.step_benchmark --plot

The first command runs a training step with AdamW of each model, as `jax.jit`, as
`jax.jit` with `jax.checkpoint` around every block, and within budgets from 100 to 25 %
of keep-all's peak and the least that works (or 5 %, if that works), in turns in a
process for each row. It writes each row to
experiments/results/step_benchmark/steps.csv as soon as it is measured, over an older
one if there is one; the second command measures only rows that the file lacks. All of
it takes about 70 minutes on two cores; --models and --shares choose a part. The third
command draws steps.png.

Columns are those of `experiments.benchmarks.measuring.measure_step`: seconds of
planning and compiling beside those of `jax.jit`; bytes that were planned, that XLA
counts in the compiled step (never more than the budget), and by which the process's
high-water mark (VmHWM) rose in ten steps or more after the first, over what it held
besides the step's arguments, to be compared with the budget, too, and with that of
`jax.jit` over its own count (jit_rise_bytes, jit_bytes), as XLA frees late; and
seconds, which are medians over steps, and ratios to those of `jax.jit`, medians over
pairs of steps in turn. Delete the file at `poet_jax.devices.host_path()` first to have
this machine's rates measured anew.

On an accelerator the models are larger ones, budgets are of its memory, and the rise is
of what its allocator was seen to have in use, asked again after every fifth of a
millisecond.
"""

import functools
import os
import pathlib

import jax
import numpy as np
import optax
from absl import app

from experiments.benchmarks import measuring
from experiments.program import program
from experiments.steps import TrainingStep, flax_case, unet_case
from poet_jax.viz.figures import drawn

measuring.step_flags(
    "step_benchmark",
    shares=f"100,75,50,35,25,{measuring.LEAST}",
    seconds=8.0,
    time_limit=6.0,
)

CASES = {
    "mlp": functools.partial(flax_case, "mlp", 64, "digits"),
    "cnn": functools.partial(flax_case, "cnn", 64, "mnist"),
    "resnet18": functools.partial(flax_case, "resnet18", 64, "photos"),
    "resnet50": functools.partial(flax_case, "resnet50", 16, "photos"),
    "bert6": functools.partial(flax_case, "bert6", 8, "text"),
    "gpt12": functools.partial(flax_case, "gpt12:length=256", 4, "text"),
    "unet": unet_case,
}
LARGE_CASES = {"unet_large": functools.partial(unet_case, 512)}
ALL_CASES = CASES | LARGE_CASES
COLUMNS = (*measuring.STEP_COLUMNS, "checkpoint_bytes", "checkpoint_ratio")


def training(model: str, **options) -> TrainingStep:
    return TrainingStep.of(ALL_CASES[model](**options), optax.adamw(1e-3))


def plot(rows: list[dict[str, str]], path: pathlib.Path) -> None:
    """Time against the budget, both over jax.jit's, a line for each model."""
    # Okabe and Ito's colours, which are told apart without red or green.
    colours = ["#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00",
               "#CC79A7"]  # fmt: skip
    measured = {row["model"] for row in rows}
    names = [name for name in ALL_CASES if name in measured]
    with drawn(path, 3.8) as figure:
        axis = figure.subplots()
        for name, colour, marker in zip(names, colours, "osv^Dx*", strict=False):
            points = sorted(
                (
                    100 * float(row["budget_bytes"]) / float(row["jit_bytes"]),
                    float(row["ratio"]),
                )
                for row in rows
                if row["model"] == name and row["ratio"]
            )
            if points:
                axis.plot(*np.array(points).T, color=colour, marker=marker, label=name)
        axis.axhline(1, color="#999999", linewidth=0.8)
        axis.set_xlabel("memory budget (% of what jax.jit needs)")
        axis.set_ylabel("measured step time over jax.jit's")
        figure.legend(loc="outside upper center", ncols=4)


@program
def main() -> None:
    # The process that starts the others leaves an accelerator's memory to them.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    measuring.run_steps(
        {name: functools.partial(training, name) for name in ALL_CASES},
        plot,
        file="steps",
        models=list(CASES if jax.default_backend() == "cpu" else LARGE_CASES),
        columns=COLUMNS,
        beside=lambda name: {"checkpoint": training(name, checkpoint=True).step},
    )


if __name__ == "__main__":
    app.run(main)
