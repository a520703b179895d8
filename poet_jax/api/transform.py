"""The transformation: `schedule` a function within a budget, as `jax.jit` compiles
it."""

import dataclasses
import functools
import logging
import math
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
from jax.core import Tracer, eval_context

from poet_jax.api.arguments import count_all_devices, difference, held_on
from poet_jax.api.cache import PlanCache
from poet_jax.api.compiling import target_for
from poet_jax.api.effects import Effects, effects
from poet_jax.api.function import JIT_OPTIONS, Function, NotPlanned
from poet_jax.api.paging import noting, pageable
from poet_jax.api.pareto import Front, pareto
from poet_jax.api.planning import Compilation, make_schedule
from poet_jax.api.rounds import Attempt, in_rounds
from poet_jax.api.schedule import Schedule
from poet_jax.core.costs import Costs
from poet_jax.core.device import DeviceProfile
from poet_jax.core.errors import BudgetTooSmall, ClosesOverTracer
from poet_jax.core.graph import Graph
from poet_jax.core.plan import BudgetLike, Planner, check_budget
from poet_jax.core.purity import Operations, names_of
from poet_jax.devices.machine import free_bytes, host
from poet_jax.devices.price import price
from poet_jax.emit.c99.programs import with_own_results
from poet_jax.emit.c99.workspace import in_c
from poet_jax.emit.executor import HostExecutor, Run, Step
from poet_jax.emit.paged_step import PagedStep
from poet_jax.emit.shards import sharded
from poet_jax.passes import PASSES, Pass, for_board, run_passes
from poet_jax.planners.milp.search import MilpPlanner

logger = logging.getLogger("poet_jax")


