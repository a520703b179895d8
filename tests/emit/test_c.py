"""Planned programs as C, beside JAX: kernels, the arena, whole steps, refusals."""

import dataclasses
import functools
import itertools
import pathlib
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boards import FLAGS, assert_alike, built, compiled, normal, results, run, scheduled
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from strategies import DEVICE, examples

import poet_jax
from poet_jax.emit.c99.buffers import Buffer, Step
from poet_jax.emit.c99.offsets import alive, place

UNARY = {
    "neg": lax.neg, "abs": jnp.abs, "sign": jnp.sign, "floor": jnp.floor,
    "ceil": jnp.ceil, "round": jnp.round, "exp": jnp.exp, "exp2": jnp.exp2,
    "expm1": jnp.expm1, "tanh": jnp.tanh, "logistic": jax.nn.sigmoid,
    "erf": lax.erf, "erfc": lax.erfc, "sin": jnp.sin, "cos": jnp.cos,
    "square": jnp.square, "cube": lambda x: x**3, "inverse": lambda x: x**-1,
    "seventh": lambda x: x**7, "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 1), "log": lambda x: jnp.log(x * x + 0.1),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)), "finite": jnp.isfinite,
    "erf_inv": lambda x: lax.erf_inv(x / 12),
    "power": lambda x: jnp.abs(x) ** (x - 0.5), "gelu": jax.nn.gelu,
    "integer": lambda x: (x * 3).astype(jnp.int32), "truth": lambda x: x.astype(bool),
    "byte": lambda x: (x * 9).astype(jnp.int8).astype(jnp.float32),
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.uint32) >> 3,
    "clamped": lambda x: jnp.clip(x, -0.5, 0.5), "infinite": lambda x: jnp.exp(90 * x),
    "softmax": lambda x: jax.nn.softmax(x), "norm": lambda x: jax.nn.standardize(x),
}  # fmt: skip
BINARY = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "max": lax.max, "min": lax.min,
    "eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge,
    "div": lax.div, "rem": lax.rem,
}  # fmt: skip
BITS = {
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor,
    "left": lax.shift_left, "right": lax.shift_right_logical,
    "arithmetic": lax.shift_right_arithmetic,
}  # fmt: skip


def test_an_element_is_computed_as_in_jax(tmp_path):
    rng = np.random.default_rng(0)
    x, y = 3 * normal(rng, 2, 7, 5), normal(rng, 2, 7, 5)
    cases = [(function, (x,)) for function in UNARY.values()]
    for dtype in ("float32", "int32", "uint32"):
        a, b = ((40 * z).astype(np.int32).astype(dtype) for z in (x, y))
        cases += [(function, (a, b)) for function in BINARY.values()]
        if dtype != "float32":
            shifts = (np.abs(a.astype(np.int32)) % 40).astype(dtype)
            cases += [(f, (a, shifts if "shift" in f.__name__ else b))
                      for f in BITS.values()]  # fmt: skip
            cases.append((lambda a: ~a, (a,)))
    masks = x > 0, y > 0
    cases += [(f, masks) for f in (jnp.logical_and, jnp.logical_or, jnp.logical_xor)]
    cases += [(jnp.logical_not, (x > 0,)), (jnp.where, (x > 0, x, y))]
    assert_alike(cases, tmp_path)


