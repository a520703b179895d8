"""The program of cuts: its minimum is a bound, and its solutions become real plans."""

import gc
import math
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    attempt,
    brute_force,
    budgeted_graphs,
    examples,
    graphs,
    peak_bytes,
)
from toy import long_chain, twelve_nodes

import poet_jax
from experiments.steps import BENCHMARK_DEVICE, COARSE, skips_case, traced
from poet_jax.planners.milp import solver as solvers
from poet_jax.planners.milp.bounds import Bounds
from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.milp.lift import crests, lifted, repeats, values_of
from poet_jax.planners.milp.neighbourhoods import Neighbourhoods
from poet_jax.planners.milp.rounds import Rounds
from poet_jax.planners.milp.state import State
from poet_jax.planners.planner import fits, judge_plan, keep_everything

by_solver = pytest.mark.parametrize("solver", ["CBC", "HIGHS"])


def solved(program):
    """(plan or None, a lower bound in the objective's unit)."""
    program.model.gap = 1e-9
    solution = program.model.optimize(20.0)
    judged = None if solution.values is None else lifted(program, solution.values)
    return judged, solution.bound * program.unit


@by_solver
@examples(60)
@given(
    case=budgeted_graphs(max_nodes=5, static_watts=(0.0,)),
    cuts=st.sets(st.integers(0, 4), min_size=1),
    remat=st.booleans(),
    paging=st.booleans(),
)
def test_no_plan_costs_less_than_the_bound_wherever_the_cuts_are(
    solver, case, cuts, remat, paging
):
    graph, costs, budget = case
    cuts = {cut for cut in cuts if cut < len(graph.nodes)} or {0}
    planner = poet_jax.MilpPlanner(solver, remat=remat, paging=paging)
    allowed = planner.restrict(graph)
    program = Cuts(allowed, costs, poet_jax.Budget(budget), planner, cuts)
    judged, bound = solved(program)
    assert judged is None or program.relaxed(20.0) <= bound * (1 + 1e-6)
    if remat and paging:
        least = brute_force(graph, costs, budget)
        assert least is None or bound <= least * (1 + 1e-6)
        if judged is not None and fits(judged.usage, poet_jax.Budget(budget)):
            assert judged.usage.joules >= least * (1 - 1e-9)
    if judged is None:
        return
    # `judge` has lowered and simulated it, so it is a plan; it keeps what was asked.
    assert remat or judged.program.recomputed == 0
    at_home = {*graph.stored, *graph.landing}
    assert paging or at_home.issuperset(judged.program.last_page_in)


@by_solver
@examples(25)
@given(case=budgeted_graphs(max_nodes=6, static_watts=(0.0,)), seed=st.integers(0))
def test_few_cuts_bound_every_plan_and_say_as_much_as_any_one(solver, case, seed):
    graph, costs, memory_bytes = case
    budget = poet_jax.Budget(memory_bytes)
    planner = poet_jax.MilpPlanner(solver, time_limit_seconds=400.0)
    parts = graph, costs, budget, planner
    cuts = {cut for cut in range(len(graph.nodes)) if seed >> cut & 1} or {0}
    state = State(planner, graph, costs, budget, 400.0)
    state.cuts |= cuts
    bounds = Bounds(state)
    found = [bound for bound, _ in bounds]
    least = brute_force(graph, costs, memory_bytes)
    assert least is None or max(found, default=0.0) <= least * (1 + 1e-6)
    alone = max(Cuts(*parts, [cut]).relaxed(20.0) for cut in cuts)
    assert max(bounds.bound, *found) >= alone * (1 - 1e-6)
    assert len(bounds.chosen) == len({*bounds.chosen})


