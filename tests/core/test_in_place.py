"""Results written over operands: which, when, and in the arrays themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import DEVICE, HEURISTICS, brute_force, examples, graphs, programs

import poet_jax
from poet_jax.core.in_place import replaceable
from poet_jax.core.plan import Compute, Free, PageIn, PageOut
from poet_jax.core.program import Run, lower_actions
from poet_jax.planners.planner import floor_bytes, keep_everything


def donating(step, *args):
    return coarse(jax.jit(step, donate_argnums=0), *args)


def coarse(step, *args):
    return poet_jax.passes.reorder(poet_jax.passes.group(poet_jax.trace(step, *args)))


# Planned in stages, also where the function would fit as it is.
STAGES = poet_jax.HostExecutor(poet_jax.HostStore(), trace=True)


def scheduled(step, budget, executor=STAGES, planner=poet_jax.greedy):
    return poet_jax.schedule(
        step,
        budget,
        device=DEVICE,
        planner=planner,
        executor=executor,
        passes=(poet_jax.passes.group, poet_jax.passes.reorder),
        donate_argnums=0,
    )


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
    donated = scheduled(step, "110%")
    compiled_bytes = donated.plan(state, x).compiled_bytes
    assert compiled_bytes < sizes + state[0].nbytes + 2**17
    got = donated(state, x)
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


@examples(4)
@given(case=programs(max_operations=2), name=st.sampled_from(list(HEURISTICS)))
def test_results_are_the_same_in_place(case, name):
    step, args = case
    donated = scheduled(step, "85%", planner=HEURISTICS[name])
    try:
        planned = donated.plan(*args)
    except poet_jax.BudgetTooSmall as error:
        donated = scheduled(step, error.smallest_bytes, planner=HEURISTICS[name])
        planned = donated.plan(*args)
    assert planned.compiled_bytes <= planned.budget.memory_bytes
    expected = jax.jit(step)(*args)
    given_ = jax.tree.map(jnp.copy, args[0])
    got = donated(given_, args[1])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5),
        got,
        expected,
    )


@pytest.mark.parametrize("how", ["slice", "scatter"])
def test_versions_of_a_buffer_lie_in_its_place(how):
    """A loop reads and writes a donated buffer. No version is paged, as XLA keeps the
    room of an argument."""

    def step(buffer, x):
        made = []
        for n in range(3):
            rows = jnp.tanh(x[:8])
            if how == "slice":
                buffer = jax.lax.dynamic_update_slice(buffer, rows, (8 * n, 0))
            else:
                buffer = buffer.at[8 * n + jnp.arange(8)].set(rows)
            x = jnp.tanh(x @ buffer[:128])
            for _ in range(3):
                x = jnp.tanh(x @ x[:128])
                made.append(x)
        return buffer, sum(x @ x[:128] for x in made[::-1]).sum()

    buffer = jnp.linspace(-1.0, 1.0, 2**18).reshape(2048, 128)
    args = buffer, jnp.ones((256, 128))
    graph = donating(step, *args)
    program = keep_everything(graph, poet_jax.price(graph, DEVICE)).program
    versions = {v for v, x in enumerate(graph.values) if x.nbytes == buffer.nbytes}
    olds = {
        old for x in program.instructions if isinstance(x, Run) for old, _ in x.over
    }
    assert len(versions - olds) == 1
    donated = scheduled(
        step, int(1.7 * buffer.nbytes), planner=poet_jax.planners.paging_only
    )
    planned = donated.plan(*args)
    moved = [x.value for x in planned.program.instructions if isinstance(x, PageOut)]
    assert moved and versions.isdisjoint(moved)


def test_what_is_on_its_way_to_storage_is_there_before_it_is_written_over():
    def step(w):
        return jnp.tanh(w) * 3 + 1

    w = jnp.linspace(0.0, 1.0, 2**18)
    graph = donating(step, w)
    (argument,), (result,) = graph.arguments, graph.outputs
    actions = [PageOut(argument), Compute(0), PageIn(argument), Compute(0)]
    program = lower_actions(graph, actions)
    assert program.instructions[1] == Run(
        (0,), (argument,), (result,), ((argument, result),)
    )
    assert Free(argument) not in program.instructions[:2]
    costs = poet_jax.price(graph, DEVICE)
    usage = poet_jax.simulate(program, costs)
    assert usage.start_seconds[1] == costs.page_out_seconds[argument]


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
    runs = [x for x in program.instructions if isinstance(x, Run)]
    assert all(old != argument for x in runs for old, _ in x.over)


@pytest.mark.parametrize("give", [np.asarray, jnp.asarray, jax.device_put])
@pytest.mark.parametrize("executor", [STAGES, None], ids=["stages", "whole"])
def test_memory_that_an_array_shares_with_numpy_is_not_written_over(give, executor):
    def step(w, x):
        return jnp.tanh(w) * 3 + x.sum(), (w * x).sum()

    raw = np.zeros(2**20 + 64, np.uint8)
    start = -raw.ctypes.data % 64  # as JAX wants it, to share it
    own = raw[start : start + 2**20].view(np.float32)
    own[:] = np.linspace(0.0, 1.0, 2**18)
    before, x = own.copy(), jnp.ones(2**18)
    donated = scheduled(step, "1GiB", executor)
    expected, _ = jax.jit(step)(jnp.array(before), x)
    got, _ = donated(give(own), x)
    for _ in range(2):  # which may write over what is free again
        donated(jnp.array(before), x)
    np.testing.assert_array_equal(own, before)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@examples(60)
@given(case=graphs(max_nodes=5, static_watts=(0.0,)))
def test_no_plan_needs_less_than_the_floor(case):
    graph, costs = case
    assert brute_force(graph, costs, floor_bytes(graph, costs) - 1) is None
