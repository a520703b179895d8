"""Arrays that are in a graph as values of their own, their rows."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the leading axis of an array is cut into pieces.

    Attributes:
      bounds: [P] (start, stop) of each piece.
    """

    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, length: int, pieces: int) -> "Cut":
        """Of about equally long pieces."""
        ends = [length * number // pieces for number in range(pieces + 1)]
        return cls(tuple(zip(ends, ends[1:], strict=False)))

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def is_rows(self) -> bool:
        """Whether pieces are single rows, which have no leading axis."""
        return all(stop - start == 1 for start, stop in self.bounds)

    def rows(self, number: int) -> int:
        """How many rows a piece has."""
        start, stop = self.bounds[number]
        return stop - start

    def shape(self, number: int, row: Sequence[int]) -> tuple[int, ...]:
        """Of a piece of an array, whose rows have the shape `row`."""
        return tuple(row) if self.is_rows else (self.rows(number), *row)

    def piece(self, array: jax.Array, number: int) -> jax.Array:
        start, stop = self.bounds[number]
        if self.is_rows:
            return lax.index_in_dim(array, start, keepdims=False)
        return lax.slice_in_dim(array, start, stop)

    def write(self, array: jax.Array, number: int, piece: jax.Array) -> jax.Array:
        """`array` with a piece written over its own."""
        piece = piece[None] if self.is_rows else piece
        start = self.bounds[number][0]
        return lax.dynamic_update_slice_in_dim(array, piece, start, 0)

    def join(self, pieces: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack(pieces) if self.is_rows else jnp.concatenate(pieces)


@dataclasses.dataclass(frozen=True)
class Stack:
    """An argument or an output whose pieces are values.

    Attributes:
      cut: how it is cut.
      values: [P] the number of each piece.
      over: of an output, the donated argument whose memory it takes.
    """

    cut: Cut
    values: tuple[int, ...]
    over: int | None = None