def test_extreme_elements_are_computed_as_in_jax(tmp_path):
    angles = np.float32([6e4, 65536, -7e4, 1.5e5, -3e5, 9e5, 1.5e6, 3e7, -1e9])
    angles = np.append(angles, np.float32([2**31, -5e12, 1e20, 3.4e38, np.inf]))
    tails = np.float32([-8, -3, -1, 0.9, 1, 2, 3, 4, 5])
    large = np.array([0, 1, 200, 2**31, 2**32 - 1], np.uint32)
    bits = np.ones((2, 256), bool)
    cases = [(jnp.sin, (angles,)), (jnp.cos, (angles,)), (jnp.sign, (large,))]
    cases += [(lambda x: jnp.log(lax.erfc(x)), (tails,))]
    cases += [(lambda x: lax.integer_pow(x, 0), (tails,))]
    powers = np.float32([0, -0.0, 0.5, -0.5, 1, -1, 2, 3, -3, 66, 2**25, np.inf])
    powers = np.concatenate([powers, [-65, 65, -66, -np.inf, np.nan]]).astype("f")
    grid = np.meshgrid(powers, powers)
    cases += [(lax.pow, grid), (lambda x, y: 1 / lax.pow(x, y), grid)]
    bases = np.float32([1.1, 0.5, 1, 2])
    cases += [(lax.pow, (bases, np.array([2**32 - 1, 2**31, 2**31, 3], np.uint32)))]
    cases += [(lax.dot, (bits, bits.T)), (lax.dot, (bits & False, bits.T))]
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        rows = np.arange(1, 13).reshape(3, 4) * (
            2 ** (4 * np.dtype(dtype).itemsize) - 3
        )
        rows = rows.astype(dtype)
        cases += [(lax.dot, (rows, rows.T)), (lax.rem, (rows, rows.T.reshape(3, 4)))]
        cases += [(f, (rows, rows[::-1])) for f in (lax.lt, lax.le, lax.gt, lax.ge)]
    assert_alike(cases, tmp_path)


def test_comparisons_that_types_decide_compile_without_warnings(tmp_path):
    cases = []
    orders = lax.lt, lax.le, lax.gt, lax.ge
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        x, ends = np.arange(-2, 3).astype(dtype), np.iinfo(dtype)
        for limit in (np.array(end, dtype) for end in (ends.min, ends.max)):
            cases += [(lambda x, f=f, y=limit: f(x, y), (x,)) for f in orders]
    mask = np.array([True, False])
    cases += [(lambda x, f=f: f(x, False), (mask,)) for f in orders]
    assert_alike(cases, tmp_path)


