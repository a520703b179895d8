"""Gradients of a batch as the mean of those of its parts, one after the other."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from poet_jax.core.errors import BudgetTooSmall, CannotTrace
from poet_jax.update.part import named

Microbatches = int | Literal["auto"]


class Steps:
    """A scheduled step, with as many microbatches as were asked for, or as few as fit.

    Args:
      make: the scheduled step of a number of microbatches.
      microbatches: that number, or "auto".

    Attributes:
      count: of microbatches, so far.
      scheduled: the step of `count`.

    Raises ValueError for another `microbatches`.
    """

    def __init__(self, make: Callable[[int], Any], microbatches: Microbatches):
        is_count = isinstance(microbatches, int) and microbatches >= 1
        if not (microbatches == "auto" or is_count):
            raise ValueError(
                f"`microbatches` must be a number from 1 on or 'auto', got "
                f"{microbatches!r}. A batch is computed in so many equal parts. Use "
                "for example microbatches=4."
            )
        self._make, self._is_auto = make, microbatches == "auto"
        self.count = 1 if self._is_auto else int(microbatches)
        self.scheduled = make(self.count)

    def may_split(self, batch: Any, statistics: Any) -> bool:
        """Whether microbatches, which are not used, are possible."""
        is_free = not jax.tree.leaves(statistics)
        return self.count == 1 and is_free and len(_powers_of_two(_size(batch))) > 1

    def run(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """`call(scheduled)`, with more microbatches while none fits the budget."""
        while True:
            try:
                return call(self.scheduled)
            except BudgetTooSmall:
                size = _size(batch)
                more = [n for n in _powers_of_two(size) if n > self.count]
                if not (self._is_auto and more):
                    raise
                self.count = more[0]
                self.scheduled = self._make(self.count)


def _powers_of_two(size: int) -> list[int]:
    """Those that divide `size`; none for 0."""
    return [2**n for n in range(size.bit_length()) if size % 2**n == 0]


def _size(batch: Any) -> int:
    """Of the leading axis that all leaves of a batch have; 0 if there is none."""
    shapes = map(np.shape, jax.tree.leaves(batch))
    sizes = {shape[0] if shape else 0 for shape in shapes}
    return sizes.pop() if len(sizes) == 1 else 0


def gradients(
    loss_of: Callable[[Any, Any, Any, Any], tuple[jax.Array, tuple[Any, Any]]],
    trainable: Any,
    state: Any,
    batch: Any,
    count: int,
) -> tuple[tuple[jax.Array, tuple[Any, Any]], Any]:
    """((loss, (aux, state)), gradients) of a batch in `count` parts.

    `loss_of(trainable, state, part, number)` returns (loss, (aux, state)). Gradients
    are added up in float32 at least. Of `aux`, scalars are averaged, and arrays whose
    leading axis is the part's are joined. Raises CannotTrace for any other, and for a
    batch that has no `count` equal parts.
    """
    gradient_of = jax.value_and_grad(loss_of, has_aux=True)
    if count == 1:
        return gradient_of(trainable, state, batch, None)
    size = _size(batch)
    if size == 0 or size % count:
        shapes = sorted({str(np.shape(x)) for x in jax.tree.leaves(batch)})
        raise CannotTrace(
            f"A batch of arrays of shape {', '.join(shapes)} has no {count} equal "
            "parts along the leading axis. All its arrays must have one leading axis, "
            "a multiple of microbatches. Use another number, or batch size."
        )
    # Of rows on several devices, each part has as many from every device.
    rows = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), batch)

    def add(carry: Any, number: jax.Array) -> tuple[Any, Any]:
        sums, state = carry
        part = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, number, 1, keepdims=False), rows
        )
        (loss, (aux, state)), own = gradient_of(trainable, state, part, number)
        sums = jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, own)
        return (sums, state), (loss, aux)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x.dtype)), trainable)
    numbers = jnp.arange(count, dtype=jnp.uint32)
    (sums, state), (losses, aux) = lax.scan(add, (zeros, state), numbers)
    mean = jax.tree.map(lambda x, p: (x / count).astype(p.dtype), sums, trainable)
    joined = jax.tree.map(lambda x: _joined(x, size), aux)
    return (jnp.mean(losses), (joined, state)), mean


def _wide(dtype: Any) -> Any:
    """The dtype in which gradients of `dtype` are added up."""
    return jnp.promote_types(dtype, jnp.float32)


def _joined(x: jax.Array, size: int) -> jax.Array:
    """What the parts return, [count, ...], as the whole batch would."""
    if x.ndim == 1 and jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.mean(x)
    if x.ndim > 1 and math.prod(x.shape[:2]) == size:
        return x.swapaxes(0, 1).reshape(size, *x.shape[2:])
    raise CannotTrace(
        f"With microbatches, loss_fn returned aux of shape {x.shape[1:]} and dtype "
        f"{x.dtype} for each. Floating scalars are averaged, and arrays with the "
        "batch's leading axis are joined. Return one of these, or leave it out."
    )


def refuse_statistics(statistics: Any, count: int) -> None:
    """Raise CannotTrace for a model with statistics of the batch."""
    if count > 1 and (leaves := named(statistics)):
        raise CannotTrace(
            f"The model has statistics of the batch, {leaves[0][0]!r}, which differ in "
            f"each of {count} microbatches. Gradients would not be those of the batch. "
            "Use microbatches=1, or LayerNorm or GroupNorm in the model."
        )


def refuse_changes(count: int) -> None:
    """Raise CannotTrace for a loss that changes plain attributes of the model."""
    if count > 1:
        raise CannotTrace(
            f"loss_fn changes plain attributes of the model, in each of {count} "
            "microbatches. Only variables can change from one to the next. Use an "
            "nnx.Variable, or microbatches=1."
        )
