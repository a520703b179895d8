"""Which equations become one node, and that the values stay what they were."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from jax.experimental import io_callback
from strategies import examples, programs

import poet_jax
from poet_jax.passes.operations import HEAVY

X = jnp.ones((64, 64))  # 16 KiB, not tiny


def nodes_of(fun, *args):
    """The set of primitives of each node."""
    graph = poet_jax.passes.group(poet_jax.trace(fun, *args))
    return [tuple(x.primitive.name for x in node.equations) for node in graph.nodes]


def test_a_chain_of_light_equations_is_one_node():
    """sin -> tanh -> exp"""
    assert nodes_of(lambda x: jnp.exp(jnp.tanh(jnp.sin(x))), X) == [
        ("sin", "tanh", "exp")
    ]


def test_a_heavy_equation_is_a_node_of_its_own():
    """sin -> @ -> tanh -> @ -> exp"""
    found = nodes_of(lambda x, w: jnp.exp(jnp.tanh(jnp.sin(x) @ w) @ w), X, X)
    assert found == [("sin",), ("dot_general",), ("tanh",), ("dot_general",), ("exp",)]


@pytest.mark.parametrize(
    ("fun", "primitive"),
    [
        (lambda x: jnp.cumsum(x * 2, 0) * 2, "cumsum"),
        (lambda x: jnp.sort(x * 2, axis=0) * 2, "sort"),
        (lambda x: (x * 2)[jnp.array([3, 1])] * 2, "gather"),
        (lambda x: (x * 2).at[jnp.array([3, 1])].add(1.0) * 2, "scatter-add"),
        (lambda x: jax.lax.scan(lambda c, r: (c + r, None), x[0], x)[0] * 2, "scan"),
        (lambda x: jnp.fft.rfft(x * 2).real * 2, "fft"),
        (lambda x: jnp.argmax(x * 2, axis=0) * 2, "argmax"),
    ],
)
def test_heavy_primitives_stand_alone(fun, primitive):
    (node,) = [node for node in nodes_of(fun, X) if primitive in node]
    assert set(node) <= {primitive, "broadcast_in_dim", "iota"}


def test_two_branches_join_where_they_meet():
    """sin and cos of one product meet in a sum: one component, one node.

    @ -> sin -> +
      -> cos ->
    """

    def fun(x):
        y = x @ x
        return jnp.sin(y) + jnp.cos(y)

    first, second = nodes_of(fun, X)
    assert first == ("dot_general",)
    assert sorted(second) == ["add", "cos", "sin"]


def test_what_expands_tiny_values_joins_the_large_values_that_it_meets():
    """Sums of areas are deeper than the overlaps, and hang on areas only."""

    def overlaps_over_unions(x):
        boxes = x @ x[:, :4]
        overlaps = jnp.minimum(boxes[:, None], boxes[None]).prod(axis=-1)
        areas = boxes.prod(axis=-1)
        return overlaps / (areas[:, None] + areas[None] - overlaps)

    graph = poet_jax.passes.group(poet_jax.trace(overlaps_over_unions, X))
    large = [v for v in graph.producer if graph.values[v].nbytes >= X.nbytes]
    assert large == list(graph.outputs)
    expected = overlaps_over_unions(X)
    np.testing.assert_allclose(graph(X)[0], expected, rtol=1e-6)


def test_a_value_that_feeds_both_sides_of_a_product_makes_no_cycle():
    """sin -> @ -> +  with sin -> + as well: the sum cannot join sin.

    sin ------> +
      \\-> @ -/
    """

    def fun(x):
        y = jnp.sin(x)
        return y @ x + y

    assert nodes_of(fun, X) == [("sin",), ("dot_general",), ("add",)]


def test_a_tiny_broadcast_is_repeated_where_it_is_read():
    def fun(x, b):
        y = jnp.broadcast_to(b, x.shape)
        return jnp.sin(x @ x + y) @ x + y

    found = nodes_of(fun, X, jnp.ones((64,)))
    assert ("broadcast_in_dim",) not in found
    assert sum("broadcast_in_dim" in node for node in found) == 2


def test_a_step_counter_does_not_join_the_updates():
    """Adam divides every moment by a function of one counter: one node per weight."""
    optimizer = optax.adam(1e-3)
    weights = [X, X * 2, X * 3]

    def step(weights, state, x):
        def loss(weights):
            for w in weights:
                x_ = jnp.tanh(x @ w)
            return sum(jnp.sum(jnp.tanh(x_ @ w)) for w in weights)

        gradients = jax.grad(loss)(weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    graph = poet_jax.passes.group(
        poet_jax.trace(step, weights, optimizer.init(weights), X)
    )
    moments = [
        node
        for node in graph.nodes
        for v in set(node.writes).intersection(graph.outputs)
        if graph.values[v].nbytes == X.nbytes
    ]
    assert len(set(map(id, moments))) == 3
    assert len(moments) == 9  # each update writes a weight and its two moments


def test_what_reads_only_arguments_joins_its_consumer():
    """The decay of a moment is part of the update, not a copy that waits.

    x @ w -> + -> new m
    m * 0.9 -/
    """
    found = nodes_of(lambda m, x: m * 0.9 + x @ x, X, X)
    assert [sorted(node) for node in found] == [["dot_general"], ["add", "mul"]]


def test_a_long_chain_of_light_equations_and_its_gradient_fit_half_the_memory():
    """Normalising rows and columns in turns, as Sinkhorn's algorithm does, keeps two
    large values for each round."""

    def loss(x):
        for axis in (0, 1) * 10:
            x = x - jax.nn.logsumexp(x, axis, keepdims=True)
        return -jnp.trace(x)

    x = jax.random.normal(jax.random.key(0), (256, 256))
    step = poet_jax.schedule(jax.grad(loss), "50%")
    np.testing.assert_allclose(step(x), jax.grad(loss)(x), rtol=1e-5, atol=1e-6)


def test_a_group_that_takes_most_is_cut_where_a_step_does_not_fit():
    """Forces between all pairs of bodies are one group of light equations."""

    def loss(x, v):
        for _ in range(6):
            d = x[None] - x[:, None]
            squared = (d**2).sum(-1) + 0.01
            v = v + 0.005 * (d * (squared**-1.5)[..., None]).sum(1)
            x = x + 0.01 * v
        return jnp.mean(x**2)

    x = jax.random.normal(jax.random.key(0), (128, 3))
    step = poet_jax.schedule(jax.grad(loss, (0, 1)), "35%")
    for found, wanted in zip(
        step(x, 0 * x), jax.grad(loss, (0, 1))(x, 0 * x), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7)


def test_versions_of_a_buffer_are_not_made_at_once():
    """Each depends on arguments alone, and products read all but the last."""

    def step(buffer, x):
        products = []
        for n in range(4):
            products.append(x @ buffer)
            rows = jnp.tanh(buffer[:8] * 0.9)
            buffer = jax.lax.dynamic_update_slice(buffer, rows, (8 * n, 0))
        return buffer, products

    graph = poet_jax.passes.group(poet_jax.trace(step, X, jnp.ones((4, 64))))
    large = [
        sum(graph.values[v].nbytes == X.nbytes for v in x.writes) for x in graph.nodes
    ]
    assert max(large) == 1 and sum(large) == 4


def test_versions_of_a_buffer_that_nobody_else_reads_are_one_node():
    def step(buffer):
        for n in range(4):
            rows = jnp.tanh(buffer[:8] * 0.9)
            buffer = jax.lax.dynamic_update_slice(buffer, rows, (8 * n, 0))
        return buffer

    assert len(nodes_of(step, X)) == 1


def test_gradients_of_what_parts_of_a_batch_share_do_not_tie_the_parts():
    """Each part's gradient is added as soon as it is there."""

    def step(w, kernel, x):
        def loss(w):
            parts = [jnp.sin(x + n) for n in range(8)]
            return sum(jnp.mean((jnp.tanh(x * w) @ kernel) ** 2) for x in parts)

        return jax.grad(loss)(w)

    args = jnp.ones((64, 64)), jnp.eye(64), jnp.ones((16, 64, 64))
    graph = poet_jax.passes.group(poet_jax.trace(step, *args))
    large = [graph.values[v].nbytes >= args[2].nbytes for v in range(len(graph.values))]
    assert max(sum(large[v] for v in node.reads) for node in graph.nodes) <= 4
    np.testing.assert_allclose(graph(*args)[0], step(*args), rtol=1e-4)