def test_what_is_empty_has_no_products_and_no_windows(tmp_path):
    """Beside other results, which are as they were."""
    no, one, x = np.zeros((0, 3, 5), "f"), np.ones((4, 1), "f"), np.ones((2, 3), "f")

    def largest(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID")

    def summed(x):
        return lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID")

    product = lambda a, b: jnp.einsum("abi,baj->ij", a, b)  # noqa: E731
    alone = lambda a, b: jnp.einsum("abi,abj->ij", a, b)  # noqa: E731
    cases = [(product, (no, np.zeros((3, 0, 6), "f"))), (alone, (no, no))]
    cases += [(lambda a: jnp.concatenate([a, a]), (no,)), (lambda a: a * 2, (no,))]
    for pool in (largest, summed):
        cases += [(pool, (one,)), (jax.grad(lambda x, f=pool: f(x).sum()), (one,))]
    assert_alike([*cases, (lambda x: x + 1, (x,))], tmp_path)


def test_zeros_have_the_signs_of_jax(tmp_path):
    zeros, tails = np.float32([0, -0.0]), np.float32([9, 12, 5e3, 1e9, np.inf])
    odd = jnp.sin, jnp.tanh, jnp.expm1, jnp.log1p, lax.erf, lax.erf_inv, jnp.sign
    cases = [(lambda x, f=f: 1 / f(x), (zeros,)) for f in odd]
    assert_alike([*cases, (lambda x: 1 / lax.erfc(x) > 0, (tails,))], tmp_path)


def random_reduction(rng):
    shape = tuple(rng.integers(1, 6, rng.integers(1, 5)))
    axes = tuple(np.flatnonzero(rng.random(len(shape)) < 0.5).tolist())
    kind = rng.choice(["sum", "max", "min", "prod", "any", "all", "argmax", "argmin"])
    x = normal(rng, *shape)
    if kind in ("any", "all"):
        return lambda x: getattr(jnp, kind)(x > 0, axis=axes), (x,)
    if kind in ("argmax", "argmin"):
        axis = int(rng.integers(len(shape)))
        return lambda x: getattr(jnp, kind)(jnp.round(x), axis=axis), (x,)
    return lambda x: getattr(jnp, kind)(2 * x, axis=axes), (x,)


def random_cumulation(rng):
    shape = tuple(rng.integers(1, 6, rng.integers(1, 4)))
    function = [lax.cumsum, lax.cummax, lax.cummin, lax.cumprod][rng.integers(4)]
    axis, reverse = int(rng.integers(len(shape))), bool(rng.random() < 0.5)
    return lambda x: function(x, axis, reverse), (normal(rng, *shape),)


def random_product(rng):
    """Axes of each kind, zero to two, in any order."""
    counts = rng.integers(0, 3, 4)
    sizes = iter(rng.integers(1, 7, counts.sum()).tolist())
    batch, left, right, terms = (
        [next(sizes) for _ in range(count)] for count in counts
    )
    orders = []
    shapes = []
    for free in (left, right):
        axes = [*batch, *free, *terms]
        order = rng.permutation(len(axes))
        shapes.append([axes[x] for x in order])
        place = {int(old): new for new, old in enumerate(order)}
        orders.append((
            [place[x] for x in range(len(batch))],
            [place[len(batch) + len(free) + x] for x in range(len(terms))],
        ))  # fmt: skip
    numbers = tuple((tuple(orders[0][k]), tuple(orders[1][k])) for k in (1, 0))
    arrays = tuple(normal(rng, *shape) for shape in shapes)
    scale = 2.0 if rng.random() < 0.3 else 1.0
    return lambda a, b: lax.dot_general(a * scale, b, numbers), arrays


def random_move(rng):
    """Something that only moves elements."""
    shape = tuple(int(x) for x in rng.integers(1, 6, rng.integers(1, 4)))
    x, rank = normal(rng, *shape), len(shape)
    axis = int(rng.integers(rank))
    starts = [int(rng.integers(size)) for size in shape]
    stops = [
        int(rng.integers(a + 1, n + 1)) for a, n in zip(starts, shape, strict=True)
    ]
    steps = rng.integers(1, 3, rank).tolist()
    paddings = [(int(a), int(b), int(c)) for a, b, c in rng.integers(-1, 3, (rank, 3))]
    paddings = [
        (max(a, 1 - n), max(b, 1 - n - max(a, 1 - n)), max(c, 0))
        for (a, b, c), n in zip(paddings, shape, strict=True)
    ]
    sizes = [int(rng.integers(1, n + 1)) for n in shape]
    at = [np.int32(rng.integers(-2, n + 2)) for n in shape]
    order = rng.permutation(rank).tolist()
    return [
        (lambda x: lax.slice(x, starts, stops, steps) + 1, (x,)),
        (lambda x: lax.pad(x * 2, np.float32(3), paddings), (x,)),
        (lambda x: lax.rev(x, (axis,)) - x, (x,)),
        (lambda x: x.transpose(order).reshape(-1), (x,)),
        (lambda x: (x + 1).reshape(-1)[:, None] * jnp.ones(3), (x,)),
        (lambda x, y: lax.concatenate([x, y * 2, x], axis), (x, x + 1)),
        (lambda x, *at: lax.dynamic_slice(x, at, sizes), (x, *at)),
        (
            lambda x, *at: lax.dynamic_update_slice(x, jnp.full(sizes, x.sum()), at),
            (x, *at),
        ),
        (lambda x: lax.broadcasted_iota(jnp.int32, x.shape, axis) * 2, (x,)),
        (lambda x: jnp.broadcast_to(x, (2, *shape)).sum(axis), (x,)),
        (lambda x: jnp.stack([x, x + 1], axis), (x,)),
        (lambda x: jnp.tile(x, sizes), (x,)),
        (lambda x: jnp.unstack(x, axis=axis)[-1] * 2, (x,)),
        (lambda x: jnp.array_split(x, 2, axis)[0] + 1, (x,)),
    ][rng.integers(14)]


def random_table(rng):
    """Rows of a table, by numbers that may be outside it, and their gradient."""
    rows, width = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    table = normal(rng, rows, width, 2)
    at = rng.integers(
        -rows - 2, rows + 2, tuple(rng.integers(1, 4, rng.integers(0, 3)))
    )
    at = np.asarray(at, np.int32)
    mode = str(rng.choice(["fill", "clip", "promise_in_bounds"]))
    if mode == "promise_in_bounds":
        at = at % rows
    look_up = lambda t, i: t.at[i].get(mode=mode)  # noqa: E731
    safe = "clip" if mode == "clip" else "drop"
    return [
        (look_up, (table, at)),
        (lambda t, i: t.at[:, i % width].get(mode="clip"), (table, at)),
        (lambda t, i: jnp.take_along_axis(t, i, 1), (
            table, rng.integers(0, width, (rows, 3, 2), dtype=np.int32))),
        (jax.grad(lambda t, i: (t.at[i].get(mode="clip") ** 2).sum()), (table, at)),
        (lambda t, i: t.at[i].add(2.0, mode=safe), (table, at)),
        (lambda t, i: t.at[i].max(0.1, mode=safe), (table, at)),
        (lambda t, i: t.at[i.reshape(-1)[:1]].set(7.0, mode=safe), (table, at)),
    ][rng.integers(7)]  # fmt: skip


def random_convolution(rng):
    """A convolution, also strided, padded, dilated and grouped, or a gradient of it."""
    spatial = int(rng.integers(1, 3))
    # Of one axis and in groups, XLA's CPU backend has gradients that are wrong.
    groups = int(rng.choice([1, 1, 2, 4])) if spatial == 2 else 1
    ins, outs = groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 6))
    window = rng.integers(1, 4, spatial).tolist()
    image = (rng.integers(4, 8, spatial) + 2).tolist()
    layout = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")][rng.integers(2)]
    layout = tuple(x.replace("W", "") if spatial == 1 else x for x in layout)
    sizes = {"N": 2, "C": ins, "I": ins // groups, "O": outs}
    left = {**sizes, **dict(zip("HW", image, strict=False))}
    right = {**sizes, **dict(zip("HW", window, strict=False))}
    x = normal(rng, *(left[k] for k in layout[0]))
    w = normal(rng, *(right[k] for k in layout[1]))
    padding = [tuple(pair) for pair in rng.integers(-1, 3, (spatial, 2)).tolist()]
    strides = rng.integers(1, 3, spatial).tolist()
    dilations = rng.integers(1, 3, (2, spatial)).tolist()

    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, strides, padding, *dilations, layout, groups
        )

    kind = rng.integers(3)
    if kind == 0:
        return convolve, (x, w)
    argument = int(kind - 1)
    loss = lambda x, w: (convolve(x, w) ** 2).sum()  # noqa: E731
    return jax.grad(loss, argument), (x, w)


