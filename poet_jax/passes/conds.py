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

from poet_jax.core.equation import Equation, Literal
from poet_jax.core.graph import Graph, Node, Value
from poet_jax.core.rebuilding import without_dead_code
from poet_jax.core.trace import trace_body, trace_part
from poet_jax.passes.grouping import TINY_BYTES
from poet_jax.passes.operations import ELEMENTWISE, is_light
from poet_jax.passes.splicing import Splicer

# A `cond` for each few bytes would cost more than what it computes.
LEAST_BYTES = 2**16


def open_conds(graph: Graph) -> Graph:
    """`graph` with several smaller `cond`s, or none, in place of large ones.

    Where the branch is known when the function is traced, its equations become nodes.
    Elsewhere results that have no work in common get a `cond` each; tiny values are
    computed for each of them, and the norm of all gradients in a `cond` before these.
    A `cond` with an effect stays as it is.
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
        self.scalars: dict[Any, np.ndarray | None] = {}  # by value; None if unknown

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
            if any(
                self.values[old].weak_type != body.values[new].weak_type
                for old, new in zip(equation.results, body.outputs, strict=True)
                if isinstance(old, int) and old in self.graph.leaving
            ):  # the caller would see the type of another branch
                self.emit(node)
                return
            results = self.splice(
                (body, {}), operands, node.name, node.backward, is_opened=True
            )
            self.give(node, zip(equation.results, results, strict=True))
            return
        parts = _parts(branches)
        if len(parts) < 2:
            first, rest = _before_and_after(branches)
            parts = _parts(rest)
            if len(parts) > 1:
                branches = rest
                operands += self.switched(node, first, index, operands)
        if len(parts) < 2:
            self.emit(node)
            return
        for part in parts:
            bodies = [_of(body, [body.outputs[n] for n in part]) for body in branches]
            results = self.switched(node, bodies, index, operands)
            written = (equation.results[number] for number in part)
            self.give(node, zip(written, results, strict=True))

    def switched(
        self, node: Node, bodies: Sequence[Graph], index: Any, operands: Sequence[Any]
    ) -> list[Any]:
        """Results of a `cond` of other branches in place of a node."""
        used = sorted(set().union(*map(_used, bodies)))
        given = [index, *(operands[position] for position in used)]
        switch = functools.partial(_switch, bodies, used)
        return self.add(node.name, node.backward, switch, given)

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
        stack = [operand]
        while stack:  # in its own loop: there may be more of them than Python's frames
            equation = self.maker(stack[-1])
            reads = equation.reads if equation else ()
            if missing := [x for x in reads if x not in self.scalars]:
                stack += missing
                continue
            value = stack.pop()
            if value not in self.scalars:
                self.scalars[value] = self.computed(value, equation)
        return self.scalars[operand]

    def maker(self, value: Any) -> Equation | None:
        """The equation that makes a value, if it is one that may be known."""
        if value not in self.graph.producer:
            return None
        node = self.graph.nodes[self.graph.producer[value]]
        if len(node.equations) != 1:
            return None
        (equation,) = node.equations
        shapes = (*equation.operand_shapes, *equation.result_shapes)
        if equation.primitive.name not in ELEMENTWISE or any(x.shape for x in shapes):
            return None
        return equation

    def computed(self, value: Any, equation: Equation | None) -> np.ndarray | None:
        """A scalar, if what its equation reads is known."""
        if equation is None:
            constant = self.graph.constants.get(value)
            return None if constant is None else _scalar(constant)
        scalars = [
            np.asarray(x.value) if isinstance(x, Literal) else self.scalars[x]
            for x in equation.operands
        ]
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


def _of(body: Graph, outputs: Iterable[int]) -> Graph:
    """A branch that computes some of its values."""
    return without_dead_code(dataclasses.replace(body, outputs=tuple(outputs)))


def _before_and_after(branches: Sequence[Graph]) -> tuple[list[Graph], list[Graph]]:
    """Branches for the tiny values that several results need of large ones, as of the
    norm of all gradients; and branches for the results, which have them as operands.

    Light work that both need is computed in both.
    """
    tiny = [_tiny_of_large(body) for body in branches]
    kinds = [
        body.values[v] for body, own in zip(branches, tiny, strict=True) for v in own
    ]
    before, after, done = [], [], 0
    for body, own in zip(branches, tiny, strict=True):
        start = len(body.values)
        # In the place of values of other branches stands what nobody reads.
        operands = list(range(start, start + len(kinds)))
        operands[done : done + len(own)] = own
        after.append(
            dataclasses.replace(
                body,
                values=(*body.values, *kinds),
                nodes=tuple(x for x in body.nodes if not set(own) & set(x.writes)),
                arguments=(*body.arguments, *operands),
            )
        )
        part = functools.partial(_filled, _of(body, own), kinds, done)
        before.append(trace_part(part, *(body.values[v].aval for v in body.arguments)))
        done += len(own)
    return before, after


def _filled(
    body: Graph, kinds: Sequence[Value], place: int, *operands: Any
) -> list[Any]:
    """Arrays of some kinds: from a place on those of a branch, zeros elsewhere."""
    results = [jnp.zeros(x.shape, x.dtype) for x in kinds]
    results[place : place + len(body.outputs)] = body(*operands)
    return results


def _tiny_of_large(body: Graph) -> list[int]:
    """Tiny values that several results need, each of something large; none if these
    results need more than light work of what makes them."""
    found = [
        v
        for node, results in _with_results(body)
        for v in node.writes
        if results.bit_count() > 1 and not _is_tiny(body, node)
        if len(node.writes) == 1 and body.values[v].nbytes <= TINY_BYTES
        if not jnp.issubdtype(body.values[v].dtype, jax.dtypes.extended)
    ]
    before = _needed(body, found, ())
    shared = before & _needed(body, body.outputs, found)
    return found if all(is_light(body.nodes[n]) for n in shared) else []


def _needed(body: Graph, values: Iterable[int], known: Iterable[int]) -> set[int]:
    """Numbers of the nodes that make some values of a branch, if others are known."""
    needed, numbers, known = set(values), set(), set(known)
    for number, node in reversed([*enumerate(body.nodes)]):
        if not needed.isdisjoint(set(node.writes) - known):
            numbers.add(number)
            needed.update(node.reads)
    return numbers


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
    for node, results in _with_results(body):
        if results and not _is_tiny(body, node):
            yield results


def _with_results(body: Graph) -> Iterator[tuple[Node, int]]:
    """The nodes, last first, and which results need them, as bits of a number."""
    needed: Counter[int] = Counter()
    for number, v in enumerate(body.outputs):
        needed[v] |= 1 << number
    for node in reversed(body.nodes):
        results = functools.reduce(operator.or_, (needed[v] for v in node.writes))
        yield node, results
        for v in node.reads:
            needed[v] |= results


def _is_tiny(body: Graph, node: Node) -> bool:
    touched = (body.values[v].nbytes for v in (*node.reads, *node.writes))
    return is_light(node) and max(touched, default=0) <= TINY_BYTES
