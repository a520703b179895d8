"""Measured costs of nodes in a CSV file, from a board instead of a model."""

import csv
import math
import os
from collections import Counter
from typing import Any

import numpy as np

from poet_jax.core.device import DeviceProfile
from poet_jax.core.graph import Graph, node_signature

COLUMNS = ("signature", "name", "nodes", "seconds", "joules")


def write_node_costs(path: str | os.PathLike, graph: Graph, costs: Any) -> None:
    """Write a row for each distinct node of `graph`, to be measured on a board.

    The columns: `signature`, the same in every process for equal operations and shapes;
    `name`, of the first such node, and `nodes`, how many there are; `seconds` and
    `joules` of one run, over idle, as `costs` has them. Put measured numbers in their
    place, and name the file in a profile: `dataclasses.replace(device,
    node_costs=path)`. Where `joules` is left empty, compute power times seconds
    replaces it; a row whose seconds are empty counts as not there.
    """
    keys = [node_signature(graph, node) for node in graph.nodes]
    count = Counter(keys)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for number, key in enumerate(keys):
            if keys.index(key) == number:
                name, seconds = graph.nodes[number].name, costs.seconds[number]
                joules = costs.joules[number]
                writer.writerow([key, name, count[key], float(seconds), float(joules)])


def read_node_costs(
    graph: Graph, device: DeviceProfile, seconds: np.ndarray, joules: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[N] seconds and joules, with those of the file `device.node_costs` in place of
    what is given.

    Raises FileNotFoundError; ValueError if the file has wrong columns or numbers, lists
    no node of the graph, or lacks some and `device.node_costs_partial` is False.
    """
    assert device.node_costs is not None
    rows = _read(device)
    keys = [node_signature(graph, node) for node in graph.nodes]
    missing = {key: n for n, key in reversed(list(enumerate(keys))) if key not in rows}
    some = not missing.keys() >= set(keys)
    if missing and not (some and device.node_costs_partial):
        first = sorted(missing.values())[:5]
        shown = [f"{graph.nodes[n].name} ({keys[n]})" for n in first]
        advice = (
            "Measure the missing ones, which poet_jax.devices.write_node_costs lists"
        )
        if some:
            advice += (
                ", or type dataclasses.replace(device, node_costs_partial=True) to "
                "model the rest"
            )
        raise ValueError(
            f"{device.node_costs} was to price {len(set(keys))} distinct nodes and "
            f"lacks {len(missing)} of them: {', '.join(shown)}"
            f"{' and more' if len(missing) > 5 else ''}. A node is found by its "
            f"signature, which changes with shapes and types. {advice}."
        )
    seconds, joules = np.array(seconds), np.array(joules)
    for number, key in enumerate(keys):
        if key in rows:
            seconds[number], joules[number] = rows[key]
    return seconds, joules


def _read(device: DeviceProfile) -> dict[str, tuple[float, float]]:
    """{signature: (seconds, joules)} of the rows that were measured."""
    rows: dict[str, tuple[float, float]] = {}
    assert device.node_costs is not None
    with open(device.node_costs, newline="") as file:
        reader = csv.DictReader(file)
        wanted = {"signature", "seconds", "joules"}
        if not wanted <= set(reader.fieldnames or ()):
            raise ValueError(
                f"{device.node_costs} was to be read as costs of nodes, and its "
                f"columns are {reader.fieldnames}. It needs {', '.join(COLUMNS)}. "
                "Write a file to fill in with poet_jax.devices.write_node_costs."
            )
        for row in reader:
            if not (row["seconds"] or "").strip():
                continue
            seconds = _number(device, row, "seconds")
            joules = seconds * device.compute_watts
            if (row["joules"] or "").strip():
                joules = _number(device, row, "joules")
            if row["signature"] in rows:
                raise ValueError(
                    f"{device.node_costs} has two rows for the node "
                    f"{row['signature']}. A node costs the same wherever it stands in "
                    "the graph. Delete all of its rows but one."
                )
            rows[row["signature"]] = seconds, joules
    return rows


def _number(device: DeviceProfile, row: dict[str, str], column: str) -> float:
    try:
        number = float(row[column])
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(
            f"{device.node_costs} gives the node {row['signature']} the {column} "
            f"{row[column]!r}. A cost is a finite, non-negative number in SI units. "
            "Correct that row, or leave its seconds empty."
        )
    return number
