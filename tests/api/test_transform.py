"""`schedule` is a drop-in for `jax.jit`, under a budget that makes it work for it."""

import concurrent.futures
import dataclasses
import functools
import gc
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.xla_metadata import set_xla_metadata
from toy import OPTIONS, STAGES, W, X, gradient, loss, schedule

import poet_jax
from poet_jax.core.plan import Compute
from poet_jax.devices import machine

BUDGETS = ["1GiB", "75%"]  # nothing is repeated or paged, and something is


def smallest_bytes(fun, *args, **options):
    """The smallest budget that works."""
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        schedule(fun, 1, **options).plan(*args)
    return caught.value.smallest_bytes


def tight(fun, *args, **options):
    """`fun` scheduled within the smallest budget that works."""
    return schedule(fun, smallest_bytes(fun, *args, **options), **options)


def assert_same(got, expected):
    """Equal structure, types (the weak ones too) and values to rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array)
        assert jax.typeof(a) == jax.typeof(b)
        assert a.weak_type == b.weak_type
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


# Ways to write it.


@pytest.mark.parametrize(
    "decorate",
    [
        lambda fun: poet_jax.schedule(fun, "1GiB", **OPTIONS),
        poet_jax.schedule("1GiB", **OPTIONS),
        poet_jax.schedule(budget="1GiB", **OPTIONS),
        functools.partial(poet_jax.schedule, budget="1GiB", **OPTIONS),
    ],
)
def test_it_is_a_function_and_a_decorator(decorate):
    @decorate
    def double(x):
        """Twice x."""
        return 2 * x

    assert isinstance(double, poet_jax.Scheduled)
    assert (double.__name__, double.__doc__) == ("double", "Twice x.")
    assert_same(double(X), 2 * X)


def test_a_missing_budget_is_refused_at_once():
    with pytest.raises(ValueError, match="without a budget"):
        poet_jax.schedule(loss)


def test_it_decorates_a_method_as_jit_does():
    class Scaler:
        factor = 3.0

        @poet_jax.schedule("1GiB", static_argnums=0, **OPTIONS)
        def scheduled(self, x):
            return self.factor * x

        @functools.partial(jax.jit, static_argnums=0)
        def jitted(self, x):
            return self.factor * x

    scaler = Scaler()
    assert_same(scaler.scheduled(X), scaler.jitted(X))


def test_a_function_without_a_name_may_be_planned_again():
    scheduled = schedule(functools.partial(jnp.multiply, 2.0), "1GiB")
    for rows in (1, 2):
        assert_same(scheduled(X[:rows]), 2 * X[:rows])


def test_what_was_jitted_already_keeps_its_static_arguments():
    jitted = jax.jit(lambda x, n: x * n, static_argnums=1)
    scheduled = schedule(jitted, "1GiB", static_argnums=1)
    assert_same(scheduled(X, 3), jitted(X, 3))


@pytest.mark.parametrize(
    "budget", [2**30, "1GiB", "150%", poet_jax.Budget(2**30), float("inf")]
)
def test_a_budget_beyond_keep_all_is_keep_all_and_says_so(budget):
    scheduled = schedule(gradient, budget)
    plan = scheduled.plan(W, X)
    assert "nothing is repeated or paged" in str(plan)
    assert plan.compilations == 1
    nodes = range(len(plan.graph.nodes))
    assert plan.plan.actions == tuple(map(Compute, nodes))
    assert plan.usage.peak_bytes == plan.baseline.peak_bytes
    assert_same(scheduled(W, X), jax.jit(gradient)(W, X))
    assert scheduled.last_run.recomputed == scheduled.last_run.bytes_paged_in == 0


@pytest.mark.parametrize("form", [int, "{}B".format, poet_jax.Budget])
def test_every_form_of_a_budget_is_kept(form):
    least = smallest_bytes(gradient, W, X)
    scheduled = schedule(gradient, form(least))
    assert_same(scheduled(W, X), jax.jit(gradient)(W, X))
    assert scheduled.last_run.peak_bytes <= least
    assert scheduled.plan(W, X).budget.memory_bytes == least


def test_a_percentage_is_of_what_keep_all_needs():
    everything = schedule(gradient, "100%").plan(W, X).budget.memory_bytes
    plan = schedule(gradient, "70%").plan(W, X)
    assert plan.budget.memory_bytes == int(0.7 * everything)
    assert plan.compiled_bytes <= plan.budget.memory_bytes
    assert "The budget covers keep-all" not in str(plan)


# Arguments and results.


def test_a_budget_may_be_what_a_board_has():
    """All but a sixteenth of its memory."""
    board = dataclasses.replace(poet_jax.devices.STM32H7, ram_bytes=12_345_678)
    step = poet_jax.schedule(gradient, "device", **OPTIONS | {"device": board})
    budget_bytes = step.plan(W, X).budget.memory_bytes
    assert 0.92 * board.ram_bytes < budget_bytes <= board.ram_bytes * 15 / 16
    assert_same(step(W, X), gradient(W, X))


class Accelerator:
    """A device that says what it has, as a GPU does."""

    def __init__(self, **counts):
        self.memory_stats = lambda: counts


def test_what_an_accelerator_has_free_counts_arguments_and_is_that_of_the_fullest():
    free = functools.partial(machine.free_bytes, device=poet_jax.devices.H100)
    half, full = (
        Accelerator(bytes_limit=64 << 20, bytes_in_use=x << 20) for x in (32, 60)
    )
    assert free([half], 0) == (64 - 32 - 4) << 20
    assert free([half], 8 << 20) == (64 - 24 - 4) << 20
    assert free([half, full], 8 << 20) == (64 - 52 - 4) << 20
    assert free([Accelerator()], 0) == free(jax.devices(), 0)


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "n"}])
def test_static_arguments_by_position_and_by_name(static):
    def power(x, n, *, shift=0.0):
        return (x * x if n == 2 else x) + shift

    scheduled, jitted = schedule(power, "1GiB", **static), jax.jit(power, **static)
    for call in (
        lambda f: f(X, 2),
        lambda f: f(X, n=2),
        lambda f: f(X, 1, shift=1.5),
        lambda f: f(n=1, x=X, shift=X),
    ):
        assert_same(call(scheduled), call(jitted))


def test_a_static_argument_that_is_last_is_counted_from_the_end():
    options = {"static_argnums": -1}
    scheduled = schedule(lambda x, n: x * n, "1GiB", **options)
    assert_same(scheduled(X, 3), jax.jit(lambda x, n: x * n, **options)(X, 3))


@pytest.mark.usefixtures("standard_promotion")
def test_static_arguments_that_are_equal_but_of_two_types_are_two():
    def scale(x, n):
        return x * n

    scheduled = schedule(scale, "1GiB", static_argnums=1)
    jitted = jax.jit(scale, static_argnums=1)
    x = jnp.arange(3)
    for n in (1, 1.0, True):
        assert_same(scheduled(x, n), jitted(x, n))


def test_an_argument_left_to_its_default_is_left_to_it():
    def add(x, n=2, y=1.0):
        return x * n + y

    scheduled = schedule(add, "1GiB", static_argnums=1)
    assert_same(scheduled(X), jax.jit(add, static_argnums=1)(X))
    assert_same(scheduled(X, y=X), jax.jit(add, static_argnums=1)(X, y=X))


@pytest.mark.parametrize(
    "args",
    [
        (2.0, np.arange(6)),
        (3, np.ones((2, 3))),
        (True, np.float32(2.5)),
        (np.int8(3), jnp.ones(3, jnp.bfloat16)),
        (1.0, 2.0),
        (jnp.broadcast_to(2.0, 5), 1),
    ],
    ids=str,
)
@pytest.mark.usefixtures("standard_promotion")
def test_numpy_and_python_scalars_promote_as_in_jit(args):
    def mix(x, y):
        return x * y, {"x": x + 1, "none": None, "pair": (y,)}

    assert_same(schedule(mix, "1GiB")(*args), jax.jit(mix)(*args))


def test_weak_types_survive_a_budget_that_only_paging_can_meet():
    def fun(x, m):
        first = jnp.sin(x)
        return first, (m @ (m @ jnp.outer(first, first))).sum()

    x, m = jnp.broadcast_to(0.5, 64), jnp.ones((64, 64))
    assert x.weak_type
    scheduled = tight(fun, x, m, planner=poet_jax.planners.paging_only)
    assert_same(scheduled(x, m), jax.jit(fun)(x, m))


@pytest.mark.parametrize("fun", [lambda: jnp.ones(3), lambda: (), lambda: None])
def test_a_function_may_take_nothing_and_give_nothing(fun):
    assert_same(schedule(fun, "1GiB")(), jax.jit(fun)())


def test_typed_keys_draw_the_same_bits():
    def noisy(key, w, x):
        first, second = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(first, 0.5, x.shape), x, 0.0)
        return loss(w, x), second

    fun = jax.grad(noisy, argnums=1, has_aux=True)
    args = jax.random.key(3), W, X
    scheduled = tight(fun, *args)
    (got, key), (expected, expected_key) = scheduled(*args), jax.jit(fun)(*args)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert key == expected_key
    run = scheduled.last_run
    assert run.recomputed or run.bytes_paged_in


def test_the_same_array_may_be_passed_twice():
    expected = jax.jit(gradient)(W, W)
    assert_same(tight(gradient, W, W)(W, W), expected)
    assert not W.is_deleted()


# Who owns what.


def update(w, x):
    return w - 0.1 * gradient(w, x)


@pytest.mark.parametrize("by_name", [False, True])
def test_donated_arrays_are_deleted_and_no_others(by_name):
    scheduled = schedule(update, "1GiB", donate_argnums=0)
    w, x, expected = W.copy(), X.copy(), update(W, X)
    got = scheduled(x=x, w=w) if by_name else scheduled(w, x)
    assert_same(got, expected)
    assert w.is_deleted() and not x.is_deleted()


def test_without_donation_nothing_is_deleted():
    w, x = W.copy(), X.copy()
    tight(update, w, x)(w, x)
    assert not w.is_deleted() and not x.is_deleted()


def test_a_donated_tree_trains_in_a_loop():
    def step(state, x):
        w, g = state["w"], gradient(state["w"], x)
        moment = 0.9 * state["m"] + g
        return {"w": w - 0.1 * moment, "m": moment, "n": state["n"] + 1}

    def start():
        return {"w": W.copy(), "m": jnp.zeros_like(W), "n": 0}

    scheduled = tight(step, start(), X, donate_argnums=0)
    got, expected = start(), start()
    for _ in range(3):
        got, expected = scheduled(got, X), jax.jit(step)(expected, X)
    assert_same(got, expected)


def test_a_donated_argument_may_be_an_output():
    w = W.copy()
    same, doubled = schedule(lambda w: (w, 2 * w), "1GiB", donate_argnums=0)(w)
    assert_same((same, doubled), (W, 2 * W))


def test_an_output_may_repeat():
    def fun(x):
        y = jnp.sin(x)
        return y, y, x, x

    assert_same(schedule(fun, "1GiB")(X), jax.jit(fun)(X))


CLOSED_OVER = jnp.arange(5.0)


@pytest.mark.parametrize(
    "fun",
    [lambda x: x, lambda x: CLOSED_OVER, lambda x: 1.5],
    ids=["argument", "constant", "literal"],
)
def test_deleting_an_output_spares_arguments_and_constants(fun):
    """An output is the caller's own: it may be donated to the next function."""
    scheduled, x = schedule(fun, "1GiB"), X.copy()
    expected = jax.tree.map(np.asarray, jax.jit(fun)(x))
    for _ in range(2):
        jax.block_until_ready(scheduled(x)).delete()
    assert not x.is_deleted() and not CLOSED_OVER.is_deleted()
    np.testing.assert_array_equal(scheduled(x), expected)


