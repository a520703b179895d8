"""The sparse MILP where brute force does not reach, and what it once got wrong."""

import dataclasses
import fnmatch
import gc
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import renumbered
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    HEURISTICS,
    attempt,
    budgeted_graphs,
    examples,
    graphs,
    peak_bytes,
    solvers,
)
from toy import long_chain, twelve_nodes

import poet_jax

by_solver = pytest.mark.parametrize("solver", ["CBC", "HIGHS"])


@by_solver
def test_a_rerun_waits_for_no_room_that_a_later_rerun_needs(solver):
    graph, costs = twelve_nodes()
    planner = solvers()[solver]
    error = attempt(planner, graph, costs, 31)
    assert (error.smallest_bytes, error.exact) == (32, True)
    plan = attempt(planner, graph, costs, 32)
    assert isinstance(plan, poet_jax.Plan)
    assert plan.status is poet_jax.Status.OPTIMAL
    assert plan.objective == 78


@by_solver
@examples(60)
@given(case=graphs(min_nodes=9, max_nodes=13, static_watts=(0.0,)))
def test_the_smallest_budget_is_planned_and_proven(solver, case):
    graph, costs = case
    error = attempt(solvers()[solver], graph, costs, 1)
    if isinstance(error, poet_jax.Plan):
        return
    assert error.exact
    plan = attempt(solvers()[solver], graph, costs, error.smallest_bytes)
    assert isinstance(plan, poet_jax.Plan)
    assert plan.status is poet_jax.Status.OPTIMAL


@examples(40)
@given(case=budgeted_graphs(min_nodes=9, max_nodes=13, static_watts=(0.0,)))
def test_without_stalls_to_pay_for_every_graph_is_solved_to_optimality(case):
    graph, costs, budget = case
    cbc, highs = (attempt(p, graph, costs, budget) for p in solvers().values())
    assert type(cbc) is type(highs)
    if isinstance(cbc, poet_jax.Plan):
        assert cbc.status is highs.status is poet_jax.Status.OPTIMAL
        assert cbc.objective == pytest.approx(highs.objective, rel=1e-6)


@by_solver
@examples(4)
@given(case=graphs(min_nodes=33, max_nodes=44), share=st.sampled_from([0.4, 0.7]))
def test_a_graph_too_long_to_be_exact_has_a_true_bound(solver, case, share):
    graph, costs = case
    planner = dataclasses.replace(solvers()[solver], time_limit_seconds=2)
    peak = peak_bytes(graph, costs)
    plan = attempt(planner, graph, costs, int(share * peak))
    if isinstance(plan, poet_jax.BudgetTooSmall):
        smallest = plan.smallest_bytes
        plan = attempt(planner, graph, costs, smallest)
        assert isinstance(plan, poet_jax.Plan)
        budget = smallest
    else:
        budget = int(share * peak)
    usage = poet_jax.simulate(poet_jax.lower(graph, plan), costs)
    assert usage.peak_bytes <= budget
    for other in HEURISTICS.values():
        found = attempt(other, graph, costs, budget)
        if isinstance(found, poet_jax.Plan):
            assert plan.bound <= found.objective * (1 + 1e-9)
            assert plan.objective <= found.objective * (1 + 1e-9)


@by_solver
def test_a_plan_that_ran_out_of_time_is_not_called_optimal(solver):
    graph, costs = twelve_nodes()
    planner = dataclasses.replace(solvers()[solver], time_limit_seconds=1e-3)
    plan = attempt(planner, graph, costs, 33)
    if isinstance(plan, poet_jax.Plan):
        optimal = plan.status is poet_jax.Status.OPTIMAL
        assert optimal == (plan.gap <= planner.gap)
        assert plan.bound <= 63


@by_solver
@pytest.mark.parametrize("seconds", [1e12, math.inf])
def test_a_planner_may_take_all_the_time_that_it_needs(solver, seconds):
    graph, costs = twelve_nodes()
    planner = poet_jax.MilpPlanner(solver=solver, time_limit_seconds=seconds)
    plan = planner(graph, costs, poet_jax.Budget(32))
    assert plan.status is poet_jax.Status.OPTIMAL and plan.objective == 78


