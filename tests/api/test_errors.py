"""An error says what is wrong, what is possible and what to use; nothing is left."""

import functools
import json
import math
import os
import pickle
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_three_sentences
from flax import nnx
from jax import lax
from toy import OPTIONS, STAGES, W, X, gradient, schedule

import poet_jax
from poet_jax.passes import PASSES, blockwise, unroll

# Budgets.


@pytest.mark.parametrize(
    "planner", [poet_jax.greedy, poet_jax.MilpPlanner(time_limit_seconds=5)]
)
def test_a_budget_too_small_says_which_one_works(planner):
    options = OPTIONS | {"planner": planner}
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        poet_jax.schedule(gradient, "5KiB", **options)(W, X)
    error = caught.value
    assert_three_sentences(error, error.smallest_bytes, error.node, error.values[0])
    assert "5.0 KiB" in str(error)
    scheduled = poet_jax.schedule(gradient, error.smallest_bytes, **options)
    np.testing.assert_allclose(scheduled(W, X), gradient(W, X), rtol=1e-4, atol=1e-8)
    graph = scheduled.plan(W, X).graph
    assert error.node in {node.name for node in graph.nodes}
    names = {value.name for value in graph.values}
    assert set(error.values) <= names | {"results"}
    assert error.least_bytes <= error.smallest_bytes


def too_small(fun, *args, budget=1, **options):
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        schedule(fun, budget, **options).plan(*args)
    return caught.value


@pytest.mark.parametrize("executor", [None, STAGES], ids=["whole", "in stages"])
def test_a_percentage_of_less_than_a_byte_is_too_small(executor):
    tiny = schedule(lambda x: x * 2, "1%", executor=executor)
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        tiny.plan(jnp.float32(1))
    assert caught.value.smallest_bytes >= 8
    assert_three_sentences(caught.value, '%" (')


def test_a_budget_too_small_can_be_sent_to_another_process():
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        schedule(gradient, 1, planner=poet_jax.greedy).plan(W, X)
    caught.value.add_note("in the second epoch")
    sent = pickle.loads(pickle.dumps(caught.value))
    assert vars(sent) == vars(caught.value)
    assert str(sent) == str(caught.value)


def test_an_impossible_percentage_is_answered_with_the_smallest():
    whole = {"passes": tuple(p for p in PASSES if p is not blockwise)}
    error = too_small(gradient, W, X, budget="2%", **whole)
    assert_three_sentences(error, error.smallest_bytes)
    (share,) = re.findall(r'at least "(\d+%)"', str(error))
    plan = schedule(gradient, share, **whole).plan(W, X)
    assert plan.compiled_bytes <= plan.budget.memory_bytes
    below = f"{int(share[:-1]) - 1}%"
    assert too_small(gradient, W, X, budget=below, **whole).smallest_bytes


def stacked(ws, x):
    """Layers in a scan, and their gradient."""

    def loss(ws):
        return jnp.sum(
            jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2
        )

    value, gradients = jax.value_and_grad(loss)(ws)
    return ws - gradients, value


def test_what_would_lower_the_need_is_named_with_its_bytes():
    ws, x = jnp.zeros((8, 64, 64)), jnp.zeros((512, 64))
    said = str(too_small(stacked, ws, x, passes=PASSES[1:]))
    kept = re.search(r"jax.checkpoint in the body of \S+scan \((\S+) MiB\)", said)
    assert kept and float(kept[1]) >= 1.0  # hidden values of eight iterations
    assert "donate_argnums for the state that the step replaces (128.0 KiB)" in said
    said = str(too_small(stacked, ws, x, donate_argnums=0))
    assert "donate_argnums" not in said and "jax.checkpoint" not in said
    said = str(too_small(lambda x: jnp.sum(x**2), x))
    assert "jax.checkpoint" not in said and "donate_argnums" not in said


def test_shorter_pieces_of_a_loop_are_advised_and_need_less():
    ws, x = jnp.zeros((64, 32, 32)), jnp.zeros((256, 32))
    coarse = functools.partial(unroll, max_pieces=4)
    error = too_small(stacked, ws, x, passes=(coarse, *PASSES[1:]))
    (most,) = re.findall(r"poet_jax.passes.unroll, max_pieces=(\d+)\)", str(error))
    finer = functools.partial(unroll, max_pieces=int(most))
    better = too_small(stacked, ws, x, passes=(finer, *PASSES[1:]))
    assert better.smallest_bytes < 0.8 * error.smallest_bytes


