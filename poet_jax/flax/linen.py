"""Training steps of `flax.linen` modules within a budget."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from poet_jax.api.effects import Effects
from poet_jax.api.schedule import Schedule
from poet_jax.api.state import init_paged
from poet_jax.api.transform import schedule as schedule_function
from poet_jax.core.plan import BudgetLike
from poet_jax.emit.executor import Run
from poet_jax.flax.losses import (
    LossFn,
    accepts,
    default_loss,
    default_optimizer,
    donatable,
    scalar_and_aux,
)
from poet_jax.stores.store import Store
from poet_jax.update.items import Beneath
from poet_jax.update.part import EVERYTHING, Part
from poet_jax.update.scheme import UpdateLike, parse_update


class TrainState(struct.PyTreeNode):
    """All that a step replaces.

    Attributes:
      step: int32 scalar, updates done.
      params: the module's parameters.
      opt_state: the optimizer's state.
      collections: the other variable collections, such as batch_stats.
      key: typed PRNG key from which each step's dropout keys are folded.
      part: of the parameters that the step trains.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    collections: Any
    key: jax.Array
    part: Part = EVERYTHING


class BoundModel:
    """What `loss_fn` calls as `model`: `apply` with variables and keys bound.

    Positional and keyword arguments go to the module. `train=True` is passed where the
    module takes `train` and the caller does not say. Changes of mutable collections are
    gathered in `collections`.
    """

    def __init__(
        self, module: nn.Module, params: Any, collections: Any, key: jax.Array
    ):
        self.module, self.params = module, params
        self.collections = collections
        self._key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if accepts(self.module.__call__, "train"):  # type: ignore[attr-defined]
            kwargs.setdefault("train", True)
        self._key, params_key, dropout_key = jax.random.split(self._key, 3)
        result, changed = self.module.apply(
            {"params": self.params, **self.collections},
            *args,
            rngs={"params": params_key, "dropout": dropout_key},
            mutable=list(self.collections),
            **kwargs,
        )
        self.collections = {**self.collections, **changed}
        return result


class TrainStep:
    """A training step of a linen module; made by `train_step`.

    `state = step.init(key, batch)`, then `state, metrics = step(state, batch)`. The
    state given is consumed, as with `jax.jit(..., donate_argnums=0)`. `metrics` holds
    "loss" and what `loss_fn` returns as aux: its items if it is a dictionary, else as
    "aux".
    """

    def __init__(
        self,
        module: nn.Module,
        budget: BudgetLike,
        loss_fn: LossFn | None,
        optimizer: optax.GradientTransformation | None,
        update: UpdateLike | None = None,
        **options: Any,
    ):
        self.module = module
        self.scheme = None if update is None else parse_update(update)
        self.optimizer = optimizer if optimizer is not None else default_optimizer()
        self._loss_fn = loss_fn if loss_fn is not None else default_loss
        self._scheduled = schedule_function(
            self.update, budget, donate_argnums=0, **options
        )

    def init(
        self, key: jax.Array, batch: Any, store: Store | None = None
    ) -> TrainState:
        """A fresh state. `loss_fn` is traced on `batch` to see how it calls the model.

        With a `store` the large leaves of the state are made there, and are never in
        RAM together; give the same store to the step's executor.
        """
        if store is not None:
            return init_paged(self._state, store, key, batch)
        return self._state(key, batch)

    def _state(self, key: jax.Array, batch: Any) -> TrainState:
        init_key, step_key = jax.random.split(key)
        loss_fn, module = self._loss_fn, self.module

        def variables(key, batch):
            recorder = _Initialiser(module, key)
            loss_fn(recorder, batch)
            return recorder.variables

        created = jax.jit(variables)(init_key, batch)
        if created is None:
            raise TypeError(
                "A state was asked for, and loss_fn(model, batch) never called the "
                "model. Its parameters are created by that call. Call model(...) in "
                "loss_fn."
            )
        params = created.pop("params", {})
        part = EVERYTHING
        if self.scheme is not None:
            part = self.scheme.of(
                params,
                created,
                step_key,
                batch,
                loss=lambda *args: self._loss(*args)[0],
                key=jax.random.fold_in(init_key, 1),
            )
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.optimizer.init(part.split(params)),
            collections=created,
            key=step_key,
            part=part,
        )

    def _loss(self, params: Any, collections: Any, key: jax.Array, batch: Any):
        """(loss, (aux, collections)) of these parameters."""
        model = BoundModel(self.module, params, collections, key)
        loss, aux = scalar_and_aux(self._loss_fn(model, batch))
        return loss, (aux, model.collections)

    def update(self, state: TrainState, batch: Any):
        """The step as a plain function, to be run by `jax.jit` without a budget."""
        key = jax.random.fold_in(state.key, state.step)
        part, trainable = state.part, state.part.split(state.params)

        def loss_of(trainable):
            params = part.merge(trainable, state.params)
            return self._loss(params, state.collections, key, batch)

        (loss, (aux, collections)), gradients = jax.value_and_grad(
            loss_of, has_aux=True
        )(trainable)
        if self.scheme is not None and self.scheme.statistics == "keep":
            kept = {"batch_stats"} & state.collections.keys()
            collections |= {name: state.collections[name] for name in kept}
        updates, opt_state = self.optimizer.update(
            gradients, state.opt_state, trainable
        )
        params, part = part.replace(
            optax.apply_updates(trainable, updates), state.params
        )
        new_state = state.replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            collections=collections,
            part=part,
        )
        metrics = {} if aux is None else aux if isinstance(aux, dict) else {"aux": aux}
        return new_state, metrics | {"loss": loss}

    def plan(self, state: TrainState, batch: Any) -> Schedule:
        """The schedule for states and batches like these, or their shapes."""
        return self._scheduled.plan(state, batch)

    def beneath(self, state: TrainState, batch: Any) -> Beneath:
        """The step as a function of arrays, for `update.search`."""
        args = state, batch
        part = state.part
        return Beneath(self._scheduled, args, self.scheme, part, ("0/0", "0"), "params")

    def effects(self, state: TrainState, batch: Any) -> Effects:
        """What each pass makes of the step's graph; see `Scheduled.effects`."""
        return self._scheduled.effects(state, batch)

    @property
    def last_run(self) -> Run | None:
        """What the latest step measured; None before the first."""
        return self._scheduled.last_run

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict]:
        return self._scheduled(donatable(state, batch), batch)


class _Initialiser:
    """Stands in for the model while a state is created; initialises at the first
    call."""

    def __init__(self, module: nn.Module, key: jax.Array):
        self.module, self.variables = module, None
        self._key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if accepts(self.module.__call__, "train"):  # type: ignore[attr-defined]
            kwargs.setdefault("train", True)
        params_key, dropout_key = jax.random.split(self._key)
        keys: Any = {"params": params_key, "dropout": dropout_key}
        if self.variables is None:
            result, self.variables = self.module.init_with_output(keys, *args, **kwargs)
            return result
        result, _ = self.module.apply(
            self.variables, *args, rngs=keys, mutable=True, **kwargs
        )
        return result
