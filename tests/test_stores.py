"""Pages come back bit for bit, or an error says which did not and why; nothing is left
behind, and nothing begins before it is needed."""

import concurrent.futures
import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import poet_jax
from poet_jax.stores import library, paged
from poet_jax.stores import store as store_module
from poet_jax.stores.paged import PagedArray, block_bytes, row_blocks

MIB = 2**20
X = jnp.linspace(-1.0, 1.0, 64 * 128).reshape(64, 128)


def page(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def python(code, **environment):
    """Standard output of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


# Stores: room in a file.


@settings(max_examples=60)
@given(
    moves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40_000)), max_size=40)
)
@pytest.mark.parametrize("make", [poet_jax.HostStore, poet_jax.FileStore])
def test_rooms_are_of_whole_sectors_and_never_overlap(make, moves):
    """A move allocates `size` bytes for a page, or frees it if it is there."""
    store, kept = make(), {}
    for key, size in moves:
        if key in kept:
            store.free(kept.pop(key)[0])
        else:
            kept[key] = store.allocate(size, "a"), size
        assert store.nbytes == sum(size for _, size in kept.values())
        rooms = sorted(kept.values())
        assert not any(offset % 4096 for offset, _ in rooms)
        for (offset, size), (following, _) in zip(rooms, rooms[1:], strict=False):
            assert offset + size <= following and offset != following
    store.close()
    assert store.nbytes == 0


def test_room_that_was_freed_is_used_again():
    """10 pages of a sector, freed in any order, make room for one of ten."""
    store = poet_jax.FileStore()
    pages = [store.allocate(4000, "a") for _ in range(10)]
    for key in (3, 1, 2, 9, 0, 4, 8, 6, 5, 7):
        store.free(pages[key])
    for _ in range(2):  # the second one takes the place of the first
        store.free(store.allocate(40_000, "a"))
    assert os.fstat(store.descriptor()).st_size == 40_960


def test_room_that_was_reserved_is_on_the_disk_until_the_store_is_closed(tmp_path):
    def on_disk():
        return 512 * os.fstat(store.descriptor()).st_blocks

    store = poet_jax.FileStore(tmp_path)
    store.allocate(4096, "a")
    store.reserve(MIB)
    assert on_disk() >= MIB + 4096 and store.nbytes == 4096
    store.reserve(MIB // 2)  # there is room already
    assert on_disk() < 2 * MIB
    store.close()
    assert on_disk() == 0
    store.reserve(4096)  # may be used again
    assert 0 < on_disk() < MIB


def test_a_full_disk_is_reported_by_name_and_leaves_the_file_as_it_was(tmp_path):
    said = python(
        f"""
        import os, resource, numpy as np, poet_jax
        store = poet_jax.FileStore({str(tmp_path)!r})
        kept = poet_jax.PagedArray.of(np.arange(1000, dtype=np.float32), store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        for ask in (
            lambda: store.allocate(2**21, "layer1/kernel"),
            lambda: store.reserve(2**21),
            lambda: poet_jax.PagedArray(store, (2**20,), "float32", "layer2/kernel"),
        ):
            try:
                ask()
            except poet_jax.PageStoreError as error:
                print(error)
            assert os.fstat(store.descriptor()).st_size == 4096
            assert store.nbytes == 4000
        store.allocate(4096, "small")
        assert (np.asarray(kept) == np.arange(1000)).all()
        """
    ).splitlines()
    assert all("File too large" in x and "store_bytes" in x for x in said)
    assert "'layer1/kernel' (2097152 bytes)" in said[0] and str(tmp_path) in said[0]
    assert "the step has not begun" in said[1] and "'layer2/kernel'" in said[2]


def test_a_closed_store_is_empty_and_may_be_used_again(store):
    kept, number = PagedArray.of(X, store, "w"), store.descriptor()
    store.close()
    assert store.nbytes == 0 and os.fstat(number).st_size == 0
    with pytest.raises(poet_jax.PageStoreError, match="'w'.*forgets everything"):
        kept.read(np.empty(kept.nbytes, np.uint8), "w")
    again = PagedArray.of(X, store)
    del kept  # its room is somebody else's now
    gc.collect()
    assert store.nbytes == X.nbytes
    np.testing.assert_array_equal(again, X)


def test_a_stores_file_is_closed_with_the_store_and_has_no_name(tmp_path):
    store = poet_jax.FileStore(tmp_path)
    number = store.descriptor()
    assert not list(tmp_path.iterdir())
    del store
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(number)


def test_a_store_of_the_users_opens_a_file_of_theirs(tmp_path):
    class Named(poet_jax.stores.Store):
        def open(self):
            return open(tmp_path / "pages", "w+b", buffering=0)

    store = Named()
    kept = PagedArray.of(X, store)
    np.testing.assert_array_equal(kept, X)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "pages", "f4"), X.ravel())


def test_a_folder_that_is_not_one_is_refused(tmp_path):
    with pytest.raises(poet_jax.PageStoreError, match="not a folder"):
        poet_jax.FileStore(tmp_path / "missing")


def test_a_folder_that_vanished_is_reported(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    store = poet_jax.FileStore(folder)
    folder.rmdir()
    with pytest.raises(poet_jax.PageStoreError, match="'a'"):
        store.allocate(10, "a")
    with pytest.raises(poet_jax.PageStoreError, match="gone"):
        store.descriptor()


def test_a_system_without_files_in_memory_is_named(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with pytest.raises(poet_jax.PageStoreError, match="memfd_create.*FileStore"):
        poet_jax.HostStore().allocate(10, "a")


def test_a_default_folder_in_ram_gives_way_to_one_that_is_not(monkeypatch):
    def in_ram(folder):
        return folder == tempfile.gettempdir()

    monkeypatch.setattr(store_module, "_is_in_ram", in_ram)
    monkeypatch.setattr(tempfile, "tempdir", os.path.expanduser("~"))
    assert poet_jax.FileStore().folder == "/var/tmp"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="Linux has it")
def test_a_folder_in_ram_is_a_warning(caplog, tmp_path):
    poet_jax.FileStore("/dev/shm")
    assert "/dev/shm, which is in RAM" in caplog.text
    link = tmp_path / "link"
    link.symlink_to("/dev/shm")
    caplog.clear()
    poet_jax.FileStore(link)
    assert "in RAM" in caplog.text


# Transfers on the caller's thread.


def at(offset, nbytes):
    """[nbytes] that begin `offset` bytes after a page of memory does."""
    block = np.zeros(nbytes + 3 * 4096, np.uint8)
    start = -block.ctypes.data % 4096 + offset
    return block[start : start + nbytes]


def file_of(store, nbytes):
    """(descriptor, flags, offset) of room in it."""
    offset = store.allocate(nbytes, "a")
    return store.descriptor(), int(store.is_direct), offset


@settings(max_examples=40)
@given(
    nbytes=st.integers(0, 12).map(lambda sectors: 4096 * sectors)
    | st.integers(0, 50_000)
    | st.sampled_from([2 * MIB, 2 * MIB + 1, 4 * MIB, 7 * MIB + 4095]),
    offsets=st.tuples(*2 * [st.sampled_from([0, 1, 64, 512, 4096])]),
)
@pytest.mark.parametrize("make", [poet_jax.HostStore, poet_jax.FileStore])
def test_bytes_may_be_anywhere_in_memory(make, nbytes, offsets):
    """What lies at sectors is transferred as it is, anything else through buffers."""
    data, into = (at(offset, nbytes) for offset in offsets)
    data[:] = expected = page(nbytes)
    store = make()
    file, flags, offset = file_of(store, nbytes)
    checksum = library.write(file, flags, data, offset, "a")
    library.read(file, flags, into, offset, checksum, "a")
    np.testing.assert_array_equal(into, expected)
    np.testing.assert_array_equal(data, expected)


@settings(max_examples=100)
@given(
    nbytes=st.integers(4096, 30_000),
    places=st.lists(st.integers(0, 2**31), min_size=2, max_size=2),
    change=st.sampled_from(["bit", "word", "words", "sectors", "length"]),
    seed=st.integers(0, 9),
)
def test_any_change_changes_the_checksum(nbytes, places, change, seed):
    store = poet_jax.HostStore()
    file, flags, offset = file_of(store, nbytes)
    data = page(nbytes, seed) if seed else np.zeros(nbytes, np.uint8)
    before = library.write(file, flags, data, offset, "a")
    changed = data.copy()
    size = {"words": 8, "sectors": 4096}.get(change, 1)
    a, b = (size * (place % (nbytes // size)) for place in places)
    match change:
        case "bit":
            changed[a] ^= 1 << places[1] % 8
        case "word":
            changed[a - a % 8 :][:8] ^= page(8, places[1])
        case "words" | "sectors":
            changed[a:][:size], changed[b:][:size] = data[b:][:size], data[a:][:size]
        case "length":
            changed = np.append(changed, np.uint8(0))
    after = library.write(file, flags, changed, offset, "a")
    assert (before == after) == np.array_equal(data, changed)


@contextlib.contextmanager
def reopened(store):
    """Another way to the file, which moves bytes as it likes."""
    file = os.open(f"/proc/self/fd/{store.descriptor()}", os.O_RDWR)
    yield file
    os.close(file)


DAMAGES = {
    "first bytes": lambda file: os.pwrite(file, b"\xff\0\xff", 50),
    "last byte": lambda file: os.pwrite(file, b"\xff", 9_999),
    "a sector twice": lambda file: os.pwrite(file, os.pread(file, 4096, 4096), 0),
    "cut": lambda file: os.ftruncate(file, 9_000),
    "empty": lambda file: os.ftruncate(file, 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_bytes_are_refused_by_name(store, damage):
    data = page(10_000)
    data[9_999] = 0
    file, flags, offset = file_of(store, data.nbytes)
    checksum = library.write(file, flags, data, offset, "layer1/kernel")
    with reopened(store) as other:
        DAMAGES[damage](other)
    into = np.empty(10_000, np.uint8)
    reason = "the file ends" if damage in ("cut", "empty") else "not those that were"
    with pytest.raises(poet_jax.PageStoreError, match=f"'layer1/kernel'.*{reason}"):
        library.read(file, flags, into, offset, checksum, "layer1/kernel")


def test_a_descriptor_that_is_closed_is_reported_by_name():
    number = os.memfd_create("gone")
    os.close(number)
    with pytest.raises(poet_jax.PageStoreError, match="'w'.*Bad file.*Keep a store"):
        library.write(number, 0, page(10), 0, "w")


# The custom calls.


def where(store, *sizes):
    """[P, 4] for `page_out` and `page_in`: room for pages of these sizes."""
    rows = []
    for nbytes in sizes:
        file, flags, offset = file_of(store, nbytes)
        rows.append((file, offset // 4096, flags, 0))
    return np.array(rows, np.uint32)


def clocks(record):
    """(start, stop) in nanoseconds of each block."""
    halves = np.asarray(record).astype(np.uint64)[:, 1:5].reshape(-1, 2, 2)
    return halves[..., 0] | halves[..., 1] << 32


def nanoseconds(stamp):
    low, high = map(int, stamp)
    return low | high << 32


def busy(x):
    """What is between two pages, in a branch that XLA cannot remove."""

    def branch(x):
        for _ in range(3):
            x = x @ x.T @ x / 100
        return x

    return jax.lax.cond(x[0, 0] > jnp.inf, jnp.zeros_like, branch, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_a_page_comes_back_bit_for_bit_between_branches(store, dtype):
    values = jnp.arange(300 * 7001).reshape(300, 7001).astype(dtype)
    places = where(store, values.nbytes)
    kind = values.shape, values.dtype

    @jax.jit
    def program(values, other, places):
        began = library.clock(other)
        written = library.page_out(values, other[0, 0], places, row=0, name="v")
        other = busy(other)
        again, read = library.page_in(
            kind, other[0, 0], written, places, row=0, name="v"
        )
        return again, busy(other), began, written, read, library.clock(read)

    again, other, began, written, read, ended = program(values, X, places)
    np.testing.assert_array_equal(again, values)
    np.testing.assert_allclose(other, busy(busy(X)), rtol=1e-5)
    assert written.shape == read.shape == (1, 6) and written[0, 0] == read[0, 0]
    times = [nanoseconds(began), *clocks(written)[0], *clocks(read)[0]]
    assert times == sorted(times) and times[-1] <= nanoseconds(ended)


def test_blocks_of_an_array_have_places_and_checksums_of_their_own(store, monkeypatch):
    """What one program writes whole, others read block by block, and the other way."""
    monkeypatch.setattr(paged, "BLOCK_BYTES", 10_000)
    array = PagedArray(store, X.shape, X.dtype)
    sizes = block_bytes(X.shape, X.dtype)
    assert sizes == array.block_bytes and len(sizes) == 4 == len(array.places())
    places = np.array(array.places(), np.uint32)

    @jax.jit
    def put(x, places):
        return library.page_out(
            x, x[0, 0], places, row=0, name="x", blocks=array.block_bytes
        )

    record = put(X, places)
    assert record.shape == (4, 6)
    array.set_checksums(None, record[:, 0])
    np.testing.assert_array_equal(np.asarray(array), X)

    rows = row_blocks(X.shape, X.dtype)[2]

    @jax.jit
    def get(places, whole):
        part, _ = library.page_in(
            (X[rows].shape, X.dtype), places, None, places, row=0, name="x"
        )
        all_of_it, record = library.page_in(
            (X.shape, X.dtype), part, None, whole, row=0, name="x", blocks=sizes
        )
        return part, all_of_it, record

    ((place,), whole) = (np.array(array.places(b), np.uint32) for b in (2, None))
    part, all_of_it, again = get(place[None], whole)
    np.testing.assert_array_equal(part, X[rows])
    np.testing.assert_array_equal(all_of_it, X)
    np.testing.assert_array_equal(again[:, 0], record[:, 0])

    doubled = np.asarray(X[rows] * 2).reshape(-1).view(np.uint8)
    ((file, sector, flags, _),) = array.places(2)
    checksum = library.write(file, flags, doubled, sector * 4096, "x")
    array.set_checksums(2, [checksum])
    np.testing.assert_array_equal(np.asarray(array), X.at[rows].multiply(2))


# JAX has several ways to call a program, and each has an error of its own.
FAILURE = (jax.errors.JaxRuntimeError, ValueError)


def paging(nbytes, after_out=None):
    """A program that pages out uint8 [nbytes] and in; what happens between is after
    `after_out`, a function of nothing."""

    @jax.jit
    def program(x, places):
        written = library.page_out(x, x[0], places, row=0, name="layer1/kernel")
        if after_out is not None:
            written = jax.pure_callback(
                lambda written: (after_out(), written)[1], written, written
            )
        x, _ = library.page_in(
            ((nbytes,), jnp.uint8),
            written,
            written,
            places,
            row=0,
            name="layer1/kernel",
        )
        return x

    return program


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_program_fails_by_the_name_of_a_damaged_page(store, damage):
    data = page(10_000)
    data[9_999] = 0
    places = where(store, 10_000)

    def harm():
        with reopened(store) as file:
            DAMAGES[damage](file)

    with pytest.raises(FAILURE) as caught:
        jax.block_until_ready(paging(10_000, harm)(data, places))
    error = library.page_error(caught.value)
    assert isinstance(error, poet_jax.PageStoreError)
    assert str(error).startswith("'layer1/kernel' (10000 bytes) could not be paged in")
    assert str(error).endswith("FileStore(another_folder).")
    np.testing.assert_array_equal(paging(10_000)(data, places), data)  # and goes on


def test_a_page_of_before_is_held_against_the_checksum_of_its_place(store):
    data = page(5000)
    kept = PagedArray.of(data, store)

    @jax.jit
    def program(places):
        kind = (data.shape, data.dtype)
        return library.page_in(kind, places, None, places, row=0, name="w")[0]

    places = np.array(kept.places(), np.uint32)
    np.testing.assert_array_equal(program(places), data)
    places[0, 3] ^= 1
    with pytest.raises(FAILURE, match="poet_jax: 'w'.*not those"):
        jax.block_until_ready(program(places))


def test_what_is_wrong_with_a_program_of_others_is_not_a_pages_error():
    assert library.page_error(RuntimeError("INTERNAL: out of luck")) is None


@pytest.mark.parametrize(
    "row, blocks", [(1, None), (-1, None), (0, (6, 5)), (0, (10,))]
)
def test_places_and_blocks_that_do_not_fit_are_refused(store, row, blocks):
    @jax.jit
    def program(x, places):
        return library.page_out(x, x, places, row=row, name="w", blocks=blocks)

    with pytest.raises(FAILURE, match="'w'.*does not fit"):
        jax.block_until_ready(program(page(11), where(store, 11)))


def test_a_program_that_fails_waits_for_the_transfers_under_way(store):
    """So the memory that they work on is theirs until they are done."""
    n = 16 * MIB
    places = where(store, n)

    @jax.jit
    def program(x, other, places):
        x = x ^ 255
        slow = library.page_out(x, other[0, 0], places, row=0, name="slow")
        other = busy(other)
        fast = library.page_out(other, other[0, 0], places, row=7, name="fast")
        return slow, fast, busy(other), x.sum()

    for seed in range(5):
        data = np.full(n, seed, np.uint8)
        with pytest.raises(FAILURE, match="'fast'"):
            jax.block_until_ready(program(data, X, places))
        del data
        with reopened(store) as file:
            assert os.pread(file, n, 0) == bytes([seed ^ 255]) * n


def test_several_threads_page_through_one_store(store):
    """One in three fails; the others' pages are none the worse for it."""
    n, count = 300_001, 6

    @jax.jit
    def program(x, other, places):
        records, after = [], x[0]
        for row in range(count):
            records.append(
                library.page_out(x + row, after, places, row=row, name=f"page {row}")
            )
            other = busy(other)
            after = other[0, 0]
        pages = [
            library.page_in((x.shape, x.dtype), other, r, places, row=row, name="page")
            for row, r in enumerate(records)
        ]
        return [x for x, _ in pages], library.clock(other, after, x)

    def train(seed):
        data, places = jnp.asarray(page(n, seed)), where(store, *count * [n])
        if seed % 3 == 0:
            places[seed % count, 0] = 2**31 - 1  # nobody's descriptor
            with pytest.raises(FAILURE, match=f"'page {seed % count}'"):
                jax.block_until_ready(program(data, X, places))
        else:
            pages, _ = program(data, X, places)
            for row, got in enumerate(pages):
                np.testing.assert_array_equal(got, data + row)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(12)))


