"""Create state on storage, without ever holding all of it in RAM."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from poet_jax.core.plan import Stages
from poet_jax.core.program import lower_actions
from poet_jax.core.trace import trace
from poet_jax.emit import emit
from poet_jax.emit.paged_step import PagedStep
from poet_jax.passes.grouping import group
from poet_jax.passes.reordering import reorder
from poet_jax.stores.paged import SMALL_BYTES, PagedArray, at_home, land
from poet_jax.stores.store import Store


def init_paged(
    init_fn: Callable, store: Store, *args: Any, min_bytes: int = SMALL_BYTES
) -> Any:
    """`init_fn(*args)` with its large results in `store`, as `PagedArray`s.

    Each result is computed, paged out and freed before the next, so RAM holds about the
    largest result and its operands. Results below `min_bytes` are ordinary arrays.
    Arguments may be `PagedArray`s; those that are read are loaded. Raises CannotTrace,
    and PageStoreError if the store is full.
    """
    leaves = jax.tree.leaves(args)
    paged = [n for n, leaf in enumerate(leaves) if isinstance(leaf, PagedArray)]
    graph = at_home(trace(init_fn, *args), paged)
    graph = land(reorder(group(graph)), min_bytes)
    program = lower_actions(graph, Stages.empty(graph).actions(graph))
    step = PagedStep(emit(program), store, leaves)
    return step(*args)


def to_storage(state: Any, store: Store, min_bytes: int = SMALL_BYTES) -> Any:
    """`state`, a pytree of arrays, with those of at least `min_bytes` in `store`.

    Typed PRNG keys stay in RAM. Raises PageStoreError if the store is full.
    """

    def move(path, leaf):
        if isinstance(leaf, PagedArray) or getattr(leaf, "nbytes", 0) < min_bytes:
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf
        return PagedArray.of(leaf, store, jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(move, state)
