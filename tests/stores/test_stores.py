"""Pages come back bit for bit, or an error says which did not and why; nothing is left
behind, and nothing begins before it is needed."""

import gc
import os
import pickle
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pages import FAILURE, MIB, X, busy, page, room_in, where
from strategies import examples

import poet_jax
from poet_jax.stores import library, paged
from poet_jax.stores.paged import PagedArray, block_bytes, row_blocks

# Stores: room in a file.


@examples(60)
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


@pytest.mark.parametrize(
    "ask",
    [lambda x: x.descriptor(), lambda x: x.allocate(1, "w"), lambda x: x.reserve(1)],
)
def test_a_store_of_the_users_says_why_it_does_not_open(ask):
    class Closed(poet_jax.stores.Store):
        def open(self):
            raise OSError("no file today")

    with pytest.raises(poet_jax.PageStoreError, match="no file today"):
        ask(Closed())


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


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="Linux has it")
def test_a_default_folder_in_ram_gives_way_to_one_that_is_not(monkeypatch, caplog):
    poet_jax.FileStore("/var/tmp")
    if "in RAM" in caplog.text:
        pytest.skip("/var/tmp is in RAM, too")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
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


@examples(40)
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
    offset, place = room_in(store, nbytes)
    checksum = library.write(place, data, "a")
    library.read(store.page_at(offset, checksum), into, "a")
    np.testing.assert_array_equal(into, expected)
    np.testing.assert_array_equal(data, expected)


@examples(100)
@given(
    nbytes=st.integers(4096, 30_000),
    places=st.lists(st.integers(0, 2**31), min_size=2, max_size=2),
    change=st.sampled_from(["bit", "word", "words", "sectors", "length"]),
    seed=st.integers(0, 9),
)
def test_any_change_changes_the_checksum(nbytes, places, change, seed):
    store = poet_jax.HostStore()
    _, place = room_in(store, nbytes)
    data = page(nbytes, seed) if seed else np.zeros(nbytes, np.uint8)
    before = library.write(place, data, "a")
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
    after = library.write(place, changed, "a")
    assert (before == after) == np.array_equal(data, changed)


# The custom calls.


def clocks(record):
    """(start, stop) in nanoseconds of each block."""
    halves = np.asarray(record).astype(np.uint64)[:, 1:5].reshape(-1, 2, 2)
    return halves[..., 0] | halves[..., 1] << 32


def nanoseconds(stamp):
    low, high = map(int, stamp)
    return low | high << 32


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


def test_blocks_of_an_array_have_places_and_checksums_of_their_own(store):
    """What one program writes whole, others read block by block, and the other way."""
    X = jnp.arange(50 * MIB // 4, dtype=jnp.float32).reshape(100, -1)
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
    (place,) = array.places(2)
    checksum = library.write(place, doubled, "x")
    array.set_checksums(2, [checksum])
    np.testing.assert_array_equal(np.asarray(array), X.at[rows].multiply(2))


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


# The library.


# Arrays that live in stores.


@given(
    shape=st.lists(st.integers(0, 40) | st.integers(0, 10_000_000), max_size=2).map(
        lambda shape: [*shape, 3]
    )
)
def test_row_blocks_are_all_rows_in_order(shape):
    blocks = row_blocks(tuple(shape), np.float32)
    rows = [row for block in blocks for row in range(block.start, block.stop)]
    assert rows == list(range(shape[0] if shape else 1))
    lengths = [block.stop - block.start for block in blocks]
    assert len(set(lengths[:-1])) <= 1 and lengths[-1] <= lengths[0]
    sizes = block_bytes(tuple(shape), np.float32)
    array = np.broadcast_to(np.float32(0), shape)
    assert sizes == tuple(array[block].nbytes for block in blocks)


@example(shape=[5, 2**22 + 1], dtype="int8")  # two blocks
@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "bool"]),
)
def test_a_paged_array_reads_back_as_it_was(shape, dtype):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(jnp.dtype(dtype))
    store = poet_jax.FileStore()
    kept = PagedArray.of(array, store)
    assert (kept.shape, kept.dtype, kept.ndim) == (array.shape, array.dtype, array.ndim)
    assert kept.nbytes == array.nbytes <= store.nbytes and kept.size == array.size
    np.testing.assert_array_equal(np.asarray(kept), array)
    np.testing.assert_array_equal(jnp.asarray(kept), array)
    del kept
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
    np.testing.assert_array_equal(paged.copied_to_ram([kept])[0], X)
