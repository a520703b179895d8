"""Model of the kernels that XLA's CPU backend makes of a node's equations.

XLA fuses cheap equations into every kernel that reads them. A kernel ends, and its
value is written to memory, at a result of the node, before and after an expensive
operation such as a product, and at costly elementwise results that are read twice.
A node takes the sum over its kernels of max(compute, memory traffic). Its workspace
holds the values between its kernels.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from poet_jax.core.equation import Equation, Literal, Name, nbytes_of
from poet_jax.core.graph import Node
from poet_jax.core.rebuilding import body
from poet_jax.devices.work import (
    ELEMENTWISE_KINDS,
    Work,
    copied_bytes,
    equation_work,
    is_reduction,
    threefry_bytes,
)
from poet_jax.passes.cpu.scratch import lowered, scratch_bytes
from poet_jax.passes.operations import HEAVY


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Fused equations that run at once.

    Attributes:
      work: of the equations.
      moved_bytes: memory traffic, reads and writes.
      reads, writes: values in memory, numbered as in the node.
      copied_bytes: workspace for operands and results in another layout.
      scratch_bytes: workspace of a library or random generator.
      in_place: whether a result can overwrite an operand at its last use.
      runs: how often it runs.
      body: kernels of a loop's body, in place of work.
    """

    work: tuple[Work, ...]
    moved_bytes: float
    reads: frozenset[Name]
    writes: tuple[Name, ...]
    copied_bytes: int = 0
    scratch_bytes: int = 0
    in_place: bool = False
    runs: int = 1
    body: tuple["Kernel", ...] = ()

    def flat(self) -> Iterator["Kernel"]:
        """The kernels that do work, with their runs."""
        if not self.body:
            yield self
        for kernel in self.body:
            for x in kernel.flat():
                yield dataclasses.replace(x, runs=x.runs * self.runs)


# Their result is their operand.
_ALIASES = frozenset(
    "reshape squeeze expand_dims stop_gradient bitcast_convert_type random_wrap "
    "random_unwrap optimization_barrier".split()
)
# They read parts of an array.
_PARTS = frozenset("slice dynamic_slice gather split".split())
# YNNPACK does not fuse these into a sum.
_NO_ARITHMETIC = frozenset(
    "select_n iota gather slice dynamic_slice split pad rev transpose clamp".split()
)
# Elements move, so these cannot run in place.
_MOVING = frozenset("transpose rev gather slice dynamic_slice split pad".split())
# XLA duplicates at most so many equations in a kernel (FusionNodeIndexingEvaluation).
_MOST_TERMS = 15
_EXPENSIVE = frozenset("exp log tanh erf sine power gather".split())


def is_root(equation: Equation) -> bool:
    """Whether a kernel ends with it, so that its results are in memory."""
    name = equation.primitive.name
    return (
        name in HEAVY.difference(("gather", "reduce_precision"))
        or name == "concatenate"
        or name.startswith(("reduce_", "arg", "cum", "dynamic_update", "scatter"))
        and name != "reduce_precision"
        or is_control_flow(equation)
    )


def is_alias(equation: Equation) -> bool:
    """Whether its result is its operand, at most reshaped."""
    before, after = equation.operand_shapes[0], equation.result_shapes[0]
    name = equation.primitive.name
    return name in _ALIASES or (
        name in ("slice", "concatenate", "broadcast_in_dim")
        and before.size == after.size
        or name == "pad"
        and not any(map(any, equation.params["padding_config"]))
    )


def is_control_flow(equation: Equation) -> bool:
    """Whether it runs bodies (that of a scatter or reduction combines two elements)."""
    name = equation.primitive.name
    return bool(equation.inner) and not name.startswith(("scatter", "reduce", "select"))


def kernels(node: Node) -> tuple[Kernel, ...]:
    """Kernels of a node, in order; none without equations."""
    return _Partition(node.equations, node.writes).kernels()