def test_an_output_does_not_follow_a_numpy_argument():
    x = np.ones(100_000, np.float32)
    got = schedule(lambda x: x, "1GiB")(x)
    x[:] = 0
    assert got[0] == 1


# Plans and runs.


def shapes(*args):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]


def test_a_plan_of_shapes_is_the_plan_of_arrays_and_runs_nothing():
    ran = []

    def fun(w, x):
        jax.debug.callback(lambda: ran.append(1))
        return gradient(w, x)

    scheduled = schedule(fun, "90%")
    plan = scheduled.plan(*shapes(W, X))
    jax.effects_barrier()
    assert not ran and scheduled.last_run is None
    assert scheduled.plan(W, X) is plan
    other = schedule(fun, "90%").plan(W, X)
    jax.effects_barrier()
    assert not ran
    assert other.plan.actions == plan.plan.actions
    assert other.graph.fingerprint == plan.graph.fingerprint
    scheduled(W, X)
    jax.effects_barrier()
    assert ran == [1]


def test_a_plan_of_shapes_allocates_nothing():
    """Arguments of 4 TiB are planned for."""
    huge = jax.ShapeDtypeStruct((2**40,), jnp.float32)
    plan = schedule(lambda x: x.sum(), "5TiB").plan(huge)
    assert plan.usage.peak_bytes >= 4 * 2**40