def test_a_loop_is_cut_into_more_pieces_where_few_do_not_fit():
    """Unless the passes say into how many."""
    ws, x = jnp.ones((36, 16, 16)) / 16, jnp.ones((2048, 16))
    options = {"planner": poet_jax.greedy}
    few = (functools.partial(unroll, max_pieces=8), *PASSES[1:])
    error = too_small(stacked, ws, x, passes=few, **options)
    budget = int(0.8 * error.smallest_bytes)
    with pytest.raises(poet_jax.BudgetTooSmall):
        schedule(stacked, budget, passes=few, **options).plan(ws, x)
    scheduled = schedule(stacked, budget, **options)
    assert scheduled.plan(ws, x).compiled_bytes <= budget
    for got, expected in zip(scheduled(ws, x), jax.jit(stacked)(ws, x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_blocks_of_a_large_value_are_advised_and_need_less():
    def loss(w, x):
        return jnp.mean(jax.nn.logsumexp(x @ w, -1))

    w, x = jnp.zeros((16, 2048)), jnp.zeros((1024, 16))
    whole = [p for p in PASSES if p is not blockwise]
    error = too_small(jax.grad(loss), w, x, passes=whole)
    (large,) = re.findall(r"blockwise, large_bytes=(\d+)\)", str(error))
    assert int(large) == 4 * 2048 * 1024
    finer = functools.partial(blockwise, large_bytes=int(large))
    passes = [finer if p is blockwise else p for p in PASSES]
    better = too_small(jax.grad(loss), w, x, passes=passes)
    assert better.smallest_bytes < 0.5 * error.smallest_bytes


def test_what_a_step_holds_throughout_is_named_where_less_might_do_in_more():
    def loss(w, x):
        return (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).sum()

    w, x = jnp.eye(64), jnp.ones((4096, 64))
    gradient, held = jax.grad(loss), w.nbytes + x.nbytes
    error = too_small(gradient, w, x, budget=held)
    assert f"alone take {held} bytes" in str(error)
    between = error.smallest_bytes // 2
    assert held < schedule(gradient, between).plan(w, x).compiled_bytes <= between
    whole = tuple(p for p in PASSES if p is not blockwise)
    assert "alone" not in str(too_small(gradient, w, x, budget=held, passes=whole))


def test_blocks_that_were_tried_are_not_advised():
    """Sorting needs the whole product, so blocks save nothing."""
    w, x = jnp.ones((16, 512)), jnp.ones((512, 16))
    small = functools.partial(blockwise, large_bytes=1024)
    for tried in ((), (small,)):
        passes = (*tried, *(p for p in PASSES[2:] if p is not blockwise))
        error = too_small(lambda w, x: jnp.sort(x @ w, None), w, x, passes=passes)
        assert ("passes.blockwise" in str(error)) == (not tried)


def test_large_values_are_cut_into_blocks_where_they_do_not_fit():
    def loss(w, x):
        found = jnp.tanh(x @ w / 30) * 30
        return jnp.mean(jax.nn.logsumexp(found, -1) - jax.nn.relu(found).mean(-1))

    w, x = jnp.ones((16, 2048)) / 16, jnp.ones((1024, 16))
    gradient = jax.grad(loss)
    whole = tuple(p for p in PASSES if p is not blockwise)
    options = {"planner": poet_jax.greedy}
    budget = too_small(gradient, w, x, passes=whole, **options).smallest_bytes // 8
    scheduled = schedule(gradient, budget, **options)
    assert scheduled.plan(w, x).compiled_bytes <= budget
    expected = jax.jit(gradient)(w, x)
    np.testing.assert_allclose(scheduled(w, x), expected, rtol=1e-4, atol=1e-8)
    everything = schedule(gradient, "100%", **options).plan(w, x).budget.memory_bytes
    few = schedule(gradient, "15%", **options).plan(w, x)
    assert few.budget.memory_bytes == int(0.15 * everything)


def test_a_product_in_few_bits_is_cut_into_blocks_for_what_is_made_of_it():
    adam = optax.adam(1e-3)

    def step(state, words, labels):
        def loss(w):
            table, kernel, bias = jax.tree.map(lambda x: x.astype("bfloat16"), w)
            logits = (jnp.tanh(table[words]) @ kernel + bias).astype("float32")
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                logits, labels
            ).mean()

        w, moments = state
        value, slope = jax.value_and_grad(loss)(w)
        updates, moments = adam.update(slope, moments, w)
        return (optax.apply_updates(w, updates), moments), value

    w = jnp.ones((2000, 64)), jnp.ones((64, 2000)), jnp.ones(2000)
    words, labels = jnp.arange(512), jnp.arange(512)[::-1]
    state = w, adam.init(w)
    tight = schedule(step, "60%", planner=poet_jax.greedy, donate_argnums=0)
    planned = tight.plan(state, words, labels)
    assert planned.compiled_bytes <= planned.budget.memory_bytes


def by_place(curve, x):
    def at(place):
        near = jnp.exp(-((x - place) ** 2))
        return jnp.sum(near * curve[jnp.int32(64 * near)])

    return jnp.mean(jax.vmap(at)(jnp.linspace(0, 1, 256)) ** 2)


def by_pairs(a, b):
    """Of which the backward pass has one value for each pair inside a node."""
    distances = ((a[:, None] - b[None]) ** 2).sum(-1)
    return jax.nn.logsumexp(-distances, 1).sum()


@pytest.mark.parametrize(
    ("loss", "args"),
    [
        (by_place, (jnp.ones(65), jnp.linspace(0, 1, 1024))),
        (by_pairs, (jnp.ones((256, 16)), jnp.linspace(0, 1, 4096).reshape(256, 16))),
    ],
    ids=["alive", "inside"],
)
def test_without_products_other_large_values_are_cut_where_they_do_not_fit(loss, args):
    gradient, options = jax.grad(loss), {"planner": poet_jax.greedy}
    whole = tuple(p for p in PASSES if p is not blockwise)
    error = too_small(gradient, *args, passes=whole, **options)
    assert "passes.blockwise, large_bytes=" in str(error)
    budget = error.smallest_bytes // 4
    scheduled = schedule(gradient, budget, **options)
    assert scheduled.plan(*args).compiled_bytes <= budget
    expected = jax.jit(gradient)(*args)
    np.testing.assert_allclose(scheduled(*args), expected, rtol=1e-4, atol=1e-6)


def test_rounds_go_on_where_another_pass_may_cut_what_is_in_blocks():
    """Blocks of it are one node, until groups are smaller."""

    def fun(a, b):
        squares = ((a[:, None] - b[None]) ** 2).sum(-1)
        others = ((a[:, None] - b[None]) ** 2).sum(-1)
        return jnp.argmin(squares, 1), jnp.exp(-others).sum(0)

    a, b = jax.random.normal(jax.random.key(0), (2, 450, 3))
    scheduled = schedule(fun, "50%")
    nearest, density = scheduled(a, b)
    np.testing.assert_array_equal(nearest, jax.jit(fun)(a, b)[0])
    np.testing.assert_allclose(density, jax.jit(fun)(a, b)[1], rtol=1e-5)


def test_what_an_error_names_works_though_the_planner_is_worse_at_other_budgets():
    def planner(graph, costs, budget):
        try:
            return poet_jax.greedy(graph, costs, budget)
        except poet_jax.BudgetTooSmall as error:
            if budget.memory_bytes == 1:
                raise
            large = poet_jax.Budget(math.inf)
            plan = poet_jax.keep_all(graph, costs, large)
            peak = poet_jax.simulate(poet_jax.lower(graph, plan), costs).peak_bytes
            raise error.but(plan=plan, smallest_bytes=peak, exact=False) from None

    named = too_small(gradient, W, X, planner=planner).smallest_bytes
    plan = schedule(gradient, named, planner=planner).plan(W, X)
    assert plan.compiled_bytes <= named


@pytest.mark.parametrize("executor", [None, STAGES], ids=["whole", "in stages"])
def test_a_bound_on_plans_is_named_where_no_less_is(executor):
    """As a whole, XLA fuses the two equations and needs no room between them."""

    def planner(graph, costs, budget):
        try:
            return poet_jax.greedy(graph, costs, budget)
        except poet_jax.BudgetTooSmall as error:
            raise error.but(least_bytes=2**20 + 9, exact=False) from None

    options = {"planner": planner, "executor": executor, "passes": ()}
    error = too_small(lambda x: jnp.sum(jnp.tanh(x)), jnp.ones(2**18), **options)
    is_bounded = "by the model no plan in stages needs under 1048585" in str(error)
    assert is_bounded == (error.smallest_bytes >= 1048585) == (executor is STAGES)


@pytest.mark.parametrize("library", ["nnx", "linen"])
@pytest.mark.parametrize("update", [None, {"**/bias": 1.0}], ids=["all", "bias"])
def test_a_step_that_trains_all_says_what_training_a_part_would_save(library, update):
    batch = jnp.zeros((4, 256)), jnp.zeros((4, 256))
    options = OPTIONS | {"optimizer": optax.adam(1e-3), "update": update}
    if library == "nnx":
        step = poet_jax.train_step(nnx.Linear(256, 256, rngs=nnx.Rngs(0)), 1, **options)
        arguments = (batch,)
    else:
        step = poet_jax.train_step(nn.Dense(256), 1, **options)
        arguments = step.init(jax.random.key(0), batch), batch
    for call in (step, step.plan):
        with pytest.raises(poet_jax.BudgetTooSmall) as caught:
            call(*arguments)
        assert_three_sentences(caught.value, caught.value.smallest_bytes)
        # Gradients and two moments of 257 KiB.
        is_told = "update= to train a part of the parameters (up to 771" in str(
            caught.value
        )
        assert is_told == (update is None)


# A budget that jax.jit's own program keeps to is never refused.

four = tuple(jnp.ones((256, 256)) for _ in range(4))


def multi_steps(state, x):
    optimizer = optax.MultiSteps(optax.adamw(1e-2), 4)
    ws, inner = state
    gradients = jax.grad(lambda ws: sum(jnp.sum((x @ w) ** 2) for w in ws))(ws)
    updates, inner = optimizer.update(gradients, inner, ws)
    return optax.apply_updates(ws, updates), inner


IN_PLACE = {
    "fori_loop": lambda s, x: lax.fori_loop(
        0, 3, lambda i, c: tuple(a * 0.9 + x.sum() for a in c), s
    ),
    "while_loop": lambda s, x: lax.while_loop(
        lambda c: c[0][0, 0] < 3, lambda c: tuple(a * 2 + x.sum() for a in c), s
    ),
    "cond": lambda s, x: lax.cond(
        x.sum() > 0, lambda *c: tuple(a * 0.9 + 1 for a in c), lambda *c: c, *s
    ),
    "rows": lambda s, x: lax.fori_loop(
        0, 9, lambda i, c: tuple(a.at[i].set(a[i] * 2) for a in c), s
    ),
    "MultiSteps": multi_steps,
}


def jitted_bytes(fun, *args, **options):
    memory = jax.jit(fun, **options).lower(*args).compile().memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return needed + memory.output_size_in_bytes - memory.alias_size_in_bytes


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", IN_PLACE)
def test_donated_state_through_control_flow_is_updated_in_place(name):
    """Its least memory is at most that under jax.jit, and 5 %."""
    fun, x = IN_PLACE[name], jnp.ones((8, 256))
    state = four
    if name == "MultiSteps":
        state = (four, optax.MultiSteps(optax.adamw(1e-2), 4).init(four))
    need = jitted_bytes(fun, state, x, donate_argnums=0)
    smallest = too_small(fun, state, x, donate_argnums=0).smallest_bytes
    assert smallest <= 1.05 * need
    step = schedule(fun, smallest, donate_argnums=0)
    assert step.plan(state, x).compiled_bytes <= smallest


def test_what_is_named_is_at_most_what_jits_own_program_needs():
    """Of a loss along both axes of its scores, which are in no blocks."""

    def step(ws, x, y):
        def loss(ws):
            scores = jnp.tanh(x @ ws[0]) @ jnp.tanh(y @ ws[1]).T
            losses = optax.softmax_cross_entropy_with_integer_labels
            labels = jnp.arange(len(x))
            return losses(scores, labels).mean() + losses(scores.T, labels).mean()

        value, gradients = jax.value_and_grad(loss)(ws)
        return [w - g for w, g in zip(ws, gradients, strict=True)], value

    ws, x = [jnp.ones((64, 64)) / 64] * 2, jnp.ones((512, 64))
    named = too_small(step, ws, x, x, budget=1_500_000).smallest_bytes
    assert named <= 1.01 * jitted_bytes(step, ws, x, x)
    assert schedule(step, named).plan(ws, x, x).compiled_bytes <= named


@pytest.mark.parametrize(
    ("budget", "fact"),
    [
        ("64 potatoes", "64 potatoes"),
        ("64", "64"),
        ("", "''"),
        ("abc%", "abc%"),
        ("nan%", "nan"),
        ("0%", "0"),
        ("-5%", "-"),
        ("-5MiB", "-5MiB"),
        ("0B", "0"),
        (0, "0"),
        (-1, "-1"),
        (0.5, "0.5"),
        (float("nan"), "nan"),
        (True, "True"),
        ([64], "list"),
        (b"64MiB", "bytes"),
    ],
    ids=str,
)
def test_what_is_no_budget_is_refused_when_it_is_given(budget, fact):
    with pytest.raises(ValueError) as caught:
        poet_jax.schedule(gradient, budget)
    assert_three_sentences(caught.value, fact)
    assert re.search(r'"64MiB"|"30%"|Budget\(', str(caught.value))


def test_a_missing_budget_is_named():
    with pytest.raises(ValueError) as caught:
        poet_jax.schedule(gradient)
    assert_three_sentences(caught.value, "without a budget")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("solver", "GUROBI"),
        ("objective", "beauty"),
        ("time_limit_seconds", 0),
        ("time_limit_seconds", math.nan),
        ("gap", -1),
    ],
)
def test_the_milp_knows_what_it_was_not_asked_for(option, value):
    with pytest.raises(ValueError) as caught:
        poet_jax.MilpPlanner(**{option: value})
    assert_three_sentences(caught.value, option, str(value), "use")


