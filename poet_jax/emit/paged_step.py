"""A step that moves pages or has state on storage: what happens at a call."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from poet_jax.core.graph import Graph
from poet_jax.core.plan import Free, PageIn, PageOut
from poet_jax.emit import Emitted
from poet_jax.emit.executor import Run, Span, Step, outlast, wait
from poet_jax.stores import PagedArray, Store, library
from poet_jax.stores.paged import drop_copies
from poet_jax.stores.store import SECTOR_BYTES


class PagedStep:
    """A step that moves pages, or has state on storage.

    Every array that it writes to the store is a new one, so that a step that fails
    leaves state on storage as it was.

    Args:
      emitted: the program, and its stages.
      store: where pages go.
      leaves: flat arguments, or shapes of them.
      scratch_bytes: that libraries allocate without XLA's knowledge.
      jit_options: of `jax.jit`, but for static and donated arguments and shardings.

    Attributes:
      nbytes: as of `Step`.
      last_run: what the latest call measured.

    Raises PageStoreError if pages cannot be moved here.
    """

    def __init__(
        self,
        emitted: Emitted,
        store: Store,
        leaves: Sequence[Any],
        *,
        scratch_bytes: int = 0,
        jit_options: Mapping[str, Any] | None = None,
    ):
        if emitted.records:
            library.load()
        self._emitted, self._store = emitted, store
        self.graph = graph = emitted.program.graph
        given = dict(zip(graph.arguments, leaves, strict=True))
        shapes = [
            graph.values[v].aval if v in graph.stored else given[v]
            for v in emitted.inputs
        ]
        if emitted.pages:
            rows = sum(map(len, emitted.pages.values()))
            shapes.append(jax.ShapeDtypeStruct((rows, 4), np.uint32))
        gone = (graph.donated | graph.resident).difference(graph.references)
        jitted = jax.jit(
            emitted,
            donate_argnums=[n for n, v in enumerate(emitted.inputs) if v in gone],
            **(jit_options or {}),
        )
        self._step = Step(jitted, shapes, {}, graph, scratch_bytes=scratch_bytes)
        self.nbytes = self._step.nbytes
        self._offsets, self._room_bytes = _room(emitted)
        self.last_run = Run(0.0, self.nbytes)

    @property
    def compiled(self) -> jax.stages.Compiled:
        """As of `Step`."""
        return self._step.compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wait()
        start = time.perf_counter()
        graph, leaves = self.graph, jax.tree.leaves((args, kwargs))
        given = dict(zip(graph.arguments, leaves, strict=True))
        for value, leaf in given.items():
            if isinstance(leaf, jax.Array | PagedArray) and leaf.is_deleted():
                raise RuntimeError(
                    f"{graph.values[value].name} was given as an array of shape "
                    f"{leaf.shape} that has been deleted. An argument that was donated "
                    "to an earlier call is gone. Use what that call returned, or a "
                    "copy."
                )
        copies, copied_now = self._copies(leaves)
        drop_copies()  # those of other steps are memory that this plan does not know of
        room = None
        landed: dict[int, PagedArray] = {}  # by flat output
        try:
            if self._room_bytes:
                room = self._store.allocate(self._room_bytes, "pages of a step")
            for place in graph.landing.values():
                value = graph.outputs[place.leaf]
                if place.leaf not in landed:
                    landed[place.leaf] = PagedArray(
                        self._store, *graph.values[value].kind, graph.values[value].name
                    )
            inputs = [
                copies[v] if v in copies else given[v] for v in self._emitted.inputs
            ]
            if self._emitted.pages:
                inputs.append(self._places(leaves, landed, room))
            results = self._step(*inputs)
        except BaseException as error:
            outlast()  # an interrupted program goes on, and writes to these places
            for paged in landed.values():
                paged.delete()
            if (failure := library.page_error(error)) is not None:
                raise failure from error
            raise
        finally:
            if room is not None:
                self._store.free(room)
        records, stamps = self._records(results)
        written = dict(records)  # what lands is paged out once
        for value, place in graph.landing.items():
            checksums = written[PageOut(value)][:, 0].tolist()
            landed[place.leaf].set_checksums(place.block, checksums)
        self.last_run = self._measured(start, records, stamps, copied_now)
        return jax.tree.unflatten(
            graph.out_tree, self._outputs(leaves, landed, results)
        )

    def _copies(
        self, leaves: Sequence[Any]
    ) -> tuple[dict[int, jax.Array], dict[int, tuple[float, float]]]:
        """Copies in RAM of arguments on storage, and when missing ones were read.

        Times are (start, stop) on the clock of the stamps.
        """
        copies, read = {}, {}
        for value in sorted(self.graph.resident):
            place, described = self.graph.stored[value], self.graph.values[value]
            copy = leaves[place.leaf].take_copy(place.block)
            if copy is None:
                start = time.monotonic()
                places = leaves[place.leaf].places(place.block, described.name)
                blocks = self._emitted.blocks(value)
                copy = library.load_page(described.kind, places, described.name, blocks)
                read[value] = start, time.monotonic()
            copies[value] = copy
        return copies, read

    def _places(
        self, leaves: Sequence[Any], landed: dict[int, PagedArray], room: int | None
    ) -> jax.Array:
        """[P, 4] for `Emitted.pages`."""
        graph = self.graph
        rows = []
        for value in self._emitted.pages:
            name = graph.values[value].name
            if value in graph.stored:
                place = graph.stored[value]
                rows += leaves[place.leaf].places(place.block, name)
            elif value in graph.landing:
                place = graph.landing[value]
                rows += landed[place.leaf].places(place.block, name)
            else:
                rows.append(self._store.page_at((room or 0) + self._offsets[value]))
        return library.operand(rows)

    def _records(
        self, results: list[Any]
    ) -> tuple[list[tuple[PageIn | PageOut, np.ndarray]], np.ndarray]:
        """([blocks, 6] of each transfer, [S, 2] stamps), taken off `results`."""
        if not self._emitted.records:
            return [], np.zeros((0, 2), np.uint32)
        left, records = np.asarray(results.pop()), []
        for transfer in self._emitted.transfers:
            size = 6 * len(self._emitted.pages[transfer.value])
            records.append((transfer, left[:size].reshape(-1, 6)))
            left = left[size:]
        return records, left.reshape(-1, 2)

    def _outputs(
        self, leaves: Sequence[Any], landed: dict[int, PagedArray], results: list[Any]
    ) -> list[Any]:
        """The flat outputs, in RAM or on storage; donated arguments on storage go."""
        graph = self.graph
        here = iter(results)
        outputs = [
            landed[leaf]
            if leaf in landed
            else leaves[graph.stored[value].leaf]
            if value in graph.stored
            else next(here)
            for leaf, value in enumerate(graph.results)
        ]
        for value, copy in zip(sorted(graph.resident), here, strict=True):
            new = graph.successors[value]
            place = graph.landing.get(new) or graph.stored[value]
            holder = landed if new in graph.landing else leaves
            holder[place.leaf].keep_copy(place.block, copy)
        kept = set(map(id, outputs))
        for value in graph.donated.intersection(graph.stored):
            paged = leaves[graph.stored[value].leaf]
            if id(paged) not in kept:
                paged.delete()
        return outputs

    def _measured(
        self,
        start: float,
        records: list[tuple[PageIn | PageOut, np.ndarray]],
        stamps: np.ndarray,
        copied_now: dict[int, tuple[float, float]],
    ) -> Run:
        graph, emitted = self.graph, self._emitted
        moved = {kind: 0 for kind in (PageIn, PageOut)}
        seconds = time.perf_counter() - start
        began = time.monotonic() - seconds  # on the clock of the stamps
        spans: list[Span] = []

        def span(transfer: PageIn | PageOut, first: float, last: float) -> Span:
            word = "page in" if isinstance(transfer, PageIn) else "page out"
            name = f"{word} {graph.values[transfer.value].name}"
            return Span(name, "storage", first - began, last - began)

        for value, (first, last) in copied_now.items():
            moved[PageIn] += graph.values[value].nbytes
            spans.append(span(PageIn(value), first, last))
        waiting = sum(last - first for first, last in copied_now.values())
        instructions, times = emitted.program.instructions, _seconds(stamps)
        begins = dict(zip(emitted.timed, times, strict=False))
        done: dict[int, float] = {}  # when a transfer ended that nothing waited for yet
        moves = iter(records)
        waited = 0.0  # until when waiting was counted
        for row, x in enumerate(instructions if records else ()):
            if isinstance(x, PageIn | PageOut):
                transfer, rows = next(moves)
                starts, stops = _seconds(rows[:, 1:3]), _seconds(rows[:, 3:5])
                moved[type(transfer)] += graph.values[transfer.value].nbytes
                spans += map(span, [transfer] * len(rows), starts, stops)
                done[transfer.value] = stops.max()
            elif row in begins:
                needs = (x.value,) if isinstance(x, Free) else x.reads
                here = [done.pop(v) for v in needs if v in done]
                # What XLA runs at once waits once.
                since = max(begins[row], waited)
                waited = max(waited, *here, 0.0)
                waiting += max(0.0, waited - since)
        if done:  # what lands is written before the step ends
            waiting += max(0.0, max(done.values()) - max(times[-1], waited))
        storage = sum(x.stop_seconds - x.start_seconds for x in spans)
        if emitted.is_traced:
            for row, first, last in zip(
                emitted.timed, times[:-1], times[1:], strict=True
            ):
                x = instructions[row]
                if not isinstance(x, Free | PageIn | PageOut):
                    name = _name(graph, x.nodes)
                    spans.append(Span(name, "compute", first - began, last - began))
        return Run(
            seconds,
            self.nbytes,
            moved[PageIn],
            moved[PageOut],
            emitted.program.recomputed,
            storage,
            waiting,
            tuple(spans),
        )


def _name(graph: Graph, nodes: Sequence[int]) -> str:
    names = dict.fromkeys((graph.nodes[nodes[0]].name, graph.nodes[nodes[-1]].name))
    return " to ".join(names)


def _seconds(halves: np.ndarray) -> np.ndarray:
    """[N] seconds of [N, 2] nanoseconds, low and high half."""
    wide = halves.astype(np.uint64)
    return (wide[:, 0] + (wide[:, 1] << np.uint64(32))) / 1e9


def _room(emitted: Emitted) -> tuple[dict[int, int], int]:
    """Offset of each page that only this step has, and bytes of them all.

    A page has its room until something has read what came back: only then is it sure
    that no later transfer overtakes the reading.
    """
    program = emitted.program
    graph = program.graph
    free: list[tuple[int, int]] = []  # (offset, bytes)
    taken: dict[int, tuple[int, int]] = {}
    returned: dict[int, tuple[int, int]] = {}  # not read yet
    offsets: dict[int, int] = {}
    end = 0
    for row, x in enumerate(program.instructions):
        if isinstance(x, PageOut) and x.value not in graph.landing:
            size = -(-graph.values[x.value].nbytes // SECTOR_BYTES) * SECTOR_BYTES
            offset, length = next((x for x in free if x[1] >= size), (end, 0))
            if length:
                free.remove((offset, length))
                free.append((offset + size, length - size))
            end = max(end, offset + size)
            offsets[x.value], taken[x.value] = offset, (offset, size)
        elif isinstance(x, PageIn) and x.value in taken:
            if program.last_page_in[x.value] == row:
                returned[x.value] = taken.pop(x.value)
        elif not isinstance(x, Free | PageIn | PageOut):
            free += [returned.pop(v) for v in x.reads if v in returned]
    return offsets, end
