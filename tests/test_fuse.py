"""Runs of nodes as one executable: the same numbers, time and transfers within the
budget; and the whole step as `jax.jit` where the budget covers that."""

import dataclasses
import gc
import itertools
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DEVICE, HEURISTICS, attempt, peak_bytes, programs
from toy import W, X, gradient, loss

import poet_jax
from poet_jax import compile, heap
from poet_jax.compile import Executable, Unit
from poet_jax.fuse import fuse, scratch_bytes
from poet_jax.plan import PageIn, PageOut
from poet_jax.program import (
    Fused,
    computed,
    program_from_list,
    program_to_list,
)
from poet_jax.simulate import expected_seconds
from poet_jax.timing import time_units

MEASURED = dataclasses.replace(DEVICE, measured=True)
MILP = poet_jax.MilpPlanner(time_limit_seconds=3)
GENEROUS = {"device": DEVICE, "planner": poet_jax.greedy}


def assert_close(left, right):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), left, right
    )


def transfers(program):
    return [x for x in program.instructions if isinstance(x, PageIn | PageOut)]


def donating(step):
    """`step` of (weights, x) with its weights donated, and fresh arguments for it."""
    return jax.jit(step, donate_argnums=0)


@settings(max_examples=12)
@given(case=programs())
def test_fusing_changes_memory_within_the_budget_and_nothing_else(case):
    step, args = case
    expected = jax.jit(step)(*args)
    graph = poet_jax.order(poet_jax.coarsen(poet_jax.trace(donating(step), *args)))
    costs = poet_jax.price(graph, DEVICE)
    for planner in (*HEURISTICS.values(), MILP):
        for share in (0.6, 0.8, 1.0, 1.3):
            memory = int(share * peak_bytes(graph, costs))
            plan = attempt(planner, graph, costs, memory)
            if isinstance(plan, poet_jax.BudgetTooSmall):
                continue
            program = poet_jax.lower(graph, plan)
            fused = fuse(program, costs, memory)
            before, after = (poet_jax.simulate(p, costs) for p in (program, fused))
            assert after.peak_bytes <= memory
            assert after.seconds <= before.seconds * (1 + 1e-9)
            assert after.joules <= before.joules * (1 + 1e-9)
            assert after.store_bytes <= before.store_bytes
            assert transfers(fused) == transfers(program)
            nodes = [[n for x in p.instructions for n in computed(x)]
                     for p in (program, fused)]  # fmt: skip
            assert nodes[0] == nodes[1]
            runs = [x for x in fused.instructions if isinstance(x, Fused)]
            assert all(len(set(x.nodes)) == len(x.nodes) > 1 for x in runs)
            runner = poet_jax.HostExecutor(poet_jax.HostStore())(fused)
            outputs = runner(jax.tree.map(jnp.copy, args[0]), args[1])
            assert_close(outputs, expected)
            assert runner.last_run.peak_bytes == after.peak_bytes
            assert runner.last_run.bytes_paged_in == before.bytes_paged_in


@settings(max_examples=6)
@given(case=programs())
def test_runs_are_timed_on_this_machine_where_there_is_room(case):
    step, args = case
    expected = jax.jit(step)(*args)
    graph = poet_jax.order(poet_jax.coarsen(poet_jax.trace(donating(step), *args)))
    costs = poet_jax.price(graph, MEASURED)
    everything = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**30))
    program = poet_jax.lower(graph, everything)
    usage = poet_jax.simulate(program, costs)
    held = sum(graph.values[v].nbytes for v in graph.initial)
    for memory in (2**30, usage.peak_bytes):
        fused = fuse(program, costs, memory)
        seconds = 0.0
        for row, unit in fused.units.items():
            run = fused.instructions[row]
            time = costs.seconds[list(unit.nodes)].sum()
            if isinstance(run, Fused):
                taken = held + unit.nbytes(graph) + run.workspace_bytes
                assert run.seconds is not None or taken > memory
                time = min(time, run.seconds or time)
            seconds += time
        assert expected_seconds(fused, costs) == pytest.approx(seconds)
        assert poet_jax.simulate(fused, costs).seconds == pytest.approx(usage.seconds)
        again = program_from_list(fused.graph, program_to_list(fused))
        assert again.instructions == fused.instructions
    assert_close(poet_jax.HostExecutor()(fused)(*args), expected)