def test_a_plan_is_jsons_and_figures_too(tmp_path):
    plan = schedule(gradient, "80%").plan(W, X)
    plan.to_json(tmp_path / "plan.json")
    again = plan.from_json(tmp_path / "plan.json")
    assert again.plan == plan.plan and again.budget == plan.budget
    assert again.program.instructions == plan.program.instructions
    assert again.compiled_bytes == plan.compiled_bytes
    assert "by XLA's own count" in str(again)
    again.to_json(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_run_measures_what_was_planned():
    scheduled = tight(gradient, W, X)
    plan = scheduled.plan(W, X)
    assert scheduled.last_run is None
    scheduled(W, X)
    run = scheduled.last_run
    assert isinstance(run, poet_jax.Run)
    assert plan.usage.peak_bytes < plan.baseline.peak_bytes
    assert run.peak_bytes == plan.compiled_bytes <= plan.budget.memory_bytes
    assert run.recomputed == plan.program.recomputed
    assert run.bytes_paged_in == plan.usage.bytes_paged_in
    assert run.bytes_paged_out == plan.usage.bytes_paged_out
    assert run.recomputed or run.bytes_paged_in
    assert run.seconds > 0 and str(run)


def test_the_milp_is_the_default_and_runs_what_it_plans():
    assert poet_jax.schedule(gradient, "90%").planner == poet_jax.MilpPlanner()
    planner = poet_jax.MilpPlanner(time_limit_seconds=5)
    scheduled = schedule(gradient, "65%", planner=planner, executor=STAGES)
    assert_same(scheduled(W, X), jax.jit(gradient)(W, X))
    plan = scheduled.plan(W, X)
    assert plan.plan.planner == "MilpPlanner"
    assert scheduled.last_run.peak_bytes == plan.compiled_bytes
    assert plan.compiled_bytes <= plan.budget.memory_bytes


def counted(fun):
    """(fun, a list that grows with each trace of it)"""
    traces = []

    @functools.wraps(fun)
    def traced(*args):
        traces.append(args)
        return fun(*args)

    return traced, traces


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": X[:32]}, "[64, 16], now float32[32, 16]"),
        ({"x": X.astype(jnp.bfloat16)}, "bfloat16"),
        ({"x": X, "y": None, "z": X}, "structure, where [0][0]['z'] is new"),
    ],
    ids=["shape", "dtype", "tree"],
)
def test_a_new_plan_is_made_once_and_its_reason_logged(change, reason, caplog):
    fun, traces = counted(lambda b: b["x"].sum())
    scheduled = schedule(fun, "1GiB")
    scheduled({"x": X})
    once = len(traces)
    assert not warnings_of(caplog)
    for _ in range(2):
        for batch in (change, {"x": X}):
            np.testing.assert_allclose(
                scheduled(batch), jax.jit(jnp.sum)(batch["x"]), rtol=1e-2, atol=0.1
            )
    assert len(traces) == 2 * once
    (message,) = warnings_of(caplog)
    assert reason in message


