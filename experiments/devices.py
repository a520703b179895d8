"""The table of devices, with the origin of every number, as Markdown.

    python -m experiments.devices

writes the tables of docs/reference/devices.md in a second.
"""

import pathlib

from absl import app

import poet_jax
from experiments.program import markdown, program
from poet_jax import cli

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "devices.md"
TABLES = "## The devices\n"


def coded(rows):
    """A table whose first column, but for its head, is code."""
    return [rows[0], *((f"`{name}`", *others) for name, *others in rows[1:])]


def page() -> str:
    """The page as it is up to its tables: a summary, and one for each device."""
    parts = [PAGE.read_text().partition(TABLES)[0] + TABLES]
    parts.append(markdown(coded(cli.device_table())))
    for name, device in poet_jax.devices.ALL.items():
        constants = markdown(coded(cli.constant_table(device)))
        parts.append(f"\n### {name}\n\n{device.name}\n\n{constants}")
    return "\n".join(parts) + "\n"


@program
def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    app.run(main)
