"""A plan with what it is for, and what it uses."""

import dataclasses

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Budget, Plan
from poet_jax.core.program import Program
from poet_jax.core.representation import brief
from poet_jax.core.simulate import Usage


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """What pictures and tables show of an `api.schedule.Schedule`, which explains the
    attributes."""

    graph: Graph
    costs: Costs
    budget: Budget
    plan: Plan
    program: Program
    usage: Usage
    baseline: Usage

    __repr__ = brief
