"""Equations: primitives applied to values, as in a jaxpr."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from poet_jax.core.representation import brief


@dataclasses.dataclass(frozen=True, eq=False)
class Literal:
    """A constant operand that is part of an equation."""

    value: Any

    @property
    def key(self) -> tuple:
        """Equal keys are equal constants, to the bit."""
        data = np.asarray(self.value)
        python_type = type(self.value).__name__
        return python_type, str(data.dtype), data.shape, data.tobytes()


class Inner:
    """The name of a value inside nodes, which no node reads or writes."""


Name = int | Inner  # of a value: the number of one of the graph's, or an inner one


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One primitive applied to operands, inside the body of a node.

    Attributes:
      primitive, params: as in a jaxpr.
      operands: numbers of the graph's values, `Inner`s or `Literal`s.
      results: numbers of the graph's values, or `Inner`s.
      operand_shapes, result_shapes: what the FLOP and byte rules need.
      inner: (equations, times each runs) of control flow's bodies.
      lowering: another way to compute the same, called with `params` and operands.
      has_effect: whether it is to run although nobody reads its results.
      unknown: names of operations in it that are not known to be functions of their
        operands: of primitives, and of the targets of foreign functions.
      context: of JAX, in which the equation was traced and is to be computed: which
        random bits a key gives, `compute_on`, and the like; None for this process's.
    """

    primitive: Any
    params: dict[str, Any]
    operands: tuple[Name | Literal, ...]
    results: tuple[Name, ...]
    operand_shapes: tuple[jax.ShapeDtypeStruct, ...]
    result_shapes: tuple[jax.ShapeDtypeStruct, ...]
    inner: tuple[tuple[tuple["Equation", ...], int], ...] = ()
    lowering: Callable[..., Any] | None = None
    has_effect: bool = False
    unknown: frozenset[str] = frozenset()
    context: Any = None

    __repr__ = brief

    @property
    def repeatable(self) -> bool:
        """Whether it may run twice, and be left out where nobody reads its results."""
        return not (self.has_effect or self.unknown)

    @property
    def reads(self) -> list[Name]:
        """Its operands that are values, as often as they are operands."""
        return [x for x in self.operands if not isinstance(x, Literal)]

    @property
    def operation(self) -> tuple[str, str, str, str]:
        """Its primitive, parameters, lowering and context as text, the same in every
        process."""
        params = str(sorted(self.params.items(), key=str))
        way = self.lowering
        name = "" if way is None else f"{way.__module__}.{way.__name__}"
        params = re.sub(r" at 0x[0-9a-f]+", "", params)
        return self.primitive.name, params, name, str(self.context)

    def renamed(self, names: Mapping[Any, Any]) -> "Equation":
        """The equation with `names` instead of operands and results that they hold."""
        return dataclasses.replace(
            self,
            operands=tuple(
                x if isinstance(x, Literal) else names.get(x, x) for x in self.operands
            ),
            results=tuple(names.get(x, x) for x in self.results),
        )

    def bind(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Apply the primitive to `operands`, arrays or tracers."""
        context = self.context.manager if self.context else contextlib.nullcontext()
        with context:
            if self.lowering is not None:
                results = self.lowering(self.params, *operands)
            else:
                params = self.primitive.get_bind_params(self.params)
                results = self.primitive.bind(*operands, **params)
        return results if self.primitive.multiple_results else (results,)


def nbytes_of(array: Any) -> int:
    """Bytes of an array, or of anything with a shape and a dtype."""
    return math.prod(array.shape) * array.dtype.itemsize


def need_data(equations: Iterable[Equation]) -> bool:
    return any(
        equation.primitive.name in ("while", "pure_callback")
        or any(need_data(body) for body, _ in equation.inner)
        for equation in equations
    )


def unrolled(
    equations: Iterable[Equation], runs: int = 1
) -> Iterator[tuple[Equation, int]]:
    """Equations without bodies, and how often each runs."""
    for equation in equations:
        if equation.inner:
            for body, times in equation.inner:
                yield from unrolled(body, runs * times)
        else:
            yield equation, runs