def test_new_values_of_the_same_types_plan_nothing():
    fun, traces = counted(lambda x, y: x * y)
    scheduled = schedule(fun, "1GiB")
    scheduled.plan(X, 1.0)
    once = len(traces)
    for x, y in ((X, 1.0), (np.asarray(X) + 1, 2.0), (X + 2, 3.0)):
        assert_same(scheduled(x, y), jax.jit(jnp.multiply)(x, y))
    assert len(traces) == once


@pytest.mark.usefixtures("standard_promotion")
def test_a_weak_type_is_another_type_also_when_nothing_else_changes():
    scheduled, x = schedule(jnp.multiply, "1GiB"), jnp.ones(4, jnp.bfloat16)
    for y in (np.float32(2), 2.0, np.float32(2), np.float64(2), jnp.float32(2)):
        assert_same(scheduled(x, y), jax.jit(jnp.multiply)(x, y))


def test_a_static_argument_is_compared_at_every_call():
    """Also where something was planned, but not called, since the latest call."""

    def scale(x, n):
        return x * n

    scheduled = schedule(scale, "1GiB", static_argnums=1)
    scheduled(X, 2)
    scheduled.plan(X, 3)
    for n in (3, 2, 3):
        assert_same(scheduled(X, n), n * X)
    with pytest.raises(ValueError, match="hash"):
        scheduled(X, np.ones(2))


