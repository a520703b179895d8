"""The transformation: `schedule` a function within a budget, as `jax.jit` compiles
it."""

import dataclasses
import functools
import inspect
import json
import logging
import math
import os
import reprlib
import time
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from poet_jax import explain, figures
from poet_jax.associate import associate
from poet_jax.cache import PlanCache
from poet_jax.coarsen import coarsen
from poet_jax.convolution import filter_gradients
from poet_jax.device import DeviceProfile
from poet_jax.dot import write_dot
from poet_jax.effects import Effects, effects
from poet_jax.errors import (
    BudgetTooSmall,
    CannotTrace,
    ClosesOverTracer,
    PlanInvalid,
)
from poet_jax.executors.host import HostExecutor, Run
from poet_jax.executors.whole import NotPlanned, WholeStep, whole_step
from poet_jax.fold import fold
from poet_jax.graph import Graph
from poet_jax.machine import host
from poet_jax.matrices import Matrices, matrices
from poet_jax.narrow import narrow
from poet_jax.order import order
from poet_jax.paged import PagedArray, at_home
from poet_jax.pareto import Front, pareto
from poet_jax.perfetto import write_trace
from poet_jax.plan import (
    Budget,
    BudgetLike,
    Plan,
    Planner,
    Status,
    parse_budget,
    plan_from_dict,
    plan_to_dict,
    save_json,
)
from poet_jax.planners.judge import Judged, fits, keep_everything, objective_of
from poet_jax.planners.milp import MilpPlanner
from poet_jax.price import Costs, costs_from_dict, costs_to_dict, price
from poet_jax.program import Program, lower, program_from_list, program_to_list
from poet_jax.reasons import Reason, reasons
from poet_jax.recompute import recompute
from poet_jax.report import write_report
from poet_jax.simulate import Usage, simulate
from poet_jax.stream import stream
from poet_jax.trace import trace
from poet_jax.units import format_bytes

logger = logging.getLogger("poet_jax")


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A plan with everything that led to it and follows from it.

    Attributes:
      graph, costs, budget, plan, program: see their types.
      usage: what the program uses.
      baseline: what keep-all uses.
    """

    graph: Graph
    costs: Costs
    budget: Budget
    plan: Plan
    program: Program
    usage: Usage
    baseline: Usage

    @classmethod
    def of(
        cls,
        graph: Graph,
        costs: Costs,
        budget: Budget,
        plan: Plan,
        program: Program | None = None,
    ) -> "Schedule":
        """Simulate `program`, which is the plan node by node if it is left out."""
        if program is None:
            program = lower(graph, plan)
        usage = simulate(program, costs)
        baseline = keep_everything(graph, costs).usage
        return cls(graph, costs, budget, plan, program, usage, baseline)

    def __str__(self) -> str:
        return explain.table(
            self.budget, self.plan, self.program, self.usage, self.baseline
        )

    def plot(self, path: str | os.PathLike) -> None:
        """Write a figure of live bytes over the planned step to `path`.

        The file's type follows its name (.png, .svg, .pdf). Needs matplotlib, which
        `pip install "poet_jax[plot]"` brings; raises ImportError without it.
        """
        figure = figures.step_figure(
            self.costs, self.budget, self.program, self.usage, self.baseline
        )
        figure.savefig(path, dpi=150)

    def plot_matrices(self, path: str | os.PathLike) -> None:
        """Write a figure of the plan's matrices R, S_RAM and S_storage, as `plot`."""
        figure = figures.matrices_figure(self.graph, self.plan)
        figure.savefig(path, dpi=200, bbox_inches="tight")

    def matrices(self) -> Matrices:
        """The plan's matrices R, S_RAM and S_storage, as in the paper."""
        return matrices(self.graph, self.plan)

    def reasons(self) -> tuple[Reason, ...]:
        """[V] what was decided for each value, and what else it would have cost."""
        return reasons(self.graph, self.costs, self.plan)

    def to_dot(self, path: str | os.PathLike) -> None:
        """Write the dependency graph to `path`: DOT, or drawn for .svg, .png and .pdf.

        Raises FileNotFoundError for a drawing if Graphviz is not installed.
        """
        write_dot(path, self.program, self.costs)

    def to_perfetto(self, path: str | os.PathLike, run: Run | None = None) -> None:
        """Write a trace of the planned step to `path`, for ui.perfetto.dev.

        With `run`, the `last_run` of the function that this schedule is for, the
        measured step is in it, too. Raises ValueError for a run of another program.
        """
        write_trace(path, self.program, self.costs, self.usage, run)

    def to_html(self, path: str | os.PathLike) -> None:
        """Write one page about the schedule to `path`: summary, figure, and values."""
        write_report(
            path,
            self.costs,
            self.budget,
            self.plan,
            self.program,
            self.usage,
            self.baseline,
        )

    def to_json(self, path: str | os.PathLike) -> None:
        """Write budget, plan, program and costs to `path`; `from_json` reads them."""
        data = {
            "budget": dataclasses.asdict(self.budget),
            "plan": plan_to_dict(self.graph, self.plan),
            "program": program_to_list(self.program),
            "costs": costs_to_dict(self.costs),
        }
        save_json(path, data)

    def from_json(self, path: str | os.PathLike) -> "Schedule":
        """The schedule saved at `path`, for this schedule's graph.

        A graph holds code, which a JSON file does not: trace it again with
        `Scheduled.plan`, or any planner, and read the saved plan into the result.
        Raises PlanInvalid if the file is of another graph.
        """
        try:
            with open(path) as file:
                data = json.load(file)
            plan = plan_from_dict(self.graph, data["plan"])
            costs = costs_from_dict(data["costs"])
            budget = Budget(**data["budget"])
            program = program_from_list(self.graph, data["program"])
            return Schedule.of(self.graph, costs, budget, plan, program)
        except PlanInvalid:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PlanInvalid(
                f"{os.fspath(path)} was to be read as a schedule, and it is not one: "
                f"{type(error).__name__}: {error}. Schedule.to_json writes files that "
                "can be read. Plan again with Scheduled.plan(...), and save that."
            ) from error


