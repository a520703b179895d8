"""Steps that are loop nests: element-wise, and reductions."""

from collections.abc import Callable, Sequence
from typing import Any

from poet_jax.emit.c99 import loops
from poet_jax.emit.c99.buffers import Buffer, Pointer, Step, strides
from poet_jax.emit.c99.index import Form, Index, counters, linear
from poet_jax.emit.c99.loops import Body, Clash, Where


class Pointwise:
    """A loop nest that writes arrays of one shape, element by element.

    Args:
      dims: shape of them all.
      where: the buffer or the equation of a value inside a node.
    """

    def __init__(self, dims: Sequence[int], where: Where):
        self.dims = tuple(dims)
        self.body = Body(dims, where)
        self.stores: list[tuple[Buffer, Form, str]] = []
        self._texts: list[tuple[Buffer, str, str]] = []

    def store(
        self, buffer: Buffer, text: str, form: Form | None = None, extra: str = ""
    ) -> None:
        """Write an element of `buffer`, by default the one at the counters."""
        form = form or self.body.identity.linear(self.dims)
        token = self.body.access(form)
        self._texts.append((buffer, f"[{token}{extra}]", text))
        self.stores.append((buffer, form, extra))
        self.body.made[buffer] = form, text

    def add(self, buffer: Buffer, operand: Any, shape: Sequence[int]) -> None:
        """Let `buffer` be the value of `operand`. Raises as `Body.at`, and Clash."""
        self.store(buffer, self.body.at(operand, shape, self.body.identity))

    def joins(self, other: "Pointwise") -> bool:
        """Whether `other` reads what this one reads, and so may share its loops."""
        mine = {buffer for buffer, *_ in self.body.loads}
        mine.update(buffer for buffer, *_ in self.stores)
        return any(buffer in mine for buffer, *_ in other.body.loads)

    def step(self, run: int) -> Step:
        reads = tuple(dict.fromkeys(buffer for buffer, *_ in self.body.loads))
        writes = tuple(dict.fromkeys(buffer for buffer, *_ in self.stores))
        return Step(reads, writes, self.render, tuple(self._over()), run)

    def _over(self) -> list[tuple[Buffer, Buffer]]:
        places: dict[Buffer, set[tuple[Form, str]]] = {}
        for buffer, form, extra in self.body.loads:
            places.setdefault(buffer, set()).add((form, extra))
        return [
            (old, new)
            for new, form, extra in self.stores
            for old, forms in places.items()
            if forms == {(form, extra)} and not extra
            if old.nbytes == new.nbytes and old.itemsize == new.itemsize
        ]

    def render(self, pointer: Pointer) -> list[str]:
        reads = [buffer for buffer, *_ in self.body.loads]
        writes = [buffer for buffer, *_ in self.stores]
        lines, names = loops.pointed(reads, writes, pointer)
        nest = loops.merged(self.dims, self.body.accesses)
        lines += [loops.opened(n, count) for n, count in enumerate(nest.counts)]
        texts = list(self.body.lines)
        texts += [f"{{{id(b)}}}{place} = {text};" for b, place, text in self._texts]
        lines += [loops.filled(x, self.body, nest, names) for x in texts]
        return [*lines, *["}"] * len(nest.counts)]


class Reduction:
    """A loop nest that combines elements along some axes.

    Attributes:
      kept, reduced: how often outer and inner loops run; outer ones write an element of
        a row-major result each.
    """

    def __init__(self, kept: Sequence[int], reduced: Sequence[int], where: Where):
        self.kept, self.reduced = tuple(kept), tuple(reduced)
        self.body = Body((*kept, *reduced), where)
        self.first: list[str] = []  # lines before the inner loops
        self.last: list[str] = []  # lines after them
        self.writes: list[Buffer] = []

    def index(self, axes: Sequence[int]) -> Index:
        """Of an array whose axes are these loops."""
        forms = counters(self.body.dims)
        return Index(len(forms), tuple(forms[axis] for axis in axes))

    @property
    def place(self) -> str:
        """A token for the element that outer loops are at."""
        steps = (*strides(self.kept), *(0 for _ in self.reduced))
        forms = counters(self.body.dims)
        return self.body.access(linear(len(forms), forms, steps))

    def store(self, buffer: Buffer, text: str) -> None:
        self.writes.append(buffer)
        self.last.append(f"{{{id(buffer)}}}[{self.place}] = {text};")

    def step(self, run: int) -> Step:
        reads = tuple(dict.fromkeys(buffer for buffer, *_ in self.body.loads))
        return Step(reads, tuple(self.writes), self.render, (), run)

    def render(self, pointer: Pointer) -> list[str]:
        reads = [buffer for buffer, *_ in self.body.loads]
        lines, names = loops.pointed(reads, self.writes, pointer)
        nest = loops.merged(self.body.dims, self.body.accesses, (len(self.kept),))
        outer = sum(group[0] < len(self.kept) for group in nest.groups)
        opened = [loops.opened(n, count) for n, count in enumerate(nest.counts)]

        def fill(texts: Sequence[str]) -> list[str]:
            return [loops.filled(x, self.body, nest, names) for x in texts]

        return [
            *lines,
            *opened[:outer],
            *fill(self.first),
            *opened[outer:],
            *fill(self.body.lines),
            *["}"] * (len(opened) - outer),
            *fill(self.last),
            *["}"] * outer,
        ]


def try_join(first: Pointwise, then: Callable[[Pointwise], None]) -> bool:
    """Let `then` add to `first`, unless it would read what that makes elsewhere."""
    forget = first.body.trial()
    try:
        then(first)
    except Clash:
        forget()
        return False
    return True
