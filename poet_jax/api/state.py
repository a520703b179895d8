"""State on storage, made, saved and loaded without ever holding all of it in RAM."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax.core.plan import Stages
from poet_jax.core.program import lower_actions
from poet_jax.core.trace import trace
from poet_jax.devices import RASPBERRY_PI_5
from poet_jax.devices.price import price
from poet_jax.emit import cut, emit
from poet_jax.emit.paged_step import PagedStep
from poet_jax.emit.stages import TOGETHER_BYTES
from poet_jax.passes.grouping import group
from poet_jax.passes.reordering import reorder
from poet_jax.planners.planner import floor_bytes
from poet_jax.stores.paged import SMALL_BYTES, PagedArray, at_home, land
from poet_jax.stores.store import Store
from poet_jax.stores.weights import Described, WeightsFile, write


def init_paged(
    init_fn: Callable, store: Store, *args: Any, min_bytes: int = SMALL_BYTES
) -> Any:
    """`init_fn(*args)` with its large results in `store`, as `PagedArray`s.

    Each result is computed, paged out and freed before the next. Small ones go
    together, up to 8 MiB. So RAM holds about the largest result, its operands and
    8 MiB. Results below `min_bytes` are ordinary arrays.
    Arguments may be `PagedArray`s; those that are read are loaded. Raises CannotTrace,
    and PageStoreError if the store is full.
    """
    leaves = jax.tree.leaves(args)
    paged = [n for n, leaf in enumerate(leaves) if isinstance(leaf, PagedArray)]
    graph = at_home(trace(init_fn, *args), paged)
    graph = land(reorder(group(graph)), min_bytes)
    program = lower_actions(graph, Stages.empty(graph).actions(graph))
    costs = price(graph, RASPBERRY_PI_5)  # its bytes, which are any device's
    stage_bytes = floor_bytes(graph, costs) + TOGETHER_BYTES
    step = PagedStep(emit(cut(program, costs, stage_bytes)), store, leaves)
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


def save_paged(
    arrays: Mapping[str, Any],
    path: str | os.PathLike,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays, by name, to a file in the format of safetensors.

    Arrays may be `PagedArray`s; one at a time is in RAM. An existing file is replaced
    once the new one is complete on storage. `metadata` goes into its header. Typed PRNG
    keys are written as their data, and the header names their implementation.

    Raises OSError, and ValueError for a dtype that the format lacks. Names must be
    strings other than "__metadata__", and values arrays; others are a ValueError, too.
    """
    write(path, arrays, metadata or {})


def load_paged(
    path: str | os.PathLike, min_bytes: int = SMALL_BYTES
) -> dict[str, PagedArray | jax.Array]:
    """The arrays of a file in the format of safetensors, by name, read when needed.

    Those of at least `min_bytes` are `PagedArray`s whose bytes stay in the file; the
    others are read now, and so are typed PRNG keys that `save_paged` wrote. The file is
    never written: a step that returns new arrays for them has those in its own store.
    What is paged in is verified by length alone. A file that changes later is refused
    at the next step.

    Raises FileNotFoundError without the file, ValueError for a damaged one and for a
    large array of 64 bits without jax_enable_x64, and PageStoreError if it cannot be
    opened.
    """
    file = WeightsFile(path)

    def load(name: str, array: Described) -> PagedArray | jax.Array:
        paged = PagedArray(file, array.shape, array.dtype, name, offset=array.offset)
        if array.key_impl is not None:
            try:
                return jax.random.wrap_key_data(jnp.asarray(paged), impl=array.key_impl)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{name!r} in {file.place} cannot be read as PRNG keys: {error}. "
                    "Write the file again with poet_jax.save_paged."
                ) from error
        if array.nbytes < min_bytes:
            return jnp.asarray(np.asarray(paged))
        if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise ValueError(
                f"{name!r} in {file.place} is {array.dtype}, which JAX has only with "
                "jax_enable_x64. Enable that, or convert the file to 32 bits."
            )
        return paged

    return {name: load(name, array) for name, array in file.arrays.items()}
