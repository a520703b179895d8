"""Walk a program's stages and transfers, on arrays or tracers."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from poet_jax.core.plan import Free, PageIn, PageOut
from poet_jax.core.program import Instruction, Program, Run, walk
from poet_jax.core.references import held_by
from poet_jax.emit import accelerator, cpu
from poet_jax.stores import library
from poet_jax.stores.paged import block_bytes

ACCELERATORS = ("cuda", "gpu", "rocm", "tpu")


def emit(
    program: Program, backend: str | None = None, trace: bool = False
) -> "Emitted":
    """The program as a JAX function of flat inputs, to be compiled for `backend`.

    It can be given to `jax.jit`, `jax.export` and a sharded `jit`; see `Emitted` for
    its inputs and results. Each `Run` is a stage that the compiler keeps apart; `cut`
    makes them larger.

    Args:
      backend: "cpu", "gpu" or "tpu"; by default the graph's platform, or JAX's own.
      trace: whether stages are to be timed, on the CPU.

    Raises ValueError for another backend, and for a program of an instance.
    """
    backend = backend or program.graph.platform or jax.default_backend()
    if backend not in ("cpu", *ACCELERATORS):
        raise ValueError(
            f"A program cannot be emitted for backend={backend!r}. The backends are "
            "'cpu', 'gpu' and 'tpu'. Leave it out for this process's own."
        )
    if any(not node.equations for node in program.graph.nodes):
        raise ValueError(
            "A program of an instance cannot be emitted. Only graphs from trace(fun, "
            "*args) hold equations that can run. Use simulate(program, costs)."
        )
    return Emitted(program, backend, trace)


@dataclasses.dataclass(frozen=True, eq=False)
class Emitted:
    """A program as a function of flat inputs; made by `emit`.

    Inputs are the graph's arguments in flat order, without those on storage, and
    mutable references where the traced function had them; then the
    copies in RAM of `graph.resident`, in order; then, if the program has `pages`,
    uint32 [P, 4], where they lie. Results are the outputs in flat order, without those
    on storage; then what the next step finds in place of the copies; then, if there
    are pages or stages are timed, uint32 [6 T + 2 (S + 1)]: records of transfers,
    [T, 6], and stamps, [S + 1, 2], the last of them of the end of all stages.
    `stores.library` says what a place, a record and a stamp hold.

    Attributes:
      program, backend: as given to `emit`.
      is_traced: whether stages are timed.
    """

    program: Program
    backend: str
    is_traced: bool = False

    @functools.cached_property
    def inputs(self) -> tuple[int, ...]:
        """Values that come in, but for pages."""
        graph = self.program.graph
        here = (v for v in graph.arguments if v not in graph.stored)
        return (*here, *sorted(graph.resident))

    @functools.cached_property
    def outputs(self) -> tuple[int, ...]:
        """Values that go out."""
        graph = self.program.graph
        landed = {place.leaf for place in graph.landing.values()}
        here = (
            v
            for leaf, v in enumerate(graph.results)
            if leaf not in landed and v not in graph.stored
        )
        return (*here, *(graph.successors[v] for v in sorted(graph.resident)))

    @functools.cached_property
    def pages(self) -> dict[int, range]:
        """Rows of the places of each value that is paged on the CPU, one a block."""
        rows: dict[int, range] = {}
        if self.backend == "cpu":
            start = 0
            for x in self.program.instructions:
                if isinstance(x, PageIn | PageOut) and x.value not in rows:
                    stop = start + len(self.blocks(x.value) or (0,))
                    rows[x.value] = range(start, stop)
                    start = stop
        return rows

    @functools.cached_property
    def host_rows(self) -> dict[Any, dict[int, int]]:
        """Row of each value that is paged on an accelerator, by its shape and type:
        values of one kind have an array in the host's memory together."""
        rows: dict[Any, dict[int, int]] = {}
        for x in self.transfers:
            of_kind = rows.setdefault(self.program.graph.values[x.value].kind, {})
            of_kind.setdefault(x.value, len(of_kind))
        return rows

    def blocks(self, value: int) -> tuple[int, ...] | None:
        """Bytes of the blocks of an array on storage, if it is paged as a whole."""
        graph = self.program.graph
        place = graph.stored.get(value) or graph.landing.get(value)
        if place is None or place.block is not None:
            return None
        return block_bytes(*graph.values[value].kind)

    @functools.cached_property
    def transfers(self) -> tuple[PageIn | PageOut, ...]:
        """[T] those whose records go out; one for each of their blocks."""
        instructions = self.program.instructions
        return tuple(x for x in instructions if isinstance(x, PageIn | PageOut))

    @functools.cached_property
    def timed(self) -> tuple[int, ...]:
        """[S] rows of the instructions that begin with a stamp: stages that wait for
        pages, or all if that was asked for, and frees that wait for pages."""
        if self.backend != "cpu":
            return ()
        arriving: set[int] = set()
        found: list[int] = []
        for row, moment in enumerate(walk(self.program)):
            match moment.instruction:
                case PageIn(value):
                    arriving.add(value)
                case Free(value) if moment.waits:
                    found.append(row)
                case Run() as x:
                    if self.is_traced or not arriving.isdisjoint(x.reads):
                        found.append(row)
                    arriving.difference_update(x.reads)
        return tuple(found)

    @property
    def records(self) -> bool:
        """Whether records and stamps go out."""
        return bool(self.pages) or bool(self.timed)

    def __call__(self, *inputs: Any) -> list[Any]:
        return _Walk(self, inputs).results()