class _Partition:
    """Equations cut into kernels."""

    def __init__(self, equations: Sequence[Equation], outputs: Iterable[Name]):
        self.shapes: dict[Name, jax.ShapeDtypeStruct] = {}
        self.maker: dict[Name, Equation] = {}
        self.alias: dict[Name, Name] = {}
        self.readers: dict[Name, list[Equation]] = defaultdict(list)
        self.equations = []
        for equation in inlined(equations):
            values = (*equation.operands, *equation.results)
            shapes = (*equation.operand_shapes, *equation.result_shapes)
            for x, shape in zip(values, shapes, strict=True):
                if not isinstance(x, Literal):
                    self.shapes[x] = shape
            operands = self.operands(equation)
            if operands and equation.results and is_alias(equation):
                self.alias |= dict.fromkeys(equation.results, operands[0])
                continue
            self.equations.append(equation)
            self.maker |= dict.fromkeys(equation.results, equation)
            for x in set(operands):
                self.readers[x].append(equation)
        self.outputs = {self.root(v) for v in outputs}
        self.written: set[Name] = set()
        self.aside: set[Name] = set()  # written for a sum, recomputed elsewhere
        self.repeated: dict[tuple[Name, tuple[int, ...]], int] = {}  # bytes
        terms: dict[Name, int] = {}  # unwritten equations behind each value
        for value in self.maker:
            operands = self.operands(self.maker[value])
            terms[value] = 1 + sum(terms.get(x, 0) for x in operands)
            if self.is_written(value, terms[value]):
                self.written.add(value)
                terms[value] = 0
        for equation in self.equations:
            if is_reduction(equation) and not equation.primitive.name.startswith("arg"):
                unfused = set(self.unfused(equation))
                self.aside |= unfused - self.written
                self.written |= unfused
        self.aside = {v for v in self.aside if self.is_short(v)}

    def root(self, value: Name) -> Name:
        return self.alias.get(value, value)

    def operands(self, equation: Equation) -> list[Name]:
        return [self.root(x) for x in equation.operands if not isinstance(x, Literal)]

    def is_written(self, value: Name, terms: int) -> bool:
        """Whether a kernel writes it to memory."""
        maker, readers = self.maker[value], self.readers[value]
        if value in self.outputs or is_root(maker):
            return True
        if any(is_root(e) and not is_reduction(e) for e in readers):
            return True
        again = len(readers) > 1 or any(
            not e.result_shapes or e.result_shapes[0].size > self.shapes[value].size
            for e in readers
        )
        expensive = ELEMENTWISE_KINDS.get(maker.primitive.name) in _EXPENSIVE
        return again and (expensive or terms > _MOST_TERMS)

    def is_short(self, value: Name) -> bool:
        """Whether it is computed from values in memory alone."""
        made = [x for x in self.operands(self.maker[value]) if x in self.maker]
        return self.written.issuperset(made)

    def unfused(self, reduction: Equation) -> Iterator[Name]:
        """Values that XLA writes before a sum by YNNPACK: those with other readers, and
        those that are no float arithmetic."""
        for value in self.operands(reduction):
            maker = self.maker.get(value)
            if maker is None or value in self.written:
                continue
            is_float = jnp.issubdtype(self.shapes[value].dtype, jnp.floating)
            others = maker.primitive.name in _NO_ARITHMETIC
            if len(self.readers[value]) > 1 or others or not is_float:
                yield value
            else:
                self.repeat(maker)
                yield from self.unfused(maker)

    def repeat(self, maker: Equation) -> None:
        """Note operands that XLA broadcasts in memory, as several readers do so."""
        shape = maker.result_shapes[0]
        for x in self.operands(maker):
            sizes = [r.shape for e in self.readers[x] for r in e.result_shapes]
            same = [size for size in sizes if size == shape.shape]
            if 1 < self.shapes[x].size < shape.size and len(same) > 1:
                self.repeated[x, shape.shape] = nbytes_of(shape)

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(
            self.rooted(e) if is_root(e) else self.fused(e, writes)
            for e in self.equations
            if (writes := tuple(x for x in e.results if x in self.written))
        )

    def fused(self, equation: Equation, writes: tuple[Name, ...]) -> Kernel:
        """A kernel that ends with `equation`, with all that is fused into it."""
        inside: dict[int, Equation] = {}
        in_sum = is_reduction(equation)
        read_bytes: dict[Name, float] = defaultdict(float)

        def add(equation: Equation) -> None:
            if id(equation) in inside:
                return
            inside[id(equation)] = equation
            in_parts = equation.primitive.name in _PARTS
            for x in self.operands(equation):
                again = x not in self.written or (x in self.aside and not in_sum)
                if x in self.maker and again:
                    add(self.maker[x])
                    continue
                part = equation.result_shapes[0] if in_parts else self.shapes[x]
                read_bytes[x] = max(read_bytes[x], nbytes_of(part))

        add(equation)
        written = sum(nbytes_of(self.shapes[v]) for v in writes)
        moving = any(e.primitive.name in _MOVING for e in inside.values())
        return Kernel(
            tuple(map(equation_work, inside.values())),
            sum(read_bytes.values()) + written,
            frozenset(read_bytes),
            writes,
            in_place=not (moving or in_sum) and self.aside.isdisjoint(writes),
        )

    def rooted(self, equation: Equation) -> Kernel:
        """A kernel of an expensive equation, or of a reduction with its operands."""
        writes = tuple(equation.results)
        if is_reduction(equation):
            return self.fused(equation, writes)
        reads = frozenset(self.operands(equation))
        scratch = scratch_bytes(equation)
        if is_control_flow(equation):
            parts = [(_of_body(body), runs) for body, runs in equation.inner]
            own = max(
                x.workspace_bytes() + x.unplaced_bytes(equation) for x, _ in parts
            )
            own += sum(x.sliced_bytes(equation) for x, _ in parts)
            body = tuple(
                dataclasses.replace(kernel, runs=kernel.runs * runs)
                for part, runs in parts
                for kernel in part.kernels()
            )
            return Kernel((), 0.0, reads, writes, own, scratch, body=body)
        moved = sum(map(nbytes_of, (*equation.operand_shapes, *equation.result_shapes)))
        copied = copied_bytes(equation)
        scratch += threefry_bytes(equation)
        work = (equation_work(equation),)
        in_place = equation.primitive.name.startswith(("scatter", "dynamic_update"))
        return Kernel(
            work, moved + 2 * copied, reads, writes, copied, scratch, in_place
        )

    @property
    def results_bytes(self) -> int:
        made = (self.shapes[v] for v in self.outputs if v in self.maker)
        return sum(map(nbytes_of, made))

    def unplaced_bytes(self, flow: Equation) -> int:
        """Bytes of results of a body that it cannot write to where they are to be: a
        branch writes to the results, and a loop element by element over what it
        carries."""
        if flow.primitive.name == "cond":
            return 0
        unplaced = self.results_bytes
        carried = list(carried_names(flow))
        steps = self.kernels()
        last = {v: n for n, kernel in enumerate(steps) for v in kernel.reads}
        for number, kernel in enumerate(steps):
            for value in self.outputs.intersection(kernel.writes * kernel.in_place):
                nbytes = nbytes_of(self.shapes[value])
                for old in carried:
                    fits = old in self.shapes and nbytes_of(self.shapes[old]) == nbytes
                    if fits and last.get(old, -1) <= number:
                        carried.remove(old)
                        unplaced -= nbytes
                        break
        return unplaced

    def sliced_bytes(self, loop: Equation) -> int:
        """Bytes of slices that a `scan` copies from its operands for a convolution."""
        params = loop.params
        if loop.primitive.name != "scan":
            return 0
        first = params["num_consts"] + params["num_carry"]
        name = "conv_general_dilated"
        return sum(
            nbytes_of(self.shapes[v])
            for v in range(first, len(loop.operands))
            if any(e.primitive.name == name for e in self.readers.get(v, ()))
        )

    def workspace_bytes(self) -> int:
        """Most bytes alive at once besides operands and results.

        As in XLA, buffers of results that are not written yet serve as workspace.
        """
        steps = self.kernels()
        last = {v: n for n, kernel in enumerate(steps) for v in kernel.reads}
        alive: dict[Name, None] = {}  # in order
        most = 0
        for number, kernel in enumerate(steps):
            if kernel.in_place:
                free = [v for v in alive if last.get(v) == number]
                for value in kernel.writes:
                    nbytes = nbytes_of(self.shapes[value])
                    old = [v for v in free if nbytes_of(self.shapes[v]) == nbytes]
                    if old and old[0] not in self.outputs:
                        del alive[old[0]]
                        free.remove(old[0])
            alive.update(dict.fromkeys(kernel.writes))
            here = kernel.copied_bytes + sum(self.repeated.values())
            here += sum(nbytes_of(self.shapes[v]) for v in alive)
            beyond = max(here - self.results_bytes, 0)
            most = max(most, beyond + kernel.scratch_bytes)
            alive = {
                v: None for v in alive if v in self.outputs or last.get(v, -1) > number
            }
        return most


def workspace_bytes(node: Node) -> int:
    """Workspace of a node: what it allocates besides operands and results."""
    return _Partition(node.equations, node.writes).workspace_bytes()


def carried_names(loop: Equation) -> range:
    """The names that a loop's body has for what it carries."""
    params = loop.params
    if loop.primitive.name == "scan":
        first = params["num_consts"]
        return range(first, first + params["num_carry"])
    first = params.get("body_nconsts", 0)
    return range(first, first + len(loop.results))


def _of_body(equations: Sequence[Equation]) -> "_Partition":
    """Partition of a loop's body; what it does not read itself are its results."""
    read = {x for e in equations for x in e.operands if not isinstance(x, Literal)}
    return _Partition(equations, {x for e in equations for x in e.results} - read)


def inlined(equations: Sequence[Equation]) -> Iterator[Equation]:
    """Equations, with the equations of a lowering in place of the one it computes."""
    for equation in equations:
        if equation.lowering is None:
            yield equation
            continue
        graph = lowered(equation)
        names: dict[int, Any] = dict(
            zip(graph.arguments, equation.operands, strict=True)
        )
        names |= dict(zip(graph.outputs, equation.results, strict=True))
        yield from body(graph, names)
