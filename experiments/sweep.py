"""What training costs on devices, over a grid: a row for each point, as it is planned.

    python -m experiments.sweep --model=cnn --dataset=mnist --device=STM32H7 \\
        --device=JETSON_TX2 --share=90 --share=70 --planner=paging --planner=milp

takes about a minute, writes eight rows to outputs/sweep.csv and prints them. A sweep
that was stopped goes on where it was. Energies are modelled, and nothing runs. Each row
has the plan's joules and seconds and keep-all's, what it pages and recomputes, the
proven gap, and where there is no plan, why.
"""

import logging
import pathlib
from collections.abc import Iterable

from absl import app, flags

from experiments.paper.points import COLUMNS, grid, run
from experiments.steps import read_rows
from poet_jax.core.units import format_bytes, format_joules, format_seconds

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
DEVICES = flags.DEFINE_multi_string(
    "device",
    ["RASPBERRY_PI_4"],
    "Devices: names in poet_jax.devices, or profiles as TOML or JSON files.",
)
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
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    asked = {point.key for point in points}
    print(
        table(r for r in read_rows(path) if tuple(r[x] for x in COLUMNS[:9]) in asked)
    )
    print(f"The rows are in {path}, with the reason where there is no plan.")


def table(rows: Iterable[dict[str, str]]) -> str:
    """A line for each row, with what it costs over keeping everything."""
    lines = [
        f"{'model':22} {'device':22} {'RAM':>10} {'deadline':>8} {'planner':8} "
        f"{'status':10} {'step':>10} {'energy':>10} {'both over keep-all':>19}"
    ]
    for row in rows:
        line = (
            f"{row['model'][:22]:22} {row['device'][-22:]:22} "
            f"{format_bytes(int(row['memory_bytes'])):>10} {row['deadline']:>8} "
            f"{row['planner']:8} {row['status']:10}"
        )
        if row["joules"]:
            seconds, joules = float(row["seconds"]), float(row["joules"])
            late = seconds / float(row["keep_all_seconds"]) - 1
            extra = joules / float(row["keep_all_joules"]) - 1
            line += f" {format_seconds(seconds):>10} {format_joules(joules):>10}"
            line += f" {late:+9.2%} {extra:+9.2%}"
        lines.append(line.rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    app.run(main)