def test_runs_are_timed_one_after_the_other_within_the_memory(monkeypatch):
    """No arrays of one run are there while the next is timed."""

    def fun(x, ws):
        for number, w in enumerate(ws):  # each an executable of its own
            x = jnp.sin(jnp.tanh(x @ w) + number * x)
        return x

    args = jnp.ones((512, 96)), [jnp.ones((96, 96))] * 6
    graph = poet_jax.order(poet_jax.coarsen(poet_jax.trace(fun, *args)))
    costs = poet_jax.price(graph, MEASURED)
    memory = int(1.1 * peak_bytes(graph, costs))
    everything = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**30))
    program = poet_jax.lower(graph, everything)
    held = sum(graph.values[v].nbytes for v in graph.initial)
    most = 0

    def live_bytes():
        return sum(x.nbytes for x in jax.live_arrays())

    def watched(function):
        def call(*args, **kwargs):
            nonlocal most
            results = function(*args, **kwargs)
            most = max(most, live_bytes() - before)
            return results

        return call

    monkeypatch.setattr(Executable, "__call__", watched(Executable.__call__))
    monkeypatch.setattr(jnp, "zeros", watched(jnp.zeros))
    gc.collect()
    before = live_bytes()
    fused = fuse(program, costs, memory)
    assert any(x.seconds for x in fused.instructions if isinstance(x, Fused))
    assert 0 < most <= memory - held


@settings(max_examples=6)
@given(case=programs(), more=st.integers(2, 6))
def test_a_run_that_is_seen_to_take_more_than_its_nodes_has_room_for_it(case, more):
    """Libraries that XLA hands several operations to have scratch of their own."""
    step, args = case
    grown = more * 2**20
    graph = poet_jax.order(poet_jax.coarsen(poet_jax.trace(donating(step), *args)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "_executables", {})  # none has been seen before
        costs = poet_jax.price(graph, MEASURED)
        patch.setattr(heap, "growth_bytes", lambda run: grown)
        everything = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**30))
        program = poet_jax.lower(graph, everything)
        least = peak_bytes(graph, costs)
        for memory in (least, least + grown // 2, least + grown, 2**30):
            fused = fuse(program, costs, memory)
            assert poet_jax.simulate(fused, costs).peak_bytes <= memory
            runs = [x for x in fused.instructions if isinstance(x, Fused)]
            seen = [run for run in runs if run.seconds is not None]
            assert all(run.workspace_bytes >= grown for run in seen)
    assert seen == runs != []


def test_a_step_without_nodes_has_no_runs():
    graph = poet_jax.trace(lambda: ())
    costs = poet_jax.price(graph, MEASURED)
    plan = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**20))
    assert fuse(poet_jax.lower(graph, plan), costs, 2**20).instructions == ()


@pytest.mark.parametrize("room", [1, 2, 3, 7, 8, 9])
def test_where_there_is_little_room_operands_are_the_same_zeros(room, monkeypatch):
    """A unit that reads six arrays and writes two, with room for so many: for three it
    can be timed, and for less not."""
    size = 10_000 + room  # it is compiled, and not timed, for each room anew

    def fun(*xs):
        total = sum(jnp.sin(x) for x in xs)
        return total, jnp.cos(total)

    args = [jnp.ones(size)] * 6
    graph = poet_jax.coarsen(poet_jax.trace(fun, *args))
    unit = Unit(tuple(range(len(graph.nodes))), graph.arguments, graph.returned)
    most = 0

    def watched(self, *operands, into):
        nonlocal most
        results = call(self, *operands, into=into)
        distinct = {id(x): x for x in (*operands, *results)}
        most = max(most, sum(x.nbytes for x in distinct.values()))
        return results

    call = Executable.__call__
    monkeypatch.setattr(Executable, "__call__", watched)
    (seconds,) = time_units(graph, [unit], [room * args[0].nbytes])
    assert (seconds is not None) == (room >= 3)
    assert most == (0 if room < 3 else 3 if room < 8 else 8) * args[0].nbytes