def make_schedule(
    graph: Graph,
    costs: Costs,
    budget: BudgetLike,
    planner: Planner,
    whole: Callable[[Program, Costs, float], Program | None] | None = None,
    prepare: Callable[[Program, Costs, float], Program] | None = None,
    store_bytes: float = math.inf,
) -> Schedule:
    """Plan `graph` within `budget` and check the plan in the simulator.

    `store_bytes` is the device's room, for a budget that does not say; `whole` makes
    one instruction of keep-all's program if the budget allows it, and then nothing
    needs a plan; `prepare` is the executor's. Raises BudgetTooSmall, and PlanInvalid
    for a planner whose plan exceeds the budget.
    """
    everything = keep_everything(graph, costs)
    keep_all_bytes = everything.usage.peak_bytes
    budget = parse_budget(budget, keep_all_bytes).on_storage_of(store_bytes)
    if budget.memory_bytes >= keep_all_bytes:
        logger.info(
            "the budget, %s, covers the %s that keep-all needs: nothing is repeated or "
            "paged",
            budget,
            format_bytes(keep_all_bytes),
        )
    if whole is not None:
        program = whole(everything.program, costs, budget.memory_bytes)
        if program is not None:
            plan = _best_of_all(everything, planner)
            schedule = Schedule.of(graph, costs, budget, plan, program)
            if fits(schedule.usage, budget):
                return schedule
    try:
        plan = planner(graph, costs, budget)
    except BudgetTooSmall as error:
        if whole is not None:
            program = whole(everything.program, costs, error.smallest_bytes - 1)
            if program is not None:
                raise _whole_is_leaner(budget, program, costs, error) from error
        raise
    schedule = Schedule.of(graph, costs, budget, plan)
    if not fits(schedule.usage, budget):
        raise PlanInvalid(
            f"{plan.planner} was asked for a plan within {budget}, and its plan uses "
            f"{schedule.usage}. Its own rules allow that plan, the simulator's do not. "
            "Type a larger budget for it, or use poet_jax.MilpPlanner()."
        )
    if prepare is None:
        return schedule
    program = prepare(schedule.program, costs, budget.memory_bytes)
    return Schedule.of(graph, costs, budget, plan, program)


