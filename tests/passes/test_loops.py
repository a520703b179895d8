"""Loops in pieces: what a scan computes, in the memory of a Python loop."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from strategies import DEVICE, examples
from toy import OPTIONS, STAGES

import poet_jax
from poet_jax.devices.price import price
from poet_jax.passes import PASSES, group, run_passes, unroll
from poet_jax.planners.planner import keep_everything

# Pieces are loops where iterations have more equations than this.
in_loops = functools.partial(unroll, max_equations=0, max_pieces=3)

WAYS = {"iterations": unroll, "loops": in_loops}


def is_scan(node):
    return any(e.primitive.name == "scan" for e in node.equations)


class Options(NamedTuple):
    """Of a random training step with a loop."""

    length: int
    reverse: bool
    has_rows: bool  # beside the parameters, which are rows, too
    stacks: bool  # results of each iteration
    passes_on: bool  # a carry that no iteration changes
    checkpoint: bool
    clip: bool  # by the norm of all gradients
    whole: bool  # something reads a stacked parameter as a whole


options = st.builds(
    Options, st.integers(2, 7), *[st.booleans()] * (len(Options._fields) - 1)
)


def training(options, seed=0):
    """(step, arguments) of SGD with momentum; the first two are to be donated."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, jnp.float32)

    def layer(carry, row):
        x, kept = carry
        (w, b), more = row
        y = jnp.tanh(x @ w + b)
        if more is not None:
            y = y * more
        y = y + x * kept if options.passes_on else y + x
        return (y, kept), jnp.sum(y, 0) if options.stacks else None

    body = jax.checkpoint(layer) if options.checkpoint else layer

    def loss(params, x, rows):
        carry, means = lax.scan(
            body,
            (x, jnp.float32(0.5)),
            (params, rows if options.has_rows else None),
            length=options.length,
            reverse=options.reverse,
        )
        total = jnp.mean(carry[0] ** 2)
        if options.whole:
            total += jnp.sum(jnp.sin(params[1].reshape(-1)))
        return total + (0 if means is None else jnp.mean(means**2))

    def step(params, momentum, x, rows):
        value, gradients = jax.value_and_grad(loss)(params, x, rows)
        if options.clip:
            norm = optax.tree.norm(gradients)
            gradients = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), gradients)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        return params, momentum, value

    n = options.length
    params = draw(n, 8, 8), draw(n, 8)
    momentum = jax.tree.map(jnp.ones_like, params)
    return step, (params, momentum, draw(256, 8), draw(n, 256, 8))


