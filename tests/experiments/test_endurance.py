"""Hundreds of steps hold no more memory than a few."""

import json

from processes import run_module


def test_nothing_grows_over_hundreds_of_steps(tmp_path):
    run_module("benchmarks.endurance", tmp_path, "--steps=120")
    result = json.loads((tmp_path / "endurance.json").read_text())
    times = ("after_a_tenth", "halfway", "at_the_end")
    early, middle, late = (result[time] for time in times)
    assert result["bytes_paged_in"] and result["recomputed"]
    assert result["losses"][1] < result["losses"][0]
    for name in ("store_bytes", "file_bytes", "threads", "open_files"):
        assert late[name] <= early[name], name
    # What is allocated once comes in one half; the smallest array of a step has 2**18.
    first = (middle["resident_bytes"] - early["resident_bytes"]) / 48
    second = (late["resident_bytes"] - middle["resident_bytes"]) / 59
    assert min(first, second) < 2**15
