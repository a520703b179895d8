"""Errors that a user can act on: what is wrong, what is possible, what to use."""

import dataclasses
import functools
import html
from collections.abc import Mapping
from typing import Any

from poet_jax.core.representation import TOP, html_table


@dataclasses.dataclass(eq=False, repr=False)
class BudgetTooSmall(ValueError):
    """No plan of this planner fits the budget.

    Attributes:
      problem: what does not fit, in sentences.
      remedies: what to use instead; the first is a budget that works.
      smallest_bytes: a memory budget that works, the smallest found.
      exact: whether it is proven that no smaller budget works, for plans of this
        planner (for `MilpPlanner` staged ones, see `plan.Stages`) and the graph as its
        loops and large values were cut.
      least_bytes: proven lower bound for these; `smallest_bytes` if exact.
      node: name of the node at which that plan's memory peaks.
      values: names of the values alive there, largest first.
      plan: the Plan with the lowest peak found; it needs `smallest_bytes` by the
        simulator, or by the compiler's count if it was compiled.
      planned_bytes: what that plan needs by the simulator.
      is_compiled: whether `smallest_bytes` is of a compiled program.
      finer: options of passes, by their names, that cut loops and large values finer;
        none if the step holds too much throughout.
    """

    problem: str
    remedies: tuple[str, ...]
    _: dataclasses.KW_ONLY
    smallest_bytes: int
    exact: bool
    least_bytes: int
    node: str
    values: tuple[str, ...]
    plan: Any
    planned_bytes: int = 0
    is_compiled: bool = False
    finer: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        *most, last = self.remedies
        listed = f"{', '.join(most)}, or {last}" if most else last
        super().__init__(f"{self.problem} Use {listed}.")

    def __reduce__(self) -> tuple[Any, ...]:
        """To be pickled, as an error of another process is."""
        given = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        return functools.partial(type(self), **given), (), vars(self)

    def but(self, **changes: Any) -> "BudgetTooSmall":
        """The error with other attributes, and its notes."""
        changed = dataclasses.replace(self, **changes)
        for note in getattr(self, "__notes__", ()):
            changed.add_note(note)
        return changed

    def _repr_html_(self) -> str:
        rows = [(name, "") for name in self.values[:TOP]]
        table = html_table((f"alive at {self.node}, largest first", ""), rows)
        return f"<p>{html.escape(str(self))}</p>{table}"


class PlanInvalid(ValueError):
    """A plan that breaks a rule, exceeds its budget or is of another graph.

    Also a schedule that cannot be compiled or exported; the message says why.
    """


class CannotTrace(TypeError):
    """JAX cannot trace the function for these arguments."""


class ClosesOverTracer(CannotTrace):
    """The function closes over a tracer of an outer transformation."""


class PageStoreError(OSError):
    """A page store cannot be opened, written, or read back intact."""