def assert_close(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@examples(10)
@given(options=options, way=st.sampled_from(sorted(WAYS)))
def test_pieces_compute_what_the_loop_computes(options, way):
    step, args = training(options)
    graph = poet_jax.trace(jax.jit(step, donate_argnums=(0, 1)), *args)
    pieces = WAYS[way](graph)
    assert len(pieces.nodes) > len(graph.nodes)
    assert way == "loops" or not any(map(is_scan, pieces.nodes))
    results = jax.jit(pieces.__call__)(*jax.tree.leaves(args))
    assert_close(results, jax.jit(step)(*args))


def test_an_argument_on_storage_that_a_loop_reads_and_the_step_returns_stays_there():
    """As frozen kernels do, in each of several microbatches."""
    store = poet_jax.HostStore()
    w, x = poet_jax.to_storage(jnp.ones((256, 256)), store, 1), jnp.ones((4, 512, 256))

    def step(w, x):
        return w, lax.scan(lambda sums, row: (sums + row @ w, None), x[0], x)[0]

    scheduled = poet_jax.schedule(
        step,
        "100%",
        donate_argnums=0,
        **OPTIONS | {"executor": poet_jax.HostExecutor(store)},
    )
    after, _ = scheduled(w, x)
    assert after is w and not w.is_deleted()
    assert scheduled.last_run.bytes_paged_out == 0


BODIES = {
    "the last carry is a row": lambda carry, row: (row, jnp.tanh(carry + row)),
    "each carry is a result": lambda carry, row: (jnp.tanh(carry + row),) * 2,
    "the first carry is a result": lambda carry, row: (carry + jnp.sin(row), carry),
}


@pytest.mark.parametrize("donated", [(), (0, 1)])
@pytest.mark.parametrize("shape", [(), (64, 32)])
@pytest.mark.parametrize("name", BODIES)
def test_one_value_may_be_several_results_of_a_loop(name, shape, donated):
    def fun(rows, carry, images):
        def body(carry, of_step):
            row, image = of_step
            carry, result = BODIES[name](carry, row)
            return carry, (result, image.sum())

        return lax.scan(body, carry if shape else 0.0, (rows, images))

    rows = jnp.arange(4.0).reshape(4, *[1 for _ in shape]) * jnp.ones((4, *shape))
    args = rows, jnp.full(shape, 0.5), jnp.ones((4, 64, 32))
    expected = jax.jit(fun)(*args)
    options = OPTIONS | {"executor": STAGES, "donate_argnums": donated}
    scheduled = poet_jax.schedule(fun, "1GiB", **options)
    assert not any(map(is_scan, scheduled.plan(*args).graph.nodes))
    assert_close(scheduled(*args), expected)


def test_what_makes_or_reads_no_array_may_stand_beside_a_loop():
    def step(stack, x):
        def loss(stack):
            return jnp.mean(lax.scan(lambda x, w: (x @ w, None), x, stack)[0] ** 2)

        slope = jax.grad(loss)(stack)
        jax.debug.callback(seen.append, slope[0, 0, 0])
        return stack - slope, jnp.sum(0.0)

    seen = []
    args = jnp.ones((8, 64, 64)) / 64, jnp.ones((256, 64))
    scheduled = poet_jax.schedule(step, "100%", **OPTIONS | {"executor": STAGES})
    after, penalty = scheduled(*args)
    jax.effects_barrier()
    assert len(seen) == 1 and penalty == 0
    assert_close(args[0] - after, jnp.full((8, 64, 64), seen[0]))


def test_a_stack_on_storage_trains_in_the_memory_that_an_error_names():
    def step(state, x):
        def loss(stack):
            x_last, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
            return jnp.mean(x_last**2)

        stack, momentum = state
        value, slope = jax.value_and_grad(loss)(stack)
        momentum = 0.9 * momentum + slope
        return (stack - 0.1 * momentum, momentum), value

    stack = jax.random.normal(jax.random.key(0), (8, 128, 128)) * 0.1
    state, x = (stack, jnp.zeros_like(stack)), jnp.ones((64, 128))
    (expected, _), _ = jax.jit(step)(state, x)
    store = poet_jax.HostStore()
    stored = poet_jax.to_storage(state, store)
    options = {
        "device": DEVICE,
        "planner": poet_jax.MilpPlanner(time_limit_seconds=1),
        "executor": poet_jax.HostExecutor(store),
        "donate_argnums": 0,
    }
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        poet_jax.schedule(step, "50%", **options).plan(stored, x)
    (found, _), _ = poet_jax.schedule(step, caught.value.smallest_bytes, **options)(
        stored, x
    )
    assert_close(np.asarray(found), expected)


@examples(5)
@given(options=options, way=st.sampled_from(sorted(WAYS)), share=st.integers(0, 100))
def test_a_step_in_pieces_computes_within_its_budget_what_jit_computes(
    options, way, share
):
    step, args = training(options)
    make = functools.partial(
        poet_jax.schedule,
        step,
        donate_argnums=(0, 1),
        passes=(WAYS[way], *PASSES[1:]),
        executor=STAGES,
        **OPTIONS,
    )
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        make(1).plan(*args)
    scheduled = make(caught.value.smallest_bytes * (100 + share) // 100)
    expected = jax.jit(step)(*args)
    schedule = scheduled.plan(*args)
    assert schedule.compiled_bytes <= schedule.budget.memory_bytes
    assert_close(scheduled(*args), expected)


def layers(count, width=32, batch=256, looped=True):
    """An Adam step of residual layers: (step, arguments), the first two donated."""
    optimizer = optax.adam(1e-3)

    def layer(x, row):
        up, down = row
        return x + jax.nn.gelu(x @ up) @ down, None

    def loss(params, x):
        if looped:
            return jnp.mean(lax.scan(layer, x, params)[0] ** 2)
        for row in params:
            x, _ = layer(x, row)
        return jnp.mean(x**2)

    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    one = jnp.ones((width, 4 * width)) / width, jnp.ones((4 * width, width)) / width
    params = [one] * count
    if looped:
        params = jax.tree.map(lambda *x: jnp.stack(x), *params)
    return step, (params, optimizer.init(params), jnp.ones((batch, width)))


def planned(step, args):
    traced = poet_jax.trace(jax.jit(step, donate_argnums=(0, 1)), *args)
    graph = run_passes(traced)
    return graph, price(graph, DEVICE)


def test_a_scan_over_layers_is_planned_as_a_python_loop_is():
    kinds = {}
    for looped in (True, False):
        graph, costs = planned(*layers(6, looped=looped))
        keep_all = keep_everything(graph, costs).usage
        budget = poet_jax.Budget(keep_all.peak_bytes * 6 // 10)
        plan = poet_jax.MilpPlanner(gap=1e-4)(graph, costs, budget)
        kinds[looped] = len(graph.nodes), keep_all.peak_bytes, plan.objective
    (nodes, peak_bytes, joules), (others, other_bytes, other_joules) = kinds.values()
    assert abs(nodes - others) <= 2
    assert peak_bytes == pytest.approx(other_bytes, rel=0.05)
    assert joules == pytest.approx(other_joules, rel=0.02)


def test_stacked_state_is_updated_where_it_lies():
    step, args = layers(6, width=64, batch=8)
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        poet_jax.schedule(step, 1, donate_argnums=(0, 1), **OPTIONS).plan(*args)
    params_bytes = sum(x.nbytes for x in jax.tree.leaves(args[0]))
    # Parameters and two moments, and less than the gradients of all layers.
    assert caught.value.smallest_bytes < 3.9 * params_bytes


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_loops_in_an_iteration_are_cut_in_turn(donated):
    """Layers in a scan, in a scan over microbatches."""
    _, (params, _, x) = layers(3)

    def loss(params, x):
        def layer(x, row):
            up, down = row
            return x + jax.nn.gelu(x @ up) @ down, None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    def step(params, momentum, x):
        def add(total, part):
            value, gradients = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(jnp.add, total, gradients), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, values = lax.scan(add, zeros, x.reshape(4, -1, x.shape[1]))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, total)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        return params, momentum, values

    args = params, jax.tree.map(jnp.ones_like, params), x
    graph = unroll(poet_jax.trace(jax.jit(step, donate_argnums=donated), *args))
    assert not any(map(is_scan, graph.nodes))
    results = jax.jit(graph.__call__)(*jax.tree.leaves(args))
    assert_close(results, jax.jit(step)(*args))
    scheduled = poet_jax.schedule(
        step, "60%", donate_argnums=donated, executor=STAGES, **OPTIONS
    )
    expected = step(*args)
    assert_close(scheduled(*args), expected)


def recurrence(length):
    def loss(w, rows):
        def step(h, x):
            return jnp.tanh(h @ w + x), None

        return jnp.mean(lax.scan(step, jnp.zeros((64, 32)), rows)[0] ** 2)

    return jax.value_and_grad(loss), (jnp.eye(32) * 0.5, jnp.ones((length, 64, 32)))


def test_a_long_loop_needs_the_root_of_its_length():
    room_bytes = []
    for length in (72, 288):
        fun, args = recurrence(length)
        with pytest.raises(poet_jax.BudgetTooSmall) as caught:
            poet_jax.schedule(fun, 1, **OPTIONS).plan(*args)
        given_bytes = sum(x.nbytes for x in args)
        room_bytes.append(caught.value.smallest_bytes - given_bytes)
    assert room_bytes[1] < 2.5 * room_bytes[0]


def test_a_loop_with_an_effect_stays_one_node():
    def fun(x):
        def body(c, row):
            jax.debug.print("{}", row[0])
            return c + row, c * row

        return lax.scan(body, jnp.zeros(8), x)

    graph = poet_jax.trace(fun, jnp.ones((5, 8)))
    assert unroll(graph) is graph
    schedule = poet_jax.schedule(fun, "1GiB", **OPTIONS).plan(jnp.ones((5, 8)))
    assert re.search(r"loops of one node each: \S+scan \(192 B\)", str(schedule))


def test_loops_are_cut_before_equations_are_grouped():
    step, args = training(Options(3, *[False] * 7))
    with pytest.raises(ValueError, match="Put it before group"):
        unroll(group(poet_jax.trace(step, *args)))


def test_a_schedule_with_pieces_is_drawn_saved_and_explained(tmp_path):
    step, args = layers(3)
    schedule = poet_jax.schedule(
        step, "60%", donate_argnums=(0, 1), executor=STAGES, **OPTIONS
    ).plan(*args)
    assert schedule.graph.stacks
    schedule.to_json(tmp_path / "schedule.json")
    read = schedule.from_json(tmp_path / "schedule.json")
    assert read.usage.peak_bytes == schedule.usage.peak_bytes
    for name, write in {
        "page.html": schedule.to_html,
        "graph.dot": schedule.to_dot,
        "trace.json": schedule.to_perfetto,
        "plan.svg": schedule.plot,
    }.items():
        write(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    texts = {reason.name: reason.text for reason in schedule.reasons()}
    assert "its pieces" in texts["arg0/0"]
    assert any("a piece of an argument" in text for text in texts.values())


@pytest.mark.parametrize("copies", [1, 8, 16, 32])
def test_pieces_have_no_more_copies_of_the_body_than_the_loop(copies):
    def loss(x, rows):
        body = lambda x, y: (jnp.tanh(x @ y), None)  # noqa: E731
        return lax.scan(body, x, rows, unroll=copies)[0].sum()

    gradient = jax.grad(loss, argnums=1)
    traced = poet_jax.trace(gradient, jnp.ones((64, 32)), jnp.ones((32, 32, 32)))
    cut = unroll(traced, max_equations=0, max_pieces=8)
    counts = {}
    for graph in (traced, cut):
        scans = [e for node in graph.nodes if is_scan(node) for e in node.equations]
        counts[graph] = [e.params["unroll"] for e in scans]
    assert len(counts[cut]) == 8 * len(counts[traced])
    assert sum(counts[cut]) == max(sum(counts[traced]), len(counts[cut]))
