"""A user's function with the options of `jax.jit`: its trace, its flat arguments, and
what compiles it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from poet_jax.api.arguments import StaticArguments, devices_of, placement
from poet_jax.api.paging import SHARDINGS, apart
from poet_jax.api.processes import Processes
from poet_jax.core.errors import CannotTrace, ClosesOverTracer
from poet_jax.core.graph import Graph
from poet_jax.core.purity import allow_repeats
from poet_jax.core.trace import trace
from poet_jax.emit.shards import count_devices, platform_of
from poet_jax.stores.paged import SMALL_BYTES, PagedArray, at_home

JIT_OPTIONS = (
    "static_argnums", "static_argnames", "donate_argnums", "donate_argnames",
    "in_shardings", "out_shardings", "keep_unused", "inline", "compiler_options",
)  # fmt: skip


class NotPlanned(Exception):
    """A step was given other arguments than it was planned for."""


class Function:
    """A function, and how `jax.jit` is to compile it.

    Args:
      fun: as for `jax.jit`.
      options: some of `JIT_OPTIONS`.
      repeatable: names of operations that may run twice in a step.

    Attributes:
      name: for messages.
      jitted: the plain function under `jax.jit`.
      static: which arguments are static.
    """

    def __init__(
        self, fun: Callable, options: Mapping[str, Any], repeatable: frozenset[str]
    ):
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.options = dict(options)
        self.jitted: Any = jax.jit(fun, **self.options)
        self.static = StaticArguments(
            fun, options.get("static_argnums"), options.get("static_argnames")
        )
        self._fun, self._repeatable = fun, repeatable

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
        """Equal for calls that share a plan."""
        placed = placement(self.leaves(args, kwargs))
        return *self.static.key(args, kwargs), placed

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flat arguments, without the static ones."""
        return jax.tree.leaves(self.static.remove(args, kwargs))

    def processes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Processes:
        """Those that the step for these arguments runs in."""
        devices = devices_of(self.leaves(args, kwargs))
        for sharding in jax.tree.leaves(self._shardings):
            devices |= getattr(sharding, "device_set", set())
        return Processes.of(devices)

    @property
    def _shardings(self) -> dict[str, Any]:
        return {k: x for k, x in self.options.items() if k in SHARDINGS}

    def plain_for(self, key: Any) -> Any:
        """The plain function under `jax.jit`, for calls with one key only."""
        return self._jitted_for(key, self._fun)

    def flat_for(self, key: Any, flat: Callable, out_tree: Any) -> Any:
        """As `plain_for`, of a function of flat arguments to flat results."""

        def within(*args: Any, **kwargs: Any) -> Any:
            return jax.tree.unflatten(out_tree, flat(*self.leaves(args, kwargs)))

        return self._jitted_for(key, within)

    def _jitted_for(self, key: Any, fun: Callable) -> Any:
        @functools.wraps(self._fun)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if self.static.key(args, kwargs) != key[:-1]:
                raise NotPlanned
            return fun(*args, **kwargs)

        return jax.jit(traced, **self.options)

    def traced(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        changed: str = "",
        jitted: Any = None,
        least_bytes: int = SMALL_BYTES,
    ) -> Graph:
        """The graph for arguments like these, of single equations, before any pass.

        `changed` says in what they differ from those of the last call. `jitted` is the
        function under `jax.jit`, if it is to keep the trace. `least_bytes` is as for
        `at_home`. Raises CannotTrace.
        """
        leaves = self.leaves(args, kwargs)
        paged = [n for n, x in enumerate(leaves) if isinstance(x, PagedArray)]
        shardings = [getattr(x, "sharding", None) for x in leaves]
        shardings += jax.tree.leaves(self._shardings)
        shardings.append(jax.sharding.get_abstract_mesh())

        def placed(graph: Graph) -> Graph:
            """`graph` on its devices; TypeError if paged arguments cannot be there."""
            devices = count_devices(graph, shardings)
            platform = platform_of(shardings)
            graph = dataclasses.replace(graph, devices=devices, platform=platform)
            if paged and (problem := apart(graph, self.options)):
                raise TypeError(
                    f"{problem} An argument is a PagedArray. Leave shardings out, or "
                    "read it into RAM with jnp.asarray."
                )
            return graph

        try:
            if paged:
                placed(Graph((), ()))  # as JAX may not trace what has no sharding
                args, kwargs = jax.tree.map(_shape_of_paged, (args, kwargs))
                jitted = None
            graph = placed(trace(jitted or self.jitted, *args, **kwargs))
        except CannotTrace as error:
            if not changed or isinstance(error, ClosesOverTracer):
                raise
            raise CannotTrace(
                f"{error} Arguments changed since the last call: {changed}."
            ) from error
        graph = allow_repeats(graph, self._repeatable)
        return at_home(graph, paged, least_bytes) if paged else graph


def _shape_of_paged(leaf: Any) -> Any:
    if isinstance(leaf, PagedArray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf
