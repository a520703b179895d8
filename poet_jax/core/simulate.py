"""The referee: what a program uses, byte by byte and second by second."""

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Node
from poet_jax.core.plan import Free, PageIn, PageOut
from poet_jax.core.program import Instruction, Program, Run, walk
from poet_jax.core.representation import brief
from poet_jax.core.units import format_bytes, format_joules, format_seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Usage:
    """What a program uses.

    Attributes:
      peak_bytes: most RAM at any instant.
      store_bytes: most storage at any instant.
      seconds: until both lanes are done.
      joules: compute + paging + static_watts * seconds.
      live_bytes: [I] RAM while each instruction runs.
      start_seconds, stop_seconds: [I] on the lane of the instruction.
      instruction_joules: [I] of its compute or its transfer, over idle; all of them and
        static_watts * seconds are `joules`.
      bytes_paged_in, bytes_paged_out: in all.
      compute_seconds: of the computes alone.
    """

    peak_bytes: int
    store_bytes: int
    seconds: float
    joules: float
    live_bytes: np.ndarray
    start_seconds: np.ndarray
    stop_seconds: np.ndarray
    instruction_joules: np.ndarray
    bytes_paged_in: int
    bytes_paged_out: int
    compute_seconds: float

    __repr__ = brief

    @property
    def peak_instruction(self) -> int:
        return int(np.argmax(self.live_bytes)) if len(self.live_bytes) else 0

    def __str__(self) -> str:
        return (
            f"peak {format_bytes(self.peak_bytes)}, storage "
            f"{format_bytes(self.store_bytes)}, {format_seconds(self.seconds)}, "
            f"{format_joules(self.joules)} (modelled)"
        )


class Lanes:
    """Two lanes, compute and storage, each in order. While a transfer lasts, compute
    does 1 - costs.contention of what it would do without.

    Attributes:
      compute, storage: seconds until each is done with what ran so far.
      compute_seconds: that the nodes would have taken alone.
      departure: seconds until a value's copy to storage is done, while it has not left.
    """

    def __init__(self, costs: Costs):
        self._contention = costs.contention
        self._seconds = costs.seconds.tolist()  # quicker to read than arrays
        self._out_seconds = costs.page_out_seconds.tolist()
        self._in_seconds = costs.page_in_seconds.tolist()
        self.compute = self.storage = self.compute_seconds = 0.0
        self._arrival: dict[int, float] = {}
        self.departure: dict[int, float] = {}
        # Of transfers that compute has not passed yet.
        self._transfers: collections.deque[tuple[float, float]] = collections.deque()

    def run(self, instruction: Instruction) -> tuple[float, float]:
        """(start, stop) seconds of the next instruction."""
        start = self.compute
        match instruction:
            case Run():
                for value in instruction.reads:
                    start = max(start, self._arrival.pop(value, 0.0))
                for value, _ in instruction.over:
                    start = max(start, self.departure.pop(value, 0.0))
                self.compute = start
                seconds = sum(self._seconds[n] for n in instruction.nodes)
                self.compute_seconds += seconds
                self._work(seconds)
                return start, self.compute
            case Free(value):
                left = self.departure.pop(value, 0.0)
                self.compute = max(start, left, self._arrival.pop(value, 0.0))
                return start, self.compute
            case PageOut(value):
                start = max(start, self._arrival.get(value, 0.0))
                moved = self._move(start, self._out_seconds[value])
                self.departure[value] = self.storage
                return moved
            case PageIn(value):
                moved = self._move(start, self._in_seconds[value])
                self._arrival[value] = self.storage
                return moved

    def _work(self, seconds: float) -> None:
        """Compute what takes so long without transfers."""
        share = 1 - self._contention
        while self._transfers and share < 1:
            start, stop = self._transfers[0]
            alone = max(0.0, start - self.compute)
            beside = max(0.0, stop - max(start, self.compute)) * share
            if seconds <= alone:
                break
            if seconds < alone + beside:
                self.compute += alone + (seconds - alone) / share
                return
            seconds -= alone + beside
            self.compute = max(self.compute, stop)
            self._transfers.popleft()
        self.compute += seconds

    def _move(self, start: float, seconds: float) -> tuple[float, float]:
        """(start, stop) of a transfer that may begin at `start`."""
        start = max(self.storage, start)
        self.storage = start + seconds
        self._transfers.append((start, self.storage))
        return start, self.storage


