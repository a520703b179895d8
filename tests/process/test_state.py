"""A fault leaves state on storage, and its copies in RAM, as they were."""

import jax
import numpy as np
import pytest
from states import (
    Failing,
    X,
    assert_close,
    case,
    copied_bytes,
    resident_case,
    schedule,
    state_bytes,
    values,
)

import poet_jax

ONE_PROCESS = True


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_step_that_finds_no_room_leaves_the_state_as_it_was(count):
    init, step = case()
    store = Failing()
    state = poet_jax.to_storage(init(jax.random.key(0)), store, 4096)
    before = values(state)
    planned = schedule(step, "100%", store)
    planned.plan(state, X)
    store.left = count
    with pytest.raises(poet_jax.PageStoreError, match="no room for"):
        planned(state, X)
    store.left = 10**9
    assert store.nbytes == state_bytes(state)
    assert all(map(np.array_equal, values(state), before))
    (state, _), expected = planned(state, X), jax.jit(step)(init(jax.random.key(0)), X)
    assert_close(state, expected[0])


def test_a_flipped_byte_of_the_state_is_named_and_never_used(tmp_path):
    init, step = case()
    store = poet_jax.FileStore(tmp_path)
    state = poet_jax.to_storage(init(jax.random.key(0)), store, 4096)
    planned = schedule(step, "100%", store)
    planned.plan(state, X)
    before = values(state)

    def flip():
        with open(f"/proc/self/fd/{store.descriptor()}", "r+b") as file:
            file.seek(50_000)
            (byte,) = file.read(1)
            file.seek(50_000)
            file.write(bytes([byte ^ 1]))

    flip()
    with pytest.raises(poet_jax.PageStoreError, match="not those that were written"):
        planned(state, X)
    assert store.nbytes == state_bytes(state)
    flip()
    assert all(map(np.array_equal, values(state), before))


def test_a_step_that_fails_leaves_state_whole_that_was_in_ram():
    step, state, store = resident_case("1GiB", Failing())
    state, _ = step(state, X)
    before = jax.tree.map(np.asarray, state)
    assert copied_bytes(state)
    store.left = 0
    with pytest.raises(poet_jax.PageStoreError):
        step(state, X)
    store.left = 10**9
    assert_close(state, before)
    again, _ = step(state, X)
    expected, _ = jax.jit(case("momentum")[1])(before, X)
    assert_close(again, expected)
