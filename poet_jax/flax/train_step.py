"""`train_step`, for both kinds of Flax model."""

from typing import Any

import flax.linen
from flax import nnx

from poet_jax.core.plan import BudgetLike
from poet_jax.flax import linen as linen_steps
from poet_jax.flax import nnx as nnx_steps
from poet_jax.flax.losses import LossFn
from poet_jax.flax.microbatches import Microbatches
from poet_jax.update.scheme import UpdateLike


def train_step(
    model: Any,
    budget: BudgetLike,
    *,
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
    update: UpdateLike | None = None,
    microbatches: Microbatches = 1,
    **schedule_options: Any,
) -> nnx_steps.TrainStep | linen_steps.TrainStep:
    """Make a training step of `model` within a memory budget.

    Args:
      model: an `nnx.Module` or a `linen.Module`.
      budget: as for `poet_jax.schedule`.
      loss_fn: returns a scalar or `(scalar, aux)` of `(model, batch)`. By default
        softmax cross-entropy for integer labels, or mean squared error for floats, of
        `batch = (inputs, labels)`.
      optimizer: an optax transformation, or for nnx an `nnx.Optimizer`;
        `optax.adamw(1e-3)` by default. One that takes more than gradients is given the
        loss as `value`.
      update: the parameters to train, all by default: an `update.Update`, such as
        `poet_jax.update.bias_only()`, or fractions by pattern, such as
        `{"**/bias": 1.0}`.
      microbatches: in how many equal parts of the batch gradients are computed and
        averaged, or "auto" for as few, by powers of two, as the budget takes. Exact for
        a loss that is a mean over examples; a model with statistics of the batch is
        refused.
      schedule_options: of `poet_jax.schedule`.

    Returns a `poet_jax.nnx.TrainStep` or `poet_jax.linen.TrainStep`. Raises TypeError
    for any other model or optimizer, and for `update` with an `nnx.Optimizer`;
    ValueError for `microbatches` that are neither a positive number nor "auto"; and as
    `schedule`. A call raises CannotTrace for a batch that does not divide into
    `microbatches`.
    """
    if isinstance(model, nnx.Module):
        kind: Any = nnx_steps.TrainStep
    elif isinstance(model, flax.linen.Module):
        kind = linen_steps.TrainStep
    else:
        raise TypeError(
            "`model` must be an nnx.Module or a linen.Module, got a "
            f"{type(model).__name__}. For anything else write the step as a function "
            "and use poet_jax.schedule(step, budget, donate_argnums=0)."
        )
    is_right = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    if isinstance(model, nnx.Module):
        is_right = is_right or isinstance(optimizer, nnx.Optimizer)
    if optimizer is not None and not is_right:
        raise TypeError(
            f"`optimizer` must be an optax transformation, got {optimizer!r}; use for "
            "example optimizer=optax.adamw(1e-3)"
        )
    return kind(
        model, budget, loss_fn, optimizer, update, microbatches, **schedule_options
    )