def simulate(program: Program, costs: Costs) -> Usage:
    """Judge `program` by the rules that a step follows.

    Memory: everything in RAM counts; while nodes run, so do their results and their
    workspace, but not what they write over; a page-in counts from the moment it is
    issued. Time: two lanes, compute and storage, each in order; a transfer starts when
    its instruction is reached and its lane is free, a `Run` waits for the page-ins it
    reads and the page-outs of what it writes over, a `Free` waits for the page-out.
    While a transfer lasts, compute is slower by `costs.contention`. Raises PlanInvalid
    as `walk` does.
    """
    live_bytes = _live_bytes(program, costs)
    stored_bytes, paged_in, paged_out = _stored_bytes(program, costs)
    joules = _joules(program, costs)
    lanes = Lanes(costs)
    spans = [lanes.run(x) for x in program.instructions]
    starts, stops = np.array(spans).reshape(-1, 2).T
    seconds = max(lanes.compute, lanes.storage)
    return Usage(
        peak_bytes=int(live_bytes.max(initial=_total(costs, program.graph.initial))),
        store_bytes=stored_bytes,
        seconds=seconds,
        joules=float(joules.sum()) + costs.static_watts * seconds,
        live_bytes=live_bytes,
        start_seconds=starts,
        stop_seconds=stops,
        instruction_joules=joules,
        bytes_paged_in=paged_in,
        bytes_paged_out=paged_out,
        compute_seconds=lanes.compute_seconds,
    )


def _total(costs: Costs, values: Iterable[int]) -> int:
    return sum(int(costs.nbytes[v]) for v in values)


def _live_bytes(program: Program, costs: Costs) -> np.ndarray:
    """[I] RAM while each instruction runs."""
    nbytes = costs.nbytes.tolist()
    workspaces = costs.workspace_bytes.tolist()
    live = _total(costs, program.graph.initial)
    result: list[int] = []
    for instruction, _, arrives, leaves, _ in walk(program):
        most = live
        for value in arrives:
            live += nbytes[value]
        for value in leaves:
            live -= nbytes[value]
        if not isinstance(instruction, Free):
            most = live
        if isinstance(instruction, Run):
            most += max([workspaces[n] for n in instruction.nodes])
        result.append(most)
    return np.array(result, np.int64)


def _stored_bytes(program: Program, costs: Costs) -> tuple[int, int, int]:
    """(most on storage, read from there, written there)."""
    graph, nbytes = program.graph, costs.nbytes.tolist()
    stays = graph.stored.keys() | graph.landing.keys()
    now = most = graph.stored_bytes
    read = written = 0
    for row, x in enumerate(program.instructions):
        if isinstance(x, PageOut):
            now += nbytes[x.value]
            written += nbytes[x.value]
            most = max(most, now)
        elif isinstance(x, PageIn):
            read += nbytes[x.value]
            if program.last_page_in[x.value] == row and x.value not in stays:
                now -= nbytes[x.value]
    return most, read, written


def _joules(program: Program, costs: Costs) -> np.ndarray:
    """[I] of each instruction."""
    of_nodes = costs.joules.tolist()
    outs, ins = costs.page_out_joules.tolist(), costs.page_in_joules.tolist()
    result = np.zeros(len(program.instructions))
    for row, x in enumerate(program.instructions):
        match x:
            case Run():
                result[row] = sum(of_nodes[n] for n in x.nodes)
            case PageOut(value):
                result[row] = outs[value]
            case PageIn(value):
                result[row] = ins[value]
    return result


def alive_at_peak(
    program: Program, costs: Costs, usage: Usage
) -> tuple[Node | None, list[int]]:
    """The node running at the peak, and the values alive there, largest first. None is
    the start of the step."""
    graph = program.graph
    node, present = None, set(graph.initial)
    for row, moment in enumerate(walk(program)):
        if isinstance(moment.instruction, Run):
            node = graph.nodes[moment.instruction.nodes[-1]]
        if row == usage.peak_instruction:
            present = set(moment.present)
            break
    return node, sorted(present, key=lambda v: (-int(costs.nbytes[v]), v))
