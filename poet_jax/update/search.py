"""The search for the scheme that gains most within a budget.

First `contributions` measures what each item, a pattern of parameters, adds to a score
when it is trained alone (contribution analysis; Lin et al., NeurIPS 2022, section 3.2,
and PockEngine, section 2.2). Then `search` chooses the items of most gain together with
their schedule, in one program: memory is that of a plan with rematerialisation and
paging, not a sum over layers. `evolve` is the published search, for comparison.
"""

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import pathlib
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from poet_jax.errors import BudgetTooSmall
from poet_jax.graph import Graph, renumber
from poet_jax.part import Part
from poet_jax.plan import Budget, parse_budget
from poet_jax.planners.choice import Choice
from poet_jax.planners.cuts import Cuts
from poet_jax.planners.judge import fits, keep_everything
from poet_jax.planners.lift import crests
from poet_jax.planners.milp import MilpPlanner
from poet_jax.planners.solver import xsum
from poet_jax.price import Costs
from poet_jax.trace import path_name, without_dead_code
from poet_jax.transform import Schedule, Scheduled, make_schedule
from poet_jax.units import format_count
from poet_jax.update.scheme import Update, matches

logger = logging.getLogger("poet_jax")

TOLERANCE = 1e-4  # of the solver, as a share of the gain
NEVER = -1  # the item of what gains nothing
CUTS = 6  # moments at which the joint program counts memory


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The scheme that a search found.

    Attributes:
      update: to be given to `train_step`.
      items: the patterns it trains of those there were to choose from.
      gain: the sum of theirs.
      bound: no scheme of these items that fits gains more, in a graph whose nodes are
        grouped as in the step that trains them all. Infinite for `evolve`.
      schedule: of the step that trains these items, within the budget.
      planned: how many schemes were planned, or by `evolve` simulated.
    """

    update: Update
    items: tuple[str, ...]
    gain: float
    bound: float
    schedule: Schedule
    planned: int

    def __str__(self) -> str:
        count = format_count(len(self.items), "item")
        proof = f"none gains over {self.bound:.4g}"
        if self.bound == math.inf:
            proof = "no bound"
        elif self.bound <= self.gain * (1 + TOLERANCE):
            proof = "none gains more"
        return "\n".join(
            [
                f"{count} of a summed gain of {self.gain:.4g}; {proof}; "
                f"{format_count(self.planned, 'scheme')} tried",
                *(f"  {item}" for item in self.items),
                str(self.schedule),
            ]
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Beneath:
    """A training step as a function of arrays.

    Attributes:
      scheduled, args: the function, and its arguments, arrays or shapes.
      update, part: what the step trains.
      state: where the state that the step replaces is, in arguments and in outputs.
      params: where the parameters are in that state.
    """

    scheduled: Scheduled
    args: tuple[Any, ...]
    update: Update | None
    part: Part
    state: tuple[str, str]
    params: str


def contributions(
    score: Callable[[Update | None], float],
    items: Mapping[str, float],
    *,
    always: Mapping[str, float] | None = None,
    path: str | os.PathLike | None = None,
) -> dict[str, float]:
    """What each item adds to the score when it is trained beside `always`.

    Args:
      score: trains an update from the start, None for nothing, and returns how good the
        result is, for example its accuracy.
      items: a fraction for each pattern, as in an `Update`.
      always: what every scheme trains, such as a new head.
      path: a file of JSON lines that keeps scores, so that an analysis which was
        interrupted goes on where it was. Scores of another task need another file.

    Returns the gain of each pattern, which may be negative.
    """
    always = dict(always or {})
    known: dict[str, float] = {}
    file = None if path is None else pathlib.Path(path)
    if file is not None and file.exists():
        for line in file.read_text().splitlines():
            row = json.loads(line)
            known[json.dumps(row["update"])] = row["score"]

    def scored(fractions: dict[str, float]) -> float:
        key = json.dumps(fractions)
        if key not in known:
            known[key] = float(score(Update(fractions) if fractions else None))
            logger.info("score %.4g of %s", known[key], fractions)
            if file is not None:
                with open(file, "a") as lines:
                    row = {"update": fractions, "score": known[key]}
                    lines.write(json.dumps(row) + "\n")
        return known[key]

    base = scored(always)
    return {
        item: scored({**always, item: fraction}) - base
        for item, fraction in items.items()
    }


def search(
    step: Any,
    *args: Any,
    gains: Mapping[str, float],
    time_limit_seconds: float = 300.0,
) -> Found:
    """The items of most gain that can be trained within the step's budget.

    Args:
      step: a `train_step` that trains all items, with an `Update` of fractions. Its
        budget is that of the scheme, a percentage being of what this step needs; give a
        deadline, `Budget(memory_bytes, seconds)`, to bound the time. It does not run.
      args: of the step: (batch) for nnx, (state, batch) for linen; arrays or shapes.
      gains: what each pattern of the update is worth, as from `contributions`. Patterns
        of the update that are not in it are trained in any case.
      time_limit_seconds: for all programs together.

    Every candidate is planned as it would run, so that what is found fits. An optimizer
    that makes each update depend on all gradients, such as clipping by global norm,
    ties all items together; search without it. Raises BudgetTooSmall if not even what
    is trained in any case fits, and ValueError for gains that are of no pattern.
    """
    since = time.monotonic()
    items = _Items(step.beneath(*args), gains)
    graph, costs = items.scheduled.priced(items.graph(items.all))
    budget = items.budget(graph, costs)
    choice, cuts = items.choice(graph), _crests(graph, costs)
    planner = MilpPlanner(solver=getattr(items.scheduled.planner, "solver", "CBC"))
    refused: list[frozenset[int]] = []

    def seconds_left() -> float:
        return time_limit_seconds - (time.monotonic() - since)

    def proposed(least: float) -> tuple[frozenset[int] | None, float]:
        """Items that gain `least` and fit as far as the program sees, and a bound on
        what any gain that fit."""
        program = Cuts(graph, costs, budget, planner, cuts, choice=choice)
        assert program.chosen is not None
        y = program.chosen.items
        for chosen in refused:  # (23) what trains more needs no less
            program.model += xsum(y[k] for k in chosen) <= len(chosen) - 1
        program.model += program.chosen.loss() <= items.gain(items.all) - least
        seconds = min(seconds_left(), time_limit_seconds / 10)
        solution = program.model.optimize(max(2.0, seconds))
        limit = items.gain(items.all) - solution.bound
        if solution.values is None:
            return None, least if solution.infeasible else limit
        return frozenset(k for k in items.all if solution.values[y[k].idx] > 0.5), limit

    def least_worth(chosen: frozenset[int]) -> int:
        """The item that gains least for the seconds that only it takes."""

        def worth(item: int) -> float:
            own = [
                n
                for n, users in enumerate(choice.nodes)
                if users is not None and users & chosen == {item}
            ]
            return items.gains[item] / max(float(costs.seconds[own].sum()), 1e-12)

        return min(sorted(chosen), key=worth)

    best: frozenset[int] = frozenset()
    schedule: Schedule | None = None
    bound, planned = items.gain(items.all), 0
    while schedule is None or seconds_left() > 0:
        least = items.gain(best) * (1 + TOLERANCE)
        chosen, limit = proposed(least)
        bound = min(bound, max(limit, least))
        if chosen is None and schedule is not None:
            break  # nothing gains more, or the solver's time is up
        chosen = chosen or frozenset()
        while schedule is None or items.gain(chosen) > least:
            planned += 1
            try:
                best, schedule = chosen, items.schedule(chosen, budget)
                break
            except BudgetTooSmall:
                if not chosen:
                    raise
                logger.info("do not fit together: %s", ", ".join(items.names(chosen)))
                refused.append(chosen)
                chosen -= {least_worth(chosen)}
    return items.found(best, schedule, bound, planned)


def evolve(
    step: Any,
    *args: Any,
    gains: Mapping[str, float],
    generations: int = 40,
    population: int = 32,
    seed: int = 0,
) -> Found:
    """As `search`, by an evolutionary search among steps that keep everything.

    The published way (Lin et al., NeurIPS 2022): subsets are recombined and mutated,
    and one that exceeds memory or deadline when every node runs once and nothing is
    paged is worth nothing. What is found is then planned as by `search`.
    """
    items = _Items(step.beneath(*args), gains)
    graph, costs = items.scheduled.priced(items.graph(items.all))
    budget = items.budget(graph, costs)
    choice = items.choice(graph)
    drawn = random.Random(seed)

    @functools.cache
    def worth(chosen: frozenset[int]) -> float:
        part = items.restricted(graph, costs, choice, chosen)
        if not fits(keep_everything(*part).usage, budget):
            return -1.0
        return items.gain(chosen)

    def fitter() -> frozenset[int]:
        return max(drawn.sample(generation, 2), key=worth)

    def child() -> frozenset[int]:
        one, other = fitter(), fitter()
        mixed = {k for k in items.all if k in (one if drawn.random() < 0.5 else other)}
        flipped = {k for k in items.all if drawn.random() < 1 / len(items.all)}
        return frozenset(mixed ^ flipped)

    generation = [
        frozenset(k for k in items.all if drawn.random() < share / population)
        for share in range(population)
    ]
    for _ in range(generations):
        fittest = max(generation, key=worth)
        generation = [fittest, *(child() for _ in range(population - 1))]
    best = max(generation, key=worth)
    best = best if worth(best) >= 0 else frozenset()
    planned = worth.cache_info().currsize
    return items.found(best, items.schedule(best, budget), math.inf, planned)


class _Items:
    """The items of a step that trains all of them.

    Attributes:
      scheduled: the step.
      gains: of each; those that gain nothing are no items.
      all: their numbers.
    """

    def __init__(self, beneath: Beneath, gains: Mapping[str, float]):
        update = beneath.update
        if update is None or update.last or update.ranks:
            raise ValueError(
                f"A search was asked for in a step that trains {update or 'everything'}"
                ". It chooses among the patterns of an Update of fractions. Type "
                "train_step(..., update={pattern: 1.0, ...}) with a pattern for each "
                "item."
            )
        for pattern in gains.keys() - update.fractions.keys():
            raise ValueError(
                f"A gain was given for {pattern!r}, which the step does not train. Its "
                f"patterns are {', '.join(map(repr, update.fractions))}. Give "
                "train_step an update with a fraction for each item."
            )
        self.scheduled, self._update = beneath.scheduled, update
        self._patterns = [pattern for pattern, gain in gains.items() if gain > 0]
        self.gains = [gains[pattern] for pattern in self._patterns]
        self.all = frozenset(range(len(self.gains)))
        self._searched = frozenset(gains)
        self._graph = beneath.scheduled.traced(*beneath.args)
        if self._graph.stored:
            raise ValueError(
                "A search was asked for in a step whose state is on storage. It "
                "compares steps that have more or less state, in RAM. Give it a state "
                "of arrays, or of their shapes."
            )
        owners = {}
        for path, _ in beneath.part.trained or ():
            pattern = [p for p in update.fractions if matches(p, path)][-1]
            if pattern in gains:
                worth = gains[pattern] > 0
                owners[path] = self._patterns.index(pattern) if worth else NEVER
        trees = self._graph.in_tree, self._graph.out_tree
        counts = len(self._graph.arguments), len(self._graph.outputs)
        ins, outs = (
            _under(tree, count, prefix)
            for tree, count, prefix in zip(trees, counts, beneath.state, strict=True)
        )
        place = {path: leaf for leaf, path in ins.items()}
        # Of each argument and output: the item that alone needs it.
        self._arguments: list[int | None] = [None] * counts[0]
        self._outputs: list[int | None] = [None] * counts[1]
        self._instead: dict[int, int] = {}  # argument that stays, by output
        for path, item in owners.items():
            param = f"{beneath.params}/{path}"
            for leaf, name in outs.items():
                if name == param or name.endswith(f"/{path}"):
                    self._outputs[leaf] = item
                    if name == param:
                        self._instead[leaf] = place[name]
                    elif name in place:
                        self._arguments[place[name]] = item

    def gain(self, chosen: Iterable[int]) -> float:
        return sum(self.gains[k] for k in sorted(chosen))

    def names(self, chosen: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._patterns[k] for k in sorted(chosen))

    def leaves(self, chosen: frozenset[int]) -> "_Leaves":
        """Of the step that trains what is chosen and what is trained in any case."""
        on = {None, *chosen}
        return _Leaves(
            [leaf for leaf, k in enumerate(self._arguments) if k in on],
            [
                leaf
                for leaf, k in enumerate(self._outputs)
                if k in on or leaf in self._instead
            ],
            {
                leaf: argument
                for leaf, argument in self._instead.items()
                if self._outputs[leaf] not in on
            },
        )

    def graph(self, chosen: frozenset[int]) -> Graph:
        """Of single equations, of that step."""
        return _part(self._graph, self.leaves(chosen))

    def budget(self, graph: Graph, costs: Costs) -> Budget:
        """In bytes and seconds; a percentage is of what keeping everything needs."""
        keep_all_bytes = keep_everything(graph, costs).usage.peak_bytes
        budget = parse_budget(self.scheduled.budget, keep_all_bytes)
        return budget.on_storage_of(self._store_bytes())

    def _store_bytes(self) -> float:
        device = self.scheduled.device
        return math.inf if device is None else device.store_bytes

    def choice(self, graph: Graph) -> Choice:
        """Of `graph`, which passes made of that of all items."""
        leaves = self.leaves(self.all)
        outputs = dict(zip(leaves.outputs, graph.outputs, strict=True))
        arguments = dict(zip(leaves.arguments, graph.arguments, strict=True))
        users: list[set[int | None]] = [set() for _ in graph.nodes]
        for item in (None, *sorted(self.all)):
            ends = [v for leaf, v in outputs.items() if self._outputs[leaf] == item]
            for node in _ancestors(graph, ends):
                users[node].add(item)
        returned: dict[int, list[tuple[int, int | None]]] = {}
        for leaf, v in outputs.items():
            item = self._outputs[leaf]
            if item in self.all:
                stays = self._instead.get(leaf)
                pair = v, None if stays is None else arguments[stays]
                returned.setdefault(item, []).append(pair)
        return Choice(
            self.gains,
            [
                frozenset(k for k in users[n] if k is not None)
                if node.repeatable and None not in users[n]
                else None
                for n, node in enumerate(graph.nodes)
            ],
            {item: tuple(pairs) for item, pairs in returned.items()},
        )

    def restricted(
        self, graph: Graph, costs: Costs, choice: Choice, chosen: frozenset[int]
    ) -> tuple[Graph, Costs]:
        """`graph` and its costs without what only other items need."""
        whole, part = self.leaves(self.all), self.leaves(chosen)
        argument = {leaf: n for n, leaf in enumerate(whole.arguments)}
        output = {leaf: n for n, leaf in enumerate(whole.outputs)}
        smaller = _part(
            graph,
            _Leaves(
                [argument[leaf] for leaf in part.arguments],
                [output[leaf] for leaf in part.outputs],
                {output[a]: argument[b] for a, b in part.instead.items()},
            ),
        )
        number = {value.name: v for v, value in enumerate(graph.values)}
        values = [number[value.name] for value in smaller.values]
        nodes = [
            n
            for n, users in enumerate(choice.nodes)
            if users is None or not users.isdisjoint(chosen)
        ]
        return smaller, costs.of(nodes, values)

    def schedule(self, chosen: frozenset[int], budget: Budget) -> Schedule:
        """Raises BudgetTooSmall."""
        graph, costs = self.scheduled.priced(self.graph(chosen))
        return make_schedule(graph, costs, budget, self.scheduled.planner)

    def found(
        self, chosen: frozenset[int], schedule: Schedule, bound: float, planned: int
    ) -> Found:
        items = self.names(chosen)
        fractions = {
            pattern: fraction
            for pattern, fraction in self._update.fractions.items()
            if pattern in items or pattern not in self._searched
        }
        update = dataclasses.replace(self._update, fractions=fractions)
        gain = self.gain(chosen)
        return Found(update, items, gain, max(bound, gain), schedule, planned)


class _Leaves(NamedTuple):
    """The leaves that a step has when a part of its items is trained.

    Attributes:
      arguments, outputs: numbers among those of the step that trains all items.
      instead: the argument that an output then is, by output.
    """

    arguments: list[int]
    outputs: list[int]
    instead: dict[int, int]


def _under(tree: Any, count: int, prefix: str) -> dict[int, str]:
    """The path below `prefix` of each leaf that is below it."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(tree, range(count)))
    paths = {leaf: path_name(path) for path, leaf in leaves}
    start = f"{prefix}/"
    return {n: x.removeprefix(start) for n, x in paths.items() if x.startswith(start)}


