"""The laws of the design, section 9, over random graphs and random programs."""

import functools
import json
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DEVICE,
    HEURISTICS,
    PLANNERS,
    attempt,
    brute_force,
    budgeted_graphs,
    examples,
    graphs,
    peak_bytes,
    programs,
    solvers,
)

import poet_jax
from poet_jax.api.planning import make_schedule
from poet_jax.core.plan import Stages, plan_from_dict, plan_to_dict
from poet_jax.planners.milp.exact import Exact
from poet_jax.planners.milp.lift import values_of
from poet_jax.planners.milp.state import State
from poet_jax.planners.planner import (
    judge,
    keep_everything,
    least_objective,
    prefetch,
)

by_planner = pytest.mark.parametrize("name", PLANNERS)
by_solver = pytest.mark.parametrize("solver", ["CBC", "HIGHS"])
relative = 1e-9


def simulated(graph, costs, plan):
    return poet_jax.simulate(poet_jax.lower(graph, plan), costs)


# Laws 2, 3 and the bound of 4, for every planner.


@by_planner
@examples(90)
@given(case=budgeted_graphs())
def test_a_plan_fits_and_costs_what_it_says(name, case):
    graph, costs, budget = case
    plan = attempt(PLANNERS[name], graph, costs, budget)
    if isinstance(plan, poet_jax.BudgetTooSmall):
        assert plan.smallest_bytes > budget
        return
    usage = simulated(graph, costs, plan)
    assert usage.peak_bytes <= budget
    assert plan.objective == pytest.approx(usage.joules, rel=relative)
    assert plan.bound <= plan.objective
    assert plan.gap == pytest.approx(1 - plan.bound / plan.objective)


@by_solver
@examples(60)
@given(case=budgeted_graphs(), late=st.floats(1.0, 1.5), store_bytes=st.integers(0, 20))
def test_deadline_room_on_storage_and_time_are_kept(solver, case, late, store_bytes):
    graph, costs, memory = case
    seconds = late * least_objective(graph, costs, "time")
    budget = poet_jax.Budget(memory, seconds, store_bytes)
    plan = attempt(solvers(objective="time")[solver], graph, costs, budget)
    if isinstance(plan, poet_jax.BudgetTooSmall):
        return
    usage = simulated(graph, costs, plan)
    assert usage.peak_bytes <= memory
    assert usage.seconds <= seconds
    assert usage.store_bytes <= store_bytes
    assert plan.objective == pytest.approx(usage.seconds, rel=relative)


@pytest.mark.parametrize("objective", ["time", "energy"])
@examples(60)
@given(case=budgeted_graphs(), late=st.floats(1.0, 1.5), fewer=st.integers(0, 4))
def test_no_plan_that_is_in_time_is_below_the_bound(objective, case, late, fewer):
    """Nor does more memory lose a plan, or make it dearer."""
    graph, costs, memory = case
    seconds = late * least_objective(graph, costs, "time")
    planner = solvers(objective=objective)["CBC"]
    plan = attempt(planner, graph, costs, poet_jax.Budget(memory, seconds))
    leaner = poet_jax.Budget(max(1, memory - fewer * 2**20), seconds)
    others = [attempt(planner, graph, costs, leaner)]
    others += [attempt(x, graph, costs, memory) for x in PLANNERS.values()]
    for other in others:
        if isinstance(other, poet_jax.BudgetTooSmall):
            continue
        usage = simulated(graph, costs, other)
        if usage.seconds <= seconds:
            assert isinstance(plan, poet_jax.Plan)
            value = usage.seconds if objective == "time" else usage.joules
            assert plan.bound <= value * (1 + relative)
            if plan.status is poet_jax.Status.OPTIMAL:
                assert plan.objective <= value * (1 + 1e-6)


def random_plan(rng, graph, costs):
    """A plan of no planner: page-ins and repeats wherever a base node reads."""
    stages = Stages.empty(graph)
    for stage, node in enumerate(graph.nodes):
        for v in set(node.reads) - graph.pinned:
            producer = graph.producer.get(v, -1)
            if producer >= stage - 1 or rng.random() < 0.4:
                continue
            again = producer >= 0 and graph.nodes[producer].repeatable
            if again and graph.pinned.issuperset(graph.nodes[producer].reads):
                stages.reruns[stage].add(producer)
            elif graph.values[v].pageable and graph.values[v].nbytes:
                stages.page_ins[stage].add(v)
                stages.page_outs.add(v)
        for again in stages.reruns[stage]:
            stages.page_ins[stage] -= set(graph.nodes[again].writes)
    judged = judge(graph, costs, stages.actions(graph))
    return prefetch(costs, judged, poet_jax.Budget(max(judged.usage.peak_bytes, 1)))


