"""The front of memory against cost: monotone, within its budgets, with a true bound."""

import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_three_sentences
from hypothesis import given
from hypothesis import strategies as st
from strategies import brute_force, examples, graphs
from toy import OPTIONS, W, X, gradient

import poet_jax
from poet_jax.planners.planner import keep_everything


@pytest.mark.parametrize(
    "planner", [poet_jax.MilpPlanner(time_limit_seconds=5), poet_jax.greedy]
)
@examples(15)
@given(case=graphs(max_nodes=7, static_watts=(0.0,)))
def test_more_memory_never_costs_more_and_the_ends_are_known(planner, case):
    graph, costs = case
    front = poet_jax.pareto(graph, costs, planner=planner)
    for point in front.points:
        assert point.usage.peak_bytes <= point.budget.memory_bytes
        assert point.plan.bound <= point.plan.objective
        assert point.usage.joules == pytest.approx(point.plan.objective, rel=1e-9)
    objectives = [point.plan.objective for point in front.points]
    assert objectives == sorted(objectives, reverse=True)
    budgets = [point.budget.memory_bytes for point in front.points]
    assert budgets == sorted(budgets) and budgets[0] == front.smallest_bytes
    assert front.least_bytes <= front.smallest_bytes
    assert objectives[-1] <= front.baseline.joules * (1 + 1e-9)
    if not graph.successors:  # else it may also keep state from step to step
        assert objectives[-1] == pytest.approx(front.baseline.joules)


@examples(15)
@given(case=graphs(max_nodes=5, static_watts=(0.0,)))
def test_every_bound_of_a_front_is_below_what_brute_force_finds(case):
    graph, costs = case
    front = poet_jax.pareto(graph, costs, ["60%", "80%"])
    for point in front.points:
        least = brute_force(graph, costs, point.budget.memory_bytes)
        assert least is not None and point.plan.bound <= least * (1 + 1e-6)
    if 1 < front.least_bytes:
        assert brute_force(graph, costs, front.least_bytes - 1) is None


@examples(15)
@given(case=graphs(max_nodes=6, static_watts=(0.0,)), room=st.integers(0, 20))
def test_no_point_needs_more_storage_than_the_device_has(case, room):
    graph, costs = case
    room += keep_everything(graph, costs).usage.store_bytes  # of what lives there
    front = poet_jax.pareto(graph, costs, store_bytes=room)
    assert all(point.usage.store_bytes <= room for point in front.points)
    assert front.points[-1].usage.joules <= front.baseline.joules * (1 + 1e-9)
    free = poet_jax.pareto(graph, costs)
    assert front.smallest_bytes >= free.least_bytes


@examples(25)
@given(
    case=graphs(max_nodes=6, static_watts=(0.0,)),
    late=st.lists(st.floats(1.0, 2.0), min_size=2, max_size=3),
)
def test_every_point_keeps_its_deadline(case, late):
    graph, costs = case
    baseline = keep_everything(graph, costs).usage
    budgets = [
        poet_jax.Budget(baseline.peak_bytes + n % 2, factor * baseline.seconds + 1e-9)
        for n, factor in enumerate(late)
    ]
    front = poet_jax.pareto(graph, costs, budgets)
    assert {*budgets} <= {point.budget for point in front.points} | {
        budget for budget in budgets if budget.memory_bytes <= front.smallest_bytes
    }
    for point in front.points:
        limit = point.budget.seconds
        assert limit is None or point.usage.seconds <= limit * (1 + 1e-9)
        least = brute_force(graph, costs, point.budget.memory_bytes)
        assert limit is not None or point.plan.bound <= least * (1 + 1e-6)


