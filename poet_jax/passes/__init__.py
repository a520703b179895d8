"""Passes, `Graph -> Graph`, in the order in which `schedule` makes them."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from poet_jax.core.graph import Graph
from poet_jax.passes.blocks import blockwise
from poet_jax.passes.conds import open_conds
from poet_jax.passes.cpu.rules import cpu_kernels
from poet_jax.passes.expanding import expand_at_use
from poet_jax.passes.grouping import group
from poet_jax.passes.indexing import index_by_row
from poet_jax.passes.inlining import inline_cheap
from poet_jax.passes.loops import unroll
from poet_jax.passes.reordering import reorder
from poet_jax.passes.rewriter import Rewriter
from poet_jax.passes.shard_maps import open_shard_maps
from poet_jax.passes.simplifying import simplify
from poet_jax.passes.sparse.products import reassociate
from poet_jax.passes.sparse.scales import fold_scales
from poet_jax.passes.sparse.slices import push_slices
from poet_jax.passes.streaming import stream_state
from poet_jax.passes.subexpressions import cse
from poet_jax.passes.views import views_at_use
from poet_jax.passes.weighting import weighted_sums

Pass = Callable[[Graph], Graph]
PASSES: tuple[Pass, ...] = (
    unroll,
    open_conds,
    cse,
    index_by_row,
    blockwise,
    push_slices,
    reassociate,
    fold_scales,
    weighted_sums,
    open_shard_maps,
    simplify,
    group,
    expand_at_use,
    inline_cheap,
    stream_state,
    reorder,
    cpu_kernels,
)
# Those that take options by which parts get smaller, where a step does not fit.
CUTS: dict[str, Callable[..., Graph]] = {
    "unroll": unroll,
    "blockwise": blockwise,
    "group": group,
}


def run_passes(graph: Graph, passes: Iterable[Pass] = PASSES) -> Graph:
    """What `passes` in turn make of a graph of single equations.

    Raises TypeError for a pass that returns no graph.
    """
    for change in passes:
        graph = change(graph)
        if not isinstance(graph, Graph):
            raise TypeError(
                f"The pass {getattr(change, '__name__', change)} returned a "
                f"{type(graph).__name__}. A pass returns a poet_jax.Graph: the one "
                "that it was given, or the result of a Rewriter."
            )
    return graph


def refinable_of(passes: Iterable[Pass]) -> Iterator[str]:
    """Names of those of `CUTS` among them, that have no options yet."""
    given = list(passes)
    return (name for name, cut in CUTS.items() if any(x is cut for x in given))


def with_options(
    passes: Iterable[Pass], options: Mapping[str, Mapping[str, int]]
) -> tuple[Pass, ...]:
    """`passes` with options of those of `CUTS`, by their names."""
    cuts = [(CUTS[name], given) for name, given in options.items()]
    return tuple(
        next((functools.partial(x, **given) for cut, given in cuts if x is cut), x)
        for x in passes
    )


def for_board(passes: Iterable[Pass]) -> list[Pass]:
    """`passes` for a program of C.

    They keep loops whole, leave out the forms for XLA, and read arrays on storage in
    small blocks. A value that is only read in another order gets no array of its own.
    """
    chosen: list[Pass] = []
    for change in passes:
        if change is stream_state:
            chosen += [views_at_use, _in_small_blocks]
        elif change not in (unroll, weighted_sums, cpu_kernels):
            chosen.append(change)
    return chosen


def _in_small_blocks(graph: Graph) -> Graph:
    return stream_state(graph, most_bytes=2**16)


__all__ = [
    "CUTS",
    "PASSES",
    "Pass",
    "Rewriter",
    "reassociate",
    "group",
    "open_conds",
    "open_shard_maps",
    "cpu_kernels",
    "cse",
    "fold_scales",
    "simplify",
    "push_slices",
    "reorder",
    "run_passes",
    "expand_at_use",
    "index_by_row",
    "inline_cheap",
    "stream_state",
    "unroll",
    "views_at_use",
    "weighted_sums",
    "refinable_of",
    "with_options",
    "blockwise",
    "for_board",
]
