"""A file of weights holds what was saved, is read where a step needs it, and is never
written; a damaged one is refused."""

import concurrent.futures
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_three_sentences
from hypothesis import assume, example, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from states import X, assert_close, case, schedule, values

import poet_jax
from poet_jax.stores.paged import PagedArray

DTYPES = ["float32", "bfloat16", "float16", "int8", "uint8", "bool", "int32"]


def random(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return np.asarray(jnp.asarray(rng.integers(0, 2, shape)).astype(dtype))


@example(shapes=[[2**23 + 5]], dtypes=["int8"], note="a")  # chunks within a block
@example(shapes=[[5, 2**22 + 1]], dtypes=["uint8"], note="ab")  # two blocks
@given(
    shapes=st.lists(st.lists(st.integers(0, 90), max_size=3), max_size=4),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4),
    note=st.text(st.characters(codec="ascii"), max_size=9),
)
def test_arrays_may_be_anywhere_in_a_file(shapes, dtypes, note, tmp_path):
    arrays = {
        f"w{n}": random(shape, dtype, n)
        for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    save_file(arrays, tmp_path / "weights", {"note": note})
    for min_bytes in (0, 2**16):
        loaded = poet_jax.load_paged(tmp_path / "weights", min_bytes)
        assert loaded.keys() == arrays.keys()
        for name, array in arrays.items():
            is_paged = isinstance(loaded[name], PagedArray)
            assert is_paged == (array.nbytes >= min_bytes)
            assert loaded[name].dtype == array.dtype
            np.testing.assert_array_equal(np.asarray(loaded[name]), array)


@given(
    shapes=st.lists(st.lists(st.integers(0, 90), max_size=3), max_size=4),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4),
    note=st.text(max_size=9),
)
def test_what_is_saved_is_what_others_read(shapes, dtypes, note, tmp_path):
    store = poet_jax.HostStore()
    arrays = {
        f"w{n}": random(shape, dtype, n)
        for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    paged = poet_jax.to_storage(arrays, store, 1000)
    for _ in range(2):  # the second takes the place of the first
        poet_jax.save_paged(paged, tmp_path / "weights", {"note": note})
    with safe_open(tmp_path / "weights", "numpy") as file:
        assert file.metadata() == {"note": note} and set(file.keys()) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)
    assert os.listdir(tmp_path) == ["weights"]


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_keys_are_keys_again(tmp_path, kind):
    path = tmp_path / "weights"
    arrays = {"key": jax.random.key(1, impl=kind), "x": X}
    arrays["keys"] = jax.random.split(arrays["key"], (2, 3))
    poet_jax.save_paged(arrays, path, {"note": "a"})
    for min_bytes in (0, 2**16):
        loaded = poet_jax.load_paged(path, min_bytes)
        for name in ("key", "keys"):
            assert loaded[name].dtype == arrays[name].dtype
            data = map(jax.random.key_data, (loaded[name], arrays[name]))
            np.testing.assert_array_equal(*data)
    damaged = path.read_bytes().replace(kind.encode(), b"x" * len(kind))
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="cannot be read as PRNG keys"):
        poet_jax.load_paged(path)


def test_what_cannot_be_saved_leaves_the_older_file(tmp_path):
    path = tmp_path / "weights"
    poet_jax.save_paged({"x": X}, path)
    gone = PagedArray.of(X, poet_jax.HostStore())
    gone.delete()
    with pytest.raises(ValueError, match="'c' is complex128.*convert it"):
        poet_jax.save_paged({"x": X, "c": np.ones(2, complex)}, path)
    for name, value, said in (
        ("__metadata__", X, "'__metadata__' cannot name.*metadata="),
        (0, X, "0 cannot name an array.*another name"),
        (("layer", 1), X, "'layer', 1.* cannot name an array.*another name"),
        ("step", 3, "'step' is a int.*jnp.asarray"),
        ("step", 0.5, "'step' is a float.*jnp.asarray"),
        ("step", None, "'step' is a NoneType.*metadata="),
        ("step", [X], "'step' is a list.*an item for each array"),
        ("step", {"x": X}, "'step' is a dict.*an item for each array"),
    ):
        with pytest.raises(ValueError, match=said) as refused:
            poet_jax.save_paged({"x": X, name: value}, path)
        assert_three_sentences(refused.value)
    with pytest.raises(RuntimeError, match="has been deleted"):
        poet_jax.save_paged({"x": X, "gone": gone}, path)
    assert os.listdir(tmp_path) == ["weights"]
    np.testing.assert_array_equal(poet_jax.load_paged(path)["x"], X)


