"""The step as one `jax.jit`, where the budget covers what that needs."""

import contextlib
import functools
import operator
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from poet_jax import progress
from poet_jax.compile import compile_nodes, compiler_options
from poet_jax.executors.host import Run
from poet_jax.fuse import Stretch, replace, scratch_bytes
from poet_jax.graph import Graph
from poet_jax.price import Costs
from poet_jax.program import Program

# XLA computes some values again inside a loop that it would have to keep otherwise, and
# so needs less than the guess, at times by 1.5. Compiling a whole step takes as long as
# `jax.jit` does; what needs more than this many times the budget is not tried.
HOPE = 2.0
SMALL_BYTES = 4096
_NO_TRACE = get_opaque_trace_state()


class NotPlanned(Exception):
    """A call has other shapes, structure or static arguments than were planned."""


class WholeStep:
    """`jax.jit(fun)` for calls with the shapes, structure and static arguments of one.

    It costs nothing over `jax.jit`, whose own cache says whether a call is like that
    one; what is not makes jit trace, which raises NotPlanned before anything runs.

    Args:
      keep_all: the program of every node once, of `fun` traced on `args` and `kwargs`.
      costs: of its graph.
      args, kwargs: arrays or shapes.

    Attributes:
      program: all nodes as one instruction.
      needed_bytes: RAM while it runs, arguments and results included.
    """

    def __init__(
        self,
        fun: Callable,
        keep_all: Program,
        costs: Costs,
        args: tuple,
        kwargs: dict[str, Any],
        **jit_options: Any,
    ):
        self._tracing = threading.local()

        @functools.wraps(fun)
        def guarded(*args, **kwargs):
            self._check_allowed()
            return fun(*args, **kwargs)

        self._options = compiler_options(keep_all.graph.nodes)
        self._jitted = jax.jit(guarded, compiler_options=self._options, **jit_options)
        with self.allowed(), progress.line(lambda: "compiling the whole step"):
            compiled = self._jitted.lower(*args, **kwargs).compile()
        step = Stretch.all_of(keep_all, costs)
        analysis = compiled.memory_analysis()
        assert analysis is not None, "this backend does not say what a step needs"
        step = step.with_need(
            step.live_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes
            + scratch_bytes(compile_nodes(keep_all.graph))
        )
        self.program = replace(keep_all, [step])
        self.needed_bytes = int(step.needed_bytes)
        self._place = _place_of_small_result(keep_all.graph)
        self._awaited: jax.Array | None = None
        self._start_seconds = 0.0
        self._run: Run | None = None

    def _check_allowed(self) -> None:
        if not getattr(self._tracing, "allowed", False):
            raise NotPlanned

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Calls from this thread may trace, which jit does again for a new setting."""
        self._tracing.allowed = True
        try:
            yield
        finally:
            self._tracing.allowed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What has options of its own cannot be part of what another jit compiles.
        if self._options and get_opaque_trace_state() != _NO_TRACE:
            self._check_allowed()
        # Dispatch is asynchronous, but this step must not begin beside the last one.
        self._wait()
        self._start_seconds = time.perf_counter()
        result = self._jitted(*args, **kwargs)
        self._run = self._awaited = None
        if self._place is None:
            jax.block_until_ready(result)
        else:
            small: Any = functools.reduce(operator.getitem, self._place, result)
            if not isinstance(small, Tracer):  # inside another function's trace
                self._awaited = small
        return result

    @property
    def last_run(self) -> Run:
        """Of the latest call; its seconds end when they are first asked for."""
        if self._run is None:
            self._wait()
            seconds = time.perf_counter() - self._start_seconds
            self._run = Run(seconds, self.needed_bytes, 0, 0, 0)
        return self._run

    def _wait(self) -> None:
        """Until the latest call has ended. All its results are ready at once."""
        awaited = self._awaited
        if awaited is None or awaited.is_deleted():
            return
        try:
            awaited.block_until_ready()
        except RuntimeError:
            if not awaited.is_deleted():  # another thread may have donated it
                raise


def whole_step(
    fun: Callable,
    keep_all: Program,
    costs: Costs,
    memory_bytes: float,
    args: tuple,
    kwargs: dict[str, Any],
    **jit_options: Any,
) -> WholeStep | None:
    """The step, or None if it needs more than `memory_bytes`; see `WholeStep`."""
    guess = Stretch.all_of(keep_all, costs)
    if not guess.nodes or guess.needed_bytes > HOPE * memory_bytes:
        return None
    step = WholeStep(fun, keep_all, costs, args, kwargs, **jit_options)
    return step if step.needed_bytes <= memory_bytes else None


def _place_of_small_result(graph: Graph) -> tuple[Any, ...] | None:
    """Keys and indices that lead to a small computed output; None if none do.

    An output that is an argument is ready before the step is, and what is held on to is
    small, as the caller may be done with it.
    """
    numbered = jax.tree.unflatten(graph.out_tree, graph.outputs)
    for path, value in jax.tree_util.tree_leaves_with_path(numbered):
        small = graph.values[value].nbytes <= SMALL_BYTES
        if value in graph.producer and small:
            keys = tuple(getattr(x, "idx", getattr(x, "key", None)) for x in path)
            kinds = jax.tree_util.SequenceKey | jax.tree_util.DictKey
            if all(isinstance(x, kinds) for x in path):
                return keys
    return None
