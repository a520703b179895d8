"""Flax training steps within a memory budget: optimal rematerialisation and paging."""

import importlib
from typing import TYPE_CHECKING, Any

from poet_jax import devices
from poet_jax.associate import associate
from poet_jax.coarsen import coarsen
from poet_jax.cpu_kernels import cpu_kernels
from poet_jax.device import DeviceProfile
from poet_jax.effects import Effect, Effects, effects
from poet_jax.emit import emit
from poet_jax.errors import BudgetTooSmall, CannotTrace, PageStoreError, PlanInvalid
from poet_jax.executor import HostExecutor, Run, release
from poet_jax.explain import sizes
from poet_jax.fold import fold
from poet_jax.graph import Graph, Node, Value
from poet_jax.machine import host, host_path
from poet_jax.narrow import narrow
from poet_jax.node_costs import write_node_costs
from poet_jax.order import order
from poet_jax.pareto import Front, Point, pareto
from poet_jax.plan import (
    Budget,
    Compute,
    Free,
    PageIn,
    PageOut,
    Plan,
    Stages,
    Status,
)
from poet_jax.planners.greedy import greedy, paging_only
from poet_jax.planners.keep_all import keep_all
from poet_jax.planners.milp import MilpPlanner
from poet_jax.planners.paper import PaperPlanner
from poet_jax.planners.sqrt import sqrt
from poet_jax.price import Costs, load_instance, price
from poet_jax.program import Program, lower
from poet_jax.recompute import recompute
from poet_jax.schedule import Schedule
from poet_jax.simulate import Usage, simulate
from poet_jax.state import init_paged, to_storage
from poet_jax.stores.paged import PagedArray
from poet_jax.stores.store import FileStore, HostStore
from poet_jax.stream import stream
from poet_jax.trace import trace
from poet_jax.transform import PASSES, Scheduled, schedule, value_and_grad

if TYPE_CHECKING:
    from poet_jax import linen, nnx, update
    from poet_jax.flax_step import train_step

__all__ = [
    "PASSES",
    "Budget",
    "BudgetTooSmall",
    "CannotTrace",
    "Compute",
    "Costs",
    "DeviceProfile",
    "Effect",
    "Effects",
    "FileStore",
    "Free",
    "Front",
    "Graph",
    "HostExecutor",
    "HostStore",
    "MilpPlanner",
    "Node",
    "PageIn",
    "PageOut",
    "PageStoreError",
    "PagedArray",
    "PaperPlanner",
    "Plan",
    "PlanInvalid",
    "Point",
    "Program",
    "Run",
    "Schedule",
    "Scheduled",
    "Stages",
    "Status",
    "Usage",
    "Value",
    "associate",
    "coarsen",
    "cpu_kernels",
    "devices",
    "effects",
    "fold",
    "emit",
    "greedy",
    "host",
    "host_path",
    "init_paged",
    "keep_all",
    "load_instance",
    "lower",
    "narrow",
    "order",
    "paging_only",
    "pareto",
    "price",
    "recompute",
    "release",
    "schedule",
    "simulate",
    "sizes",
    "sqrt",
    "stream",
    "to_storage",
    "linen",
    "nnx",
    "trace",
    "train_step",
    "update",
    "value_and_grad",
    "write_node_costs",
]


def __getattr__(name: str) -> Any:
    """What needs Flax is loaded when it is first used."""
    if name in ("linen", "nnx", "update"):
        return importlib.import_module(f"poet_jax.{name}")
    if name == "train_step":
        return importlib.import_module("poet_jax.flax_step").train_step
    raise AttributeError(f"module 'poet_jax' has no attribute {name!r}")