def stages_of(scheduled, *args):
    """How many calls XLA did not inline."""
    return scheduled.lower(*args).compile().xla.as_text().count(" call(")


def test_large_steps_run_in_stages_unless_those_hold_unrolled_loops_or_do_not_fit():
    x, large = jnp.ones((64, 64)), jnp.ones((16384, W.shape[0]))
    assert not stages_of(schedule(loss, "100%"), W, X)
    assert stages_of(schedule(loss, "100%"), W, large)

    def scanned(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), x), x, length=128)

    assert not stages_of(schedule(scanned, "100%"), x)
    assert stages_of(schedule(scanned, "100%", executor=STAGES), x)

    def sliced(x):  # a pass replaces the product by that of a slice
        return (x @ x)[:, :8]

    assert stages_of(schedule(sliced, "100%"), x)

    def refusing(graph, costs, budget):
        return poet_jax.greedy(graph, costs, poet_jax.Budget(1))

    unplanned = schedule(loss, "1GiB", planner=refusing)
    assert not stages_of(unplanned, W, large)
    assert_same(unplanned(W, large), jax.jit(loss)(W, large))


def test_a_step_runs_within_its_budget_where_it_is_sent():
    args = jnp.eye(256), jnp.ones((4096, 256))
    scheduled = schedule(gradient, "70%", planner=poet_jax.MilpPlanner(paging=False))
    plan = scheduled.plan(*args)
    sent = export.deserialize(plan.export().serialize())
    again = jax.jit(sent.call).lower(*args).compile().memory_analysis()
    here = plan.compile().xla.memory_analysis()
    assert plan.program.recomputed
    assert again.temp_size_in_bytes == here.temp_size_in_bytes
    assert_same(sent.call(*args), scheduled(*args))


def test_a_step_that_pages_cannot_be_sent():
    scheduled = schedule(gradient, "70%", planner=poet_jax.planners.paging_only)
    with pytest.raises(poet_jax.PlanInvalid, match="paging=False"):
        scheduled.plan(jnp.eye(256), jnp.ones((4096, 256))).export()


def test_planning_leaves_constants_to_the_step():
    """What a function makes of no argument is made when it runs, as under jit."""
    scheduled = schedule(lambda x: (x[:, None] + jnp.arange(2.0**18)).sum(), "1GiB")
    text = scheduled.lower(jnp.ones(1)).compile().xla.as_text()
    assert "iota" in text and len(text) < 2**17