def random_window(rng):
    shape = (2, *rng.integers(3, 7, 2).tolist(), 3)
    window = (1, *rng.integers(1, 4, 2).tolist(), 1)
    strides = (1, *rng.integers(1, 3, 2).tolist(), 1)
    padding = ((0, 0), *[(0, int(rng.integers(0, n))) for n in window[1:3]], (0, 0))
    x = normal(rng, *shape)

    def largest(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

    def summed(x):
        return lax.reduce_window(x, 0.0, lax.add, window, strides, padding)

    function = [largest, summed][rng.integers(2)]
    if rng.random() < 0.5:
        return function, (x,)
    return jax.grad(lambda x: (function(x) ** 2).sum()), (x,)


def random_order(rng):
    """Of one array, or of several by one or two of them, with equal and odd keys."""
    shape = tuple(rng.integers(1, 12, rng.integers(1, 4)).tolist())
    axis = int(rng.integers(len(shape)))
    odd = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0, -1.5], np.float32)
    x, y = odd[rng.integers(8, size=shape)], normal(rng, *shape)
    number = rng.integers(-3, 4, shape, dtype=np.int32)
    byte = number.astype([np.int8, np.uint8, np.int16, np.uint32][rng.integers(4)])
    most, one = int(rng.integers(1, shape[axis] + 1)), rng.random() < 0.5
    return [
        (lambda x: lax.sort(x, axis), (x,)),
        (lambda x: jnp.argsort(x, axis), (x,)),
        (lambda *xs: lax.sort(xs, axis), (number, x, y)),
        (lambda *xs: lax.sort(xs, axis, num_keys=2), (byte, number > 0, y)),
        (lambda x: -jnp.sort(-x, axis), (number,)),
        (jax.grad(lambda x: (jnp.sort(x, axis)[0] ** 2).sum()), (y,)),
        (lambda x: jnp.median(x, axis), (y,)),
        (lambda x: lax.top_k(x, most, axis=axis), (x if one else byte,)),
        (jax.grad(lambda y: (lax.top_k(y, most, axis=axis)[0] ** 2).sum()), (y,)),
    ][rng.integers(9)]


