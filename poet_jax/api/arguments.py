"""Static arguments, and the key that tells which calls share a plan."""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import backend
from jax.ref import Ref

from poet_jax.stores.paged import PagedArray

# Settings of JAX that change the traced function, or where it runs.
SETTINGS = (
    "jax_default_device",
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_disable_jit",
)


class StaticArguments:
    """Static arguments by position and name, inferred as in `jax.jit`."""

    def __init__(
        self,
        fun: Callable,
        nums: int | Iterable[int] | None,
        names: str | Iterable[str] | None,
    ):
        self.nums = {nums} if isinstance(nums, int) else set(nums or ())
        self.names = {names} if isinstance(names, str) else set(names or ())
        try:
            parameters = list(inspect.signature(fun).parameters)
        except (TypeError, ValueError):
            parameters = []
        if self.names and not self.nums:
            self.nums = {i for i, name in enumerate(parameters) if name in self.names}
        elif self.nums and not self.names:
            self.names = {parameters[i] for i in self.nums if i < len(parameters)}

    def _is_static(self, number: int, args: Sequence) -> bool:
        return number in self.nums or number - len(args) in self.nums

    def remove(self, args, kwargs):
        """(args, kwargs) without the static ones."""
        return (
            tuple(x for i, x in enumerate(args) if not self._is_static(i, args)),
            {name: x for name, x in kwargs.items() if name not in self.names},
        )

    def key(self, args, kwargs) -> tuple:
        """Equal for calls that share a plan: (static, tree, avals, settings).

        Raises ValueError for a static argument without a hash.
        """
        leaves, tree = jax.tree.flatten(self.remove(args, kwargs))
        named = [(i, x) for i, x in enumerate(args) if self._is_static(i, args)]
        named += [(name, x) for name, x in sorted(kwargs.items()) if name in self.names]
        static = tuple((name, type(x), x) for name, x in named)
        try:
            hash(static)
        except TypeError as error:
            raise ValueError(
                f"A static argument must have a hash: {error}. Pass a tuple instead of "
                "a list, or do not make it static."
            ) from error
        settings = [(name, getattr(jax.config, name)) for name in SETTINGS]
        settings.append(("the mesh", jax.sharding.get_abstract_mesh()))
        return static, tree, tuple(map(_aval, leaves)), tuple(settings)


def placement(leaves: Iterable[Any]) -> tuple:
    """Where a user has put arrays: equal for calls that share a plan.

    Empty where all lie on JAX's first device, or nowhere in particular.
    """
    placed = [(_sharding(leaf), leaf) for leaf in leaves]
    devices = {x for sharding, _ in placed if sharding for x in sharding.device_set}
    if len(devices) > 1:
        return tuple(sharding and _shards(sharding, x.shape) for sharding, x in placed)
    return tuple(devices.difference(jax.devices()[:1]))


def count_all_devices() -> int:
    """Devices that arrays may lie on: of all platforms, not of the default one only."""
    return sum(client.device_count() for client in backend.backends().values())


def devices_of(leaves: Iterable[Any]) -> set[Any]:
    """The devices that a user has put arguments on."""
    shardings = filter(None, map(_sharding, leaves))
    return {x for sharding in shardings for x in sharding.device_set}


def held_on(leaves: Iterable[Any]) -> tuple[set[Any], int]:
    """The devices of a step, and the bytes of its arguments that each holds already."""
    leaves = list(leaves)
    held_bytes = sum(
        shard.data.nbytes
        for x in leaves
        if isinstance(x, jax.Array)
        for shard in x.addressable_shards[:1]
    )
    return devices_of(leaves) or {*jnp.zeros(()).devices()}, held_bytes


def _sharding(leaf: Any) -> Any:
    """Of a committed array or a shape; None if a step may put it where it likes."""
    if isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "committed", False):
        return leaf.sharding
    return None


def _shards(sharding: Any, shape: tuple[int, ...]) -> tuple:
    """(device, bounds of each axis) for each shard, whatever the sharding is called."""
    return tuple(
        (device, *((axis.start, axis.stop) for axis in index))
        for device, index in sharding.devices_indices_map(shape).items()
    )


def _aval(leaf: Any) -> tuple[Any, Any, bool]:
    """(shape, dtype and memory, weak type) of a leaf."""
    if isinstance(leaf, PagedArray):
        return leaf.shape, f"{leaf.dtype} on storage", False
    if isinstance(leaf, Ref):
        return leaf.shape, f"a reference to {leaf.dtype}", False
    try:
        aval = jax.typeof(leaf)
    except (TypeError, OverflowError):  # which JAX explains when it traces
        return type(leaf), "", False
    dtype = jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True)
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        dtype = f"{dtype} in the host's memory"
    return aval.shape, dtype, bool(getattr(aval, "weak_type", False))


def difference(old: Any, new: Any) -> str:
    """How the key `new` differs from `old`, in words; empty if `old` is None."""
    if old is None:
        return ""
    if old[0] != new[0]:
        known = {name: x for name, _, x in old[0]}
        changes = (
            _change(name, known.get(name), x)
            for name, _, x in new[0]
            if known.get(name) != x
        )
        return _some(changes) or "the static arguments"
    if old[3] != new[3]:
        return _some(
            _change(name, was, now)
            for (name, was), (_, now) in zip(old[3], new[3], strict=True)
            if was != now
        )
    if old[1] != new[1]:
        return _change("the structure", old[1], new[1])
    changes = _some(
        f"{path} was {_show(a)}, now {_show(b)}"
        for path, a, b in zip(_paths(new[1]), old[2], new[2], strict=True)
        if a != b
    )
    return changes or "arrays lie on other devices, or in other shards"


def _change(name: Any, old: Any, new: Any) -> str:
    """How two static values, or two structures of arguments, differ."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        pairs = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
        if pairs:
            return _change(name, *pairs[0])
    if isinstance(old, jax.tree_util.PyTreeDef) and type(new) is type(old):
        before, after = _paths(old), _paths(new)
        changes = [f"{path} is gone" for path in before if path not in after]
        changes += [f"{path} is new" for path in after if path not in before]
        if changes:
            return f"the structure, where {_some(changes)}"
    if _brief(old) == _brief(new):
        return f"{name} was one {_brief(old)}, now is another"
    return f"{name} was {_brief(old)}, now {_brief(new)}"


def _paths(tree: Any) -> list[str]:
    """Paths such as `[0]['image']` of a tree of (args, kwargs)."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    leaves = jax.tree_util.tree_leaves_with_path(numbered)
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def _some(changes: Iterable[str]) -> str:
    changes = list(changes)
    return "; ".join(changes[:3]) + (" and more" if len(changes) > 3 else "")


def _brief(x: Any) -> str:
    return reprlib.repr(x) if isinstance(x, str | int | float) else type(x).__name__


def _show(aval) -> str:
    shape, dtype, weak = aval
    return f"{dtype}{list(shape) if isinstance(shape, tuple) else shape}" + (
        " (weak)" if weak else ""
    )
