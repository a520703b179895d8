"""What a graph may leave out, as variables of a program over its cuts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from poet_jax.planners.milp.solver import Model, xsum


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Items, of which a step does some, and the parts of its graph that serve each.

    Attributes:
      gains: [K] what each item is worth, above 0.
      nodes: [N] the items for which each node runs; None for one that always runs.
      returned: by item, the values that the step returns if it does the item, each with
        the argument that it returns otherwise, or None.
    """

    gains: Sequence[float]
    nodes: Sequence[frozenset[int] | None]
    returned: dict[int, tuple[tuple[int, int | None], ...]]


class Chosen:
    """A choice as variables of a model, (11) to (13).

    Attributes:
      items: [K] binaries.
      unit: the gain that counts as one in the model, as solvers stop at absolute
        differences, too.
    """

    def __init__(self, model: Model, choice: Choice):
        self.model, self.choice = model, choice
        self.items = [model.add_var(binary=True) for _ in choice.gains]
        self.unit = max(choice.gains, default=1.0)
        self._runs: dict[frozenset[int], Any] = {}

    def runs(self, node: int) -> Any:
        """Whether a base node runs: 1, or a variable."""
        items = self.choice.nodes[node]
        if items is None:
            return 1
        if len(items) == 1:
            return self.items[min(items)]
        if items not in self._runs:
            self._runs[items] = runs = self.model.add_var(ub=1)
            for item in items:
                self.model += runs >= self.items[item]  # (11)
        return self._runs[items]

    def returned(self, values: Sequence[int]) -> list[tuple[int, Any]]:
        """(value, whether it is returned) of what the step may return. (12)"""
        pairs = {
            v: (argument, y)
            for item, y in enumerate(self.items)
            for v, argument in self.choice.returned.get(item, ())
        }
        result: list[tuple[int, Any]] = []
        for v in values:
            if v not in pairs:
                result.append((v, 1))
                continue
            argument, y = pairs[v]
            result.append((v, y))
            if argument is not None:
                result.append((argument, 1 - y))
        return result

    def loss(self) -> Any:
        """What the items that are left out would gain, in `unit`s: the objective.
        (13)"""
        worth = zip(self.choice.gains, self.items, strict=True)
        return xsum(gain / self.unit * (1 - y) for gain, y in worth)
