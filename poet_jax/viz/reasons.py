"""For each value the decision, what it costs, and what else it would have cost."""

import dataclasses

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Free, PageIn, PageOut, Plan
from poet_jax.core.program import Program, Run
from poet_jax.core.simulate import Usage
from poet_jax.core.units import format_bytes, format_joules, format_seconds
from poet_jax.planners.planner import judge_plan
from poet_jax.viz.table import decisions

ESTIMATE = (
    "What a value would have cost otherwise is a first-order estimate: for that value "
    "alone, all others as planned, modelled, in joules over idle."
)


@dataclasses.dataclass(frozen=True)
class Reason:
    """What was decided for a value, what that costs, and what else it would have cost.

    Attributes:
      value: its number in the graph.
      name, nbytes: its own.
      decision: "keep", "remat" or "page"; "pinned" for what no plan may free.
      resident_seconds: in RAM, as planned node by node.
      seconds, joules: of running its node again, or of its transfers. A node's repeats
        are in the row of each of its results.
      text: sentences. Costs of what was not done are first-order estimates, for this
        value alone with all others as planned.
    """

    value: int
    name: str
    nbytes: int
    decision: str
    resident_seconds: float
    seconds: float
    joules: float
    text: str

    def __str__(self) -> str:
        return (
            f"{self.name} ({format_bytes(self.nbytes)}), {self.decision}: {self.text}"
        )


def reasons(graph: Graph, costs: Costs, plan: Plan) -> tuple[Reason, ...]:
    """[V] why each value was kept, rematerialised or paged, by the plan's own costs."""
    judged = judge_plan(graph, costs, plan)
    graph = judged.graph
    lives = _lives(judged.program, judged.usage)
    made = decisions(judged.program)
    runs = judged.program.runs
    result = []
    for value, life in enumerate(lives):
        again = runs[graph.producer[value]] - 1 if value in graph.producer else 0
        about = _Words(graph, costs, value, life, again)
        decision = made.get(value, "pinned" if value in graph.pinned else "keep")
        text = {
            "pinned": about.pinned,
            "keep": about.kept,
            "remat": about.repeated,
            "page": about.paged,
        }[decision]()
        repeats, transfers = about.repeats(again), about.transfers()
        result.append(
            Reason(
                value,
                graph.values[value].name,
                int(costs.nbytes[value]),
                decision,
                life.resident_seconds,
                repeats[0] + transfers[0],
                repeats[1] + transfers[1],
                text,
            )
        )
    return tuple(result)


@dataclasses.dataclass
class _Life:
    """A value over the step: when it is in RAM, and when it is read or made.

    Attributes:
      touches: (start, stop) of what makes it or reads it, in seconds.
      arrived: when it came into RAM, if it is there.
      loaded: when the page-in under way is done.
      waiting_seconds: for which computing stood still for its transfers.
      page_ins, page_outs: how many.
    """

    touches: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    arrived: float | None = None
    resident_seconds: float = 0.0
    loaded: float = 0.0
    waiting_seconds: float = 0.0
    page_ins: int = 0
    page_outs: int = 0

    @property
    def idle_seconds(self) -> float:
        """The longest time between two touches."""
        pairs = zip(self.touches, self.touches[1:], strict=False)
        return max((after[0] - before[1] for before, after in pairs), default=0.0)

    @property
    def absent_seconds(self) -> float:
        """Out of RAM between the first touch and the last."""
        whole = self.touches[-1][1] - self.touches[0][0] if self.touches else 0.0
        return max(0.0, whole - self.resident_seconds)

    def arrive(self, now: float) -> None:
        self.arrived = now if self.arrived is None else self.arrived

    def leave(self, now: float) -> None:
        assert self.arrived is not None
        self.resident_seconds += now - self.arrived
        self.arrived = None

    def wait(self, clock: float) -> None:
        """Whoever needs the page-in under way has nothing else to do since `clock`."""
        self.waiting_seconds += max(0.0, self.loaded - clock)
        self.loaded = 0.0


def _lives(program: Program, usage: Usage) -> list[_Life]:
    """[V], of a program of single nodes."""
    graph, clock = program.graph, 0.0
    lives = [_Life() for _ in graph.values]
    for value in graph.initial:
        lives[value].arrive(0.0)
        lives[value].touches.append((0.0, 0.0))
    for value in graph.stored:
        lives[value].touches.append((0.0, 0.0))
    times = zip(usage.start_seconds, usage.stop_seconds, strict=True)
    for x, (start, stop) in zip(program.instructions, times, strict=True):
        start, stop = float(start), float(stop)
        match x:
            case Run():
                for value in (*x.reads, *x.writes):
                    lives[value].wait(clock)
                    lives[value].arrive(start)
                    lives[value].touches.append((start, stop))
                for value, _ in x.over:
                    lives[value].leave(start)
                clock = stop
            case PageIn(value):
                lives[value].arrive(clock)
                lives[value].loaded = stop
                lives[value].page_ins += 1
            case PageOut(value):
                lives[value].page_outs += 1
            case Free(value):
                lives[value].wait(clock)
                lives[value].waiting_seconds += stop - max(start, clock)
                lives[value].leave(stop)
                clock = stop
    for value in {*graph.returned, *graph.pinned}:
        lives[value].wait(clock)
        lives[value].touches.append((usage.seconds, usage.seconds))
    for life in lives:
        if life.arrived is not None:
            life.leave(usage.seconds)
    return lives


