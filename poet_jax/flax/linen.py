"""Training steps of `flax.linen` modules within a memory budget."""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import serialization, struct
from flax.traverse_util import flatten_dict, unflatten_dict

from poet_jax.api.effects import Effects
from poet_jax.api.schedule import Schedule
from poet_jax.api.state import init_paged
from poet_jax.api.transform import Scheduled
from poet_jax.api.transform import schedule as schedule_function
from poet_jax.core.plan import BudgetLike
from poet_jax.emit.executor import Run
from poet_jax.flax.losses import (
    LossFn,
    default_loss,
    default_optimizer,
    donatable,
    explained,
    scalar_and_aux,
    takes_value,
)
from poet_jax.flax.microbatches import Microbatches, Steps, gradients, refuse_statistics
from poet_jax.stores.store import Store
from poet_jax.update.items import ArrayStep
from poet_jax.update.part import EVERYTHING, Part
from poet_jax.update.quantization import Quantized
from poet_jax.update.scheme import UpdateLike, parse_update

# As when a module is initialised: all that is no parameter, nor sown to be looked at.
MUTABLE = nn.DenyList(["params", "intermediates"])
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


class TrainState(struct.PyTreeNode):
    """State that a step replaces.

    Attributes:
      step: int32 scalar, number of updates.
      params: the module's parameters.
      opt_state: the optimizer's state.
      collections: the other variable collections, such as batch_stats, without what
        grows with each call, as sown losses do: that begins anew in each step. What is
        sown with a `reduce_fn` does not grow, and is carried on.
      key: typed PRNG key, folded with `step` for each step's dropout.
        `flax.serialization` cannot save a key: replace it by `jax.random.key_data` of
        it, and make that a key again by `jax.random.wrap_key_data`.
      part: the trainable part of the parameters.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    collections: Any
    key: jax.Array
    part: Part = EVERYTHING


def _saved(tree: Any) -> dict[str, Any]:
    return {str(n): x for n, x in enumerate(jax.tree.leaves(tree))}


def _loaded(tree: Any, saved: dict[str, Any]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [saved[str(n)] for n in range(len(leaves))])


for kind in (Part, Quantized):
    serialization.register_serialization_state(kind, _saved, _loaded)


class BoundModel:
    """The `model` that `loss_fn` calls: a module with its variables and keys.

    Call it with the module's arguments; `train=True` is added if the module takes
    `train` and the call does not pass it. Updated collections are in `collections`,
    with what the latest call has sown. Raises TypeError for `mutable` and `rngs`.
    """

    def __init__(
        self, module: nn.Module, params: Any, collections: Any, key: jax.Array
    ):
        self.module, self.params = module, params
        self.collections = collections
        self._kept = flatten_dict(collections)
        self._key = key

    @property
    def kept(self) -> dict[str, Any]:
        """What the state has of the collections."""
        now = flatten_dict(self.collections)
        return unflatten_dict({path: now[path] for path in self._kept})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = _completed(self.module, args, kwargs)
        self._key, params_key, dropout_key = jax.random.split(self._key, 3)
        result, changed = self.module.apply(
            {"params": self.params, **self.kept},
            *args,
            rngs={"params": params_key, "dropout": dropout_key},
            mutable=MUTABLE,
            **kwargs,
        )
        self.collections = {**self.kept, **changed}
        return result


def _completed(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The keyword arguments of a call, with `train=True` where it says nothing."""
    for name in sorted({"mutable", "rngs"} & kwargs.keys()):
        raise TypeError(
            f"loss_fn calls model(..., {name}=...). The step gives its own {name}: all "
            "collections change, and keys are new for each call. Leave it out, and "
            "read what has changed in model.collections."
        )
    method = kwargs.get("method") or "__call__"
    call = getattr(module, method) if isinstance(method, str) else method
    parameters = inspect.signature(call).parameters
    if "train" not in parameters:
        return kwargs
    place = list(parameters).index("train")
    if not isinstance(method, str) and not inspect.ismethod(call):
        place -= 1  # `self` is not among the arguments
    is_given = place < len(args) and parameters["train"].kind is not KEYWORD_ONLY
    return kwargs if is_given else {"train": True, **kwargs}


