"""A store gives back the bytes it was given, or says why not; it leaves nothing."""

import errno
import os
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import poet_jax
from poet_jax import store as store_module


def page(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def read(store, key, nbytes, name="a"):
    into = np.full(nbytes, 255, np.uint8)
    store.read(key, into, name)
    return into


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 100_000])
def test_the_same_bytes_come_back_as_often_as_asked(store, nbytes):
    data = page(nbytes)
    store.write(7, data, "a")
    assert store.nbytes == nbytes
    for _ in range(2):
        np.testing.assert_array_equal(read(store, 7, nbytes), data)
    store.delete(7)
    assert store.nbytes == 0


def test_room_that_was_reserved_is_on_the_disk_until_the_store_is_closed(tmp_path):
    def on_disk():
        return 512 * os.stat(store._chunks.file.fileno()).st_blocks

    store = poet_jax.FileStore(tmp_path)
    store.write(0, page(4096), "a")
    store.reserve(2**20)
    assert on_disk() >= 2**20 + 4096 and store.nbytes == 4096
    store.reserve(2**19)  # there is room already
    assert on_disk() < 2**21
    np.testing.assert_array_equal(read(store, 0, 4096), page(4096))
    store.close()
    store.reserve(4096)  # may be used again
    assert on_disk() < 2**20
    store.close()


def at(offset, nbytes):
    """[nbytes] that begin `offset` bytes after a page of memory does."""
    block = np.zeros(nbytes + 3 * 4096, np.uint8)
    start = -block.ctypes.data % 4096 + offset
    return block[start : start + nbytes]