class _Walk:
    """One evaluation of a program: what is known so far, and what was last made."""

    def __init__(self, emitted: Emitted, inputs: Sequence[Any]):
        self.emitted, self.graph = emitted, emitted.program.graph
        self.target: Any = cpu if emitted.backend == "cpu" else accelerator
        count = len(emitted.inputs)
        self.given: dict[int, Any] = dict(self.graph.constants)
        self.given.update(zip(emitted.inputs, inputs[:count], strict=True))
        self.known = {v: held_by(x) for v, x in self.given.items()}
        # Pieces that lie in their array, and those that will.
        stacks = self.graph.stacks.values()
        given = {v for stack in stacks if stack.over is None for v in stack.values}
        self.lying = {v: seat for v, seat in self.graph.seats.items() if v in given}
        self.heirs = {seat: v for v, seat in self.graph.seats.items() if v not in given}
        self.places: Any = inputs[count] if emitted.pages else None
        self.last: list[Any] = []  # what the next stage is to wait for
        self.paged: dict[int, Any] = {}  # records of pages on storage
        # Pages in the host's memory, those of one kind in one array.
        self.buffers: dict[Any, jax.Array] = {}
        # What transfers began after, and read until they are done. If XLA gave its
        # memory to what comes next, that would wait: so a later clock needs it.
        self.leaving: dict[int, jax.Array] = {}
        self.arriving: dict[int, jax.Array] = {}
        self.records: list[jax.Array] = []
        self.stamps: list[jax.Array] = []

    def results(self) -> list[Any]:
        emitted = self.emitted
        timed = set(emitted.timed)
        for row, moment in enumerate(walk(emitted.program)):
            x = moment.instruction
            if row in timed:
                self.stamp(x)
            match x:
                case Run():
                    self.run(x)
                case PageOut(value):
                    self.page_out(value)
                case PageIn(value):
                    self.page_in(value)
                case Free(value) if value in self.lying:
                    del self.lying[value]
                    self.settle()
                case Free(value) if moment.waits and value in self.paged:
                    # Memory is the page's until it is written, and somebody has to
                    # say so.
                    self.last += [self.known[value], self.paged[value]]
        for v, stack in self.graph.stacks.items():
            if stack.over is not None:
                self.known[v] = self.known[stack.over]
        self.graph.write_references(self.given, self.known)
        results = [self.known[v] for v in emitted.outputs]
        if emitted.records:
            # One array, made after the last stamp: records that are joined earlier are
            # memory for what comes next, which would wait for their transfers.
            self.stamp()
            measured = [x.reshape(-1) for x in (*self.records, *self.stamps)]
            results.append(jnp.concatenate(measured))
        return results

    def run(self, stage: Run) -> None:
        seats = {v: self.lying[v] for v in stage.reads if v in self.lying}
        read = [v for v in stage.reads if v not in seats]
        arrays = list(dict.fromkeys(array for array, _ in seats.values()))

        def body(operands: Sequence[Any]) -> list[Any]:
            known = dict(zip((*read, *arrays), operands, strict=True))
            for v, (array, number) in seats.items():
                cut = self.graph.stacks[array].cut
                known[v] = cut.piece(known[array], number)
            for number in stage.nodes:
                node = self.graph.nodes[number]
                reads = [known[v] for v in node.reads]
                results = self.target.evaluate(node, reads)
                known.update(zip(node.writes, results, strict=True))
            return [self.placed(v, known[v]) for v in stage.writes]

        operands = [self.known[v] for v in (*read, *arrays)]
        results, self.last = self.target.apart(body, operands, self.last)
        made = zip(stage.writes, results, strict=True)
        self.known.update((v, x) for v, x in made if v not in self.lying)
        for old, _ in stage.over:
            self.lying.pop(old, None)
        self.settle()

    def placed(self, value: int, array: Any) -> Any:
        """`array` with the sharding that the plan counts on."""
        sharding = self.graph.values[value].sharding
        if sharding is None:
            return array
        if AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types:
            return array  # its type says so
        return jax.lax.with_sharding_constraint(array, sharding)

    def settle(self) -> None:
        """Write pieces to their places in arrays where nothing lies any more, before
        anything else happens."""
        taken = set(self.lying.values())
        seats = [
            seat
            for seat, v in self.heirs.items()
            if v in self.known and seat not in taken
        ]
        if not seats:
            return
        arrays = list(dict.fromkeys(array for array, _ in seats))

        def body(operands: Sequence[Any]) -> list[Any]:
            known = dict(zip((*arrays, *seats), operands, strict=True))
            for array, number in seats:
                cut = self.graph.stacks[array].cut
                known[array] = cut.write(known[array], number, known[array, number])
            return [known[array] for array in arrays]

        pieces = [self.known.pop(self.heirs[seat]) for seat in seats]
        operands = [*(self.known[v] for v in arrays), *pieces]
        results, self.last = self.target.apart(body, operands, self.last)
        self.known.update(zip(arrays, results, strict=True))
        self.lying.update((self.heirs[seat], seat) for seat in seats)

    def page_out(self, value: int) -> None:
        array = self.known[value]
        if self.emitted.backend != "cpu":
            kind = self.graph.values[value].kind
            pages = self.emitted.host_rows[kind]
            if kind not in self.buffers:
                self.buffers[kind] = accelerator.page_buffer(len(pages), kind)
            self.buffers[kind] = accelerator.page_out(
                self.buffers[kind], pages[value], array, self.last
            )
            return
        self.leaving[value] = after = self.after()
        record = library.page_out(array, after, self.places, **self.page(value))
        self.paged[value] = record
        self.records.append(record)

    def page_in(self, value: int) -> None:
        kind = self.graph.values[value].kind
        if self.emitted.backend != "cpu":
            row = self.emitted.host_rows[kind][value]
            page = accelerator.page_in(self.buffers[kind], row, self.last)
            self.known[value] = page
            return
        written = self.paged.get(value)
        self.arriving[value] = after = self.after()
        self.known[value], record = library.page_in(
            kind, after, written, self.places, **self.page(value)
        )
        self.records.append(record)
        # The next stage begins after the transfer, of two that could begin at once.
        self.last.append(library.clock(after))

    def page(self, value: int) -> dict[str, Any]:
        return {
            "row": self.emitted.pages[value].start,
            "name": self.graph.values[value].name,
            "blocks": self.emitted.blocks(value),
        }

    def after(self) -> jax.Array:
        """A number that is there when what goes before is done, and stands for it."""
        if len(self.last) != 1:
            self.last = [cpu.token_of(self.last)]
        return self.last[0]

    def stamp(self, instruction: Instruction | None = None) -> None:
        """The time before what may wait for transfers, or at the end."""
        match instruction:
            case Run():
                begun = [self.arriving.pop(v, None) for v in instruction.reads]
            case Free(value):
                begun = [self.leaving.pop(value, None)]
            case _:
                begun = [*self.leaving.values()]
        now = library.clock(self.after(), *(x for x in begun if x is not None))
        self.stamps.append(now)
        self.last.append(now)  # what follows may write over what this has read
