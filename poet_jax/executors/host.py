"""The interpreter: run a program's instructions one by one, within the budget."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from poet_jax import heap, interrupts
from poet_jax.compile import (
    Executable,
    Kind,
    Unit,
    compile_units,
    is_plain,
    is_recycled,
    nbytes_of,
    on_cpu,
)
from poet_jax.errors import PageStoreError, PlanInvalid
from poet_jax.executors.buffers import Pool, is_row_major, view
from poet_jax.fuse import fuse
from poet_jax.graph import Value
from poet_jax.in_place import node_workspaces
from poet_jax.machine import default_store
from poet_jax.paged import PagedArray, drop_copies
from poet_jax.plan import Compute, Free, PageIn, PageOut
from poet_jax.price import Costs
from poet_jax.program import Fused, Program
from poet_jax.simulate import Usage, simulate
from poet_jax.store import PageStore, in_host_memory
from poet_jax.units import format_bytes, format_count, format_seconds

logger = logging.getLogger("poet_jax")


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run of a program measured.

    Attributes:
      seconds: wall-clock time of the run.
      peak_bytes: most RAM of array data and workspace at any instant, counted as arrays
        came and went.
      bytes_paged_in, bytes_paged_out: moved from and to the store.
      recomputed: nodes that ran again.
      storage_seconds: that reading and writing took.
      waiting_seconds: of these, those for which computing stood still.
      start_seconds, stop_seconds: [I] of each instruction on its lane; None for a step
        that ran as one `jax.jit`.
      live_bytes: [I] RAM while each instruction ran, or None.
    """

    seconds: float
    peak_bytes: int
    bytes_paged_in: int
    bytes_paged_out: int
    recomputed: int
    storage_seconds: float = 0.0
    waiting_seconds: float = 0.0
    start_seconds: tuple[float, ...] | None = dataclasses.field(
        default=None, repr=False
    )
    stop_seconds: tuple[float, ...] | None = dataclasses.field(default=None, repr=False)
    live_bytes: tuple[int, ...] | None = dataclasses.field(default=None, repr=False)

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
    """Runs programs on JAX's default device, paging through `store`.

    `executor(program)` compiles the nodes and gives a `Runner`. On the CPU, large
    results are written into freed arrays of their shape (`buffers.Pool`); if the next
    step is long in coming, a runner holds their addresses, not their memory.

    Args:
      store: where pages go; by default a `FileStore` in the system's folder for
        temporary files, or host memory if arrays are on an accelerator.
      fuse: whether consecutive nodes become one executable where the budget allows it.
        Results of any two plans are equal to the bit only if not.
    """

    def __init__(self, store: PageStore | None = None, fuse: bool = True):
        self.store = store if store is not None else default_store()
        self.fuses = fuse

    def prepare(self, program: Program, costs: Costs, memory_bytes: float) -> Program:
        """What to run for `program`, so that it can be simulated before."""
        return fuse(program, costs, memory_bytes) if self.fuses else program

    def __call__(self, program: Program) -> "Runner":
        if any(not node.equations for node in program.graph.nodes):
            raise PlanInvalid(
                "A program of an instance was given to an executor. Only graphs from "
                "trace(fun, *args) hold equations that can run. Use simulate(program, "
                "costs) for an instance."
            )
        return Runner(program, self.store)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A computing instruction, ready to run.

    Attributes:
      unit, executable: what it runs.
      workspace_bytes: while it runs.
      new_bytes: of results that replace no operand, and of the workspace.
      more_bytes: of results for which the pool has no buffers.
    """

    unit: Unit
    executable: Executable
    workspace_bytes: int
    new_bytes: int
    more_bytes: int


class Runner:
    """A program ready to run: `runner(*args)` is the function's result for them.

    A donated argument's array is deleted as soon as its `Free` is reached. `last_run`
    is the measured `Run` of the latest call.
    """

    def __init__(self, program: Program, store: PageStore):
        self.program = program
        self.store = store
        self.last_run: Run | None = None
        self.calls = self._calls()
        self.nbytes = [value.nbytes for value in program.graph.values]
        self.recycled = [is_recycled(value.kind) for value in program.graph.values]
        self.on_cpu = on_cpu()
        # Whether pages stay JAX's arrays on their way.
        self.moves_arrays = not self.on_cpu and hasattr(store, "write_array")
        self._pool: Pool | None = None
        _runners.add(self)
        usage = self._bytes_used()
        self._peak_bytes = usage.peak_bytes
        self._room_bytes = usage.store_bytes - program.graph.stored_bytes

    def _calls(self) -> dict[int, _Call]:
        """The computing instructions by their place in the program."""
        graph = self.program.graph
        units = self.program.units
        calls = {}
        executables = compile_units(graph, list(units.values()))
        for (row, unit), executable in zip(units.items(), executables, strict=True):
            instruction = self.program.instructions[row]
            if isinstance(instruction, Fused):
                workspace = instruction.workspace_bytes
            else:
                (workspace,) = node_workspaces(graph, unit.nodes)
            written = sum(graph.values[v].nbytes for v in unit.writes)
            replaced = sum(graph.values[old].nbytes for old, _ in unit.replaces)
            new = written - replaced + workspace
            more = new - sum(map(nbytes_of, executable.destinations)) - workspace
            calls[row] = _Call(unit, executable, workspace, new, more)
        return calls

    def _taken(self) -> Iterator[tuple[int, Kind]]:
        """(instruction, kind) of each buffer that the program writes into."""
        for row, instruction in enumerate(self.program.instructions):
            if row in self.calls:
                for kind in self.calls[row].executable.destinations:
                    yield row, kind
            elif isinstance(instruction, PageIn):
                yield row, self.program.graph.values[instruction.value].kind

    def _bytes_used(self) -> Usage:
        """What the simulator says, of which bytes do not depend on what things cost."""
        graph = self.program.graph
        none = np.zeros(max(len(graph.nodes), len(graph.values)))
        workspaces = np.zeros(len(graph.nodes), np.int64)
        for row, call in self.calls.items():
            if isinstance(self.program.instructions[row], Compute):
                workspaces[call.unit.nodes[0]] = call.workspace_bytes
        nbytes = np.array(self.nbytes, np.int64)
        costs = Costs(none, none, workspaces, nbytes, none, none, none, none)
        return simulate(self.program, costs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = self.program.graph
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != graph.in_tree:
            raise PlanInvalid(
                f"A program for arguments {graph.in_tree} was run on {tree}. A program "
                "runs on the structure that it was traced for. Trace the function "
                "again."
            )
        outputs = self.run(
            [
                leaf if type(leaf) in READY_TYPES else jax.numpy.asarray(leaf)
                for leaf in leaves
            ]
        )
        return jax.tree.unflatten(graph.out_tree, outputs)

    def release(self) -> None:
        """Return the pages of idle buffers, but for those of a call that is running."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.release()
            self._pool = pool

    def run(self, leaves: list[Any]) -> list[Any]:
        """Flat arguments to flat outputs, each a jax.Array or a PagedArray."""
        start = time.perf_counter()
        for value, leaf in zip(self.program.graph.arguments, leaves, strict=True):
            if isinstance(leaf, jax.Array | PagedArray) and leaf.is_deleted():
                raise RuntimeError(
                    f"{self.program.graph.values[value].name} was given as an array "
                    f"of shape {leaf.shape} that has been deleted. An argument that "
                    "was donated to an earlier call is gone. Use what that call "
                    "returned."
                )
        reserve = getattr(self.store, "reserve", None)
        if reserve is not None and self._room_bytes:
            reserve(self._room_bytes)
        pool, self._pool = self._pool, None  # a second thread gets a pool of its own
        if pool is None:
            workspaces = {row: x.workspace_bytes for row, x in self.calls.items()}
            pool = Pool(self._taken(), self._peak_bytes, self.on_cpu, workspaces)
        spends = self.program.graph.donated - self.program.graph.stored.keys()
        with contextlib.ExitStack() as held_back, heap.keeping_freed_blocks():
            if spends:
                held_back.enter_context(interrupts.held_back())
            step = _Step(self, leaves, pool, start)
            try:
                for instruction in self.program.instructions:
                    step.do(instruction)
                step.settle()
                if self.program.graph.donated:  # what is on storage goes from here on
                    held_back.enter_context(interrupts.held_back())
                outputs = step.finish()
            finally:
                step.close()
            pool.end()
        self._pool = pool
        self.last_run = Run(
            seconds=time.perf_counter() - start,
            peak_bytes=max(step.most_bytes, default=step.live_bytes),
            bytes_paged_in=step.bytes_paged_in,
            bytes_paged_out=step.bytes_paged_out,
            recomputed=self.program.recomputed,
            storage_seconds=step.storage_seconds,
            waiting_seconds=step.waiting_seconds,
            start_seconds=tuple(step.start_seconds),
            stop_seconds=tuple(step.stop_seconds),
            live_bytes=tuple(step.most_bytes),
        )
        return outputs