@given(sizes=st.lists(st.integers(0, 9), max_size=6), cores=st.integers(1, 4))
def test_a_run_has_room_for_one_scratch_more_than_it_has_at_once(sizes, cores):
    """The heap keeps one that was freed, and the next may not fit it."""
    nodes = [types.SimpleNamespace(scratch_bytes=nbytes) for nbytes in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: cores)
        counted = scratch_bytes(nodes)
    largest = sorted(filter(None, sizes), reverse=True)
    at_once, others = largest[:cores], largest[cores:]
    one_more = others[0] if others else largest[0] if len(largest) > 1 else 0
    assert counted == sum(at_once) + one_more


def test_with_room_for_everything_all_nodes_are_one_run_that_updates_in_place():
    def step(state, x):
        value, slope = jax.value_and_grad(loss)(state["kernel"], x)
        momentum = 0.9 * state["momentum"] + slope
        return {"kernel": state["kernel"] - momentum, "momentum": momentum}, value

    state = {"kernel": W, "momentum": jnp.zeros_like(W)}
    graph = poet_jax.order(poet_jax.coarsen(poet_jax.trace(donating(step), state, X)))
    costs = poet_jax.price(graph, DEVICE)
    plan = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**30))
    (run,) = fuse(poet_jax.lower(graph, plan), costs, 2**30).instructions
    assert isinstance(run, Fused)
    replaced = {graph.values[old].name: new for old, new in run.replaces}
    kernel, momentum, _ = graph.outputs
    assert replaced == {"arg0/kernel": kernel, "arg0/momentum": momentum}


def test_a_budget_too_tight_for_any_run_leaves_the_program_as_it_is():
    graph = poet_jax.order(poet_jax.coarsen(poet_jax.trace(gradient, W, X)))
    costs = poet_jax.price(graph, DEVICE)
    plan = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**30))
    program = poet_jax.lower(graph, plan)
    assert fuse(program, costs, 1).instructions == program.instructions


def test_an_argument_given_twice_is_not_written_over_while_it_is_needed():
    def step(a, b):
        return jnp.tanh(a) * 2 + 1, jnp.sin(b).sum()

    traced = poet_jax.trace(jax.jit(step, donate_argnums=(0, 1)), X, X)
    graph = poet_jax.order(traced)  # an equation is a node
    costs = poet_jax.price(graph, DEVICE)
    plan = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**30))
    fused = fuse(poet_jax.lower(graph, plan), costs, 2**30)
    both = jnp.array(X)
    outputs = poet_jax.HostExecutor()(fused)(both, both)
    assert_close(outputs, jax.jit(step)(X, X))


def test_transfers_keep_their_order_and_none_is_later_than_it_was():
    graph = poet_jax.order(poet_jax.coarsen(poet_jax.trace(gradient, W, X)))
    costs = poet_jax.price(graph, DEVICE)
    budget = poet_jax.Budget(int(0.7 * peak_bytes(graph, costs)))
    program = poet_jax.lower(graph, poet_jax.paging_only(graph, costs, budget))
    assert program.last_page_in
    fused = fuse(program, costs, budget.memory_bytes)
    assert any(isinstance(x, Fused) for x in fused.instructions)
    assert transfers(fused) == transfers(program)

    def nodes_before(program):
        """How many nodes run before each transfer."""
        counts = itertools.accumulate(len(computed(x)) for x in program.instructions)
        rows = zip(counts, program.instructions, strict=True)
        return [count for count, x in rows if isinstance(x, PageIn | PageOut)]

    pairs = zip(nodes_before(fused), nodes_before(program), strict=True)
    assert all(after <= before for after, before in pairs)


