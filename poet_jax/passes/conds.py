"""What a `cond` computes, in nodes of its own: `Graph -> Graph`, before `group`.

A `cond` is one equation, of all that one of its branches may need. `optax.MultiSteps`
has the whole update of the optimizer in one, and `optax.apply_if_finite`, too: all
gradients would wait for it, and all updates stand beside them.
"""

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from poet_jax.core.equation import Literal
from poet_jax.core.graph import Graph, Node
from poet_jax.core.rebuilding import without_dead_code
from poet_jax.core.trace import trace_body
from poet_jax.passes.grouping import TINY_BYTES
from poet_jax.passes.operations import ELEMENTWISE, is_light
from poet_jax.passes.splicing import Splicer

# A `cond` for each few bytes would cost more than what it computes.
LEAST_BYTES = 2**16


def open_conds(graph: Graph) -> Graph:
    """`graph` with several smaller `cond`s, or none, in place of large ones.

    Where the branch is known when the function is traced, its equations become nodes.
    Elsewhere results that have no work in common get a `cond` each; tiny values are
    computed for each of them. A `cond` with an effect stays as it is.
    """
    given = {*graph.arguments, *graph.constants} - graph.donated
    return _opened(graph, {*given, *graph.outputs})


def _opened(graph: Graph, taken: set[int]) -> Graph:
    """`graph`, whose outputs are to be other arrays than those that are `taken`."""
    if not any(map(_may_open, graph.nodes)):
        return graph
    return _Opener(graph, taken).result()


def _may_open(node: Node) -> bool:
    if len(node.equations) != 1 or not node.repeatable:
        return False
    return node.equations[0].primitive.name == "cond"


class _Opener(Splicer):
    def __init__(self, graph: Graph, taken: set[int]):
        super().__init__(graph)
        self.taken = taken

    def visit(self, node: Node) -> None:
        if not _may_open(node):
            self.emit(node)
            return
        (equation,) = node.equations
        traced = map(trace_body, equation.params["branches"])
        branches = [_opened(body, set()) for body in traced]
        index, *operands = equation.renamed(self.instead).operands
        if (number := self.known(equation.operands[0])) is not None:
            body = branches[min(max(int(number), 0), len(branches) - 1)]
            results = self.splice(
                (body, {}), operands, node.name, node.backward, is_opened=True
            )
            self.give(node, zip(equation.results, results, strict=True))
            return
        parts = _parts(branches)
        if len(parts) < 2:
            self.emit(node)
            return
        for part in parts:
            bodies = [_of(body, part) for body in branches]
            used = sorted(set().union(*map(_used, bodies)))
            given = [index, *(operands[position] for position in used)]
            switch = functools.partial(_switch, bodies, used)
            results = self.add(node.name, node.backward, switch, given)
            written = (equation.results[number] for number in part)
            self.give(node, zip(written, results, strict=True))

    def give(self, node: Node, results: Iterable[tuple[Any, Any]]) -> None:
        """Let results of a `cond` be what they are now: each output of the function is
        an array of its own."""
        for old, new in results:
            leaves = old in self.graph.leaving
            if isinstance(new, Literal) or (leaves and new in self.taken):
                (new,) = self.add(node.name, node.backward, _copied, [new])
            if leaves and self.taken:
                self.taken.add(new)
            self.instead[old] = new

    def known(self, operand: Any) -> np.ndarray | None:
        """A scalar that is known when the function is traced."""
        if isinstance(operand, Literal):
            return np.asarray(operand.value)
        if operand in self.graph.constants:
            return _scalar(self.graph.constants[operand])
        if operand not in self.graph.producer:
            return None
        node = self.graph.nodes[self.graph.producer[operand]]
        if node.equations[0].primitive.name not in ELEMENTWISE:
            return None
        (equation,) = node.equations
        scalars = [self.known(x) for x in equation.operands]
        if any(x is None for x in scalars):
            return None
        with jax.ensure_compile_time_eval():
            shapes = zip(scalars, equation.operand_shapes, strict=True)
            (result,) = equation.bind([jnp.asarray(x, to.dtype) for x, to in shapes])
            return np.asarray(result)


def _scalar(constant: Any) -> np.ndarray | None:
    """The value of a constant that is a scalar, of numbers."""
    is_array = isinstance(constant, jax.Array) and not constant.shape
    if not is_array or jnp.issubdtype(constant.dtype, jax.dtypes.extended):
        return None
    return np.asarray(constant)


def _copied(x: Any) -> tuple[Any, ...]:
    return (jnp.copy(x),)


def _switch(
    bodies: Sequence[Graph], used: Sequence[int], index: Any, *given: Any
) -> list[Any]:
    """What one of several branches makes of the operands that they need."""

    def branch(body: Graph, *given: Any) -> list[Any]:
        known = dict(zip(used, given, strict=True))
        return body(*(known.get(n) for n in range(len(body.arguments))))

    return lax.switch(index, [functools.partial(branch, x) for x in bodies], *given)


def _of(body: Graph, part: Sequence[int]) -> Graph:
    """A branch that computes a part of the results."""
    outputs = tuple(body.outputs[number] for number in part)
    return without_dead_code(dataclasses.replace(body, outputs=outputs))


def _used(body: Graph) -> Iterator[int]:
    """Positions of the arguments that a branch needs."""
    needed = {*body.outputs, *(v for node in body.nodes for v in node.reads)}
    return (n for n, v in enumerate(body.arguments) if v in needed)


def _parts(branches: Sequence[Graph]) -> list[list[int]]:
    """Numbers of the results that are computed together, in any of the branches."""
    count = len(branches[0].outputs)
    part_of = list(range(count))

    def find(number: int) -> int:
        while part_of[number] != number:
            number = part_of[number]
        return number

    for body in branches:
        for outputs in _tied(body):
            first, *others = (n for n in range(count) if outputs >> n & 1)
            for number in others:
                part_of[find(number)] = find(first)
    parts: dict[int, list[int]] = {}
    for number in range(count):
        parts.setdefault(find(number), []).append(number)
    large, small, nbytes = [], [], 0
    for part in parts.values():
        own_bytes = sum(branches[0].values[branches[0].outputs[n]].nbytes for n in part)
        if own_bytes >= LEAST_BYTES:
            large.append(part)
            continue
        if not nbytes:
            small.append([])
        small[-1] += part
        nbytes = (nbytes + own_bytes) % LEAST_BYTES
    return sorted(large + small) if len(large) > 1 else [list(range(count))]


def _tied(body: Graph) -> Iterator[int]:
    """Results that share work which is not to be done twice, as bits of a number."""
    readers: Counter[int] = Counter()  # of each value, the results that need it
    for number, v in enumerate(body.outputs):
        readers[v] |= 1 << number
    for node in reversed(body.nodes):
        outputs = functools.reduce(operator.or_, (readers[v] for v in node.writes))
        if outputs and not _is_tiny(body, node):
            yield outputs
        for v in node.reads:
            readers[v] |= outputs


def _is_tiny(body: Graph, node: Node) -> bool:
    touched = (body.values[v].nbytes for v in (*node.reads, *node.writes))
    return is_light(node) and max(touched, default=0) <= TINY_BYTES
