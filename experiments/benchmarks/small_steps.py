"""Steps of 5 to 300 ms: what a budget costs where there is little to hide it behind.

    python -m experiments.benchmarks.small_steps
    python -m experiments.benchmarks.small_steps --only_missing
    python -m experiments.benchmarks.small_steps --plot

The first command runs the training steps of `experiments.benchmarks.small_models` in
100 and 60 % of what keep-all needs and in 5 %, or the smallest budget that works, each
in a process of its own and in turns with `jax.jit`. It writes each row to
experiments/results/small_steps/small_steps.csv as soon as it is measured; the second
command measures only rows that the file lacks. All of it takes about an hour on two
cores; --models and --shares choose a part. The third command draws small_steps.png.

Columns are those of `experiments.benchmarks.measuring.measure_step`. Expect, for every
row:

- compiled_bytes at most budget_bytes, and planned_bytes about as many;
- rise_bytes at most budget_bytes and 20 MiB, which XLA's threads and Python take, and
  in a row or two twice as much;
- ratio 0.7 to 1.05 in 100 %, which is keep-all in stages, or `jax.jit`'s own program
  for a scan, and beyond that what is computed again elsewhere;
- first_ratio, of the first step with tracing, planning and compiling over that of
  `jax.jit`: 2 to 3 in 100 %, whose measure is a compilation of its own, and
  plan_seconds more below;
- no ratio where the step does not fit the budget.
"""

import pathlib

from absl import app

from experiments.benchmarks import measuring
from experiments.benchmarks.small_models import SMALL_STEPS
from experiments.program import program
from poet_jax.viz.figures import drawn

measuring.step_flags(
    "small_steps",
    shares=f"100,60,{measuring.LEAST}",
    seconds=4.0,
    time_limit=6.0,
)


def plot(rows: list[dict[str, str]], path: pathlib.Path) -> None:
    """Time, first step and memory of every row, a mark for each share."""
    rows = [row for row in rows if row["ratio"]]
    names = [name for name in SMALL_STEPS if name in {row["model"] for row in rows}]
    panels = {
        "a step\nover jax.jit's": ("ratio", None),
        "the first step\nover jax.jit's": ("first_ratio", None),
        "rise over\nthe budget": ("rise_bytes", "budget_bytes"),
    }
    # Okabe and Ito's colours, which are told apart without red or green.
    marks = {"100": "o", "60": "s", measuring.LEAST: "^"}
    colours = dict(zip(marks, ("#0072B2", "#E69F00", "#000000"), strict=True))
    with drawn(path, 1.3 + 0.2 * len(names)) as figure:
        axes = figure.subplots(1, len(panels), sharey=True)
        for share, marker in marks.items():
            of_share = [row for row in rows if row["share"] == share]
            if not of_share:
                continue
            places = [names.index(row["model"]) for row in of_share]
            label = share if share == measuring.LEAST else f"{share} %"
            style = {"color": colours[share], "marker": marker, "label": label}
            for axis, (column, unit) in zip(axes, panels.values(), strict=True):
                x = [float(row[column]) / float(row[unit] if unit else 1)
                     for row in of_share]  # fmt: skip
                axis.scatter(x, places, s=14, **style)
        for axis, label in zip(axes, panels, strict=True):
            axis.axvline(1, color="#999999", linewidth=0.8)
            axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
            axis.set_axisbelow(True)
            axis.set_xscale("log")
            axis.set_xticks((0.5, 1, 2, 5, 10), ("0.5", "1", "2", "5", "10"))
            axis.set_xticks((), minor=True)
            axis.set_xlabel(label)
        axes[0].set_yticks(range(len(names)), names)
        axes[0].invert_yaxis()
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=3)


@program
def main() -> None:
    measuring.run_steps(SMALL_STEPS, plot, file="small_steps")


if __name__ == "__main__":
    app.run(main)
