"""Models with a training step that a small board runs, and the examples that it has."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.data import Dataset, load_dataset
from experiments.models import make_model, parse_model
from poet_jax import update
from poet_jax.update.part import EVERYTHING


class MLP(nn.Module):
    """Two hidden layers."""

    width: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.classes)(x)


class LeNet(nn.Module):
    """After LeCun et al., 1998, with max-pooling."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in (6, 16):
            x = nn.relu(nn.Conv(features, (5, 5))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.classes)(x)


DATASETS = {
    "mlp": "digits",
    "lenet": "mnist",
    "mobilenetv2": "photos",
    "resnet18": "photos",
    "bert2": "text",
}
UPDATES = {
    "full": update.full(),
    "bias": update.bias_only(),
    "last": update.last_blocks(2),
    "quarter": update.Update({"**": 0.0, "**/kernel": 0.25, "**/bias": 1.0}),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step on `(trained, frozen, inputs, labels, rate)`, which returns
    `(trained, loss, correct)`, with its first arguments.

    Attributes:
      step: of gradient descent; one whose rate is 0 changes nothing.
      trained, frozen: parameters.
      pixels: uint8, inputs of all examples in the order in which they are shown:
        pixels, or bytes of text.
      unit, offset: an input is `pixels * unit - offset`.
      labels: [E] int32.
      dtype: of inputs.
    """

    step: Any
    trained: Any
    frozen: Any
    pixels: np.ndarray
    unit: np.float32
    offset: np.float32
    labels: np.ndarray
    dtype: Any = np.float32

    def batch(self, first: int, size: int) -> tuple[jax.Array, jax.Array]:
        """So many examples from a number on, as the board takes them."""
        rows = np.arange(first, first + size) % len(self.pixels)
        inputs = self.pixels[rows].astype(np.float32) * self.unit - self.offset
        return jnp.asarray(inputs, self.dtype), jnp.asarray(self.labels[rows])

    def arguments(self, size: int, rate: float) -> tuple[Any, ...]:
        """Of the first step."""
        return self.trained, self.frozen, *self.batch(0, size), jnp.float32(rate)


def make(name: str, part: str, examples: int, shrink: int = 1, seed: int = 0) -> Case:
    """The case of a model's name, such as mlp:width=32 or mobilenetv2:width=0.25.

    With `shrink` a pixel is the mean of a square of so many a side. BatchNorm has the
    statistics that it starts with. Raises ValueError for other names.
    """
    family, _, text = name.partition(":")
    if family not in DATASETS:
        raise ValueError(
            f"A model named {name!r} was asked for. The models are "
            f"{', '.join(DATASETS)}. Use for example --model=mlp:width=32."
        )
    dataset = _dataset(family, name, shrink)
    model = _model(family, text, name, dataset, seed)
    order = np.random.default_rng(seed).permutation(len(dataset.inputs))[:examples]
    inputs, labels = dataset.inputs[order], dataset.labels[order]
    variables = model.init(jax.random.key(seed), jnp.asarray(inputs[:1]), train=False)
    parameters = variables.pop("params")
    chosen = EVERYTHING if part == "full" else UPDATES[part].of(parameters)
    trained = chosen.split(parameters)

    def step(trained, frozen, inputs, labels, rate):
        def loss(trained):
            merged = {"params": chosen.merge(trained, frozen["params"])}
            logits = model.apply(merged | frozen["others"], inputs, train=False)
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(
                logits, labels
            )
            correct = jnp.argmax(logits, -1).astype(jnp.int32) == labels
            return losses.mean(), correct.sum(dtype=jnp.int32)

        (value, correct), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        trained = jax.tree.map(lambda w, g: w - rate * g, trained, gradients)
        return trained, value, correct

    frozen = {"params": {} if part == "full" else parameters, "others": variables}
    offset, unit = np.float32(0), np.float32(1)
    if dataset.vocabulary is None:
        offset = np.float32(-inputs.min())
        unit = np.float32((inputs.max() + offset) / 255)
    pixels = np.rint((inputs + offset) / unit).astype(np.uint8)
    return Case(step, trained, frozen, pixels, unit, offset, labels, inputs.dtype)


def _dataset(family: str, name: str, shrink: int) -> Dataset:
    """What the model of a family learns, with images shrunk."""
    if family == "bert2":
        return load_dataset("text", length=parse_model(name)[1]["length"])
    dataset = load_dataset(DATASETS[family])
    return dataclasses.replace(dataset, inputs=shrunk(dataset.inputs, shrink))


def shrunk(images: np.ndarray, factor: int) -> np.ndarray:
    """Images [N, height, width, channels] whose pixels are means of squares."""
    count, height, width, channels = images.shape
    rows, columns = height // factor, width // factor
    cut = images[:, : rows * factor, : columns * factor]
    squares = cut.reshape(count, rows, factor, columns, factor, channels)
    return squares.mean((2, 4))


def _model(family: str, text: str, name: str, dataset: Dataset, seed: int) -> Any:
    classes = dataset.spec.num_classes
    if family == "mlp":
        return MLP(int(text.partition("=")[2] or 32), classes)
    if family == "lenet":
        return LeNet(classes)
    return make_model(name, "linen", dataset_spec=dataset.spec, seed=seed)