def test_one_budget_in_place_of_several_is_refused():
    with pytest.raises(ValueError) as caught:
        schedule(gradient, "1GiB").pareto(W, X, budgets="80%")
    assert_three_sentences(caught.value, "budgets", "['80%']")


@pytest.mark.parametrize(
    "planner", [poet_jax.keep_all, poet_jax.greedy, poet_jax.MilpPlanner()]
)
def test_a_deadline_shorter_than_the_compute_alone_is_named(planner):
    schedule = poet_jax.schedule(gradient, "1GiB", **OPTIONS).plan(W, X)
    seconds = schedule.costs.seconds.sum()
    budget = poet_jax.Budget(2**30, seconds=0.9 * seconds)
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        planner(schedule.graph, schedule.costs, budget)
    assert_three_sentences(caught.value, "deadline", f"{seconds:.6g}", "seconds=")


def test_the_deadline_that_is_named_can_be_met():
    """With little memory, too, where the fastest plan is not the cheapest."""
    schedule = poet_jax.schedule(gradient, "1GiB", **OPTIONS).plan(W, X)
    inputs = schedule.graph, schedule.costs
    everything = schedule.baseline
    planner = poet_jax.MilpPlanner()
    for memory_bytes in (everything.peak_bytes, everything.peak_bytes * 3 // 4):
        with pytest.raises(poet_jax.BudgetTooSmall) as caught:
            planner(*inputs, poet_jax.Budget(memory_bytes, seconds=1e-9))
        (named,) = re.findall(r"of at least ([0-9.e-]+),", str(caught.value))
        plan = planner(*inputs, poet_jax.Budget(memory_bytes, seconds=float(named)))
        usage = poet_jax.simulate(poet_jax.lower(schedule.graph, plan), schedule.costs)
        assert usage.seconds <= float(named) and usage.peak_bytes <= memory_bytes


def test_keep_all_meets_a_deadline_of_all_its_seconds():
    """Whatever order they are added in."""
    schedule = poet_jax.schedule(gradient, "1GiB", **OPTIONS).plan(W, X)
    for seconds in (schedule.costs.seconds.sum(), sum(schedule.costs.seconds[::-1])):
        budget = poet_jax.Budget(2**30, seconds=float(seconds))
        plan = poet_jax.MilpPlanner()(schedule.graph, schedule.costs, budget)
        assert plan.gap < 1e-12


@pytest.mark.parametrize("wrong", ["0%", "-5%", "nan%", "inf%"])
def test_a_percentage_that_is_none_is_quoted(wrong):
    with pytest.raises(ValueError) as caught:
        poet_jax.schedule(gradient, wrong)
    assert_three_sentences(caught.value, repr(wrong), '"30%"')


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("device", "RASPBERRY_PI_4"),
        ("planner", "milp"),
        ("executor", "host"),
        ("passes", "group"),
    ],
)
def test_a_name_in_place_of_an_object_is_refused(option, wrong):
    with pytest.raises(TypeError) as caught:
        poet_jax.schedule(gradient, "1GiB", **{option: wrong})
    assert_three_sentences(caught.value, option, wrong, f"{option}=poet_jax.")


