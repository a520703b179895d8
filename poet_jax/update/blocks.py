"""The blocks of a model, as seen in the paths of its parameters and in its loss."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax

from poet_jax.core.trace import trace


def numbered_blocks(sizes: dict[str, int]) -> list[list[str]]:
    """Paths of each of the numbered blocks, by number; see `last_blocks`."""
    families: dict[tuple[str, str], dict[int, list[str]]] = {}
    for path in sizes:
        steps = path.split("/")
        for place, step in enumerate(steps):
            match = re.fullmatch(r"(.*?)_?(\d+)", step)
            if match:
                family = "/".join(steps[:place]), match[1]
                members = families.setdefault(family, {})
                members.setdefault(int(match[2]), []).append(path)
    repeated = {name: x for name, x in families.items() if len(x) > 1}
    if not repeated:
        return []

    def size(name: tuple[str, str]) -> int:
        return sum(sizes[path] for paths in repeated[name].values() for path in paths)

    parent, stem = max(repeated, key=size)
    count = len(repeated[parent, stem])
    beside = [x for (p, _), x in repeated.items() if p == parent and len(x) == count]
    return [
        [path for family in beside for path in family[sorted(family)[place]]]
        for place in range(count)
    ]


def first_uses(loss: Callable, params: Any, rest: tuple) -> list[float]:
    """For each leaf, the place in the computation where it first meets another value.

    Infinite for a leaf that is not used. A cast or another equation of that leaf alone
    is no use of it, as those of all leaves may stand at the beginning.
    """
    graph = trace(loss, *jax.eval_shape(lambda *args: args, params, *rest))

    def use(value: int) -> float:
        return min(
            (
                number
                if len(graph.nodes[number].reads) > 1
                else min(map(use, graph.nodes[number].writes), default=math.inf)
                for number in graph.readers[value]
            ),
            default=math.inf,
        )

    count = len(jax.tree.leaves(params))
    return [use(value) for value in graph.arguments[:count]]