def test_with_all_windows_more_cuts_never_say_less():
    """A network of long skip connections; tiny graphs need no window."""
    graph = traced(skips_case(), "gradient", COARSE)
    costs = poet_jax.price(graph, BENCHMARK_DEVICE)
    memory_bytes = keep_everything(graph, costs).usage.peak_bytes // 4
    parts = graph, costs, poet_jax.Budget(memory_bytes), poet_jax.MilpPlanner()
    random = np.random.default_rng(0)
    for _ in range(12):
        more = random.choice(len(graph.nodes), 5, replace=False).tolist()
        few, many = (
            Cuts(*parts, cuts, windows=True).relaxed(20.0) for cuts in (more[:3], more)
        )
        assert few <= many * (1 + 1e-6)


def rounds_of(graph, costs, memory_bytes):
    budget = poet_jax.Budget(memory_bytes)
    state = State(poet_jax.MilpPlanner(), graph, costs, budget, 20.0)
    state.take_turn(1.0)
    return Rounds(state)


@examples(25)
@given(case=budgeted_graphs(min_nodes=8, max_nodes=12, static_watts=(0.0,)))
def test_rounds_prove_no_more_than_is_true(case):
    graph, costs, memory_bytes = case
    exact = attempt(poet_jax.MilpPlanner("HIGHS"), graph, costs, memory_bytes)
    for bound, judged in rounds_of(graph, costs, memory_bytes):
        if isinstance(exact, poet_jax.Plan):
            assert bound <= exact.objective * (1 + 1e-6)
        if judged and fits(judged.usage, poet_jax.Budget(memory_bytes)):
            assert judged.usage.joules >= exact.bound * (1 - 1e-6)


@examples(60)
@given(
    case=budgeted_graphs(min_nodes=6, max_nodes=12),
    cuts=st.sets(st.integers(0, 11), min_size=1, max_size=5),
    horizon=st.sampled_from([None, 1]),
    windows=st.booleans(),
    planner=st.sampled_from([poet_jax.greedy, poet_jax.MilpPlanner("HIGHS")]),
)
def test_what_a_plan_does_is_a_solution_that_costs_no_more(
    case, cuts, horizon, windows, planner
):
    """The claim of docs/explanation/formulation.md, and that it starts a solver."""
    graph, costs, memory_bytes = case
    budget = poet_jax.Budget(memory_bytes)
    plan = attempt(planner, graph, costs, budget)
    if not isinstance(plan, poet_jax.Plan):
        return
    judged = judge_plan(graph, costs, plan)
    cuts = {cut for cut in cuts if cut < len(graph.nodes)} or {0}
    again = repeats(judged, cuts)
    parts = graph, costs, budget, poet_jax.MilpPlanner("HIGHS"), cuts
    program = Cuts(*parts, horizon=horizon, again=again, windows=windows)
    values = {y.idx: value for y, value in values_of(program, judged)}
    solution = program.model.optimize(20.0, fixed=values)
    assert solution.values is not None
    assert all(solution.values[n] == value for n, value in values.items())
    least = solution.objective * program.unit
    assert least <= judged.usage.joules * (1 + 1e-6)


@examples(25)
@given(case=budgeted_graphs(), cuts=st.sets(st.integers(0, 8), min_size=1))
def test_a_program_is_gone_when_nobody_has_it(case, cuts):
    """Planning makes hundreds of them, and no garbage is collected meanwhile."""
    graph, costs, memory_bytes = case
    cuts = {cut for cut in cuts if cut < len(graph.nodes)} or {0}
    parts = graph, costs, poet_jax.Budget(memory_bytes), poet_jax.MilpPlanner(), cuts
    gc.disable()
    try:
        program = Cuts(*parts)
        assert program.model.rows
        model = weakref.ref(program.model)
        del program
        assert model() is None
    finally:
        gc.enable()