def test_a_disk_that_is_full_fails_the_program_and_leaves_no_trace_at_exit(tmp_path):
    said = python(
        f"""
        import os, resource, numpy as np, jax, poet_jax
        from poet_jax.stores import library

        class Sparse(poet_jax.FileStore):
            def _grow(self, end):
                self._descriptor()

        store = Sparse({str(tmp_path)!r})
        offset, number = store.allocate(2**23, "big"), store.descriptor()
        places = np.array([[number, 0, store.is_direct, 0]], np.uint32)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        out = jax.jit(lambda x, p: library.page_out(x, x[0], p, row=0, name="big"))
        try:
            jax.block_until_ready(out(np.ones(2**23, np.uint8), places))
        except Exception as error:
            print(library.page_error(error))
        """
    )
    assert "'big' (8388608 bytes) could not be paged out" in said
    assert "File too large" in said and "store_bytes" in said


# The library.


def test_importing_it_builds_and_starts_nothing(tmp_path):
    python(
        f"""
        import os, threading
        from poet_jax.stores import library
        assert not os.listdir({str(tmp_path)!r})
        with open("/proc/self/maps") as file:
            assert "pages-" not in file.read()
        """,
        XDG_CACHE_HOME=str(tmp_path),
    )


ASK = """
    import poet_jax
    from poet_jax.stores import library
    assert library.problem()
    for _ in range(2):
        try:
            library.load()
        except poet_jax.PageStoreError as error:
            print(error)
"""