# Under other transformations, and as one.


def test_under_jit_grad_and_vmap_it_is_the_plain_function():
    scheduled = schedule(loss, "1GiB")
    assert_same(jax.jit(scheduled)(W, X), jax.jit(loss)(W, X))
    assert_same(jax.jit(jax.grad(scheduled))(W, X), jax.jit(jax.grad(loss))(W, X))
    assert_same(jax.grad(scheduled)(W, X), jax.grad(loss)(W, X))
    each = functools.partial(jax.vmap, in_axes=(None, 0))
    assert_same(each(scheduled)(W, X), each(loss)(W, X))
    assert jax.eval_shape(scheduled, W, X).shape == ()
    assert scheduled.last_run is None


def test_it_may_be_called_with_arrays_while_another_function_is_traced():
    scheduled, x = schedule(jnp.sin, "1GiB"), np.ones(3, np.float32)
    for _ in range(2):  # before it has run by itself, and after
        assert_same(jax.jit(lambda: scheduled(x))(), jnp.sin(x))
        assert_same(scheduled(x), jnp.sin(x))


def test_a_call_returns_before_its_step_is_done_and_begins_after_the_last():
    def step(x):
        x = jax.lax.fori_loop(0, 100_000, lambda _, y: jnp.tanh(y @ y), x)
        return x, x.sum()

    first, second = schedule(step, "100%"), schedule(step, "100%")
    first.plan(W), second.plan(W)
    _, loss = first(W)
    assert not loss.is_ready()
    _, other = second(W)
    assert loss.is_ready() and not other.is_ready()
    assert second.last_run.seconds > 0 and other.is_ready()


def test_a_call_waits_where_all_results_are_large():
    def step(rate, x):
        return rate, jax.lax.fori_loop(0, 10_000, lambda _, y: jnp.tanh(y @ W), x)

    scheduled = schedule(step, "100%")
    for _ in range(2):
        _, x = scheduled(jnp.float32(0.1), X)  # JAX has the first result at once
        assert x.is_ready()


def test_a_gradient_by_integers_is_waited_for_by_what_is_computed():
    def loss(x, rows):
        return jnp.mean(jnp.tanh(x @ x)[rows])

    gradients = jax.grad(loss, (0, 1), allow_int=True)
    step = schedule(gradients, "100%")
    for _ in range(2):
        by_x, by_rows = step(jnp.eye(64), jnp.arange(4))
    assert by_rows.dtype == jax.dtypes.float0
    np.testing.assert_allclose(by_x, gradients(jnp.eye(64), jnp.arange(4))[0], 1e-5)


def test_threads_may_share_a_step():
    """Each donates its own state, which another thread's call may have to wait for."""
    scheduled = schedule(lambda w: {"w": w + 1}, "1GiB", donate_argnums=0)
    scheduled(jnp.zeros(8))

    def train(_):
        w = jnp.zeros(8)
        for _ in range(200):
            w = scheduled(w)["w"]
        return float(w[0])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(train, range(8))) == [200.0] * 8
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_setting_of_jax_counts_as_under_jit(budget):
    def fun(w, x):
        return gradient(w, x).astype(float) * 0.1

    scheduled, args = schedule(fun, budget), (np.array(W), np.array(X))
    for _ in range(2):
        assert scheduled(*args).dtype == jnp.float32
        with jax.enable_x64(True):
            assert scheduled(*args).dtype == jnp.float64
    prints = [scheduled.plan(*args).graph.fingerprint]
    with jax.default_matmul_precision("highest"):
        prints.append(scheduled.plan(*args).graph.fingerprint)
    assert prints[0] != prints[1]
    with jax.disable_jit():
        assert_same(scheduled(*args), fun(W, X))


