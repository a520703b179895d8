"""Repairing a plan: evictions end within the budget, refilling costs no more."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import brute_force, examples, graphs

import poet_jax
from poet_jax.core.plan import Stages
from poet_jax.planners.evict import Life, evict, evictions, improving
from poet_jax.planners.planner import judge, keep_everything
from poet_jax.planners.refill import refill


@examples(100)
@given(case=graphs(static_watts=(0.0,)), share=st.floats(0.3, 1.0))
def test_evictions_add_cost_until_the_plan_fits_and_refilling_takes_cost_away(
    case, share
):
    graph, costs = case
    keep_all = keep_everything(graph, costs)
    budget = poet_jax.Budget(max(1, int(share * keep_all.usage.peak_bytes)))
    states = list(
        evictions(costs, keep_all, "energy", memory_bytes=budget.memory_bytes)
    )
    joules = [state.usage.joules for state in states]
    assert joules == sorted(joules)
    peaks = [state.usage.peak_bytes for state in states]
    assert all(peak > budget.memory_bytes for peak in peaks[:-1])
    if peaks[-1] > budget.memory_bytes:
        return
    full = refill(costs, budget, states[-1], "energy")
    assert full.usage.peak_bytes <= budget.memory_bytes
    assert full.usage.joules <= states[-1].usage.joules


@examples(50)
@given(case=graphs())
def test_the_longer_evictions_go_on_the_leaner_is_what_they_find(case):
    graph, costs = case
    keep_all = keep_everything(graph, costs).usage.peak_bytes

    states = improving(graph, costs, poet_jax.Budget(1), "energy")
    peaks = [judged.usage.peak_bytes for judged in states if judged is not None]
    assert peaks == sorted({*peaks}, reverse=True) and peaks[0] == keep_all
    least = evict(graph, costs, poet_jax.Budget(1)).usage.peak_bytes
    assert peaks[-1] == least


@examples(50)
@given(case=graphs(max_nodes=5, static_watts=(0.0,)), share=st.floats(0.3, 1.0))
def test_with_room_for_everything_refilling_gives_keep_all(case, share):
    graph, costs = case
    keep_all = keep_everything(graph, costs)
    budget = poet_jax.Budget(max(1, int(share * keep_all.usage.peak_bytes)))
    judged = evict(graph, costs, budget)
    most = poet_jax.Budget(int(costs.nbytes.sum() + costs.workspace_bytes.sum()) + 1)
    full = refill(costs, most, judged, "energy")
    assert full.graph.resident == graph.successors.keys()
    everything = keep_everything(full.graph, costs).usage
    assert full.usage.joules == everything.joules <= keep_all.usage.joules
    least = brute_force(graph, costs, budget.memory_bytes)
    if least is not None and judged.usage.peak_bytes <= budget.memory_bytes:
        full = refill(costs, budget, judged, "energy")
        assert full.usage.joules >= least * (1 - 1e-9)


@examples(50)
@given(case=graphs())
def test_a_staged_plan_is_read_back_from_its_actions(case):
    graph, costs = case
    budget = poet_jax.Budget(max(1, keep_everything(graph, costs).usage.peak_bytes - 1))
    actions = evict(graph, costs, budget).actions
    stages = Stages.of(graph, actions)
    assert Stages.of(graph, stages.actions(graph)) == stages
    same, given = (
        judge(graph, costs, x).usage for x in (stages.actions(graph), actions)
    )
    np.testing.assert_allclose(  # but for what waiting costs, as nothing is prefetched
        same.joules - costs.static_watts * same.seconds,
        given.joules - costs.static_watts * given.seconds,
    )


@examples(50)
@given(case=graphs())
def test_what_waits_at_the_peak_is_alive_and_read_later(case):
    graph, costs = case
    judged = keep_everything(graph, costs)
    waiting = dict(Life(judged).waiting())
    pins = {value for value in waiting if value in graph.pinned}
    assert not pins
    for value, stage in waiting.items():
        reads = {*graph.readers[value]}
        assert stage in reads or (stage == len(graph.nodes) and value in graph.outputs)
    total = sum(int(costs.nbytes[v]) for v in waiting)
    assert total <= judged.usage.peak_bytes


def test_the_planner_starts_from_a_plan_that_is_given():
    graph, costs = chain()
    budget = poet_jax.Budget(6)
    best = poet_jax.MilpPlanner()(graph, costs, budget)
    hurried = poet_jax.MilpPlanner(time_limit_seconds=1e-3)
    assert hurried(graph, costs, budget, best).objective <= best.objective


def chain():
    """Six values of a byte each, read again in reverse."""
    values = tuple(poet_jax.core.Value(f"v{i}", 1) for i in range(12))
    nodes = tuple(
        poet_jax.core.Node(f"f{i}", (i - 1,) if i else (), (i,)) for i in range(6)
    ) + tuple(
        poet_jax.core.Node(f"b{i}", (6 + i - 1, 5 - i) if i else (5,), (6 + i,))
        for i in range(6)
    )
    graph = poet_jax.Graph(values, nodes, outputs=(11,))
    device = dataclasses.replace(
        poet_jax.devices.RASPBERRY_PI_4, page_in_bytes_per_second=1.0
    )
    one = np.ones(12)
    slow = np.array([device.page_in_seconds(1)] * 12)
    return graph, poet_jax.Costs(
        one, one, 0 * one, np.ones(12, np.int64), slow, slow, slow, slow
    )
