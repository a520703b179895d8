"""Costs of nodes in a CSV file, for measurements on a board in place of the model."""

import csv
import math
import os
from collections import Counter
from typing import Any

import numpy as np

from poet_jax.core.device import DeviceProfile
from poet_jax.core.graph import Graph
from poet_jax.core.signatures import node_signature

COLUMNS = ("signature", "name", "nodes", "seconds", "joules")


def write_node_costs(path: str | os.PathLike, graph: Graph, costs: Any) -> None:
    """Write a CSV file with a row per distinct node of `graph`, to be measured.

    Columns: `signature`, the same in every process for equal operations and shapes;
    `name` of the first such node; `nodes`, how many there are; `seconds` and `joules`
    of one run, over idle, as in `costs`. Replace these by measurements, and pass the
    file as `dataclasses.replace(device, node_costs=path)`. Empty joules become compute
    power times seconds. A row with empty seconds is ignored.
    """
    keys = [node_signature(graph, node) for node in graph.nodes]
    count = Counter(keys)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for key in count:  # in order of the first node
            n = keys.index(key)
            numbers = float(costs.seconds[n]), float(costs.joules[n])
            writer.writerow([key, graph.nodes[n].name, count[key], *numbers])


def read_node_costs(
    graph: Graph, device: DeviceProfile, seconds: np.ndarray, joules: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[N] seconds and joules, replaced by those in the file `device.node_costs`.

    Raises FileNotFoundError. Raises ValueError if the file has wrong columns or
    numbers, has no node of the graph, or lacks some without `node_costs_partial`.
    """
    path, rows = device.node_costs, _read(device)
    keys = [node_signature(graph, node) for node in graph.nodes]
    missing = [key for key in dict.fromkeys(keys) if key not in rows]
    is_partial = len(missing) < len(set(keys))
    if missing and not (is_partial and device.node_costs_partial):
        shown = [f"{graph.nodes[keys.index(k)].name} ({k})" for k in missing[:5]]
        shown += ["..."] * (len(missing) > 5)
        remedy = "Measure these nodes, which poet_jax.devices.write_node_costs lists"
        if is_partial:
            remedy += ", or use dataclasses.replace(device, node_costs_partial=True)"
        raise ValueError(
            f"{path} lacks {len(missing)} of {len(set(keys))} distinct nodes: "
            f"{', '.join(shown)}. The signature in brackets changes with shapes and "
            f"dtypes. {remedy}."
        )
    seconds, joules = np.array(seconds), np.array(joules)
    for n, key in enumerate(keys):
        if key in rows:
            seconds[n], joules[n] = rows[key]
    return seconds, joules


def _read(device: DeviceProfile) -> dict[str, tuple[float, float]]:
    """{signature: (seconds, joules)} of the measured rows."""
    path, rows = device.node_costs, {}
    assert path is not None
    # Spreadsheets put a byte order mark before the first column.
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if not {"signature", "seconds", "joules"} <= set(reader.fieldnames or ()):
            raise ValueError(
                f"{path} must have the columns {', '.join(COLUMNS)}, got "
                f"{reader.fieldnames}. Use poet_jax.devices.write_node_costs."
            )
        for row in reader:
            seconds = _number(path, row, "seconds")
            if seconds is None:
                continue
            if row["signature"] in rows:
                raise ValueError(
                    f"{path} has two rows for the node {row['signature']}. Delete all "
                    "but one."
                )
            joules = _number(path, row, "joules")
            if joules is None:
                joules = seconds * device.compute_watts
            rows[row["signature"]] = seconds, joules
    return rows


def _number(path: str, row: dict[str, str], column: str) -> float | None:
    """The finite, non-negative number in a column; None if that is empty."""
    text = (row[column] or "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(
            f"{path}: {column} {row[column]!r} of the node {row['signature']} must be "
            "a finite, non-negative number in SI units. Correct it, or leave seconds "
            "empty to ignore the row."
        )
    return number
