"""What the two Flax front ends share: the default loss and the default optimizer."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from poet_jax.core.errors import CannotTrace

LossFn = Callable[[Callable, Any], Any]


def default_optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


def donatable(state: Any, rest: Any = ()) -> Any:
    """`state` with copies of arrays that it holds twice, or shares with `rest`.

    An array can be donated once. A clone of an nnx module shares the arrays of its
    model, and so does an optimizer that starts from the parameters.
    """
    leaves, tree = jax.tree.flatten(state)
    known = set(map(id, jax.tree.leaves(rest)))
    if len(set(map(id, leaves)) - known) == len(leaves):
        return state
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and id(leaf) in known:
            leaves[place] = jnp.copy(leaf)
        known.add(id(leaf))
    return jax.tree.unflatten(tree, leaves)


def default_loss(model: Callable, batch: Any) -> jax.Array:
    """Softmax cross-entropy for integer labels, mean squared error for floating ones.

    `batch` is `(inputs, labels)`; the result is a scalar, the mean over the batch.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise CannotTrace(
            f"The default loss was given a batch of type {type(batch).__name__}. It "
            "takes batch = (inputs, labels). Type train_step(model, budget, "
            "loss_fn=...) with a loss_fn(model, batch) for any other batch."
        )
    inputs, labels = batch
    predictions = model(inputs)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        return optax.softmax_cross_entropy_with_integer_labels(
            predictions, labels
        ).mean()
    if predictions.shape != labels.shape:
        raise CannotTrace(
            f"The default loss was given predictions of shape {predictions.shape} and "
            f"labels of shape {labels.shape}. A mean squared error needs equal shapes, "
            "as broadcasting would compare every example with every other. Type for "
            "example labels[:, None], or train_step(model, budget, loss_fn=...)."
        )
    return jnp.mean((predictions - labels) ** 2)


def scalar_and_aux(result: Any) -> tuple[jax.Array, Any]:
    """A loss function's result as (loss, aux); aux is None where there is none.

    Raises CannotTrace if the loss is not a floating scalar.
    """
    loss: Any = result
    aux = None
    if isinstance(result, tuple) and len(result) == 2:
        loss, aux = result
    shape = getattr(loss, "shape", None)
    dtype: Any = getattr(loss, "dtype", None)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        what = type(loss).__name__ if shape is None else f"{dtype}{list(shape)}"
        raise CannotTrace(
            f"A gradient was asked for of a loss that is {what}. Only a floating "
            "scalar, or (scalar, aux), has one. Return for example loss.mean() from "
            "loss_fn."
        )
    return loss, aux


def accepts(function: Callable, name: str) -> bool:
    """Whether `function` has a parameter called `name`."""
    return name in inspect.signature(function).parameters