def test_effects_stay_single_and_in_order():
    def fun(x):
        io_callback(print, None, x[0, 0], ordered=True)
        y = jnp.sin(x) @ x
        io_callback(print, None, y[0, 0], ordered=True)
        return jnp.exp(y)

    graph = poet_jax.passes.group(poet_jax.trace(fun, X))
    once = [node for node in graph.nodes if not node.repeatable]
    assert [len(node.equations) for node in once] == [1, 1]
    product = next(n for n, x in enumerate(graph.nodes) if "dot_general" in x.name)
    places = [graph.nodes.index(node) for node in once]
    assert places == sorted(places) and places[1] > product


def test_effects_make_no_cycle_with_what_joins_around_them():
    """The last equation joins the group before the first effect and one after the
    second."""

    def fun(x):
        def body(carry, row):
            jax.debug.callback(lambda _: None, row[0], ordered=True)
            return carry + row.sum(), jnp.sin(row)

        first = jnp.tanh(x @ x)
        jax.debug.callback(lambda _: None, first.mean(), ordered=True)
        _, second = jax.lax.scan(body, 0.0, x)
        return second * 2 + first

    x = jnp.eye(128)
    graph = poet_jax.passes.group(poet_jax.trace(fun, x))
    np.testing.assert_allclose(graph(x)[0], fun(x), rtol=1e-6)


