"""Planner instances: graphs that did not come from a jaxpr, with costs, as JSON."""

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph, Node, Value

_MOST = 2**62  # of a cost: bytes are 64-bit integers


def load_instance(path: str | os.PathLike) -> tuple[Graph, Costs]:
    """Read a planner instance from JSON: a graph without a jaxpr, and its costs.

    The format is that of `read_instance`. Raises ValueError for a cost that is
    not a finite, non-negative number of at most 2**62.
    """
    graph, rows = read_instance(path)

    def column(name: str) -> np.ndarray:
        for row in rows:
            cost = row.get(name)
            if not (isinstance(cost, int | float) and 0 <= cost <= _MOST):
                raise ValueError(
                    f"{os.fspath(path)}: {name} of node {row['name']!r} must be a "
                    "finite, non-negative number of at most 2**62, got "
                    f"{repr(cost)[:40]}."
                )
        return np.array([row[name] for row in rows], float)

    return graph, Costs(
        seconds=column("seconds"),
        joules=column("joules"),
        workspace_bytes=np.zeros(len(rows), np.int64),
        nbytes=column("bytes").astype(np.int64),
        page_in_seconds=column("page_in_seconds"),
        page_out_seconds=column("page_out_seconds"),
        page_in_joules=column("page_in_joules"),
        page_out_joules=column("page_out_joules"),
    )


def read_instance(path: str | os.PathLike) -> tuple[Graph, list[dict[str, Any]]]:
    """Read a planner instance: a graph whose nodes have costs but no equations.

    The file is JSON: `nodes`, a list in execution order of objects with `name`,
    `backward`, `bytes` and costs; `edges`, a list of [producer, consumer]. Node i
    writes value i. A value that nothing reads may be freed at once; there are no
    arguments or outputs.
    Returns the graph and the nodes' objects. Raises ValueError if an edge is malformed.
    """
    with open(path) as file:
        try:
            data = json.load(file)
            if "plan" in data and "nodes" not in data:
                raise ValueError(
                    "it is a plan of Schedule.to_json, which has no graph: explain its "
                    "step, as train.py:make_step, or read it with Schedule.from_json"
                )
            rows, edges = data["nodes"], data["edges"]
            for row in rows:
                _ = row["backward"], row["bytes"]
                if not isinstance(row["name"], str):
                    raise TypeError(f"a node has the name {row['name']!r}, no text")
            if not isinstance(edges, list):
                raise TypeError(f"its edges are {edges!r}, no list")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{os.fspath(path)} is not a planner instance: {error}. An instance is "
                "JSON with nodes, each with a name, backward, bytes and costs, and "
                "edges. Write it with poet_jax.core.instances.write_instance."
            ) from error
    reads: list[list[int]] = [[] for _ in rows]
    for edge in edges:
        whole = isinstance(edge, list) and all(type(x) is int for x in edge)
        producer, consumer = edge if whole and len(edge) == 2 else (-1, -1)
        if not 0 <= producer < consumer < len(rows):
            raise ValueError(
                f"{os.fspath(path)} has the edge {edge}. An edge leads from a node to "
                f"a later one, both below {len(rows)}. Sort the nodes in execution "
                f"order."
            )
        reads[consumer].append(producer)
    values = tuple(Value(row["name"], row["bytes"]) for row in rows)
    nodes = tuple(
        Node(row["name"], tuple(dict.fromkeys(r)), (i,), backward=row["backward"])
        for i, (row, r) in enumerate(zip(rows, reads, strict=True))
    )
    return Graph(values, nodes), rows


def write_instance(
    path: str | os.PathLike, graph: Graph, rows: Sequence[dict[str, Any]]
) -> None:
    """Write `graph`, one value per node, with a dictionary of costs per node, as
    JSON."""
    nodes = [
        {
            "name": node.name,
            "backward": node.backward,
            "bytes": graph.values[node.writes[0]].nbytes,
        }
        | row
        for node, row in zip(graph.nodes, rows, strict=True)
    ]
    edges = [
        [graph.producer[v], n]
        for n, node in enumerate(graph.nodes)
        for v in node.reads
        if v in graph.producer
    ]
    with open(path, "w") as file:
        json.dump({"nodes": nodes, "edges": edges}, file, indent=1)
