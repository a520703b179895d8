"""The referee: what a program uses, byte by byte and second by second."""

import collections
import dataclasses

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.errors import PlanInvalid
from poet_jax.core.in_place import Pairs
from poet_jax.core.plan import Action, Compute, Free, PageIn, PageOut
from poet_jax.core.program import Program
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
      departure: seconds until a value's copy to storage is done, while it has not left.
    """

    def __init__(self, program: Program, costs: Costs):
        self.program, self.costs = program, costs
        self.compute = self.storage = 0.0
        self._arrival: dict[int, float] = {}
        self.departure: dict[int, float] = {}
        # Of transfers that compute has not passed yet.
        self._transfers: collections.deque[tuple[float, float]] = collections.deque()

    def run(self, instruction: Action, replaces: Pairs = ()) -> tuple[float, float]:
        """(start, stop) seconds of the next instruction, which writes over values."""
        costs = self.costs
        start = self.compute
        match instruction:
            case Compute(number):
                for value in self.program.graph.nodes[number].reads:
                    start = max(start, self._arrival.pop(value, 0.0))
                for value, _ in replaces:
                    start = max(start, self.departure.pop(value, 0.0))
                self.compute = start
                self._work(float(costs.seconds[number]))
                return start, self.compute
            case PageOut(value):
                start = max(start, self._arrival.get(value, 0.0))
                moved = self._move(start, float(costs.page_out_seconds[value]))
                self.departure[value] = self.storage
                return moved
            case PageIn(value):
                moved = self._move(start, float(costs.page_in_seconds[value]))
                self._arrival[value] = self.storage
                return moved
            case Free(value):
                left = self.departure.pop(value, 0.0)
                self.compute = max(start, left, self._arrival.pop(value, 0.0))
                return start, self.compute

    def _work(self, seconds: float) -> None:
        """Compute what takes so long without transfers."""
        share = 1 - self.costs.contention
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

    Memory: everything in RAM counts; while a node runs, so do its results and its
    workspace, but not what `program.replaces`; a page-in counts from the moment it is
    issued. Time: two lanes, compute
    and storage, each in order; a transfer starts when its instruction is reached and
    its lane is free, a compute waits for the page-ins it reads and the page-outs of
    what it replaces, a free waits for the page-out. While a transfer lasts, compute is
    slower by `costs.contention`. Raises PlanInvalid if a value is
    read that is not in RAM.
    """
    graph = program.graph
    nbytes = [int(n) for n in costs.nbytes]
    resident = set(graph.initial)
    live = sum(nbytes[v] for v in resident)
    peak = live
    stored = {v: nbytes[v] for v in graph.stored}
    at_home = {*graph.stored, *graph.landing}
    store = store_peak = graph.stored_bytes
    paged_in = paged_out = 0
    compute_seconds = 0.0
    lanes = Lanes(program, costs)
    rows = len(program.instructions)
    live_bytes = np.zeros(rows, np.int64)
    starts, stops, joules = np.zeros((3, rows))

    def require(value: int) -> None:
        if value not in resident:
            raise PlanInvalid(
                f"The program reads {graph.values[value].name!r}, which is not in RAM "
                "at that point. A program from lower(graph, plan) never does. Lower "
                "the plan again instead of editing its instructions."
            )

    for row, instruction in enumerate(program.instructions):
        match instruction:
            case Compute(number):
                node = graph.nodes[number]
                for value in node.reads:
                    require(value)
                for old, _ in program.replaces.get(row, ()):
                    resident.remove(old)
                    live -= nbytes[old]
                live += sum(nbytes[v] for v in node.writes if v not in resident)
                resident.update(node.writes)
                live_bytes[row] = live + int(costs.workspace_bytes[number])
                compute_seconds += float(costs.seconds[number])
                joules[row] = float(costs.joules[number])
            case PageOut(value):
                require(value)
                stored[value] = nbytes[value]
                store += nbytes[value]
                paged_out += nbytes[value]
                live_bytes[row] = live
                joules[row] = float(costs.page_out_joules[value])
            case PageIn(value):
                if value not in stored:
                    raise PlanInvalid(
                        f"The program pages in {graph.values[value].name!r}, which is "
                        "not on storage. A value is paged out before it is paged in. "
                        "Lower the plan again instead of editing its instructions."
                    )
                live += nbytes[value] if value not in resident else 0
                resident.add(value)
                paged_in += nbytes[value]
                live_bytes[row] = live
                joules[row] = float(costs.page_in_joules[value])
            case Free(value):
                live_bytes[row] = live
                if row not in program.done_frees:
                    require(value)
                    resident.remove(value)
                    live -= nbytes[value]
        peak = max(peak, int(live_bytes[row]))
        replaces = program.replaces.get(row, ())
        starts[row], stops[row] = lanes.run(instruction, replaces)
        store_peak = max(store_peak, store)
        if isinstance(instruction, PageIn) and program.last_page_in[value] == row:
            store -= 0 if value in at_home else stored.pop(value)
    for value in graph.returned:
        require(value)
    seconds = max(lanes.compute, lanes.storage)
    return Usage(
        peak_bytes=peak,
        store_bytes=store_peak,
        seconds=seconds,
        joules=float(joules.sum()) + costs.static_watts * seconds,
        live_bytes=live_bytes,
        start_seconds=starts,
        stop_seconds=stops,
        instruction_joules=joules,
        bytes_paged_in=paged_in,
        bytes_paged_out=paged_out,
        compute_seconds=compute_seconds,
    )


def alive_at_peak(
    program: Program, costs: Costs, usage: Usage
) -> tuple[str, list[int]]:
    """The node running at the peak, and the values alive there, largest first."""
    graph = program.graph
    resident = set(graph.initial)
    node = "the start of the step"
    for row, instruction in enumerate(
        program.instructions[: usage.peak_instruction + 1]
    ):
        match instruction:
            case Compute(number):
                resident.difference_update(x for x, _ in program.replaces.get(row, ()))
                resident.update(graph.nodes[number].writes)
                node = graph.nodes[number].name
            case PageIn(value):
                resident.add(value)
            case Free(value) if row < usage.peak_instruction:
                resident.discard(value)
    return node, sorted(resident, key=lambda v: (-int(costs.nbytes[v]), v))