KERNELS = {
    "order": random_order,
    "reduction": random_reduction,
    "cumulation": random_cumulation,
    "product": random_product,
    "move": random_move,
    "table": random_table,
    "convolution": random_convolution,
    "window": random_window,
}


@pytest.mark.parametrize("kind", KERNELS)
@examples(1)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_kernel_computes_what_jax_does(kind, seed):
    """Many random cases, as one program."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        count = 8 if kind == "order" else 25  # XLA takes long to compile a sort
        cases = [KERNELS[kind](rng) for _ in range(count)]
        assert_alike(cases, pathlib.Path(folder))


def test_random_numbers_are_those_of_jax(tmp_path):
    def function(key, x):
        first, second = jax.random.split(jax.random.fold_in(key, 3))
        kept = jax.random.bernoulli(first, 0.5, x.shape)
        noise = jax.random.normal(second, x.shape)
        return jnp.where(kept, 2 * x, 0), noise, jax.random.bits(key, (3,)), second

    arguments = jax.random.key(7), np.ones((5, 7), np.float32)
    schedule = scheduled(function, *arguments)
    project = poet_jax.emit.c(schedule, tmp_path, arguments)
    done = subprocess.run([compiled(tmp_path)], check=True, capture_output=True)
    assert project.arena_bytes and float(done.stdout.split()[-1]) < 1e-6


@st.composite
def step_lists(draw):
    """(steps, ties): each reads some of the buffers there, and writes a new one."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def buffer():
        return Buffer("b", (int(rng.integers(0, 40)),), "float32")

    state = [buffer() for _ in range(rng.integers(1, 4))]
    steps = [Step((), tuple(state), lambda pointer: [])]
    known = list(state)
    for _ in range(draw(st.integers(1, 25))):
        count = min(len(known), int(rng.integers(0, 4)))
        picked = rng.choice(len(known), count, replace=False)
        reads = tuple(known[x] for x in picked)
        like = rng.choice(len(known))
        writes = (Buffer("b", known[like].shape, "float32"), buffer())
        over = tuple(
            (old, new) for old in reads for new in writes if old.shape == new.shape
        )
        steps.append(Step(reads, writes, lambda pointer: [], over))
        known += writes
    new = {old: x for old in state for x in known[len(state) :] if x.shape == old.shape}
    last = tuple(dict.fromkeys((*new.values(), known[-1])))
    steps.append(Step(last, (), lambda pointer: []))
    ties = [(old, x) for old, x in new.items() if list(new.values()).count(x) == 1]
    return steps, ties


