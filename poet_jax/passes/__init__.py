"""Passes, `Graph -> Graph`, in the order in which `schedule` makes them."""

from collections.abc import Callable

from poet_jax.core.graph import Graph
from poet_jax.passes.cpu.rules import cpu_kernels
from poet_jax.passes.group import coarsen
from poet_jax.passes.inline_cheap import recompute
from poet_jax.passes.reorder import order
from poet_jax.passes.sparse.fold_scales import fold
from poet_jax.passes.sparse.push_slices import narrow
from poet_jax.passes.sparse.reassociate import associate
from poet_jax.passes.stream_state import stream

Pass = Callable[[Graph], Graph]
PASSES: tuple[Pass, ...] = (
    narrow,
    associate,
    fold,
    coarsen,
    recompute,
    stream,
    order,
    cpu_kernels,
)

__all__ = [
    "PASSES",
    "Pass",
    "associate",
    "coarsen",
    "cpu_kernels",
    "fold",
    "narrow",
    "order",
    "recompute",
    "stream",
]
