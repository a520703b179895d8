"""Programs in the style of what people write compute what they do under jit.

Integers are equal, numbers to rounding, and the state is good for the next step.
"""

import clients.libraries
import clients.optimizers
import clients.programs  # noqa: F401
import jax
import numpy as np
import pytest
from clients.case import CLIENTS
from strategies import DEVICE

import poet_jax

OPTIONS = {
    "device": DEVICE,
    "planner": poet_jax.greedy,
    "executor": poet_jax.HostExecutor(poet_jax.HostStore()),
}


def trained(step, client):
    """What each step returns, and the last state."""
    state, results = jax.device_put(client.state, may_alias=False), []
    for batch in client.batches:
        state, result = step(state, batch)
        results.append(result)
    return results, state


def data_of(x):
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        a, b = data_of(a), data_of(b)
        if np.issubdtype(a.dtype, np.inexact):
            rounding = 2e-2 if a.dtype == np.float16 else 2e-3
            np.testing.assert_allclose(a, b, rtol=rounding, atol=rounding)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_computes_what_it_does_under_jit(name):
    client = CLIENTS[name]()
    expected = trained(jax.jit(client.step, **client.options), client)
    options = OPTIONS | client.options
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        arguments = client.state, client.batches[0]
        poet_jax.schedule(client.step, 1, **options).plan(*arguments)
    least = caught.value.smallest_bytes
    for budget in ("100%", "60%", least):
        step = poet_jax.schedule(client.step, budget, **options)
        try:
            plan = step.plan(*arguments)
        except poet_jax.BudgetTooSmall as error:
            assert budget == "60%" and error.smallest_bytes <= 1.1 * least
            continue
        assert plan.compiled_bytes <= plan.budget.memory_bytes
        assert_same(trained(step, client), expected)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["adamw_with_clipping_and_a_schedule", "multi_steps"])
def test_the_smallest_budget_of_a_client_is_found_by_the_exact_program(name):
    """Its results take no room of their own, as they have it from the beginning."""
    client = CLIENTS[name]()
    planner = poet_jax.MilpPlanner(time_limit_seconds=6)
    options = OPTIONS | client.options | {"planner": planner}
    arguments = client.state, client.batches[0]
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        poet_jax.schedule(client.step, 1, **options).plan(*arguments)
    least = caught.value.smallest_bytes
    plan = poet_jax.schedule(client.step, least, **options).plan(*arguments)
    assert plan.compiled_bytes <= least
