"""Buffers are reused within a limit, and nobody's view of an array ever changes."""

import ctypes
import dataclasses
import gc
import mmap
import subprocess
import sys
import time
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import poet_jax
from experiments import memory
from poet_jax import heap
from poet_jax.compile import is_plain, nbytes_of
from poet_jax.executors import buffers, lending
from poet_jax.executors.buffers import Pool, Workspace, view
from poet_jax.plan import PageIn, PageOut

THREADS = """
import ctypes, sys, threading

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
ended = threading.Event()


def work():
    library.malloc(1000)
    ended.wait()


for _ in range(int(sys.argv[1])):
    threading.Thread(target=work, daemon=True).start()
"""
IMAGES = """
import jax
import jax.numpy as jnp

import poet_jax
from experiments import memory

NAMES = ("NHWC", "HWIO", "NHWC")


def loss(kernels, images):
    for kernel in kernels:
        images = jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=NAMES
        )
        images = jnp.tanh(images)
    return (images * images).sum()


kernels, images = [jnp.ones((3, 3, 96, 96)) / 864] * 6, jnp.ones((5, 64, 64, 96))
device, planner = poet_jax.host(), poet_jax.greedy
scheduled = poet_jax.schedule(
    jax.grad(loss), int(sys.argv[2]), device=device, planner=planner
)
scheduled(kernels, images)
rise = 0
for _ in range(3):
    poet_jax.release()
    before = memory.resident_bytes()
    memory.reset_high_water()
    scheduled(kernels, images)
    rise = max(rise, memory.high_water_bytes() - before)
ended.set()
print(poet_jax.heap.is_shared(), rise, scheduled.last_run.peak_bytes)
"""


STEPS = """
import time

import jax
import optax

import poet_jax
from experiments import memory
from experiments.steps import flax_case, training_step
from poet_jax import heap

case, optimizer = flax_case("cnn", 64, "mnist"), optax.adamw(1e-3)
params, rest, batch = case.init()
state = params, rest, optimizer.init(params)
step = poet_jax.schedule(
    training_step(case.loss, optimizer),
    "100%",
    device=poet_jax.host(),
    donate_argnums=0,
)
schedule = step.plan(state, batch)
state, loss = step(state, batch)
state_bytes = sum(x.nbytes for x in jax.tree.leaves((state, batch)))
jax.block_until_ready(loss)
time.sleep(0.1)  # what XLA frees a little after the results are ready
poet_jax.release()
before = memory.resident_bytes() - state_bytes
for _ in range(int(sys.argv[2])):  # as XLA frees a block, or somewhat later
    block = heap.allocate(2**25 - 2**21)
    heap.populate_pages(*heap.whole_pages(block, 2**25 - 2**21))
    threading.Timer(0.003, heap.free, [block]).start()
    state, loss = jax.block_until_ready(step(state, batch))
    float(loss)
time.sleep(0.1)
memory.reset_high_water()
for _ in range(40):
    state, loss = jax.block_until_ready(step(state, batch))
    float(loss)
rise = memory.high_water_bytes() - before
ended.set()
print(schedule.program.computes, rise, schedule.budget.memory_bytes)
"""


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def one_heap(monkeypatch):
    """The threads of the test runner may have some of their own, which play no part,
    and pools and executables of earlier tests leave holes when they are collected."""
    gc.collect()
    monkeypatch.setattr(heap, "is_shared", lambda: True)


KINDS = [((64, 64, 8), jnp.dtype("float32")), ((1 << 17,), jnp.dtype("uint8"))]


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=30),
    limit=st.integers(0, 6),
    on_cpu=st.booleans(),
)
def test_idle_buffers_fit_beside_what_is_live_and_nothing_live_is_lent(
    moves, limit, on_cpu
):
    """A move takes a buffer of a kind, or gives the oldest one of it back."""
    limit_bytes = limit * nbytes_of(KINDS[0])
    pool = Pool(
        [(row, KINDS[k]) for row, (k, _) in enumerate(moves)], limit_bytes, on_cpu
    )
    pool.begin(0)
    live = {kind: [] for kind in KINDS}
    for row, (k, gives) in enumerate(moves):
        kind = KINDS[k]
        if gives and live[kind]:
            pool.give(live[kind].pop(0))
            continue
        live_bytes = sum(x.nbytes for xs in live.values() for x in xs)
        (array,) = pool.take([kind], row, live_bytes)
        assert (array.shape, array.dtype) == kind
        live[kind].append(array)
        live_bytes += array.nbytes
        assert pool.idle_bytes == 0 or live_bytes + pool.idle_bytes <= limit_bytes
        pointers = [x.unsafe_buffer_pointer() for xs in live.values() for x in xs]
        assert len(set(pointers)) == len(pointers)
    pool.end()
    pool.release()
    assert pool.idle_bytes == 0