def test_a_compiler_that_is_missing_is_one_sentence(tmp_path):
    environment = {"XDG_CACHE_HOME": tmp_path, "PATH": tmp_path, "CXX": "/no/such/c++"}
    said = python(ASK, **{name: str(x) for name, x in environment.items()})
    assert said == 2 * (
        "Paging to files needs a C++ compiler, and none of $CXX, c++, g++, clang++ was "
        "found; install one (Debian: apt-get install g++), or plan without paging with "
        "MilpPlanner(paging=False).\n"
    )


def test_a_budget_too_small_says_that_nothing_could_be_paged(tmp_path):
    said = python(
        """
        import jax.numpy as jnp, poet_jax
        try:
            poet_jax.schedule(jnp.sin, 1).plan(jnp.ones(8))
        except poet_jax.BudgetTooSmall as error:
            print(error.__notes__)
        """,
        **{"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "CXX": "no-such"},
    )
    assert "No value was paged" in said and "install one" in said


def test_a_compiler_that_fails_is_quoted_and_not_asked_again(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\necho called >> "$0.log"\n'
        'test "$1" = --version && exit 0\n'
        "echo in pages.cc: >&2; echo pages.cc:1: error: no such luck >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    said = python(ASK, XDG_CACHE_HOME=str(tmp_path), CXX=str(compiler)).splitlines()
    assert said[0] == said[1] and "no such luck" in said[0] and "g++" in said[0]
    assert (tmp_path / "compiler.log").read_text() == "called\n" * 2
    assert not list((tmp_path / "poet_jax").iterdir())


def test_a_home_that_cannot_be_written_to_is_done_without():
    said = python(
        "from poet_jax.stores import library; print(repr(library.problem()))",
        XDG_CACHE_HOME="/proc",
    )
    assert said == "''\n"


# Arrays that live in stores.


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """A test may set the size of a block; it is as before afterwards."""
    monkeypatch.setattr(paged, "BLOCK_BYTES", paged.BLOCK_BYTES)


@given(shape=st.lists(st.integers(0, 40), max_size=3), nbytes=st.integers(1, 3000))
def test_row_blocks_are_all_rows_in_order(shape, nbytes):
    paged.BLOCK_BYTES = nbytes
    blocks = row_blocks(tuple(shape), np.float32)
    rows = [row for block in blocks for row in range(block.start, block.stop)]
    assert rows == list(range(shape[0] if shape else 1))
    lengths = [block.stop - block.start for block in blocks]
    assert len(set(lengths[:-1])) <= 1 and lengths[-1] <= lengths[0]
    sizes = block_bytes(tuple(shape), np.float32)
    array = np.zeros(shape, np.float32).reshape(tuple(shape) or (1,))
    assert sizes == tuple(array[block].nbytes for block in blocks)


@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "bool"]),
)
def test_a_paged_array_reads_back_as_it_was(shape, dtype):
    paged.BLOCK_BYTES = 64
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(jnp.dtype(dtype))
    store = poet_jax.FileStore()
    kept = PagedArray.of(array, store)
    assert (kept.shape, kept.dtype, kept.ndim) == (array.shape, array.dtype, array.ndim)
    assert kept.nbytes == array.nbytes <= store.nbytes and kept.size == array.size
    np.testing.assert_array_equal(np.asarray(kept), array)
    np.testing.assert_array_equal(jnp.asarray(kept), array)
    del kept
    gc.collect()
    assert store.nbytes == 0