@pytest.mark.parametrize("wrong", ["/tmp/x", poet_jax.HostStore], ids=str)
def test_what_is_no_store_is_refused_by_the_executor(wrong):
    with pytest.raises(TypeError) as caught:
        poet_jax.HostExecutor(wrong)
    assert_three_sentences(caught.value, repr(wrong), "poet_jax.FileStore(")


def test_a_pass_that_returns_no_graph_is_named():
    def forgets(graph):
        del graph

    with pytest.raises(TypeError) as caught:
        schedule(gradient, "1GiB", passes=(forgets, *PASSES)).plan(W, X)
    assert_three_sentences(caught.value, "forgets", "NoneType", "Rewriter")


def test_an_unknown_device_is_answered_with_those_there_are():
    with pytest.raises(AttributeError) as caught:
        _ = poet_jax.devices.RASPBERY_PI_4  # type: ignore[attr-defined]
    assert_three_sentences(caught.value, "RASPBERY_PI_4", "JETSON_TX2")


def test_an_array_that_was_donated_before_is_refused():
    scheduled = schedule(lambda w: {"w": w + 1}, "1GiB", donate_argnums=0)
    w = jnp.ones(3)
    scheduled(w)
    with pytest.raises(RuntimeError) as caught:
        scheduled(w)
    assert_three_sentences(caught.value, "donated", "deleted")