@pytest.mark.parametrize("rows, runs", [(1024, 2), (16, 1)])
def test_a_run_ends_before_a_product_that_reads_what_it_made_across_its_rows(
    rows, runs
):
    def loss(w, x):
        return (jnp.tanh(x + 1) @ w).sum()

    args = jnp.ones((256, 64)), jnp.ones((rows, 256))
    traced = poet_jax.trace(jax.grad(loss), *args)
    graph = poet_jax.order(poet_jax.coarsen(traced))
    costs = poet_jax.price(graph, DEVICE)
    plan = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**30))
    program = poet_jax.lower(graph, plan)
    assert fuse(program, costs, 2**30).computes == runs


# The whole step.


def whole(fun, **options):
    return poet_jax.schedule(fun, "1GiB", **(GENEROUS | options))


def test_a_budget_above_what_jit_needs_runs_jit_to_the_bit():
    scheduled = whole(jax.value_and_grad(loss))
    for x in (X, X + 1):
        jax.tree.map(
            np.testing.assert_array_equal,
            scheduled(W, x),
            jax.jit(jax.value_and_grad(loss))(W, x),
        )
    schedule = scheduled.plan(W, X)
    assert len(schedule.program.instructions) == 1
    assert "as under jax.jit" in str(schedule)
    assert schedule.plan.status is poet_jax.Status.OPTIMAL
    assert scheduled.last_run.peak_bytes == schedule.usage.peak_bytes
    assert scheduled.last_run.seconds > 0


def test_the_peak_of_a_whole_step_is_xlas_own():
    jitted = jax.jit(gradient)
    analysis = jitted.lower(W, X).compile().memory_analysis()
    expected = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    exactly = poet_jax.schedule(gradient, expected, **GENEROUS)
    assert exactly.plan(W, X).usage.peak_bytes == expected
    less = poet_jax.schedule(gradient, expected - 1, **GENEROUS).plan(W, X)
    assert less.usage.peak_bytes < expected
    assert len(less.program.instructions) > 1


def test_its_plan_is_counted_in_the_planners_objective_also_from_a_cache(tmp_path):
    planner = poet_jax.MilpPlanner(objective="time")
    for cache in (None, tmp_path):
        schedule = whole(gradient, planner=planner, plan_cache=cache).plan(W, X)
        assert schedule.plan.objective == schedule.plan.bound
        assert schedule.plan.objective == pytest.approx(schedule.usage.seconds)


def test_other_shapes_are_planned_before_they_run_and_old_ones_stay_known(caplog):
    seen = []

    @poet_jax.schedule(budget="1GiB", static_argnames="power", **GENEROUS)
    def fun(x, power=1):
        seen.append(x.shape)
        return (x**power).sum()

    for shape in ((3,), (4,), (3,), (4,)):
        assert fun(jnp.full(shape, 2.0)) == 2 * shape[0]
    traced = len(seen)
    assert fun(jnp.full((3,), 2.0), power=2) == 12
    assert len(seen) > traced
    assert [r.getMessage() for r in caplog.records if "planning" in r.getMessage()]
    traced = len(seen)
    for shape, static in (((3,), {}), ((4,), {}), ((3,), {"power": 2})):
        value = fun(jnp.full(shape, 2.0), **static)
        assert value == 2 ** static.get("power", 1) * shape[0]
    assert len(seen) == traced


def test_a_step_that_does_not_fit_is_planned_after_one_that_did():
    """Two shapes in turn, of which only the small one runs as a whole."""
    small, large = X[:16], jnp.tile(X, (8, 1))
    analysis = jax.jit(gradient).lower(W, small).compile().memory_analysis()
    least = peak_of_leanest_plan(W, large)
    budget = max(least, analysis.temp_size_in_bytes + 4 * W.nbytes)
    scheduled = poet_jax.schedule(gradient, budget, **GENEROUS)
    for x in (small, large, small, large):
        assert_close(scheduled(W, x), jax.jit(gradient)(W, x))
        usage = scheduled.plan(W, x).usage
        assert scheduled.last_run.peak_bytes == usage.peak_bytes <= budget
    assert len(scheduled.plan(W, small).program.instructions) == 1
    assert len(scheduled.plan(W, large).program.instructions) > 1


