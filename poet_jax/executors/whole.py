"""The step as one `jax.jit`, where the budget covers what that needs."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from poet_jax import heap, interrupts, progress
from poet_jax.compile import compile_nodes, compiler_options, on_cpu
from poet_jax.executors.buffers import (
    GROWTH_BYTES,
    NOTICED_BYTES,
    PATIENCE_SECONDS,
    SLACK_BYTES,
    Workspace,
)
from poet_jax.executors.host import Run
from poet_jax.fuse import Stretch, replace, scratch_bytes
from poet_jax.graph import Graph
from poet_jax.paged import copied, drop_copies
from poet_jax.price import Costs
from poet_jax.program import Program

# XLA computes some values again inside a loop that it would have to keep otherwise, and
# so needs less than the guess, at times by 1.5. Compiling a whole step takes as long as
# `jax.jit` does; what needs more than this many times the budget is not tried.
HOPE = 2.0
SMALL_BYTES = 4096
_NO_TRACE = get_opaque_trace_state()


def is_tracing() -> bool:
    """Whether this thread is in the midst of another function's trace."""
    return get_opaque_trace_state() != _NO_TRACE


class NotPlanned(Exception):
    """A call has other shapes, structure or static arguments than were planned."""


class WholeStep:
    """`jax.jit(fun)` for calls with the shapes, structure and static arguments of one.

    It costs nothing over `jax.jit`, whose own cache says whether a call is like that
    one; what is not makes jit trace, which raises NotPlanned before anything runs.

    Args:
      keep_all: the program of every node once, of `fun` traced on `args` and `kwargs`.
      costs: of its graph.
      memory_bytes: that the process may rise to while it runs; see `_make_room`.
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
        memory_bytes: float,
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
        new_bytes = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        self._block_bytes = analysis.temp_size_in_bytes
        step = step.with_need(
            step.live_bytes
            + new_bytes
            + self._block_bytes
            + scratch_bytes(compile_nodes(keep_all.graph))
        )
        self.program = replace(keep_all, [step])
        self.needed_bytes = int(step.needed_bytes)
        large = self._block_bytes >= NOTICED_BYTES
        self._is_noticed = large and on_cpu() and heap.returns_pages()
        self._needs_care = self._is_noticed or bool(self._options)
        # New results beside the workspace would take its place.
        most_bytes = heap.MAPPED_BYTES if new_bytes <= SLACK_BYTES else 0
        self._lies_in_heap = heap.is_shared() and self._block_bytes <= most_bytes
        self._live_bytes = step.live_bytes
        self._room_bytes = memory_bytes - step.live_bytes - new_bytes
        self._base_bytes: int | None = None
        self._workspace: Workspace | None = None
        self._place = _place_of_small_result(keep_all.graph)
        self._spends = bool(keep_all.graph.donated)
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
        # A function that is called here takes a microsecond, as the processor's caches
        # are full of what the last step worked on: a quarter of a percent of the MLP's.
        # Dispatch is asynchronous, but this step must not begin beside the last one.
        try:
            if (awaited := self._awaited) is not None:
                awaited.block_until_ready()
        except RuntimeError:
            self._wait()
        if copied:  # memory that this step does not know of
            drop_copies()
        returning = self._needs_care and self._take_care()
        self._start_seconds = time.perf_counter()
        if returning or self._place is None:
            result = self._run_to_its_end(args, kwargs, returning)
            self._run = self._awaited = None
            return result
        small = result = self._jitted(*args, **kwargs)
        self._run = self._awaited = None
        for key in self._place:
            small = small[key]
        if not isinstance(small, Tracer):  # inside another function's trace
            self._awaited = small
        return result

    def _run_to_its_end(self, args: tuple, kwargs: dict, returning: bool) -> Any:
        with contextlib.ExitStack() as stack:
            if self._spends:  # a Ctrl-C would find the old state gone
                stack.enter_context(interrupts.held_back())
            if returning:
                stack.enter_context(heap.keeping_freed_blocks())
            return jax.block_until_ready(self._jitted(*args, **kwargs))

    def _take_care(self) -> bool:
        """See to what only some steps need; True if the block has to be returned to the
        system, as of `_make_room`."""
        # What has options of its own cannot be part of what another jit compiles.
        if self._options and is_tracing():
            self._check_allowed()
        return self._is_noticed and self._make_room()

    @property
    def last_run(self) -> Run:
        """Of the latest call; its seconds end when they are first asked for."""
        if self._run is None:
            self._wait()
            seconds = time.perf_counter() - self._start_seconds
            self._run = Run(seconds, self.needed_bytes, 0, 0, 0)
        return self._run

    def _make_room(self) -> bool:
        """See that this step stays within the budget, whatever the heap has kept; True
        if its block has to be returned to the system as soon as XLA frees it.

        glibc keeps a freed block of up to 32 MiB for the next one of that size. But
        that one may come before XLA has freed the block, or after a small one has taken
        of its place, and then comes on top: a step with 28 MiB was seen to keep five.
        """
        if self._base_bytes is None:
            self._release()
        block_bytes, is_shared = self._block_bytes, heap.is_shared()
        deadline = time.perf_counter() + PATIENCE_SECONDS / 4
        while True:
            spare_bytes = self._room_bytes + GROWTH_BYTES - self._kept_bytes()
            # One more may be kept, by a heap that cannot be told to return it.
            if block_bytes <= (spare_bytes if is_shared else spare_bytes / 2):
                return False
            if self._lies_in_heap or (not is_shared and block_bytes <= spare_bytes):
                break
            if time.perf_counter() > deadline:
                self._release()
                break
            time.sleep(1e-5)
        if self._lies_in_heap:
            with interrupts.held_back(), heap.keeping_freed_blocks():
                self._lend_workspace()
        return not is_shared

    def _lend_workspace(self) -> None:
        """Let XLA find a block of the heap that no other takes in the meantime."""
        workspace, self._workspace = self._workspace, None  # not another thread's
        if workspace is None:
            workspace = Workspace(self._block_bytes)
        else:
            workspace.take()
        workspace.keep(self._block_bytes)
        self._look_at_others(workspace.held * heap.PAGE_BYTES)
        workspace.give(self._block_bytes)
        self._workspace = workspace

    def _look_at_others(self, workspace_bytes: int) -> None:
        """If there is no room for another block beside what the process holds, but for
        the workspace, return what is free of that, and allow the rest."""
        most_bytes = self._room_bytes - self._block_bytes + workspace_bytes
        if self._kept_bytes() <= most_bytes:
            return
        heap.release()
        # XLA may have its last block still, which must not pass for somebody else's.
        suspect_bytes = self._block_bytes / 2 + workspace_bytes
        for seconds in (heap.SETTLING_SECONDS, PATIENCE_SECONDS):
            if self._kept_bytes() >= suspect_bytes:
                time.sleep(seconds)
                heap.release()
        if self._kept_bytes() >= suspect_bytes:
            self._base_bytes = None  # the next step looks at what it is then
        else:
            self._base_bytes = heap.held_bytes()[0] - self._live_bytes - workspace_bytes

    def _kept_bytes(self) -> int:
        """What the process holds besides arguments and the least that it held so."""
        held_bytes = heap.held_bytes()[0] - self._live_bytes
        self._base_bytes = min(held_bytes, self._base_bytes or held_bytes)
        return held_bytes - self._base_bytes

    def _release(self) -> None:
        heap.release()
        self._base_bytes = heap.held_bytes()[0] - self._live_bytes

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
    step = WholeStep(fun, keep_all, costs, memory_bytes, args, kwargs, **jit_options)
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
