"""What JAX can express is traced, runs in stages, and gives what `jax.jit` gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import call
from jax.experimental import io_callback
from strategies import DEVICE, attempt

import poet_jax
from poet_jax.emit import emit

# A 4-byte scalar, a small matrix, and the same in other dtypes.
SCALAR = jnp.float32(0.7)
X = jnp.linspace(-2, 3, 12, dtype=jnp.float32).reshape(3, 4)
TABLE = jnp.arange(12.0).reshape(3, 4)
NUMPY_TABLE = np.arange(12.0, dtype=np.float32).reshape(3, 4)


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1)


@clipped.defjvp
def _(primals, tangents):
    return clipped(*primals), 3 * tangents[0]


@jax.custom_vjp
def scaled(x):
    return jnp.sin(x)


scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (7 * g * x,))


@jax.jit
def inner(x, y):
    return jnp.sin(x) @ y.T, x + y


@functools.partial(jax.checkpoint, policy=None)
def block(x):
    return jnp.tanh(jnp.sin(x) * x)


def loop(x):
    return jax.lax.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.sin(c[1]) + c[1]), (0, x)
    )


def scan(x):
    return jax.lax.scan(lambda c, row: (c + jnp.sin(row), c * 2), x[0], x)


def branch(x):
    return jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: x * TABLE, x)


def twice(x):
    y = jnp.sin(x)
    return {"a": y, "b": (y, y), "c": x}


def scan_over_table(x):
    return jax.lax.scan(lambda c, row: (c + row @ TABLE.T, row), x[0, :3], TABLE)


def same_body_other_constants(x):
    """Two scans that print alike and close over different arrays."""

    def of(table):
        return jax.lax.scan(lambda c, _: (c + table, None), x, None, length=2)[0]

    return of(TABLE), of(NUMPY_TABLE * 3)


CASES = {
    "one operation": (lambda x: x + 1, (X,)),
    "custom_jvp": (jax.grad(lambda x: clipped(x * x).sum()), (X,)),
    "custom_vjp": (jax.grad(lambda x: scaled(x * x).sum()), (X,)),
    "nested jit": (lambda x: inner(*inner(x, TABLE)[1:] * 2), (X,)),
    "jit called twice": (lambda x: inner(x, x)[1] + inner(x * 2, x)[1], (X,)),
    "remat": (jax.value_and_grad(lambda x: block(block(x)).sum()), (X,)),
    "scan": (scan, (X,)),
    "grad of scan": (jax.grad(lambda x: scan(x)[0].sum()), (X,)),
    "while": (loop, (X,)),
    "cond": (branch, (X,)),
    "grad of cond": (jax.grad(lambda x: branch(x).sum()), (X,)),
    "switch": (
        lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos, jnp.abs], x),
        (2, X),
    ),
    "fori_loop": (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * 2 + i, x), (X,)),
    "vmap": (jax.vmap(lambda row: jnp.outer(row, row).sum(0)), (X,)),
    "typed keys": (
        lambda key, x: jax.random.normal(jax.random.split(key)[0], x.shape) + x,
        (jax.random.key(3), X),
    ),
    "keys as outputs": (
        lambda key: (jax.random.split(key, 3), jax.random.fold_in(key, 7)),
        (jax.random.key(3),),
    ),
    "rbg keys": (
        lambda key: jax.random.uniform(key, (5,)),
        (jax.random.key(3, impl="rbg"),),
    ),
    "raw keys": (
        lambda key: jax.random.bernoulli(key, 0.4, (9,)),
        (jnp.uint32([0, 5]),),
    ),
    "integers": (lambda x: (x // 3, x % 3, x.sum(), x << 2), (jnp.arange(-5, 5),)),
    "small integers": (lambda x: x * x + 1, (jnp.arange(20, dtype=jnp.uint8),)),
    "booleans": (lambda x: (x > 0, ~(x > 1), (x > 0).sum(), (x > 0).any()), (X,)),
    "bfloat16": (
        lambda x: (x @ x.T, jnp.sin(x) * 2, x.astype(jnp.float32)),
        (X.astype(jnp.bfloat16),),
    ),
    "float16": (lambda x: jnp.tanh(x) * 2, (X.astype(jnp.float16),)),
    "complex": (lambda x: jnp.fft.fft(x).conj(), (X,)),
    "constants": (lambda x: x * TABLE + NUMPY_TABLE, (X,)),
    "a constant twice": (lambda x: (x @ TABLE.T) @ TABLE, (X,)),
    "constants in a body": (scan_over_table, (X,)),
    "bodies that differ in constants": (same_body_other_constants, (X,)),
    "literal outputs": (lambda x: (1, 2.5, True, x.sum(), np.float32(3)), (X,)),
    "outputs that are arguments": (lambda x, y: (y, x, x + y), (X, X * 2)),
    "outputs that are constants": (lambda x: (TABLE, NUMPY_TABLE, x * 2), (X,)),
    "nothing but arguments": (lambda x, y: (y, x), (X, SCALAR)),
    "no outputs": (lambda x: None, (X,)),
    "no arguments": (lambda: jnp.arange(5) * 2, ()),
    "duplicated outputs": (twice, (X,)),
    "duplicated arguments": (lambda x, y: jnp.sin(x) @ y.T, (X, X)),
    "zero-sized": (
        lambda x: (x * 2, jnp.concatenate([x, x]).sum(), x @ x.T, jnp.zeros((0,))),
        (jnp.zeros((0, 4)),),
    ),
    "unused arguments": (lambda x, y, z: y * 2, (X, SCALAR, jnp.arange(3))),
    "dead code": (lambda x: (jnp.linalg.inv(x @ x.T), jnp.sin(x))[1], (X,)),
    "python numbers": (lambda x, n: x * n + n, (X, 3)),
    "weak types": (lambda n: (n * 2, n + 1.5, jnp.sin(n)), (0.5,)),
    "numpy arguments": (lambda x: jnp.sin(x) * x, (NUMPY_TABLE,)),
    "multiple outputs": (lambda x: jnp.linalg.eigh(x @ x.T)[0], (X,)),
    "sort with two operands": (lambda x: jax.lax.sort((x, -x), num_keys=1), (X,)),
    "gather and scatter": (lambda x: x.at[jnp.array([0, 2])].add(x[1:]), (X,)),
    "convolution": (
        jax.grad(
            lambda w, x: jax.lax.conv(x, w, (1, 1), "SAME").sum(),
        ),
        (jnp.ones((2, 3, 3, 3)), jnp.arange(108.0).reshape(1, 3, 6, 6)),
    ),
    "precision and dot types": (
        lambda x: jax.lax.dot(x, x.T, preferred_element_type=jnp.float32),
        (X.astype(jnp.bfloat16),),
    ),
    "optimization barrier": (
        lambda x: jax.lax.optimization_barrier((jnp.sin(x), x * 2)),
        (X,),
    ),
    "nested pytrees": (
        lambda tree: jax.tree.map(lambda x: x * 2, tree),
        ({"b": [X, None], "a": (SCALAR,)},),
    ),
    "pure callback": (
        lambda x: jax.pure_callback(lambda a: np.sin(a), x, x * 2) + 1,
        (X,),
    ),
}


def leanest(planner, graph):
    """A program of the leanest plan that the planner has, or of keep-all's."""
    costs = poet_jax.price(graph, DEVICE)
    plan = attempt(planner, graph, costs, 1)
    if isinstance(plan, poet_jax.BudgetTooSmall):
        plan = planner(graph, costs, poet_jax.Budget(plan.smallest_bytes))
    return poet_jax.lower(graph, plan)


