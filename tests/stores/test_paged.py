"""State on storage: the same numbers, within the budget, and whole after any fault."""

import concurrent.futures

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import assume, example, given
from hypothesis import strategies as st
from states import (
    MILP,
    X,
    assert_close,
    case,
    copied_bytes,
    resident_case,
    schedule,
    state_bytes,
    values,
)
from strategies import examples
from toy import OPTIONS, tightest

import poet_jax
from poet_jax.stores.paged import PagedArray


@pytest.mark.parametrize(
    "name, budget",
    [
        *(("adamw", budget) for budget in ("100%", "85%", "500KB")),
        *(("momentum", budget) for budget in ("100%", "85%")),
        *(("clipped", budget) for budget in ("100%", "80%")),
    ],
)
def test_a_step_on_storage_gives_jits_numbers_within_the_budget(name, budget, store):
    init, step = case(name)
    expected = init(jax.random.key(0))
    state = poet_jax.init_paged(init, store, jax.random.key(0), min_bytes=4096)
    assert_close(state, expected)
    planned = schedule(step, budget, store)
    plain = jax.jit(step)
    for _ in range(3):
        expected, loss = plain(expected, X)
        state, got = planned(state, X)
        np.testing.assert_allclose(got, loss, rtol=1e-5)
        made = planned.plan(state, X)
        assert made.compiled_bytes <= made.budget.memory_bytes
        assert planned.last_run.peak_bytes == made.compiled_bytes
        assert planned.last_run.bytes_paged_in == made.usage.bytes_paged_in
        assert planned.last_run.waiting_seconds <= planned.last_run.seconds
        assert store.nbytes == state_bytes(state)  # the old state is gone
    assert_close(state, expected)
    kinds = [type(x) for x in jax.tree.leaves(state)]
    assert kinds.count(PagedArray) == {"adamw": 9, "momentum": 6, "clipped": 9}[name]


def test_the_budget_may_be_a_fraction_of_the_state():
    init, step = case(layers=5)
    store = poet_jax.HostStore()
    state = poet_jax.init_paged(init, store, jax.random.key(0), min_bytes=4096)
    least = schedule(step, 1, store, planner=poet_jax.MilpPlanner())
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        least.plan(state, X)
    assert caught.value.smallest_bytes < state_bytes(state) / 2


def test_what_storage_cannot_hold_stays_in_ram():
    """Keys, and results that would come back with a firmer type than they left."""
    store = poet_jax.HostStore()
    keys = jax.random.split(jax.random.key(0), 1000)
    state = poet_jax.to_storage({"keys": keys, "w": X}, store, 4096)
    assert state["keys"] is keys and isinstance(state["w"], PagedArray)

    def step(state):
        return {"keys": state["keys"], "w": jnp.broadcast_to(2.0, X.shape)}

    expected = jax.jit(step)({"keys": keys, "w": X})
    got = schedule(step, "1GiB", store)(state)
    assert expected["w"].weak_type
    assert got["w"].weak_type == expected["w"].weak_type
    np.testing.assert_array_equal(np.asarray(got["w"]), expected["w"])


def test_state_may_be_made_of_arrays_on_storage(store):
    paged = poet_jax.to_storage({"w": X, "b": X[0]}, store, 4096)

    def init(state):
        return jax.tree.map(lambda x: (2 * x, jnp.zeros_like(x)), state)

    made = poet_jax.init_paged(init, store, paged, min_bytes=4096)
    assert_close(made, init({"w": X, "b": X[0]}))
    assert all(isinstance(x, PagedArray) for x in made["w"])
    np.testing.assert_array_equal(paged["w"], X)


def test_a_folder_is_not_a_store(tmp_path):
    with pytest.raises(TypeError, match=r"poet_jax.FileStore\(folder\)"):
        poet_jax.to_storage(X, str(tmp_path), 4096)
    with pytest.raises(TypeError, match=r"poet_jax.FileStore\(folder\)"):
        poet_jax.init_paged(lambda: X * 2, str(tmp_path), min_bytes=4096)