@examples(100)
@given(step_lists())
def test_no_two_buffers_that_are_alive_overlap(drawn):
    """But for a result over an operand that its step reads last."""
    steps, ties = drawn
    arena, spans = place(steps, ties), alive(steps)
    over = {pair for step in steps for pair in step.over}
    moved = dict(arena.copied)
    for old, new in ties:
        assert arena.offsets[old] == arena.offsets[new] or moved[new] is old
    end = len(steps) - 1
    taken = [(x, x, *span) for x, span in spans.items()]
    taken += [(old, old, end, end) for old in moved.values()]
    for (_, a, first, stop), (_, b, start, last) in itertools.combinations(taken, 2):
        if a is b or not a.nbytes or not b.nbytes:
            continue
        is_handed_on = (stop == start and (a, b) in over) or (
            last == first and (b, a) in over
        )
        if first <= last and start <= stop and not is_handed_on:
            x, y = arena.offsets[a], arena.offsets[b]
            assert x + a.nbytes <= y or y + b.nbytes <= x
    assert arena.floor_bytes <= arena.nbytes
    for x, offset in arena.offsets.items():
        assert offset % x.itemsize == 0 and offset + x.nbytes <= arena.nbytes


def perceptron(key=0, sizes=(24, 16, 16, 10), batch=96):
    """(loss, parameters, inputs, labels)."""
    rng = np.random.default_rng(key)
    parameters = [
        (normal(rng, a, b) * a**-0.5, np.zeros(b, np.float32))
        for a, b in itertools.pairwise(sizes)
    ]

    def loss(parameters, x, labels):
        for w, b in parameters[:-1]:
            x = jnp.tanh(x @ w + b)
        logits = x @ parameters[-1][0] + parameters[-1][1]
        return optax.losses.softmax_cross_entropy_with_integer_labels(
            logits, labels
        ).mean()

    x, labels = normal(rng, batch, sizes[0]), rng.integers(0, sizes[-1], batch)
    return loss, parameters, x, labels.astype(np.int32)


def training_step(loss, optimizer):
    def step(parameters, state, x, labels):
        value, gradients = jax.value_and_grad(loss)(parameters, x, labels)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return step


def test_one_plan_has_one_text(tmp_path):
    """Of matrices of as many sizes that places in the arena are searched for."""
    sizes = 5, 17, 9, 23, 7, 13, 11, 19, 6
    rng = np.random.default_rng(0)
    weights = [normal(rng, *shape) for shape in itertools.pairwise(sizes)]

    def step(weights, x):
        def loss(weights):
            return jnp.mean(functools.reduce(lambda h, w: jnp.tanh(h @ w), weights, x))

        return [
            w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)
        ]

    arguments = weights, normal(rng, 9, 5)
    schedule = scheduled(step, *arguments, donate_argnums=0)
    texts = set()
    for _ in range(3):
        poet_jax.emit.c(schedule, tmp_path, arguments)
        texts.add((tmp_path / "poet_step.c").read_text())
    assert len(texts) == 1


BUDGETS = {
    "all of it": dict(budget="100%"),
    "paging": dict(budget="78%", planner=poet_jax.MilpPlanner(remat=False)),
    "remat": dict(budget="90%", planner=poet_jax.MilpPlanner(paging=False)),
}