def test_a_paged_array_is_not_pickled_viewed_or_used_once_deleted():
    store = poet_jax.HostStore()
    kept = PagedArray.of(X, store)
    assert "float32[64, 128]" in repr(kept)
    with pytest.raises(TypeError, match="np.asarray"):
        pickle.dumps(kept)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(kept, copy=False)
    kept.delete()
    kept.delete()
    assert "deleted" in repr(kept) and store.nbytes == 0
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(kept)
    with pytest.raises(RuntimeError, match="'w'.*deleted"):
        kept.places(name="w")


def test_a_folder_is_not_a_store(tmp_path):
    with pytest.raises(TypeError, match=r"poet_jax.FileStore\(folder\)"):
        PagedArray.of(X, str(tmp_path))


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_what_numpy_has_in_64_bits_is_stored_as_jax_takes_it(store, dtype):
    array = np.arange(100, dtype=dtype)
    kept = PagedArray.of(array, store)
    assert kept.dtype == jnp.asarray(array).dtype
    np.testing.assert_array_equal(kept, array)


def test_a_copy_in_ram_is_taken_once_or_dropped(store):
    kept = PagedArray.of(X, store)
    kept.keep_copy(None, X)
    assert kept.copied_bytes == X.nbytes
    assert kept.take_copy(None) is X and kept.take_copy(None) is None
    kept.keep_copy(None, X)
    paged.drop_copies()
    assert kept.copied_bytes == 0
    np.testing.assert_array_equal(paged.in_ram([kept])[0], X)