def test_a_static_argument_without_a_hash_is_refused():
    with pytest.raises(ValueError) as caught:
        schedule(lambda x, n: x, "1GiB", static_argnums=1)(X, [1])
    assert_three_sentences(caught.value, "hash", "tuple")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plan": 3}', "[" * 50_000])
def test_a_file_that_holds_no_schedule_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(poet_jax.PlanInvalid) as caught:
        schedule(gradient, "1GiB").plan(W, X).from_json(path)
    assert_three_sentences(caught.value, path, "Scheduled.plan")


def test_storage_too_small_for_any_plan_is_named():
    planner = poet_jax.MilpPlanner(remat=False)
    schedule = poet_jax.schedule(gradient, "1GiB", **OPTIONS).plan(W, X)
    inputs = schedule.graph, schedule.costs
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        planner(*inputs, poet_jax.Budget(1))
    smallest = caught.value.smallest_bytes
    planner(*inputs, poet_jax.Budget(smallest))
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        planner(*inputs, poet_jax.Budget(smallest, store_bytes=0))
    assert_three_sentences(caught.value, "storage", "store_bytes=")


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["seconds", "page_in_joules", "static_watts"])
def test_a_cost_that_is_none_is_refused(name, wrong):
    costs = vars(poet_jax.schedule(gradient, "1GiB", **OPTIONS).plan(W, X).costs)
    column = costs[name].copy() if name != "static_watts" else wrong
    if name != "static_watts":
        column[2] = wrong
    with pytest.raises(ValueError) as caught:
        poet_jax.Costs(**(costs | {name: column}))
    where = {"seconds": "node 2", "page_in_joules": "value 2"}.get(name, "the step")
    assert_three_sentences(caught.value, name, str(wrong), where)


