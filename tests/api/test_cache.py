"""Plans in a folder: the second start of a job plans nothing."""

import dataclasses
import json
import logging
import math

import numpy as np
import pytest
from toy import STAGES, W, X, gradient

import poet_jax
from poet_jax.api.cache import PlanCache, plan_key
from poet_jax.core.plan import plan_to_dict

BUDGET = "68%"


@dataclasses.dataclass(frozen=True)
class Counting:
    """greedy, which notes its calls."""

    margin: int = 0
    calls = []

    def __call__(self, graph, costs, budget):
        self.calls.append(budget)
        return poet_jax.greedy(graph, costs, budget)


def run(folder, planner, budget=BUDGET, device=poet_jax.devices.RASPBERRY_PI_4):
    """A new start: the same function, scheduled afresh."""
    scheduled = poet_jax.schedule(
        gradient,
        budget,
        planner=planner,
        device=device,
        executor=STAGES,
        plan_cache=folder,
    )
    np.testing.assert_allclose(scheduled(W, X), gradient(W, X), rtol=1e-4, atol=1e-8)
    return scheduled.plan(W, X)


def test_the_second_start_plans_nothing_and_any_change_plans_again(tmp_path):
    Counting.calls.clear()
    folder = tmp_path / "plans" / "of_this_job"  # is made
    first = run(folder, Counting())
    count = len(Counting.calls)
    again = run(folder, Counting())
    assert len(Counting.calls) == count > 0
    assert again.plan == first.plan
    for change in (
        {"planner": Counting(margin=1)},
        {"budget": "66%"},
        {"device": poet_jax.devices.JETSON_TX2},
    ):
        count = len(Counting.calls)
        run(folder, **{"planner": Counting()} | change)
        assert len(Counting.calls) > count


def test_the_second_start_compiles_once(tmp_path):
    tight = "70%"
    first = run(tmp_path, poet_jax.greedy, budget=tight)
    again = run(tmp_path, poet_jax.greedy, budget=tight)
    assert first.compilations > 1 == again.compilations
    assert again.compiled_bytes == first.compiled_bytes
    assert again.budget == first.budget


def test_a_file_that_is_damaged_is_written_again(tmp_path):
    Counting.calls.clear()
    run(tmp_path, Counting())
    count = len(Counting.calls)
    for path in tmp_path.glob("plan-*.json"):
        path.write_text(path.read_text()[:100])
    run(tmp_path, Counting())
    run(tmp_path, Counting())
    assert len(Counting.calls) == 2 * count


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("plan", {"statistics": x}) for x in (None, [], 3)),
        *(("compiled", {"allowed": x}) for x in (0, -1, 1.5, None, True)),
        *(("compiled", {"stage_bytes": x}) for x in (-1, math.inf, "1")),
        *((name, None) for name in ("plan", "compiled")),
    ],
    ids=str,
)
def test_a_file_of_wrong_values_is_written_again(tmp_path, name, damage):
    first = run(tmp_path, poet_jax.greedy)
    kept = {}
    for path in tmp_path.glob(f"{name}-*.json"):
        kept[path] = json.loads(path.read_text())
        wrong = "[" * 10**5 if damage is None else json.dumps(kept[path] | damage)
        path.write_text(wrong)
    assert kept
    assert run(tmp_path, poet_jax.greedy).compiled_bytes == first.compiled_bytes
    for path, data in kept.items():
        again = json.loads(path.read_text())
        assert again | {"solve_seconds": 0} == data | {"solve_seconds": 0}


def test_a_plan_that_was_made_too_large_by_hand_is_planned_again(tmp_path):
    Counting.calls.clear()
    run(tmp_path, Counting())
    count = len(Counting.calls)
    schedule = run(tmp_path / "other", poet_jax.keep_all, budget="200%")
    actions = plan_to_dict(schedule.graph, schedule.plan)["actions"]
    for path in tmp_path.glob("plan-*.json"):
        plan = json.loads(path.read_text())
        path.write_text(json.dumps(plan | {"actions": actions}))
    run(tmp_path, Counting())
    assert len(Counting.calls) == 2 * count


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    first = run(tmp_path, Counting())
    paths = sorted(tmp_path.glob("plan-*.json"))
    for path in paths:
        path.unlink()
        path.mkdir()  # root, too, cannot write a file there
    with caplog.at_level(logging.WARNING, "poet_jax"):
        again = run(tmp_path, Counting())
    assert again.plan.actions == first.plan.actions
    assert str(paths[0]) in caplog.text and "plan_cache" in caplog.text
    assert sorted(tmp_path.glob("plan-*.json")) == paths


def test_a_folder_that_cannot_be_used_is_named_before_anything_is_planned(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(OSError, match="plan_cache") as caught:
            poet_jax.schedule(gradient, BUDGET, plan_cache=folder)
        assert str(folder) in str(caught.value) and "Use " in str(caught.value)


def test_a_planner_that_cannot_be_told_from_others_is_refused(tmp_path):
    for planner in (lambda *inputs: poet_jax.greedy(*inputs), Counting):
        with pytest.raises(ValueError, match="plan_cache"):
            run(tmp_path, planner)


def test_how_loud_the_planner_is_does_not_matter_and_its_pins_do():
    schedule = poet_jax.schedule(
        gradient, BUDGET, planner=poet_jax.greedy, device=poet_jax.devices.JETSON_TX2
    ).plan(W, X)

    def key(**options):
        planner = poet_jax.MilpPlanner(**options)
        return plan_key(schedule.graph, schedule.costs, schedule.budget, planner)

    assert key(progress=False) == key()
    assert len({key(), key(keep="dot*"), key(never_page="dot*"), key(gap=0.1)}) == 4


def test_a_cache_is_a_folder_that_can_be_used_by_itself(tmp_path):
    cache = PlanCache(tmp_path)
    schedule = poet_jax.schedule(
        gradient, BUDGET, planner=poet_jax.greedy, device=poet_jax.devices.JETSON_TX2
    ).plan(W, X)
    inputs = schedule.graph, schedule.costs, schedule.budget
    assert cache.plan(poet_jax.greedy, *inputs) == cache.plan(poet_jax.greedy, *inputs)
    assert len(list(tmp_path.iterdir())) == 1
