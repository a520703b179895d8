"""Several processes of jax.distributed, each of which has devices of its own."""

import json
import os
import pathlib
import socket
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).with_name("two_processes.py")


def printed():
    """What each of two processes that train together prints."""
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


def test_all_processes_have_the_plan_and_the_errors_of_the_first():
    """Which alone plans; values and bytes are checked there. A process of the test's
    own is not shared, so one test asks for all of it."""
    first, second = printed()
    assert first == second
    assert first["again"] > 0
    name, smallest_bytes = second["too small"]
    assert name == "BudgetTooSmall" and smallest_bytes > 0
    # An error that cannot be sent is told in its words.
    assert second["fails"][0] == "RuntimeError"
