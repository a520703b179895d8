"""Policies for jax.checkpoint from plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import poet_jax
from poet_jax.api.policy import checkpoint_policy

DEVICE = poet_jax.devices.JETSON_TX2
WEIGHTS = [
    {name: key for name, key in zip("ab", jax.random.split(key), strict=True)}
    for key in jax.random.split(jax.random.key(0), 4)
]
SHAPES = {"a": (64, 256), "b": (256, 64)}


def arguments():
    weights = [
        {name: jax.random.normal(x[name], SHAPES[name]) / 16 for name in SHAPES}
        for x in WEIGHTS
    ]
    return weights, jax.random.normal(jax.random.key(1), (1024, 64))


def loss(weights, x):
    for w in weights:
        hidden = checkpoint_name(x @ w["a"], "hidden")
        x = checkpoint_name(x + jnp.tanh(hidden) @ w["b"], "stream")
    return (x**2).mean()


def products(fun, *args) -> int:
    return str(jax.make_jaxpr(fun)(*args)).count("dot_general[")


@pytest.fixture(scope="module", params=["100%", "60%", "least"])
def planned(request):
    def schedule(budget):
        fun = jax.value_and_grad(loss)
        return poet_jax.schedule(fun, budget, device=DEVICE).plan(*arguments())

    if request.param != "least":
        return schedule(request.param)
    with pytest.raises(poet_jax.BudgetTooSmall) as error:
        schedule(1)
    return schedule(error.value.smallest_bytes)


def test_a_policy_changes_no_number(planned):
    policy = planned.checkpoint_policy()
    fun = jax.checkpoint(loss, policy=policy)
    got = jax.jit(jax.value_and_grad(fun))(*arguments())
    expected = jax.jit(jax.value_and_grad(loss))(*arguments())
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_every_name_is_saved_offloaded_or_made_again(planned):
    policy = planned.checkpoint_policy()
    names = (*policy.saved, *policy.offloaded, *policy.recomputed)
    assert sorted(names) == ["hidden", "stream"]


def test_jax_makes_again_what_the_policy_says(planned):
    policy = planned.checkpoint_policy()
    fun = jax.checkpoint(loss, policy=policy)
    again = products(jax.grad(fun), *arguments()) - products(
        jax.grad(loss), *arguments()
    )
    assert (again == 0) == ("hidden" not in policy.recomputed)


def test_a_policy_costs_no_less_than_keeping_everything(planned):
    policy = planned.checkpoint_policy()
    assert policy.usage.joules >= planned.baseline.joules
    assert str(policy).startswith("saves ")


def test_without_names_the_error_says_what_to_name():
    def nameless(w, x):
        return (jnp.tanh(x @ w) ** 2).sum()

    schedule = poet_jax.schedule(jax.grad(nameless), "100%", device=DEVICE)
    plan = schedule.plan(jnp.ones((64, 64)), jnp.ones((32, 64)))
    with pytest.raises(ValueError, match=r"checkpoint_name.*test_policy\.py"):
        plan.checkpoint_policy()


def test_names_in_a_loop_that_is_one_node_are_made_again():
    def looped(w, x):
        def body(h, _):
            return checkpoint_name(jnp.tanh(h @ w), "inside"), None

        return jnp.sum(jax.lax.scan(body, x, length=5)[0] ** 2)

    whole = tuple(p for p in poet_jax.passes.PASSES if p is not poet_jax.passes.unroll)
    schedule = poet_jax.schedule(jax.grad(looped), "100%", device=DEVICE, passes=whole)
    policy = schedule.plan(jnp.ones((16, 16)), jnp.ones((8, 16))).checkpoint_policy()
    assert policy.recomputed == ("inside",)


def test_a_chain_of_any_length_can_be_made_again():
    def deep(x):
        for _ in range(1200):
            x = jnp.tanh(x)
        return jnp.sum(checkpoint_name(x, "last") ** 2)

    graph = poet_jax.trace(jax.grad(deep), jnp.ones(8))
    costs = poet_jax.price(graph, DEVICE)
    plan = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**30))
    program = poet_jax.lower(graph, plan)
    planned = poet_jax.simulate(program, costs)
    assert checkpoint_policy(program, costs, planned).usage.joules > planned.joules
