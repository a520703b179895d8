"""The errors that a user can act on; each message says what was asked, what is possible
and what to type."""

from typing import Any


class BudgetTooSmall(ValueError):
    """No plan of this planner fits the budget.

    Attributes:
      smallest_bytes: the smallest memory budget that works, in bytes.
      exact: True if one byte less than `smallest_bytes` is proven not to work for plans
        of this planner (for `MilpPlanner`, staged ones, see `plan.Stages`); False if
        `smallest_bytes` works but a smaller budget has not been ruled out.
      least_bytes: proven to be the least that could work, so that the smallest budget
        lies between it and `smallest_bytes`; the same as that if `exact`.
      node: name of the node at which memory is highest under that smallest budget.
      values: names of the values alive there, largest first.
      plan: the leanest Plan that was found, which needs `smallest_bytes`: by the
        simulator, or by the compiler's count if it was compiled.
    """

    def __init__(
        self,
        message: str,
        *,
        smallest_bytes: int,
        exact: bool,
        least_bytes: int,
        node: str,
        values: tuple[str, ...],
        plan: Any,
    ):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.exact = exact
        self.least_bytes = least_bytes
        self.node = node
        self.values = values
        self.plan = plan


class PlanInvalid(ValueError):
    """A plan that breaks a rule: a value read that is not in RAM, or another graph's
    plan."""


class CannotTrace(TypeError):
    """JAX could not trace the function for these arguments."""


class ClosesOverTracer(CannotTrace):
    """The function closes over a tracer of an outer transformation."""


class PageStoreError(OSError):
    """The page store could not be opened, written or read back intact."""
