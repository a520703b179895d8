"""Printed programs, as read by eye once. UPDATE_GOLDEN=1 writes them anew."""

import os
import pathlib

import pytest
from toy import chain

import poet_jax

GOLDEN = pathlib.Path(__file__).parent / "golden"


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
