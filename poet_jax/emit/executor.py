"""A program as one compiled step: what happens at a call, and what it measured."""

import contextlib
import dataclasses
import functools
import itertools
import operator
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.core import Tracer
from jax.ref import Ref

from poet_jax.core import progress
from poet_jax.core.graph import Graph
from poet_jax.core.units import format_bytes, format_count, format_seconds
from poet_jax.devices.machine import default_store
from poet_jax.stores import Store
from poet_jax.stores.paged import copied, drop_copies


@dataclasses.dataclass(frozen=True)
class Span:
    """When a stage or a transfer ran, in seconds from the beginning of the step.

    Attributes:
      name: of the stage's nodes, or of the value that was moved.
      lane: "compute" or "storage".
    """

    name: str
    lane: str
    start_seconds: float
    stop_seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """What one call of a step measured.

    Attributes:
      seconds: from the call until its results were there; until `last_run` asked for
        them, if that is later and the step pages nothing.
      peak_bytes: most RAM of array data and workspace, by XLA's own count.
      bytes_paged_in, bytes_paged_out: moved from and to the store.
      recomputed: nodes that ran again.
      storage_seconds: that reading and writing took.
      waiting_seconds: of these, those in which computing waited, for pages to come in
        or for room that was to be free once they were written.
      spans: transfers on the CPU, and stages if the executor traces.
    """

    seconds: float
    peak_bytes: int
    bytes_paged_in: int = 0
    bytes_paged_out: int = 0
    recomputed: int = 0
    storage_seconds: float = 0.0
    waiting_seconds: float = 0.0
    spans: tuple[Span, ...] = dataclasses.field(default=(), repr=False)

    @property
    def hidden_seconds(self) -> float:
        """Storage seconds under which computing went on."""
        return max(0.0, self.storage_seconds - self.waiting_seconds)

    def __str__(self) -> str:
        return (
            f"{format_seconds(self.seconds)}, peak {format_bytes(self.peak_bytes)}, "
            f"{format_bytes(self.bytes_paged_out)} paged out, "
            f"{format_bytes(self.bytes_paged_in)} in, "
            f"{format_count(self.recomputed, 'node')} run again"
        )


class HostExecutor:
    """Compiles programs for JAX's default backend, and pages through `store`.

    Args:
      store: where pages go; by default a `FileStore` in the system's folder for
        temporary files, or the host's memory if arrays are on an accelerator.
      trace: whether `Run.spans` has the times of stages, on the CPU and without
        shardings. It needs the C++ compiler that paging to files needs.

    Raises TypeError for a store that is none.
    """

    def __init__(self, store: Store | None = None, trace: bool = False):
        if not isinstance(store, Store | None):
            raise TypeError(
                f"HostExecutor: store must be a Store, got {store!r}. Use "
                "poet_jax.FileStore(folder) or poet_jax.HostStore()."
            )
        self._store, self.trace = store, trace

    @property
    def store(self) -> Store:
        """Where pages go."""
        if self._store is None:
            self._store = default_store()
        return self._store


