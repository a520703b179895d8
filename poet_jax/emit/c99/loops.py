"""Loop nests that are generated: element-wise work, fused with what it reads."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from poet_jax.core.equation import Equation, Literal
from poet_jax.emit.c99 import scalars
from poet_jax.emit.c99.buffers import (
    C_TYPES,
    Buffer,
    NoForm,
    Pointer,
    Unsupported,
    strides,
)
from poet_jax.emit.c99.index import Form, Index, NotAffine, counters, linear

Where = Callable[[Any], Buffer | Equation]

# Operations that only say where their result's elements come from.
PLACES = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose slice rev iota".split()
)
VIRTUAL = PLACES | scalars.RULES.keys()


class Materialise(Exception):
    """A value has to be in memory, as its reader's index is no affine function."""

    def __init__(self, name: Any):
        super().__init__(name)
        self.name = name


class Clash(Exception):
    """A loop reads what it makes at another place than it has just made."""


class Body:
    """The innermost lines of a loop nest, made on demand.

    Attributes:
      dims: [L] how often each loop runs.
      lines: in which `@n@` stands for access number n.
      accesses: index of each.
      loads: (buffer, index in elements, C to add to that), in order.
    """

    def __init__(self, dims: Sequence[int], where: Where):
        self.dims, self.where = tuple(dims), where
        self.lines: list[str] = []
        self.accesses: list[Form] = []
        self.loads: list[tuple[Buffer, Form, str]] = []
        self.made: dict[Buffer, tuple[Form, str]] = {}  # by this body itself
        self._known: dict[Any, str] = {}

    @property
    def identity(self) -> Index:
        """The element of an array of shape `dims` that the counters are at."""
        forms = counters(self.dims)
        flat = linear(len(self.dims), forms, strides(self.dims))
        return Index(len(self.dims), forms, flat)

    def trial(self) -> Callable[[], None]:
        """Forgets, when it is called, all that was made since."""
        sizes = len(self.lines), len(self.accesses), len(self.loads)
        known, made = dict(self._known), dict(self.made)

        def forget() -> None:
            del self.lines[sizes[0] :]
            del self.accesses[sizes[1] :]
            del self.loads[sizes[2] :]
            self._known, self.made = known, made

        return forget

    def access(self, form: Form) -> str:
        """A token for an index."""
        self.accesses.append(form)
        return f"@{len(self.accesses) - 1}@"

    def let(self, dtype: str, text: str) -> str:
        """A variable with the value of `text`."""
        name = f"t{len(self.lines)}"
        self.lines.append(f"const {C_TYPES[dtype]} {name} = {text};")
        return name

    def load(self, buffer: Buffer, form: Form, extra: str = "") -> str:
        """A variable with an element of a buffer, `extra` elements further on."""
        if buffer in self.made:
            place, name = self.made[buffer]
            if place != form or extra:
                raise Clash
            return name
        key = (buffer, form, extra)
        if key not in self._known:
            self.loads.append((buffer, form, extra))
            token = self.access(form)
            self._known[key] = self.let(
                buffer.dtype, f"{{{id(buffer)}}}[{token}{extra}]"
            )
        return self._known[key]

    def at(self, operand: Any, shape: Sequence[int], index: Index) -> str:
        """An element of an operand as a variable, or as a constant.

        Raises Materialise, and Unsupported without a rule.
        """
        if isinstance(operand, Literal):
            return scalars.constant(operand.value)
        found = self.where(operand)
        if isinstance(found, Buffer):
            return self.load(found, index.linear(shape))
        key = (operand, index)
        if key not in self._known:
            self._known[key] = self._computed(found, index)
        return self._known[key]

    def _computed(self, equation: Equation, index: Index) -> str:
        name = equation.primitive.name
        operands = list(zip(equation.operands, equation.operand_shapes, strict=True))
        (result,) = equation.result_shapes
        if name == "iota":
            try:
                forms = index.split(result.shape, self.dims)
            except NotAffine:
                raise Materialise(equation.results[0]) from None
            token = self.access(forms[equation.params["dimension"]])
            dtype = result.dtype.name
            return self.let(dtype, f"({C_TYPES[dtype]})({token})")
        if name in PLACES:
            (operand, aval) = operands[0]
            try:
                inner = source(equation, index, self.dims)
            except NotAffine:
                raise Materialise(equation.results[0]) from None
            try:
                return self.at(operand, aval.shape, inner)
            except Materialise:
                # Only an index that came through a reshape can be no affine function:
                # then what is reshaped lies in memory.
                if inner.forms is None and not isinstance(operand, Literal):
                    raise Materialise(operand) from None
                raise
        try:
            inner = [
                stretched(index, aval.shape, result.shape, self.dims)
                for _, aval in operands
            ]
        except NotAffine:
            raise Materialise(equation.results[0]) from None
        args = [
            self.at(x, aval.shape, place)
            for (x, aval), place in zip(operands, inner, strict=True)
        ]
        dtypes = [aval.dtype.name for _, aval in operands]
        try:
            text = scalars.text_of(equation, args, dtypes)
        except NoForm:
            raise Unsupported(equation) from None
        return self.let(result.dtype.name, text)


