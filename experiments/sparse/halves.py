"""An image task in two halves: a model learns one half of the classes, and is then
adapted to the other with few examples."""

import dataclasses
import pathlib

import jax
import numpy as np
import optax
from flax import nnx

from experiments.data import Dataset, load_dataset
from experiments.models import make_model
from experiments.steps import plain_step

BATCH_SIZE = 32  # while the first half is learned
LEARNING_RATE = 3e-3
ARRAYS = nnx.Not(nnx.RngState)


@dataclasses.dataclass(frozen=True)
class Halves:
    """Images of the lower and of the upper half of the classes.

    Attributes:
      old: all images of the lower half.
      new: those of the upper half, whose labels begin at zero again.
    """

    old: Dataset
    new: Dataset

    def few(self, per_class: int, seed: int) -> tuple[Dataset, Dataset]:
        """Of the new classes: `per_class` images of each, and all others."""
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(self.new.labels))
        labels = self.new.labels[order]
        place = np.zeros(len(order), np.int64)  # of an image within its class
        for label in range(self.new.num_classes):
            place[labels == label] = np.arange((labels == label).sum())
        few = place < per_class
        return _part(self.new, order[few]), _part(self.new, order[~few])


def load_halves(name: str, pixels: int = 1) -> Halves:
    """The dataset called `name`, whose images are means over squares of `pixels`.

    Rows and columns that fill no square are left out.
    """
    data = load_dataset(name)
    count, height, width, channels = data.inputs.shape
    rows, columns = height // pixels, width // pixels
    images = data.inputs[:, : rows * pixels, : columns * pixels]
    images = images.reshape(count, rows, pixels, columns, pixels, channels)
    data = dataclasses.replace(data, inputs=images.mean((2, 4)))
    half = data.num_classes // 2
    old = _part(data, data.labels < half)
    new = _part(data, data.labels >= half)
    return Halves(
        dataclasses.replace(old, num_classes=half),
        dataclasses.replace(
            new, num_classes=data.num_classes - half, labels=new.labels - half
        ),
    )


def _part(data: Dataset, chosen: np.ndarray) -> Dataset:
    return dataclasses.replace(
        data, inputs=data.inputs[chosen], labels=data.labels[chosen]
    )


def learned(model: str, old: Dataset, steps: int, folder: pathlib.Path) -> nnx.Module:
    """The model called `model` after `steps` on the old classes, kept in `folder`."""
    made = make_model(model, "nnx", dataset_spec=old.spec, seed=0)
    size = "x".join(map(str, old.spec.input_shape))
    path = folder / f"{model}-{old.name}-{size}-{steps}.npz"
    if path.exists():
        with np.load(path) as kept:
            leaves = [kept[name] for name in kept.files]
        structure = jax.tree.structure(nnx.state(made, ARRAYS))
        nnx.update(made, jax.tree.unflatten(structure, leaves))
        return made
    rate = optax.cosine_decay_schedule(LEARNING_RATE, max(steps, 1))
    step = plain_step(made, optax.adamw(rate))
    for batch in old.batches(BATCH_SIZE, 0, steps):
        step(batch)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(path, *jax.tree.leaves(nnx.state(made, ARRAYS)))
    return made


def with_new_head(model: nnx.Module, classes: int, seed: int) -> nnx.Module:
    """`model` whose classifier, an `nnx.Linear` called head, is new; changes it."""
    inputs = model.head.in_features
    model.head = nnx.Linear(inputs, classes, rngs=nnx.Rngs(seed))
    return model
