"""Find the blocks of a model in its parameters' paths, and their order in its loss."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax

from poet_jax.core.trace import trace


def numbered_blocks(sizes: dict[str, int]) -> list[list[str]]:
    """Paths of each block, in order of their numbers; see `last_blocks`.

    `sizes` are the parameters' sizes by path.
    """
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
    """Per leaf of `params`, the number of the first equation that uses it.

    Infinite for an unused leaf. An equation of that leaf alone, such as a cast or a sum
    for weight decay, is no use, since all leaves may be cast or summed at the start.
    """
    graph = trace(loss, *jax.eval_shape(lambda *args: args, params, *rest))

    def use(value: int) -> float:
        uses = [math.inf]
        for number in graph.readers[value]:
            node = graph.nodes[number]
            is_sum = not any(graph.values[v].shape for v in node.writes)
            if len(node.reads) > 1:
                uses.append(number)
            elif not (is_sum and graph.values[value].shape):
                uses += map(use, node.writes)
        return min(uses)

    count = len(jax.tree.leaves(params))
    return [use(value) for value in graph.arguments[:count]]