def test_several_threads_share_a_step_and_a_store(store):
    init, step = case()
    planned, plain = schedule(step, "85%", store), jax.jit(step)
    first = poet_jax.to_storage(init(jax.random.key(0)), store, 4096)
    planned.plan(first, X)

    def train(seed):
        state = expected = init(jax.random.key(seed))
        state = poet_jax.to_storage(state, store, 4096)
        for _ in range(4):
            (state, _), (expected, _) = planned(state, X), plain(expected, X)
        assert_close(state, expected)
        return state

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        states = list(pool.map(train, range(3)))
    assert store.nbytes == state_bytes([first, *states])


def test_what_is_not_donated_stays_and_what_is_goes():
    init, _ = case()
    store = poet_jax.HostStore()
    params = poet_jax.to_storage(init(jax.random.key(0))[0], store, 4096)

    def norms(params):
        return jax.tree.map(jnp.linalg.norm, params)

    kept = schedule(norms, "1GiB", store)
    assert_close(kept(params), norms(init(jax.random.key(0))[0]))
    assert params["w0"].is_deleted() and store.nbytes == 0
    with pytest.raises(RuntimeError, match="w0.*has been deleted"):
        kept(params)

    params = poet_jax.to_storage(init(jax.random.key(0))[0], store, 4096)
    reading = poet_jax.schedule(norms, "1GiB", **OPTIONS)
    for _ in range(2):
        assert_close(reading(params), norms(init(jax.random.key(0))[0]))
    assert store.nbytes == state_bytes(params)


def test_moments_alone_may_be_on_storage(store):
    init, step = case()
    params, moments = init(jax.random.key(0))
    state = params, poet_jax.to_storage(moments, store)
    scheduled = schedule(step, "100%", store)
    expected = init(jax.random.key(0))
    for _ in range(2):
        state, _ = scheduled(state, X)
        expected, _ = jax.jit(step)(expected, X)
        assert not any(isinstance(x, PagedArray) for x in jax.tree.leaves(state[0]))
        large = [x for x in jax.tree.leaves(state[1]) if x.size > 128]
        assert len(large) == 6 and all(isinstance(x, PagedArray) for x in large)
    assert_close(state, expected)


def test_state_that_is_gone_is_refused_before_anything_is_freed(store):
    init, step = case()
    params, moments = init(jax.random.key(0))
    moments = poet_jax.to_storage(moments, store)
    scheduled = schedule(step, "100%", store)
    (params, _), _ = scheduled((params, moments), X)
    with pytest.raises(RuntimeError, match="has been deleted"):
        scheduled((params, moments), X)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_a_leaf_that_is_handed_through_is_not_moved():
    store = poet_jax.HostStore()
    frozen, free = (PagedArray.of(X + i, store) for i in range(2))
    planned = schedule(lambda state: (state[0], state[1] * 2), "1GiB", store)
    got = planned((frozen, free))
    assert got[0] is frozen and not frozen.is_deleted()
    assert free.is_deleted()
    np.testing.assert_array_equal(got[1], (X + 1) * 2)
    assert planned.last_run.bytes_paged_in == X.nbytes


def test_keys_may_be_beside_state_on_storage(store):
    """Also as arrays, and in the update of a table that goes block by block."""

    def step(state):
        table, keys = state
        keys, given = jax.vmap(jax.random.split, out_axes=1)(keys)
        return table + jax.random.normal(given[0], table.shape), keys

    state = jnp.zeros((4096, 1100)), jax.random.split(jax.random.key(0), 2)
    paged = schedule(step, "100%", store)
    stored, expected = poet_jax.to_storage(state, store), jax.jit(step)(state)
    table, keys = paged(stored)
    np.testing.assert_array_equal(table, expected[0])
    assert jnp.all(keys == expected[1])


def test_an_array_without_elements_may_be_on_storage():
    store = poet_jax.HostStore()
    state = poet_jax.to_storage({"x": X, "none": jnp.zeros((0, 4))}, store, 0)
    planned = schedule(
        lambda s: {"x": s["x"] * 2, "none": s["none"] + 1}, "1GiB", store
    )
    got = planned(state)
    np.testing.assert_array_equal(got["x"], X * 2)
    assert got["none"].shape == (0, 4)