@settings(max_examples=40, deadline=None)
@given(
    nbytes=st.integers(0, 12).map(lambda sectors: 4096 * sectors)
    | st.integers(0, 50_000),
    offsets=st.tuples(*2 * [st.sampled_from([0, 1, 64, 512, 4096])]),
)
def test_bytes_may_be_anywhere_in_memory(nbytes, offsets):
    """What lies at sectors is transferred as it is, anything else through buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "CHUNK_BYTES", 8192)
        store = poet_jax.FileStore()
        data, into = (at(offset, nbytes) for offset in offsets)
        data[:] = page(nbytes)
        store.write(0, data, "a")
        store.read(0, into, "a")
        np.testing.assert_array_equal(into, page(nbytes))
        np.testing.assert_array_equal(data, page(nbytes))
        store.close()


def test_a_store_keeps_a_copy_and_gives_one(store):
    data = page(10)
    expected = data.copy()
    store.write(0, data, "a")
    data[:] = 0
    read(store, 0, 10)[:] = 1
    np.testing.assert_array_equal(read(store, 0, 10), expected)


def test_a_closed_store_is_empty_and_may_be_used_again(store):
    store.write(0, page(10), "a")
    store.close()
    assert store.nbytes == 0
    store.write(0, page(20, seed=1), "a")
    np.testing.assert_array_equal(read(store, 0, 20), page(20, seed=1))


def test_a_page_of_another_size_is_refused(tmp_path):
    store = poet_jax.FileStore(tmp_path)
    store.write(0, page(10), "layer1/kernel")
    for nbytes in (9, 11):
        with pytest.raises(poet_jax.PageStoreError, match="layer1/kernel"):
            read(store, 0, nbytes, "layer1/kernel")


@pytest.mark.parametrize("make", [poet_jax.HostStore, poet_jax.FileStore])
@settings(max_examples=60)
@given(moves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=40))
def test_pages_never_overlap(make, moves):
    """A move writes page `key` with `size` bytes, or deletes it if it is there."""
    store, kept = make(), {}
    for number, (key, size) in enumerate(moves):
        if key in kept:
            store.delete(key)
            del kept[key]
        else:
            kept[key] = page(size, seed=number)
            store.write(key, kept[key], "a")
        assert store.nbytes == sum(data.nbytes for data in kept.values())
        for other, data in kept.items():
            np.testing.assert_array_equal(read(store, other, data.nbytes), data)
    store.close()


def size_of(store):
    return os.fstat(store._chunks.file.fileno()).st_size


def test_room_that_was_freed_is_used_again(tmp_path):
    """10 pages of a sector, freed in any order, make room for one of ten."""
    store = poet_jax.FileStore(tmp_path)
    for key in range(10):
        store.write(key, page(4000), "a")
    for key in (3, 1, 2, 9, 0, 4, 8, 6, 5, 7):
        store.delete(key)
    for _ in range(2):  # the second one takes the place of the first
        store.write(0, page(40_000), "a")
    assert size_of(store) == 40_960


def test_a_file_store_leaves_no_name_in_its_folder(tmp_path):
    store = poet_jax.FileStore(tmp_path)
    store.write(0, page(10), "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: os.pwrite(file, b"\xff", 50),
        lambda file: os.pwrite(file, b"\xff", 9_999),
        lambda file: os.pwrite(file, os.pread(file, 4096, 4096), 0),
        lambda file: os.ftruncate(file, 9_000),
        lambda file: os.ftruncate(file, 0),
    ],
)
@pytest.mark.parametrize("direct", [True, False])
def test_damaged_bytes_are_refused_by_name(tmp_path, damage, direct, monkeypatch):
    if not direct:
        monkeypatch.setattr(store_module, "_make_direct", lambda descriptor: False)
    store = poet_jax.FileStore(tmp_path)
    store.write(0, page(10_000), "layer1/kernel")
    np.testing.assert_array_equal(read(store, 0, 10_000), page(10_000))
    # Another way to the file, which moves bytes as it likes.
    file = os.open(f"/proc/self/fd/{store._chunks.file.fileno()}", os.O_RDWR)
    damage(file)
    os.close(file)
    with pytest.raises(poet_jax.PageStoreError, match="layer1/kernel"):
        read(store, 0, 10_000, "layer1/kernel")


def test_a_full_disk_is_reported_by_name_and_keeps_nothing(tmp_path, monkeypatch):
    store = poet_jax.FileStore(tmp_path)
    store.write(0, page(10), "kept")
    pwrite = os.pwrite

    def full(descriptor, data, offset):
        if offset >= 3 * 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data[:4096], offset)  # and short writes before

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(poet_jax.PageStoreError, match="'big'.*No space left") as caught:
        store.write(1, page(40_000), "big")
    assert "store_bytes" in str(caught.value)
    assert store.nbytes == 10
    store.write(1, page(10, seed=2), "small")
    np.testing.assert_array_equal(read(store, 0, 10), page(10))
    np.testing.assert_array_equal(read(store, 1, 10), page(10, seed=2))


def test_a_folder_that_is_not_one_is_refused(tmp_path):
    with pytest.raises(poet_jax.PageStoreError, match="not a folder"):
        poet_jax.FileStore(tmp_path / "missing")


def test_a_folder_that_vanished_is_reported(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    store = poet_jax.FileStore(folder)
    folder.rmdir()
    with pytest.raises(poet_jax.PageStoreError, match="'a'"):
        store.write(0, page(10), "a")


class Failing(poet_jax.HostStore):
    """Fails at the `count`-th call of `method`."""

    def __init__(self, method, count):
        super().__init__()
        self.method, self.count = method, count

    def step(self, method):
        if method == self.method:
            self.count -= 1
            if self.count == 0:
                raise poet_jax.PageStoreError("'x' could not be moved")

    def write(self, key, data, name):
        self.step("write")
        super().write(key, data, name)

    def read(self, key, into, name):
        self.step("read")
        super().read(key, into, name)


@pytest.mark.parametrize("method", ["write", "read"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_whose_store_fails_raises_and_the_next_one_works(method, count):
    import jax
    import jax.numpy as jnp
    from strategies import DEVICE, attempt

    def loss(w, x):
        for _ in range(4):
            x = jnp.sin(x @ w)
        return x.sum()

    fun, x = jax.grad(loss), jnp.ones((64, 64)) / 64
    graph = poet_jax.order(poet_jax.coarsen(poet_jax.trace(fun, x, x)))
    costs = poet_jax.price(graph, DEVICE)
    error = attempt(poet_jax.paging_only, graph, costs, 1)
    plan = attempt(poet_jax.paging_only, graph, costs, error.smallest_bytes)
    store = Failing(method, count)
    runner = poet_jax.HostExecutor(store)(poet_jax.lower(graph, plan))
    with pytest.raises(poet_jax.PageStoreError, match="could not be moved"):
        runner(x, x)
    assert store.nbytes == 0
    np.testing.assert_allclose(runner(x, x), fun(x, x), rtol=1e-5)
    assert store.nbytes == 0


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