@pytest.mark.parametrize("wrong", [{"solver": "GUROBI"}, {"objective": "money"}])
def test_an_option_that_is_not_known_is_refused_with_what_to_type(wrong):
    with pytest.raises(ValueError, match="use"):
        poet_jax.MilpPlanner(**wrong)


def test_a_key_is_computed_again_and_not_paged():
    """A key is read at both ends of the step; paging it would be free, but may not be.

    key --> big --> small --> end
     \\________________________/
    """
    values = (
        poet_jax.core.Value("key", 9, pageable=False),
        poet_jax.core.Value("big", 9),
        poet_jax.core.Value("small", 9),
        poet_jax.core.Value("end", 1),
    )
    nodes = (
        poet_jax.core.Node("key", (), (0,)),
        poet_jax.core.Node("big", (0,), (1,)),
        poet_jax.core.Node("small", (1,), (2,)),
        poet_jax.core.Node("end", (0, 2), (3,)),
    )
    graph = poet_jax.Graph(values, nodes, outputs=(3,))
    free = np.zeros(4)
    costs = poet_jax.Costs(
        np.ones(4), np.ones(4), np.zeros(4, int), np.array([9, 9, 9, 1]), *(free,) * 4
    )
    for planner in (*solvers().values(), poet_jax.PaperPlanner("HIGHS")):
        plan = planner(graph, costs, poet_jax.Budget(19))
        program = poet_jax.lower(graph, plan)
        assert (program.recomputed, program.last_page_in) == (1, {})


def test_a_line_shows_how_far_the_planning_is_until_it_is_turned_off(
    monkeypatch, capsys
):
    graph, costs = long_chain(400)
    budget = poet_jax.Budget(3 * peak_bytes(graph, costs) // 5)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    poet_jax.MilpPlanner(time_limit_seconds=2)(graph, costs, budget)
    shown = capsys.readouterr().err
    assert "planning 800 nodes" in shown and "bound" in shown and "s left" in shown
    assert shown.endswith("\r\x1b[K")
    silent = poet_jax.MilpPlanner(time_limit_seconds=2, progress=False)
    silent(graph, costs, budget)
    assert capsys.readouterr().err == ""


@examples(40)
@given(
    case=budgeted_graphs(static_watts=(0.0,)),
    pin=st.sampled_from(["keep", "never_page", "never_remat"]),
    pattern=st.sampled_from(["v*a", "v?b", "*"]),
)
def test_a_pinned_value_is_left_alone(case, pin, pattern):
    graph, costs, budget = case
    names = [value.name for value in graph.values]
    pinned = {v for v, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern)}
    if not pinned:
        with pytest.raises(ValueError, match="no value"):
            poet_jax.MilpPlanner(**{pin: pattern})(graph, costs, poet_jax.Budget(1))
        return
    plan = attempt(poet_jax.MilpPlanner(**{pin: (pattern,)}), graph, costs, budget)
    if not isinstance(plan, poet_jax.Plan):
        return
    free = attempt(poet_jax.MilpPlanner(), graph, costs, budget)
    assert free.bound <= plan.objective * (1 + 1e-9)
    runs = [a.node for a in plan.actions if isinstance(a, poet_jax.core.Compute)]
    repeated = {v for n in runs if runs.count(n) > 1 for v in graph.nodes[n].writes}
    paged = {a.value for a in plan.actions if isinstance(a, poet_jax.core.PageIn)}
    paged -= {*graph.stored, *graph.landing}
    assert pin == "never_remat" or pinned.isdisjoint(paged)
    assert pin == "never_page" or pinned.isdisjoint(repeated)


