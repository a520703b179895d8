"""An image task in halves, and rows of schemes that train a part of a model."""

import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from checks import assert_three_sentences
from flax import nnx

from experiments.data import Dataset, load_dataset
from experiments.program import appending, read_rows
from experiments.sparse import schemes
from experiments.sparse.halves import ARRAYS, learned, load_halves, with_new_head
from poet_jax.update import Update, full

TINY = "mlp:width=4,layers=1"


def as_set(data: Dataset) -> set[bytes]:
    return {image.tobytes() for image in data.inputs}


def test_halves_share_no_class_and_few_images_are_not_held_out():
    halves, whole = load_halves("digits"), load_dataset("digits")
    assert set(halves.old.labels) == set(halves.new.labels) == set(range(5))
    assert as_set(halves.old) | as_set(halves.new) == as_set(whole)
    upper = as_set(Dataset(whole.inputs[whole.labels >= 5], whole.labels, 10, ""))
    assert as_set(halves.new) == upper and not upper & as_set(halves.old)
    train, held_out = halves.few(7, seed=0)
    assert np.bincount(train.labels).tolist() == [7] * 5
    assert len(train.labels) + len(held_out.labels) == len(halves.new.labels)
    assert not as_set(train) & as_set(held_out)
    again, other = halves.few(7, seed=0)[0], halves.few(7, seed=1)[0]
    assert np.array_equal(train.inputs, again.inputs)
    assert as_set(train) != as_set(other)


def test_a_pixel_is_the_mean_of_its_square():
    image = load_dataset("digits").inputs[0]
    small = load_halves("digits", pixels=3).old.inputs[0]
    assert small.shape == (2, 2, 1)
    np.testing.assert_allclose(small[1, 0], image[3:6, :3].mean((0, 1)), rtol=1e-6)


def arrays_of(module: nnx.Module) -> dict[str, np.ndarray]:
    return {
        "/".join(map(str, path)): np.asarray(variable[...])
        for path, variable in nnx.to_flat_state(nnx.state(module, ARRAYS))
    }


@pytest.mark.usefixtures("standard_promotion")  # of a schedule of rates of optax
def test_what_was_learned_is_kept_but_for_the_head(tmp_path):
    old = load_halves("digits").old
    untrained = arrays_of(learned(TINY, old, 0, tmp_path))
    first = arrays_of(learned(TINY, old, 2, tmp_path))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = learned(TINY, old, 2, tmp_path)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    after = arrays_of(with_new_head(second, 3, seed=1))
    assert untrained.keys() == first.keys() == after.keys()
    changed = {x for x in first if not np.array_equal(first[x], after[x])}
    assert changed == {"head/kernel", "head/bias"}
    assert after["head/bias"].shape == (3,)
    assert all(not np.array_equal(untrained[x], first[x]) for x in first)


class Sign(nnx.Module):
    """Says 1 of what is positive and 0 of the rest."""

    def __call__(self, x):
        return x * np.array([-1.0, 1.0], np.float32)


@pytest.mark.parametrize("count", [1, schemes.EVALUATED, schemes.EVALUATED + 3])
def test_accuracy_counts_every_example_once(count):
    inputs = np.random.default_rng(count).normal(size=(count, 1)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int32)
    labels[-1] ^= 1
    right = schemes.accuracy(Sign(), Dataset(inputs, labels, 2, "signs"))
    assert right == pytest.approx((count - 1) / count)


def test_rows_that_are_there_are_not_missing(tmp_path):
    keys = [{"update": "a", "seed": seed} for seed in range(3)]
    path = tmp_path / "rows.csv"
    assert schemes.missing(keys, read_rows(path)) == keys
    for done in (keys[1], keys[0]):
        with appending(path, ["update", "seed", "accuracy"]) as append:
            append(done)
    assert schemes.missing(keys, read_rows(path)) == [keys[2]]


def test_a_scheme_is_a_name_or_fractions():
    named = {"everything": (full(), 0.1)}
    assert schemes.named_scheme("everything", named) == named["everything"]
    update, _ = schemes.named_scheme('{"a/**": 1}', named, batch_stats="keep")
    assert update == Update({"a/**": 1}, batch_stats="keep")
    with pytest.raises(ValueError, match="The schemes are everything") as caught:
        schemes.named_scheme("nothing", named)
    assert_three_sentences(caught.value)


def test_adapting_draws_its_rows_and_measures_none_again(tmp_path):
    rows = pathlib.Path("experiments/results/adapt/schemes.csv")
    shutil.copy(rows, tmp_path)
    command = [sys.executable, "-m", "experiments.sparse.adapt", f"--output={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "schemes.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "schemes.csv").read_bytes() == rows.read_bytes()
