"""Training steps of `flax.nnx` modules within a budget."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax
from flax import nnx

from poet_jax.executors.host import Run
from poet_jax.plan import BudgetLike
from poet_jax.training import (
    default_loss,
    default_optimizer,
    scalar_and_aux,
)
from poet_jax.transform import Schedule, Scheduled
from poet_jax.transform import schedule as schedule_function


class ScheduledModules:
    """A function of nnx modules and arrays that runs within a budget; see
    `schedule`."""

    def __init__(self, step: Callable, scheduled: Scheduled):
        self._step = step
        self._scheduled = scheduled

    def plan(self, *args: Any) -> Schedule:
        """The schedule for arguments like these; runs nothing."""
        structure, variables, rest, _ = _split(args)
        return self._scheduled.plan(structure, variables, rest)

    @property
    def last_run(self) -> Run | None:
        """What the latest call measured; None before the first."""
        return self._scheduled.last_run

    def __call__(self, *args: Any) -> Any:
        structure, variables, rest, modules = _split(args)
        variables, result = self._scheduled(structure, variables, rest)
        nnx.update(modules, variables)
        return result


def schedule(step: Callable, budget: BudgetLike, **options: Any) -> ScheduledModules:
    """Run `step` within a budget: replaces `nnx.jit(step)`.

    Modules, optimizers and metrics among the arguments are updated in place; what
    `step` returns is returned, arrays only. The arrays that modules held before the
    call are freed during it, as their replacements appear. Options are those of
    `poet_jax.schedule`, without static and donated arguments.
    """

    def pure(structure, variables, rest):
        args, modules = _merge(structure, variables, rest)
        result = step(*args)
        _, variables, _ = nnx.split(modules, nnx.Variable, ...)
        return variables, result

    pure.__name__ = getattr(step, "__name__", "step")
    scheduled = schedule_function(
        pure, budget, static_argnums=0, donate_argnums=1, **options
    )
    return ScheduledModules(step, scheduled)


def _split(args: Iterable[Any]):
    """(structure, variables, all other arrays, modules) of a tuple of arguments."""
    leaves, tree = jax.tree.flatten(tuple(args), is_leaf=nnx.graph.is_graph_node)
    is_module = tuple(map(nnx.graph.is_graph_node, leaves))
    modules = [x for x, module in zip(leaves, is_module, strict=True) if module]
    others = [x for x, module in zip(leaves, is_module, strict=True) if not module]
    graphdef, variables, arrays = nnx.split(modules, nnx.Variable, ...)
    return (tree, is_module, graphdef), variables, (arrays, others), modules


def _merge(structure: Any, variables: Any, rest: Any):
    """(arguments, the modules among them), new objects, from what `_split` gives."""
    tree, is_module, graphdef = structure
    arrays, others = rest
    modules = nnx.merge(graphdef, variables, arrays, copy=True)
    module, other = iter(modules), iter(others)
    leaves = [next(module if is_one else other) for is_one in is_module]
    return jax.tree.unflatten(tree, leaves), modules


class TrainStep:
    """A training step of an nnx module; made by `train_step`.

    `loss = step(batch)`, or `(loss, aux)`, updates `model` and `optimizer` in place.
    """

    def __init__(
        self,
        model: nnx.Module,
        budget: BudgetLike,
        loss_fn: Callable[[Any, Any], Any] | None,
        optimizer: "optax.GradientTransformation | nnx.Optimizer | None",
        **options: Any,
    ):
        if optimizer is None:
            optimizer = default_optimizer()
        if not isinstance(optimizer, nnx.Optimizer):
            optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        self.model = model
        self.optimizer = optimizer
        self._loss_fn = loss_fn if loss_fn is not None else default_loss
        self._scheduled = schedule(self._update, budget, **options)

    def _update(self, model: nnx.Module, optimizer: nnx.Optimizer, batch: Any):
        graphdef, params, rest = nnx.split(model, optimizer.wrt, ...)

        def loss_of(params, rest):
            replica = nnx.merge(graphdef, params, rest, copy=True)
            loss, aux = scalar_and_aux(self._loss_fn(replica, batch))
            _, _, rest = nnx.split(replica, optimizer.wrt, ...)
            return loss, (aux, rest)

        (loss, (aux, rest)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            params, rest
        )
        nnx.update(model, rest)
        optimizer.update(model, gradients)
        return loss if aux is None else (loss, aux)

    def plan(self, batch: Any) -> Schedule:
        """The schedule for batches like `batch`, arrays or shapes; runs nothing."""
        return self._scheduled.plan(self.model, self.optimizer, batch)

    @property
    def last_run(self) -> Run | None:
        """What the latest step measured; None before the first."""
        return self._scheduled.last_run

    def __call__(self, batch: Any) -> Any:
        return self._scheduled(self.model, self.optimizer, batch)
