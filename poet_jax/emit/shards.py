"""Where each value lies on several devices, as XLA decides it.

A step on several devices is one program that each of them runs on shards of the values.
Arguments say how they lie, and XLA's partitioner how everything else does. So the step
is compiled once with a question about each value.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from poet_jax.core.errors import CannotTrace
from poet_jax.core.graph import Graph, Value

# Smaller values count as if each device had all of them.
LEAST_BYTES = 2**10


def count_devices(graph: Graph, placed: Iterable[Any]) -> int:
    """How many devices a step runs on, by the shardings and meshes among `placed`, and
    by those that its equations name."""
    named = [
        x
        for node in graph.nodes
        for equation in node.equations
        for x in (equation.params.get("sharding"), equation.params.get("mesh"))
    ]
    counts = (
        getattr(x, "num_devices", getattr(x, "size", 1)) for x in (*placed, *named)
    )
    return max(1, *(n for n in counts if isinstance(n, int)))


def platform_of(placed: Iterable[Any]) -> str | None:
    """Of the devices of shardings; None if there is no sharding among `placed`."""
    for x in placed:
        for device in getattr(x, "device_set", ()):
            return device.platform
    return None


def sharded(graph: Graph, compile_for: Callable[[Callable[..., Any]], Any]) -> Graph:
    """`graph` with the shardings of its values, and the bytes of their shards.

    Args:
      compile_for: compiles a function of the graph's flat arguments to its flat results
        for the step's own arguments.

    Raises CannotTrace for a sharding that JAX has no name for.
    """
    found: dict[int, Any] = {}

    def see(v: int, array: Any) -> None:
        if graph.values[v].nbytes >= LEAST_BYTES:
            answer = functools.partial(found.__setitem__, v)
            jax.debug.inspect_array_sharding(array, callback=answer)

    try:
        compile_for(functools.partial(graph, see=see))
    except jax.errors.JaxRuntimeError as error:
        if "inspect_sharding" not in str(error):
            raise
        raise CannotTrace(
            "XLA cuts a value into parts of an axis of the mesh, and JAX cannot say "
            "how. A reshape of a sharded axis does that: keep its first part as long "
            "as there are devices, x.reshape(-1, 4, ...) for x.reshape(4, -1, ...). Or "
            'use a mesh with the factors as axes, jax.make_mesh((4, 2), ("a", "b")), '
            'and P(("a", "b")) for both of them.'
        ) from error
    values = (_lying(x, v, found) for v, x in enumerate(graph.values))
    return dataclasses.replace(graph, values=tuple(values))


def _lying(value: Value, number: int, found: Mapping[int, Any]) -> Value:
    sharding = found.get(number)
    if sharding is None or sharding.is_fully_replicated:
        return value
    whole = int(np.prod(value.shape, dtype=np.int64))
    shard = int(np.prod(sharding.shard_shape(value.shape), dtype=np.int64))
    nbytes = value.nbytes * shard // whole
    return dataclasses.replace(value, nbytes=nbytes, sharding=sharding)