def test_a_released_buffer_can_be_written_again():
    kind = KINDS[0]
    pool = Pool([(0, kind), (1, kind)], 10 * nbytes_of(kind), on_cpu=True)
    pool.begin(0)
    (array,) = pool.take([kind], 0, 0)
    pool.give(array)
    pool.end()
    pool.release()
    (array,) = pool.take([kind], 1, 0)
    view(array)[:] = 1
    assert np.asarray(array).view(np.uint8).min() == 1


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="pages of Linux")


@pytest.mark.skipif(not heap.moves_pages(), reason="moves pages, as Linux 6.17 does")
def test_pages_take_their_bytes_along_and_both_blocks_can_be_written():
    nbytes = 2**20 + 100
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    contents = source.copy()
    (start, count), (goal, _) = (
        heap.whole_pages(x.ctypes.data, nbytes - heap.PAGE_BYTES)
        for x in (source, target)
    )
    assert count >= 254
    assert heap.move_pages(start, goal, count)
    length = count * heap.PAGE_BYTES
    since, to = start - source.ctypes.data, goal - target.ctypes.data
    np.testing.assert_array_equal(
        target[to : to + length], contents[since : since + length]
    )
    source[:], target[:] = 1, 2
    assert source.max() == 1 and target.min() == 2


@on_linux
@pytest.mark.parametrize("moves", [True, False])
@settings(max_examples=20, deadline=None)
@given(order=st.lists(st.integers(0, 2), min_size=3, max_size=30))
def test_buffers_share_their_pages(moves, order, monkeypatch):
    """Whatever is taken and given back in turn, the process grows by one buffer."""
    if not moves:  # as on an older kernel
        monkeypatch.setattr(heap, "move_pages", lambda *_: False)
    kinds = [((n,), jnp.dtype("uint8")) for n in (2**23, 2**23 + 2**20, 2**22)]
    largest = nbytes_of(kinds[1])
    pool = Pool([(row, kinds[k]) for row, k in enumerate(order)], largest, True)
    pool.begin(0)
    for kind in kinds:  # each has an address from here on
        pool.give(*pool.take([kind], 0, 0))
    heap.release()
    before = heap.resident_bytes()
    for row, k in enumerate(order):
        (array,) = pool.take([kinds[k]], row, 0)
        view(array)[:] = row
        pool.give(array)
        assert pool.idle_bytes <= largest
        assert heap.resident_bytes() - before <= largest + 2**21
    pool.release()


@pytest.mark.skipif(not heap.moves_pages(), reason="moves pages, as Linux 6.17 does")
def test_moves_do_not_split_mappings_more_and_more():
    """Buffers of many sizes in turn, each of which takes pages of all others. The
    kernel takes as much longer for each request, and a process may have 65,530."""
    kinds = [((n,), jnp.dtype("uint8")) for n in range(2**20, 2**23, 123_456)]
    order = np.random.default_rng(0).integers(0, len(kinds), 1500).tolist()
    pool = Pool([(row, kinds[k]) for row, k in enumerate(order)], 2**24, True)
    before, most = heap.count_mappings(), 0
    for row, k in enumerate(order):
        (array,) = pool.take([kinds[k]], row, 0)
        view(array)[:] = row % 251
        assert view(array)[0] == view(array)[-1] == row % 251
        pool.give(array)
        if row % 10 == 9:
            pool.end()
        if row % 100 == 0:
            most = max(most, heap.count_mappings())
    assert most - before < 8000


@on_linux
def test_counting_mappings_takes_little_memory():
    """Their list has megabytes where pages have moved, which no budget knows of."""
    kinds = (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE)
    maps = [mmap.mmap(-1, heap.PAGE_BYTES, prot=kinds[n % 2]) for n in range(5000)]
    tracemalloc.start()
    count = heap.count_mappings()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count >= len(maps) and peak < 2**18


@on_linux
@pytest.mark.parametrize("renews", [False, True])
@settings(max_examples=20, deadline=None)
@given(
    order=st.lists(
        st.tuples(st.integers(2, 10), st.booleans(), st.booleans()), min_size=5
    )
)
def test_workspaces_share_the_pages_of_buffers(renews, order, monkeypatch, one_heap):
    """What XLA takes for a workspace, in MiB, is in RAM already, and is nobody else's;
    results of the run that outlive it may lie there, too, and others may have freed a
    block that fits better."""
    if renews:  # the mappings, after every row
        monkeypatch.setattr(buffers, "MOVES_PER_COUNT", 0)
        monkeypatch.setattr(buffers, "MOST_MAPPINGS", 0)
    gc.collect()  # what other tests left behind would make holes in the heap later
    kind, limit = ((2**23,), jnp.dtype("uint8")), 20 * 2**20
    workspaces = {row: mebibytes << 20 for row, (mebibytes, *_) in enumerate(order)}
    pool = Pool([(row, kind) for row in workspaces], limit, True, workspaces)
    (other,) = pool.take([kind], 0, 0)  # what it has to take anew it takes here
    pool.give(other)
    results = []
    with heap.keeping_freed_blocks():
        heap.release()
        before = heap.resident_bytes()
        for row, nbytes in workspaces.items():
            _, outlives, fits = order[row]
            if fits:
                hole = heap.allocate(nbytes + heap.PAGE_BYTES)
                results.append(heap.allocate(2**16))
                heap.free(hole)
            (array,) = pool.take([kind], row, 0, 0, nbytes)
            view(array)[:] = row
            if outlives:
                results.append(heap.allocate(2**16))
            block = heap.allocate(nbytes)
            in_ram = heap.pages_in_ram(*heap.whole_pages(block, nbytes))
            assert in_ram.count(0) <= (2**16 * len(results)) // heap.PAGE_BYTES
            ctypes.memset(block, 255, nbytes)
            assert view(array).min() == view(array).max() == row
            assert heap.resident_bytes() - before <= limit + 2**21
            heap.free(block)
            pool.give(array)
            assert pool.idle_bytes <= limit
            if renews:
                pool.end()
        pool.end()
    for block in results:
        heap.free(block)


