"""The equations of a node as steps of a C program.

What is computed element by element is no array unless somebody has to read it from
memory: it becomes a part of the loops of its readers. It is one where it is read more
often than it has elements, and costs more than a place in memory does.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from poet_jax.core.equation import Equation, Literal
from poet_jax.emit.c99 import nests, scalars
from poet_jax.emit.c99.buffers import Buffer, NoForm, Step, Unsupported, strides
from poet_jax.emit.c99.index import Form, Index, NotAffine, counters
from poet_jax.emit.c99.loops import VIRTUAL, Materialise, source

# A value is kept if that saves more work, in additions, than its elements times this.
KEEP = 2.5


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A buffer read with strides: element i of an array is at offset + i . strides."""

    buffer: Buffer
    strides: tuple[int, ...]
    offset: int


class Lowering:
    """The steps of one run of a node, as rules add them.

    Attributes:
      run: number of the instruction.
      rules: what lowers an equation that is no part of its readers' loops, by name.
      lean: inner values that are computed again for each reader.
      depth: how many bodies of control flow this one is inside of.
      where: buffer or equation of each name.
      used: names that somebody reads.
      steps: so far, without the loop nest that may still grow.
      kept: inner values that are arrays to save work, by their buffers.
    """

    def __init__(
        self,
        equations: Sequence[Equation],
        known: Mapping[Any, Buffer],
        run: int,
        lean: Collection[Any],
        forced: Collection[Any],
        rules: Mapping[str, Any],
        depth: int,
    ):
        self.equations, self.run, self.forced = equations, run, forced
        self.lean, self.rules, self.depth = lean, rules, depth
        self.where: dict[Any, Buffer | Equation] = dict(known)
        self.used: set[Any] = set()
        self.steps: list[Step] = []
        self.kept: dict[Buffer, Any] = {}
        self._open: nests.Pointwise | None = None

    def lower(self, wanted: Collection[Any], shared: Collection[Any]) -> None:
        self.used = {*wanted, *(x for e in self.equations for x in e.reads)}
        worth = _worth_keeping(self.equations, wanted, self.lean)
        for equation in self.equations:
            name = equation.primitive.name
            if name not in VIRTUAL:
                try:
                    self.rules[name](self, equation)
                except NoForm:
                    raise Unsupported(equation) from None
                continue
            (result,) = equation.results
            if result in shared and (found := self.same_array(equation)):
                self.where[result] = found
            elif result in wanted or result in self.forced or result in worth:
                buffer = self.materialised(equation)
                if result not in wanted and result not in self.forced:
                    self.kept[buffer] = result
            else:
                self.where[result] = equation
        self.flush()

    def materialised(self, equation: Equation) -> Buffer:
        """The array of an element-wise equation."""
        (result,), (aval,) = equation.results, equation.result_shapes
        # While its elements are looked for, it is an equation.
        self.where[result] = equation
        buffer = Buffer(_label(equation), aval.shape, aval.dtype.name)

        def fill(loop: nests.Pointwise) -> None:
            loop.add(buffer, result, aval.shape)

        loop = nests.Pointwise(aval.shape, self.where.__getitem__)
        fill(loop)
        last = self._open
        fits = last is not None and last.dims == loop.dims and last.joins(loop)
        if not (fits and last is not None and nests.try_join(last, fill)):
            self.flush()
            self._open = loop
        self.where[result] = buffer
        return buffer

    def flush(self) -> None:
        """End the loop nest that might have grown."""
        if self._open is not None:
            self.steps.append(self._open.step(self.run))
            self._open = None

    def push(self, step: Step) -> None:
        self.flush()
        self.steps.append(step)

    def result(self, equation: Equation, number: int = 0) -> Buffer:
        """A new array for a result of a kernel."""
        aval = equation.result_shapes[number]
        buffer = Buffer(_label(equation), aval.shape, aval.dtype.name)
        self.where[equation.results[number]] = buffer
        return buffer

    def view(self, equation: Equation, number: int) -> View | None:
        """An operand as strides over an array; None if it is computed."""
        operand, aval = equation.operands[number], equation.operand_shapes[number]
        if isinstance(operand, Literal):
            return None
        index = Index(len(aval.shape), counters(aval.shape))
        found, shape = self.where[operand], aval.shape
        while isinstance(found, Equation):
            name = found.primitive.name
            if name not in VIRTUAL or name == "iota":
                return None
            inner = found.operands[0]
            is_same = name in ("stop_gradient", "copy", "copy_p", "name")
            if isinstance(inner, Literal):
                return None
            if not is_same:
                if name in scalars.RULES:
                    return None
                try:
                    index = source(found, index, aval.shape)
                except NotAffine:
                    return None
            shape = found.operand_shapes[0].shape
            found = self.where[inner]
        flat: Form = index.linear(shape)
        return View(found, flat.coefs, flat.const)

    def same_array(self, equation: Equation) -> Buffer | None:
        """The array of an operand that has the result's elements in their order."""
        if equation.primitive.name not in ("reshape", "squeeze", "expand_dims"):
            return None
        return self.gapless(equation, 0)

    def gapless(self, equation: Equation, number: int) -> Buffer | None:
        """The array that an operand is, with another shape at most."""
        shape = equation.operand_shapes[number].shape
        view = self.view(equation, number)
        if view is None or view.offset or view.buffer.size != math.prod(shape):
            return None
        steps = zip(view.strides, strides(shape), shape, strict=True)
        is_gapless = all(a == b or size == 1 for a, b, size in steps)
        return view.buffer if is_gapless else None

    def buffer(self, equation: Equation, number: int) -> Buffer:
        """An operand as a row-major array, made now if it is computed."""
        operand, aval = equation.operands[number], equation.operand_shapes[number]
        if isinstance(operand, Literal):
            data = np.asarray(operand.value)
            return Buffer("literal", aval.shape, aval.dtype.name, data)
        if (same := self.gapless(equation, number)) is not None:
            return same
        found = self.where[operand]
        if isinstance(found, Buffer):
            return found
        return self.materialised(found)