def run(program, args):
    """What a program gives, each node a stage, with pages in the host's memory."""
    outputs = call(emit(program), jax.tree.leaves(args))
    return jax.tree.unflatten(program.graph.out_tree, outputs)


def bits(array):
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def assert_same(outputs, expected):
    """The same tree, shapes, dtypes and weak types; values to rounding."""
    assert jax.tree.structure(outputs) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_array_equal(bits(a), bits(b))
            continue
        rtol = 8 * float(jnp.finfo(b.dtype).eps)
        np.testing.assert_allclose(
            np.asarray(a).astype(np.complex64),
            np.asarray(b).astype(np.complex64),
            rtol=rtol,
            atol=rtol,
        )


@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_jit_gives(name):
    """Equation by equation, and grouped and reordered, each node as a stage."""
    fun, args = CASES[name]
    expected = jax.jit(fun)(*args)
    fine = poet_jax.trace(fun, *args)
    coarse = poet_jax.passes.reorder(poet_jax.passes.group(fine))
    for graph, planner in (
        (fine, poet_jax.greedy),
        (coarse, poet_jax.planners.paging_only),
    ):
        assert_same(run(leanest(planner, graph), args), expected)


@pytest.mark.parametrize("name", CASES)
def test_schedule_gives_what_jit_gives(name):
    fun, args = CASES[name]
    scheduled = poet_jax.schedule(fun, "1MiB", device=DEVICE, planner=poet_jax.keep_all)
    assert_same(scheduled(*args), jax.jit(fun)(*args))


