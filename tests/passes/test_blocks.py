"""Large values in blocks: the numbers of the whole, in the memory of a block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from strategies import examples
from toy import OPTIONS

import poet_jax
from poet_jax.passes import PASSES, blockwise, group, unroll

ROWS, WIDTH, WORDS = 24, 8, 40


def draw(seed, *shape):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, jnp.float32)


LABELS = jnp.asarray(np.random.default_rng(0).integers(0, WORDS, ROWS))


def vocabulary(w, x):
    logits = jnp.tanh(x) @ w
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, LABELS))


def smoothed(w, x):
    logits = x @ w
    kept = logits > -1.0
    targets = 0.9 * jax.nn.one_hot(LABELS, WORDS) + 0.1 / WORDS
    losses = -jnp.sum(targets * jax.nn.log_softmax(jnp.where(kept, logits, -9.0)), -1)
    weights = jnp.where(LABELS > 3, 1.0, 0.5)
    return jnp.sum(losses * weights) / jnp.sum(weights)


def in_batches(w, x):
    logits = jnp.einsum("bld,dv->blv", x.reshape(4, 6, WIDTH), w)
    labels = LABELS.reshape(4, 6)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(jnp.mean(losses, 1)) + 1e-3 * jnp.mean(jnp.max(logits, -1))


def attention(w, x):
    heads = (x @ w).reshape(1, ROWS, 2, 20)
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads, jnp.sin(heads)) / 4
    mask = jnp.tril(jnp.ones((ROWS, ROWS), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
    return jnp.mean(jnp.einsum("bhqk,bkhd->bqhd", weights, heads) ** 2)


def hidden(w, x):
    return jnp.mean((jax.nn.gelu(x @ w) @ w.T) ** 2)


def contrastive(w, x):
    own = jnp.sum(x * jnp.sin(x), -1, keepdims=True)
    logits = jnp.concatenate([own, x @ w], 1) / 0.07
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


def gated(w, x):
    gate, middle, end = jnp.split(x @ w, [WORDS // 4, WORDS // 2], 1)
    end = lax.dynamic_slice_in_dim(end, jnp.argmax(w[0]), WORDS // 4, 1)
    best = lax.top_k(jnp.pad(gate * jnp.tanh(middle), ((0, 0), (1, 2))), 5)[0]
    written = lax.dynamic_update_slice_in_dim(middle * end, best, 3, 1)
    return jnp.mean(jnp.cumsum(jnp.flip(jnp.sort(written, 1), 1), 1)[:, 1::2] ** 2)


def deep(w, x):
    """Each product is a small share of what is kept."""
    for _ in range(8):
        x = jnp.tanh(x @ w) @ w.T
    return jnp.mean(x**2)


def with_dropout(w, x):
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, (ROWS, WORDS))
    return jnp.mean(jnp.where(kept, jnp.tanh(x @ w), 0) ** 2)


def by_example(w, x):
    norms = jax.vmap(lambda row: jnp.sum(jax.grad(lambda w: vector(w, row))(w) ** 2))
    return jnp.mean(norms(x))


def vector(w, row):
    return jnp.sum(jnp.tanh(row @ w) ** 2)


LOSSES = {
    fun.__name__: fun
    for fun in (
        vocabulary,
        smoothed,
        in_batches,
        attention,
        hidden,
        contrastive,
        gated,
        deep,
        with_dropout,
        by_example,
    )
}


def largest_bytes(graph):
    return max(graph.values[v].nbytes for node in graph.nodes for v in node.writes)


@examples(16)
@given(
    name=st.sampled_from(sorted(LOSSES)),
    blocks=st.integers(2, 9),
    seed=st.integers(0, 5),
)
def test_blocks_compute_what_the_whole_does(name, blocks, seed):
    step = jax.value_and_grad(LOSSES[name], (0, 1))
    args = draw(seed, WIDTH, WORDS), draw(seed + 1, ROWS, WIDTH)
    graph = poet_jax.trace(step, *args)
    cut = blockwise(graph, large_bytes=1, blocks=blocks)
    results = jax.jit(cut.__call__)(*args)
    for a, b in zip(results, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_sums_of_halves_over_blocks_are_rounded_once():
    x, w = (abs(draw(n, 4096, 16)).astype(jnp.bfloat16) for n in range(2))
    w = w[:64]

    def fun(x, w):
        return jax.nn.sigmoid(x @ w.T).T @ x

    graph = blockwise(poet_jax.trace(fun, x, w), large_bytes=1, blocks=64)
    assert len(graph.nodes) > 64
    (found,) = jax.jit(graph.__call__)(x, w)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        *(jnp.float32(y) for y in (found, jax.jit(fun)(x, w))), rtol=2**-7
    )


def test_sums_of_bools_over_blocks_are_as_in_logic():
    def fun(w, x, m):
        y = x @ w
        return (y > 0.5).T @ m, jnp.tanh(y).sum()

    args = draw(0, WIDTH, WORDS), draw(1, ROWS, WIDTH), draw(2, ROWS, 3) > 0.5
    graph = poet_jax.trace(fun, *args)
    cut = blockwise(graph, large_bytes=1, blocks=4)
    assert cut is not graph
    for a, b in zip(jax.jit(cut.__call__)(*args), fun(*args), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["vocabulary", "smoothed", "in_batches", "hidden", "contrastive", "gated", "deep"],
)
def test_no_large_value_is_left(name):
    args = draw(0, WIDTH, WORDS), draw(1, ROWS, WIDTH)
    graph = poet_jax.trace(jax.value_and_grad(LOSSES[name]), *args)
    cut = blockwise(graph, large_bytes=1, blocks=4)
    assert largest_bytes(cut) < largest_bytes(graph) / 2


@pytest.mark.parametrize("name", ["vocabulary", "attention"])
def test_a_step_needs_a_fifth_of_what_jit_needs(name):
    rows, words, width = 512, 2048, 16
    labels = jnp.arange(rows) % words

    def vocabulary(w, x):
        logits = jnp.tanh(x) @ w
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def attention(w, x):
        heads = (x @ w[:, :width]).reshape(1, rows, 1, width)
        return jnp.mean(jax.nn.dot_product_attention(heads, heads, heads) ** 2)

    fun = jax.value_and_grad({"vocabulary": vocabulary, "attention": attention}[name])
    args = draw(0, width, words), draw(1, rows, width)
    passes = [functools.partial(blockwise, large_bytes=2**19)]
    passes = [passes[0] if x is blockwise else x for x in PASSES]
    make = functools.partial(poet_jax.schedule, fun, passes=passes, **OPTIONS)
    jit = jax.jit(fun).lower(*args).compile().memory_analysis()
    assert jit is not None
    budget = sum(x.nbytes for x in args) + args[0].nbytes + jit.temp_size_in_bytes // 5
    scheduled = make(budget)
    assert scheduled.plan(*args).compiled_bytes <= budget
    for a, b in zip(
        jax.tree.leaves(scheduled(*args)), jax.tree.leaves(fun(*args)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_products_of_small_operands_are_made_in_blocks():
    """A dense Hessian has outer products, which are large, of cuts and of a tangent."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w[:16].reshape(WIDTH, 2)) @ w[16:]))

    args = draw(0, 18), draw(1, 96, WIDTH)
    graph = poet_jax.trace(jax.jacfwd(jax.jacrev(loss)), *args)
    cut = blockwise(graph, large_bytes=2**12, blocks=8)
    assert largest_bytes(cut) < largest_bytes(graph) / 2
    (found,) = jax.jit(cut.__call__)(*args)
    expected = jax.jit(jax.hessian(loss))(*args)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)


