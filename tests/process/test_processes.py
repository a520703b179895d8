"""Several processes of jax.distributed, each of which has devices of its own."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def printed():
    """What two processes that train together print."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), port, str(number)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def test_all_processes_have_the_plan_of_the_first(printed):
    """Which alone plans; values and bytes are checked there."""
    first, second = printed
    assert first == second
    assert first["again"] > 0


def test_a_budget_that_is_too_small_is_so_in_all_processes(printed):
    name, smallest_bytes = printed[1]["too small"]
    assert name == "BudgetTooSmall"
    assert smallest_bytes > 0


def test_an_error_that_cannot_be_sent_ends_all_processes_with_its_words(printed):
    assert printed[0]["fails"][0] == printed[1]["fails"][0] == "RuntimeError"