def _best_of_all(everything: Judged, planner: Planner) -> Plan:
    """Keep-all as a plan: nothing costs less than to run every node once."""
    objective = getattr(planner, "objective", "energy")
    return everything.plan(
        "keep_all",
        time.monotonic(),
        objective=objective,
        bound=objective_of(everything.usage, objective),
        status=Status.OPTIMAL,
    )


def _whole_is_leaner(
    budget: Budget, program: Program, costs: Costs, error: BudgetTooSmall
) -> BudgetTooSmall:
    """`error`, with what the step needs as one executable, which is less."""
    least = simulate(program, costs).peak_bytes
    return BudgetTooSmall(
        f"A plan was asked for within {budget}. The step as one executable, as under "
        f"jax.jit, needs {least} bytes ({format_bytes(least)}), and node by node at "
        f"least {error.smallest_bytes}. Type a budget of at least {least}, or lower "
        "the need: a smaller batch, or donate_argnums for the state that the step "
        "replaces.",
        smallest_bytes=least,
        exact=error.exact,
        least_bytes=least if error.exact else min(least, error.least_bytes),
        node=error.node,
        values=error.values,
    )


Pass = Callable[[Graph], Graph]
PASSES: tuple[Pass, ...] = (
    narrow,
    associate,
    fold,
    coarsen,
    recompute,
    stream,
    order,
    filter_gradients,
)


# What of JAX's configuration decides what a function is traced to.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