class TrainStep:
    """A training step of a linen module; made by `train_step`.

    Use `state = step.init(key, batch)`, then `state, metrics = step(state, batch)`. The
    state passed is donated. `metrics` has "loss" and what `loss_fn` returns as aux: its
    items if it is a dictionary, else as "aux".
    """

    def __init__(
        self,
        module: nn.Module,
        budget: BudgetLike,
        loss_fn: LossFn | None,
        optimizer: optax.GradientTransformation | None,
        update: UpdateLike | None = None,
        microbatches: Microbatches = 1,
        **options: Any,
    ):
        self.module = module
        self.scheme = None if update is None else parse_update(update)
        self.optimizer = optimizer if optimizer is not None else default_optimizer()
        self._loss_fn = loss_fn if loss_fn is not None else default_loss

        def scheduled(count: int) -> Scheduled:
            def update(state: TrainState, batch: Any) -> Any:
                return self.update(state, batch, microbatches=count)

            return schedule_function(update, budget, donate_argnums=0, **options)

        self._steps = Steps(scheduled, microbatches)

    def init(
        self, key: jax.Array, batch: Any, store: Store | None = None
    ) -> TrainState:
        """A new state; `loss_fn` is traced on `batch` to see how it calls the model.

        With a `store`, large leaves are created there one by one, so that RAM never
        holds them all. Give the same store to the step's executor. Raises TypeError if
        `loss_fn` never calls the model.
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
                "loss_fn(model, batch) never called the model, which creates the "
                "parameters. Call model(...) in loss_fn."
            )
        params = created.pop("params", {})
        _, (_, after) = jax.eval_shape(self._loss, params, created, step_key, batch)
        later = flatten_dict(after)
        created = unflatten_dict(
            {
                path: x
                for path, x in flatten_dict(created).items()
                if jax.tree.structure(x) == jax.tree.structure(later[path])
            }
        )
        part, scheme = EVERYTHING, self.scheme
        if scheme is not None:
            part = scheme.of(
                params,
                created,
                step_key,
                batch,
                loss=lambda *args: self._loss(*args)[0],
                key=jax.random.fold_in(init_key, 1),
            )
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params if scheme is None else scheme.quantized(params, part),
            opt_state=self.optimizer.init(part.split(params)),
            collections=created,
            key=step_key,
            part=part,
        )

    def _loss(self, params: Any, collections: Any, key: jax.Array, batch: Any):
        """(loss, (aux, collections)) of these parameters."""
        model = BoundModel(self.module, params, collections, key)
        loss, aux = scalar_and_aux(self._loss_fn(model, batch))
        return loss, (aux, model.kept)

    @property
    def microbatches(self) -> int:
        """In how many parts a batch is computed; of "auto", so far."""
        return self._steps.count

    def update(
        self, state: TrainState, batch: Any, *, microbatches: int | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """The step as a plain function, to run with `jax.jit` without a budget.

        `microbatches` are the step's by default.
        """
        count = self.microbatches if microbatches is None else microbatches
        refuse_statistics(state.collections.get("batch_stats"), count)
        key = jax.random.fold_in(state.key, state.step)
        part, trainable = state.part, state.part.split(state.params)

        def loss_of(trainable, collections, batch, number):
            params = part.merge(trainable, state.params)
            own = key if number is None else jax.random.fold_in(key, number)
            return self._loss(params, collections, own, batch)

        (loss, (aux, collections)), grads = gradients(
            loss_of, trainable, state.collections, batch, count
        )
        if self.scheme is not None and self.scheme.batch_stats == "keep":
            kept = {"batch_stats"} & state.collections.keys()
            collections |= {name: state.collections[name] for name in kept}
        update = self.optimizer.update
        more = {"value": loss} if takes_value(update) else {}
        updates, moments = update(grads, state.opt_state, trainable, **more)
        trainable = optax.apply_updates(trainable, updates)
        params, part = part.replace(trainable, state.params)
        new_state = state.replace(
            step=state.step + 1,
            params=params,
            opt_state=moments,
            collections=collections,
            part=part,
        )
        metrics = {} if aux is None else aux if isinstance(aux, dict) else {"aux": aux}
        return new_state, metrics | {"loss": loss}

    def plan(self, state: TrainState, batch: Any) -> Schedule:
        """The schedule for a state and a batch like these, arrays or shapes."""
        return self._told(lambda scheduled: scheduled.plan, state, batch)

    def array_step(self, state: TrainState, batch: Any) -> ArrayStep:
        """The step as a function of arrays, for `update.search`."""
        inside = ("0/0", "0"), "params"
        args = state, batch
        return ArrayStep(self._steps.scheduled, args, self.scheme, state.part, *inside)

    def effects(self, state: TrainState, batch: Any) -> Effects:
        """Effects of each pass on the step's graph; see `Scheduled.effects`."""
        return self._steps.scheduled.effects(state, batch)

    @property
    def last_run(self) -> Run | None:
        """Measurements of the latest step; None before the first."""
        return self._steps.scheduled.last_run

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict]:
        state = donatable(state, batch)
        return self._told(lambda scheduled: scheduled, state, batch)

    def _told(
        self, how: Callable[[Scheduled], Callable], state: TrainState, batch: Any
    ) -> Any:
        statistics = state.collections.get("batch_stats")
        with explained(
            lambda: (state.params, state.opt_state),
            trains_all=self.scheme is None,
            may_split=lambda: self._steps.may_split(batch, statistics),
        ):
            return self._steps.run(
                lambda scheduled: how(scheduled)(state, batch), batch
            )


class _Initialiser:
    """The `model` while a state is created: its first call initialises."""

    def __init__(self, module: nn.Module, key: jax.Array):
        self.module, self.variables = module, None
        self._key = key

    @property
    def params(self) -> Any:
        return (self.variables or {}).get("params", {})

    @property
    def collections(self) -> dict[str, Any]:
        return {k: x for k, x in (self.variables or {}).items() if k != "params"}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = _completed(self.module, args, kwargs)
        params_key, dropout_key = jax.random.split(self._key)
        keys: Any = {"params": params_key, "dropout": dropout_key}
        if self.variables is None:
            result, self.variables = self.module.init_with_output(keys, *args, **kwargs)
            return result
        result, _ = self.module.apply(
            self.variables, *args, rngs=keys, mutable=True, **kwargs
        )
        return result