def test_a_node_is_backward_if_its_last_equation_is():
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    graph = poet_jax.passes.group(poet_jax.trace(jax.grad(loss), X, X))
    marks = [node.backward for node in graph.nodes]
    assert marks == sorted(marks) and set(marks) == {False, True}
    assert "tanh" in [x.primitive.name for x in graph.nodes[1].equations]
    assert graph.nodes[1].backward


@examples(12)
@given(case=programs())
def test_the_same_equations_give_the_same_values(case):
    """Every equation is in one node (broadcasts in one or more), in a valid order."""
    fun, args = case
    fine = poet_jax.trace(fun, *args)
    graph = poet_jax.passes.group(fine)
    assert len(graph.nodes) <= len(fine.nodes)

    def count(graph):
        names = [x.primitive.name for node in graph.nodes for x in node.equations]
        away = ("broadcast_in_dim", "iota")
        return sorted(n for n in names if n not in away)

    assert count(graph) == count(fine)
    for node in graph.nodes:
        heavy = [x for x in node.equations if x.primitive.name in HEAVY]
        assert not heavy or len(node.equations) == 1 + sum(
            x.primitive.name in ("broadcast_in_dim", "iota") for x in node.equations
        )
    values = dict(graph.constants)
    values.update(zip(graph.arguments, jax.tree.leaves(args), strict=True))
    for node in graph.nodes:
        results = node(*(values[v] for v in node.reads))
        values.update(zip(node.writes, results, strict=True))
        for v, result in zip(node.writes, results, strict=True):
            expected = graph.values[v]
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    outputs = [values[v] for v in graph.outputs]
    for a, b in zip(outputs, jax.tree.leaves(fun(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_buffer_may_be_updated_a_thousand_times():
    def fun(buffer, row, w):
        found = []
        for i in range(1000):
            buffer = jax.lax.dynamic_update_slice(buffer, row, (i % 40, 0))
            found.append((buffer @ w)[0, 0])
        return buffer, jnp.stack(found)

    args = jnp.ones((40, 40)), jnp.ones((1, 40)), jnp.eye(40)
    graph = poet_jax.passes.group(poet_jax.trace(fun, *args))
    assert len(graph.nodes) >= 2000


def test_an_update_of_numbers_is_in_a_group():
    def fun(x):
        number = jax.lax.dynamic_update_slice(jnp.float32(0), jnp.float32(1), ())
        return jnp.sin(x) + number

    (found,) = poet_jax.passes.group(poet_jax.trace(fun, jnp.ones(8)))(jnp.ones(8))
    np.testing.assert_allclose(found, fun(jnp.ones(8)), rtol=1e-6)
