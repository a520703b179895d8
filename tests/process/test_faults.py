"""A fault of a store fails the step, which leaves arguments and state as they were."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_three_sentences
from processes import run_python
from toy import OPTIONS, W, X, gradient, paging

import poet_jax
from poet_jax.core.plan import PageIn


def assert_works(scheduled, store):
    np.testing.assert_allclose(scheduled(W, X), gradient(W, X), rtol=1e-4, atol=1e-8)
    assert scheduled.last_run.bytes_paged_in > 0 and store.nbytes == 0
    assert not os.listdir(store.folder)


def moved(scheduled, kind):
    """Names of the values that the plan pages in or out."""
    plan = scheduled.plan(W, X)
    values = plan.graph.values
    return {values[a.value].name for a in plan.plan.actions if isinstance(a, kind)}


class Full(poet_jax.FileStore):
    """Has no room while it is told so."""

    is_full = True

    def allocate(self, nbytes, name):
        if self.is_full:
            raise poet_jax.PageStoreError("full")
        return super().allocate(nbytes, name)


def test_a_store_without_room_is_found_before_anything_is_donated(tmp_path):
    def step(weights, x):
        return weights - 0.1 * gradient(weights, x), x.sum()

    store = Full(tmp_path)
    executor = poet_jax.HostExecutor(store)
    options = OPTIONS | {"planner": poet_jax.planners.paging_only, "executor": executor}
    train = functools.partial(poet_jax.schedule, step, donate_argnums=0, **options)
    with pytest.raises(poet_jax.BudgetTooSmall) as too_small:
        train(1).plan(W, X)
    scheduled = train(too_small.value.smallest_bytes)
    state = jnp.copy(W)
    with pytest.raises(poet_jax.PageStoreError, match="full"):
        scheduled(state, X)
    store.is_full = False
    state, _ = scheduled(state, X)  # is still there
    assert scheduled.last_run.bytes_paged_out > 0 and store.nbytes == 0
    np.testing.assert_allclose(state, step(W, X)[0], rtol=1e-4, atol=1e-8)


def test_a_file_that_may_not_grow_says_so(tmp_path):
    """Real: the kernel allows files of one sector."""
    code = """
    step.plan(W, X)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        step(W, X)
    except poet_jax.PageStoreError as error:
        print(store.nbytes, error)
    """
    output, _ = run_python(code, tmp_path).communicate(timeout=120)
    assert_three_sentences(output, "File too large", "paged out", "store_bytes=")
    assert output.startswith("0 ") and not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", ["flipped", "short"])
def test_wrong_bytes_are_never_used(tmp_path, kind):
    """The file is spoiled by a callback of the step, when pages are out."""
    store, spoils = poet_jax.FileStore(tmp_path), [False]

    def spoil(x):
        if spoils[0]:
            with open(f"/proc/self/fd/{store.descriptor()}", "r+b") as file:
                pages = bytes(byte ^ 1 for byte in file.read())
                file.seek(0)
                file.write(pages) if kind == "flipped" else file.truncate()
        return x

    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return (callback(x) ** 2).mean()

    @jax.custom_vjp
    def callback(x):
        return jax.pure_callback(spoil, x, x)

    callback.defvjp(lambda x: (callback(x), None), lambda _, g: (g,))
    scheduled = paging(store, jax.grad(loss))
    assert_works(scheduled, store)
    spoils[0] = True
    with pytest.raises(poet_jax.PageStoreError) as caught:
        scheduled(W, X)
    assert sum(repr(n) in str(caught.value) for n in moved(scheduled, PageIn)) == 1
    assert_three_sentences(caught.value)
    assert store.nbytes == 0
    spoils[0] = False
    assert_works(scheduled, store)
