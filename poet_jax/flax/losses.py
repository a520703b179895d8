"""Defaults and checks that both Flax front ends share."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from poet_jax.core.equation import nbytes_of
from poet_jax.core.errors import BudgetTooSmall, CannotTrace
from poet_jax.core.units import format_bytes

LossFn = Callable[[Callable, Any], Any]
LOSS_FN = "The step calls loss_fn(model, batch), for a scalar or (scalar, aux)."


def default_optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


@contextlib.contextmanager
def explained(
    trained: Callable[[], Any], *, trains_all: bool, may_split: Callable[[], bool]
) -> Iterator[None]:
    """Errors of a step say what its loss takes, and what training a part, or
    microbatches where it `may_split` the batch, would save.

    A part saves at most the gradients, and what the optimizer keeps: as many bytes as
    parameters and optimizer state, which `trained` gives. Two microbatches save about
    half of what is in RAM beside these.
    """
    try:
        yield
    except CannotTrace as error:
        error.add_note(LOSS_FN)
        raise
    except BudgetTooSmall as error:
        state = sum(map(nbytes_of, jax.tree.leaves(trained())))
        more = []
        if trains_all:
            part = "update= to train a part of the parameters"
            more.append(f"{part} (up to {format_bytes(state)})")
        beside = error.smallest_bytes - state
        if beside > 0 and may_split():
            more.append(
                f'microbatches="auto" (about {format_bytes(beside / 2)} or more)'
            )
        if not more:
            raise
        budget, *others = error.remedies
        raise error.but(remedies=(budget, *more, *others)) from error


def takes_value(update: Callable[..., Any]) -> bool:
    """Whether an optimizer's `update` may be given the loss, as `value`."""
    parameters = inspect.signature(update).parameters
    return "value" in parameters or any(
        x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values()
    )


def donatable(state: Any, rest: Any) -> Any:
    """`state` with copies of arrays that it holds twice or shares with `rest`.

    An array can be donated only once, but clones of an nnx module, and optimizers that
    start from the parameters, share the model's arrays.
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
    """Mean softmax cross-entropy for integer labels, mean squared error for floats.

    `batch` is `(inputs, labels)`. Raises CannotTrace for another batch, and for labels
    whose shape is not that of the predictions.
    """
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not is_pair:
        many = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise CannotTrace(
            "The default loss takes batch = (inputs, labels), got a "
            f"{type(batch).__name__}{many}. Pass a loss_fn(model, batch) to train_step "
            "for any other batch."
        )
    inputs, labels = batch
    predictions, labels = model(inputs), jnp.asarray(labels)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        if labels.shape != predictions.shape[:-1]:
            raise CannotTrace(
                "The default loss needs an integer label for each prediction, got "
                f"labels of shape {labels.shape} and predictions of shape "
                f"{predictions.shape}. Use labels of shape {predictions.shape[:-1]}, "
                "or pass a loss_fn to train_step."
            )
        return optax.softmax_cross_entropy_with_integer_labels(
            predictions, labels
        ).mean()
    if predictions.shape != labels.shape:
        raise CannotTrace(
            f"The default loss needs predictions and labels of equal shape, got "
            f"{predictions.shape} and {labels.shape}, which would broadcast. Use for "
            "example labels[:, None], or pass a loss_fn to train_step."
        )
    return jnp.mean((predictions - labels) ** 2)


def scalar_and_aux(result: Any) -> tuple[jax.Array, Any]:
    """(loss, aux) of a loss function's result; aux is None if it returns none.

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
            f"The loss must be a floating scalar, or (scalar, aux), got {what}. Return "
            "for example loss.mean() from loss_fn."
        )
    return loss, aux
