"""Ctrl-C and faults of storage in mid-step: state in RAM is never lost."""

import functools
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_paged import X, case
from toy import OPTIONS

import poet_jax
from poet_jax import interrupts


@pytest.fixture(autouse=True)
def interruptible():
    """As in a program that was not started in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Faulty(poet_jax.HostStore):
    """Calls `fault` at a transfer of `method` that comes after `left` others."""

    left, method, fault = 10**9, "read", None

    def _step(self, method):
        if method == self.method:
            self.left -= 1
            if self.left == 0:
                self.fault()

    def read(self, key, into, name):
        self._step("read")
        super().read(key, into, name)

    def write(self, key, data, name):
        self._step("write")
        super().write(key, data, name)


def paging(step, store, planner=poet_jax.paging_only, **options):
    """`step` in the least memory, which pages by that."""
    defaults = OPTIONS | {
        "planner": planner,
        "executor": poet_jax.HostExecutor(store),
        "donate_argnums": 0,
    }
    options = defaults | options
    return functools.partial(poet_jax.schedule, step, **options)


def least(scheduled, *args):
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        scheduled(1).plan(*args)
    return scheduled(caught.value.smallest_bytes)


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("count", [1, 3])
def test_ctrl_c_in_mid_step_takes_effect_after_it(count):
    init, step = case()
    store = Faulty()
    train = least(paging(step, store), init(jax.random.key(0)), X)
    state, expected = init(jax.random.key(0)), jax.jit(step)(init(jax.random.key(0)), X)
    state, _ = train(state, X)
    assert train.last_run.bytes_paged_in > 0
    store.left, store.fault = count, ctrl_c
    state = init(jax.random.key(0))
    with pytest.raises(KeyboardInterrupt):
        state, _ = train(state, X)
        time.sleep(60)
    for got, wanted in zip(*map(jax.tree.leaves, (state, expected[0])), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_takes_effect_before_the_next_step(monkeypatch):
    """Also if that begins at once, so that a loop ends."""
    monkeypatch.setattr(interrupts, "DELAY_SECONDS", 60.0)
    init, step = case()
    store = Faulty()
    train = least(paging(step, store), init(jax.random.key(0)), X)
    state, _ = train(init(jax.random.key(0)), X)
    store.left, store.fault, steps = 1, ctrl_c, 0
    with pytest.raises(KeyboardInterrupt):
        for _ in range(10):
            state, _ = train(state, X)
            steps += 1
    assert steps == 1
    state, loss = train(state, X)
    assert np.isfinite(loss)


def test_a_second_ctrl_c_does_not_wait():
    def twice():
        ctrl_c()
        ctrl_c()

    with pytest.raises(KeyboardInterrupt), interrupts.held_back():
        twice()
        time.sleep(60)
    with pytest.raises(KeyboardInterrupt):  # the first one has its effect, too
        time.sleep(60)


def test_ctrl_c_leaves_a_module_whole():
    """The new state or the old one, never none."""
    store = Faulty()
    model = nnx.Sequential(*(nnx.Linear(128, 128, rngs=nnx.Rngs(i)) for i in range(3)))
    batch = X, jnp.zeros_like(X)
    make = functools.partial(
        poet_jax.train_step,
        optimizer=optax.adam(1e-3),
        planner=poet_jax.paging_only,
        executor=poet_jax.HostExecutor(store),
        device=OPTIONS["device"],
    )
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        make(model, 1).plan(batch)
    step = make(model, caught.value.smallest_bytes)
    step(batch)
    assert step.last_run.bytes_paged_in > 0
    store.left, store.fault = 1, ctrl_c
    with pytest.raises(KeyboardInterrupt):
        step(batch)
        time.sleep(60)
    assert step.optimizer.step[...] == 2
    assert np.isfinite(step(batch))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    ("method", "lasts"), [("read", False), ("write", False), ("write", True)]
)
def test_a_fault_of_storage_never_costs_donated_state(method, lasts, fuse):
    """At any transfer: the step raises while the old state is there, or gives the new
    one. What can never be read again is another matter."""
    init, step = case()
    store = Faulty()
    executor = poet_jax.HostExecutor(store, fuse=fuse)
    train = least(paging(step, store, executor=executor), init(jax.random.key(0)), X)
    expected = jax.jit(step)(init(jax.random.key(0)), X)
    outcomes = set()

    def fault():
        store.left += lasts
        raise poet_jax.PageStoreError("'x' could not be moved")

    train(init(jax.random.key(0)), X)
    assert train.last_run.bytes_paged_in > 0
    store.method, store.fault = method, fault
    for count in range(1, 15):
        state = init(jax.random.key(0))
        before = [np.array(x) for x in jax.tree.leaves(state)]
        store.left = count
        try:
            got = train(state, X)
        except poet_jax.PageStoreError:
            assert all(map(np.array_equal, jax.tree.leaves(state), before))
        else:
            outcomes.add("no fault" if store.left > 0 and not lasts else "went on")
            for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        store.left = 10**9
        assert store.nbytes == 0
    assert "went on" in outcomes
    _, value = train(init(jax.random.key(0)), X)
    np.testing.assert_allclose(value, expected[1], rtol=1e-5)
