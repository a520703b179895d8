"""Loops and branches in C, beside JAX."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boards import assert_alike, normal, results, scheduled
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from strategies import examples

import poet_jax

SHAPES = [(), (3,), (2, 3), (3, 3)]


def picked(rng, count):
    """Shapes, some of them equal."""
    return [SHAPES[x] for x in rng.integers(len(SHAPES), size=count)]


def random_body(rng, shapes, made):
    """A function of arrays of some shapes, whose results have the shapes `made`."""
    plans = [(*rng.integers(len(shapes), size=2), rng.integers(7)) for _ in made]

    def one(arrays, shape, first, second, kind):
        same = [x for x in arrays if x.shape == shape]
        x = same[first % len(same)] if same else jnp.zeros(shape, jnp.float32)
        y = arrays[second].sum() * 0.3
        match kind:
            case 0:
                return x
            case 1:
                return jnp.tanh(x + y)
            case 2 if len(shape) == 2:
                return jnp.tanh(0.2 * (x @ x.T @ x))
            case 3 if shape:
                return x.at[shape[0] // 2].set(y, mode="clip")
            case 4:
                return jnp.full(shape, 0.5)
            case 5 if shape:
                return jnp.flip(x, 0) - 1
        return jnp.where(x > y, x, -0.9 * x)

    def function(*arrays):
        pairs = zip(made, plans, strict=True)
        return tuple(one(arrays, shape, *plan) for shape, plan in pairs)

    return function


def random_scan(rng, body=random_body):
    """With constants, rows and stacked results, or without."""
    consts, carry, rows, made = (picked(rng, n) for n in rng.integers(0, 4, 4))
    carry = [*carry, (3,)]
    length, reverse = int(rng.integers(1, 5)), bool(rng.random() < 0.5)
    inside = body(rng, [*consts, *carry, *rows], [*carry, *made])

    def function(consts, carry, rows):
        def step(carry, rows):
            results = inside(*consts, *carry, *rows)
            return results[: len(carry)], results[len(carry) :]

        return lax.scan(step, tuple(carry), tuple(rows), length, reverse)

    arrays = [normal(rng, *shape) for shape in (*consts, *carry)]
    stacked = [normal(rng, length, *shape) for shape in rows]
    return function, (arrays[: len(consts)], arrays[len(consts) :], stacked)


def random_while(rng):
    """As often as an array says, or until another one is large."""
    consts, carry = (picked(rng, n) for n in rng.integers(1, 4, 2))
    inside = random_body(rng, [*consts, *carry], carry)
    most = np.float32(rng.uniform(0, 2))

    def function(consts, carry, count, most):
        def goes_on(state):
            number, carry = state
            return (number < count) & (
                jnp.abs(carry[-1]).max() < most + consts[0].min()
            )

        def step(state):
            number, carry = state
            return number + 1, inside(*consts, *carry)

        return lax.while_loop(goes_on, step, (jnp.int32(0), tuple(carry)))

    arrays = [[normal(rng, *x) for x in shapes] for shapes in (consts, carry)]
    return function, (*arrays, np.int32(rng.integers(5)), most)


def random_branch(rng):
    """Of two by a truth value, or of three by a number that may be none of theirs."""
    shapes, made = (picked(rng, n) for n in rng.integers(1, 4, 2))
    count = int(rng.integers(2, 4))
    branches = [random_body(rng, shapes, made) for _ in range(count)]
    arrays = [normal(rng, *shape) for shape in shapes]
    index = np.int32(rng.integers(-1, 4))
    if count == 2:
        return lambda i, *xs: lax.cond(i > 1, *branches, *xs), (index, *arrays)
    return lambda i, *xs: lax.switch(i, branches, *xs), (index, *arrays)


def random_body_with_branch(rng, shapes, made):
    """Which of two bodies is run, the arrays say."""
    branches = [random_body(rng, shapes, made) for _ in range(2)]

    def function(*arrays):
        return lax.cond(arrays[-1].sum() > 0, *branches, *arrays)

    return function


def random_body_with_loop(rng, shapes, made):
    body = random_body(rng, [*made, *shapes], made)
    first = random_body(rng, shapes, made)
    count = int(rng.integers(0, 3))

    def function(*arrays):
        def step(_, state):
            return body(*state, *arrays)

        return lax.fori_loop(0, count, step, first(*arrays))

    return function


KINDS = {
    "scan": random_scan,
    "while": random_while,
    "branch": random_branch,
    "branch in a scan": lambda rng: random_scan(rng, random_body_with_branch),
    "loop in a scan": lambda rng: random_scan(rng, random_body_with_loop),
}


def test_each_element_of_a_batch_leaves_a_loop_by_itself(tmp_path):
    def times(row, count):
        return lax.fori_loop(0, count, lambda i, row: row * 1.5 + i, row)

    def halved(row):
        return lax.while_loop(lambda row: row.sum() > 1, lambda row: row / 2, row)

    rows = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    counts = np.array([0, 5, 2, 3], np.int32)
    batches = np.stack([rows, 40 * rows])
    assert_alike(
        [
            (jax.vmap(times), (rows, counts)),
            (jax.vmap(jax.vmap(halved)), (batches,)),
        ],
        tmp_path,
    )


@pytest.mark.parametrize("kinds", [list(KINDS)[:3], list(KINDS)[3:]], ids=str)
@examples(1)
@given(seed=st.integers(0, 2**32 - 1))
def test_loops_and_branches_compute_what_jax_does(kinds, seed):
    """Many random cases, as one program."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        cases = [KINDS[kind](rng) for kind in kinds for _ in range(24 // len(kinds))]
        assert_alike(cases, pathlib.Path(folder))