def test_what_a_function_sets_of_jax_holds_in_its_stages():
    def fun(key, w, x):
        with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
            noise = jax.random.uniform(key, x.shape)
        with set_xla_metadata(made_by="us"):
            noise = noise * jnp.sin(noise)
        return gradient(w, x + noise)

    args = jax.random.key(3), W, X
    scheduled = tight(fun, *args)
    assert_same(scheduled(*args), jax.jit(fun)(*args))
    lowered = scheduled.plan(*args).compile().xla.as_text()
    assert 'made_by="us"' in lowered


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
def test_a_guard_of_transfers_is_for_those_of_the_user(guard):
    args = jnp.asarray(W), jnp.asarray(X)
    scheduled = tight(gradient, *args, planner=poet_jax.planners.paging_only)
    with jax.transfer_guard(guard):
        for _ in range(2):
            assert_same(scheduled(*args), jax.jit(gradient)(*args))
    assert scheduled.last_run.bytes_paged_in


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_nan_stops_the_step_where_jax_is_asked_to(budget):
    def fun(w, x):
        return jnp.log(gradient(w, x).sum() ** 2 * x[0, 0])

    scheduled = schedule(fun, budget)
    for _ in range(2):
        assert jnp.isnan(scheduled(W, -jnp.abs(X)))
        with jax.debug_nans(True):
            assert scheduled(W, jnp.abs(X)) != 0
            with pytest.raises(FloatingPointError):
                scheduled(W, -jnp.abs(X))


@pytest.mark.parametrize("budget", ["1GiB", "90%"])
def test_what_zeros_would_make_of_a_node_is_no_nan_of_the_step(budget):
    """Nodes are timed on zeros, here with a division by what they sum to, and branches
    that are not taken make zeros."""

    def norm(x):
        y = jnp.sin(x) @ x.T
        return (y / jnp.linalg.norm(y) @ x).sum()

    x = jnp.linspace(1.0, 2.0, 64 * 64).reshape(64, 64)
    with jax.debug_nans(True), jax.debug_infs(True):
        step = poet_jax.value_and_grad(norm, budget, planner=poet_jax.greedy)
        assert_same(step(x), jax.value_and_grad(norm)(x))


@pytest.mark.parametrize("budget", BUDGETS)
def test_an_output_given_twice_is_two_arrays(budget):
    """Donating one of them leaves the other."""

    def step(w):
        new = w - gradient(w, X)
        return new, {"copy": new}

    scheduled = schedule(step, budget, donate_argnums=0)
    new, aux = scheduled(W.copy())
    expected = np.array(new)
    scheduled(new)
    np.testing.assert_array_equal(aux["copy"], expected)


def test_it_may_close_over_a_tracer():
    def outer(w):
        return schedule(lambda x: (x * w).sum(), "1GiB")(jnp.ones(3))

    np.testing.assert_allclose(jax.grad(outer)(2.0), 3.0)


def test_it_may_schedule_a_scheduled_function():
    inner = schedule(loss, "1GiB")
    assert_same(schedule(inner, "1GiB")(W, X), jax.jit(loss)(W, X))


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
@pytest.mark.parametrize("has_aux", [False, True])
def test_value_and_grad_is_jaxs(argnums, has_aux):
    def fun(w, x):
        return (loss(w, x), {"mean": x.mean()}) if has_aux else loss(w, x)

    scheduled = poet_jax.value_and_grad(fun, "95%", argnums, has_aux, **OPTIONS)
    expected = jax.jit(jax.value_and_grad(fun, argnums, has_aux))
    assert_same(scheduled(W, X), expected(W, X))
    assert scheduled.last_run.peak_bytes <= scheduled.plan(W, X).budget.memory_bytes


def test_a_numpy_array_that_a_function_closes_over_is_copied_as_under_jit():
    # JAX shares the memory of aligned arrays.
    raw = np.zeros(W.nbytes + 64, np.uint8)
    weights = raw[-raw.ctypes.data % 64 :][: W.nbytes].view(W.dtype).reshape(W.shape)
    weights[:] = W
    scheduled = schedule(jax.grad(lambda x: loss(weights, x)), "70%")
    before = np.array(scheduled(X))
    weights[:] = 0
    np.testing.assert_array_equal(scheduled(X), before)