def test_linen_state_is_made_and_trained_on_storage():
    model = nn.Sequential([nn.Dense(128), nn.Dropout(0.5, deterministic=False)])
    store = poet_jax.FileStore()
    options = OPTIONS | {"executor": poet_jax.HostExecutor(store)}
    batch = X, X * 0.5
    step = poet_jax.train_step(model, "100%", **options)
    plain = poet_jax.train_step(model, "100%", **OPTIONS)
    expected = plain.init(jax.random.key(0), batch)
    state = step.init(jax.random.key(0), batch, store=store)
    assert isinstance(state.params["layers_0"]["kernel"], PagedArray)
    for _ in range(2):
        expected, metrics = plain(expected, batch)
        state, got = step(state, batch)
        np.testing.assert_allclose(got["loss"], metrics["loss"], rtol=1e-5)
    assert_close(state.params, expected.params)


@pytest.mark.parametrize("update", [None, {"**/kernel": 0.5}, poet_jax.update.lora(8)])
def test_nnx_modules_train_from_storage(update):
    def make(**options):
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(
            nnx.Linear(128, 128, use_bias=False, rngs=rngs),  # BatchNorm has one
            jnp.tanh,
            nnx.BatchNorm(128, rngs=rngs),
        )
        options = OPTIONS | {"update": update} | options
        return model, poet_jax.train_step(model, "120%", **options)

    store = poet_jax.FileStore()
    plain, plain_step = make()
    model, step = make(executor=poet_jax.HostExecutor(store))
    for module in (model, step.optimizer):
        nnx.update(module, poet_jax.to_storage(nnx.state(module), store, 4096))
    stored_bytes = store.nbytes
    assert stored_bytes >= 128 * 128 * 4
    for _ in range(3):
        expected = plain_step((X, X * 0.5))
        np.testing.assert_allclose(step((X, X * 0.5)), expected, rtol=1e-5)
    assert store.nbytes == stored_bytes
    if update is None:
        assert step.last_run.bytes_paged_out == stored_bytes == 3 * 128 * 128 * 4
    assert_close(nnx.state(model), nnx.state(plain))
    merged = nnx.state(step.merged())
    assert not any(isinstance(x, PagedArray) for x in jax.tree.leaves(merged))
    assert_close(merged, nnx.state(plain_step.merged()))


UPDATES = (
    lambda p, g, m: p - 0.1 * g,
    lambda p, g, m: jnp.where(m > 0, p, g.T) * p,
    lambda p, g, m: p + jnp.sqrt(jnp.abs(m)) * g.astype(jnp.bfloat16).astype(p.dtype),
    lambda p, g, m: p / (1 + g.sum()) + m,
    lambda p, g, m: jnp.cumsum(p, axis=0) + g * m,
)


