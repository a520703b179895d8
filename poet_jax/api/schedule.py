"""A plan for a graph with everything that led to it and follows from it."""

import dataclasses
import json
import os

import jax
from jax import export

from poet_jax.api.policy import CheckpointPolicy, checkpoint_policy
from poet_jax.core.costs import Costs, costs_from_dict, costs_to_dict
from poet_jax.core.errors import PlanInvalid
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Budget, Plan, plan_from_dict, plan_to_dict, save_json
from poet_jax.core.planned import Planned
from poet_jax.core.program import Program, lower, program_from_list, program_to_list
from poet_jax.core.representation import brief
from poet_jax.core.simulate import Usage, simulate
from poet_jax.emit.executor import Run, Step
from poet_jax.emit.exporting import exported
from poet_jax.emit.paged_step import PagedStep
from poet_jax.planners.planner import fits, keep_everything
from poet_jax.viz import figures
from poet_jax.viz.dot import write_dot
from poet_jax.viz.html import summary, write_report
from poet_jax.viz.matrices import Matrices, matrices
from poet_jax.viz.perfetto import write_trace
from poet_jax.viz.reasons import Reason, reasons
from poet_jax.viz.table import table


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule(Planned):
    """A plan with everything that led to it and follows from it.

    Attributes:
      graph, costs, budget, plan, program: see their types.
      usage: what the program uses.
      baseline: what keep-all uses.
      step: the compiled program, or the function as `jax.jit` compiles it where the
        budget covers that. None if nothing was compiled: for a schedule from a file,
        of `Scheduled.plan_for_board` or of `update.search`.
      compilations: how many programs were compiled until one was within the budget.
      saved_bytes: `compiled_bytes` of the schedule that a file is of.
    """

    step: Step | PagedStep | None = None
    compilations: int = 0
    saved_bytes: int | None = None

    __repr__ = brief

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

    @property
    def compiled_bytes(self) -> int | None:
        """RAM while the step runs, by XLA's own count; None if it was not compiled.

        A schedule from a file has the count of the one that was saved.

        Arguments, results that replace none of them, and XLA's own room for the rest,
        with what libraries allocate beside that.
        """
        return self.saved_bytes if self.step is None else self.step.nbytes

    def compile(self) -> "Compiled":
        """The step as `jax.jit(fun).lower(*args).compile()` gives it, and its schedule.

        Raises PlanInvalid for a schedule without a step.
        """
        if self.step is None:
            raise PlanInvalid(
                "This schedule has no compiled step: it is from a file, for a board or "
                "of update.search. Use Scheduled.lower(*args).compile()."
            )
        return Compiled(self, self.step.compiled)

    def export(self) -> export.Exported:
        """The step as a `jax.export.Exported`, to serialize and run elsewhere.

        It runs on the kind of device that it was planned on. A schedule of
        `Scheduled.plan_for_board` is cut into stages of at most the budget's bytes, for
        any compiler that reads StableHLO.

        Raises PlanInvalid for a step that pages or has state on storage, since its
        pages are in this process. A schedule of `plan_for_board` also must not write
        to references or run on several devices.
        """
        if self.step is None or isinstance(self.step, PagedStep):
            return exported(self.program, self.costs, self.budget.memory_bytes)
        return self.step.exported()

    def __str__(self) -> str:
        return table(self, self.compiled_bytes, self.compilations)

    def _repr_html_(self) -> str:
        """Summary, figure and the largest values, for a notebook."""
        return summary(self, self.compiled_bytes, self.compilations)

    def plot(self, path: str | os.PathLike) -> None:
        """Write a figure of live bytes over the planned step to `path`.

        The file's type follows its name (.png, .svg, .pdf). Needs matplotlib, which
        `pip install "poet_jax[plot]"` brings; raises ImportError without it.
        """
        with figures.drawn(path, figures.STEP_HEIGHT) as figure:
            figures.draw_step(figure, self)

    def plot_matrices(self, path: str | os.PathLike) -> None:
        """Write a figure of the plan's matrices R, S_RAM and S_storage, as `plot`."""
        figures.plot_matrices(path, self.graph, self.plan)

    def matrices(self) -> Matrices:
        """The plan's matrices R, S_RAM and S_storage, as in the paper."""
        return matrices(self.graph, self.plan)

    def reasons(self) -> tuple[Reason, ...]:
        """[V] what was decided for each value, and what else it would have cost."""
        return reasons(self.graph, self.costs, self.plan)

    def checkpoint_policy(self) -> CheckpointPolicy:
        """The nearest to the plan that `jax.checkpoint` can express, for those who keep
        a `jax.jit` of their own: `jax.checkpoint(loss, policy=policy)`.

        A policy goes by the names of `jax.ad_checkpoint.checkpoint_name`. A name is
        saved, offloaded to the host's memory or made again as the plan does with most
        of the bytes that have it. `print(policy)` says what is lost against the plan.

        Raises ValueError if the function names no value: the message lists what the
        plan keeps for the backward pass, and where it is made.
        """
        return checkpoint_policy(self.program, self.costs, self.usage)

    def to_dot(self, path: str | os.PathLike) -> None:
        """Write the dependency graph to `path`: DOT, or drawn for .svg, .png and .pdf.

        Raises FileNotFoundError for a drawing if Graphviz is not installed.
        """
        write_dot(path, self)

    def to_perfetto(self, path: str | os.PathLike, run: Run | None = None) -> None:
        """Write a trace of the planned step to `path`, for ui.perfetto.dev.

        With `run`, the `last_run` of the function that this schedule is for, the
        measured step is in it, too.
        """
        write_trace(path, self, run)

    def to_html(self, path: str | os.PathLike) -> None:
        """Write one page about the schedule to `path`: summary, figure, and values."""
        write_report(path, self, self.compiled_bytes)

    def to_json(self, path: str | os.PathLike) -> None:
        """Write budget, plan, program, costs and compiled bytes to `path`, for
        `from_json`."""
        data = {
            "budget": dataclasses.asdict(self.budget),
            "plan": plan_to_dict(self.graph, self.plan),
            "program": program_to_list(self.program),
            "costs": costs_to_dict(self.costs),
            "compiled_bytes": self.compiled_bytes,
        }
        save_json(path, data)

    def from_json(self, path: str | os.PathLike) -> "Schedule":
        """The schedule saved at `path`, for this schedule's graph.

        A graph holds code, which a JSON file does not: trace it again with
        `Scheduled.plan`, or any planner, and read the saved plan into the result.
        Raises PlanInvalid if the file is of another graph, or its program exceeds its
        budget.
        """
        try:
            with open(path) as file:
                data = json.load(file)
            plan = plan_from_dict(self.graph, data["plan"])
            costs = costs_from_dict(data["costs"])
            costs.check_fit(len(self.graph.nodes), len(self.graph.values))
            budget = Budget(**data["budget"])
            graph = self.graph.with_resident(plan.resident)
            program = program_from_list(graph, data["program"])
            schedule = Schedule.of(self.graph, costs, budget, plan, program)
            nbytes = data["compiled_bytes"]
            if nbytes is not None and (type(nbytes) is not int or nbytes < 0):
                raise ValueError(f"compiled_bytes is {nbytes!r}, no number of bytes")
        except PlanInvalid:
            raise
        except _DAMAGE as error:
            raise PlanInvalid(
                f"{os.fspath(path)} is not a file of Schedule.to_json: "
                f"{type(error).__name__}: {error}. Plan again with "
                "Scheduled.plan(...), and save that."
            ) from error
        if not fits(as_compiled(schedule.usage, nbytes), budget):
            raise PlanInvalid(
                f"{os.fspath(path)} has a budget of {budget}, and its program uses "
                f"{schedule.usage}. Plan again with Scheduled.plan(...), and save that."
            )
        return dataclasses.replace(schedule, saved_bytes=nbytes)


# Errors of reading a damaged file.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A step, compiled.

    Attributes:
      schedule: what it keeps to.
      xla: XLA's compiled object, with `memory_analysis()`, `cost_analysis()` and
        `as_text()`.
    """

    schedule: Schedule
    xla: jax.stages.Compiled

    __repr__ = brief


def as_compiled(usage: Usage, compiled_bytes: int | None) -> Usage:
    """`usage` with XLA's own count of memory, if there is one, which is what counts."""
    if compiled_bytes is None:
        return usage
    return dataclasses.replace(usage, peak_bytes=compiled_bytes)