def stretched(
    index: Index, old: Sequence[int], shape: Sequence[int], dims: Sequence[int]
) -> Index:
    """Where an operand of shape `old` has the element that a result of `shape` has at
    `index`: axes of one element are as long as the result's. Raises NotAffine."""
    if tuple(old) == tuple(shape):
        return index
    zero = Form((0,) * index.rank)
    if math.prod(old) == 1:
        return Index(index.rank, (zero,) * len(old), zero)
    forms = index.split(shape, dims)
    return Index(
        index.rank,
        tuple(
            zero if size == 1 else form for size, form in zip(old, forms, strict=True)
        ),
    )


def source(equation: Equation, index: Index, dims: Sequence[int]) -> Index:
    """Where the operand of an operation of `PLACES` has the element that its result has
    at `index`. Raises NotAffine."""
    params, name = equation.params, equation.primitive.name
    shape, old = equation.result_shapes[0].shape, equation.operand_shapes[0].shape
    zero = Form((0,) * index.rank)
    if math.prod(old) == 1:
        return Index(index.rank, (zero,) * len(old), zero)
    if name in ("reshape", "squeeze", "expand_dims"):
        long = [size for size in shape if size != 1]
        if index.forms is not None and long == [size for size in old if size != 1]:
            kept = iter(
                f for f, size in zip(index.forms, shape, strict=True) if size != 1
            )
            return Index(
                index.rank, tuple(zero if size == 1 else next(kept) for size in old)
            )
        flat = index.linear(shape)
        try:
            return Index(
                index.rank, Index(index.rank, flat=flat).split(old, dims), flat
            )
        except NotAffine:
            return Index(index.rank, flat=flat)
    if name == "broadcast_in_dim" and shape == old:
        return index
    forms = index.split(shape, dims)
    match name:
        case "broadcast_in_dim":
            axes = params["broadcast_dimensions"]
            found = [
                zero if size == 1 else forms[axis]
                for axis, size in zip(axes, old, strict=True)
            ]
        case "transpose":
            found = [zero] * len(old)
            for form, axis in zip(forms, params["permutation"], strict=True):
                found[axis] = form
        case "slice":
            steps = params["strides"] or (1,) * len(old)
            starts = params["start_indices"]
            found = [
                (form * step).plus(start)
                for form, step, start in zip(forms, steps, starts, strict=True)
            ]
        case "rev":
            found = [
                (form * -1).plus(size - 1) if axis in params["dimensions"] else form
                for axis, (form, size) in enumerate(zip(forms, old, strict=True))
            ]
        case _:
            raise AssertionError(name)
    return Index(index.rank, tuple(found))


@dataclasses.dataclass(frozen=True)
class Nest:
    """Loops that run in one: `groups` of counters, outermost first.

    Attributes:
      counts: how often each runs.
      groups: numbers of the counters that each stands for.
    """

    counts: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def merged(
    dims: Sequence[int], accesses: Sequence[Form], apart: Sequence[int] = ()
) -> Nest:
    """As few loops as all accesses allow: neighbours whose strides agree become one.

    Counters of loops that run once are left out. No group crosses the start of a
    counter among `apart`.
    """
    groups: list[list[int]] = []
    counts: list[int] = []
    for axis, count in enumerate(dims):
        if count == 1 and axis not in apart:
            continue
        if groups and axis not in apart:
            last = groups[-1][-1]
            if all(f.coefs[last] == f.coefs[axis] * count for f in accesses):
                groups[-1].append(axis)
                counts[-1] *= count
                continue
        groups.append([axis])
        counts.append(count)
    return Nest(tuple(counts), tuple(map(tuple, groups)))


def index_text(form: Form, nest: Nest) -> str:
    """An index, as C has it: a group's counter counts its innermost axis."""
    terms = []
    for number, group in enumerate(nest.groups):
        coef = form.coefs[group[-1]]
        if coef:
            terms.append(f"i{number}" if coef == 1 else f"{coef} * i{number}")
    if form.const or not terms:
        terms.append(str(form.const))
    return " + ".join(terms)


def opened(number: int, count: int) -> str:
    return f"for (int32_t i{number} = 0; i{number} < {count}; ++i{number}) {{"


def filled(line: str, body: Body, nest: Nest, pointers: dict[int, str]) -> str:
    """A line of a body with indices and pointers for its tokens."""
    line = re.sub(
        r"@(\d+)@", lambda m: index_text(body.accesses[int(m[1])], nest), line
    )
    return re.sub(r"\{(\d+)\}", lambda m: pointers[int(m[1])], line)


def pointed(
    reads: Sequence[Buffer], writes: Sequence[Buffer], pointer: Pointer
) -> tuple[list[str], dict[int, str]]:
    """Declarations of pointers, and their names by the buffers' identities."""
    lines, names = [], {}
    for number, buffer in enumerate(dict.fromkeys((*writes, *reads))):
        const = "" if buffer in writes else "const "
        names[id(buffer)] = name = f"p{number}"
        c_type = buffer.c_type
        lines.append(f"{const}{c_type} *const {name} = {pointer(buffer)};")
    return lines, names
