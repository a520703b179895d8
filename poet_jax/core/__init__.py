"""Data and laws: graphs, costs, plans, programs, and what these use."""

from poet_jax.core.costs import Costs
from poet_jax.core.device import DeviceProfile
from poet_jax.core.graph import Graph, Node, Value
from poet_jax.core.instances import load_instance
from poet_jax.core.plan import (
    BasePlanner,
    Budget,
    Compute,
    Free,
    PageIn,
    PageOut,
    Plan,
    Stages,
    Status,
)
from poet_jax.core.program import Program, Run, lower, walk
from poet_jax.core.simulate import Usage

__all__ = [
    "BasePlanner",
    "Budget",
    "Compute",
    "Costs",
    "DeviceProfile",
    "Free",
    "Graph",
    "Node",
    "PageIn",
    "PageOut",
    "Plan",
    "Program",
    "Run",
    "Stages",
    "Status",
    "Usage",
    "Value",
    "load_instance",
    "lower",
    "walk",
]