class Scheduled:
    """A function that runs within a budget; made by `schedule`.

    Like the result of `jax.jit`, it is traced and planned at the first call, and again
    when the structure, shapes, dtypes or static arguments change. Under an outer JAX
    transformation it is the plain jitted function.
    """

    def __init__(
        self,
        fun: Callable,
        budget: BudgetLike,
        *,
        device: DeviceProfile | None,
        planner: Planner | None,
        executor: Callable[[Program], Any] | None,
        plan_cache: str | os.PathLike | None,
        passes: Sequence[Pass] = PASSES,
        **jit_options: Any,
    ):
        functools.update_wrapper(self, fun)
        _check_options(device, planner, executor)
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._fun = fun
        parse_budget(budget)
        self.budget = budget
        self.device = device
        self.planner = planner if planner is not None else MilpPlanner()
        self.executor = executor if executor is not None else HostExecutor()
        self.passes = tuple(passes)
        self._cache = None if plan_cache is None else PlanCache(plan_cache)
        # An option that is given, even if empty, keeps jax.jit from inferring it.
        given = {name: x for name, x in jit_options.items() if x not in ((), [])}
        self._jitted = jax.jit(fun, **given)
        self._static = _StaticArguments(fun, **jit_options)
        self._schedules: dict[Any, Schedule] = {}
        self._runners: dict[Any, Any] = {}
        self._prepare = getattr(self.executor, "prepare", None)
        self._whole = None
        if getattr(self.executor, "fuses", False):
            self._whole = functools.partial(whole_step, **given)
        self._latest: Any = None
        self._last_runner: Any = None

    @property
    def store_bytes(self) -> float:
        """Room on the device's storage."""
        return math.inf if self.device is None else self.device.store_bytes

    @property
    def last_run(self) -> Run | None:
        """What the latest call measured; None before the first."""
        return None if self._last_runner is None else self._last_runner.last_run

    def plan(self, *args: Any, **kwargs: Any) -> Schedule:
        """The schedule for arguments like these: arrays or `jax.ShapeDtypeStruct`s.

        The function does not run and its arguments are not allocated; nodes are
        compiled and, for a measured device, timed. Raises CannotTrace and
        BudgetTooSmall.
        """
        return self._plan(self._key(args, kwargs), args, kwargs)

    def pareto(
        self, *args: Any, budgets: Iterable[BudgetLike] | None = None, **kwargs: Any
    ) -> Front:
        """What each of several budgets would cost for arguments like these.

        As `poet_jax.pareto`; nothing runs, as in `plan`.
        """
        graph, costs = self.priced(self._traced(args, kwargs))
        return pareto(graph, costs, budgets, self.planner, self.store_bytes)

    def effects(self, *args: Any, **kwargs: Any) -> Effects:
        """What each pass makes of the graph for arguments like these: prints as a
        table.

        As `poet_jax.effects`, which also says what that takes; nothing runs, as in
        `plan`.
        """
        graph = self._traced(args, kwargs)
        with jax.ensure_compile_time_eval():
            return effects(graph, self.passes, self.device or host())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner = self._last_runner
        if type(runner) is WholeStep:  # nothing more here: steps may take a millisecond
            try:
                return runner(*args, **kwargs)
            except (NotPlanned, TypeError):  # TypeError: no argument for jax.jit
                pass
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
        if traced or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._jitted(*args, **kwargs)
        try:
            return self._run(args, kwargs)
        except ClosesOverTracer:
            return self._jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind as a method, as functions do."""
        return self if instance is None else types.MethodType(self, instance)

    def _run(self, args, kwargs) -> Any:
        key = self._key(args, kwargs)
        if key not in self._runners:
            schedule = self._plan(key, args, kwargs)
            if key not in self._runners:
                self._runners[key] = self.executor(schedule.program)
        self._latest = key
        self._last_runner = runner = self._runners[key]
        with jax.ensure_compile_time_eval():  # an outer function may be being traced
            if isinstance(runner, WholeStep):
                with runner.allowed():
                    return runner(*args, **kwargs)
            dynamic_args, dynamic_kwargs = self._static.remove(args, kwargs)
            return runner(*dynamic_args, **dynamic_kwargs)

    def _key(self, args, kwargs):
        dynamic = self._static.remove(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        static = self._static.keep(args, kwargs)
        try:
            hash(static)
        except TypeError as error:
            raise ValueError(
                f"{self._name} was called with a static argument that has no hash: "
                f"{error}. A static argument is compared with those of earlier calls. "
                "Give a tuple in place of a list, or do not make it static."
            ) from error
        settings = {name: getattr(jax.config, name) for name in SETTINGS}
        return static, tree, tuple(map(_aval, leaves)), tuple(settings.items())

    def _plan(self, key, args, kwargs) -> Schedule:
        if key not in self._schedules:
            reason = _difference(self._latest, key)
            if reason:
                logger.warning("planning %s again: %s", self._name, reason)
            graph, costs = self.priced(self._traced(args, kwargs, reason))
            planner = self.planner
            if self._cache is not None:
                planner = functools.partial(self._cache.plan, planner)
                functools.update_wrapper(planner, self.planner)  # keeps its objective

            step: WholeStep | None = None

            def whole(program: Program, costs: Costs, memory_bytes: float):
                nonlocal step
                assert self._whole is not None
                fun = self._of(program.graph)
                step = self._whole(fun, program, costs, memory_bytes, args, kwargs)
                return None if step is None else step.program

            schedule = make_schedule(
                graph,
                costs,
                self.budget,
                planner,
                None if self._whole is None or graph.stored else whole,
                self._prepare,
                self.store_bytes,
            )
            if step is not None and schedule.program is step.program:
                self._runners[key] = step
            self._schedules[key] = schedule
            self._latest = key
        return self._schedules[key]

    def _of(self, graph: Graph) -> Callable:
        """What computes `graph`: the function itself, unless a pass changed how."""
        if not graph.is_lowered:
            return self._fun

        @functools.wraps(self._fun)
        def fun(*args, **kwargs):
            leaves = jax.tree.leaves(self._static.remove(args, kwargs))
            return jax.tree.unflatten(graph.out_tree, graph(*leaves))

        return fun

    def traced(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph for arguments like these, of single equations, before any pass.

        Raises CannotTrace.
        """
        return self._traced(args, kwargs)

    def priced(self, graph: Graph) -> tuple[Graph, Costs]:
        """What the passes make of a graph of single equations, and its costs."""
        for change in self.passes:
            graph = change(graph)
        with jax.ensure_compile_time_eval():
            if self._cache is not None:
                return graph, self._cache.costs(graph, self.device)
            device = self.device if self.device is not None else host()
            return graph, price(graph, device)

    def _traced(self, args, kwargs, reason: str = "") -> Graph:
        leaves = jax.tree.leaves(self._static.remove(args, kwargs))
        paged = [n for n, x in enumerate(leaves) if isinstance(x, PagedArray)]
        try:
            if paged:
                args, kwargs = jax.tree.map(_shape_of_paged, (args, kwargs))
            graph = trace(self._jitted, *args, **kwargs)
        except CannotTrace as error:
            if not reason or isinstance(error, ClosesOverTracer):
                raise
            raise CannotTrace(
                f"{error} What changed since the last call: {reason}."
            ) from error
        if not paged:
            return graph
        if not hasattr(self.executor, "store"):
            raise ValueError(
                f"{self._name} was called with a PagedArray, and its executor, "
                f"{self.executor!r}, has no store. State on storage needs an "
                "executor that pages it. Use poet_jax.HostExecutor(store), or "
                "np.asarray of that argument."
            )
        return at_home(graph, paged)