def large_step():
    """AdamW of eight layers, whose state a budget of half has hardly room for."""
    optimizer = optax.adamw(1e-3)

    def step(state, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        weights, moments = state
        value, gradients = jax.value_and_grad(loss)(weights)
        changes, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, changes), moments), value

    keys = jax.random.split(jax.random.key(0), 8)
    weights = [jax.random.normal(key, (512, 512)) / 20 for key in keys]
    return step, (weights, optimizer.init(weights)), jnp.ones((2048, 512))


def in_late_order(graph, costs, budget):
    """A greedy plan in which what nobody reads, as new state, is computed last."""

    def is_unread(number):
        return not any(graph.readers[v] for v in graph.nodes[number].writes)

    numbers = sorted(range(len(graph.nodes)), key=lambda n: (is_unread(n), n))
    assert numbers != sorted(numbers)
    nodes = tuple(graph.nodes[number] for number in numbers)
    moved = dataclasses.replace(graph, nodes=nodes)
    plan = poet_jax.greedy(moved, costs.of(numbers, range(len(graph.values))), budget)
    return renumbered(plan, numbers)


def test_a_step_runs_in_the_order_of_its_plan(tmp_path):
    step, state, x = large_step()
    options = dict(donate_argnums=0, device=poet_jax.devices.JETSON_TX2)
    scheduled = poet_jax.schedule(step, "75%", planner=in_late_order, **options)
    schedule = scheduled.plan(state, x)
    assert list(schedule.plan.order) != sorted(schedule.plan.order)
    assert schedule.plan.objective == pytest.approx(schedule.usage.joules)
    schedule.to_json(tmp_path / "plan.json")
    again = schedule.from_json(tmp_path / "plan.json")
    assert again.plan == schedule.plan
    assert again.usage.joules == schedule.usage.joules
    assert len(schedule.reasons()) == len(schedule.graph.values)

    expected = jax.jit(step)(state, x)
    result = scheduled(jax.tree.map(jnp.copy, state), x)
    for a, b in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert scheduled.last_run.peak_bytes <= schedule.budget.memory_bytes


def test_a_plan_in_another_order_is_no_start_and_does_no_harm():
    """Of one in the graph's own order the planner ends no worse than it starts."""
    step, state, x = large_step()
    jitted = jax.jit(step, donate_argnums=0)
    graph = poet_jax.passes.reorder(
        poet_jax.passes.group(poet_jax.trace(jitted, state, x))
    )
    costs = poet_jax.price(graph, poet_jax.devices.JETSON_TX2)
    budget = poet_jax.Budget(peak_bytes(graph, costs) // 2)
    planner = poet_jax.MilpPlanner(time_limit_seconds=1, progress=False)
    for start in (in_late_order, poet_jax.greedy):
        given = start(graph, costs, budget)
        plan = planner(graph, costs, budget, given)
        assert list(plan.order) == sorted(plan.order)
        assert plan.bound <= plan.objective
        assert start is in_late_order or plan.objective <= given.objective
        usage = poet_jax.simulate(poet_jax.lower(graph, plan), costs)
        assert usage.peak_bytes <= budget.memory_bytes
        assert usage.joules == pytest.approx(plan.objective)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_planning_leaves_collections_as_the_user_has_them(enabled, share):
    """Also where it raises BudgetTooSmall."""
    graph, costs = twelve_nodes()
    budget = poet_jax.Budget(int(share * peak_bytes(graph, costs)))
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        found = attempt(poet_jax.MilpPlanner(), graph, costs, budget)
        assert gc.isenabled() == enabled
        assert isinstance(found, poet_jax.Plan) == (share > 0.5)
    finally:
        gc.enable() if before else gc.disable()


@given(case=graphs())
def test_a_planner_without_switches_plans_the_graph_itself(case):
    """With what is known of it: who reads what, and what may be written over."""
    graph, _ = case
    assert poet_jax.MilpPlanner().restrict(graph) is graph
    fixed = poet_jax.MilpPlanner(remat=False).restrict(graph)
    assert not any(node.repeatable for node in fixed.nodes)
    assert any(node.repeatable for node in graph.nodes) == (fixed is not graph)
