"""Sparse backpropagation: which part of the parameters a step trains.

An `Update` says it in patterns of paths; `Update.of(params)` is the `Part` of given
parameters. What is frozen has no gradient, no optimizer state and no saved activation.
After PockEngine (Zhu et al., MICRO 2023, section 2.2) and, for adapters, LoRA (Hu et
al., ICLR 2022).
"""

import dataclasses
import difflib
import fnmatch
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.update.blocks import first_uses, numbered_blocks
from poet_jax.update.part import Adapter, Part, named


@dataclasses.dataclass(frozen=True)
class Update:
    """A scheme of which parameters to train.

    Patterns are of paths such as "blocks_3/Dense_0/kernel", whose steps are joined by
    "/": `*`, `?` and `[ab]` match within a step, `**` any number of steps.

    Attributes:
      fractions: how much of the parameters that match a pattern is trained: 1.0 all,
        0.0 nothing, between them that fraction of the input channels, rounded up, which
        are the last axis but one of a kernel ([..., inputs, outputs]). The last of
        several patterns that match counts.
      channels: which ones: "first", or those of the largest "norm" when the part is
        made.
      ranks: of the adapters of the kernels that match a pattern.
      last: how many of the last blocks to train, with all that is used after them; see
        `last_blocks`.
      statistics: of BatchNorm, frozen or not: "update" them at every step as in full
        training, or "keep" them as they are. Which ones it normalises by depends on the
        mode that the model is in, as ever.

    Raises ValueError for a fraction outside 0 to 1, a rank or number below 1, and a
    scheme that updates nothing.
    """

    fractions: Mapping[str, float] = dataclasses.field(default_factory=dict)
    channels: str = "first"
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    last: int = 0
    statistics: str = "update"

    def __post_init__(self):
        for pattern, fraction in self.fractions.items():
            if not (isinstance(fraction, numbers.Real) and 0 <= fraction <= 1):
                raise ValueError(
                    f"The fraction {fraction!r} of {pattern!r} was to be trained. A "
                    "fraction is between 0, nothing, and 1, everything. Type for "
                    f"example {{{pattern!r}: 0.25}}."
                )
        for pattern, rank in self.ranks.items():
            if rank < 1 or rank != int(rank):
                raise ValueError(
                    f"Adapters of rank {rank} were asked for {pattern!r}. A rank is a "
                    "whole number from 1. Type for example "
                    "poet_jax.update.lora(8)."
                )
        if self.last < 0 or self.last != int(self.last):
            raise ValueError(
                f"The last {self.last} blocks were to be trained. That is a whole "
                "number from 1. Type for example poet_jax.update.last_blocks(2)."
            )
        for name, choices in (
            ("channels", ("first", "norm")),
            ("statistics", ("update", "keep")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"An update was asked for with {name}={getattr(self, name)!r}. It "
                    f"is {' or '.join(map(repr, choices))}. Type for example "
                    f"Update(fractions, {name}={choices[0]!r})."
                )
        if not (self.last or self.ranks or any(self.fractions.values())):
            raise ValueError(
                f"A step was asked for with {self}, which updates nothing. At least "
                "one pattern has a fraction above 0. Type for example "
                "poet_jax.update.bias_only()."
            )

    def of(
        self,
        params: Any,
        *rest: Any,
        loss: Callable[..., Any] | None = None,
        key: jax.Array | None = None,
    ) -> Part:
        """The part of `params`, a pytree of arrays, that this scheme trains.

        `last_blocks` sees from `loss(params, *rest)`, which is traced, what is used
        after what. Adapters are drawn from `key`, by default `jax.random.key(0)`, and
        begin at zero: `a` is normal, of variance 1 / inputs, and `b` is zero. Raises
        ValueError for a pattern that matches nothing, and for one that matches what has
        no input channels, or for an adapter, what is not a matrix.
        """
        leaves = dict(named(params))
        trained = dict.fromkeys(self._last_blocks(params, rest, loss), 1.0)
        for pattern, fraction in self.fractions.items():
            trained |= dict.fromkeys(_matching(pattern, leaves), fraction)
        adapters = self._adapters(leaves, key)
        rows = {
            path: _rows(path, leaves[path], fraction)
            for path, fraction in trained.items()
            if fraction and path not in adapters
        }
        channels = {}
        if self.channels == "norm":
            channels = {
                path: _largest(leaves[path], k) for path, k in rows.items() if k
            }
        if not rows and not adapters:
            raise ValueError(
                f"A step was asked for with {self}, which updates nothing of these "
                "parameters, as later patterns freeze what earlier ones train. The "
                "last pattern that matches counts. Put the wider patterns first."
            )
        return Part(channels, adapters, tuple(sorted(rows.items())))

    def mask(self, params: Any, *rest: Any, loss: Callable | None = None) -> Any:
        """Booleans, where a leaf of `params` is trained, as optax takes them.

        For example `optax.masked(optimizer, mask)`. Arguments are those of `of`. Raises
        ValueError for a scheme of adapters or of fractions of a leaf.
        """
        part = self.of(params, *rest, loss=loss)
        if part.adapters or any(k is not None for _, k in part.trained or ()):
            raise ValueError(
                f"A mask was asked for of {self}. A mask tells leaves from one "
                "another, not channels of a leaf, and has no adapters. Use "
                "part = update.of(params), whose split and merge do."
            )
        paths = dict(part.trained or ())
        return jax.tree.unflatten(
            jax.tree.structure(params), [path in paths for path, _ in named(params)]
        )

    def _adapters(self, leaves: dict[str, Any], key: Any) -> dict[str, Adapter]:
        ranks: dict[str, int] = {}
        for pattern, rank in self.ranks.items():
            paths = _matching(pattern, leaves)
            matrices = [path for path in paths if len(leaves[path].shape) == 2]
            if pattern == KERNELS and matrices:
                paths = matrices
            elif len(matrices) < len(paths):
                path = next(path for path in paths if path not in matrices)
                raise ValueError(
                    f"An adapter was asked for {path!r} by {pattern!r}, which has the "
                    f"shape {list(leaves[path].shape)}. Adapters are of matrices "
                    "[inputs, outputs]. Type a pattern that matches these only."
                )
            ranks |= dict.fromkeys(paths, rank)
        keys = jax.random.split(
            jax.random.key(0) if key is None else key, max(len(ranks), 1)
        )
        adapters = {}
        for (path, rank), key in zip(sorted(ranks.items()), keys, strict=False):
            inputs, outputs = leaves[path].shape
            dtype = leaves[path].dtype
            a = jax.random.normal(key, (inputs, rank), dtype) / math.sqrt(inputs)
            adapters[path] = Adapter(a, jnp.zeros((rank, outputs), dtype))
        return adapters

    def _last_blocks(self, params: Any, rest: tuple, loss: Any) -> Iterable[str]:
        """Paths of the last blocks' parameters and of those first used after them."""
        if not self.last:
            return []
        if loss is None:
            raise ValueError(
                f"The last {self.last} blocks were asked for without a loss. What is "
                "used after them is seen by tracing it. Type "
                "update.of(params, batch, loss=loss), for a loss(params, batch)."
            )
        sizes = {path: math.prod(leaf.shape) for path, leaf in named(params)}
        blocks = numbered_blocks(sizes)
        if self.last > len(blocks):
            raise ValueError(
                f"The last {self.last} blocks were to be trained. These parameters "
                f"have {len(blocks) or 'no'} numbered blocks, such as blocks_0 and "
                "blocks_1, or layers/0 and layers/1. Type a smaller number, or "
                "patterns of paths."
            )
        used = dict(zip(sizes, first_uses(loss, params, rest), strict=True))
        first = min(used[path] for block in blocks[-self.last :] for path in block)
        return [path for path, use in used.items() if first <= use < math.inf]


UpdateLike = Update | Mapping[str, float]
KERNELS = "**/kernel"


def full() -> Update:
    """Everything is trained."""
    return Update({"**": 1.0})


def bias_only() -> Update:
    """Every parameter called bias is trained, and nothing else (Ben Zaken et al., ACL
    2022)."""
    return Update({"**/bias": 1.0})


def last_blocks(number: int) -> Update:
    """The last blocks are trained, and everything that is first used after them.

    Blocks are what is numbered alike in the paths, such as blocks_0, blocks_1 or
    layers/0, layers/1. Where several things are, those that hold most parameters count,
    together with what stands beside them in equal number. What follows them, such as a
    last norm and a head, is seen in the computation and not by names.
    """
    if number < 1:
        raise ValueError(
            f"The last {number} blocks were to be trained. That is a whole number from "
            "1. Type for example poet_jax.update.last_blocks(2)."
        )
    return Update(last=number)


def lora(rank: int, pattern: str = KERNELS) -> Update:
    """Adapters of `rank` are trained for every matrix called kernel, and nothing else.

    The model computes with `kernel + a @ b` and need not know. Any other `pattern` must
    match matrices only.
    """
    return Update(ranks={pattern: rank})


def parse_update(update: Any) -> Update:
    """An `Update`, which fractions by pattern may stand for; TypeError for others."""
    if isinstance(update, Update):
        return update
    if isinstance(update, Mapping):
        return Update(update)
    raise TypeError(
        f"A step was asked for with update={update!r}. An update is an Update, or a "
        "dictionary of fractions by pattern. Type for example "
        'update=poet_jax.update.bias_only(), or update={"**/bias": 1.0}.'
    )


def _matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern matches; ValueError if none do."""
    matching = [path for path in paths if matches(pattern, path)]
    if not matching:
        near = difflib.get_close_matches(pattern, list(paths), n=3, cutoff=0.0)
        raise ValueError(
            f"The parameters that match {pattern!r} were to be trained, and none do. "
            f"The nearest are {', '.join(map(repr, near))}. Type one of these, or a "
            "pattern such as '**/bias', where ** stands for any number of steps."
        )
    return matching


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern of an `Update` matches a path."""
    return _steps_match(pattern.split("/"), path.split("/"))


def _steps_match(pattern: Sequence[str], path: Sequence[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_steps_match(pattern[1:], path[n:]) for n in range(len(path) + 1))
    return (
        bool(path)
        and fnmatch.fnmatchcase(path[0], pattern[0])
        and _steps_match(pattern[1:], path[1:])
    )


def _rows(path: str, leaf: Any, fraction: float) -> int | None:
    """How many input channels a fraction of a leaf is; None for all of it."""
    if fraction == 1:
        return None
    if len(leaf.shape) < 2 or path.endswith("embedding"):
        raise ValueError(
            f"The fraction {fraction} of {path!r}, of shape {list(leaf.shape)}, was to "
            "be trained. A fraction is of input channels, which only kernels "
            f"[..., inputs, outputs] have. Type 1.0 or 0.0 for {path!r}, or a pattern "
            "that matches kernels, such as '**/kernel'."
        )
    rows = math.ceil(fraction * leaf.shape[-2])
    return None if rows == leaf.shape[-2] else rows


def _largest(kernel: jax.Array, number: int) -> jax.Array:
    """[k] numbers of the input channels of largest norm, ascending."""
    axes = [axis for axis in range(kernel.ndim) if axis != kernel.ndim - 2]
    squares = jnp.sum(jnp.square(jnp.asarray(kernel, jnp.float32)), axes)
    # Unsigned, so that no index could count from the end.
    return jnp.sort(lax.top_k(squares, number)[1]).astype(jnp.uint32)