def test_what_nobody_reads_inside_a_loop_is_there_after_it(tmp_path):
    """And what a later branch or iteration reads, and what changes places."""
    x = np.linspace(-1, 1, 8, dtype=np.float32)

    def written_only(x):
        def goes_on(state):
            return jnp.tanh(x[:, None] * x + state[0]).sum() < 4

        def step(state):
            return state[0] + 1, jnp.full(4, 7 * state[0])

        return lax.while_loop(goes_on, step, (np.float32(0), jnp.full(4, 9.0)))

    def read_again(x):
        y = jnp.cumsum(x)

        def step(s, row):
            return jnp.tanh(s @ s + y.sum() * row) * jnp.ones(8), jnp.cumsum(s)

        return lax.scan(step, x, x)

    def swapped(x):
        def step(_, state):
            a, b, c = state
            return b, a, a

        return lax.fori_loop(0, 3, step, (x, x + 1, x * 2))

    def read_in_the_second_branch(x, i):
        y = jnp.cumsum(x)
        ways = [lambda x, y: jnp.cumsum(x) + x, lambda x, y: jnp.cumsum(y) + y]
        return lax.switch(i, ways, x, y), y.sum()

    cases = [(f, (x,)) for f in (written_only, read_again, swapped)]
    cases += [(read_in_the_second_branch, (x, np.int32(i))) for i in range(2)]
    assert_alike(cases, tmp_path)


def recurrent(key=0, length=6, width=8, inputs=3):
    """(step of gradient descent, weights, rows, targets) of a small recurrent net."""
    rng = np.random.default_rng(key)
    shapes = [(width, width), (inputs, width), (width, 1)]
    weights = [normal(rng, *shape) * np.float32(0.4) for shape in shapes]

    def loss(weights, rows, targets):
        def cell(state, row):
            state = jnp.tanh(state @ weights[0] + row @ weights[1])
            return state, state @ weights[2]

        first = jnp.zeros((rows.shape[1], width))
        return ((lax.scan(cell, first, rows)[1] - targets) ** 2).mean()

    def step(weights, rows, targets):
        value, gradients = jax.value_and_grad(loss)(weights, rows, targets)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    return step, weights, normal(rng, length, 4, inputs), normal(rng, length, 4, 1)


def test_a_recurrent_net_trains_as_in_jax(tmp_path):
    step, weights, rows, targets = recurrent()
    arguments = weights, rows, targets
    schedule = scheduled(step, *arguments, donate_argnums=0)
    found = results(schedule, tmp_path, arguments, steps=3)
    for _ in range(3):
        weights, value = jax.jit(step)(weights, rows, targets)
    for a, b in zip(found, jax.tree.leaves((weights, value)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def arena_bytes(folder, function, *arguments, **options):
    schedule = scheduled(function, *arguments, **options)
    return poet_jax.emit.c(schedule, folder, arguments).arena_bytes


def test_a_loop_changes_an_array_where_it_lies(tmp_path):
    x = np.ones(1000, np.float32)

    def step(x):
        return lax.fori_loop(0, len(x), lambda i, x: x.at[i].multiply(2.0), x)

    assert arena_bytes(tmp_path, step, x, donate_argnums=0) < x.nbytes + 64


def test_a_scan_reads_and_writes_rows_where_they_lie(tmp_path):
    rows = np.ones((100, 10), np.float32)

    def step(rows):
        return lax.scan(lambda s, x: (s + x, s * x), jnp.zeros(10), rows)

    assert arena_bytes(tmp_path, step, rows) < 2 * rows.nbytes + 3 * 40 + 64


def test_branches_share_their_memory(tmp_path):
    x = np.ones((20, 20), np.float32)

    def way(power):
        return lambda x: (x @ jnp.tanh(x @ (x + power))).sum()

    def step(x, i):
        return lax.switch(i, [way(1), way(2), way(3)], x)

    alone = arena_bytes(tmp_path, way(1), x)
    assert arena_bytes(tmp_path, step, x, np.int32(1)) <= alone + 32


def test_keys_go_through_loops(tmp_path):
    def step(words, x):
        def noisy(key, row):
            key, own = jax.random.split(key)
            kept = jax.random.bernoulli(own, 0.5, row.shape)
            return key, jnp.where(kept, row, 0)

        key, rows = lax.scan(noisy, jax.random.wrap_key_data(words), x)
        return jax.random.key_data(key), rows

    words = np.asarray(jax.random.key_data(jax.random.key(3)))
    assert_alike([(step, (words, np.ones((4, 9), np.float32)))], tmp_path)


def test_what_a_body_has_no_kernel_for_is_refused_by_name(tmp_path):
    def body(x, _):
        return lax.cond(x[0, 0] > 0, jnp.linalg.cholesky, jnp.asin, x), None

    x = np.eye(3, dtype=np.float32)
    schedule = scheduled(lambda x: lax.scan(body, x, None, 2), x)
    folder = tmp_path / "project"
    with pytest.raises(NotImplementedError, match="kernels in C for asin, cholesky"):
        poet_jax.emit.c(schedule, folder, [x])
    assert not folder.exists()