@pytest.mark.parametrize("budget", ["100%", "80%"])
def test_training_from_a_file_leaves_it_as_it_was(tmp_path, store, budget):
    init, step = case("momentum")
    params, moments = init(jax.random.key(0))
    path = tmp_path / "weights.safetensors"
    save_file({name: np.asarray(x) for name, x in params.items()}, path)
    before = path.read_bytes()

    state = poet_jax.load_paged(path, 4096), poet_jax.to_storage(moments, store, 4096)
    assert sum(isinstance(x, PagedArray) for x in state[0].values()) == 3
    train, expected = schedule(step, budget, store), (params, moments)
    for _ in range(3):
        state, loss = train(state, X)
        expected, expected_loss = jax.jit(step)(expected, X)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(state, expected)
    assert all(x.store is store for x in state[0].values() if isinstance(x, PagedArray))
    assert path.read_bytes() == before


def test_frozen_weights_are_read_from_their_file_in_every_step(tmp_path):
    init, _ = case()
    params, _ = init(jax.random.key(0))
    save_file({name: np.asarray(x) for name, x in params.items()}, tmp_path / "weights")
    loaded = poet_jax.load_paged(tmp_path / "weights", 4096)

    def run(params, x):
        for n in range(3):
            x = jnp.tanh(x @ params[f"w{n}"] / 12 + params["bias"])
        return x

    store = poet_jax.HostStore()
    planned = poet_jax.schedule(run, "200KB", executor=poet_jax.HostExecutor(store))
    for _ in range(2):
        np.testing.assert_allclose(planned(loaded, X), run(params, X), rtol=1e-5)
        assert planned.last_run.bytes_paged_in >= 2 * 128 * 128 * 4
        assert planned.last_run.bytes_paged_out == 0 == store.nbytes


@given(size=st.integers(0, 1_200))
def test_a_file_of_another_length_is_refused(size, tmp_path):
    path = tmp_path / "weights"
    save_file({"w": np.arange(256, dtype=np.float32)}, path)
    assume(size != path.stat().st_size)
    os.truncate(path, size)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        poet_jax.load_paged(path)


@pytest.mark.parametrize(
    "header, said",
    [
        ([], "its header is not one"),
        ({"w": {"shape": [1]}}, "its header is not one .*dtype"),
        ({"w": "float"}, "its header is not one"),
        ({"w": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, "'w'.*'F4'"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "has 4 bytes"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "has -4"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "'w'"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "byte .* of"),
        ({"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, "'w'.*1.0"),
        ({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "'w'.*True"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]}}, "'w'.*0.0"),
        ({"w": {"dtype": "F32", "shape": [0, 2**70], "data_offsets": [0, 0]}}, "'w'"),
        ({"w": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "'w'.*'1'"),
    ],
)
def test_a_header_that_lies_is_refused_by_name(tmp_path, header, said):
    refuse_header(tmp_path, json.dumps(header), said)


def test_a_header_that_is_too_deep_is_refused(tmp_path):
    refuse_header(tmp_path, "[" * 10**5, "its header is not one")


def refuse_header(tmp_path, header, said):
    written = header.encode()
    contents = len(written).to_bytes(8, "little") + written + bytes(4)
    (tmp_path / "weights").write_bytes(contents)
    with pytest.raises(ValueError, match=f"cannot be read as safetensors: .*{said}"):
        poet_jax.load_paged(tmp_path / "weights")


def test_what_is_no_file_or_too_wide_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a file"):
        poet_jax.load_paged(tmp_path)
    save_file({"w": np.ones((256, 256))}, tmp_path / "wide")
    with pytest.raises(ValueError, match="'w'.*float64.*jax_enable_x64"):
        poet_jax.load_paged(tmp_path / "wide")
    (small,) = poet_jax.load_paged(tmp_path / "wide", 2**20).values()
    assert small.dtype == jnp.float32


def test_a_file_that_changes_later_is_refused(tmp_path):
    path = tmp_path / "weights"
    save_file({"w": np.ones(100, np.float32)}, path)
    ((_, kept),) = poet_jax.load_paged(path, 0).items()
    values(kept)
    with open(path, "r+b") as file:
        file.write(b"\0")
    os.utime(path, ns=(0, 0))
    with pytest.raises(poet_jax.PageStoreError, match="has changed since"):
        values(kept)


def test_pages_are_not_written_to_a_file_of_weights(tmp_path):
    save_file({"w": np.ones(100, np.float32)}, tmp_path / "weights")
    (kept,) = poet_jax.load_paged(tmp_path / "weights", 0).values()
    with pytest.raises(poet_jax.PageStoreError, match="only read.*FileStore"):
        poet_jax.to_storage(X, kept.store, 0)
    with pytest.raises(poet_jax.PageStoreError, match="only read"):
        kept.store.reserve(1)


def test_who_saves_to_one_path_together_leaves_what_one_of_them_saved(tmp_path):
    path = tmp_path / "weights"
    arrays = [{"w": np.full(2**18, n, np.int32)} for n in range(2)]

    def save(n):
        for _ in range(20):
            poet_jax.save_paged(arrays[n], path)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(save, range(2)))
    (kept,) = poet_jax.load_paged(path).values()
    assert len(set(np.asarray(kept).tolist())) == 1
    assert [x.name for x in tmp_path.iterdir()] == ["weights"]
