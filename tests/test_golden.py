"""Printed programs, as read by eye once. UPDATE_GOLDEN=1 writes them anew."""

import os
import pathlib

import numpy as np
import pytest

import poet_jax

GOLDEN = pathlib.Path(__file__).parent / "golden"


def chain():
    """Three layers, forward and backward; each gradient reads its layer's input.

    x -> layer1 -> layer2 -> layer3 -> loss
    |      |         |                  |
    g1 <-- g2 <----- g3 <---------------/
    """
    sizes = {
        "x": 8, "layer1": 8, "layer2": 8, "layer3": 8, "loss": 1,
        "g3": 4, "g2": 4, "g1": 4,
    }  # fmt: skip
    values = tuple(poet_jax.core.Value(name, size) for name, size in sizes.items())
    reads = [(0,), (1,), (2,), (3,), (4, 2), (5, 1), (6, 0)]
    nodes = tuple(
        poet_jax.core.Node(values[n + 1].name, read, (n + 1,), backward=n > 3)
        for n, read in enumerate(reads)
    )
    graph = poet_jax.Graph(values, nodes, (0,), (4, 7), donated=frozenset({0}))
    one = np.ones(len(values))
    costs = poet_jax.Costs(
        seconds=np.ones(len(nodes)),
        joules=np.array([5.0, 1.0, 5.0, 1.0, 5.0, 5.0, 5.0]),
        workspace_bytes=np.zeros(len(nodes), int),
        nbytes=np.array(list(sizes.values())),
        page_in_seconds=one,
        page_out_seconds=one,
        page_in_joules=0.2 * one,
        page_out_joules=0.3 * one,
    )
    return graph, costs


@pytest.mark.parametrize(
    ("name", "planner", "memory_bytes"),
    [
        ("chain_keep_all", poet_jax.keep_all, 33),
        ("chain_remat", poet_jax.MilpPlanner(paging=False), 28),
        ("chain_paging", poet_jax.MilpPlanner(remat=False), 20),
    ],
)
def test_programs_print_as_they_did(name, planner, memory_bytes):
    graph, costs = chain()
    plan = planner(graph, costs, poet_jax.Budget(memory_bytes))
    program = poet_jax.lower(graph, plan)
    text = f"{graph}\n\n{program}\n\n{poet_jax.simulate(program, costs)}\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    assert ("(again)" in text) == ("remat" in name)
    assert ("page in" in text) == ("paging" in name)
