"""A slice of a product is a product of slices: the same numbers for less."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_three_sentences
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from strategies import examples, programs

import poet_jax
from poet_jax.core.costs import node_flops


def normal(shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def both(fun, *args):
    """(graph as traced, after both passes), once they are seen to compute the same."""
    before = poet_jax.trace(fun, *args)
    after = poet_jax.passes.reassociate(poet_jax.passes.push_slices(before))
    results = jax.jit(lambda *x: (before(*x), after(*x)))(*jax.tree.leaves(args))
    for a, b in zip(*results, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    return before, after


@pytest.mark.parametrize("shape", [(), (128,)])
def test_what_is_added_to_a_product_may_repeat(shape):
    """As a bias, or the number in a scaled identity."""
    keys = jax.random.split(jax.random.key(0), 4)
    a, b, x = (
        jax.random.normal(key, size)
        for key, size in zip(keys, ((128, 2), (2, 128), (128, 128)), strict=False)
    )
    more = jax.random.normal(keys[3], shape)
    both(lambda a, b, x, more: x @ (a @ b + more), a, b, x, more)


def product_flops(graph):
    names = ("dot_general", "conv_general_dilated")
    nodes = (n for n in graph.nodes if n.equations[0].primitive.name in names)
    return sum(map(node_flops, nodes))


CUTS = {
    "slice": lambda x, axis, start, size: lax.slice_in_dim(
        x, start, start + size, 1, axis
    ),
    "dynamic": lambda x, axis, start, size: lax.dynamic_slice_in_dim(
        x, start, size, axis
    ),
    "gather": lambda x, axis, start, size: (
        jnp.moveaxis(x, axis, 0)
        .at[jnp.arange(start, start + size)]
        .get(mode="promise_in_bounds")
    ),
    "clipped": lambda x, axis, start, size: jnp.take(
        x, np.arange(size)[::-1] * 3, axis, mode="clip"
    ),
}
BETWEEN = {
    "tanh": lambda z, scale: jnp.tanh(z),
    "cast": lambda z, scale: z.astype(jnp.float16).astype(jnp.float32),
    "scale": lambda z, scale: z * scale + 1,
    "reshape": lambda z, scale: lax.squeeze(z.reshape(1, *z.shape), (0,)),
    "sum": lambda z, scale: z - jnp.ones(z.shape),
}


@examples(25)
@given(data=st.data())
def test_a_part_of_any_matrix_product_is_a_product_of_parts(data):
    """Batch, contracted and free axes in any order, and steps up to the slice."""
    draw = data.draw
    kinds = {"batch": draw(st.integers(0, 1)), "bound": draw(st.integers(1, 2))}
    sizes = iter(draw(st.permutations([2, 3, 4, 5, 6])))
    common = [(kind, next(sizes)) for kind, n in kinds.items() for _ in range(n)]
    sides = [draw(st.permutations([*common, ("free", next(sizes))])) for _ in range(2)]
    numbers = tuple(
        tuple(tuple(side.index(x) for x in common if x[0] == kind) for side in sides)
        for kind in ("bound", "batch")
    )
    shapes = [tuple(n for _, n in side) for side in sides]
    steps = draw(st.lists(st.sampled_from(sorted(BETWEEN)), max_size=3))
    kind = draw(st.sampled_from(sorted(CUTS)))
    rank = 2 + kinds["batch"]
    axis, order = draw(st.integers(0, rank - 1)), draw(st.permutations(range(rank)))
    share = []

    def fun(x, y, scale):
        z = lax.transpose(lax.dot_general(x, y, numbers), order)
        for step in steps:
            z = BETWEEN[step](z, scale)
        size = math.ceil(z.shape[axis] / 2)
        share.append(size / z.shape[axis])
        return CUTS[kind](z, axis, z.shape[axis] - size, size)

    x, y = (normal(shape) for shape in shapes)
    before, after = both(fun, x, y, jnp.float32(0.5))
    assert product_flops(after) == pytest.approx(share[0] * product_flops(before))


@examples(12)
@given(data=st.data())
def test_a_part_of_any_filter_gradient_is_that_of_a_part_of_the_image(data):
    draw = data.draw
    inputs, outputs, groups = draw(st.sampled_from([(4, 6, 1), (8, 4, 1), (4, 4, 2)]))
    axis, kind = draw(st.integers(2, 3)), draw(st.sampled_from(sorted(CUTS)))
    layout = draw(st.sampled_from([("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")]))
    image = normal((2, 7, 7, inputs))
    kernel = normal((3, 3, inputs // groups, outputs))
    if layout[0] == "NCHW":
        image, kernel = image.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1)
        axis = 3 - axis

    def loss(kernel, image):
        out = lax.conv_general_dilated(
            image,
            kernel,
            (draw(st.integers(1, 2)),) * 2,
            draw(st.sampled_from(["SAME", "VALID"])),
            rhs_dilation=(draw(st.integers(1, 2)),) * 2,
            dimension_numbers=layout,
            feature_group_count=groups,
        )
        return jnp.sum(out * 0.1)

    def fun(kernel, image):
        slope = jax.grad(loss)(kernel, image)
        return CUTS[kind](slope, axis, 0, kernel.shape[axis] // 2)

    before, after = both(fun, kernel, image)
    share = 0.5 if groups == 1 else 1.0
    assert product_flops(after) == pytest.approx(share * product_flops(before))


@examples(5)
@given(case=programs())
def test_a_step_that_slices_nothing_is_left_alone(case):
    fun, args = case
    traced = poet_jax.trace(fun, *args)
    assert poet_jax.passes.push_slices(traced) is traced


def test_what_is_read_whole_is_not_taken_in_parts():
    def fun(x, y):
        z = x @ y
        return z[:2], z.sum()

    traced = poet_jax.trace(fun, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert poet_jax.passes.push_slices(traced) is traced
    both(lambda x, y: ((x @ y)[:2], x @ y), jnp.ones((4, 4)), jnp.ones((4, 4)))


@pytest.mark.parametrize(
    ("put", "is_same"),
    [
        (lambda w, i, j: lax.dynamic_update_slice(w, w[1:3], (1, 0)), True),
        (lambda w, i, j: lax.dynamic_update_slice(w, w[2:4], (1, 0)), False),
        (lambda w, i, j: w.at[i].set(w[i], unique_indices=True), True),
        (lambda w, i, j: w.at[i].set(w[j], unique_indices=True), False),
        (lambda w, i, j: w.at[i].add(w[i], unique_indices=True), False),
    ],
    ids=["slice", "another slice", "gather", "another gather", "sum"],
)
def test_only_a_part_that_is_put_where_it_was_is_nothing(put, is_same):
    def fun(w, i, j):
        return jnp.tanh(put(w, i.astype(jnp.uint32), j.astype(jnp.uint32)))

    i, j = jnp.array([0, 2]), jnp.array([1, 3])
    _, after = both(fun, normal((4, 3)), i, j)
    assert (len(after.nodes) == 1) == is_same


N, WIDTH, RANK = 64, 32, 2


def adapted(x, w, a, b):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ (w + a @ b)) @ (w + a @ b).T) ** 2)


def test_neither_an_adapted_kernel_nor_its_gradient_is_formed():
    args = (
        normal((N, WIDTH)),
        *(normal(s) / 8 for s in ((WIDTH, WIDTH), (WIDTH, RANK), (RANK, WIDTH))),
    )
    before, after = both(jax.grad(adapted, (2, 3)), *args)
    kernels = [v for v in after.producer if after.values[v].shape == (WIDTH, WIDTH)]
    # The second product transposes the sum, which stays.
    assert len(kernels) < sum(
        before.values[v].shape == (WIDTH, WIDTH) for v in before.producer
    )
    fun = functools.partial(
        jax.grad(lambda x, w, a, b: jnp.mean(jnp.tanh(x @ (w + a @ b)) ** 2), (2, 3))
    )
    before, after = both(fun, *args)
    assert all(after.values[v].shape != (WIDTH, WIDTH) for v in after.producer)
    thin = 2.0 * N * WIDTH * RANK
    # x w, and with a thin matrix x a, (x a) b, dy b, x (dy b) and (x a) dy.
    assert product_flops(after) == 2.0 * N * WIDTH**2 + 5 * thin
    assert product_flops(before) > 4.0 * N * WIDTH**2


@examples(8)
@given(
    widths=st.lists(st.sampled_from([16, 32, 64]), min_size=2, max_size=3),
    rank=st.sampled_from([1, 4]),
    bent=st.integers(0, 3),
)
def test_adapted_kernels_with_or_without_an_activation_between_them(widths, rank, bent):
    """`bent` is the first layer without an activation before it. The first and the last
    have thin kernels."""
    shapes = list(itertools.pairwise((4, *widths, 4)))
    w = [normal((n, m)) / n for n, m in shapes]
    t = [(normal((n, rank)) / n, normal((rank, m)) / 4) for n, m in shapes]

    def loss(t, w, x):
        for layer, (kernel, (a, b)) in enumerate(zip(w, t, strict=True)):
            x = (jnp.tanh(x) if layer < bent else x) @ (kernel + a @ b)
        return jnp.sum(x**2)

    both(jax.grad(loss, (0, 2)), t, w, normal((N, 4)))


@pytest.mark.parametrize("start, size", [(-11, 2), (-3, 2), (0, 4), (5, 4)])
def test_a_slice_beyond_the_ends_is_what_jax_makes_of_it(start, size):
    _, after = both(
        lambda x, y: lax.dynamic_slice_in_dim(x @ y, start, size),
        normal((6, 3)),
        normal((3, 5)),
    )
    assert product_flops(after) == 2 * size * 3 * 5


def test_a_gather_of_more_rows_than_there_are_stays_behind_the_product():
    where = np.arange(40) % 8
    before, after = both(
        lambda x, w, where: (x @ w).at[where].get(mode="promise_in_bounds"),
        normal((8, 4)),
        normal((4, 4)),
        where,
    )
    assert product_flops(after) == product_flops(before)


def test_indices_that_a_sliced_product_makes_come_first():
    def fun(x, w, r):
        _, where = lax.top_k((x @ r)[:, 0], 3)
        return jnp.take(x @ w, where, axis=0, mode="clip")

    both(fun, normal((8, 4)), normal((4, 4)), normal((4, 2)))


@pytest.mark.parametrize(
    "read",
    [
        lambda g, v: g @ g.T,
        lambda g, v: g.T @ (g @ v),
        lambda g, v: (g + v[:, None] @ v[None]) @ (g + v[:, None] @ v[None]).T,
    ],
    ids=["both sides", "in turn", "a sum"],
)
def test_a_gradient_that_products_read_twice(read):
    def fun(w, x, v):
        return read(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), v)

    both(fun, normal((32, 32)), normal((2, 32)), normal((32,)))


def test_a_part_that_is_returned_twice_is_two_outputs():
    _, after = both(lambda x, w: ((x @ w)[:4],) * 2, normal((8, 4)), normal((4, 4)))
    assert len(set(after.outputs)) == 2


def test_a_graph_of_groups_is_refused():
    graph = poet_jax.passes.group(poet_jax.trace(lambda x: jnp.sin(x) * 2, jnp.ones(9)))
    with pytest.raises(ValueError) as caught:
        poet_jax.passes.push_slices(graph)
    assert_three_sentences(caught.value, "passes=")


@pytest.mark.parametrize("budget", ["1GiB", "95%"], ids=["whole", "planned"])
def test_it_is_a_pass_that_can_be_left_out(budget):
    from toy import OPTIONS

    def fun(w, x):
        x = jnp.tanh(x)
        slope = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return slope[:4]

    args = jnp.eye(16), normal((512, 16))
    options = OPTIONS | {"executor": poet_jax.HostExecutor()}
    expected = jax.jit(fun)(*args)
    flops = []
    for more in ({}, {"passes": (poet_jax.passes.group, poet_jax.passes.reorder)}):
        scheduled = poet_jax.schedule(fun, budget, **options, **more)
        graph = scheduled.plan(*args).graph
        flops.append(sum(map(node_flops, graph.nodes)))
        np.testing.assert_allclose(scheduled(*args), expected, rtol=1e-4, atol=1e-7)
    assert flops[0] < flops[1]


def test_sizes_show_what_it_saves():
    def fun(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.exp(x) @ w)))(w)[:64]

    before = poet_jax.trace(fun, jnp.ones((256, 256)), jnp.ones((1024, 256)))
    text = poet_jax.viz.table.sizes(
        before=before, after=poet_jax.passes.push_slices(before)
    ).splitlines()
    assert text[0].split() == ["nodes", "written", "saved", "FLOPs"]
    assert [line.split()[0] for line in text[1:]] == ["before", "after"]
    saved = [float(line.split()[4]) for line in text[1:]]
    assert saved[0] - saved[1] == pytest.approx(0.75, abs=0.06)  # MiB


@pytest.mark.parametrize("is_smooth", [False, True])
def test_a_part_is_saved_only_if_the_whole_is_not(is_smooth):
    """The slope of exp is its result, that of relu does not need it."""

    def fun(w, x):
        def loss(w):
            y = (jnp.exp if is_smooth else jax.nn.relu)(x @ w[0])
            return jnp.sum(jnp.tanh(y @ w[1]))

        first, second = jax.grad(loss)(w)
        return first, second[:16]

    _, after = both(fun, [normal((32, 64)) / 16, normal((64, 32))], normal((512, 32)))
    graph = poet_jax.passes.reorder(poet_jax.passes.group(after))
    parts = [
        n for n in graph.nodes for v in n.writes if graph.values[v].shape == (512, 16)
    ]
    assert parts and all(node.backward == is_smooth for node in parts)
