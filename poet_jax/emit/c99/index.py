"""Indices of arrays as affine functions of loop counters."""

import dataclasses
import math
from collections.abc import Sequence

from poet_jax.emit.c99.buffers import strides


class NotAffine(Exception):
    """An index is no affine function of the counters."""


@dataclasses.dataclass(frozen=True)
class Form:
    """`const` + the sum of `coefs` times the counters of a loop nest, [L]."""

    coefs: tuple[int, ...]
    const: int = 0

    def __add__(self, other: "Form") -> "Form":
        coefs = tuple(a + b for a, b in zip(self.coefs, other.coefs, strict=True))
        return Form(coefs, self.const + other.const)

    def __mul__(self, factor: int) -> "Form":
        return Form(tuple(factor * c for c in self.coefs), factor * self.const)

    def plus(self, const: int) -> "Form":
        return Form(self.coefs, self.const + const)


@dataclasses.dataclass(frozen=True)
class Index:
    """Where in an array of some shape: an index for each axis, or one into the array in
    row-major order.

    Attributes:
      rank: of the loop nest.
      forms: one for each axis; None if only `flat` is known.
      flat: in row-major order; None if only `forms` are known.
    """

    rank: int
    forms: tuple[Form, ...] | None = None
    flat: Form | None = None

    def linear(self, shape: Sequence[int]) -> Form:
        """In row-major order."""
        if self.flat is not None:
            return self.flat
        assert self.forms is not None
        return linear(self.rank, self.forms, strides(shape))

    def split(self, shape: Sequence[int], dims: Sequence[int]) -> tuple[Form, ...]:
        """One for each axis; `dims` are how often the loops run. Raises NotAffine."""
        if self.forms is not None:
            return self.forms
        assert self.flat is not None
        return _split(self.flat, shape, dims)


def linear(rank: int, forms: Sequence[Form], steps: Sequence[int]) -> Form:
    """The sum of `forms` times `steps`."""
    total = Form((0,) * rank)
    for form, step in zip(forms, steps, strict=True):
        total += form * step
    return total


def counters(dims: Sequence[int]) -> tuple[Form, ...]:
    """The counter of each loop, as a form."""
    rank = len(dims)
    return tuple(
        Form(tuple(int(axis == other) for other in range(rank))) for axis in range(rank)
    )


def _split(flat: Form, shape: Sequence[int], dims: Sequence[int]) -> tuple[Form, ...]:
    rest_coefs, rest_const = list(flat.coefs), flat.const
    forms = []
    for size, step in zip(shape, strides(shape), strict=True):
        if size == 1 or math.prod(shape) == 0:
            forms.append(Form((0,) * len(dims)))
            continue
        coefs = []
        for axis, (coef, count) in enumerate(zip(rest_coefs, dims, strict=True)):
            is_here = count > 1 and coef and coef % step == 0
            coefs.append(coef // step if is_here else 0)
            rest_coefs[axis] -= coefs[-1] * step
        const, rest_const = divmod(rest_const, step)
        forms.append(Form(tuple(coefs), const))
        last = const + sum(c * (n - 1) for c, n in zip(coefs, dims, strict=True))
        if min(coefs, default=0) < 0 or last >= size:
            raise NotAffine
    left = [c for c, n in zip(rest_coefs, dims, strict=True) if n > 1]
    if any(left) or rest_const:
        raise NotAffine
    return tuple(forms)