def test_transfers_that_leave_compute_nothing_are_refused():
    costs = vars(poet_jax.schedule(gradient, "1GiB", **OPTIONS).plan(W, X).costs)
    with pytest.raises(ValueError) as caught:
        poet_jax.Costs(**(costs | {"contention": 1.0}))
    assert_three_sentences(caught.value, "contention", "1.0")


# Functions, losses, models and batches.


def vector_loss(w, x):
    return jnp.tanh(x @ w).mean(1)


def test_value_and_grad_of_a_vector_is_refused():
    with pytest.raises(poet_jax.CannotTrace) as caught:
        poet_jax.value_and_grad(vector_loss, "1GiB", **OPTIONS)(W, X)
    assert_three_sentences(caught.value, "vector_loss", "scalar", "64")


def steps(loss_fn, batch):
    """A call that trains one step, for each kind of model."""
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    yield lambda: poet_jax.train_step(model, "1GiB", loss_fn=loss_fn, **OPTIONS)(batch)
    step = poet_jax.train_step(nn.Dense(4), "1GiB", loss_fn=loss_fn, **OPTIONS)
    yield lambda: step(step.init(jax.random.key(0), batch), batch)


@pytest.mark.parametrize("world", [0, 1], ids=["nnx", "linen"])
@pytest.mark.parametrize(
    ("loss_fn", "fact"),
    [
        (lambda model, x: model(x).mean(1), "float32[64]"),
        (lambda model, x: model(x).argmax(), "int32[]"),
        (lambda model, x: {"loss": model(x).mean()}, "dict"),
        (lambda model, x: (model(x).mean(), 1, 2), "(scalar, aux)"),
    ],
    ids=["vector", "integer", "dict", "three"],
)
def test_a_loss_that_is_no_floating_scalar_is_refused(world, loss_fn, fact):
    call = list(steps(loss_fn, X))[world]
    with pytest.raises(poet_jax.CannotTrace) as caught:
        call()
    assert_three_sentences(caught.value, fact)


@pytest.mark.parametrize("world", [0, 1], ids=["nnx", "linen"])
def test_the_default_loss_says_what_it_takes(world):
    call = list(steps(None, X))[world]
    with pytest.raises(TypeError) as caught:
        call()
    assert_three_sentences(caught.value, "batch = (inputs, labels)", "loss_fn")


