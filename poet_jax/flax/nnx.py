"""Training steps of `flax.nnx` modules within a memory budget."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from poet_jax.api.effects import Effects
from poet_jax.api.schedule import Schedule
from poet_jax.api.transform import Scheduled
from poet_jax.api.transform import schedule as schedule_function
from poet_jax.core.errors import CannotTrace
from poet_jax.core.plan import BudgetLike
from poet_jax.emit.executor import Run
from poet_jax.flax import modules
from poet_jax.flax.losses import (
    default_loss,
    default_optimizer,
    donatable,
    explained,
    scalar_and_aux,
    takes_value,
)
from poet_jax.flax.microbatches import (
    Microbatches,
    Steps,
    gradients,
    refuse_changes,
    refuse_statistics,
)
from poet_jax.stores.paged import copied_to_ram
from poet_jax.update.items import ArrayStep
from poet_jax.update.part import EVERYTHING, Part
from poet_jax.update.scheme import UpdateLike, parse_update

OWN_OPTIONS = frozenset(
    f"{kind}_{names}"
    for kind in ("static", "donate")
    for names in ("argnums", "argnames")
)


class ScheduledModules:
    """A function of nnx modules and arrays within a budget; made by `schedule`."""

    def __init__(self, step: Callable, scheduled: Scheduled):
        functools.update_wrapper(self, step)
        self._scheduled = scheduled
        self._same: Any = None  # a structure that a call did not change

    def plan(self, *args: Any, **kwargs: Any) -> Schedule:
        """The schedule for arguments like these; runs nothing."""
        return self._scheduled.plan(*modules.split(args, kwargs)[:3])

    def array_step(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Scheduled, tuple[Any, ...]]:
        """The scheduled function of arrays, and its arguments for these."""
        return self._scheduled, modules.split(args, kwargs)[:3]

    def effects(self, *args: Any, **kwargs: Any) -> Effects:
        """Effects of each pass on the graph; see `Scheduled.effects`."""
        return self._scheduled.effects(*modules.split(args, kwargs)[:3])

    @property
    def last_run(self) -> Run | None:
        """Measurements of the latest call; None before the first."""
        return self._scheduled.last_run

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind as a method, as functions do."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        structure, variables, rest, given = modules.split(args, kwargs)
        variables, result, after, arrays = self._scheduled(
            structure, donatable(variables, rest), rest
        )
        if after is not self._same and modules.is_same(structure, after):
            self._same = after
        if after is self._same:
            nnx.update(given, variables, arrays)
        else:
            modules.restructure(given, after, variables, rest[0], arrays)
        return result


def schedule(
    step: Callable | None = None, budget: BudgetLike | None = None, **options: Any
) -> Any:
    """Run `step` within a memory budget: use it in place of `nnx.jit`, or decorate.

    Modules, optimizers and metrics among the arguments are updated in place, plain
    attributes included; `step` may return arrays only. The variables' old arrays are
    freed during the call, so keep `jax.tree.map(jnp.copy, nnx.state(model))` as a
    snapshot: `nnx.clone` shares them. Options are those of `poet_jax.schedule`, but for
    static and donated arguments. Returns a `ScheduledModules`.

    Raises TypeError for static or donated arguments.
    """
    for name in sorted(OWN_OPTIONS.intersection(options)):
        raise TypeError(
            f"poet_jax.nnx.schedule takes no {name}. The modules among the arguments "
            "are donated, and what else is static is bound before: "
            "functools.partial(step, mode='train')."
        )
    if not callable(step):
        given = step if budget is None else budget
        return functools.partial(schedule, budget=given, **options)

    def pure(structure, variables, rest):
        return modules.call(step, structure, variables, rest)

    pure.__name__ = getattr(step, "__name__", "step")
    scheduled = schedule_function(
        pure, budget, static_argnums=0, donate_argnums=1, **options
    )
    return ScheduledModules(step, scheduled)


def _made(fun: Callable, params: Any, *args: Any) -> Any:
    """`fun(params, *args)`, as shapes for the shapes of an abstract model."""
    leaves = jax.tree.leaves(params)
    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    return (functools.partial(jax.eval_shape, fun) if is_abstract else fun)(
        params, *args
    )


class PartOptimizer(nnx.Optimizer):
    """An optimizer for a part of a model's parameters, with state for that alone.

    Attributes:
      part: an `update.Part` of variables, as channels and adapters are state.
    """

    def __init__(self, model: nnx.Module, tx: optax.GradientTransformation, part: Part):
        def init(params):
            def of_part(params, part):
                return tx.init(part.split(params))

            return _made(of_part, nnx.as_pure(params), part)

        super().__init__(
            model, optax.GradientTransformation(init, tx.update), wrt=nnx.Param
        )
        self.tx = tx
        self.part = nnx.data(jax.tree.map(nnx.OptArray, part))

    def update(self, model: nnx.Module, grads: Any, /, **kwargs: Any) -> Any:
        """Update the part in place by `grads` of its trainable tree."""
        params = nnx.as_pure(nnx.state(model, self.wrt))
        part = nnx.as_pure(self.part)
        trainable = part.split(params)
        updates, opt_state = self.tx.update(
            grads, nnx.as_pure(self.opt_state), trainable, **kwargs
        )
        params, part = part.replace(optax.apply_updates(trainable, updates), params)
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state))
        nnx.update(self.part, nnx.state(part))
        self.step[...] += 1
        return updates


def _variables(model: nnx.Module, wrt: Any) -> dict[str, nnx.Variable]:
    """By name, the variables that are trained."""
    found = nnx.to_flat_state(nnx.state(model, wrt))
    return {"/".join(map(str, path)): variable for path, variable in found}


def _refuse_others(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise CannotTrace if a loss has made other variables than those trained."""
    for name in before | after:
        if before.get(name) is not after.get(name):
            raise CannotTrace(
                f"loss_fn replaces, adds or removes the parameter {name!r}, which the "
                "optimizer trains. Change the model between steps. What only a loss "
                "changes is an nnx.Variable that is no nnx.Param."
            )


