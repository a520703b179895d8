"""A damaged page, a full disk and a lost file are errors that name the page."""

import concurrent.futures
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DAMAGES, FAILURE, MIB, X, busy, page, reopened, room_in, where
from processes import python

import poet_jax
from poet_jax.stores import library

ONE_PROCESS = True


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


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_bytes_are_refused_by_name(store, damage):
    data = page(10_000)
    data[9_999] = 0
    offset, place = room_in(store, data.nbytes)
    checksum = library.write(place, data, "layer1/kernel")
    with reopened(store) as other:
        DAMAGES[damage](other)
    into = np.empty(10_000, np.uint8)
    reason = "the file ends" if damage in ("cut", "empty") else "not those that were"
    with pytest.raises(poet_jax.PageStoreError, match=f"'layer1/kernel'.*{reason}"):
        library.read(store.page_at(offset, checksum), into, "layer1/kernel")


def test_a_descriptor_that_is_closed_is_reported_by_name():
    number = os.memfd_create("gone")
    os.close(number)
    with pytest.raises(poet_jax.PageStoreError, match="'w'.*Bad file.*Keep a store"):
        library.write((number, 0, 0, 0), page(10), "w")


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