# The options and methods of jax.jit.


def deep(x, y, power=1):
    """A step whose hidden values are large beside its arguments."""

    def loss(y):
        hidden = x
        for _ in range(8):
            hidden = jnp.tanh(hidden @ y)
        return jnp.mean(hidden**power)

    value, gradient = jax.value_and_grad(loss)(y)
    return y - gradient, x * value


def small(x, y=2.0, *, power=1):
    return (x * y) ** power + jnp.sin(x)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "jit_options",
    [
        {"static_argnums": None, "donate_argnums": None},
        {"donate_argnames": "y"},
        {"donate_argnames": ("x", "y"), "static_argnames": ("power",)},
        {"keep_unused": True, "inline": True},
        {"compiler_options": {"xla_cpu_enable_fast_min_max": True}},
        {"in_shardings": None},
        {"out_shardings": jax.sharding.SingleDeviceSharding(jax.devices()[0])},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_jit_do_what_they_do_under_jit(budget, jit_options):
    args = [jnp.ones((64, 64)) for _ in range(4)]
    expected = jax.jit(deep, **jit_options)(*args[:2])
    # One that needs no storage, as a step with shardings has none.
    planner = poet_jax.MilpPlanner(time_limit_seconds=2, paging=False)
    got = schedule(deep, budget, planner=planner, **jit_options)(*args[2:])
    assert_same(got, expected)
    assert [x.sharding for x in got] == [x.sharding for x in expected]
    assert [x.is_deleted() for x in args[:2]] == [x.is_deleted() for x in args[2:]]


def test_an_option_that_jit_does_not_have_is_refused():
    with pytest.raises(TypeError, match="'donate'.*donate_argnums"):
        poet_jax.schedule(small, "1GiB", donate=0)


def test_what_jit_tells_of_a_function_it_tells_too():
    step = schedule(small, "1GiB")
    x = jnp.ones(3)
    assert step.eval_shape(x) == jax.jit(small).eval_shape(x)
    assert str(step.trace(x).jaxpr) == str(jax.jit(small).trace(x).jaxpr)


def executables():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.parametrize("budget", BUDGETS)
def test_jax_clears_what_was_compiled(budget):
    """Of a schedule that is kept, and of one that is deleted."""
    jax.clear_caches()
    before = executables()
    step = schedule(deep, budget)
    for n in range(1, 4):
        step(jnp.ones((64 * n, 64)), jnp.ones((64, 64)))
    assert executables() > before
    jax.clear_caches()
    assert executables() <= before
    step(jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert step.plan(jnp.ones((64, 64)), jnp.ones((64, 64))).compile().xla
    del step
    jax.clear_caches()
    assert executables() <= before


def test_a_cleared_cache_plans_again(caplog):
    step = schedule(small, "1GiB")
    x = jnp.ones(3)
    first = step.plan(x)
    assert step.plan(x) is first
    step.clear_cache()
    assert step.plan(x) is not first
    assert_same(step(x), small(x))


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_donated_twice_is_the_error_of_jit(budget):
    def message(step):
        x = jnp.ones((64, 64))
        with pytest.raises(Exception, match="donate") as caught:
            step(x, x)
        return type(caught.value), str(caught.value).split(" (")[0][:60]

    ours = message(schedule(deep, budget, donate_argnums=(0, 1)))
    assert ours == message(jax.jit(deep, donate_argnums=(0, 1)))


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_donated_and_not_used_stays(budget):
    unused = jnp.ones((64, 64))
    step = schedule(lambda x, y, z: deep(x, y), budget, donate_argnums=2)
    step(jnp.ones((64, 64)), jnp.ones((64, 64)), unused)
    assert not unused.is_deleted()


def test_state_on_storage_cannot_be_placed():
    store = poet_jax.HostStore()
    state = poet_jax.to_storage(jnp.ones((512, 512)), store)
    step = schedule(jnp.sin, "1GiB", in_shardings=None)
    with pytest.raises(TypeError, match="in_shardings"):
        step(state)
