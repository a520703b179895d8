"""A schedule in words: a table of the whole, and for each value the decision, what it
costs and what else it would have cost."""

import dataclasses
from collections import Counter

from poet_jax.graph import Graph
from poet_jax.plan import Budget, Compute, PageIn, PageOut, Plan
from poet_jax.planners.judge import judge
from poet_jax.price import Costs
from poet_jax.program import Free, Program, computed
from poet_jax.simulate import Usage
from poet_jax.units import format_bytes, format_count, format_joules, format_seconds

ESTIMATE = (
    "What a value would have cost otherwise is a first-order estimate: for that value "
    "alone, all others as planned, modelled, in joules over idle."
)


def decisions(program: Program) -> dict[int, str]:
    """ "keep", "remat" or "page" for every value that a node writes or a page-in loads.

    A value is paged if it is read back from storage, rematerialised if its node runs
    more than once, kept otherwise.
    """
    runs = Counter(node for x in program.instructions for node in computed(x))
    result = {
        v: "keep" if runs[number] < 2 else "remat"
        for number, node in enumerate(program.graph.nodes)
        for v in node.writes
    }
    result.update(
        (x.value, "page") for x in program.instructions if isinstance(x, PageIn)
    )
    return result


def comparison(usage: Usage, baseline: Usage) -> list[tuple[str, str, str, str]]:
    """Rows of what is used, keep-all's, the plan's, and the change."""
    rows = []
    for label, attribute, show in (
        ("memory", "peak_bytes", format_bytes),
        ("storage", "store_bytes", format_bytes),
        ("time", "seconds", format_seconds),
        ("energy (modelled)", "joules", format_joules),
    ):
        before, after = getattr(baseline, attribute), getattr(usage, attribute)
        change = f"{after / before - 1:+.1%}" if before else ""
        rows.append((label, show(before), show(after), change))
    return rows


def remarks(budget: Budget, plan: Plan, program: Program, baseline: Usage) -> list[str]:
    """What became of the values, and how good the plan is."""
    counts = Counter(decisions(program).values())
    lines = [
        f"values: {counts['keep']} kept, {counts['remat']} rematerialised, "
        f"{counts['page']} paged; "
        f"{format_count(program.recomputed, 'node')} run again",
        f"{plan.planner}, {plan.solve_seconds:.1f} s: bound {plan.bound:.6g}, gap "
        f"{plan.gap:.2%}",
        plan.status.value,
    ]
    if budget.memory_bytes >= baseline.peak_bytes:
        lines.append("The budget covers keep-all: nothing is repeated or paged.")
    if program.computes == 1 < len(program.graph.nodes):
        lines.append("The step is one executable, as under jax.jit.")
    return lines


def title(graph: Graph, budget: Budget) -> str:
    return f"{len(graph.nodes)} nodes, {len(graph.values)} values, budget {budget}"


def table(
    budget: Budget, plan: Plan, program: Program, usage: Usage, baseline: Usage
) -> str:
    """Keep-all beside the plan, what became of the values, and how good the plan is."""
    rows = [("", "keep-all", "this plan", ""), *comparison(usage, baseline)]
    return "\n".join(
        [
            title(program.graph, budget),
            *(f"  {a:18s} {b:>12s} {c:>12s} {d:>9s}" for a, b, c, d in rows),
            *(f"  {line}" for line in remarks(budget, plan, program, baseline)),
        ]
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
    judged = judge(graph, costs, plan.actions)
    lives = _lives(judged.program, judged.usage)
    made = decisions(judged.program)
    runs = Counter(node for x in judged.program.instructions for node in computed(x))
    result = []
    for value, life in enumerate(lives):
        about = _Words(graph, costs, value, life)
        decision, again = made.get(value, "keep"), 0
        if value in graph.producer:
            again = runs[graph.producer[value]] - 1
        if value in graph.pinned and value not in made:
            decision = "pinned"
        seconds, joules = about.transfers() if life.transfers else (0.0, 0.0)
        if again:
            node = graph.producer[value]
            seconds += again * float(costs.seconds[node])
            joules += again * float(costs.joules[node])
        text = {
            "pinned": about.pinned,
            "keep": about.kept,
            "remat": lambda about=about, again=again: about.repeated(again),
            "page": about.paged,
        }[decision]()
        result.append(
            Reason(
                value,
                graph.values[value].name,
                int(costs.nbytes[value]),
                decision,
                life.resident_seconds,
                seconds,
                joules,
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
    def transfers(self) -> int:
        return self.page_ins + self.page_outs

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
            case Compute(number):
                node = graph.nodes[number]
                for value in (*node.reads, *node.writes):
                    lives[value].wait(clock)
                    lives[value].arrive(start)
                    lives[value].touches.append((start, stop))
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

    @property
    def size(self) -> str:
        return format_bytes(int(self.costs.nbytes[self.value]))

    def transfers(self, ins: int | None = None, outs: int | None = None):
        """(seconds, joules) of its transfers, or of as many as are given."""
        ins = self.life.page_ins if ins is None else ins
        outs = self.life.page_outs if outs is None else outs
        return tuple(
            float(ins * cost_in[self.value] + outs * cost_out[self.value])
            for cost_in, cost_out in (
                (self.costs.page_in_seconds, self.costs.page_out_seconds),
                (self.costs.page_in_joules, self.costs.page_out_joules),
            )
        )

    def node_again(self, times: int = 1) -> str:
        if self.value not in self.graph.producer:
            return "No node can make it again."
        number = self.graph.producer[self.value]
        node = self.graph.nodes[number]
        if not node.repeatable:
            return f"{node.name} has effects and cannot run again."
        often = "" if times == 1 else f" {times} times"
        cost = _cost(
            times * float(self.costs.seconds[number]),
            times * float(self.costs.joules[number]),
        )
        return f"Running {node.name} again{often} would cost {cost}."

    def page_out_and_in(self) -> str:
        if not self.graph.values[self.value].pageable:
            return "It is a PRNG key, which is never paged."
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
        texts = []
        if self.value in self.graph.donated:
            texts.append("A donated argument: in RAM until its last read.")
        elif self.value in self.graph.landing:
            texts.append(
                f"Written to storage, where the caller keeps it: "
                f"{_cost(*self.transfers())}."
            )
        if self.life.idle_seconds <= 0:
            return " ".join([*texts, "Never idle: freeing it earlier saves nothing."])
        idle = format_seconds(self.life.idle_seconds)
        texts.append(f"Freeing it while it is idle would save {self.size} for {idle}.")
        return " ".join([*texts, self.node_again(), self.page_out_and_in()])

    def repeated(self, again: int) -> str:
        number = self.graph.producer[self.value]
        node = self.graph.nodes[number]
        cost = _cost(
            again * float(self.costs.seconds[number]),
            again * float(self.costs.joules[number]),
        )
        if len(node.writes) > 1:
            cost += f" for its {len(node.writes)} results"
        return (
            f"{node.name} runs {again + 1} times; running it again costs {cost}. "
            f"{self.absent()} {self.page_out_and_in()}"
        )

    def paged(self) -> str:
        life = self.life
        seconds, joules = self.transfers()
        hidden = max(0.0, seconds - life.waiting_seconds)
        out = "On storage from the start, " if not life.page_outs else "Paged out, "
        often = "once" if life.page_ins == 1 else f"{life.page_ins} times"
        return (
            f"{out}in {often}: {format_seconds(seconds)}, of which "
            f"{format_seconds(hidden)} hidden under computing, and "
            f"{format_joules(joules)}. {self.absent()} {self.node_again(life.page_ins)}"
        )
