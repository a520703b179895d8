"""`train_step`: one call for both kinds of Flax model."""

from typing import Any

import flax.linen
from flax import nnx

from poet_jax.core.plan import BudgetLike
from poet_jax.flax import linen as linen_steps
from poet_jax.flax import nnx as nnx_steps
from poet_jax.flax.losses import LossFn
from poet_jax.update.scheme import UpdateLike


def train_step(
    model: Any,
    budget: BudgetLike,
    *,
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
    update: UpdateLike | None = None,
    **schedule_options: Any,
) -> nnx_steps.TrainStep | linen_steps.TrainStep:
    """A training step of `model` within a memory budget.

    Args:
      model: an `nnx.Module` or a `linen.Module`.
      budget: as for `poet_jax.schedule`.
      loss_fn: `loss_fn(model, batch)`, a scalar or `(scalar, aux)`. By default softmax
        cross-entropy for integer labels and mean squared error for floating ones, on
        `batch = (inputs, labels)`.
      optimizer: an optax transformation, `optax.adamw(1e-3)` by default, or for nnx an
        `nnx.Optimizer`.
      update: which parameters to train: an `update.Update`, such as
        `poet_jax.update.bias_only()`, or fractions by pattern of paths, such as
        `{"**/bias": 1.0}`. By default all.
      schedule_options: device, planner and executor, as for `poet_jax.schedule`.

    Returns a step: see `poet_jax.nnx.TrainStep` and `poet_jax.linen.TrainStep`. Raises
    TypeError for any other model.
    """
    if isinstance(model, nnx.Module):
        kind: Any = nnx_steps.TrainStep
    elif isinstance(model, flax.linen.Module):
        kind = linen_steps.TrainStep
    else:
        raise TypeError(
            f"A training step was asked for of a {type(model).__name__}. A model is an "
            "nnx.Module or a linen.Module. For anything else write the step as a "
            "function and type poet_jax.schedule(step, budget, donate_argnums=0)."
        )
    return kind(model, budget, loss_fn, optimizer, update, **schedule_options)