class TrainStep:
    """A training step of an nnx module; made by `train_step`.

    `step(batch)` updates `model` and `optimizer` in place, and returns the loss, or
    `(loss, aux)`. What `loss_fn` changes in the model is kept, but for values of the
    parameters that are trained.
    """

    def __init__(
        self,
        model: nnx.Module,
        budget: BudgetLike,
        loss_fn: Callable[[Any, Any], Any] | None,
        optimizer: "optax.GradientTransformation | nnx.Optimizer | None",
        update: UpdateLike | None = None,
        microbatches: Microbatches = 1,
        **options: Any,
    ):
        if optimizer is None:
            optimizer = default_optimizer()
        self.model = model
        self.scheme = None if update is None else parse_update(update)
        self._loss_fn = loss_fn if loss_fn is not None else default_loss

        def scheduled(count: int) -> ScheduledModules:
            def update(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> Any:
                return self.update(model, optimizer, batch, microbatches=count)

            return schedule(update, budget, **options)

        self._steps = Steps(scheduled, microbatches)
        self._optimizer: Any = optimizer
        if self.scheme is not None and isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                "`update` needs an optax transformation, got an nnx.Optimizer, which "
                "has state for all parameters. Pass optimizer=optimizer.tx."
            )
        if self.scheme is None and not isinstance(optimizer, nnx.Optimizer):
            self._optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        elif self.scheme is not None and not self.scheme.last:
            self._choose(None)

    @property
    def optimizer(self) -> nnx.Optimizer:
        """The optimizer. Raises AttributeError for `last_blocks` before a batch."""
        if not isinstance(self._optimizer, nnx.Optimizer):
            raise AttributeError(
                "The optimizer of last_blocks is made when a batch shows what is used "
                "after them. Call step.plan(batch) first."
            )
        return self._optimizer

    def _choose(self, batch: Any) -> None:
        """Make the optimizer of the part that the scheme trains, if not made yet."""
        if isinstance(self._optimizer, nnx.Optimizer):
            return
        assert self.scheme is not None
        graphdef, params, rest = nnx.split(self.model, nnx.Param, ...)

        def loss(params, rest, batch):
            return self._loss(nnx.merge(graphdef, params, rest, copy=True), batch)[0]

        pure = nnx.as_pure(params)
        of = functools.partial(self.scheme.of, loss=loss)
        quantized = self.scheme.quantized
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(pure)):
            of, quantized = (
                functools.partial(jax.eval_shape, x) for x in (of, quantized)
            )
        part = of(pure, rest, batch)
        self._optimizer = PartOptimizer(self.model, self._optimizer, part)
        nnx.update(self.model, quantized(pure, part))

    def _loss(self, model: nnx.Module, batch: Any) -> tuple[jax.Array, Any]:
        return scalar_and_aux(self._loss_fn(model, batch))

    @property
    def microbatches(self) -> int:
        """In how many parts a batch is computed; of "auto", so far."""
        return self._steps.count

    def update(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        batch: Any,
        *,
        microbatches: int | None = None,
    ):
        """The step as a function of modules, to run with `nnx.jit` without a budget.

        `microbatches` are the step's by default.
        """
        count = self.microbatches if microbatches is None else microbatches
        graphdef, params, rest = nnx.split(model, optimizer.wrt, ...)
        refuse_statistics(nnx.filter_state(rest, nnx.BatchStat), count)
        part = EVERYTHING
        if isinstance(optimizer, PartOptimizer):
            part, params = nnx.as_pure((optimizer.part, params))
        unchanged = graphdef.with_same_outer_index()
        after, made = unchanged, params

        def loss_of(trainable, rest, batch, _):
            nonlocal after, made
            merged = part.merge(trainable, params)
            with modules.copies(nnx.merge(graphdef, merged, rest)) as replica:
                trained = _variables(replica, optimizer.wrt)
                loss, aux = self._loss(replica, batch)
                _refuse_others(trained, _variables(replica, optimizer.wrt))
                after, made, rest = modules.split_copies(replica, optimizer.wrt, ...)
            return loss, (aux, rest)

        trainable = part.split(params)
        (loss, (aux, rest)), grads = gradients(loss_of, trainable, rest, batch, count)
        if after != unchanged:  # by the loss: plain attributes, for example
            refuse_changes(count)
            before = nnx.as_pure(nnx.state(model, optimizer.wrt))
            modules.write_back(model, after, made, rest)
            nnx.update(model, before)
        if self.scheme is not None and self.scheme.batch_stats == "keep":
            rest = nnx.filter_state(rest, nnx.Not(nnx.BatchStat))
        nnx.update(model, rest)
        looks = all(map(takes_value, (optimizer.update, optimizer.tx.update)))
        optimizer.update(model, grads, **({"value": loss} if looks else {}))
        return loss if aux is None else (loss, aux)

    def merged(self) -> nnx.Module:
        """A copy of the model in RAM with adapters added, to evaluate or save."""
        graphdef, params, rest = nnx.split(self.model, nnx.Param, ...)
        part = getattr(self.optimizer, "part", EVERYTHING)
        params = nnx.as_pure(part).merged(nnx.as_pure(params))
        return nnx.merge(graphdef, params, copied_to_ram(rest), copy=True)

    def plan(self, batch: Any) -> Schedule:
        """The schedule for a batch like this, arrays or shapes; the step does not run.

        With `last_blocks`, the first call makes the optimizer, and quantizes frozen
        kernels of the model in place if the scheme says so. Raises as `Scheduled.plan`.
        """
        self._choose(batch)
        return self._told(lambda scheduled: scheduled.plan, batch)

    def array_step(self, batch: Any) -> ArrayStep:
        """The step as a function of arrays, for `update.search`."""
        self._choose(batch)
        part = nnx.as_pure(getattr(self.optimizer, "part", EVERYTHING))
        scheduled, args = self._steps.scheduled.array_step(
            self.model, self.optimizer, batch
        )
        return ArrayStep(scheduled, args, self.scheme, part, ("0/0", "0"), "0")

    def effects(self, batch: Any) -> Effects:
        """Effects of each pass on the step's graph; see `Scheduled.effects`."""
        self._choose(batch)
        return self._steps.scheduled.effects(self.model, self.optimizer, batch)

    @property
    def last_run(self) -> Run | None:
        """Measurements of the latest step; None before the first."""
        return self._steps.scheduled.last_run

    def __call__(self, batch: Any) -> Any:
        self._choose(batch)
        return self._told(lambda scheduled: scheduled, batch)

    def _told(self, how: Callable[[ScheduledModules], Callable], batch: Any) -> Any:
        def trained() -> Any:
            return nnx.state(self.model, nnx.Param), nnx.state(self.optimizer)

        def may_split() -> bool:
            return self._steps.may_split(batch, nnx.state(self.model, nnx.BatchStat))

        trains_all = self.scheme is None
        with explained(trained, trains_all=trains_all, may_split=may_split):
            args = self.model, self.optimizer, batch
            return self._steps.run(lambda scheduled: how(scheduled)(*args), batch)
