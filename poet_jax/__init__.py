"""Flax training steps within a memory budget: optimal rematerialisation and paging."""

from poet_jax import devices, linen, nnx, update
from poet_jax.associate import associate
from poet_jax.coarsen import coarsen
from poet_jax.convolution import (
    filter_gradients,
    large_convolutions,
    pointwise_convolutions,
)
from poet_jax.depthwise import depthwise_convolutions
from poet_jax.device import DeviceProfile
from poet_jax.effects import Effect, Effects, effects
from poet_jax.errors import BudgetTooSmall, CannotTrace, PageStoreError, PlanInvalid
from poet_jax.executors.host import HostExecutor, Run, release
from poet_jax.explain import sizes
from poet_jax.fold import fold
from poet_jax.fuse import fuse
from poet_jax.graph import Graph, Node, Value
from poet_jax.lowerings import fastest
from poet_jax.machine import host, host_path
from poet_jax.narrow import narrow
from poet_jax.node_costs import write_node_costs
from poet_jax.order import order
from poet_jax.paged import PagedArray
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
from poet_jax.pooling import pool_gradients, short_sums
from poet_jax.price import Costs, load_instance, price
from poet_jax.program import Fused, Program, lower
from poet_jax.recompute import recompute
from poet_jax.schedule import Schedule
from poet_jax.simulate import Usage, simulate
from poet_jax.state import init_paged, to_storage
from poet_jax.store import FileStore, HostStore
from poet_jax.stream import stream
from poet_jax.trace import trace
from poet_jax.train_step import train_step
from poet_jax.transform import PASSES, Scheduled, schedule, value_and_grad

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
    "Fused",
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
    "depthwise_convolutions",
    "devices",
    "effects",
    "fastest",
    "filter_gradients",
    "fold",
    "fuse",
    "greedy",
    "host",
    "host_path",
    "init_paged",
    "keep_all",
    "large_convolutions",
    "load_instance",
    "lower",
    "narrow",
    "order",
    "paging_only",
    "pareto",
    "pointwise_convolutions",
    "pool_gradients",
    "price",
    "recompute",
    "release",
    "schedule",
    "short_sums",
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