def test_a_deadline_that_the_last_plan_misses_has_a_plan_of_its_own():
    """The cheapest plan of the smallest memory repeats much; the next one may not."""
    schedule = poet_jax.schedule(gradient, "1GiB", **OPTIONS).plan(W, X)
    graph, costs, most = schedule.graph, schedule.costs, schedule.baseline
    free = poet_jax.pareto(graph, costs, ["100%"])
    between = (free.smallest_bytes + most.peak_bytes) // 2
    slow = free.points[0].usage.seconds
    assert slow > 1.001 * most.seconds
    budgets = [between, poet_jax.Budget(between + 1, seconds=most.seconds)]
    budgets.append(poet_jax.Budget(most.peak_bytes, seconds=most.seconds))
    front = poet_jax.pareto(graph, costs, budgets)
    for point in front.points:
        limit = point.budget.seconds
        assert limit is None or point.usage.seconds <= limit * (1 + 1e-9)


def test_a_function_has_a_front_that_prints_and_plots(tmp_path):
    scheduled = poet_jax.schedule(gradient, "1GiB", **OPTIONS)
    front = scheduled.pareto(W, X, budgets=["1B", "70%", "100%"])
    assert len(front.points) == 3  # "1B" is below the smallest, which comes first
    text = str(front)
    assert "keep-all" in text and "smallest budget" in text
    assert text.count("OPTIMAL") + text.count("FEASIBLE") + text.count("HEUR") >= 3
    front.plot(tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000


WITHOUT_COST = {
    "identity": (lambda x: x, X),
    "constant": (lambda: jnp.ones(3),),
    "no bytes": (lambda x: x * 2, jnp.ones((0, 5))),
    "nothing": (lambda: None,),
}


@pytest.mark.parametrize("budgets", [None, ["50%", "100%"]])
@pytest.mark.parametrize("step", WITHOUT_COST.values(), ids=WITHOUT_COST)
def test_a_step_that_costs_nothing_has_a_front(step, budgets, tmp_path):
    fun, *args = step
    front = poet_jax.schedule(fun, "100%", **OPTIONS).pareto(*args, budgets=budgets)
    assert {point.usage.joules for point in front.points} == {front.baseline.joules}
    most_bytes = max(1, front.baseline.peak_bytes)
    assert front.points[-1].budget.memory_bytes == most_bytes
    assert "+0.0% s, +0.0% J" in str(front) and "<svg" in front._repr_html_()
    front.plot(tmp_path / "front.svg")
    assert "</svg>" in (tmp_path / "front.svg").read_text()


@pytest.mark.parametrize("planner", [None, poet_jax.greedy])
def test_the_smallest_budget_may_be_one_byte(planner):
    """The first node runs again after the second, whose result nothing reads."""
    values = tuple(poet_jax.core.Value(f"v{n}", int(n < 2)) for n in range(3))
    reads = (), (), (0,)
    nodes = [poet_jax.core.Node(f"n{n}", r, (n,)) for n, r in enumerate(reads)]
    zeros = np.zeros(3)
    nbytes = np.array([1, 1, 0])
    costs = poet_jax.Costs(zeros, zeros, 0 * nbytes, nbytes, *(zeros,) * 4)
    front = poet_jax.pareto(poet_jax.Graph(values, tuple(nodes)), costs, None, planner)
    assert front.baseline.peak_bytes == 2
    assert front.smallest_bytes == front.least_bytes == 1


def test_what_a_device_has_free_is_a_budget_of_a_function():
    """A graph and its costs are on no device."""
    scheduled = poet_jax.schedule(gradient, "1GiB", **OPTIONS)
    front = scheduled.pareto(W, X, budgets=["device"])
    assert front.points[-1].usage.joules == front.baseline.joules
    assert front.points[-1].budget.memory_bytes > front.baseline.peak_bytes
    schedule = scheduled.plan(W, X)
    with pytest.raises(ValueError, match="are on no device") as caught:
        poet_jax.pareto(schedule.graph, schedule.costs, ["50%", "device"])
    assert_three_sentences(caught.value, '["64MiB"]', 'schedule(fun, "device")')
    with pytest.raises(ValueError, match=r"budgets=\['device'\]"):
        scheduled.pareto(W, X, budgets="device")