def primitives(graph):
    return [x.primitive.name for node in graph.nodes for x in node.equations]


def test_control_flow_is_one_node():
    def fun(x):
        return scan(x)[0].sum() + loop(x)[1].sum() + branch(x).sum()

    found = primitives(poet_jax.trace(fun, X))
    assert [found.count(name) for name in ("scan", "while", "cond")] == [1, 1, 1]


def test_calls_are_opened_and_dead_code_is_dropped():
    def fun(x):
        jnp.linalg.inv(x @ x.T)
        return block(inner(x, x)[1]), scaled(clipped(x))

    found = set(primitives(poet_jax.trace(fun, X)))
    assert not found & {"jit", "pjit", "checkpoint", "remat2", "custom_jvp_call"}
    assert not found & {"custom_vjp_call", "dot_general", "lu"}


def test_a_graph_has_one_equation_per_node_and_the_arguments_names():
    graph = poet_jax.trace(lambda p, n: jnp.sin(p["w"]) * n, {"w": X}, n=SCALAR)
    assert [len(node.equations) for node in graph.nodes] == [1, 1]
    assert [graph.values[v].name for v in graph.arguments] == ["arg0/w", "n"]


def test_names_are_unique_and_values_are_counted_in_bytes():
    graph = poet_jax.trace(jax.grad(lambda x: block(block(x)).sum()), X)
    names = [value.name for value in graph.values]
    assert len(set(names)) == len(names)
    assert all(v.nbytes == v.dtype.itemsize * np.prod(v.shape) for v in graph.values)


def test_the_backward_pass_is_marked():
    graph = poet_jax.trace(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), X.T, X)
    marks = [node.backward for node in graph.nodes]
    assert any(marks) and not all(marks)
    products = [n for n in graph.nodes if "dot_general" in n.name]
    assert [node.backward for node in products] == [False, True]


def test_keys_are_not_pageable_and_constants_are_pinned():
    graph = poet_jax.trace(
        lambda key, x: jax.random.normal(key, x.shape) + TABLE, jax.random.key(0), X
    )
    key = graph.arguments[0]
    assert not graph.values[key].pageable and graph.values[key].nbytes == 8
    assert [array.shape for array in graph.constants.values()] == [TABLE.shape]
    assert set(graph.constants) <= graph.pinned


def test_shapes_are_enough_to_trace():
    shape = jax.ShapeDtypeStruct((100_000, 100_000), jnp.float32)
    graph = poet_jax.trace(lambda x: jnp.sin(x).sum(), shape)
    assert graph.values[graph.arguments[0]].nbytes == 4 * 10**10


