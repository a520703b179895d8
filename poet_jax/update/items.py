"""The items of a step, of which a search chooses some to train: its graph and what it
may leave out."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from poet_jax.api.schedule import Schedule, make_schedule
from poet_jax.api.transform import Scheduled
from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph, with_nodes
from poet_jax.core.plan import parse_budget
from poet_jax.core.trace import path_name, without_dead_code
from poet_jax.planners.milp.choice import Choice
from poet_jax.planners.planner import keep_everything
from poet_jax.update.part import Part
from poet_jax.update.scheme import Update, matches

NEVER = -1  # the item of what gains nothing


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


class Items:
    """The items of a step that trains all of them.

    Attributes:
      gains: of each; those that gain nothing are no items.
      all: their numbers.
      graph, costs: of that step, after the passes.
      budget: of the search, in bytes and seconds; a percentage is of what keeping
        everything in that step needs.
      choice: what the graph may leave out.
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
        self._scheduled, self._update = beneath.scheduled, update
        self._patterns = [pattern for pattern, gain in gains.items() if gain > 0]
        self.gains = [gains[pattern] for pattern in self._patterns]
        self.all = frozenset(range(len(self.gains)))
        self._searched = frozenset(gains)
        self._traced = beneath.scheduled.traced(*beneath.args)
        if self._traced.stored:
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
        trees = self._traced.in_tree, self._traced.out_tree
        counts = len(self._traced.arguments), len(self._traced.outputs)
        ins, outs = (
            _under(tree, count, prefix)
            for tree, count, prefix in zip(trees, counts, beneath.state, strict=True)
        )
        place = {path: leaf for leaf, path in ins.items()}
        # Of each argument and output: the item that alone needs it.
        self._arguments: list[int | None] = [None] * counts[0]
        self._outputs: list[int | None] = [None] * counts[1]
        self._instead: dict[int, int] = {}  # argument that stays, by output
        root = f"{beneath.params}/"
        paths = [x.removeprefix(root) for x in outs.values() if x.startswith(root)]
        for leaf, name in outs.items():
            # A moment's name ends like its parameter's, and maybe like an outer one's.
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
        budget = parse_budget(self._scheduled.budget, keep_all_bytes)
        self.budget = budget.on_storage_of(self._scheduled.store_bytes, self.graph)
        self.choice = self._choice(self.graph)

    def gain(self, chosen: Iterable[int]) -> float:
        return sum(self.gains[k] for k in sorted(chosen))

    def names(self, chosen: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._patterns[k] for k in sorted(chosen))

    def update(self, chosen: Iterable[int]) -> Update:
        """That trains what is chosen, and what is trained in any case."""
        items = self.names(chosen)
        fractions = {
            pattern: fraction
            for pattern, fraction in self._update.fractions.items()
            if pattern in items or pattern not in self._searched
        }
        return dataclasses.replace(self._update, fractions=fractions)

    def _leaves(self, chosen: frozenset[int]) -> "_Leaves":
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

    def _priced(self, chosen: frozenset[int]) -> tuple[Graph, Costs]:
        """The graph of that step after the passes, and its costs."""
        return self._scheduled.priced(_part(self._traced, self._leaves(chosen)))

    def _choice(self, graph: Graph) -> Choice:
        """Of `graph`, which passes made of that of all items."""
        leaves = self._leaves(self.all)
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

    def restricted(self, chosen: frozenset[int]) -> tuple[Graph, Costs]:
        """The graph and its costs without what only other items need."""
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
        """Of the step that trains what is chosen. Raises BudgetTooSmall."""
        graph, costs = self._priced(chosen)
        return make_schedule(graph, costs, self.budget, self._scheduled.planner)


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
    return with_nodes(graph, graph.nodes)


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
