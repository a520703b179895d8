"""Budgets as they are given, stages as they become actions, plans as JSON."""

import dataclasses
import json
import os

import pytest
from checks import renumbered
from hypothesis import given
from hypothesis import strategies as st
from strategies import attempt, budgeted_graphs, examples

import poet_jax
from poet_jax.api.schedule import Schedule
from poet_jax.core.plan import (
    Compute,
    PageIn,
    PageOut,
    Stages,
    parse_budget,
    plan_from_dict,
    plan_to_dict,
    save_json,
)


def chain(count):
    """v0 = n0(), v1 = n1(v0), ... each of 4 bytes; the last is the output."""
    values = tuple(poet_jax.core.Value(f"v{i}", 4) for i in range(count))
    nodes = tuple(
        poet_jax.core.Node(f"n{i}", (i - 1,) if i else (), (i,)) for i in range(count)
    )
    return poet_jax.Graph(values, nodes, outputs=(count - 1,))


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (4096, 4096),
        (4096.7, 4096),
        ("64MiB", 64 * 2**20),
        ("50%", 500),
        ("100%", 1000),
        (poet_jax.Budget(7, 1.0, 0), 7),
    ],
)
def test_a_budget_is_bytes_a_size_or_a_percentage_of_keep_all(given, nbytes):
    assert parse_budget(given, keep_all_bytes=1000).memory_bytes == nbytes


@pytest.mark.parametrize(
    "given", [0, -1, float("nan"), True, "0%", "64", "", "many", None, [1]]
)
def test_what_is_not_a_budget_is_refused_with_what_to_use(given):
    with pytest.raises(ValueError, match=r'"64MiB"|"30%"|Budget\('):
        parse_budget(given)


@pytest.mark.parametrize(
    "limits", [{"seconds": 0}, {"seconds": -1.0}, {"store_bytes": -1}]
)
def test_a_deadline_is_positive_and_room_on_storage_not_negative(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        poet_jax.Budget(10, **limits)


def test_a_budget_may_be_infinite_and_prints():
    assert str(poet_jax.Budget(float("inf")))
    assert str(poet_jax.Budget(2048, 1.5, 1024)) == "2.0 KiB, 1.5 s, 1.0 KiB of storage"


def test_stages_become_actions_with_page_ins_just_before_their_reader():
    """n3 needs v0 and v2 again: v0 comes from storage, and n1, n2 run again.

    n0 -> n1 -> n2 -> n3        n3 reads v2; the output is v3
    """
    graph = chain(4)
    stages = Stages.empty(graph)
    stages.page_outs = {0}
    stages.page_ins[3] = {0}
    stages.reruns[3] = {2, 1}
    assert stages.actions(graph) == (
        Compute(0),
        PageOut(0),
        Compute(1),
        Compute(2),
        PageIn(0),
        Compute(1),
        Compute(2),
        Compute(3),
    )


def test_arguments_are_paged_out_first_and_outputs_paged_in_last():
    graph = dataclasses.replace(
        chain(3),
        nodes=(
            poet_jax.core.Node("n1", (0,), (1,)),
            poet_jax.core.Node("n2", (1,), (2,)),
        ),
        arguments=(0,),
        outputs=(1, 2),
        donated=frozenset({0}),
    )
    stages = Stages.empty(graph)
    stages.page_outs = {0, 1}
    stages.page_ins[0], stages.page_ins[2] = {0}, {1}
    assert stages.actions(graph) == (
        PageOut(0),
        PageIn(0),
        Compute(0),
        PageOut(1),
        Compute(1),
        PageIn(1),
    )


def test_a_plan_of_another_graph_is_refused():
    graph, other = chain(3), chain(4)
    plan = poet_jax.Plan(
        (Compute(0), Compute(1), Compute(2)), poet_jax.Status.OPTIMAL, 2.0, 1.0, "me"
    )
    data = json.loads(json.dumps(plan_to_dict(graph, plan)))
    assert plan_from_dict(graph, data) == plan
    assert plan.gap == 0.5
    with pytest.raises(poet_jax.PlanInvalid, match="graph"):
        plan_from_dict(other, data)


@pytest.mark.parametrize(
    "change",
    [
        {"values": (poet_jax.core.Value("v0", 5), *chain(3).values[1:])},
        {"outputs": (1, 2)},
        {"nodes": (*chain(3).nodes[:2], poet_jax.core.Node("n2", (0,), (2,)))},
    ],
)
def test_the_fingerprint_follows_what_a_plan_depends_on(change):
    assert dataclasses.replace(chain(3), **change).fingerprint != chain(3).fingerprint
    assert chain(3).fingerprint == chain(3).fingerprint


def test_a_status_is_a_sentence_and_a_plan_prints():
    assert all(status.value.endswith(".") for status in poet_jax.Status)
    plan = poet_jax.Plan(
        (Compute(0), PageOut(0)), poet_jax.Status.FEASIBLE, 4.0, 3.0, "me"
    )
    assert "1 compute, 1 page-out, 0 page-ins" in str(plan)
    assert "gap 25.00%" in str(plan)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    path = tmp_path / "plan.json"
    save_json(path, {"a": 1})
    with pytest.raises(TypeError):
        save_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_of_a_file_goes_with_the_next_one(tmp_path):
    path = tmp_path / "plan[1].json"
    (tmp_path / "plan[1].json.999999999.part").touch()  # no process has that number
    (tmp_path / f"plan[1].json.{os.getppid()}.part").touch()
    (tmp_path / "other.json.999999999.part").touch()
    save_json(path, {"a": 1})
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        "other.json.999999999.part",
        "plan[1].json",
        f"plan[1].json.{os.getppid()}.part",
    ]


def another_order(graph, rng) -> list[int]:
    """Random, but for effects, and with every node after those it reads from."""
    waiting, numbers = set(range(len(graph.nodes))), []
    while waiting:
        effects = [n for n in waiting if not graph.nodes[n].repeatable]
        ready = [
            n
            for n in sorted(waiting)
            if not waiting & {graph.producer.get(v) for v in graph.nodes[n].reads}
            and (n not in effects or n == min(effects))
        ]
        numbers.append(rng.choice(ready))
        waiting.remove(numbers[-1])
    return numbers


@examples(200)
@given(case=budgeted_graphs(), rng=st.randoms(use_true_random=False))
def test_a_plan_in_another_order_uses_the_same(case, rng):
    graph, costs, memory_bytes = case
    numbers = another_order(graph, rng)
    nodes = tuple(graph.nodes[number] for number in numbers)
    moved = dataclasses.replace(graph, nodes=nodes)
    moved_costs = costs.of(numbers, range(len(graph.values)))
    plan = attempt(poet_jax.greedy, moved, moved_costs, memory_bytes)
    if isinstance(plan, poet_jax.BudgetTooSmall):
        return
    here = renumbered(plan, numbers)
    assert list(here.order) == numbers and plan.order == tuple(range(len(numbers)))
    there = poet_jax.simulate(poet_jax.lower(moved, plan), moved_costs)
    usage = poet_jax.simulate(poet_jax.lower(graph, here), costs)
    assert usage.peak_bytes == there.peak_bytes
    assert usage.store_bytes == there.store_bytes
    assert usage.seconds == pytest.approx(there.seconds, rel=1e-9)
    assert usage.joules == pytest.approx(there.joules, rel=1e-9)
    program = poet_jax.lower(graph, here)
    runs = Schedule.of(graph, costs, poet_jax.Budget(memory_bytes), here).matrices().R
    assert runs.sum(axis=0).tolist() == [program.runs[n] for n in range(len(numbers))]