@examples(8)
@given(
    rows=st.integers(1, 300),
    columns=st.sampled_from([1, 300, 20_000, 70_000]),
    updates=st.lists(st.sampled_from(UPDATES), min_size=1, max_size=3),
)
def test_streaming_changes_nothing(rows, columns, updates):
    """Elementwise updates, of a matrix product's result, also transposed; and others,
    which are left whole."""
    if UPDATES[1] in updates:  # which transposes
        rows = columns = 2100 if columns > 300 else rows

    def step(state, x):
        p, m = state
        gradient = jnp.tanh(x @ p)
        for update in updates:
            p, m = update(p, gradient, m), m * 0.9 + gradient
        return p, m

    key, *keys = jax.random.split(jax.random.key(rows), 3)
    state = tuple(jax.random.normal(k, (rows, columns)) for k in keys)
    x = jax.random.normal(key, (rows, rows)) / np.sqrt(rows)
    store = poet_jax.HostStore()
    on_storage = poet_jax.to_storage(state, store, 1)
    planned = tightest(lambda budget: schedule(step, budget, store), on_storage, x)
    results = values(planned(on_storage, x))
    made = planned.plan(on_storage, x)
    assert planned.last_run.peak_bytes == made.compiled_bytes
    assert made.compiled_bytes <= made.budget.memory_bytes
    for got, expected in zip(results, values(jax.jit(step)(state, x)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


GATHERS = {
    "plain": lambda table, ids: table[ids],
    "take": lambda table, ids: jnp.take(table, ids, axis=0),
    "clip": lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"),
    "fill": lambda table, ids: table.at[ids].get(mode="fill", fill_value=2.5),
    "scaled": lambda table, ids: jnp.take(table * 2, ids, axis=0),
    "columns": lambda table, ids: table[:, ids.astype(int) % table.shape[1]],
}


@example(300, 20_000, [-301, -1, 5, 299], "int32", ["plain", "fill"], True)
@example(300, 20_000, [-7, 299, 4000], "int16", ["clip", "columns"], False)
@examples(8)
@given(
    rows=st.integers(1, 300),
    columns=st.sampled_from([1, 30]),
    ids=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-300, 299), max_size=9),
    dtype=st.sampled_from(["int32", "int16", "int8", "uint8"]),
    gathers=st.lists(st.sampled_from(sorted(GATHERS)), min_size=1, max_size=2),
    trained=st.booleans(),
)
def test_embeddings_from_storage_are_the_same(
    rows, columns, ids, dtype, gathers, trained
):
    """Forward and backward, of indices out of bounds, too."""
    assume((rows, dtype) != (128, "int8"))  # JAX cannot compare the two

    def step(state, ids):
        def loss(table):
            taken = [jnp.tanh(GATHERS[x](table, ids)).sum() for x in gathers]
            return sum(n * x for n, x in enumerate(taken, 1)), taken

        table, moment = state
        if not trained:
            return state, loss(table)
        gradient, taken = jax.grad(loss, has_aux=True)(table)
        moment = 0.9 * moment + gradient
        return (table - moment / 8, moment), taken

    table = jax.random.normal(jax.random.key(rows), (rows, columns))
    ids = jnp.asarray(np.array(ids, np.int64).astype(dtype)).reshape(1, -1)
    store = poet_jax.HostStore()
    state = poet_jax.to_storage((table, table * 0), store, 1)
    planned = tightest(lambda budget: schedule(step, budget, store), state, ids)
    results = values(planned(state, ids))
    plain = values(jax.jit(step)((table, table * 0), ids))
    for got, expected in zip(results, plain, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_table_larger_than_the_budget_is_an_embedding():
    """Of nnx: its rows are gathered and its gradient is applied block by block."""
    store = poet_jax.HostStore()
    optimizer = optax.sgd(1e-2, momentum=0.9)
    layer = nnx.Embed(100_000, 256, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)

    def step(state, ids):
        params, moments = state

        def loss(params):
            return jnp.square(nnx.merge(graphdef, params)(ids)).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    ids = jax.random.randint(jax.random.key(0), (8, 32), 0, 100_000)
    state = params, optimizer.init(params)
    expected, loss = jax.jit(step)(state, ids)
    paged_state = poet_jax.to_storage(state, store, 2**16)
    planned = schedule(step, "90MB", store)  # the table takes 102
    state, got = planned(paged_state, ids)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    assert_close(state, expected)
    assert planned.last_run.peak_bytes <= 90_000_000


def test_streamed_updates_take_the_room_of_a_block():
    store = poet_jax.HostStore()
    p, m = (PagedArray(store, (2**16, 512), jnp.float32) for _ in range(2))

    def step(state):
        p, m = state
        return p - 0.1 * m, m * 0.9

    planned = schedule(step, "100%", store)
    assert planned.plan((p, m)).usage.peak_bytes < (p.nbytes + m.nbytes) / 4


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_what_numpy_has_in_64_bits_is_stored_as_jax_takes_it(store, dtype):
    array = np.arange(2**14, dtype=dtype)  # larger than what stays in RAM
    double = poet_jax.schedule(
        lambda x: x * 2,
        "1GiB",
        donate_argnums=0,
        **OPTIONS | {"executor": poet_jax.HostExecutor(store)},
    )
    result = double(poet_jax.to_storage(array, store))
    assert result.dtype == jax.jit(lambda x: x * 2)(array).dtype
    np.testing.assert_array_equal(result, array * 2)


def test_an_exception_of_the_users_leaves_state_on_storage_as_it_was(store):
    init, step = case()
    failing = [True]

    def check(loss):
        if failing:
            raise RuntimeError("a check of the user's")
        return loss

    def checked(state, x):
        state, loss = step(state, x)
        return state, jax.pure_callback(check, loss, loss)

    state = poet_jax.init_paged(init, store, jax.random.key(0), min_bytes=4096)
    executor = poet_jax.HostExecutor(store)
    options = OPTIONS | {"executor": executor, "donate_argnums": 0}
    planned = poet_jax.schedule(checked, "80%", **options)
    before, held = [np.array(x) for x in values(state)], store.nbytes
    with pytest.raises(Exception, match="a check of the user's"):
        planned(state, X)
    stored = [isinstance(x, PagedArray) for x in jax.tree.leaves(state)]
    for leaf, old, is_stored in zip(
        jax.tree.leaves(state), before, stored, strict=True
    ):
        if is_stored:
            np.testing.assert_array_equal(leaf, old)
    assert sum(stored) == 9 and store.nbytes == held
    failing.clear()
    state = poet_jax.init_paged(init, store, jax.random.key(0), min_bytes=4096)
    expected, loss = jax.jit(step)(init(jax.random.key(0)), X)
    state, got = planned(state, X)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    assert_close(state, expected)


def test_two_schedules_may_train_one_state_in_turns(store):
    """As with two sizes of batches, or two losses."""
    init, step = case()
    state = poet_jax.init_paged(init, store, jax.random.key(0), min_bytes=4096)
    expected = init(jax.random.key(0))
    steps = [schedule(step, budget, store) for budget in ("100%", "120%")]
    for number in range(4):
        x = X[: 32 * (1 + number % 2)]
        expected, loss = jax.jit(step)(expected, x)
        state, got = steps[number % 2](state, x)
        np.testing.assert_allclose(got, loss, rtol=1e-5)
        assert store.nbytes == state_bytes(state)
    assert_close(state, expected)


@pytest.mark.parametrize("budget", ["85%", "120%", "1GiB"])
def test_state_that_the_plan_keeps_in_ram_is_not_paged_in_again(budget):
    step, state, store = resident_case(budget)
    made = step.plan(state, X)
    graph, usage = made.program.graph, made.usage
    waiting = sum(graph.values[v].nbytes for v in made.plan.resident)
    assert bool(waiting) == bool(made.plan.resident)
    if budget == "1GiB":
        assert made.plan.resident and made.plan.resident <= graph.successors.keys()
        others = graph.stored.keys() - made.plan.resident
        assert usage.bytes_paged_in == sum(
            graph.values[v].nbytes for v in others if graph.readers[v]
        )
    init, fun = case("momentum")
    expected = init(jax.random.key(0))
    for number in range(3):
        state, value = step(state, X)
        expected, loss = jax.jit(fun)(expected, X)
        np.testing.assert_allclose(value, loss, rtol=1e-5)
        assert copied_bytes(state) == waiting
        first = waiting if number == 0 else 0  # nothing was left there yet
        assert step.last_run.bytes_paged_in == usage.bytes_paged_in + first
        assert step.last_run.bytes_paged_out == usage.bytes_paged_out
        assert step.last_run.peak_bytes == made.compiled_bytes
    assert_close(state, expected)  # what is on storage is what is in RAM


def test_copies_of_state_go_when_another_step_begins_or_memory_is_released():
    step, state, _ = resident_case()
    other, held, _ = resident_case()
    state, _ = step(state, X)
    assert copied_bytes(state)
    held, _ = other(held, X)
    assert copied_bytes(held) and not copied_bytes(state)
    double = poet_jax.schedule(lambda x: x * 2, "1GiB", device=OPTIONS["device"])
    double(X)  # which pages nothing itself
    assert not copied_bytes(held)
    held, _ = other(held, X)
    assert copied_bytes(held)
    poet_jax.release()
    assert not copied_bytes(held)
    for _ in range(2):
        state, _ = step(state, X)
    held, _ = other(held, X)
    assert_close(state, held)


def test_frozen_state_stays_in_ram_where_there_is_room(tmp_path):
    store = poet_jax.HostStore()
    frozen = PagedArray.of(jnp.ones((128, 128)), store)
    step = poet_jax.schedule(
        lambda w, x: jnp.tanh(x @ w).sum(),
        "1GiB",
        **OPTIONS | {"executor": poet_jax.HostExecutor(store), "planner": MILP},
    )
    made = step.plan(frozen, X)
    for expected in (frozen.nbytes, 0):
        step(frozen, X)
        assert step.last_run.bytes_paged_in == expected
        assert frozen.copied_bytes == frozen.nbytes
    made.to_json(tmp_path / "plan.json")
    again = made.from_json(tmp_path / "plan.json")
    assert again.plan == made.plan and again.usage.joules == made.usage.joules
    assert any("from the step before" in reason.text for reason in made.reasons())