class Step:
    """A jitted function, compiled for the arguments that were planned for.

    A call is one of the function. It returns before the step is done, as one of
    `jax.jit` does, but begins when no other step runs, so that no two share the memory.

    Args:
      jitted: what is compiled.
      args, kwargs: its arguments, or shapes of them.
      graph: what is compiled in another form; says what is in RAM from the beginning.
      scratch_bytes: that libraries allocate without XLA's knowledge.
      recomputed: nodes that run again.
      signal: takes of the results the one that tells that the step is done, as
        `signal` finds it; if None, a call waits for all.

    Attributes:
      nbytes: RAM while it runs, by XLA's own count, arguments and results included.
      last_run: what the latest call measured.
    """

    def __init__(
        self,
        jitted: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        graph: Graph,
        *,
        scratch_bytes: int = 0,
        recomputed: int = 0,
        signal: Callable[[Any], Any] | None = None,
    ):
        self._jitted, self._signal = jitted, signal
        # JAX keeps what it compiled; nothing here does, so that jax.clear_caches()
        # frees it.
        self._shapes = jax.tree.map(_shape, (tuple(args), dict(kwargs)))
        lowered = jitted.lower(*args, **kwargs)
        with progress.line(lambda: "compiling"):
            analysis = lowered.compile().memory_analysis()
        assert analysis is not None, "this backend does not say what a step needs"
        new_bytes = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        held_bytes = sum(graph.values[v].nbytes for v in graph.initial)
        self.nbytes = int(
            held_bytes + new_bytes + analysis.temp_size_in_bytes + scratch_bytes
        )
        self._recomputed = recomputed
        self._start, self._seconds = 0.0, 0.0
        self._weakly: weakref.ref[Step] = weakref.ref(self)

    @property
    def compiled(self) -> jax.stages.Compiled:
        """XLA's compiled object, from JAX's cache if it is there."""
        args, kwargs = self._shapes
        return self._jitted.lower(*args, **kwargs).compile()

    def exported(self) -> export.Exported:
        """What was compiled, as `jax.export` gives it."""
        args, kwargs = self._shapes
        return export.export(self._jitted)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if copied:  # memory that this step does not know of
            drop_copies()
        if running:
            wait()
        self._start = time.perf_counter()
        try:
            results = self._jitted(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if "has been deleted" not in str(error):
                raise
            raise RuntimeError(
                "A step was given an array that has been deleted. An argument that "
                "was donated to an earlier call is gone, even if that call failed. Use "
                "what that call returned, or a copy."
            ) from error
        if self._signal is None:
            running.append(Call(self._weakly, lambda: jax.block_until_ready(results)))
            wait()
            jax.block_until_ready(results)  # raises what the step has failed of
            return results
        telling = self._signal(results)
        if not isinstance(telling, Tracer):  # which another function's trace makes
            running.append(Call(self._weakly, telling.block_until_ready))
        return results

    @property
    def last_run(self) -> Run:
        wait()
        return Run(self._seconds, self.nbytes, recomputed=self._recomputed)

    def done(self) -> None:
        """The latest call has ended."""
        self._seconds = time.perf_counter() - self._start


SIGNAL_BYTES = 1024  # results of more are not kept to see when a step is done


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a step, and what blocks until it has ended."""

    step: weakref.ref[Step]
    block: Callable[[], Any]


running: list[Call] = []  # that may not have ended


def signal(graph: Graph) -> Callable[[Any], Any] | None:
    """Takes a small one of the results of a traced function that are computed; None if
    there is none.

    JAX returns an argument that is a result as it is, which tells nothing. In a graph
    it is copied.
    """
    copies = {
        v
        for node in graph.nodes
        for v in node.writes
        if any(e.primitive.name == "copy" for e in node.equations)
    }
    sizes = [
        (graph.values[v].nbytes, leaf)
        for leaf, v in enumerate(graph.results)
        if v in graph.producer and v not in copies
        if graph.values[v].dtype != jax.dtypes.float0  # which NumPy has at once
    ]
    small = [leaf for nbytes, leaf in sorted(sizes) if nbytes <= SIGNAL_BYTES]
    # To flatten sorts every dict, which short steps feel.
    keys = dict(_in_containers(graph.out_tree))
    near = [keys[leaf] for leaf in small if leaf in keys]
    if near:
        return functools.partial(functools.reduce, operator.getitem, min(near, key=len))
    return (lambda results: jax.tree.leaves(results)[small[0]]) if small else None


def _in_containers(tree: Any, leaf: int = 0, keys: tuple = ()) -> Iterator[tuple]:
    """(leaf, keys to it) for what lies in tuples, lists and dicts alone."""
    kind, names = tree.node_data() or (None, ())
    if kind is None:
        yield leaf, keys
    elif kind in (tuple, list, dict):
        each = names if kind is dict else itertools.count()
        for key, child in zip(each, tree.children(), strict=False):
            yield from _in_containers(child, leaf, (*keys, key))
            leaf += child.num_leaves


def wait() -> None:
    """Return when no step runs. What interrupts that leaves `running` as it is."""
    while running:
        try:
            call = running[0]
            try:
                call.block()
                if (step := call.step()) is not None:
                    step.done()
            except (RuntimeError, ValueError):
                pass  # A step that failed says so where its results are used; one
                # whose results were donated since is waited for by what took them.
            running.remove(call)
        except (IndexError, ValueError):
            pass  # another thread was first


def outlast() -> None:
    """Return when no step runs, whatever signals interrupt that meanwhile."""
    while running:
        with contextlib.suppress(BaseException):
            wait()


def _shape(leaf: Any) -> Any:
    """What an argument is compiled for, without its data."""
    if isinstance(leaf, Ref):
        return jax.typeof(leaf)
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if getattr(leaf, "committed", False) else None
        weak_type = bool(getattr(leaf, "weak_type", False))  # no key has one
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type
        )
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def release() -> None:
    """Drop the copies of `PagedArray`s that steps left in RAM for the next call."""
    wait()
    drop_copies()
