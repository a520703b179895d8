"""What is indexed by `arange` is indexed row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from toy import OPTIONS

import poet_jax
from poet_jax.passes import blockwise, index_by_row

ROWS, WIDTH, WORDS = 256, 8, 2048
METHODS = ("get", "add", "multiply", "min", "set")
MODES = (None, "clip", "fill", "drop")


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def numbers(graph):
    """Dimension numbers of all gathers and scatters."""
    equations = [e for node in graph.nodes for e in node.equations]
    return [
        e.params["dimension_numbers"]
        for e in equations
        if e.primitive.name.startswith(("gather", "scatter"))
    ]


@st.composite
def indexings(draw):
    """The shape of an array, and what indexes each axis: its (r)ows, from zero or from
    the (e)nd, (g)iven or (c)onstant indices, or nothing; a method and a mode."""
    shape = draw(st.lists(st.integers(2, 4), min_size=2, max_size=4))
    kinds = [draw(st.sampled_from("regc-")) for _ in shape]
    place = draw(st.integers(0, len(shape) - 1))
    kinds[place], kinds[place - 1] = "r", "g"
    return shape, kinds, draw(st.sampled_from(METHODS)), draw(st.sampled_from(MODES))


@examples(10)
@given(case=indexings(), seed=st.integers(0, 9))
def test_rows_are_indexed_as_jax_does(case, seed):
    shape, kinds, method, mode = case
    rng = np.random.default_rng(seed)
    counted = [axis for axis, kind in enumerate(kinds) if kind in "re"]
    sizes = [shape[axis] for axis in counted]

    def fun(x, given):
        def index(axis, kind):
            if kind in "re":
                others = [n for n in range(len(sizes) + 1) if n != counted.index(axis)]
                rows = np.arange(shape[axis]) - shape[axis] * (kind == "e")
                return jnp.asarray(np.expand_dims(rows, others))
            return {"g": given, "c": np.array([1, 0]), "-": slice(None)}[kind]

        at = x.at[tuple(map(index, range(len(kinds)), kinds))]
        updates = () if method == "get" else (jnp.cos(x.sum()),)
        return jnp.sin(getattr(at, method)(*updates, mode=mode))

    def gradient(x, given):
        return jax.grad(lambda x: jnp.sum(fun(x, given) ** 2))(x)

    args = draw(seed, *shape), jnp.asarray(rng.integers(-5, 6, [*sizes, 2]))
    for step in (fun, gradient) if method in ("get", "add", "set") else (fun,):
        graph = index_by_row(poet_jax.trace(step, *args))
        assert all(x.operand_batching_dims for x in numbers(graph))
        (found,) = jax.jit(graph.__call__)(*args)
        np.testing.assert_allclose(found, jax.jit(step)(*args), rtol=1e-5, atol=1e-6)


def indexed(x, labels):
    return x[jnp.arange(ROWS), labels]


def added(x, labels):
    return x.at[jnp.arange(ROWS), labels].add(-0.1).max(-1)


def written(x, labels):
    return x.at[jnp.arange(ROWS), labels].set(-0.1).max(-1)


def step_of(pick):
    def step(w, x, labels):
        return w - jax.grad(lambda w: -pick(jax.nn.log_softmax(x @ w), labels).mean())(
            w
        )

    return step, (draw(0, WIDTH, WORDS), draw(1, ROWS, WIDTH), jnp.arange(ROWS))


@pytest.mark.parametrize("pick", [indexed, added, written])
def test_a_loss_of_indexed_rows_goes_through_blocks(pick):
    step, args = step_of(pick)
    graph = index_by_row(poet_jax.trace(step, *args))
    cut = blockwise(graph, large_bytes=1, blocks=8)
    large = ROWS * WORDS * 4 // 8
    assert all(cut.values[v].nbytes <= large for v in cut.producer)


def test_a_loss_of_indexed_rows_fits_as_one_along_an_axis_does():
    step, args = step_of(indexed)
    scheduled = poet_jax.schedule(step, "25%", donate_argnums=0, **OPTIONS)
    schedule = scheduled.plan(*args)
    assert schedule.compiled_bytes <= schedule.budget.memory_bytes