def peak_of_leanest_plan(*args):
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        poet_jax.schedule(
            gradient, 1, executor=poet_jax.HostExecutor(fuse=False), **GENEROUS
        ).plan(*args)
    return caught.value.smallest_bytes


def test_a_new_setting_of_jax_is_planned_for_itself():
    scheduled = whole(gradient)
    scheduled(W, X)
    with jax.default_matmul_precision("highest"):
        assert_close(scheduled(W, X), jax.jit(gradient)(W, X))
    assert_close(scheduled(W, X), jax.jit(gradient)(W, X))


def test_a_whole_step_may_be_transformed_and_traced_over():
    scheduled = whole(loss)
    assert_close(scheduled(W, X), loss(W, X))
    assert_close(jax.grad(scheduled)(W, X), gradient(W, X))
    assert_close(jax.jit(scheduled)(W, X), loss(W, X))
    xs = jnp.stack([X, 2 * X])
    each = jax.vmap(scheduled, in_axes=(None, 0))(W, xs)
    assert_close(each, jnp.stack([loss(W, x) for x in xs]))
    assert_close(jax.jit(lambda: scheduled(W, X))(), loss(W, X))
    assert_close(scheduled(W, X), loss(W, X))


def test_donation_and_results_that_are_arguments_are_those_of_jit():
    def step(state, x):
        return {"w": state["w"] - 0.1 * x.T @ x, "key": state["key"]}, x

    scheduled = whole(step, donate_argnums=0)
    state = {"w": jnp.array(W), "key": jnp.arange(3)}
    given = state["w"]
    for _ in range(3):
        state, x = scheduled(state, X)
    assert given.is_deleted()
    assert_close(x, X)
    assert_close(state["w"], W - 0.3 * X.T @ X)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        x = nn.Dropout(0.2, deterministic=not train)(jax.nn.relu(x))
        return nn.Dense(8)(x)


BATCH = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.arange(8) % 8


def test_a_flax_training_loop_is_the_same_whole_fused_and_node_by_node():
    executors = [poet_jax.HostExecutor(), poet_jax.HostExecutor(fuse=False)]
    losses, linen_losses = [], []
    for executor in executors:
        options = GENEROUS | {"executor": executor}
        step = poet_jax.train_step(Net(nnx.Rngs(0)), "1GiB", **options)
        losses.append([float(step(BATCH)) for _ in range(5)])
        linen = poet_jax.train_step(LinenNet(), "1GiB", **options)
        state = linen.init(jax.random.key(0), BATCH)
        linen_losses.append([])
        for _ in range(5):
            state, metrics = linen(state, BATCH)
            linen_losses[-1].append(float(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-4)
    np.testing.assert_allclose(*linen_losses, rtol=1e-4)


def test_the_smallest_budget_may_be_that_of_the_whole_step():
    """jax.jit writes the activation over what it is made from, and so needs less than
    any plan node by node, and the error knows."""
    x, w = jnp.linspace(-1.0, 1.0, 8 * 256).reshape(256, 8), jnp.ones((8, 256))

    def step(x, w):
        return jnp.tanh(x @ w) @ x

    def scheduled(budget, **options):
        options |= {"device": DEVICE, "planner": MILP}
        return poet_jax.schedule(step, budget, **options)

    hopeless = scheduled(1)
    for _ in range(2):  # the second call does not run what the first one compiled
        with pytest.raises(poet_jax.BudgetTooSmall, match="as under jax.jit") as caught:
            hopeless(x, w)
    least = caught.value.smallest_bytes
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        scheduled(1, executor=poet_jax.HostExecutor(fuse=False))(x, w)
    assert least < caught.value.smallest_bytes
    with pytest.raises(poet_jax.BudgetTooSmall):
        scheduled(least - 1)(x, w)
    expected = jax.jit(step)(x, w)
    assert_close(scheduled(least)(x, w), expected)