@examples(25)
@given(case=budgeted_graphs(min_nodes=8, max_nodes=12))
def test_parts_chosen_anew_make_a_plan_better_or_leave_it(case):
    graph, costs, memory_bytes = case
    budget = poet_jax.Budget(memory_bytes)
    exact = attempt(poet_jax.MilpPlanner("HIGHS"), graph, costs, budget)
    start = attempt(poet_jax.greedy, graph, costs, budget)
    if not isinstance(exact, poet_jax.Plan) or not isinstance(start, poet_jax.Plan):
        return
    state = State(poet_jax.MilpPlanner("HIGHS"), graph, costs, budget, 20.0)
    state.consider(judge_plan(graph, costs, start))
    state.cuts, first = {0}, state.least()
    state.take_turn(1.0)
    for bound, judged in Neighbourhoods(state):
        assert bound == 0.0
        if judged is not None:
            state.consider(judged)
    assert exact.bound * (1 - 1e-6) <= state.least() <= first


@pytest.mark.parametrize("objective, unit", [("energy", "joules"), ("time", "seconds")])
@examples(25)
@given(case=budgeted_graphs(min_nodes=4, max_nodes=12))
def test_no_plan_costs_more_than_greedys(objective, unit, case):
    graph, costs, memory_bytes = case
    budget = poet_jax.Budget(memory_bytes)
    planner = poet_jax.MilpPlanner("HIGHS", objective=objective)
    plans = [attempt(x, graph, costs, budget) for x in (planner, poet_jax.greedy)]
    if all(isinstance(plan, poet_jax.Plan) for plan in plans):
        usages = [
            poet_jax.simulate(poet_jax.lower(graph, plan), costs) for plan in plans
        ]
        ours, greedys = (getattr(usage, unit) for usage in usages)
        assert ours <= greedys * (1 + 2 * planner.gap)


@by_solver
@examples(30)
@given(
    case=budgeted_graphs(max_nodes=8),
    cuts=st.sets(st.integers(0, 7), min_size=1),
    data=st.data(),
)
def test_a_part_of_a_best_solution_leaves_it_the_best(solver, case, cuts, data):
    graph, costs, memory_bytes = case
    cuts = {cut for cut in cuts if cut < len(graph.nodes)} or {0}
    planner = poet_jax.MilpPlanner(solver)
    model = Cuts(graph, costs, poet_jax.Budget(memory_bytes), planner, cuts).model
    model.gap = 0.0
    best = model.optimize(20.0)
    if best.values is None:
        return
    binaries = [n for n, binary in enumerate(model.binary) if binary]
    chosen = data.draw(st.sets(st.sampled_from(binaries)) if binaries else st.just({}))
    kept = {n: float(round(best.values[n])) for n in chosen}
    again = model.optimize(20.0, fixed=kept)
    assert again.objective == pytest.approx(best.objective, rel=1e-6)
    if chosen:  # the other way round it can only cost more
        turned = kept | {min(chosen): 1 - kept[min(chosen)]}
        assert model.optimize(20.0, fixed=turned).objective >= best.objective * (
            1 - 1e-6
        )


def test_a_round_that_was_too_short_is_tried_again_for_longer():
    graph, costs = twelve_nodes()
    rounds = rounds_of(graph, costs, 40)
    before = rounds.seconds
    assert rounds.adapt(None, 0.0, stopped=True) and rounds.seconds > before
    before = rounds.seconds
    assert not rounds.adapt(None, 0.0, stopped=False) and rounds.seconds == before


@examples(60)
@given(
    case=budgeted_graphs(min_nodes=6, max_nodes=10, static_watts=(0.0,)),
    cuts=st.sets(st.integers(0, 9), min_size=2, max_size=4),
    remat=st.booleans(),
)
def test_what_the_exact_program_finds_is_no_cheaper_and_possible_here(
    case, cuts, remat
):
    graph, costs, budget = case
    planner = poet_jax.MilpPlanner("HIGHS", remat=remat)
    plan = attempt(planner, graph, costs, budget)
    if not isinstance(plan, poet_jax.Plan) or plan.status != poet_jax.Status.OPTIMAL:
        return
    cuts = {cut for cut in cuts if cut < len(graph.nodes)} or {0}
    allowed = planner.restrict(graph)
    program = Cuts(allowed, costs, poet_jax.Budget(budget), planner, cuts)
    judged, bound = solved(program)
    assert judged is not None
    assert bound <= plan.objective * (1 + 1e-6)


