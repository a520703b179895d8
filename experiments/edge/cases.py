"""Training steps for phones and boards: small models, gradient descent, float32."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.microcontroller import models
from experiments.models import load_for_model, make_model

EXAMPLES = 64  # that a batch is drawn from
RATE = 0.05
NAMES = {
    "mlp": "mlp",
    "lenet": "lenet",
    "mobilenetv2": "mobilenetv2:width=0.35,depth=0.34",
    "transformer": "bert2:width=64,heads=4,length=32",
}
BATCHES = {"mlp": 16, "lenet": 16, "mobilenetv2": 4, "transformer": 4}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step on `(state, inputs, labels, rate)`, which returns `(state, ...)`.

    Attributes:
      name: of `NAMES`.
      step: of gradient descent. Its first argument is donated.
      arguments: of the first step.
    """

    name: str
    step: Callable[..., Any]
    arguments: tuple[Any, ...]


def make(name: str) -> Case:
    """The case called `name`. Raises ValueError for a name that is not in `NAMES`."""
    if name not in NAMES:
        raise ValueError(
            f"A model named {name!r} was asked for. The models are "
            f"{', '.join(NAMES)}. Use for example --models=mlp,lenet."
        )
    if name == "transformer":
        return _transformer(name)
    shrink = 2 if name == "mobilenetv2" else 1
    case = models.make(NAMES[name], "full", EXAMPLES, shrink)

    def step(state, inputs, labels, rate):
        return case.step(state, case.frozen, inputs, labels, rate)

    trained, _, *batch = case.arguments(BATCHES[name], RATE)
    return Case(name, step, (trained, *batch))


def _transformer(name: str) -> Case:
    """An encoder of two layers that says which text a window of bytes is from."""
    dataset = load_for_model(NAMES[name], "text")
    model = make_model(NAMES[name], "linen", dataset_spec=dataset.spec, seed=0)
    rows = np.random.default_rng(0).permutation(len(dataset.labels))[: BATCHES[name]]
    tokens, labels = (
        jnp.asarray(dataset.inputs[rows]),
        jnp.asarray(dataset.labels[rows]),
    )
    state = model.init(jax.random.key(0), tokens, train=False)

    def step(state, tokens, labels, rate):
        def loss(state):
            logits = model.apply(state, tokens, train=False)
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(
                logits, labels
            )
            return losses.mean()

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - rate * g, state, gradients), value

    return Case(name, step, (state, tokens, labels, jnp.float32(RATE)))