@pytest.mark.parametrize("objective", ["time", "energy"])
@examples(60)
@given(case=graphs(stored=False), seed=st.integers(0, 99), hurried=st.booleans())
def test_no_random_plan_is_below_the_bound(objective, case, seed, hurried):
    """Within its memory and, at times, its seconds, of which many are waiting."""
    graph, costs = case
    usage = random_plan(np.random.default_rng(seed), graph, costs).usage
    seconds = usage.seconds if hurried else None
    budget = poet_jax.Budget(max(usage.peak_bytes, 1), seconds)
    plan = attempt(solvers(objective=objective)["CBC"], graph, costs, budget)
    assert isinstance(plan, poet_jax.Plan)
    value = usage.seconds if objective == "time" else usage.joules
    assert plan.bound <= value * (1 + relative)


@examples(200)
@given(case=graphs(stored=False), seed=st.integers(0, 99))
def test_no_random_plan_breaks_a_row_about_stalls(case, seed):
    graph, costs = case
    plan = random_plan(np.random.default_rng(seed), graph, costs)
    budget = poet_jax.Budget(max(plan.usage.peak_bytes, 1), plan.usage.seconds)
    state = State(poet_jax.MilpPlanner(), graph, costs, budget, 1.0)
    program = Exact(state)
    values = np.zeros(len(program.model.upper))
    for y, value in values_of(program, plan):
        values[y.idx] = value
    for constant, terms in program.stalls(values):
        least = constant + sum(n * values[y.idx] for n, y in terms)
        assert least <= plan.usage.seconds * (1 + relative)


@examples(90)
@given(case=budgeted_graphs(min_nodes=5, max_nodes=8))
def test_the_published_planner_says_what_its_plan_costs_or_is_refused(case):
    graph, costs, budget = case
    planner = poet_jax.PaperPlanner("HIGHS", time_limit_seconds=20)
    plan = attempt(planner, graph, costs, budget)
    if isinstance(plan, poet_jax.BudgetTooSmall):
        return
    usage = simulated(graph, costs, plan)
    assert plan.objective == pytest.approx(usage.joules, rel=relative)
    if usage.peak_bytes > budget:
        with pytest.raises(poet_jax.PlanInvalid):
            make_schedule(graph, costs, budget, lambda *_: plan)


@by_solver
@examples(50)
@given(case=budgeted_graphs(), remat=st.booleans())
def test_a_forbidden_means_is_not_used(solver, case, remat):
    graph, costs, budget = case
    planner = solvers(remat=remat, paging=not remat)[solver]
    plan = attempt(planner, graph, costs, budget)
    if isinstance(plan, poet_jax.BudgetTooSmall):
        return
    program = poet_jax.lower(graph, plan)
    assert remat or program.recomputed == 0
    at_home = {*graph.stored, *graph.landing}
    assert not remat or at_home.issuperset(program.last_page_in)


# Law 4.


@examples(120)
@given(case=budgeted_graphs(max_nodes=5, static_watts=(0.0,)))
def test_optimal_is_what_brute_force_finds(case):
    graph, costs, budget = case
    expected = brute_force(graph, costs, budget)
    for planner in solvers().values():
        plan = attempt(planner, graph, costs, budget)
        if expected is None:
            assert isinstance(plan, poet_jax.BudgetTooSmall)
            continue
        assert isinstance(plan, poet_jax.Plan)
        assert plan.status is poet_jax.Status.OPTIMAL
        assert plan.objective == pytest.approx(expected, rel=relative)
        assert plan.bound <= expected * (1 + relative)


@examples(90)
@given(case=budgeted_graphs())
def test_no_heuristic_beats_optimal_and_the_solvers_agree(case):
    graph, costs, budget = case
    cbc, highs = (attempt(p, graph, costs, budget) for p in solvers().values())
    assert type(cbc) is type(highs)
    heuristics = [attempt(h, graph, costs, budget) for h in HEURISTICS.values()]
    found = [x.objective for x in heuristics if isinstance(x, poet_jax.Plan)]
    if isinstance(cbc, poet_jax.BudgetTooSmall):
        assert not found
        return
    for plan in (cbc, highs):
        # `bound` holds for every plan, whatever the status of this one.
        assert plan.bound <= min([*found, cbc.objective, highs.objective]) * (
            1 + relative
        )
        if plan.status is poet_jax.Status.OPTIMAL:
            assert plan.objective <= min(found, default=math.inf) * (1 + 1e-6)
    if cbc.status is highs.status is poet_jax.Status.OPTIMAL:
        assert cbc.objective == pytest.approx(highs.objective, rel=1e-6)


