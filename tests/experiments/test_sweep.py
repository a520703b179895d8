"""Sweeps and the planners that are only for comparison."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from strategies import attempt, budgeted_graphs, examples

import poet_jax
from experiments.paper import baselines, points
from experiments.program import read_rows
from poet_jax.core.instances import write_instance
from poet_jax.planners.planner import fits


@examples(20)
@given(case=budgeted_graphs())
def test_planners_after_published_heuristics_keep_the_budget(case):
    graph, costs, memory_bytes = case
    for planner in (baselines.capuchin, baselines.pofo):
        plan = attempt(planner, graph, costs, memory_bytes)
        if isinstance(plan, poet_jax.BudgetTooSmall):
            continue
        program = poet_jax.lower(graph, plan)
        usage = poet_jax.simulate(program, costs)
        assert fits(usage, poet_jax.Budget(memory_bytes))
        if planner is baselines.pofo:  # offloads what is left of what runs again
            landing = sum(int(costs.nbytes[v]) for v in graph.landing)
            assert program.recomputed or usage.bytes_paged_out == landing
        assert plan.objective == pytest.approx(usage.joules, rel=1e-9)


PLANNERS = ("paging", "remat", "pofo", "milp")


def grid(devices=("STM32H7",), planners=PLANNERS, counted=("all",), shares=(85.0, 1.0)):
    return points.grid(
        ["mlp:width=16"], ["digits"], [64], ["gradient"], counted, devices, shares,
        [None], planners,
    )  # fmt: skip


def test_a_sweep_writes_a_row_per_point_and_goes_on(tmp_path):
    path = tmp_path / "sweep.csv"
    points.run(grid()[:3], path, 2.0)
    before = path.read_text()
    points.run(grid(), path, 2.0)
    assert path.read_text().startswith(before)
    rows = read_rows(path)
    assert [tuple(row[x] for x in points.COLUMNS[:9]) for row in rows] == [
        point.key for point in grid()
    ]
    costs = {r["planner"]: float(r["joules"]) for r in rows if r["joules"]}
    assert costs["milp"] <= min(costs.values())
    hopeless = [row for row in rows if row["share"] == "1.0"]
    assert all(row["status"] in ("IMPOSSIBLE", "NONE") for row in hopeless)
    assert all("bytes" in row["reason"] for row in hopeless)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"devices": ("ABACUS",)}, "The devices are host, MKR1000"),
        ({"planners": ("guess",)}, "The planners are keep_all"),
    ],
)
def test_what_is_unknown_is_named(wrong, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        points.run(grid(**wrong), tmp_path / "sweep.csv", 2.0)


def test_activations_alone_are_what_depends_on_the_batch():
    graph, batch = points.traced("mlp:width=16", "digits", 32, "gradient")
    costs = poet_jax.price(graph, poet_jax.devices.STM32H7)
    counted = points.activations_only(graph, costs, graph.arguments[-batch:])
    params = graph.arguments[:-batch]
    assert not counted.nbytes[list(params)].any()
    assert not counted.nbytes[list(graph.outputs)].any()
    hidden = [v for v, x in enumerate(graph.values) if x.shape == (32, 16)]
    assert hidden and (counted.nbytes[hidden] == costs.nbytes[hidden]).all()
    assert not counted.workspace_bytes.any()


def test_published_rules_are_judged_by_the_simulator(tmp_path):
    """a, b, c of which c reads both: a is paged while b runs, which the published rules
    take for free, and the deadline leaves no time for."""
    sizes = (40, 100, 10)
    values = tuple(poet_jax.core.Value(x, n) for x, n in zip("abc", sizes, strict=True))
    nodes = (
        poet_jax.core.Node("a", (), (0,)), poet_jax.core.Node("b", (), (1,)),
        poet_jax.core.Node("c", (0, 1), (2,)),
    )  # fmt: skip
    cost = {
        "seconds": 1.0, "joules": 1.0, "page_in_seconds": 1.0, "page_out_seconds": 1.0,
        "page_in_joules": 0.1, "page_out_joules": 0.1,
    }  # fmt: skip
    path = tmp_path / "three.json"
    write_instance(path, poet_jax.Graph(values, nodes), [cost] * 3)
    graph, costs = poet_jax.load_instance(path)
    graph = dataclasses.replace(graph, outputs=(2,))
    row = points.rules_row(graph, costs, 75, 4.0, 2.0)
    assert row["milp_status"] in ("OPTIMAL", "IMPOSSIBLE")
    if row["published_status"] != "IMPOSSIBLE":
        over = int(row["peak_bytes"]) > row["memory_bytes"]
        assert ("memory" in row["refuted"]) == over


def test_a_model_is_swept_for_a_profile(tmp_path):
    """The front is that of the model's step, by the costs of the board."""
    device = tmp_path / "board.toml"
    poet_jax.devices.STM32H7.save(device)
    command = [sys.executable, "-m", "experiments.sweep", "--model=mlp:width=16"]
    command += ["--dataset=digits", f"--device={device}", "--planner=paging_only"]
    command += ["--batch_size=64", "--budgets=85%,100%", f"--output={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *_, last = read_rows(tmp_path / "front.csv")
    assert float(last["joules"]) == pytest.approx(float(last["keep_all_joules"]))
    assert last["keep_all_bytes"] == last["budget_bytes"]
    assert "smallest budget" in done.stdout
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_a_header_is_written_once(tmp_path):
    path = tmp_path / "sweep.csv"
    with pytest.raises(ValueError):
        points.run(grid(devices=("ABACUS",)), path, 2.0)
    points.run(grid(planners=("greedy",)), path, 2.0)
    assert [row["share"] for row in read_rows(path)] == ["85.0", "1.0"]


class Starter(poet_jax.MilpPlanner):
    """Returns the plan that it is given to start from."""

    def __call__(self, graph, costs, budget, start=None):
        return start or poet_jax.keep_all(graph, costs, budget)


def test_a_plan_for_one_device_and_deadline_serves_others():
    sweep = points.Sweep(2.0)
    first, second = grid(devices=("STM32H7", "NRF52840"), planners=("remat",))[::2]
    row = sweep.plan(dataclasses.replace(first, deadline=2.0))
    assert row["recomputed"]
    sweep.planners["remat"] = Starter()
    for deadline in (None, row["seconds"] / row["keep_all_seconds"] + 0.01):
        served = sweep.plan(dataclasses.replace(second, deadline=deadline))
        assert served["recomputed"] == row["recomputed"]