@on_linux
@settings(max_examples=30, deadline=None)
@given(
    order=st.lists(
        st.tuples(st.integers(1, 8), st.integers(0, 3), st.booleans()), min_size=5
    )
)
def test_a_workspace_knows_its_pages_whatever_lies_in_it_meanwhile(order, one_heap):
    """What XLA takes, and results that stay where it was or go, in MiB: but for what is
    not worth asking the kernel for, pages are in RAM that are said to be."""
    mib, results = 2**20, []
    with heap.keeping_freed_blocks():
        workspace = Workspace(8 * mib)
        for asked, stays, goes in order:
            workspace.fill(asked * mib // heap.PAGE_BYTES)
            workspace.give(asked * mib)
            before, _ = heap.held_bytes()
            if goes:
                heap.free_all(results)
            blocks = []
            for size in (asked * mib, stays * mib, mib):
                blocks.append(heap.allocate(size))
                heap.populate_pages(*heap.whole_pages(blocks[-1], size))
            results.append(blocks.pop(1))
            heap.free_all(blocks)
            workspace.take(heap.held_bytes()[0] - before)
            in_ram = heap.pages_in_ram(workspace.address, len(workspace.flags))
            wrong = sum(a != b for a, b in zip(in_ram, workspace.flags, strict=True))
            assert wrong * heap.PAGE_BYTES <= mib
            assert workspace.held == sum(workspace.flags)
        heap.free_all(results)


@pytest.mark.parametrize("see", [np.asarray, jax.dlpack.from_dlpack, np.from_dlpack])
def test_a_donated_array_that_somebody_sees_keeps_its_contents(see):
    """The buffers of donated parameters are written to only if nobody can tell."""

    def fun(w, x):
        for _ in range(4):
            x = jnp.sin(x @ w)
        return w + x, x.sum()

    w = jnp.ones((256, 256)) / 256 + 0
    x = jnp.ones((256, 256))
    device = poet_jax.devices.RASPBERRY_PI_4
    scheduled = poet_jax.schedule(fun, "100%", device=device, donate_argnums=0)
    expected, _ = jax.jit(fun)(w, x)
    for _ in range(3):
        seen, kept = see(w), np.array(w)
        w, _ = scheduled(w, x)
        np.testing.assert_array_equal(np.asarray(seen), kept)
    w = jnp.ones((256, 256)) / 256 + 0
    np.testing.assert_allclose(scheduled(w, x)[0], expected, rtol=1e-6)


def test_results_are_never_overwritten_by_later_runs():
    """Outputs leave the pool: what a step returned stays as it was."""

    def fun(x):
        for _ in range(3):
            x = jnp.sin(x) @ x
        return x

    scheduled = poet_jax.schedule(fun, "100%", device=poet_jax.devices.RASPBERRY_PI_4)
    inputs = [jnp.full((256, 256), 0.01 * i) for i in range(4)]
    results = [scheduled(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        np.testing.assert_allclose(result, jax.jit(fun)(x), rtol=1e-6)


def test_donated_arrays_that_no_result_replaces_do_not_pile_up():
    def fun(w, x):
        for _ in range(3):
            w = jnp.sin(w @ w)
        return w + x.sum()

    scheduled = poet_jax.schedule(
        fun,
        "100%",
        device=poet_jax.devices.RASPBERRY_PI_4,
        executor=poet_jax.HostExecutor(fuse=False),
        donate_argnums=(0, 1),
    )
    w = jnp.ones((256, 256)) / 256
    counts = []
    for step in range(8):
        w = scheduled(w, jnp.full((128, 64), step))
        counts.append(len(jax.live_arrays()))
    assert counts[-1] <= counts[1]


DTYPES = ["bool", "int4", "uint2", "int8", "float4_e2m1fn", "bfloat16", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_is_written_to_is_as_large_as_numpy_says(dtype):
    """XLA allocates less for types of less than a byte; `view` would overrun it."""
    dtype = jnp.dtype(dtype)
    compiled = jax.jit(lambda x: x.astype(dtype)).lower(jnp.ones(1024)).compile()
    allocated_bytes = compiled.memory_analysis().output_size_in_bytes
    assert is_plain(dtype) == (allocated_bytes == 1024 * dtype.itemsize)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_every_dtype_come_back(dtype):
    dtype = jnp.dtype(dtype)

    def fun(x):
        early = (x * 40 % 2).astype(dtype)
        for _ in range(4):
            x = jnp.sin(x) @ x
        return x, early

    x = jnp.linspace(0.0, 1.0, 512 * 512).reshape(512, 512) / 64
    expected = jax.jit(fun)(x)
    graph = poet_jax.order(poet_jax.coarsen(poet_jax.trace(fun, x)))
    costs = poet_jax.price(graph, poet_jax.devices.RASPBERRY_PI_4)
    plan = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**30))
    early = graph.outputs[1]
    actions = [*plan.actions, PageIn(early)]
    made = actions.index(poet_jax.Compute(graph.producer[early]))
    actions.insert(made + 1, PageOut(early))
    program = poet_jax.lower(graph, dataclasses.replace(plan, actions=tuple(actions)))
    runner = poet_jax.HostExecutor()(program)
    for _ in range(3):
        for got, want in zip(runner(x), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert runner.last_run.bytes_paged_in == graph.values[early].nbytes


@on_linux
def test_new_buffers_start_at_a_page():
    """So that a store transfers them without a copy."""
    kinds = [((n,), jnp.dtype("uint8")) for n in (2**20, 2**20 + 1, 5 * 2**20)]
    pool = Pool([(0, kind) for kind in kinds], 2**26, on_cpu=True)
    with heap.keeping_freed_blocks():
        heap.free(heap.allocate(3 * 2**20))
        for array in pool.take(kinds, 0, 0):
            assert array.unsafe_buffer_pointer() % heap.PAGE_BYTES == 0
            pool.give(array)
        pool.end()


@on_linux
def virtual_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * heap.PAGE_BYTES


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
@pytest.mark.parametrize("nbytes", [2**19, 3 * 2**20, 2**27])
def test_large_free_blocks_return_their_pages_and_the_heap_does_not_grow(nbytes):
    with heap.keeping_freed_blocks():
        heap.release()
        blocks = [heap.allocate(nbytes) for _ in range(4)]
        apart = [heap.allocate(64)]
        before = heap.resident_bytes()
        for block in blocks:
            heap.populate_pages(*heap.whole_pages(block, nbytes))
        assert heap.resident_bytes() - before > 3.5 * nbytes
        for block in blocks[::2]:
            heap.free(block)
        size = virtual_bytes()
        for _ in range(20):
            heap.release_blocks()
        assert virtual_bytes() <= size
        assert heap.resident_bytes() - before < 2.1 * nbytes + 2**20
        in_ram = heap.pages_in_ram(*heap.whole_pages(blocks[1], nbytes))
        assert in_ram.count(0) == 0
        heap.free_all([*blocks[1::2], *apart])


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
def test_what_numpy_asked_huge_pages_for_is_taken_page_by_page_in_a_run(one_heap):
    """Or holes of the heap fill with pages that nobody wrote to."""
    with heap.keeping_freed_blocks():
        array = np.ones(2**25, np.uint8)
        pages = heap.whole_pages(array.ctypes.data, array.nbytes)
        heap.release_pages(*pages)
        Pool([], 2**30, on_cpu=True).begin(array.nbytes)
        array[2**21 :: 2**22] = 2
        assert heap.pages_in_ram(*pages).count(1) == 8


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
@pytest.mark.parametrize("parts", [[1], [2, 4, 8], [4, 2, 8], [4, 4, 4]])
def test_scratch_lies_in_the_pages_of_the_workspace(parts, one_heap):
    """Also if others have freed blocks that it would fit better."""
    nbytes, kind = 2**25, ((2**21,), jnp.dtype("uint8"))
    sizes = [nbytes // part for part in parts]
    pool = Pool([(0, kind), (1, kind)], 2**27, True, {0: nbytes, 1: nbytes})
    with heap.keeping_freed_blocks():
        blocks = [heap.allocate(size + 2**16) for size in sizes for _ in range(2)]
        pool.give(*pool.take([kind], 0, 0, 0, nbytes))
        heap.free_all(blocks[::2])
        heap.release_blocks()
        pool.give(*pool.take([kind], 1, 0, 0, nbytes))
        before = heap.resident_bytes()
        scratch = [heap.allocate(size) for size in sizes]
        for block, size in zip(scratch, sizes, strict=True):
            heap.populate_pages(*heap.whole_pages(block, size))
        assert heap.resident_bytes() - before < 2**20
        heap.free_all(scratch)
        pool.end()
        heap.free_all(blocks[1::2])


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
@pytest.mark.parametrize("front, asked", [(0.5, 3), (1.5, 8), (5, 16), (12, 16)])
def test_what_is_free_before_the_workspace_is_not_taken_for_it(front, asked, one_heap):
    """In MiB. Also if many other blocks of the front's size are free."""
    front, asked = int(front * 2**20), asked * 2**20
    count = heap.MOST_HOLES + 10 if front < asked / 2 else heap.MOST_HOLES // 2
    with heap.keeping_freed_blocks():
        occupied = heap.occupy_holes(2**26, heap.PAGE_BYTES)  # the rest is at the top
        sizes = (front, 2 * heap.PAGE_BYTES) * count
        blocks = [heap.allocate(nbytes) for nbytes in sizes]
        before = heap.allocate(front)
        workspace = Workspace(2**24)
        heap.free_all([*blocks[::2], before])
        for part in (1, 2, 1):
            workspace.fill(asked // heap.PAGE_BYTES)
            workspace.give(asked)
            block = heap.allocate(asked // part)
            in_ram = heap.pages_in_ram(*heap.whole_pages(block, asked // part))
            heap.free(block)
            workspace.take()
            assert in_ram.count(0) == 0
        heap.free_all([*blocks[1::2], *occupied])


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
def test_scratch_in_small_blocks_lies_beside_the_workspace(one_heap):
    """Not in holes that it fits, which compiling leaves in the heap."""
    nbytes, piece, count = 2**23, 65 * heap.PAGE_BYTES, 24
    pool = Pool([], 2**26, True, {0: nbytes})
    with heap.keeping_freed_blocks():
        holes = [heap.allocate(piece + 64) for _ in range(2 * count)]
        heap.free_all(holes[::2])
        pool.take([], 0, 0, 0, nbytes)
        workspace = heap.allocate(nbytes)
        scratch = [heap.allocate(piece) for _ in range(count)]
        assert workspace < min(scratch)
        assert max(scratch) < workspace + nbytes + buffers.SLACK_BYTES
        heap.free_all([workspace, *scratch])
        pool.end()
        heap.free_all(holes[1::2])


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
def test_scratch_lies_in_new_holes_but_once(one_heap):
    """Such as blocks leave that are freed in the midst of a run."""
    nbytes, piece, count = 2**23, 65 * heap.PAGE_BYTES, 24
    pool = Pool([], 2**26, True, dict.fromkeys(range(3), nbytes))
    with heap.keeping_freed_blocks():
        holes = [heap.allocate(piece + 64) for _ in range(2 * count)]
        pool.take([], 0, 0, 0, nbytes)
        heap.free_all(holes[::2])
        for row in (1, 2):
            workspace = heap.allocate(nbytes)
            scratch = [heap.allocate(piece) for _ in range(count)]
            for block in scratch:
                heap.populate_pages(*heap.whole_pages(block, piece))
            heap.free_all([*scratch, workspace])
            pool.take([], row, 0, 0, nbytes)
        first, last = min(scratch), max(scratch)
        assert workspace < first and last < workspace + nbytes + buffers.SLACK_BYTES
        pool.end()
        heap.free_all(holes[1::2])


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
def test_scratch_that_nobody_asked_for_finds_room(one_heap):
    """A run of 4 MiB of workspace takes 4 more, beside a buffer of 32 in a limit of 38:
    the buffer loses pages, and from the second time on the workspace has them."""
    mib, kind = 2**20, ((2**25,), jnp.dtype("uint8"))
    pool = Pool([(0, kind), (2, kind)], 38 * mib, True, {1: 4 * mib})
    for _ in range(3):
        with heap.keeping_freed_blocks():
            pool.begin(0)
            held = heap.resident_bytes() - pool.idle_bytes
            pool.give(*pool.take([kind], 0, 0))
            pool.take([], 1, 0, 0, 4 * mib)
            scratch = heap.allocate(8 * mib - heap.PAGE_BYTES)
            heap.populate_pages(*heap.whole_pages(scratch, 8 * mib - heap.PAGE_BYTES))
            assert heap.resident_bytes() - held <= 39 * mib
            heap.free(scratch)
            pool.end()


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
def test_scratch_far_from_the_workspace_finds_room_from_the_second_time_on(one_heap):
    """Of 16 MiB that do not fit beside 4 of workspace, beside a buffer of 32 in a limit
    of 44, and in one run of four there is none."""
    mib, kind = 2**20, ((2**25,), jnp.dtype("uint8"))
    pool = Pool([(0, kind), (2, kind)], 44 * mib, True, {1: 4 * mib})
    for run in range(12):
        with heap.keeping_freed_blocks():
            pool.begin(0)
            held = heap.resident_bytes() - pool.idle_bytes
            pool.give(*pool.take([kind], 0, 0))
            pool.take([], 1, 0, 0, 4 * mib)
            sizes = [4 * mib] + [16 * mib] * (run % 4 > 0)
            blocks = [heap.allocate(size) for size in sizes]
            for block, size in zip(blocks, sizes, strict=True):
                heap.populate_pages(*heap.whole_pages(block, size))
            if run > 1:
                assert heap.resident_bytes() - held <= 45 * mib
            heap.free_all(blocks)
            pool.end()


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
def test_scratch_with_holes_takes_no_room_for_the_holes(one_heap):
    """Of 7 MiB beyond the workspace the last is written to, and 3 of 44 are left for
    that: a buffer of 32 keeps its pages, if not in the first runs."""
    mib, kind = 2**20, ((2**25,), jnp.dtype("uint8"))
    pool = Pool([(0, kind), (2, kind)], 44 * mib, True, {1: 4 * mib})
    beside = []
    for _ in range(12):
        with heap.keeping_freed_blocks():
            pool.begin(0)
            (array,) = pool.take([kind], 0, 0)
            pages = heap.whole_pages(array.unsafe_buffer_pointer(), array.nbytes)
            pool.give(array)
            pool.take([], 1, 0, 0, 4 * mib)
            beside.append(heap.pages_in_ram(*pages).count(1) * heap.PAGE_BYTES)
            scratch = heap.allocate(11 * mib)
            for start in (0, 10 * mib):
                heap.populate_pages(*heap.whole_pages(scratch + start, mib))
            heap.free(scratch)
            pool.end()
    assert beside[-1] >= 31 * mib


def test_a_workspace_that_others_took_is_replaced(monkeypatch, one_heap):
    """As when another thread allocates between its being freed and XLA's looking."""
    kind = (2**21,), jnp.dtype("uint8")
    pool = Pool(
        [(row, kind) for row in range(3)], 2**26, True, dict.fromkeys(range(3), 2**22)
    )
    stolen, probes = [], []
    free, allocate = heap.free, heap.allocate

    def steal(block):
        free(block)
        stolen.append(allocate(2**22 + heap.PAGE_BYTES))  # and leaves too little

    def probe(nbytes):
        probes.append(allocate(nbytes))
        return probes[-1]

    with heap.keeping_freed_blocks():
        pool.give(*pool.take([kind], 0, 0, 0, 2**22))  # occupies holes, of any number
        monkeypatch.setattr(heap, "free", steal)
        monkeypatch.setattr(heap, "allocate", probe)
        pool.give(*pool.take([kind], 1, 0, 0, 2**22))
        monkeypatch.setattr(heap, "free", free)
        assert len(probes) < 1000
        pool.give(*pool.take([kind], 2, 0, 0, 2**22))
        block = allocate(2**22)
        in_ram = heap.pages_in_ram(*heap.whole_pages(block, 2**22))
        assert in_ram.count(0) == 0
        free(block)
        pool.end()
    for block in stolen:
        free(block)


@pytest.mark.skipif(not heap.moves_pages(), reason="moves pages, as Linux 6.17 does")
def test_a_workspace_that_is_split_keeps_its_pages(monkeypatch, one_heap):
    """As by what glibc cuts off an aligned block, which a thread keeps for itself."""
    nbytes, populated, populate = 2**23, [], heap.populate_pages

    def populate_and_count(address, count):
        populated.append(count * heap.PAGE_BYTES)
        populate(address, count)

    pool = Pool([], 2**27, True, {0: nbytes, 1: 2 * nbytes, 2: nbytes})
    with heap.keeping_freed_blocks():
        pool.take([], 0, 0, 0, nbytes)
        workspace, piece = heap.allocate(nbytes), heap.allocate(2**20)
        assert abs(piece - workspace - nbytes) < heap.PAGE_BYTES
        heap.free(workspace)
        monkeypatch.setattr(heap, "populate_pages", populate_and_count)
        pool.take([], 2, 0, 0, nbytes)
        assert sum(populated) < nbytes / 4
        workspace = heap.allocate(nbytes)
        in_ram = heap.pages_in_ram(*heap.whole_pages(workspace, nbytes))
        assert in_ram.count(0) == 0
        heap.free(workspace)
        pool.end()
        heap.free(piece)


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
@pytest.mark.parametrize("nbytes", [3 << 20, (5 << 20) + 3000, 8 << 20])
def test_aligned_blocks_do_not_split_a_workspace(nbytes, one_heap):
    """Such as XLA's, of which glibc keeps what it cuts off."""
    library = ctypes.CDLL(None)
    library.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.aligned_alloc.restype = ctypes.c_void_p
    with heap.keeping_freed_blocks():
        workspace = Workspace(8 << 20)
        start, pages = workspace.address, len(workspace.flags)
        for _ in range(500):
            workspace.fill(nbytes // heap.PAGE_BYTES)
            workspace.give(nbytes)
            block = library.aligned_alloc(64, nbytes)
            assert block == workspace.address
            heap.free(block)
            workspace.take()
            assert 0 <= workspace.address - start <= 16 * heap.PAGE_BYTES
            assert pages - len(workspace.flags) <= 2**21 / heap.PAGE_BYTES


@on_linux
def test_lent_pages_that_the_system_took_are_not_counted():
    kind, limit = ((2**23,), jnp.dtype("uint8")), 64 * 2**20
    pool = Pool([(0, kind)] * 4, limit, on_cpu=True)
    pool.begin(0)
    arrays = pool.take([kind] * 4, 0, 0)
    address, count = heap.whole_pages(arrays[0].unsafe_buffer_pointer(), kind[0][0])
    while arrays:
        pool.give(arrays.pop())
    pool.end()
    lent = pool.idle_bytes
    wait_until(lambda: pool.rests_since is None)
    heap.release_pages(address, count)  # as the system would
    pool.begin(0)
    assert pool.idle_bytes == lent - count * heap.PAGE_BYTES


def test_what_nobody_has_any_more_is_gone_before_it_is_lent(monkeypatch):
    """Or its memory would be freed in the midst of what its owner does next."""
    monkeypatch.setattr(lending, "PAUSE_SECONDS", 0.5)
    lender, pool = lending.Lender(), Pool([], 2**26, True)
    pool.rests_since = time.monotonic()
    lender.watch(pool)
    time.sleep(0.1)
    gone = weakref.ref(pool)
    del pool
    assert gone() is None


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
@settings(max_examples=20, deadline=None)
@given(pauses=st.lists(st.booleans(), min_size=1, max_size=8))
def test_the_system_may_take_what_rests_and_nothing_that_is_in_use(pauses, monkeypatch):
    """Whenever it takes it: a run's buffers stay as they were written."""
    lent = []

    def lend_and_lose(address, count):
        lent.append(address)
        heap.release_pages(address, count)

    monkeypatch.setattr(heap, "lend_pages", lend_and_lose)
    kind = (2**20,), jnp.dtype("uint8")
    pool = Pool([(0, kind)] * 3, 2**25, on_cpu=True)
    for number, is_long in enumerate(pauses, 1):
        pool.begin(0)
        arrays = pool.take([kind] * 3, 0, 0)
        addresses = {
            heap.whole_pages(x.unsafe_buffer_pointer(), x.nbytes)[0] for x in arrays
        }
        for array in arrays:
            view(array)[:] = number
        if is_long:
            time.sleep(2 * lending.PAUSE_SECONDS)
        for array in arrays:
            assert view(array).min() == view(array).max() == number
        while arrays:
            pool.give(arrays.pop())
        lent.clear()
        pool.end()
        if is_long:
            wait_until(lambda: pool.rests_since is None)
            assert addresses <= set(lent)


@on_linux
def test_what_the_caller_holds_since_the_last_run_takes_no_room():
    kind, limit = ((2**23,), jnp.dtype("uint8")), 64 * 2**20
    pool = Pool([(n, kind) for n in range(6)], limit, on_cpu=True)
    others = []
    for _ in range(3):
        with heap.keeping_freed_blocks():
            pool.begin(0)
            for array in pool.take([kind] * 4, 0, 0):
                pool.give(array)
            (array,) = pool.take([kind], 1, 0, more_bytes=2**21)
            pool.give(array)
            assert pool.idle_bytes == 4 * nbytes_of(kind)
            pool.end()
        others.append(np.ones(2**24))


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
def test_what_others_free_late_makes_room_before_an_instruction(monkeypatch):
    """As XLA's threads do, beside other processes."""
    late, release = [], heap.release

    def release_and_free():
        release()
        heap.free_all(late)

    limit, new_bytes = 2**25, 2**24
    pool = Pool([], limit, on_cpu=True)
    with heap.keeping_freed_blocks():
        pool.begin(0)
        before, _ = heap.held_bytes()
        late.append(heap.allocate(limit))
        ctypes.memset(late[0], 1, limit)
        monkeypatch.setattr(heap, "release", release_and_free)
        pool.take([], 0, 0, more_bytes=new_bytes)
        pool.end()
    after, _ = heap.held_bytes()
    assert after - before + new_bytes <= limit + buffers.EXCESS_BYTES


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
def test_what_others_took_and_keep_is_not_looked_for_before_each_instruction(
    monkeypatch,
):
    """As a data loader's thread does; to trim the heap takes 10 ms, and finds none."""
    trims, release = [], heap.release

    def release_and_count():
        trims.append(release())

    limit = 2**25
    pool = Pool([], limit, on_cpu=True)
    with heap.keeping_freed_blocks():
        for _ in range(2):
            pool.begin(0)
            taken = heap.allocate(2**24)
            ctypes.memset(taken, 1, 2**24)
            monkeypatch.setattr(heap, "release", release_and_count)
            for row in range(10):
                pool.take([], row, 0, more_bytes=limit)
            assert len(trims) == 2
            monkeypatch.setattr(heap, "release", release)
            trims.clear()
            heap.free(taken)
            pool.end()


@pytest.mark.parametrize("dropped", [0, 2**25])
def test_files_that_the_system_drops_make_no_room(dropped, monkeypatch):
    held, files = 2**27, 2**26
    monkeypatch.setattr(heap, "held_bytes", lambda: (held, files))
    large, small = ((2**25,), jnp.dtype("uint8")), ((2**21,), jnp.dtype("uint8"))
    pool = Pool([(0, large), (1, small)], 2**26, on_cpu=True)
    pool.begin(0)
    pool.give(pool.take([large], 0, 0)[0])
    held, files = held + 2**26, files - dropped  # the heap grew by twice the buffer
    pool.take([small], 1, 0)
    assert pool.idle_bytes <= large[0][0] - nbytes_of(small)


@on_linux
@pytest.mark.parametrize("planner", [poet_jax.greedy, poet_jax.paging_only])
def test_the_process_grows_by_no_more_than_the_budget_and_a_slack(planner):
    """Law 9, with 100 MiB of values of 4 MiB each within 40 of them."""

    def loss(w, x):
        for _ in range(24):
            x = jnp.sin(x @ w)
        return x.sum()

    w, x = jnp.ones((256, 256)) / 256, jnp.ones((4096, 256))
    budget_bytes = 40 * 2**20
    scheduled = poet_jax.schedule(
        jax.grad(loss),
        budget_bytes,
        device=poet_jax.devices.RASPBERRY_PI_4,
        planner=planner,
    )
    assert scheduled.plan(w, x).baseline.peak_bytes > 100 * 2**20
    scheduled(w, x)
    poet_jax.release()
    before = memory.resident_bytes()
    for _ in range(3):  # the first call takes pages, which the others find
        memory.reset_high_water()
        scheduled(w, x)
        rise = memory.high_water_bytes() - before
        assert rise <= 1.05 * budget_bytes + 16 * 2**20
    held = memory.resident_bytes() - before
    poet_jax.release()
    assert memory.resident_bytes() - before < held / 2


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
@pytest.mark.parametrize("threads", [0, 7])
def test_threads_that_were_there_before_do_not_take_the_process_beyond(threads):
    """As in a notebook: XLA's threads then have heaps apart, each with its scratch."""
    budget_bytes = 48 * 2**20
    command = [sys.executable, "-c", THREADS + IMAGES, str(threads), str(budget_bytes)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shared, rise, planned = done.stdout.split()
    assert shared == str(threads == 0)
    assert int(planned) / 2 < int(rise) <= budget_bytes


@pytest.mark.skipif(not heap.returns_pages(), reason="returns pages, as Linux does")
@pytest.mark.parametrize("threads, late", [(0, 0), (0, 8), (7, 0)])
def test_what_the_heap_keeps_of_whole_steps_does_not_pile_up(threads, late):
    """Each takes a block of 28 MiB, of which the heap would keep three to five. Those
    that are freed late in the first steps do not pass for somebody else's."""
    command = [sys.executable, "-c", THREADS + STEPS, str(threads), str(late)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    computes, rise, budget_bytes = map(int, done.stdout.split())
    assert computes == 1 and rise <= budget_bytes + 8 * 2**20