# Law 5.


@by_planner
@examples(60)
@given(case=budgeted_graphs(), more=st.integers(1, 12))
def test_more_budget_never_costs_more(name, case, more):
    graph, costs, budget = case
    less = attempt(PLANNERS[name], graph, costs, budget)
    more = attempt(PLANNERS[name], graph, costs, budget + more)
    if isinstance(less, poet_jax.BudgetTooSmall):
        return
    assert isinstance(more, poet_jax.Plan)
    if name in HEURISTICS or more.status is poet_jax.Status.OPTIMAL:
        assert more.objective <= less.objective * (1 + relative)


@by_planner
@examples(60)
@given(case=graphs())
def test_keep_alls_peak_is_enough_for_keep_all(name, case):
    graph, costs = case
    plan = PLANNERS[name](graph, costs, poet_jax.Budget(peak_bytes(graph, costs) or 1))
    assert graph.successors or poet_jax.lower(graph, plan).recomputed == 0
    everything = keep_everything(graph, costs).usage.joules
    assert plan.objective <= everything * (1 + relative)
    if not (graph.stored or graph.landing):  # else it may load earlier
        assert everything == least_objective(graph, costs, "energy")
        assert plan.objective == everything


# Law 6.


@by_planner
@examples(90)
@given(case=graphs())
def test_the_smallest_budget_works_and_one_byte_less_does_not(name, case):
    graph, costs = case
    error = attempt(PLANNERS[name], graph, costs, 1)
    if isinstance(error, poet_jax.Plan):
        return
    smallest = error.smallest_bytes
    assert simulated(graph, costs, error.plan).peak_bytes == smallest
    plan = attempt(PLANNERS[name], graph, costs, smallest)
    assert isinstance(plan, poet_jax.Plan)
    assert simulated(graph, costs, plan).peak_bytes <= smallest
    assert error.values
    if error.exact and smallest > 1:
        less = attempt(PLANNERS[name], graph, costs, smallest - 1)
        assert isinstance(less, poet_jax.BudgetTooSmall)


@by_solver
@examples(90)
@given(case=graphs(max_nodes=5, static_watts=(0.0,)))
def test_what_is_called_exact_is_so_by_brute_force(solver, case):
    graph, costs = case
    error = attempt(solvers()[solver], graph, costs, 1)
    if isinstance(error, poet_jax.Plan):
        return
    assert brute_force(graph, costs, error.smallest_bytes) is not None
    if error.exact:
        assert brute_force(graph, costs, error.smallest_bytes - 1) is None
    else:
        pytest.fail("a graph this small must be decided exactly")


# Law 8.


@by_planner
@examples(60)
@given(case=budgeted_graphs())
def test_plans_survive_json(name, case):
    graph, costs, budget = case
    plan = attempt(PLANNERS[name], graph, costs, budget)
    if isinstance(plan, poet_jax.Plan):
        text = json.dumps(plan_to_dict(graph, plan))
        assert plan_from_dict(graph, json.loads(text)) == plan


@by_solver
@examples(30)
@given(case=budgeted_graphs())
def test_the_same_inputs_give_the_same_plan(solver, case):
    graph, costs, budget = case
    first, second = (attempt(solvers()[solver], graph, costs, budget) for _ in range(2))
    assert type(first) is type(second)
    if isinstance(first, poet_jax.Plan):
        assert first.actions == second.actions


# Laws 1 and 7, by running programs.


RUNNABLE = HEURISTICS | {
    "CBC": poet_jax.MilpPlanner("CBC", time_limit_seconds=3),
    "HIGHS": poet_jax.MilpPlanner("HIGHS", time_limit_seconds=3),
}