def test_static_arguments_are_not_values():
    def power(x, n, *, flip):
        return -(x**n) if flip else x**n

    options = dict(static_argnums=1, static_argnames=("flip",))
    scheduled = poet_jax.schedule(
        power, 10**6, device=DEVICE, planner=poet_jax.keep_all, **options
    )
    jitted = jax.jit(power, **options)
    for n, flip in ((2, True), (3, False), (2, False)):
        assert_same(scheduled(X, n, flip=flip), jitted(X, n, flip=flip))
    assert len(scheduled.plan(X, 2, flip=True).graph.arguments) == 1


def test_donated_arguments_are_gone_and_the_others_are_not():
    def step(state, x):
        return {"w": state["w"] + x}, (state["w"] * x).sum()

    def state():
        return {"w": jnp.array(X)}

    scheduled = poet_jax.schedule(
        step, 10**6, device=DEVICE, planner=poet_jax.keep_all, donate_argnums=0
    )
    given, x = state(), jnp.array(X)
    assert_same(scheduled(given, x), jax.jit(step)(state(), x))
    assert given["w"].is_deleted()
    assert not x.is_deleted()


def test_effects_happen_once_and_in_order():
    """Two ordered callbacks around values that a tight plan computes again."""
    seen = []

    def first(a):
        seen.append(("first", float(a)))

    def second(a):
        seen.append(("second", float(a)))
        return np.float32(a)

    def fun(w, x):
        y = jnp.sin(x @ w)
        io_callback(first, None, y.sum(), ordered=True)
        z = jnp.sin(y @ w)
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        total = io_callback(second, scalar, z.sum(), ordered=True)
        z = jnp.cos(jnp.tanh(z @ w) @ w)
        return jnp.tanh((z @ w) * y) @ y, total

    w = jnp.eye(64) * 0.5
    expected = jax.jit(fun)(w, w)
    jax.effects_barrier()
    once = list(seen)
    assert [name for name, _ in once] == ["first", "second"]
    fine = poet_jax.trace(fun, w, w)
    coarse = poet_jax.passes.reorder(poet_jax.passes.group(fine))
    for graph, planner in (
        (fine, poet_jax.greedy),
        (coarse, poet_jax.planners.paging_only),
    ):
        assert sum(not node.repeatable for node in graph.nodes) == 2
        seen.clear()
        assert_same(run(leanest(planner, graph), (w, w)), expected)
        jax.effects_barrier()
        assert [name for name, _ in seen] == ["first", "second"]
        np.testing.assert_allclose(
            [x for _, x in seen], [x for _, x in once], rtol=1e-5
        )


def test_unordered_effects_and_prints_are_kept(capfd):
    seen = []

    def fun(x):
        io_callback(lambda a: seen.append(int(a)), None, x.shape[0])
        jax.debug.callback(lambda a: seen.append(float(a)), x[0, 0])
        jax.debug.print("x is {}", x[0, 0])
        return x + 1

    scheduled = poet_jax.schedule(fun, 10**6, device=DEVICE, planner=poet_jax.keep_all)
    for _ in range(2):
        seen.clear()
        assert_same(scheduled(X), X + 1)
        jax.effects_barrier()
        assert sorted(seen) == [-2.0, 3]
    assert capfd.readouterr().out.count("x is -2") == 2


def test_what_jax_cannot_trace_is_named():
    def undecided(x):
        return x if x.sum() > 0 else -x

    def model(x):
        return undecided(x) * 2

    place = r"'model'.* at test_trace.py:\d+ in undecided: Attempted boolean"
    with pytest.raises(poet_jax.CannotTrace, match=place):
        poet_jax.trace(model, X)


def test_other_shapes_and_dtypes_are_planned_again():
    scheduled = poet_jax.schedule(
        lambda x: jnp.sin(x) * 2, 10**6, device=DEVICE, planner=poet_jax.keep_all
    )
    for x in (X, X[:2], X.astype(jnp.bfloat16), 3, 0.5, jnp.arange(3), X):
        assert_same(scheduled(x), jax.jit(lambda x: jnp.sin(x) * 2)(x))
