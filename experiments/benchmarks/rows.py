"""Rows of results that are committed, and numbers as tables show them."""

import json
import pathlib

from experiments.program import read_rows
from poet_jax.core.units import format_bytes

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"

Row = dict[str, str]


def read(name: str) -> list[Row]:
    """Rows of a CSV file under experiments/results/."""
    return read_rows(RESULTS / f"{name}.csv")


def read_json(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def percent(fraction: float, digits: int = 2) -> str:
    return f"{round(100 * fraction, digits) + 0.0:.{digits}f} %"  # no -0.00


def size(number: str | int) -> str:
    return format_bytes(int(number))


def rows_of(name: str) -> dict[tuple[str, str], Row]:
    """Rows of a benchmark's CSV file, by model and share."""
    file = "steps" if name == "step_benchmark" else name
    rows = read(f"{name}/{file}")
    return {(row["model"], row["share"]): row for row in rows}
