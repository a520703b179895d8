"""What the experiments share: mains, flags, rows, results and children."""

import contextlib
import csv
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from poet_jax import cli

flags.disclaim_key_flags()  # what is defined here is a flag of the caller's


def program(main: Callable[[], Any]) -> Callable[[Sequence[str]], None]:
    """`main` for `absl.app.run`: flags say all, and an error ends it with its message.

    Raises SystemExit for other arguments, and for errors that `cli.messages` names.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            raise SystemExit(
                f"The arguments {list(argv[1:])} were given. Only flags are "
                "understood. Use --help for the flags."
            )
        with cli.messages():
            main()

    return run


def result_flags(name: str, plots: bool = False) -> None:
    """Define --output, a folder of results called `name`, and --plot if it `plots`."""
    folder = f"experiments/results/{name}"
    flags.DEFINE_string("output", folder, "Folder for what is written.")
    if plots:
        flags.DEFINE_bool("plot", False, "Only draw the figure of the rows.")


def read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if it does not exist yet."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(
    path: pathlib.Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Write a CSV file in place of an older one, which is there until it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with open(new, "w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(new, path)


@contextlib.contextmanager
def appending(
    path: pathlib.Path, columns: Sequence[str]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that writes a row at once, at the end of a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if not file.tell():
            writer.writeheader()

        def append(row: Mapping[str, Any]) -> None:
            writer.writerow(row)
            file.flush()

        yield append


def write_result(model: str, result: Mapping[str, Any]) -> None:
    """Write `result` and the command that it is of as JSON to --output, in a file of
    the model's name without its options."""
    path = cli.output_folder() / f"{model.partition(':')[0]}.json"
    command = " ".join(["python", *child()[1:]])
    path.write_text(json.dumps({"command": command, **result}, indent=1) + "\n")


def child(*more: str) -> list[str]:
    """The command that runs this program again, with `more` flags."""
    spec = sys.modules["__main__"].__spec__
    name = "" if spec is None else spec.name.removesuffix(".__main__")
    return [sys.executable, "-m", name, *sys.argv[1:], *more]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def common_legend(figure: Any, axes: Any) -> None:
    """One legend for all axes, [rows, columns], above them."""
    handles = {}
    for axis in axes.flat:
        found = axis.get_legend_handles_labels()
        handles |= dict(zip(*reversed(found), strict=True))
    legend = {"loc": "outside upper center", "ncols": 3}
    figure.legend(handles.values(), handles.keys(), **legend)
