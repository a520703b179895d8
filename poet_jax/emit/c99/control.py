"""Loops and branches, whose bodies are steps of the program around them.

A body's arrays have places in the arena as all others, alive where its steps are. What
an iteration hands on to the next has one place: its successor is made there where that
is safe, and copied there otherwise. Branches share their memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poet_jax.core.equation import Equation
from poet_jax.emit.c99.buffers import Buffer, Pointer, Step
from poet_jax.emit.c99.expanding import Part, parts
from poet_jax.emit.c99.nodes import Lowering, lower_node

Pair = tuple[Buffer, Buffer]


@dataclass(frozen=True)
class _Row:
    """Elements of an array, so many from the row on that a counter of C says."""

    array: Buffer
    counter: str
    size: int

    def text(self, pointer: Pointer) -> str:
        return f"({pointer(self.array)} + {self.counter} * {self.size})"


@dataclass
class _Inside:
    """A body of control flow.

    Attributes:
      run: number of the instruction that it belongs to.
      steps: in order.
      results: its buffers.
    """

    run: int
    steps: list[Step]
    results: list[Buffer]

    def makes(self, buffer: Buffer) -> bool:
        return any(buffer in step.writes for step in self.steps)

    def own(self, buffer: Buffer) -> Buffer:
        """A result, or a copy of one that comes from outside."""
        if self.makes(buffer):
            return buffer
        copy = replace(buffer, data=None)
        self.steps.append(_copy(buffer, copy, self.run))
        return copy

    def hand_on(self, places: Sequence[Buffer]) -> tuple[Pair, ...]:
        """(place, result that becomes it) of each that is not there already."""
        pairs = zip(places, self.results, strict=False)
        return tuple((place, self.own(x)) for place, x in pairs if x is not place)


def _inside(lowering: Lowering, part: Part, operands: Sequence[Buffer]) -> _Inside:
    """A body, given the buffers of its arguments. Raises Unsupported."""
    known: dict[Any, Buffer] = dict(zip(part.arguments, operands, strict=True))
    for name, data in part.constants.items():
        known[name] = Buffer("constant", data.shape, data.dtype.name, data)
    inner = lower_node(
        part.equations,
        known,
        set(part.results) - known.keys(),
        (),
        lowering.run,
        lowering.lean,
        lowering.rules,
        lowering.depth + 1,
    )
    lowering.kept.update(inner.kept)
    results = [inner.where[name] for name in part.results]
    assert all(isinstance(x, Buffer) for x in results)
    return _Inside(lowering.run, inner.steps, results)  # type: ignore[arg-type]


def _operands(lowering: Lowering, equation: Equation) -> list[Buffer]:
    buffers = [lowering.buffer(equation, n) for n in range(len(equation.operands))]
    lowering.flush()
    return buffers


def _moved(pairs: Iterable[Pair], pointer: Pointer) -> list[str]:
    """Lines that copy each second buffer to the first."""
    places = [(pointer(to), pointer(x), to.nbytes) for to, x in pairs]
    return [f"memcpy({to}, {x}, {size});" for to, x, size in places if to != x]


def _copy(old: Buffer, new: Buffer, run: int) -> Step:
    pairs = [(new, old)]
    return Step((old,), (new,), lambda p: _moved(pairs, p), ((old, new),), run)


def _bracket(
    run: int,
    reads: Iterable[Buffer],
    writes: Iterable[Buffer],
    line: str,
    copies: Sequence[Pair] = (),
    over: Sequence[Pair] = (),
    ties: Sequence[Pair] = (),
) -> Step:
    """A line of C that begins or ends a block, if any, after copies before it."""
    return Step(
        tuple(dict.fromkeys(reads)),
        tuple(dict.fromkeys(writes)),
        lambda pointer: [*_moved(copies, pointer), *filter(None, [line])],
        tuple(over),
        run,
        has_effect=True,
        ties=tuple(ties),
        is_bracket=True,
    )


def _in_rows(step: Step, rows: dict[Buffer, _Row]) -> Step:
    """A step with rows of arrays in place of some buffers."""
    if rows.keys().isdisjoint((*step.reads, *step.writes)):
        return step

    def render(pointer: Pointer) -> list[str]:
        return step.render(lambda x: rows[x].text(pointer) if x in rows else pointer(x))

    def arrays(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
        found = (rows[x].array if x in rows else x for x in buffers)
        return tuple(dict.fromkeys(found))

    reads, writes = arrays(step.reads), arrays(step.writes)
    return replace(step, reads=reads, writes=writes, render=render)


def _push_loop(
    lowering: Lowering,
    opened: str,
    first: Sequence[Buffer],
    carry: Sequence[Buffer],
    stacked: Sequence[Buffer],
    steps: Sequence[Step],
    ties: Sequence[Pair],
) -> None:
    """Push a loop's steps: `first` is copied to `carry` before, and `stacked` are
    arrays that it makes row by row.

    What it reads from outside is alive until its end, as the next iteration reads it.
    """
    run, places = lowering.run, (*carry, *stacked)
    copies = list(zip(carry, first, strict=True))
    over = list(zip(first, carry, strict=True))
    inner = {*places, *(x for step in steps for x in step.writes)}
    outer = [x for step in steps for x in step.reads if x not in inner]
    reads = [*outer, *(new for _, new in ties)]
    lowering.push(_bracket(run, first, places, opened, copies, over))
    for step in steps:
        lowering.push(step)
    lowering.push(_bracket(run, reads, places, "}", ties, ties=ties))


def _used(lowering: Lowering, equation: Equation, first: int = 0) -> list[int]:
    """Numbers of results: those before `first`, and those that somebody reads."""
    names = enumerate(equation.results)
    return [n for n, name in names if n < first or name in lowering.used]


def _with_results(part: Part, numbers: Sequence[int]) -> Part:
    return replace(part, results=tuple(part.results[n] for n in numbers))


def scan(lowering: Lowering, equation: Equation) -> None:
    """A `for`, which reads and writes rows of arrays where they lie."""
    params = equation.params
    (part,) = parts(equation)
    second = params["num_consts"]
    carries, third = params["num_carry"], second + params["num_carry"]
    operands = _operands(lowering, equation)
    carry = [lowering.result(equation, n) for n in range(carries)]
    counter, rows = f"n{lowering.depth}", {}
    arguments = [*operands[:second], *carry]
    for array, aval in zip(
        operands[third:], equation.operand_shapes[third:], strict=True
    ):
        row = Buffer("row", aval.shape[1:], aval.dtype.name)
        rows[row] = _Row(array, counter, row.size)
        arguments.append(row)
    used = _used(lowering, equation, carries)
    inside = _inside(lowering, _with_results(part, used), arguments)
    ties = inside.hand_on(carry)
    stacked = [lowering.result(equation, n) for n in used[carries:]]
    for array, x in zip(stacked, inside.results[carries:], strict=True):
        _stack(inside, x, _Row(array, counter, x.size), rows, ties)
    steps = [_in_rows(step, rows) for step in inside.steps]
    last = params["length"] - 1
    opened = f"for (int32_t {counter} = 0; {counter} <= {last}; ++{counter}) {{"
    if params["reverse"]:
        opened = f"for (int32_t {counter} = {last}; {counter} >= 0; --{counter}) {{"
    first = operands[second:third]
    _push_loop(lowering, opened, first, carry, stacked, steps, ties)


def _stack(
    inside: _Inside,
    x: Buffer,
    row: _Row,
    rows: dict[Buffer, _Row],
    ties: Sequence[Pair],
) -> None:
    """Let a row of a loop's array be what an iteration has in `x`: it is made there, or
    copied as soon as it is known, if it has another place, too."""
    pairs = [*ties, *(pair for step in inside.steps for pair in step.ties)]
    is_made = inside.makes(x)
    if is_made and x not in rows and all(x not in pair for pair in pairs):
        rows[x] = row
        return
    place = replace(x, data=None)
    rows[place] = row
    copy = _copy(x, place, inside.run)
    inside.steps.insert(len(inside.steps) if is_made else 0, copy)


def repeat(lowering: Lowering, equation: Equation) -> None:
    """A `for` that ends where its condition is not true."""
    condition, body = parts(equation)
    second = equation.params["cond_nconsts"]
    third = second + equation.params["body_nconsts"]
    operands = _operands(lowering, equation)
    first = operands[third:]
    carry = [lowering.result(equation, n) for n in range(len(first))]
    test = _inside(lowering, condition, [*operands[:second], *carry])
    inside = _inside(lowering, body, [*operands[second:third], *carry])
    ties = inside.hand_on(carry)
    (goes_on,) = test.results
    leave = Step(
        tuple(dict.fromkeys([goes_on, *carry])),
        (),
        lambda pointer: [f"if (!*{pointer(goes_on)}) break;"],
        run=lowering.run,
        has_effect=True,
    )
    steps = [*test.steps, leave, *inside.steps]
    _push_loop(lowering, "for (;;) {", first, carry, [], steps, ties)


def branch(lowering: Lowering, equation: Equation) -> None:
    """An `if` for each branch. As in XLA, the last branch takes all other indices."""
    index, *operands = _operands(lowering, equation)
    used, run = _used(lowering, equation), lowering.run
    results = [lowering.result(equation, n) for n in used]
    bodies = parts(equation)
    for number, part in enumerate(bodies):
        inside = _inside(lowering, _with_results(part, used), operands)
        ties = inside.hand_on(results)
        lowering.push(_branch(run, index, number, number + 1 == len(bodies)))
        for step in inside.steps:
            lowering.push(step)
        made = [x for _, x in ties]
        lowering.push(_bracket(run, made, (), "", ties, ties=ties))
    lowering.push(_bracket(run, (), results, "}"))


def _branch(run: int, index: Buffer, number: int, is_last: bool) -> Step:
    ended = "} else " if number else ""

    def render(pointer: Pointer) -> list[str]:
        test = "" if is_last else f"if (*{pointer(index)} == {number}) "
        return [f"{ended}{test}{{"]

    return Step((index,), (), render, run=run, has_effect=True, is_bracket=True)


RULES = {"scan": scan, "while": repeat, "cond": branch}
