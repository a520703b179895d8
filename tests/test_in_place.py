"""Results written over operands: which, when, and in the arrays themselves."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from strategies import DEVICE, HEURISTICS, attempt, brute_force, graphs, programs

import poet_jax
from poet_jax.in_place import replaceable
from poet_jax.plan import Compute, Free, PageIn, PageOut
from poet_jax.planners.judge import floor_bytes, keep_everything
from poet_jax.program import lower_actions


def donating(step, *args):
    return coarse(jax.jit(step, donate_argnums=0), *args)


def coarse(step, *args):
    return poet_jax.order(poet_jax.coarsen(poet_jax.trace(step, *args)))


def node_by_node(program):
    return poet_jax.HostExecutor(poet_jax.HostStore(), fuse=False)(program)


def adamw_step():
    optimizer = optax.adamw(1e-2)
    w, x = jnp.linspace(-1.0, 1.0, 512 * 512).reshape(512, 512), jnp.ones((8, 512))

    def step(state, x):
        w, moments = state
        gradient = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        updates, moments = optimizer.update(gradient, moments, w)
        return optax.apply_updates(w, updates), moments

    return step, (w, optimizer.init(w)), x


def test_an_update_takes_no_more_than_the_state_and_its_gradient():
    step, state, x = adamw_step()
    graph = donating(step, state, x)
    costs = poet_jax.price(graph, DEVICE)
    program = keep_everything(graph, costs).program
    assert "(over arg0/" in str(program)
    usage = poet_jax.simulate(program, costs)
    sizes = sum(leaf.nbytes for leaf in jax.tree.leaves((state, x)))
    assert usage.peak_bytes < sizes + state[0].nbytes + 2**17
    expected = jax.jit(step)(state, x)
    old = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(state) if a.ndim]
    runner = node_by_node(program)
    got = runner(state, x)
    assert runner.last_run.peak_bytes == usage.peak_bytes
    new = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(got) if a.ndim]
    assert sorted(new) == sorted(old)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        got,
        expected,
    )


def test_what_the_caller_keeps_or_gets_back_is_not_written_over():
    def step(state, x):
        a, b = state
        return (a, a * 2 + x), b.sum()

    state, x = (jnp.ones((8, 8)), jnp.zeros((8, 8))), jnp.ones((8, 8))
    assert not any(replaceable(donating(step, state, x)))
    kept = coarse(lambda state, x: (state[0] + x, state[1]), state, x)
    assert not any(replaceable(kept))


@settings(max_examples=12)
@given(case=programs())
def test_node_by_node_results_are_the_same_to_the_bit_in_place_or_not(case):
    step, args = case
    expected = node_by_node(_planned(coarse(step, *args), None))(*args)
    for planner in HEURISTICS.values():
        program = _planned(donating(step, *args), planner)
        costs = poet_jax.price(program.graph, DEVICE)
        runner = node_by_node(program)
        got = runner(jax.tree.map(jnp.copy, args[0]), args[1])
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        usage = poet_jax.simulate(program, costs)
        assert runner.last_run.peak_bytes == usage.peak_bytes


def _planned(graph, planner):
    """A program for three quarters of keep-all, or of keep-all without a planner."""
    costs = poet_jax.price(graph, DEVICE)
    judged = keep_everything(graph, costs)
    if planner is None:
        return judged.program
    plan = attempt(planner, graph, costs, int(0.75 * judged.usage.peak_bytes))
    if isinstance(plan, poet_jax.BudgetTooSmall):
        return judged.program
    return poet_jax.lower(graph, plan)


class SlowStore(poet_jax.HostStore):
    def write(self, key, data, name):
        time.sleep(0.2)
        super().write(key, data, name)


def test_what_is_on_its_way_to_storage_is_there_before_it_is_written_over():
    def step(w):
        return jnp.tanh(w) * 3 + 1

    w = jnp.linspace(0.0, 1.0, 2**18)
    graph = donating(step, w)
    (argument,), (result,) = graph.arguments, graph.outputs
    actions = [PageOut(argument), Compute(0), PageIn(argument), Compute(0)]
    program = lower_actions(graph, actions)
    assert program.replaces == {1: ((argument, result),)}
    assert program.done_frees and not program.waiting_frees
    costs = poet_jax.price(graph, DEVICE)
    usage = poet_jax.simulate(program, costs)
    assert usage.start_seconds[1] == costs.page_out_seconds[argument]
    runner = poet_jax.HostExecutor(SlowStore(), fuse=False)(program)
    np.testing.assert_array_equal(runner(jnp.copy(w)), jax.jit(step)(w))
    assert runner.last_run.peak_bytes == usage.peak_bytes


def test_what_is_read_again_later_is_not_written_over():
    """The planners' bounds count it beside the result, though a page-in may follow."""

    def step(w):
        return jnp.sum((jnp.tanh(w) * 3) @ w)

    w = jnp.linspace(0.0, 1.0, 2**18).reshape(512, 512)
    graph = poet_jax.trace(jax.jit(step, donate_argnums=0), w)
    (argument,) = graph.arguments
    reads = [argument in node.reads for node in graph.nodes]
    first, last = reads.index(True), len(reads) - 1 - reads[::-1].index(True)
    assert first < last
    numbers = range(len(reads))
    actions = [PageOut(argument), *map(Compute, numbers[: first + 1])]
    actions += [PageIn(argument), *map(Compute, numbers[first + 1 :])]
    program = lower_actions(graph, actions)
    assert (
        Free(argument)
        in program.instructions[: program.instructions.index(PageIn(argument))]
    )
    assert all(old != argument for x in program.replaces.values() for old, _ in x)
    runner = node_by_node(program)
    np.testing.assert_allclose(runner(jnp.copy(w)), jax.jit(step)(w), rtol=1e-6)


@pytest.mark.parametrize("give", [np.asarray, jnp.asarray, jax.device_put])
@pytest.mark.parametrize("fuse", [False, True])
def test_memory_that_an_array_shares_with_numpy_is_not_written_over(give, fuse):
    def step(w, x):
        return jnp.tanh(w) * 3 + x.sum(), (w * x).sum()

    raw = np.zeros(2**20 + 64, np.uint8)
    start = -raw.ctypes.data % 64  # as JAX wants it, to share it
    own = raw[start : start + 2**20].view(np.float32)
    own[:] = np.linspace(0.0, 1.0, 2**18)
    before, x = own.copy(), jnp.ones(2**18)
    graph = donating(step, jnp.array(own), x)
    costs = poet_jax.price(graph, DEVICE)
    executor = poet_jax.HostExecutor(poet_jax.HostStore(), fuse=fuse)
    program = keep_everything(graph, costs).program
    program = executor.prepare(program, costs, 2**30)
    assert program.replaces
    runner = executor(program)
    expected, _ = jax.jit(step)(jnp.array(before), x)
    got, _ = runner(give(own), x)
    for _ in range(2):  # which write into what the runner has kept
        runner(jnp.array(before), x)
    np.testing.assert_array_equal(own, before)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@settings(max_examples=60)
@given(case=graphs(max_nodes=5, static_watts=(0.0,)))
def test_no_plan_needs_less_than_the_floor(case):
    graph, costs = case
    assert brute_force(graph, costs, floor_bytes(graph, costs) - 1) is None
