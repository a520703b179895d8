"""The solver's process starts wherever this one runs, or says why it does not."""

import subprocess
import sys

import pytest
from checks import assert_three_sentences
from toy import twelve_nodes

import poet_jax

PLAN = """
import logging
import os
import sys
sys.path += {path!r}
os.environ["JAX_PLATFORMS"] = "cpu"
logging.basicConfig(level=logging.WARNING)
import poet_jax
from toy import twelve_nodes
print(poet_jax.MilpPlanner()(*twelve_nodes(), poet_jax.Budget(40)).status)
"""


@pytest.mark.parametrize("way", ["a script", "-c", "standard input"])
def test_the_solver_finds_what_only_this_process_knows_where_to_find(way, tmp_path):
    """A Python without packages, that a script without a main guard adds to."""
    code = PLAN.format(path=sys.path)
    script = tmp_path / "plan.py"
    script.write_text(code)
    arguments = {"a script": [str(script)], "-c": ["-c", code], "standard input": []}
    run = subprocess.run(
        [getattr(sys, "_base_executable", sys.executable), "-I", *arguments[way]],
        input=code if way == "standard input" else "",
        capture_output=True,
        text=True,
        env={},
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "Status.OPTIMAL"


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python", None])
def test_a_solver_that_cannot_start_is_told_once(program, monkeypatch, caplog):
    graph, costs = twelve_nodes()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", program)
        with pytest.raises(RuntimeError) as caught:
            poet_jax.MilpPlanner()(graph, costs, poet_jax.Budget(40))
    assert_three_sentences(caught.value, program, "mip", "planner=poet_jax.greedy")
    assert "no answer" not in caplog.text
    plan = poet_jax.MilpPlanner()(graph, costs, poet_jax.Budget(40))
    assert plan.status is poet_jax.Status.OPTIMAL