def lower_node(
    equations: Sequence[Equation],
    known: Mapping[Any, Buffer],
    wanted: Collection[Any],
    shared: Collection[Any],
    run: int,
    lean: Collection[Any],
    rules: Mapping[str, Any],
    depth: int = 0,
) -> Lowering:
    """The steps of `equations` that make the values `wanted`; `shared` are those that
    may be another one's array, if they have its elements in their order.

    `known` are the buffers of what the node reads; `lean` are inner values that are
    computed again for each reader, though that is more work.
    """
    equations = _alive(equations, wanted)
    forced: set[Any] = set()
    while True:
        lowering = Lowering(equations, known, run, lean, forced, rules, depth)
        try:
            lowering.lower(wanted, shared)
        except Materialise as error:
            assert error.name not in forced, "what is in memory has any index"
            forced.add(error.name)
            continue
        return lowering


def _alive(equations: Sequence[Equation], wanted: Iterable[Any]) -> list[Equation]:
    alive = set(wanted)
    kept = []
    for equation in reversed(equations):
        if equation.has_effect or not alive.isdisjoint(equation.results):
            kept.append(equation)
            alive.update(equation.reads)
    return kept[::-1]


def _worth_keeping(
    equations: Sequence[Equation],
    wanted: Collection[Any],
    lean: Collection[Any],
) -> set[Any]:
    """Inner element-wise values that are read more often than they are large, if that
    would repeat more work than it takes to have them in memory."""
    weights: dict[Any, float] = defaultdict(lambda: 1.0)
    for equation in equations:
        if equation.primitive.name in VIRTUAL:
            inner = sum(weights[x] for x in equation.reads)
            weights[equation.results[0]] = scalars.weight(equation) + inner
    reads: dict[Any, float] = defaultdict(float)
    kept: set[Any] = set()
    for equation in reversed(equations):
        first = equation.results[0]
        is_virtual = equation.primitive.name in VIRTUAL
        size = math.prod(equation.result_shapes[0].shape)
        own = reads[first]
        if is_virtual and first not in wanted and first not in lean:
            if (own - size) * (weights[first] - 1) > KEEP * size:
                kept.add(first)
        if first in wanted or first in kept:
            own = size
        for x, aval in zip(equation.operands, equation.operand_shapes, strict=True):
            if not isinstance(x, Literal):
                reads[x] += own if is_virtual else math.prod(aval.shape)
    return kept


def _label(equation: Equation) -> str:
    return equation.primitive.name
