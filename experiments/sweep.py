"""What training costs on devices, over a grid: a row for each point, as it is planned.

    python -m experiments.sweep --model=cnn --dataset=mnist --device=STM32H7 \\
        --device=JETSON_TX2 --share=90 --share=70 --planner=paging --planner=milp

takes about a minute and writes eight rows to outputs/sweep.csv. A sweep that was
stopped goes on where it was. Energies are modelled, and nothing runs. Each row has the
plan's joules and seconds over keep-all's, what it pages and recomputes, the proven gap,
and where there is no plan, why.
"""

import collections
import logging
import pathlib

from absl import app, flags

from experiments.points import grid, run
from experiments.steps import read_rows

MODELS = flags.DEFINE_multi_string("model", ["cnn"], "Model, as in experiments.train.")
DATASET = flags.DEFINE_string("dataset", "mnist", "What the models' batches are from.")
BATCHES = flags.DEFINE_multi_integer("batch_size", [32], "Examples per step.")
KINDS = flags.DEFINE_multi_enum(
    "kind", ["gradient"], ["gradient", "step"], "Gradient alone, or step with AdamW."
)
COUNTED = flags.DEFINE_multi_enum(
    "counted",
    ["all"],
    ["all", "activations"],
    "What takes memory: everything, or only what depends on the batch.",
)
DEVICES = flags.DEFINE_multi_string("device", ["RASPBERRY_PI_4"], "Devices, by name.")
SHARES = flags.DEFINE_multi_float("share", [75.0, 50.0], "Percent of keep-all's peak.")
DEADLINES = flags.DEFINE_multi_float(
    "deadline", None, "Times keep-all's seconds; no deadline by default."
)
PLANNERS = flags.DEFINE_multi_string("planner", ["milp"], "Planners, by name.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 10.0, "Seconds for each MILP.")
OUTPUT = flags.DEFINE_string("output", "outputs/sweep.csv", "The file of rows.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.getLogger("poet_jax").setLevel(logging.ERROR)
    points = grid(
        MODELS.value, [DATASET.value], BATCHES.value, KINDS.value, COUNTED.value,
        DEVICES.value, SHARES.value, DEADLINES.value or [None], PLANNERS.value,
    )  # fmt: skip
    path = pathlib.Path(OUTPUT.value)
    try:
        run(points, path, TIME_LIMIT.value)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    statuses = collections.Counter(row["status"] for row in read_rows(path))
    print(f"{path}: {', '.join(f'{n} {status}' for status, n in statuses.items())}")


if __name__ == "__main__":
    app.run(main)