@by_solver
@examples(60)
@given(case=graphs(max_nodes=5, static_watts=(0.0,)), cut=st.integers(0, 4))
def test_no_plan_needs_less_memory_than_the_least_at_a_cut(solver, case, cut):
    graph, costs = case
    cut = min(cut, len(graph.nodes) - 1)
    planner = poet_jax.MilpPlanner(solver)
    program = Cuts(graph, costs, None, planner, {cut})
    judged, bound = solved(program)
    assert judged is not None
    peak = peak_bytes(graph, costs)
    below = math.ceil(bound * (1 - 1e-6)) - 1
    if 0 < below < peak:
        assert brute_force(graph, costs, below) is None


@examples(10)
@given(
    kinds=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(70, 90)),
        min_size=3,
        max_size=5,
    ),
    share=st.floats(0, 1.1),
    pairs=st.booleans(),
    gap=st.sampled_from([0.0, 1e-3]),
)
def test_the_solvers_agree_where_binaries_may_be_exchanged(kinds, share, pairs, gap):
    """A cover by items of a few kinds, (cost, size, how many); in pairs, the next item
    of the same kind excludes each second one."""
    solutions = []
    for name in ("CBC", "HIGHS"):
        model = solvers.Model(name, gap)
        items = [
            (cost, size, model.add_var(binary=True))
            for cost, size, count in kinds
            for _ in range(count)
        ]
        total = sum(size for _, size, _ in items)
        model += solvers.xsum(s * y for _, s, y in items) >= math.floor(share * total)
        if pairs:
            for (_, _, y), (_, _, z) in zip(items[::2], items[1::2], strict=False):
                model += y + z <= 1
        model.minimise(solvers.xsum(c * y for c, _, y in items) + 1000, least=1000.0)
        solutions.append(model.optimize(20.0))
    cbc, highs = solutions
    assert (cbc.values is None) == (highs.values is None)
    if cbc.values is not None:
        assert np.allclose(cbc.values, np.round(cbc.values), atol=1e-5)
        assert abs(cbc.objective - highs.objective) <= 1e-6 + 2 * gap * 1100
        assert cbc.bound <= highs.objective + 1e-6
    else:
        assert cbc.infeasible


@examples(60)
@given(case=graphs())
def test_the_highest_crest_is_the_peak(case):
    graph, costs = case
    judged = keep_everything(graph, costs)
    worst = crests(judged)
    assert len(worst) == len(graph.nodes)
    start = sum(int(costs.nbytes[v]) for v in graph.initial)
    assert max(start, *(live for live, _ in worst)) == judged.usage.peak_bytes
    assert all(node == stage for stage, (_, node) in enumerate(worst))


def test_a_long_chain_is_planned_within_a_percent_of_the_bound():
    graph, costs = long_chain()
    budget = int(0.6 * peak_bytes(graph, costs))
    plan = poet_jax.MilpPlanner()(graph, costs, poet_jax.Budget(budget))
    greedy = poet_jax.greedy(graph, costs, poet_jax.Budget(budget))
    assert plan.objective <= greedy.objective
    assert plan.gap <= 0.01


@pytest.mark.parametrize("late", [1.02, 1.05, 1.2])
def test_a_deadline_that_waiting_for_storage_would_miss_is_met(late):
    graph, costs = long_chain()
    memory_bytes = int(0.5 * peak_bytes(graph, costs))
    deadline = late * float(costs.seconds.sum())
    budget = poet_jax.Budget(memory_bytes, seconds=deadline)
    plan = poet_jax.MilpPlanner(time_limit_seconds=15)(graph, costs, budget)
    usage = poet_jax.simulate(poet_jax.lower(graph, plan), costs)
    assert fits(usage, budget) and usage.bytes_paged_in
    assert plan.gap <= 0.01
