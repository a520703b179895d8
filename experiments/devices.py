"""The table of devices, with the origin of every number, as Markdown.

    python -m experiments.devices

writes the tables of docs/reference/devices.md in a second.
"""

import dataclasses
import pathlib

from absl import app

import poet_jax
from poet_jax.core.units import format_bytes

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "devices.md"
TABLES = "## The devices\n"


def page() -> str:
    """The page as it is up to its tables: a summary, and one for each device."""
    titles = ("`poet_jax.devices.`", "device", "RAM", "FLOP/s", "compute power")
    lines = [
        PAGE.read_text().partition(TABLES)[0] + TABLES,
        f"| {' | '.join(titles)} | storage in, out |",
        "|---|---|---|---|---|---|",
    ]
    for name, device in poet_jax.devices.ALL.items():
        rates = device.page_in_bytes_per_second, device.page_out_bytes_per_second
        lines.append(
            f"| `{name}` | {device.name} | {format_bytes(device.ram_bytes)} "
            f"| {device.flops_per_second:.4g} | {device.compute_watts:.3g} W "
            f"| {rates[0] / 1e6:.4g}, {rates[1] / 1e6:.4g} MB/s |"
        )
    for name, device in poet_jax.devices.ALL.items():
        lines += ["", f"### {name}", "", device.name, ""]
        lines += ["| constant | value | origin |", "|---|---|---|"]
        for field in dataclasses.fields(device):
            value = getattr(device, field.name)
            if field.name in ("name", "source") or value in (field.default, {}):
                continue
            origin = device.origin(field.name)
            lines.append(f"| `{field.name}` | {value:.6g} | {origin} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    PAGE.write_text(page())


if __name__ == "__main__":
    app.run(main)
