"""What is not known to be a function of its operands runs exactly once."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from strategies import DEVICE, OPERATIONS, attempt, examples, programs, solvers

import poet_jax
from poet_jax.core.program import Run
from poet_jax.core.purity import allow_repeats
from poet_jax.passes import PASSES, run_passes

own = Primitive("own_negative")  # of a user's, of which nothing is known
own.def_abstract_eval(lambda x: x)
mlir.register_lowering(own, mlir.lower_fun(lambda x: -x, multiple_results=False))


def noise(shape):
    return lax.rng_uniform(jnp.float32(0), jnp.float32(1), shape)


def called(x):
    return jax.pure_callback(np.asarray, x, x, vmap_method="sequential")


UNKNOWN = {
    "rng_uniform": lambda x, w: x * noise(x.shape),
    "pure_callback": lambda x, w: x * called(lax.stop_gradient(w)),
    "own_negative": lambda x, w: x + own.bind(lax.stop_gradient(x)),
    "rng_uniform in a scan": lambda x, w: (
        x + lax.scan(lambda c, row: (c, row * noise(())), 0.0, lax.stop_gradient(x))[1]
    ),
    "rng_uniform in a branch": lambda x, w: (
        x * lax.cond(w[0, 0] > 0, lambda: 1.0, lambda: noise(()))
    ),
}
PLANNERS = {"greedy": poet_jax.greedy, "CBC": solvers()["CBC"]}


def unknown_runs(graph, program):
    """How often each equation that is not known to be pure runs in a program."""
    nodes = Counter(
        number for x in program.instructions if isinstance(x, Run) for number in x.nodes
    )
    return Counter(
        {
            (number, place): nodes[number]
            for number, node in enumerate(graph.nodes)
            for place, equation in enumerate(node.equations)
            if equation.unknown
        }
    )


@pytest.mark.parametrize("name", PLANNERS)
@examples(20)
@given(case=programs(operations=(*OPERATIONS, *UNKNOWN.values())))
def test_what_may_be_no_function_of_its_operands_runs_once(name, case):
    fun, args = case
    traced = poet_jax.trace(fun, *args)
    count = sum(bool(e.unknown) for node in traced.nodes for e in node.equations)
    graph = run_passes(traced, PASSES)
    costs = poet_jax.price(graph, DEVICE)
    plan = attempt(PLANNERS[name], graph, costs, 1)
    if isinstance(plan, poet_jax.BudgetTooSmall):
        budget = poet_jax.Budget(plan.smallest_bytes)
        plan = PLANNERS[name](graph, costs, budget)
    runs = unknown_runs(graph, poet_jax.lower(graph, plan))
    assert len(runs) == count
    assert set(runs.values()) <= {1}


def test_a_mask_without_a_key_is_the_same_forward_and_backward():
    """The loss is homogeneous in each weight: its derivative along one is the loss."""

    def step(ws, x):
        def loss(ws):
            h = x
            for w in ws:
                h = jnp.maximum((h * noise(h.shape)) @ w, 0)
            return jnp.sum(h)

        return jax.value_and_grad(loss)(ws)

    key = jax.random.key(0)
    keys = jax.random.split(key, 8)
    ws = [jnp.abs(jax.random.normal(k, (64, 64))) / 50 for k in keys]
    x = jnp.abs(jax.random.normal(key, (512, 64)))
    options = dict(device=DEVICE, planner=poet_jax.greedy)
    with pytest.raises(poet_jax.BudgetTooSmall) as small:
        poet_jax.schedule(step, 1, **options).plan(ws, x)
    budget = int(small.value.smallest_bytes * 1.02)
    loss, gradients = poet_jax.schedule(step, budget, **options)(ws, x)
    for w, g in zip(ws, gradients, strict=True):
        np.testing.assert_allclose(jnp.vdot(g, w), loss, rtol=1e-4)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_user_may_say_that_an_operation_is_a_function_of_its_operands(name):
    w = jnp.ones((8, 8))
    graph = poet_jax.trace(UNKNOWN[name], w, w)
    assert not all(node.repeatable for node in graph.nodes)
    allowed = allow_repeats(graph, name.split()[0])
    assert all(node.repeatable for node in allowed.nodes)
    scheduled = poet_jax.schedule(
        UNKNOWN[name], "1GiB", device=DEVICE, repeatable=[name.split()[0]]
    )
    assert all(node.repeatable for node in scheduled.plan(w, w).graph.nodes)


def test_a_primitive_stands_for_its_name():
    w = jnp.ones((8, 8))
    graph = allow_repeats(poet_jax.trace(UNKNOWN["own_negative"], w, w), own)
    assert all(node.repeatable for node in graph.nodes)


def test_a_foreign_function_goes_by_the_name_of_its_target():
    def fun(x):
        return jax.ffi.ffi_call("target", x)(x)

    graph = poet_jax.trace(fun, jnp.ones(3))
    assert not graph.nodes[0].repeatable
    assert not allow_repeats(graph, "ffi_call").nodes[0].repeatable
    assert allow_repeats(graph, "target").nodes[0].repeatable


def test_what_has_an_effect_runs_once_whatever_is_said():
    def fun(x):
        jax.debug.callback(lambda x: None, x)
        return x + 1

    graph = allow_repeats(poet_jax.trace(fun, jnp.ones(3)), "debug_callback")
    assert not graph.nodes[0].repeatable


def test_what_nobody_reads_does_not_run_unless_it_has_an_effect():
    def fun(x):
        noise(x.shape), called(x)
        jax.debug.callback(lambda x: None, x)
        return x + 1

    names = [node.name for node in poet_jax.trace(fun, jnp.ones(3)).nodes]
    assert [name.rpartition("/")[2] for name in names] == ["debug_callback", "add"]


def test_operations_are_named():
    with pytest.raises(TypeError, match="repeatable"):
        poet_jax.schedule(lambda x: x, 1, repeatable=[jnp.sin])