def _check_options(device: Any, planner: Any, executor: Any) -> None:
    """Raises TypeError for a name where an object is expected."""
    for name, given, kind, right, example in (
        ("device", device, "DeviceProfile", isinstance(device, DeviceProfile),
         "poet_jax.devices.RASPBERRY_PI_4"),
        ("planner", planner, "planner", callable(planner), "poet_jax.MilpPlanner()"),
        ("executor", executor, "HostExecutor", callable(executor),
         "poet_jax.HostExecutor()"),
    ):  # fmt: skip
        if given is not None and not right:
            raise TypeError(
                f"A step was asked for with {name}={given!r}. What it takes is an "
                f"object, a {kind}. Type for example {name}={example}."
            )


class _StaticArguments:
    """Which arguments are static, by position and by name, as `jax.jit` infers it."""

    def __init__(
        self, fun, *, static_argnums=(), static_argnames=(), donate_argnums=()
    ):
        nums = {static_argnums} if isinstance(static_argnums, int) else static_argnums
        names = (
            {static_argnames} if isinstance(static_argnames, str) else static_argnames
        )
        self.nums, self.names = set(nums), set(names)
        try:
            parameters = list(inspect.signature(fun).parameters)
        except (TypeError, ValueError):
            parameters = []
        if self.names and not self.nums:
            self.nums = {i for i, name in enumerate(parameters) if name in self.names}
        elif self.nums and not self.names:
            self.names = {parameters[i] for i in self.nums if i < len(parameters)}

    def _is_static(self, number: int, args: Sequence) -> bool:
        return number in self.nums or number - len(args) in self.nums

    def remove(self, args, kwargs):
        return (
            tuple(x for i, x in enumerate(args) if not self._is_static(i, args)),
            {name: x for name, x in kwargs.items() if name not in self.names},
        )

    def keep(self, args, kwargs):
        return (
            tuple(
                (i, x, type(x)) for i, x in enumerate(args) if self._is_static(i, args)
            ),
            tuple(
                (n, x, type(x)) for n, x in sorted(kwargs.items()) if n in self.names
            ),
        )


def _shape_of_paged(leaf: Any) -> Any:
    if isinstance(leaf, PagedArray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _aval(leaf: Any) -> Any:
    if isinstance(leaf, PagedArray):
        return leaf.shape, f"{leaf.dtype} on storage", False
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, str(leaf.dtype), bool(getattr(leaf, "weak_type", False))
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        return type(leaf), "", False
    dtype = str(jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True))
    return aval.shape, dtype, bool(getattr(aval, "weak_type", False))


def _difference(old: Any, new: Any) -> str:
    """Why `new` needs a plan of its own, in words; empty if `old` is None."""
    if old is None:
        return ""
    if old[0] != new[0]:
        known = {name: x for statics in old[0] for name, x, _ in statics}
        return (
            _some(
                _change(name, known.get(name), x)
                for statics in new[0]
                for name, x, _ in statics
                if known.get(name) != x
            )
            or "the static arguments"
        )
    if old[3] != new[3]:
        return _some(
            _change(name, was, now)
            for (name, was), (_, now) in zip(old[3], new[3], strict=True)
            if was != now
        )
    if old[1] != new[1]:
        return _change("the structure", old[1], new[1])
    return _some(
        f"{path} was {_show(a)}, now {_show(b)}"
        for path, a, b in zip(_paths(new[1]), old[2], new[2], strict=True)
        if a != b
    )


