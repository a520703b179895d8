"""Memory of a C program: arrays, and the steps that read and write them."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from poet_jax.core.equation import Equation

# C's type of each dtype that kernels compute with.
C_TYPES = {
    "float32": "float",
    "int32": "int32_t",
    "uint32": "uint32_t",
    "int16": "int16_t",
    "uint16": "uint16_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "bool": "uint8_t",
}


class NoForm(Exception):
    """A rule has no C for an equation's dtypes or parameters."""


class Unsupported(Exception):
    """An equation has no kernel."""

    def __init__(self, equation: Equation):
        super().__init__(equation.primitive.name)
        self.equation = equation


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """An array in the arena, or in flash.

    Attributes:
      name: for comments.
      shape: of the array, row-major without gaps.
      dtype: name of a dtype among `C_TYPES`.
      data: its contents, if it is constant and lies in flash.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: np.ndarray | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def c_type(self) -> str:
        return C_TYPES[self.dtype]

    @property
    def in_flash(self) -> bool:
        return self.data is not None


Pointer = Callable[[Buffer], str]  # a C expression that points to a buffer


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One thing that a C program does.

    Attributes:
      reads, writes: buffers, each once. A buffer is written whole by one step, but for
        those of loops: what an iteration hands on, and arrays that are made row by row.
      render: lines of C, given pointers to the buffers.
      over: pairs (old, new): each element of `new` is written after the last read of
        the one of `old` at its place, so both may be one memory.
      run: number of the instruction that it belongs to.
      has_effect: whether it is needed although nothing reads what it writes.
      ties: pairs (old, new): here `new` becomes `old`, whose value nobody reads between
        the last step before that touches it and this one. Both may be one memory, or
        the step copies.
      is_bracket: whether its lines begin or end a block of C.
    """

    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    render: Callable[[Pointer], list[str]]
    over: tuple[tuple[Buffer, Buffer], ...] = ()
    run: int = 0
    has_effect: bool = False
    ties: tuple[tuple[Buffer, Buffer], ...] = ()
    is_bracket: bool = False


def needed(steps: Sequence[Step], wanted: Iterable[Buffer]) -> list[Step]:
    """`steps` without those whose results nobody reads, if `wanted` are the results."""
    alive: set[Any] = set(wanted)
    kept = []
    for step in reversed(steps):
        if step.has_effect or not alive.isdisjoint(step.writes):
            kept.append(step)
            alive.update(step.reads)
    return kept[::-1]


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a row-major array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