def test_without_products_what_is_made_of_small_values_is_in_blocks():
    """Rays at many angles read one image, and its gradient adds up over them."""

    def loss(image, angles):
        def ray_sums(angle):
            x, y = jnp.meshgrid(jnp.arange(12.0), jnp.arange(16.0))
            places = [jnp.cos(angle) * x + y, y - jnp.sin(angle) * x]
            return jax.scipy.ndimage.map_coordinates(image, places, 0, "nearest").sum(0)

        return jnp.mean(jax.vmap(ray_sums)(angles) ** 2)

    step, args = jax.value_and_grad(loss), (draw(0, 12, 16), draw(1, 60))
    graph = poet_jax.trace(step, *args)
    assert blockwise(graph) is graph
    cut = blockwise(graph, large_bytes=2**14, blocks=5)
    assert largest_bytes(cut) < largest_bytes(graph) / 4
    results = jax.jit(cut.__call__)(*args)
    for a, b in zip(results, jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("nodes", [3, 60])
def test_messages_along_edges_are_in_blocks(nodes):
    """A graph network: an edge reads two nodes, and a node sums its edges."""
    edges = 240
    rng = np.random.default_rng(0)
    senders, receivers = jnp.asarray(rng.integers(0, nodes, (2, edges)))

    def loss(ws, x):
        for w in ws:
            ends = jnp.concatenate([x[senders], x[receivers]], -1)
            messages = jnp.tanh(ends @ w)
            x = x + jax.ops.segment_sum(messages, receivers, nodes) / edges
        return jnp.mean(x**2)

    step = jax.value_and_grad(loss, (0, 1))
    args = draw(0, 2, 2 * WIDTH, WIDTH), draw(1, nodes, WIDTH)
    graph = poet_jax.trace(step, *args)
    cut = blockwise(graph, large_bytes=4 * edges * WIDTH, blocks=8)
    assert largest_bytes(cut) < largest_bytes(graph) / 4
    results = jax.jit(cut.__call__)(*args)
    for a, b in zip(results, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_a_sum_into_a_larger_table_is_of_the_whole():
    """Words of an embedding are few of many: blocks would all go through its table."""

    def loss(table, w):
        return jnp.mean(jnp.cumsum(table[LABELS] @ w, 1) ** 2)

    args = draw(0, WORDS, WIDTH), draw(1, WIDTH, 5 * WORDS)
    graph = poet_jax.trace(jax.grad(loss, (0, 1)), *args)
    cut = blockwise(graph, large_bytes=1, blocks=4)
    assert cut is not graph
    names = [e.primitive.name for node in cut.nodes for e in node.equations]
    assert sum(name in ("scatter-add", "scatter_add") for name in names) == 1


def test_stacked_state_may_be_what_blocks_add_up():
    """The new rows are gradients of products, which sum over the blocks."""
    ws, x = draw(0, 2, 8, 512), draw(1, 96, 8)

    def step(ws, x):
        def loss(ws):
            def layer(h, w):
                return h + jnp.sum(jnp.tanh(h @ w), -1, keepdims=True) / 512, None

            return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)

        return jax.grad(loss)(ws)

    expected = step(ws, x)
    graph = unroll(poet_jax.trace(jax.jit(step, donate_argnums=0), ws, x))
    cut = blockwise(graph, large_bytes=1, blocks=4)
    assert cut is not graph and cut.stacks
    np.testing.assert_allclose(cut(ws, x)[0], expected, rtol=2e-4, atol=1e-6)


def test_what_is_small_or_not_saved_is_left_as_it_is():
    args = draw(0, WIDTH, WORDS), draw(1, ROWS, WIDTH)
    graph = poet_jax.trace(jax.grad(vocabulary), *args)
    assert blockwise(graph) is graph
    product = poet_jax.trace(jnp.matmul, args[1], args[0])
    assert blockwise(product, large_bytes=1) is product
    with pytest.raises(ValueError, match="Put it before group"):
        blockwise(group(graph), large_bytes=1)
