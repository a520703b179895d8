"""Items of a step that a search may leave out, and the step's graph without them."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from poet_jax.api.planning import make_schedule
from poet_jax.api.schedule import Schedule
from poet_jax.api.transform import Scheduled
from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import parse_budget
from poet_jax.core.rebuilding import with_nodes, without_dead_code
from poet_jax.planners.milp.choice import Choice
from poet_jax.planners.planner import keep_everything
from poet_jax.update.part import Part, named
from poet_jax.update.scheme import Update, matches

NEVER = -1  # the item of parameters that gain nothing


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayStep:
    """A training step as a function of arrays.

    Attributes:
      scheduled, args: the function and its arguments, arrays or shapes.
      update, part: the scheme, and the part that it trains.
      state: paths of the replaced state, in the arguments and in the outputs.
      params: path of the parameters within that state.
    """

    scheduled: Scheduled
    args: tuple[Any, ...]
    update: Update | None
    part: Part
    state: tuple[str, str]
    params: str


class Items:
    """The items of a step that trains all of them.

    Attributes:
      gains: of the items, patterns with a positive gain.
      all: their numbers.
      graph, costs: of the step that trains all, after the passes.
      budget: of the search; a percentage is of that step's peak without remat.
      choice: the nodes and outputs that the graph may leave out.
    """

    def __init__(self, step: ArrayStep, gains: Mapping[str, float]):
        update = step.update
        if update is None or update.last or update.ranks:
            raise ValueError(
                "A search needs a step with an Update of fractions, one pattern per "
                f"item, got {update or 'everything'}. Use "
                "train_step(..., update={pattern: 1.0, ...})."
            )
        for pattern in gains.keys() - update.fractions.keys():
            raise ValueError(
                f"`gains` has {pattern!r}, which the step does not train; its patterns "
                f"are {', '.join(map(repr, update.fractions))}. Use a train_step whose "
                "update has a fraction for each item."
            )
        gains = {pattern: _finite(pattern, gain) for pattern, gain in gains.items()}
        self._scheduled, self._update = step.scheduled, update
        self._patterns = [pattern for pattern, gain in gains.items() if gain > 0]
        always = (x for pattern, x in update.fractions.items() if pattern not in gains)
        if not (self._patterns or any(always)):
            raise ValueError(
                f"No gain is above 0, got {gains}, so nothing would be trained. A "
                "search chooses among items of a gain above 0, and always trains "
                "patterns that have no gain. Give an item a gain above 0, or leave it "
                "out of `gains`."
            )
        self.gains = [gains[pattern] for pattern in self._patterns]
        self.all = frozenset(range(len(self.gains)))
        self._searched = frozenset(gains)
        self._traced = step.scheduled.traced(*step.args)
        if self._traced.stored:
            raise ValueError(
                "A search needs the step's state in RAM. Pass a state of arrays, or "
                "of jax.ShapeDtypeStruct."
            )
        owners = {}
        for path, _ in step.part.trained or ():
            pattern = [p for p in update.fractions if matches(p, path)][-1]
            if pattern in gains:
                worth = gains[pattern] > 0
                owners[path] = self._patterns.index(pattern) if worth else NEVER
        trees = self._traced.in_tree, self._traced.out_tree
        counts = len(self._traced.arguments), len(self._traced.outputs)
        ins, outs = (
            _under(tree, prefix) for tree, prefix in zip(trees, step.state, strict=True)
        )
        place = {path: leaf for leaf, path in ins.items()}
        # For each argument and output, the one item that needs it.
        self._arguments: list[int | None] = [None] * counts[0]
        self._outputs: list[int | None] = [None] * counts[1]
        self._instead: dict[int, int] = {}  # argument that stays, by output
        root = f"{step.params}/"
        paths = [x.removeprefix(root) for x in outs.values() if x.startswith(root)]
        for leaf, name in outs.items():
            # A moment's path ends with its parameter's; the longest match is that.
            ends = (x for x in paths if name.endswith(f"/{x}"))
            path = max(ends, key=len, default="")
            if path not in owners:
                continue
            self._outputs[leaf] = owners[path]
            if name == root + path:
                self._instead[leaf] = place[name]
            elif name in place:
                self._arguments[place[name]] = owners[path]
        self.graph, self.costs = self._priced(self.all)
        keep_all_bytes = keep_everything(self.graph, self.costs).usage.peak_bytes
        budget = parse_budget(step.scheduled.budget_for(*step.args), keep_all_bytes)
        self.budget = budget.on_storage_of(self._scheduled.store_bytes, self.graph)
        self.choice = self._choice(self.graph)

    def gain(self, chosen: Iterable[int]) -> float:
        return sum(self.gains[k] for k in sorted(chosen))

    def names(self, chosen: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._patterns[k] for k in sorted(chosen))

    def least_worth(self, chosen: frozenset[int]) -> int:
        """The item with the least gain per second of the nodes that it alone needs."""

        def worth(item: int) -> float:
            own = [
                n
                for n, users in enumerate(self.choice.nodes)
                if users is not None and users & chosen == {item}
            ]
            return self.gains[item] / max(float(self.costs.seconds[own].sum()), 1e-12)

        return min(sorted(chosen), key=worth)

    def update(self, chosen: Iterable[int]) -> Update:
        """The scheme that trains the chosen items, and all patterns not searched."""
        items = self.names(chosen)
        fractions = {
            pattern: fraction
            for pattern, fraction in self._update.fractions.items()
            if pattern in items or pattern not in self._searched
        }
        return dataclasses.replace(self._update, fractions=fractions)

    def _leaves(self, chosen: frozenset[int]) -> "_Leaves":
        """Leaves of the step that trains `update(chosen)`."""
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

    def _priced(self, chosen: frozenset[int]) -> tuple[Graph, Costs]:
        """The graph of the step that trains `update(chosen)`, and its costs."""
        return self._scheduled.priced(_part(self._traced, self._leaves(chosen)))

    def _choice(self, graph: Graph) -> Choice:
        """The choice in `graph`, of all items and after the passes."""
        leaves = self._leaves(self.all)
        outputs = dict(zip(leaves.outputs, graph.outputs, strict=True))
        arguments = dict(zip(leaves.arguments, graph.arguments, strict=True))
        users: list[set[int | None]] = [set() for _ in graph.nodes]
        for item in (None, *sorted(self.all)):
            ends = [
                x
                for leaf, v in outputs.items()
                if self._outputs[leaf] == item
                for x in graph.pieces(v)
            ]
            for node in _ancestors(graph, ends):
                users[node].add(item)
        returned: dict[int, list[tuple[int, int | None]]] = {}
        for leaf, v in outputs.items():
            item = self._outputs[leaf]
            if item in self.all:
                stays = self._instead.get(leaf)
                olds = () if stays is None else graph.pieces(arguments[stays])
                pairs = itertools.zip_longest(graph.pieces(v), olds)
                returned.setdefault(item, []).extend(pairs)
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

    def restricted(self, chosen: frozenset[int]) -> tuple[Graph, Costs]:
        """`graph` and `costs` without nodes and values that only other items need."""
        whole, part = self._leaves(self.all), self._leaves(chosen)
        argument = {leaf: n for n, leaf in enumerate(whole.arguments)}
        output = {leaf: n for n, leaf in enumerate(whole.outputs)}
        smaller = _part(
            self.graph,
            _Leaves(
                [argument[leaf] for leaf in part.arguments],
                [output[leaf] for leaf in part.outputs],
                {output[a]: argument[b] for a, b in part.instead.items()},
            ),
        )
        number = {value.name: v for v, value in enumerate(self.graph.values)}
        values = [number[value.name] for value in smaller.values]
        nodes = [
            n
            for n, users in enumerate(self.choice.nodes)
            if users is None or not users.isdisjoint(chosen)
        ]
        return smaller, self.costs.of(nodes, values)

    def schedule(self, chosen: frozenset[int]) -> Schedule:
        """Schedule of the step that trains `chosen`. Raises BudgetTooSmall."""
        graph, costs = self._priced(chosen)
        return make_schedule(graph, costs, self.budget, self._scheduled.planner)


def _finite(pattern: str, gain: Any) -> float:
    """A gain as a float. Raises ValueError unless it is a finite number."""
    with contextlib.suppress(TypeError, OverflowError):
        if math.isfinite(gain):
            return float(gain)
    raise ValueError(
        f"The gain of {pattern!r} must be a finite number, got {gain!r}. An item whose "
        f"gain is not above 0 is never chosen. Use for example {{{pattern!r}: 0.5}}."
    )


class _Leaves(NamedTuple):
    """Leaves of a step that trains some of its items.

    Attributes:
      arguments, outputs: numbers in the step that trains all items.
      instead: by output, the argument that is returned unchanged.
    """

    arguments: list[int]
    outputs: list[int]
    instead: dict[int, int]


def _under(tree: Any, prefix: str) -> dict[int, str]:
    """{leaf: its path below `prefix`} of the leaves below it."""
    numbers = jax.tree.unflatten(tree, range(tree.num_leaves))
    paths = {leaf: path for path, leaf in named(numbers)}
    start = f"{prefix}/"
    return {n: x.removeprefix(start) for n, x in paths.items() if x.startswith(start)}


def _part(graph: Graph, leaves: _Leaves) -> Graph:
    """`graph` with these leaves alone; it has no trees, so it cannot be called."""
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
        v  # a grouped node may also read arguments of other items
        for leaf, v in enumerate(graph.arguments)
        if leaf in stay or graph.readers[v]
    )
    donated = graph.donated.intersection(arguments)
    graph = dataclasses.replace(graph, arguments=arguments, donated=donated)
    return with_nodes(graph, graph.nodes)


def _ancestors(graph: Graph, values: Iterable[int]) -> set[int]:
    """Nodes that `values` depend on."""
    found: set[int] = set()
    todo = list(values)
    while todo:
        node = graph.producer.get(todo.pop())
        if node is not None and node not in found:
            found.add(node)
            todo.extend(graph.nodes[node].reads)
    return found