_runners: "weakref.WeakSet[Runner]" = weakref.WeakSet()


def release() -> None:
    """Return to the system what steps keep for their next call, and the heap's rest.

    A step keeps its idle buffers from one call to the next, within its budget, and the
    system may take them if it runs short of memory while that is long in coming. This
    gives them back at once; the next call takes them anew. Copies of `PagedArray`s in
    RAM go, too.
    """
    drop_copies()
    for runner in list(_runners):
        runner.release()
    heap.release()


# What most arguments are; asking for a type is ten times as fast as isinstance.
READY_TYPES = {type(jax.numpy.zeros(())), PagedArray}
_runs = itertools.count()


class _Step:
    """The state of one run: arrays in RAM, transfers under way, and the ledger."""

    def __init__(self, runner: Runner, leaves: list[Any], pool: Pool, since: float):
        graph = runner.program.graph
        self.runner, self.graph, self.store = runner, graph, runner.store
        self.number = next(_runs)
        self.leaves = leaves
        self.arrays: dict[int, jax.Array] = dict(graph.constants)
        for value, leaf in zip(graph.arguments, leaves, strict=True):
            if value not in graph.stored:
                self.arrays[value] = leaf
        self.landed: dict[int, PagedArray] = {}  # by flat output
        for place in graph.landing.values():
            whole = graph.values[graph.outputs[place.leaf]]
            if place.leaf not in self.landed:
                self.landed[place.leaf] = PagedArray(self.store, *whole.kind)
        self.waiting: set[Any] = set()  # keys of values in the store
        self.refused: set[int] = set()  # values that the store did not take
        self.is_spent = False  # whether a donated array in RAM is gone
        self.is_done = False
        # One array may be several arguments; it goes when the last of them is freed.
        self.holders = Counter(map(id, self.arrays.values()))
        for value in graph.resident:
            place = graph.stored[value]
            copy = leaves[place.leaf].take_copy(place.block)
            if copy is not None:
                self.arrays[value] = copy
        drop_copies()  # those of other steps are memory that this plan does not know of
        self.loading: dict[int, concurrent.futures.Future] = {}
        self.saving: dict[int, concurrent.futures.Future] = {}
        self.storage = concurrent.futures.ThreadPoolExecutor(1, "poet_jax-storage")
        # Pages are read and written beside JAX, which would wait.
        jax.block_until_ready(list(self.arrays.values()))
        self.live_bytes = sum(runner.nbytes[v] for v in self.arrays)
        rows = len(runner.program.instructions)
        self.since = since
        self.start_seconds, self.stop_seconds = [0.0] * rows, [0.0] * rows
        self.most_bytes = [0] * rows  # RAM while each instruction runs
        self.bytes_paged_in = self.bytes_paged_out = 0
        self.storage_seconds = self.waiting_seconds = 0.0
        self.row = -1
        self.pool = pool
        self.pool.begin(self.live_bytes)
        for value in graph.resident - self.arrays.keys():
            self.arrays[value] = self.fetch(value, self.page(graph.values[value]))

    def clock(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.since

    def do(self, instruction: Any) -> None:
        self.row += 1
        self.most_bytes[self.row] = self.live_bytes
        match instruction:
            case Compute() | Fused():
                self.compute(self.runner.calls[self.row])
            case PageOut(value):
                self.saving[value] = self.storage.submit(
                    self.save, self.row, value, self.ready(value)
                )
            case PageIn(value) if value in self.refused:
                pass
            case PageIn(value):
                last = self.runner.program.last_page_in[value] == self.row
                array = self.page(self.graph.values[value])
                self.loading[value] = self.storage.submit(
                    self.load, self.row, value, array, last
                )
            case Free(value):
                self.start_seconds[self.row] = self.clock()
                if self.row not in self.runner.program.done_frees:
                    self.free(value)
                self.stop_seconds[self.row] = self.clock()

    def compute(self, call: _Call) -> None:
        unit, executable = call.unit, call.executable
        operands = [self.ready(v) for v in unit.reads]
        for old, _ in unit.replaces:
            self.saved(old)
        self.start_seconds[self.row] = self.clock()
        into = self.pool.take(
            executable.destinations,
            self.row,
            self.live_bytes,
            call.more_bytes,
            call.workspace_bytes,
        )
        for old, _ in unit.replaces:
            if not self.let_go(self.arrays.pop(old)):
                number = unit.reads.index(old)
                operands[number] = jax.numpy.copy(operands[number])
        try:
            results = executable(*operands, into=into)
        except Exception as error:
            config: Any = jax.config
            if config.jax_debug_nans or config.jax_debug_infs:
                names = [self.graph.nodes[n].name for n in unit.nodes]
                raise FloatingPointError(
                    f"JAX was asked to stop at the first NaN or infinity, and "
                    f"{' to '.join(dict.fromkeys((names[0], names[-1])))} made one. "
                    "Which operation it was, jax.jit can say. Run the same function "
                    "under jax.jit, without a budget."
                ) from error
            raise
        # XLA runs ahead otherwise, and allocates the results of later nodes early.
        jax.block_until_ready(results)
        self.stop_seconds[self.row] = self.clock()
        self.arrays.update(zip(unit.writes, results, strict=True))
        self.count(call.new_bytes)
        self.count(-call.workspace_bytes)

    def page(self, value: Value) -> jax.Array | None:
        """What a page is read into; None where the host cannot write to it."""
        array = None
        if self.runner.on_cpu and is_plain(value.dtype):
            (array,) = self.pool.take([value.kind], self.row, self.live_bytes)
        self.count(value.nbytes)
        return array

    def ready(self, value: int) -> jax.Array:
        """The array of a value in RAM, after its page-in if one is under way."""
        if value in self.loading:
            try:
                self.arrays[value] = self.wait(self.loading.pop(value))
            except PageStoreError as error:
                self.warn_or_raise(value, "is read again", error)
                self.arrays[value] = self.fetch(value, None)
        return self.arrays[value]

    def saved(self, value: int) -> None:
        """Wait for the page-out of a value if one is under way."""
        if value in self.saving:
            try:
                self.wait(self.saving.pop(value))
            except PageStoreError as error:
                if value in self.graph.landing:
                    raise
                self.warn_or_raise(value, "stays in RAM", error)
                self.refused.add(value)

    def warn_or_raise(self, value: int, remedy: str, error: PageStoreError) -> None:
        """Raise, unless the caller would be left with neither the old nor the new
        state.

        That is so where donated arrays are gone: there the step tries to go on, even
        beyond its budget.
        """
        if not self.is_spent:
            raise error
        name = self.graph.values[value].name
        logger.warning("%s %s, as donated arrays are gone: %s", name, remedy, error)

    def free(self, value: int) -> None:
        self.saved(value)
        if value in self.refused:
            last = self.runner.program.last_page_in.get(value, -1)
            if last > self.row:
                return
        array = self.ready(value)
        del self.arrays[value]
        self.count(-self.runner.nbytes[value])
        if not self.let_go(array):
            return
        donated = id(array) in self.holders
        if self.runner.recycled[value] and (not donated or is_row_major(array)):
            self.pool.give(array, donated)
        else:
            array.delete()

    def let_go(self, array: jax.Array) -> bool:
        """Whether no other value is the same array, after one value is gone."""
        if id(array) in self.holders:
            self.holders[id(array)] -= 1
            self.is_spent |= not self.holders[id(array)]
            return not self.holders[id(array)]
        return True

    def wait(self, future: concurrent.futures.Future) -> Any:
        """The result of a transfer."""
        start = time.perf_counter()
        try:
            return future.result()
        finally:
            self.waiting_seconds += time.perf_counter() - start

    def save(self, row: int, value: int, array: jax.Array) -> None:
        self.start_seconds[row] = self.clock()
        name = self.graph.values[value].name
        place = self.graph.landing.get(value)
        if place is not None:
            self.landed[place.leaf].write(self.bytes_of(array), place.block, name)
        else:
            self.waiting.add(self.key(value))
            if self.runner.moves_arrays:
                store: Any = self.store
                store.write_array(self.key(value), array, name)
            else:
                self.store.write(self.key(value), self.bytes_of(array), name)
        self.bytes_paged_out += self.runner.nbytes[value]
        self.transferred(row)

    def load(
        self, row: int, value: int, array: jax.Array | None, last: bool
    ) -> jax.Array:
        self.start_seconds[row] = self.clock()
        array = self.fetch(value, array, last)
        self.transferred(row)
        return array

    def fetch(
        self, value: int, array: jax.Array | None, last: bool = False
    ) -> jax.Array:
        """A value from storage, read into `array` unless the host cannot write
        there."""
        description = self.graph.values[value]
        is_own = value not in self.graph.stored and value not in self.graph.landing
        if is_own and self.runner.moves_arrays:
            store: Any = self.store
            result = store.read_array(self.key(value), description.name)
        elif array is not None:
            self.read(value, view(array))
            result = array
        else:
            data = np.empty(description.nbytes, np.uint8)
            self.read(value, data)
            host = data.view(description.dtype).reshape(description.shape)
            result = jax.block_until_ready(jax.device_put(host))
        if is_own and last:
            self.store.delete(self.key(value))
            self.waiting.remove(self.key(value))
        self.bytes_paged_in += description.nbytes
        return result

    def read(self, value: int, data: np.ndarray) -> None:
        """Fill `data` with the bytes of a value on storage."""
        name = self.graph.values[value].name
        if value in self.graph.stored:
            place = self.graph.stored[value]
            self.leaves[place.leaf].read(data, place.block, name)
        elif value in self.graph.landing:
            place = self.graph.landing[value]
            self.landed[place.leaf].read(data, place.block, name)
        else:
            self.store.read(self.key(value), data, name)

    def transferred(self, row: int) -> None:
        """A transfer is done: the storage lane is free."""
        self.stop_seconds[row] = self.clock()
        self.storage_seconds += self.stop_seconds[row] - self.start_seconds[row]

    def key(self, value: int) -> tuple[int, int]:
        """Of a value in the store, which other runs and arrays may share."""
        return self.number, value

    def bytes_of(self, array: jax.Array) -> np.ndarray:
        """[nbytes] for the store; NumPy's own view would keep a buffer from reuse."""
        if self.runner.on_cpu and is_plain(array.dtype) and is_row_major(array):
            return view(array)
        if not self.runner.on_cpu:
            array = in_host_memory(array)
        return np.asarray(array).reshape(-1).view(np.uint8)

    def count(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        most = self.most_bytes[self.row]
        self.most_bytes[self.row] = max(most, self.live_bytes)

    def settle(self) -> None:
        """Wait for what is under way."""
        for value in list(self.loading):
            self.ready(value)
        for value in list(self.saving):
            self.saved(value)

    def finish(self) -> list[Any]:
        """The flat outputs, in RAM or on storage.

        From here on the step is done, and donated arguments on storage go.
        """
        self.is_done = True
        graph = self.graph
        outputs = [
            self.landed[leaf]
            if leaf in self.landed
            else self.leaves[graph.stored[value].leaf]
            if value in graph.stored
            else self.arrays[value]
            for leaf, value in enumerate(graph.outputs)
        ]
        for value in graph.resident:
            new = graph.successors[value]
            place = graph.landing.get(new) or graph.stored[value]
            holder = self.landed if new in graph.landing else self.leaves
            holder[place.leaf].keep_copy(place.block, self.arrays[new])
        kept = set(map(id, outputs))
        for value in graph.donated.intersection(graph.stored):
            paged = self.leaves[graph.stored[value].leaf]
            if id(paged) not in kept:
                paged.delete()
        return outputs

    def close(self) -> None:
        """Stop the storage thread; after an error nothing of the step stays in the
        store."""
        self.storage.shutdown(wait=True, cancel_futures=True)
        for key in self.waiting:
            with contextlib.suppress(KeyError):  # it was never written
                self.store.delete(key)
        if not self.is_done:
            for paged in self.landed.values():
                paged.delete()