def _part(graph: Graph, leaves: _Leaves) -> Graph:
    """What `graph` is with these leaves alone, as nothing to be called."""
    outputs = tuple(
        graph.arguments[leaves.instead[leaf]]
        if leaf in leaves.instead
        else graph.outputs[leaf]
        for leaf in leaves.outputs
    )
    graph = dataclasses.replace(graph, outputs=outputs, in_tree=None, out_tree=None)
    graph = without_dead_code(graph)
    stay = set(leaves.arguments)
    arguments = tuple(
        v  # of a node of several equations, some of other items, too
        for leaf, v in enumerate(graph.arguments)
        if leaf in stay or graph.readers[v]
    )
    donated = graph.donated.intersection(arguments)
    graph = dataclasses.replace(graph, arguments=arguments, donated=donated)
    return renumber(graph, graph.nodes)


def _ancestors(graph: Graph, values: Iterable[int]) -> set[int]:
    """The nodes that `values` depend on."""
    found: set[int] = set()
    todo = list(values)
    while todo:
        node = graph.producer.get(todo.pop())
        if node is not None and node not in found:
            found.add(node)
            todo.extend(graph.nodes[node].reads)
    return found


def _crests(graph: Graph, costs: Costs) -> set[int]:
    """Nodes at which keep-all needs most, each in a stretch of the step of its own."""
    live = [bytes_ for bytes_, _ in crests(graph, keep_everything(graph, costs))]
    edges = [len(live) * part // CUTS for part in range(CUTS + 1)]
    stretches = [range(a, b) for a, b in itertools.pairwise(edges) if a < b]
    return {max(stretch, key=live.__getitem__) for stretch in stretches}