def _change(name: Any, old: Any, new: Any) -> str:
    """What differs between two static values, or two structures of arguments."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        pairs = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
        if pairs:
            return _change(name, *pairs[0])
    if isinstance(old, jax.tree_util.PyTreeDef) and type(new) is type(old):
        before, after = _paths(old), _paths(new)
        changes = [f"{path} is gone" for path in before if path not in after]
        changes += [f"{path} is new" for path in after if path not in before]
        if changes:
            return f"the structure, where {_some(changes)}"
    if _brief(old) == _brief(new):
        return f"{name} was one {_brief(old)}, now is another"
    return f"{name} was {_brief(old)}, now {_brief(new)}"


def _paths(tree: Any) -> list[str]:
    """Of each leaf of a tree of (positional, keyword) arguments: `[0]['image']`."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    leaves = jax.tree_util.tree_leaves_with_path(numbered)
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def _some(changes: Iterable[str]) -> str:
    changes = list(changes)
    return "; ".join(changes[:3]) + (" and more" if len(changes) > 3 else "")


def _brief(x: Any) -> str:
    return reprlib.repr(x) if isinstance(x, str | int | float) else type(x).__name__


def _show(aval) -> str:
    shape, dtype, weak = aval
    return f"{dtype}{list(shape) if isinstance(shape, tuple) else shape}" + (
        " (weak)" if weak else ""
    )


def schedule(
    fun: Callable | None = None,
    budget: BudgetLike | None = None,
    *,
    device: DeviceProfile | None = None,
    planner: Planner | None = None,
    executor: Callable[[Program], Any] | None = None,
    plan_cache: str | os.PathLike | None = None,
    passes: Sequence[Pass] = PASSES,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Iterable[int] = (),
) -> Any:
    """Run `fun` within a memory budget: a drop-in for `jax.jit`, also as a decorator.

    Args:
      fun: any function that JAX can trace.
      budget: a `Budget`, a number of bytes, `"64MiB"`, or `"30%"` of keep-all's bytes.
      device: prices the plan; this machine as measured by default.
      planner: `MilpPlanner()` by default.
      executor: `HostExecutor()` by default.
      plan_cache: a folder for plans and measured costs, so that a later start of the
        same job plans nothing; see `cache.PlanCache`.
      passes: what is done to the graph of single equations, in turn. By default
        `narrow` (a slice of a product becomes the product of a slice), `associate`
        (products with thin matrices in the cheap order), `fold` (frozen scales go into
        frozen kernels), `coarsen` (what XLA would fuse becomes one node), `recompute`
        (what the backward pass reads of a light node is computed there again),
        `stream` (large updates of state on storage go block by block), `order` (nodes
        free early) and `filter_gradients` (those of convolutions in a form that XLA's
        CPU backend computes fast). `passes=()` leaves the graph as it was traced, one
        equation per node; `Scheduled.effects` shows what each does.
      static_argnums, static_argnames, donate_argnums: as for `jax.jit`.

    Returns a `Scheduled`; its call raises BudgetTooSmall, CannotTrace, PageStoreError.
    Raises ValueError for a budget that cannot be read.
    """
    options: dict[str, Any] = dict(
        device=device,
        planner=planner,
        executor=executor,
        plan_cache=plan_cache,
        passes=passes,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
    )
    if not callable(fun):
        given = fun if budget is None else budget
        return functools.partial(schedule, budget=given, **options)
    if budget is None:
        raise ValueError(
            "schedule was called without a budget. It needs one: bytes, a size, a "
            'percentage or a Budget. Type schedule(fun, "64MiB").'
        )
    return Scheduled(fun, budget, **options)


def value_and_grad(
    fun: Callable,
    budget: BudgetLike,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **schedule_options: Any,
) -> Scheduled:
    """`jax.value_and_grad(fun, argnums, has_aux)` within a budget; see `schedule`."""
    return schedule(
        jax.value_and_grad(fun, argnums, has_aux), budget, **schedule_options
    )
