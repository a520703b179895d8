"""Transposes, and zeros to scatter into, that a step can do without."""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax import lax

import poet_jax
from poet_jax.passes import simplify

WORDS, WIDTH = 4096, 64


def loss(table, tokens):
    """Of a model that embeds words and makes logits with one table."""
    logits = jnp.tanh(table[tokens[:-1]]) @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()


def step(table, tokens):
    return table - 0.1 * jax.grad(loss)(table, tokens)


def arguments(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0))
    table = jax.random.normal(keys[0], (WORDS, WIDTH), dtype)
    return table, jax.random.randint(keys[1], (33,), 0, 8)  # words come several times


def names(graph):
    return [e.primitive.name for node in graph.nodes for e in node.equations]


def test_the_gradient_of_a_tied_table_needs_one_array_of_its_size():
    args = arguments()
    within = poet_jax.schedule(step, "100%", donate_argnums=0, passes=(simplify,))
    graph = within.plan(*args).graph
    large = [v for v in graph.producer if graph.values[v].nbytes == args[0].nbytes]
    # The product, with rows scattered into it, times the rate, and the new table.
    assert len(large) == 4
    np.testing.assert_allclose(
        within(jnp.array(args[0]), args[1]), step(*args), rtol=1e-5, atol=1e-6
    )


@hypothesis.given(st.permutations(range(3)), st.permutations(range(3)))
def test_a_transpose_of_a_transpose_is_one_or_none(first, second):
    def fun(x):
        return jnp.sin(lax.transpose(lax.transpose(x, first), second))

    x = jnp.arange(24.0).reshape(2, 3, 4)
    graph = simplify(poet_jax.trace(fun, x))
    order = tuple(first[axis] for axis in second)
    assert names(graph).count("transpose") == (order != (0, 1, 2))
    within = poet_jax.schedule(fun, "100%", passes=(simplify,))
    np.testing.assert_array_equal(within(x), fun(x))


@pytest.mark.parametrize(
    "subscripts",
    ["ij,jk->ki", "bik,bkj->bji", "kij,kmn->mnij", "bijm,bjin->bnm"],
)
def test_the_transpose_of_a_product_is_a_product(subscripts):
    """As the gradient of a kernel is, of each example, too."""
    operands, result = subscripts.split("->")
    left, right = (
        np.random.default_rng(0).normal(size=(4,) * len(x)).astype(np.float32)
        for x in operands.split(",")
    )

    def fun(left, right):
        first = "".join(sorted(result, key=subscripts.index))  # as dot_general has it
        product = jnp.einsum(f"{operands}->{first}", left, right)
        return jnp.tanh(product.transpose([first.index(x) for x in result]))

    graph = simplify(poet_jax.trace(fun, left, right))
    assert "transpose" not in names(graph)
    np.testing.assert_allclose(graph(left, right)[0], fun(left, right), rtol=1e-5)


def test_a_kernel_gets_its_gradient_as_it_lies():
    """JAX takes the gradient of x @ kernel as slope.T @ x, and turns it; an update
    would read that across its rows."""

    def step(kernel, x):
        def loss(kernel):
            return (jnp.tanh(x @ kernel) ** 2).sum()

        return kernel - 0.1 * jax.grad(loss)(kernel)

    kernel = jax.random.normal(jax.random.key(0), (32, 64))
    x = jax.random.normal(jax.random.key(1), (48, 32))
    fine = poet_jax.trace(step, kernel, x)
    assert names(fine).count("transpose") == 1
    graph = simplify(fine)
    assert "transpose" not in names(graph)
    product = [node for node in graph.nodes if node.name.endswith("dot_general")][-1]
    assert graph.values[product.writes[0]].shape == kernel.shape
    expected = jax.jit(step)(kernel, x)
    np.testing.assert_allclose(graph(kernel, x)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "fun",
    [
        lambda a, b: (jnp.tanh((product := a @ b).T), jnp.exp(product)),
        lambda a, b: ((product := a @ b), jnp.tanh(product.T)),
        lambda a, b: jnp.swapaxes(jnp.broadcast_to(a @ b, (2, 8, 8)), 1, 2),
    ],
)
def test_a_product_that_is_read_otherwise_too_stays_as_it_is(fun):
    traced = poet_jax.trace(fun, jnp.ones((8, 4)), jnp.ones((4, 8)))
    assert simplify(traced) is traced


@pytest.mark.parametrize("sides", [*itertools.product((False, True), repeat=2)])
def test_a_product_reads_a_matrix_instead_of_its_transpose(sides):
    def fun(a, b):
        return (a.T if sides[0] else a) @ (b.T if sides[1] else b)

    a, b = jax.random.normal(jax.random.key(0), (2, 4, 4))
    graph = simplify(poet_jax.trace(fun, a, b))
    assert names(graph) == ["dot_general"]
    within = poet_jax.schedule(fun, "100%", passes=(simplify,))
    np.testing.assert_allclose(within(a, b), fun(a, b), rtol=1e-5)


def test_an_outer_product_keeps_the_order_of_axes():
    def fun(a, b):
        return jnp.tanh(jnp.tensordot(a.T, b.T, axes=0)).sum((2, 3))

    a, b = jax.random.normal(jax.random.key(0), (2, 4, 3))
    graph = simplify(poet_jax.trace(fun, a, b))
    (found,) = graph(a, b)
    np.testing.assert_allclose(found, fun(a, b), rtol=1e-5, atol=1e-6)


def test_what_a_caller_gets_is_an_array_of_its_own():
    traced = poet_jax.trace(lambda x: x.T.T, jnp.ones((2, 3)))
    assert simplify(traced) is traced


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, i, u: x + jnp.ones_like(x).at[i].add(u),  # not into zeros
        lambda x, i, u: (y := jnp.zeros_like(x).at[i].add(u), x + y),  # read elsewhere
        lambda x, i, u: x[:1] + jnp.zeros_like(x).at[i].add(u),  # of another shape
        lambda x, i, u: x + jnp.zeros_like(x).at[i].set(u),  # not added up
    ],
)
def test_other_scatters_stay(fun):
    x, indices = jnp.ones((8, 4)), jnp.array([1, 1, 3])
    traced = poet_jax.trace(fun, x, indices, jnp.ones((3, 4)))
    assert simplify(traced) is traced


def test_types_of_few_bits_add_small_numbers_first():
    traced = poet_jax.trace(jax.grad(loss), *arguments(jnp.bfloat16))
    assert names(simplify(traced)).count("add_any") == names(traced).count("add_any")
