"""One plan for all processes of `jax.distributed`: the first of them makes it.

Searches stop by the clock, and machines are calibrated one by one, so that each process
would come to a plan of its own, and their programs would wait for each other forever.
"""

import dataclasses
import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import BasePlanner, Budget, Plan

T = TypeVar("T")
UNIT_BYTES = 2**16  # of what is compared, as JAX has no wide integers by default


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that run a step together.

    All of them have to ask the same questions in the same order.

    Attributes:
      devices: one of each process, the first of them decides; empty if this process
        runs the step alone.
    """

    devices: tuple[Any, ...] = ()

    @classmethod
    def of(cls, devices: Iterable[Any]) -> "Processes":
        """Those of the devices that a step runs on."""
        if jax.process_count() == 1:
            return cls()
        first: dict[int, Any] = {}
        for device in sorted(devices, key=lambda x: (x.process_index, x.id)):
            first.setdefault(device.process_index, device)
        if len(first) < 2 or jax.process_index() not in first:
            return cls()
        return cls(tuple(first.values()))

    def agree(self, make: Callable[[], T]) -> T:
        """What `make()` returns in the first process, which alone calls it, or raises
        there."""
        if not self.devices:
            return make()
        mine = b""
        if jax.process_index() == self.devices[0].process_index:
            mine = _outcome(make)
        (size,) = self._combined(jnp.sum, np.array([len(mine)], np.uint32))
        padded = np.zeros(int(size), np.uint8)
        padded[: len(mine)] = np.frombuffer(mine, np.uint8)
        value, error = pickle.loads(self._combined(jnp.sum, padded).tobytes())
        if error is not None:
            raise error
        return value

    def least(self, nbytes: float) -> float:
        """The least of all processes' bytes, rounded down."""
        if not self.devices:
            return nbytes
        units = np.array([min(nbytes // UNIT_BYTES, 2**31)], np.uint32)
        return int(self._combined(jnp.min, units)[0]) * UNIT_BYTES

    def planner(self, planner: Any) -> BasePlanner:
        """`planner` as the first process runs it."""
        given = BasePlanner.of(planner)
        return _Agreed(self, given) if self.devices else given

    def _combined(self, combine: Callable[..., jax.Array], row: np.ndarray) -> Any:
        """All processes' rows, combined along the processes."""
        mesh = Mesh(np.array(self.devices), ("process",))
        rows, everywhere = NamedSharding(mesh, P("process")), NamedSharding(mesh, P())
        shape = (len(self.devices), *row.shape)
        array = jax.make_array_from_callback(shape, rows, lambda _: row[None])
        combined = jax.jit(
            lambda x: combine(x, axis=0).astype(x.dtype), out_shardings=everywhere
        )
        return np.asarray(combined(array).addressable_data(0))


def _outcome(make: Callable[[], Any]) -> bytes:
    """What a call returns and raises, pickled."""
    try:
        return pickle.dumps((make(), None))
    except Exception as error:  # the other processes wait for it
        try:
            return pickle.dumps((None, error))
        except Exception:
            return pickle.dumps(
                (None, RuntimeError(f"{type(error).__name__}: {error}"))
            )


class _Agreed(BasePlanner):
    """A planner that runs in one process for all."""

    def __init__(self, processes: Processes, planner: BasePlanner):
        self.processes, self.planner = processes, planner
        self.objective = planner.objective

    def hastened(self) -> "_Agreed":
        return _Agreed(self.processes, self.planner.hastened())

    def __call__(
        self, graph: Graph, costs: Costs, budget: Budget, start: Plan | None = None
    ) -> Plan:
        return self.processes.agree(lambda: self.planner(graph, costs, budget, start))