class Scheduled:
    """A function that runs within a budget; made by `schedule`.

    Like the result of `jax.jit`, it is traced and planned at the first call, and again
    when the structure, shapes, dtypes, static arguments or settings of JAX change.
    For what an outer JAX transformation traces, and where jit is disabled, it is the
    plain jitted function.
    """

    def __init__(
        self,
        fun: Callable,
        budget: BudgetLike,
        *,
        device: DeviceProfile | None,
        planner: Planner | None,
        executor: HostExecutor | None,
        plan_cache: str | os.PathLike | None,
        passes: Sequence[Pass] = PASSES,
        repeatable: Operations = (),
        jit_options: Mapping[str, Any],
    ):
        functools.update_wrapper(self, fun)
        _check_options(device, planner, executor, passes)
        check_budget(budget)
        self.budget = budget
        self.device = device
        self.planner = planner if planner is not None else MilpPlanner()
        self.executor = executor if executor is not None else HostExecutor()
        self.passes = tuple(passes)
        self.repeatable = names_of(repeatable)
        self._cache = None if plan_cache is None else PlanCache(plan_cache)
        self._function = Function(fun, jit_options, self.repeatable)
        self._schedules: dict[Any, Schedule] = {}
        self._latest: Any = None
        self._step: Step | PagedStep | None = None  # of the latest call
        self._cannot_move = False  # where there is one device only
        self._placed_at: list[Any] = []  # arguments of the latest call

    @property
    def store_bytes(self) -> float:
        """Room on the device's storage."""
        return math.inf if self.device is None else self.device.store_bytes

    @property
    def last_run(self) -> Run | None:
        """What the latest call measured; None before the first."""
        return None if self._step is None else self._step.last_run

    def plan(self, *args: Any, **kwargs: Any) -> Schedule:
        """The schedule for arguments like these: arrays or `jax.ShapeDtypeStruct`s.

        The function does not run and its arguments are not allocated; the step is
        compiled, as only then it is known to fit. Raises CannotTrace and
        BudgetTooSmall.
        """
        return self._plan(self._function.key(args, kwargs), args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Schedule:
        """As `plan`: the name that `jax.jit(fun).lower(*args).compile()` has."""
        return self.plan(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As of `jax.jit(fun)`: the plain function, traced."""
        return self._function.jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit(fun)`: shapes and dtypes of the results."""
        return self._function.jitted.eval_shape(*args, **kwargs)

    def plan_for_board(self, *args: Any, **kwargs: Any) -> Schedule:
        """The schedule for a board that runs C; `poet_jax.emit.c` writes it.

        Nothing is compiled here, so the budget bounds what the plan has in RAM. Passes
        are those of `passes.for_board`, and workspace is that of C. Arguments that are
        `PagedArray`s are on the board's storage between steps. Raises BudgetTooSmall
        and CannotTrace, and ValueError where several results could be the new state of
        a donated argument.
        """
        traced = with_own_results(self._function.traced(args, kwargs, least_bytes=0))
        graph, costs = self.priced(traced, for_board(self.passes))
        costs = in_c(graph, costs)
        budget = self.budget_for(*args, **kwargs)
        with eval_context():
            return make_schedule(graph, costs, budget, self.planner, self.store_bytes)

    def clear_cache(self) -> None:
        """Forget all schedules, and what was compiled for them."""
        self._schedules.clear()
        self._latest = self._step = None
        self._function.jitted.clear_cache()

    def pareto(
        self, *args: Any, budgets: Iterable[BudgetLike] | None = None, **kwargs: Any
    ) -> Front:
        """What each of several budgets would cost for arguments like these.

        As `poet_jax.pareto`, and with `"device"` as a budget; nothing runs, as in
        `plan`.
        """
        if budgets is not None and not isinstance(budgets, str):
            budgets = [self._budget(budget, args, kwargs) for budget in budgets]
        key = self._function.key(args, kwargs)
        traced = self._function.traced(args, kwargs)
        graph, costs = self._priced(key, args, kwargs, traced, self.passes)
        return pareto(graph, costs, budgets, self.planner, self.store_bytes)

    def budget_for(self, *args: Any, **kwargs: Any) -> BudgetLike:
        """The budget for arguments like these: `"device"` in bytes, as of now."""
        return self._budget(self.budget, args, kwargs)

    def _budget(self, budget: BudgetLike, args, kwargs) -> BudgetLike:
        if budget != "device":
            return budget
        devices, held_bytes = held_on(self._function.leaves(args, kwargs))
        here = [x for x in devices if x.process_index == jax.process_index()]
        nbytes = free_bytes(here or devices, held_bytes, self.device or host())
        return self._function.processes(args, kwargs).least(nbytes)

    def effects(self, *args: Any, **kwargs: Any) -> Effects:
        """What each pass makes of the graph for arguments like these: prints as a
        table.

        As `poet_jax.api.effects.effects`, which also says what that takes; nothing
        runs, as in `plan`.
        """
        graph = self._function.traced(args, kwargs)
        with eval_context():
            return effects(graph, self.passes, self.device or host())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        # Nothing more here: steps may take a millisecond. jax.jit knows for what
        # arguments it has compiled, and traces for any others.
        if type(step) is Step and (self._cannot_move or self._lies(args, kwargs)):
            try:
                return step(*args, **kwargs)
            except NotPlanned:
                self._step = None
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
        if traced or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._function.jitted(*args, **kwargs)
        try:
            return self._run(args, kwargs)
        except ClosesOverTracer:
            return self._function.jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind as a method, as functions do."""
        return self if instance is None else types.MethodType(self, instance)

    def _lies(self, args, kwargs) -> bool:
        """Whether arguments lie where those of the latest call did."""
        leaves = jax.tree.leaves((args, kwargs))
        before, self._placed_at = (
            self._placed_at,
            [
                jax.config.jax_default_device,  # type: ignore[attr-defined]
                *(getattr(x, "sharding", None) for x in leaves),
            ],
        )
        return before == self._placed_at

    def _run(self, args, kwargs) -> Any:
        key = self._function.key(args, kwargs)
        step = self._plan(key, args, kwargs).step
        assert step is not None
        self._cannot_move = count_all_devices() == 1
        self._latest = key
        self._step = step
        if isinstance(step, Step):
            return step(*args, **kwargs)
        args, kwargs = self._function.static.remove(args, kwargs)
        with eval_context():  # it moves pages now, also if something else is traced
            return step(*args, **kwargs)

    def _plan(self, key, args, kwargs) -> Schedule:
        if key not in self._schedules:
            reason = difference(self._latest, key)
            if reason:
                logger.warning("planning %s again: %s", self._function.name, reason)
            jitted = self._function.plain_for(key)
            traced = self._function.traced(args, kwargs, reason, jitted)
            self._schedules[key] = self._fitting(key, jitted, args, kwargs, traced)
            self._latest = key
        return self._schedules[key]

    def _fitting(self, key, jitted, args, kwargs, traced: Graph) -> Schedule:
        """A schedule that fits, with loops and large values cut finer if need be."""
        budget = self.budget_for(*args, **kwargs)

        def attempt(
            passes: Sequence[Pass], refinable: Set[str], earlier: Compilation | None
        ) -> Attempt:
            graph, costs = self._priced(key, args, kwargs, traced, passes)
            graph, problem = pageable(graph, self._function.options)
            target = target_for(
                self._function,
                self.executor,
                self.device or host(),
                key=key,
                jitted=jitted,
                args=args,
                kwargs=kwargs,
                traced=traced,
                graph=graph,
                costs=costs,
            )
            with eval_context():
                compilation = Compilation(
                    graph,
                    costs,
                    budget,
                    self.planner,
                    dataclasses.replace(target, refinable=refinable),
                    self.store_bytes,
                    self._cache,
                    earlier,
                )
                try:
                    with noting(problem):
                        return Attempt(passes, compilation, compilation.schedule())
                except BudgetTooSmall as error:
                    return Attempt(passes, compilation, error)

        return in_rounds(self.passes, attempt)

    def traced(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph for arguments like these, of single equations, before any pass.

        Raises CannotTrace.
        """
        return self._function.traced(args, kwargs)

    def priced(
        self, graph: Graph, passes: Sequence[Pass] | None = None
    ) -> tuple[Graph, Costs]:
        """What the passes make of a graph of single equations, and its costs."""
        graph = run_passes(graph, self.passes if passes is None else passes)
        return graph, self._price(graph)

    def _price(self, graph: Graph) -> Costs:
        with eval_context():
            return price(graph, self.device or host())

    def _priced(
        self,
        key: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        traced: Graph,
        passes: Sequence[Pass],
    ) -> tuple[Graph, Costs]:
        """As `priced`, on all devices that the arguments lie on."""
        if traced.devices == 1:
            return self.priced(traced, passes)
        graph = run_passes(traced, passes)

        def compile_for(flat: Callable[..., Any]) -> None:
            jitted = self._function.flat_for(key, flat, graph.out_tree)
            jitted.lower(*args, **kwargs).compile()

        graph = sharded(graph, compile_for)
        processes = self._function.processes(args, kwargs)
        return graph, processes.agree(functools.partial(self._price, graph))


def _check_options(device: Any, planner: Any, executor: Any, passes: Any) -> None:
    """Raises TypeError for a name where an object is expected."""
    if not (isinstance(passes, Sequence) and all(map(callable, passes))):
        raise TypeError(
            "`passes` must be a sequence of functions from Graph to Graph, got "
            f"{passes!r}; use for example passes=poet_jax.passes.PASSES, or () for none"
        )
    for name, given, kind, is_right, example in (
        ("device", device, "DeviceProfile", isinstance(device, DeviceProfile),
         "devices.JETSON_TX2"),
        ("planner", planner, "planner", callable(planner), "MilpPlanner()"),
        ("executor", executor, "HostExecutor", isinstance(executor, HostExecutor),
         "HostExecutor()"),
    ):  # fmt: skip
        if given is not None and not is_right:
            raise TypeError(
                f"`{name}` must be a {kind}, got {given!r}; use for example "
                f"{name}=poet_jax.{example}"
            )


def schedule(
    fun: Callable | None = None,
    budget: BudgetLike | None = None,
    *,
    device: DeviceProfile | None = None,
    planner: Planner | None = None,
    executor: HostExecutor | None = None,
    plan_cache: str | os.PathLike | None = None,
    passes: Sequence[Pass] = PASSES,
    repeatable: Operations = (),
    **jit_options: Any,
) -> Any:
    """Run `fun` within a memory budget: a drop-in for `jax.jit`, also as a decorator.

    Args:
      fun: any function that JAX can trace.
      budget: a `Budget`, a number of bytes, `"64MiB"`, `"device"` for what the device
        has free less a sixteenth of its memory, or `"30%"` of what the step needs when
        everything is kept: as planned, or by XLA's own count if that is more.
      device: prices the plan; this machine, calibrated, by default.
      planner: `MilpPlanner()` by default.
      executor: `HostExecutor()` by default.
      plan_cache: a folder for plans, so that a restarted job plans nothing; see
        `poet_jax.api.cache.PlanCache`. The planner must then be a function of a module
        or a dataclass.
      passes: functions `Graph -> Graph`, applied in turn to the traced graph. Default:
        `unroll` (a loop's iterations in nodes of their own), `open_conds` (smaller
        `cond`s in place of large ones), `cse` (what is computed twice is computed
        once), `index_by_row` (what is indexed by `arange` is indexed row by row),
        `blockwise` (large values in blocks of rows),
        `push_slices` (a slice of a product becomes the product of a slice),
        `reassociate` (products with thin matrices in the cheap order), `fold_scales`
        (frozen scales go into frozen kernels), `weighted_sums` (sums weighted by
        example become products), `open_shard_maps` (the body of a `shard_map` in
        nodes), `simplify` (no transposes of transposes, of products or for products,
        and no zeros to scatter into), `group` (what XLA would fuse becomes one node),
        `expand_at_use` (what expands arguments is computed for each reader),
        `inline_cheap` (what the backward pass reads of a light node is computed
        there again), `stream_state` (large updates of state on storage go block by
        block), `reorder` (nodes free early), and `cpu_kernels` (operations in forms
        that XLA's CPU backend computes fast and in little memory). `passes=()` leaves
        the graph as it was traced, one equation per node; `Scheduled.effects` shows
        what each does.
      repeatable: operations that a plan may repeat although they are not known to be
        pure, such as callbacks and foreign functions: primitives, their names, or
        targets of `jax.ffi.ffi_call`. All others of that kind run once a step.
      jit_options: as for `jax.jit`: `static_argnums`, `static_argnames`,
        `donate_argnums`, `donate_argnames`, `in_shardings`, `out_shardings`,
        `keep_unused`, `inline` and `compiler_options`. With shardings as options, or on
        several devices of a CPU, nothing is paged.

    Where arrays lie on several devices, a budget is of each one's memory.

    Returns a `Scheduled`; its call raises BudgetTooSmall, CannotTrace, PageStoreError,
    and PlanInvalid for a planner whose plan exceeds the budget. Raises ValueError for
    a budget that cannot be read, TypeError for an unknown option or an object of the
    wrong kind, and OSError for a `plan_cache` that cannot be written to.
    """
    if unknown := sorted(jit_options.keys() - JIT_OPTIONS):
        raise TypeError(
            f"schedule has no option {unknown[0]!r}. Of jax.jit's options it takes "
            f"{', '.join(JIT_OPTIONS)}. To choose where a step runs, use "
            "jax.default_device, or arguments that are on that device."
        )
    options: dict[str, Any] = dict(
        device=device,
        planner=planner,
        executor=executor,
        plan_cache=plan_cache,
        passes=passes,
        repeatable=repeatable,
    )
    if not callable(fun):
        given = fun if budget is None else budget
        return functools.partial(schedule, budget=given, **options, **jit_options)
    if budget is None:
        raise ValueError(
            "schedule was called without a budget; pass bytes, a size, a percentage "
            'or a Budget, as in schedule(fun, "64MiB").'
        )
    return Scheduled(fun, budget, **options, jit_options=jit_options)


def value_and_grad(
    fun: Callable,
    budget: BudgetLike,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **schedule_options: Any,
) -> Scheduled:
    """`jax.value_and_grad(fun, argnums, has_aux)` within a memory budget.

    Args:
      fun, argnums, has_aux: as for `jax.value_and_grad`; the loss is a scalar.
      budget, schedule_options: as for `schedule`.

    Returns a `Scheduled`, whose call gives (loss, gradients), or with `has_aux`
    ((loss, aux), gradients). Raises as `schedule`.
    """
    return schedule(
        jax.value_and_grad(fun, argnums, has_aux), budget, **schedule_options
    )
