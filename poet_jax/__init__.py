"""Training steps within a memory budget: optimal rematerialisation and paging."""

import importlib
from typing import TYPE_CHECKING, Any

from poet_jax import devices
from poet_jax.api.pareto import pareto
from poet_jax.api.schedule import Schedule
from poet_jax.api.state import init_paged, load_paged, save_paged, to_storage
from poet_jax.api.transform import Scheduled, schedule, value_and_grad
from poet_jax.core import (
    Budget,
    Costs,
    DeviceProfile,
    Graph,
    Plan,
    Program,
    Status,
    Usage,
    load_instance,
    lower,
)
from poet_jax.core.errors import (
    BudgetTooSmall,
    CannotTrace,
    PageStoreError,
    PlanInvalid,
)
from poet_jax.core.simulate import simulate
from poet_jax.core.trace import trace
from poet_jax.devices.machine import host
from poet_jax.devices.price import price
from poet_jax.emit.executor import HostExecutor, Run, release
from poet_jax.planners import MilpPlanner, PaperPlanner, greedy, keep_all
from poet_jax.stores import FileStore, HostStore, PagedArray

if TYPE_CHECKING:
    from poet_jax import update
    from poet_jax.flax import linen, nnx
    from poet_jax.flax.train_step import train_step

__all__ = [
    "Budget",
    "BudgetTooSmall",
    "CannotTrace",
    "Costs",
    "DeviceProfile",
    "FileStore",
    "Graph",
    "HostExecutor",
    "HostStore",
    "MilpPlanner",
    "PageStoreError",
    "PagedArray",
    "PaperPlanner",
    "Plan",
    "PlanInvalid",
    "Program",
    "Run",
    "Schedule",
    "Scheduled",
    "Status",
    "Usage",
    "devices",
    "greedy",
    "host",
    "init_paged",
    "keep_all",
    "linen",
    "load_instance",
    "load_paged",
    "lower",
    "nnx",
    "pareto",
    "price",
    "release",
    "save_paged",
    "schedule",
    "simulate",
    "to_storage",
    "trace",
    "train_step",
    "update",
    "value_and_grad",
]

# What needs Flax is loaded when it is first used.
_LAZY = {
    "linen": "poet_jax.flax.linen",
    "nnx": "poet_jax.flax.nnx",
    "update": "poet_jax.update",
}


def __getattr__(name: str) -> Any:
    if name == "train_step":
        return importlib.import_module("poet_jax.flax.train_step").train_step
    if name in _LAZY:
        return importlib.import_module(_LAZY[name])
    raise AttributeError(f"module 'poet_jax' has no attribute {name!r}")