@pytest.mark.parametrize("world", [0, 1], ids=["nnx", "linen"])
def test_the_default_loss_does_not_broadcast(world):
    call = list(steps(None, (X, jnp.ones(len(X)))))[world]
    with pytest.raises(TypeError) as caught:
        call()
    assert_three_sentences(caught.value, "(64,)", "labels[:, None]")


@pytest.mark.parametrize("world", [0, 1], ids=["nnx", "linen"])
@pytest.mark.parametrize("labels", [3, jnp.zeros((len(X), 1), int)])
def test_the_default_loss_needs_a_label_for_each_prediction(world, labels):
    call = list(steps(None, (X, labels)))[world]
    with pytest.raises(TypeError) as caught:
        call()
    assert_three_sentences(caught.value, "integer label", "(64,)")


def test_a_number_among_the_batch_does_not_hide_that_a_budget_is_too_small():
    def loss_fn(model, batch):
        return jnp.mean(model(batch["x"]) ** 2) * batch["weight"]

    step = poet_jax.train_step(nn.Dense(4), 1000, loss_fn=loss_fn, **OPTIONS)
    batch = {"x": X, "weight": 0.5}
    with pytest.raises(poet_jax.BudgetTooSmall):
        step(step.init(jax.random.key(0), batch), batch)


@pytest.mark.parametrize(
    "model",
    [lambda x: x, {"w": 1}, nn.Dense, None],
    ids=["function", "dictionary", "class", "none"],
)
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError) as caught:
        poet_jax.train_step(model, "1GiB")
    assert_three_sentences(caught.value, type(model).__name__, "poet_jax.schedule")


@pytest.mark.parametrize("model", [nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nn.Dense(4)])
@pytest.mark.parametrize("wrong", ["adam", optax.adam])
def test_what_is_no_optimizer_is_refused(model, wrong):
    with pytest.raises(TypeError) as caught:
        poet_jax.train_step(model, "1GiB", optimizer=wrong)
    assert_three_sentences(caught.value, repr(wrong), "optax.adamw(1e-3)")


def test_a_loss_fn_that_never_calls_the_model_is_refused():
    step = poet_jax.train_step(nn.Dense(4), "1GiB", loss_fn=lambda model, x: x.mean())
    with pytest.raises(TypeError) as caught:
        step.init(jax.random.key(0), X)
    assert_three_sentences(caught.value, "never called the model")


def test_a_python_branch_on_a_tracer_is_refused_by_name():
    def branch(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(poet_jax.CannotTrace) as caught:
        schedule(branch, "1GiB")(X)
    assert_three_sentences(caught.value, "branch", "jax.jit")
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)


def test_a_string_is_no_argument():
    with pytest.raises(poet_jax.CannotTrace) as caught:
        schedule(lambda x: x, "1GiB")("text")
    assert_three_sentences(caught.value, "str")


@pytest.mark.parametrize(
    ("batch", "facts"),
    [
        ((X[:, :3], X), ("[64, 16]", "[64, 3]")),
        ((X, X, X), ("structure", "[0][1][2] is new")),
        ((X.astype(jnp.int32), X), ("float32", "int32")),
        ((jax.random.split(jax.random.key(0), 64), X), ("key<fry>",)),
    ],
    ids=["shape", "structure", "dtype", "key"],
)
def test_a_wrong_second_batch_is_refused_with_what_changed(batch, facts):
    def fun(w, batch):
        x, y = batch
        return jax.grad(lambda x: ((x @ w - y) ** 2).mean())(x)

    scheduled = schedule(fun, "1GiB")
    scheduled(W, (X, X))
    with pytest.raises(poet_jax.CannotTrace) as caught:
        scheduled(W, batch)
    assert_three_sentences(caught.value, "changed since the last call", *facts)
    scheduled(W, (X, X))


# Page stores.


def test_a_folder_that_does_not_exist_or_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(poet_jax.PageStoreError) as caught:
            poet_jax.FileStore(path)
        assert_three_sentences(caught.value, path, "not a folder")


def test_a_folder_that_is_not_writable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(poet_jax.PageStoreError) as caught:
        poet_jax.FileStore(tmp_path)
    assert_three_sentences(caught.value, tmp_path, "not writable")


@pytest.mark.parametrize(
    "planner", [poet_jax.MilpPlanner, poet_jax.PaperPlanner], ids=lambda p: p.__name__
)
def test_a_solver_that_does_not_load_says_so(monkeypatch, planner):
    """As where HiGHS is not installed, or is one that hides its C interface."""
    monkeypatch.setenv("PMIP_HIGHS_LIBRARY", os.devnull)
    monkeypatch.delitem(sys.modules, "mip.highs", raising=False)
    with pytest.raises(ImportError) as caught:
        planner(solver="HIGHS")
    monkeypatch.delitem(sys.modules, "mip.highs")
    assert_three_sentences(caught.value, "poet_jax[highs]", "solver='CBC'")