def _cost(seconds: float, joules: float) -> str:
    return f"{format_seconds(seconds)}, {format_joules(joules)}"


@dataclasses.dataclass(frozen=True)
class _Words:
    """The sentences about one value."""

    graph: Graph
    costs: Costs
    value: int
    life: _Life
    again: int  # times that its node is repeated

    @property
    def size(self) -> str:
        return format_bytes(int(self.costs.nbytes[self.value]))

    def transfers(
        self, ins: int | None = None, outs: int | None = None
    ) -> tuple[float, float]:
        """(seconds, joules) of its transfers, or of as many as are given."""
        costs, value = self.costs, self.value
        ins = self.life.page_ins if ins is None else ins
        outs = self.life.page_outs if outs is None else outs
        return (
            float(ins * costs.page_in_seconds[value])
            + float(outs * costs.page_out_seconds[value]),
            float(ins * costs.page_in_joules[value])
            + float(outs * costs.page_out_joules[value]),
        )

    def repeats(self, times: int) -> tuple[float, float]:
        """(seconds, joules) of running its node `times` more."""
        if not times:
            return 0.0, 0.0
        node = self.graph.producer[self.value]
        seconds, joules = self.costs.seconds[node], self.costs.joules[node]
        return times * float(seconds), times * float(joules)

    def node_again(self, times: int = 1) -> str:
        if self.value not in self.graph.producer:
            return "No node can make it again."
        node = self.graph.nodes[self.graph.producer[self.value]]
        if not node.repeatable:
            unknown = sorted(set().union(*(e.unknown for e in node.equations)))
            if unknown and not any(e.has_effect for e in node.equations):
                return (
                    f"{node.name} runs once, as {', '.join(unknown)} may not be a "
                    "function of its operands. Use repeatable= to say that it is."
                )
            return f"{node.name} has effects and cannot run again."
        often = "" if times == 1 else f" {times} times"
        cost = _cost(*self.repeats(times))
        return f"Running {node.name} again{often} would cost {cost}."

    def page_out_and_in(self) -> str:
        value = self.graph.values[self.value]
        if not value.pageable:
            kind = "a weakly typed array" if value.weak_type else "a PRNG key"
            kind = "in the host's memory" if value.on_host else kind
            kind = "a piece of an argument" if self.value in self.graph.seats else kind
            return f"It is {kind}, which is never paged."
        return f"Paging it out and in would cost {_cost(*self.transfers(1, 1))}."

    def absent(self) -> str:
        return (
            f"{self.size} less in RAM for {format_seconds(self.life.absent_seconds)}."
        )

    def pinned(self) -> str:
        if self.value in self.graph.constants:
            return "A constant that the function closes over: in RAM throughout."
        return "An argument that is not donated: it is the caller's, in RAM throughout."

    def kept(self) -> str:
        if self.value in self.graph.stacks:
            return "In RAM as its pieces, which are values of their own."
        texts = []
        if self.value in self.graph.donated:
            texts.append("A donated argument: in RAM until its last read.")
        elif self.value in self.graph.landing:
            texts.append(
                f"Written to storage, where the caller keeps it: "
                f"{_cost(*self.transfers())}."
            )
        if self.value in self.graph.resident:
            texts.append(
                "In RAM from the step before: paging it in would cost "
                f"{_cost(*self.transfers(1, 0))}."
            )
        if self.life.idle_seconds <= 0:
            return " ".join([*texts, "Never idle: freeing it earlier saves nothing."])
        idle = format_seconds(self.life.idle_seconds)
        texts.append(f"Freeing it while it is idle would save {self.size} for {idle}.")
        return " ".join([*texts, self.node_again(), self.page_out_and_in()])

    def repeated(self) -> str:
        node = self.graph.nodes[self.graph.producer[self.value]]
        cost = _cost(*self.repeats(self.again))
        if len(node.writes) > 1:
            cost += f" for its {len(node.writes)} results"
        return (
            f"{node.name} runs {self.again + 1} times; running it again costs {cost}. "
            f"{self.absent()} {self.page_out_and_in()}"
        )

    def paged(self) -> str:
        life = self.life
        seconds, joules = self.transfers()
        also = f" Its node runs {self.again + 1} times, too." if self.again else ""
        hidden = max(0.0, seconds - life.waiting_seconds)
        out = "On storage from the start" if not life.page_outs else "Paged out"
        often = "once" if life.page_ins == 1 else f"{life.page_ins} times"
        return (
            f"{out}, and in {often}: {format_seconds(seconds)}, of which "
            f"{format_seconds(hidden)} hidden under computing, and "
            f"{format_joules(joules)}. {self.absent()} {self.node_again(life.page_ins)}"
            f"{also}"
        )
