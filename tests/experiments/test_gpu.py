"""The benchmark for a GPU, at small size on the CPU."""

import csv

import pytest
from processes import run_module


def test_a_budget_holds_at_the_loss_of_jit(tmp_path):
    flags = ("--size=small", "--models=gpt2_loop", "--shares=75", "--time_limit=2")
    said = run_module("benchmarks.gpu", tmp_path, *flags, "--prices=RASPBERRY_PI_4")
    jit, ours = csv.DictReader((tmp_path / "gpu.csv").read_text().splitlines())
    assert (jit["device"], jit["system"]) == ("cpu", "jax.jit")
    assert int(ours["compiled_bytes"]) <= int(ours["budget_bytes"])
    assert int(ours["budget_bytes"]) <= 0.75 * 1.2 * int(jit["compiled_bytes"])
    assert float(ours["loss"]) == pytest.approx(float(jit["loss"]), rel=1e-3)
    assert "gpt2_loop" in said