# Files.


def test_a_plan_of_another_graph_is_refused(tmp_path):
    plan = schedule(gradient, "1GiB").plan(W, X)
    plan.to_json(tmp_path / "plan.json")
    other = schedule(gradient, "1GiB").plan(W, X[:32])
    with pytest.raises(poet_jax.PlanInvalid) as caught:
        other.from_json(tmp_path / "plan.json")
    assert_three_sentences(
        caught.value, plan.graph.fingerprint, other.graph.fingerprint
    )


def test_a_file_whose_program_exceeds_its_budget_is_refused(tmp_path):
    plan = schedule(gradient, "80%").plan(W, X)
    plan.to_json(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    data["budget"]["memory_bytes"] = plan.compiled_bytes - 1
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(poet_jax.PlanInvalid) as caught:
        plan.from_json(tmp_path / "plan.json")
    assert_three_sentences(caught.value, tmp_path / "plan.json", "Scheduled.plan")


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        (("compiled_bytes",), "x"),
        (("compiled_bytes",), -1),
        (("costs", "seconds"), [1.0]),
        (("costs", "nbytes"), 3),
        (("costs", "static_watts"), [1.0]),
        (("budget", "seconds"), 10**400),
        (("plan", "resident"), [[]]),
        (("program",), [["Run", [0], [99], [], []]]),
        (("program",), [["Run", [], [], [], []]]),
        (("program",), [["Run", [0], [], [99], []]]),
        (("program",), [["Free", 99]]),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_damaged_schedule_is_refused(tmp_path, keys, wrong):
    plan = schedule(gradient, "1GiB").plan(W, X)
    plan.to_json(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    part = functools.reduce(dict.__getitem__, keys[:-1], data)
    part[keys[-1]] = wrong
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(poet_jax.PlanInvalid) as caught:
        plan.from_json(tmp_path / "plan.json")
    assert_three_sentences(caught.value)


COLUMNS = (
    "bytes seconds joules page_in_seconds page_out_seconds page_in_joules "
    "page_out_joules"
).split()


def instance():
    """a -> b, at a cost of 1 in everything."""
    rows = [
        {"name": name, "backward": False} | dict.fromkeys(COLUMNS, 1) for name in "ab"
    ]
    return {"nodes": rows, "edges": [[0, 1]]}


def load(tmp_path, data):
    path = tmp_path / "instance.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return poet_jax.load_instance(path)


def test_an_instance_is_read(tmp_path):
    graph, costs = load(tmp_path, instance())
    assert [node.reads for node in graph.nodes] == [(), (0,)]
    assert costs.seconds.tolist() == [1, 1]


@pytest.mark.parametrize(
    "edge", [[0, 2], [-1, 1], [1, 0], [0, 0], [0], [0.5, 1], [False, True]]
)
def test_an_edge_that_leads_nowhere_is_refused(tmp_path, edge):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, instance() | {"edges": [edge]})
    assert_three_sentences(caught.value, "instance.json", edge)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    "value",
    [-1, float("nan"), float("inf"), "much", 2**63, 10**400],
    ids=lambda x: str(x)[:9],
)
def test_a_cost_that_is_no_cost_is_refused(tmp_path, column, value):
    data = instance()
    data["nodes"][1][column] = value
    with pytest.raises(ValueError) as caught:
        load(tmp_path, data)
    assert_three_sentences(caught.value, "instance.json", "'b'", column)


@pytest.mark.parametrize("wrong", [5, None, ["b"]])
def test_a_name_of_a_node_is_text_and_edges_are_a_list(tmp_path, wrong):
    data = instance()
    data["nodes"][1]["name"] = wrong
    for damaged in (data, instance() | {"edges": None}, instance() | {"edges": 5}):
        with pytest.raises(ValueError) as caught:
            load(tmp_path, damaged)
        assert_three_sentences(caught.value, "instance.json")


@pytest.mark.parametrize("name", ["name", "backward", "bytes", "seconds"])
def test_a_node_that_lacks_an_entry_is_refused(tmp_path, name):
    data = instance()
    del data["nodes"][1][name]
    with pytest.raises(ValueError) as caught:
        load(tmp_path, data)
    assert_three_sentences(caught.value, "instance.json", name)


@pytest.mark.parametrize("data", ['{"nodes": [', "[]", '{"nodes": []}', "[" * 50_000])
def test_a_file_that_is_no_instance_is_refused(tmp_path, data):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, data)
    assert_three_sentences(caught.value, "instance.json")