@pytest.mark.parametrize(
    ("optimizer", "budget"),
    [("sgd", "paging"), *(("adam", budget) for budget in BUDGETS)],
)
def test_three_steps_are_those_of_jax_in_the_memory_of_the_plan(
    optimizer, budget, tmp_path
):
    optimizer = {"sgd": optax.sgd(0.1, 0.9), "adam": optax.adam(1e-2)}[optimizer]
    loss, parameters, x, labels = perceptron()
    step = training_step(loss, optimizer)
    arguments = parameters, optimizer.init(parameters), x, labels
    options = BUDGETS[budget]
    schedule = scheduled(step, *arguments, donate_argnums=(0, 1), **options)
    if budget == "remat":
        assert schedule.program.recomputed
    if budget == "paging":
        assert schedule.usage.bytes_paged_in
    project = built(schedule, tmp_path, arguments)
    assert project.plan_bytes == schedule.usage.peak_bytes
    assert project.arena_bytes <= 1.05 * project.plan_bytes
    found = run(schedule, tmp_path, steps=3)
    new, state = arguments[:2]
    for _ in range(3):
        new, state, value = jax.jit(step)(new, state, x, labels)
    for a, b in zip(found, jax.tree.leaves((new, state, value)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_optimizing_compilers_leave_loops_over_bytes_and_floats_as_they_are(tmp_path):
    """GCC 12 drops such a function at -O1 as one without effect."""

    def step(mask, a, b):
        return jnp.where(mask, a, 0) * b

    rng = np.random.default_rng(0)
    mask = rng.random((4, 448)) < 0.5
    arguments = mask, normal(rng, 448), normal(rng, 448)
    schedule = scheduled(step, *arguments)
    expected = np.asarray(step(*arguments))
    for level in ("-O1", "-O2"):
        flags = [level, "-fno-inline", "-std=c99", "-ffp-contract=off"]
        (found,) = results(schedule, tmp_path, arguments, flags=flags)
        np.testing.assert_array_equal(found, expected)


def test_frozen_arguments_lie_in_flash(tmp_path):
    loss, parameters, x, labels = perceptron()

    def step(trained, frozen, x, labels):
        value, gradients = jax.value_and_grad(lambda t: loss([*frozen, t], x, labels))(
            trained
        )
        return jax.tree.map(lambda w, g: w - 0.1 * g, trained, gradients), value

    arguments = parameters[-1], parameters[:-1], x, labels
    schedule = scheduled(step, *arguments, donate_argnums=0)
    project = built(schedule, tmp_path, arguments, flash_argnums=1)
    frozen_bytes = sum(x.nbytes for x in jax.tree.leaves(parameters[:-1]))
    assert project.constant_bytes == frozen_bytes
    assert project.arena_bytes <= 1.05 * (schedule.usage.peak_bytes - frozen_bytes)
    found = run(schedule, tmp_path)
    expected = jax.tree.leaves(jax.jit(step)(*arguments))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_project_says_itself_that_a_step_is_right(tmp_path):
    """As it is written, with its own `main.c`."""

    def function(x):
        return jnp.tanh(x @ x.T), jnp.log(x - 1), jnp.sqrt(-x)

    x = np.ones((3, 4), np.float32)
    project = poet_jax.emit.c(scheduled(function, x), tmp_path, [x])
    done = subprocess.run(
        [compiled(tmp_path)], check=True, capture_output=True, text=True
    )
    assert f"arena {project.arena_bytes} bytes" in done.stdout
    small = f"-DPOET_RAM_BYTES={project.arena_bytes - 1}"
    command = ["gcc", *FLAGS, small, "-fsyntax-only", tmp_path / "poet_step.c"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode and "does not fit" in refused.stderr


WRONG = {"1.5f, 1.5f": "1.5f, 1.51f", "-INFINITY": "0.0f", "9e4f": "NAN"}


def test_the_project_says_itself_that_one_result_is_wrong(tmp_path):
    """However large the others are."""

    def function(x):
        return x @ x.T * 3e4, x[0, :2] * 1.5, jnp.log(x - 1)

    x = np.ones((3, 3), np.float32)
    poet_jax.emit.c(scheduled(function, x), tmp_path, [x])
    vector = tmp_path / "poet_vector.c"
    text = vector.read_text().replace("90000.0f", "9e4f")
    vector.write_text(text)
    assert subprocess.run([compiled(tmp_path)]).returncode == 0
    for right, wrong in WRONG.items():
        assert right in text
        vector.write_text(text.replace(right, wrong, 1))
        assert subprocess.run([compiled(tmp_path)]).returncode == 1, right


def refusal(error, function, *arguments, **options):
    """The message of a refusal, which writes nothing."""
    folder = pathlib.Path(tempfile.mkdtemp()) / "project"
    with pytest.raises(error) as raised:
        poet_jax.emit.c(scheduled(function, *arguments), folder, arguments, **options)
    assert not folder.exists()
    return str(raised.value)


def test_what_has_no_kernel_is_refused_by_name():
    x = np.ones((4, 4), np.float32)

    def function(x):
        return jnp.linalg.cholesky(x), jnp.asin(x), x.astype(jnp.bfloat16) * 2

    message = refusal(NotImplementedError, function, x)
    for name in ("cholesky", "asin", "mul of bfloat16"):
        assert name in message


def test_a_gather_of_nine_axes_is_refused_by_name():
    x = np.ones((2,) * 9, np.float32)
    places = np.zeros((3, 9), np.int32)
    message = refusal(NotImplementedError, lambda x, i: x[tuple(i.T)] * 2, x, places)
    assert "gather of float32[2, 2, 2, 2, 2, 2, 2, 2, 2]" in message


def test_a_type_that_only_passes_through_is_refused_by_name():
    x = jnp.ones(3, jnp.bfloat16)
    message = refusal(NotImplementedError, lambda x, y: (x, y * 2), x, np.ones(3, "f"))
    assert "arrays of bfloat16" in message


def test_a_name_of_the_users_does_not_end_a_comment(tmp_path):
    with jax.named_scope("b*/ /*"):
        assert_alike(
            [(lambda x: x["a*/\\\n"] * 2, ({"a*/\\\n": np.ones(3, "f")},))], tmp_path
        )


IN_PLACE = {
    "window": lambda h: jnp.concatenate([h[1:], h[:1] * 2]),
    "sum": lambda h: jnp.cumsum(h, 0),
    "sort": lambda h: jnp.sort(h, 0),
    "mirror": lambda h: h[::-1] + h,
    "update": lambda h: h.at[3].set(1.0) * 2,
    "product": lambda h: h - 0.1 * (h @ h),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_the_arena_is_that_of_the_plan_where_state_is_replaced(name, tmp_path):
    x = np.ones((64, 64), np.float32)
    schedule = scheduled(IN_PLACE[name], x, donate_argnums=0)
    project = poet_jax.emit.c(schedule, tmp_path, [x])
    assert project.arena_bytes <= 1.05 * project.plan_bytes


def test_a_callback_is_refused():
    def function(x):
        aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, aval, x)

    assert "pure_callback" in refusal(NotImplementedError, function, np.float32(1))


def test_a_board_with_too_little_is_refused():
    x = np.ones((64, 64), np.float32)
    board = dataclasses.replace(DEVICE, name="tiny", ram_bytes=10_000)
    message = refusal(ValueError, lambda x: x @ x, x, board=board)
    assert "tiny has 9.8 KiB of RAM" in message


def test_pages_need_storage(tmp_path):
    loss, parameters, x, labels = perceptron()
    arguments = parameters, (), x, labels
    step = training_step(loss, optax.sgd(0.1))
    arguments = parameters, optax.sgd(0.1).init(parameters), x, labels
    options = BUDGETS["paging"]
    schedule = scheduled(step, *arguments, donate_argnums=(0, 1), **options)
    board = dataclasses.replace(DEVICE, store_bytes=0)
    with pytest.raises(ValueError, match="0 B of storage.*paging=False"):
        poet_jax.emit.c(schedule, tmp_path, arguments, board=board)


def test_arguments_may_be_all_that_jax_takes(tmp_path):
    """Python's numbers, and arrays of 64 bits."""
    arguments = np.arange(3) / 3, np.arange(3), 0.1, 7, [1, 2.0]
    function = lambda *xs: jax.tree.map(lambda x: x * 2, xs)  # noqa: E731
    found = results(scheduled(function, *arguments), tmp_path, arguments)
    expected = jax.tree.leaves(jax.jit(function)(*arguments))
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def test_arguments_of_another_shape_are_refused(tmp_path):
    x = np.ones((4, 4), np.float32)
    schedule = scheduled(lambda x: x + 1, x)
    with pytest.raises(ValueError, match="plan again"):
        poet_jax.emit.c(schedule, tmp_path, [x[:2]])


def test_state_that_the_step_replaces_is_not_constant(tmp_path):
    x = np.ones((4, 4), np.float32)
    schedule = scheduled(lambda x: x + 1, x, donate_argnums=0)
    with pytest.raises(ValueError, match="replaces it"):
        poet_jax.emit.c(schedule, tmp_path, [x], flash_argnums=0)