def check_run(fun, args, store, planner, budget, trace=False):
    """A step within the budget, or the smallest that works, against `jax.jit`.

    `trace`: only in stages, also where jax.jit's own program needs less.
    """
    executor = poet_jax.HostExecutor(store, trace=trace)
    make = functools.partial(
        poet_jax.schedule,
        fun,
        device=DEVICE,
        planner=planner,
        executor=executor,
        passes=(poet_jax.passes.group, poet_jax.passes.reorder),
    )
    scheduled = make(budget)
    try:
        planned = scheduled.plan(*args)
    except poet_jax.BudgetTooSmall as error:
        scheduled = make(error.smallest_bytes)
        planned = scheduled.plan(*args)
    assert planned.compiled_bytes <= planned.budget.memory_bytes
    expected = jax.jit(fun)(*args)
    results = [scheduled(*args) for _ in range(2)]
    for a, b, c in zip(*map(jax.tree.leaves, (*results, expected)), strict=True):
        np.testing.assert_array_equal(a, b)  # one plan's results are the same bits
        np.testing.assert_allclose(a, c, rtol=2e-4, atol=1e-5)
    run = scheduled.last_run
    assert run.peak_bytes == planned.compiled_bytes
    assert run.recomputed == planned.program.recomputed
    assert run.bytes_paged_in == planned.usage.bytes_paged_in
    assert run.bytes_paged_out == planned.usage.bytes_paged_out
    assert store.nbytes == 0
    return planned


@examples(8)
@given(
    case=programs(max_operations=3),
    name=st.sampled_from(list(RUNNABLE)),
    percent=st.integers(40, 110),
    file=st.booleans(),
)
def test_random_programs_run_within_the_budget_with_the_same_numbers(
    case, name, percent, file
):
    store = poet_jax.FileStore() if file else poet_jax.HostStore()
    check_run(*case, store, RUNNABLE[name], f"{percent}%")


@examples(2)
@given(case=programs(max_operations=3))
def test_the_published_planners_plans_run_too(case):
    planner = poet_jax.PaperPlanner("HIGHS", time_limit_seconds=10)
    check_run(*case, poet_jax.HostStore(), planner, "85%")


def nnx_step():
    """A step of an nnx MLP by SGD, as a function of arrays."""
    from flax import nnx

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(48, 64, rngs=rngs)
            self.second = nnx.Linear(64, 64, rngs=rngs)
            self.third = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x):
            return self.third(nnx.gelu(self.second(nnx.gelu(self.first(x)))))

    graphdef, state = nnx.split(Mlp(nnx.Rngs(0)))

    def step(state, x, y):
        def loss(state):
            logits = nnx.merge(graphdef, state)(x)
            return ((logits - y) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    key = jax.random.key(1)
    return step, (state, jax.random.normal(key, (256, 48)), jax.numpy.ones((256, 10)))


def linen_step():
    """A step of a linen CNN with dropout by SGD, as a function of arrays."""
    import flax.linen as nn

    class Cnn(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(8, (3, 3))(x))
            x = nn.Dropout(0.3, deterministic=False)(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
            x = nn.gelu(nn.Conv(8, (3, 3))(x))
            return nn.Dense(10)(x.reshape(len(x), -1))

    model, key = Cnn(), jax.random.key(0)
    x = jax.random.normal(key, (8, 16, 16, 3))
    params = model.init({"params": key, "dropout": key}, x)

    def step(params, x, key):
        def loss(params):
            return (model.apply(params, x, rngs={"dropout": key}) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step, (params, x, key)


@pytest.mark.parametrize(
    ("make", "name"),
    [(nnx_step, "paging_only"), (nnx_step, "HIGHS"), (linen_step, "greedy")],
)
def test_flax_models_run_within_the_budget_with_the_same_numbers(make, name, tmp_path):
    store = poet_jax.FileStore(tmp_path)
    planned = check_run(*make(), store, RUNNABLE[name], "5%", trace=True)
    assert planned.program.recomputed or planned.usage.bytes_paged_in


def test_a_schedule_survives_json(tmp_path):
    def loss(x, w):
        for _ in range(6):
            x = jax.numpy.sin(x @ w)
        return x.sum()

    args = jax.numpy.ones((256, 64)), jax.numpy.ones((64, 64))
    scheduled = poet_jax.schedule(
        jax.grad(loss), "60%", device=DEVICE, planner=poet_jax.greedy
    )
    before = scheduled.plan(*args)
    assert before.usage.bytes_paged_in or before.program.recomputed
    before.to_json(tmp_path / "schedule.json")
    after = before.from_json(tmp_path / "schedule.json")
    assert after.plan == before.plan
    assert after.budget == before.budget
    assert str(after.program) == str(before.program)
    assert after.usage.joules == before.usage.joules
    assert after.usage.peak_bytes == before.usage.peak_bytes
    other = poet_jax.schedule(
        lambda x: x + 1, 10**6, device=DEVICE, planner=poet_jax.keep_all
    )
    with pytest.raises(poet_jax.PlanInvalid):
        other.plan(args[0]).from_json(tmp_path / "schedule.json")
