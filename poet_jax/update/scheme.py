"""Sparse backpropagation: schemes of which parameters to train.

An `Update` selects them by patterns of paths; `Update.of(params)` is the `Part` of
given parameters. Frozen parameters have no gradient, no optimizer state and no saved
residuals. Sources: PockEngine (Zhu et al., MICRO 2023, section 2.2), and for adapters
LoRA (Hu et al., ICLR 2022).
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

from poet_jax.core.trace import path_name
from poet_jax.update.blocks import first_uses, numbered_blocks
from poet_jax.update.part import Adapter, Part, named
from poet_jax.update.quantization import (
    can_quantize,
    check_kind,
    is_quantized,
    quantized,
    whole,
)


@dataclasses.dataclass(frozen=True)
class Update:
    """A scheme of which parameters to train.

    Patterns match paths such as "blocks_3/Dense_0/kernel": `*`, `?` and `[ab]` match
    within a step, `**` any number of steps.

    Attributes:
      fractions: by pattern, the trained fraction of matching parameters: 1.0 for all,
        0.0 for none, else that fraction of a kernel's input channels (the last axis but
        one of [..., inputs, outputs]), rounded up. The last matching pattern counts.
      channels: the "first" ones, or those of largest "norm" when the part is made.
      ranks: by pattern, the rank of adapters for matching kernels.
      last: how many of the last blocks to train; see `last_blocks`.
      batch_stats: "update" the statistics of BatchNorm layers, frozen or not, as in
        full training, or "keep" them.
      quantize: by pattern, "int8" or "int4" for matching kernels that stay frozen; see
        `quantized`.

    Raises ValueError for a fraction outside 0 to 1, a rank or number below 1, and a
    scheme that trains nothing.
    """

    fractions: Mapping[str, float] = dataclasses.field(default_factory=dict)
    channels: str = "first"
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    last: int = 0
    batch_stats: str = "update"
    quantize: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for pattern, fraction in self.fractions.items():
            if not (isinstance(fraction, numbers.Real) and 0 <= fraction <= 1):
                raise ValueError(
                    f"The fraction of {pattern!r} must be between 0 and 1, got "
                    f"{fraction!r}; use for example {{{pattern!r}: 0.25}}."
                )
        for pattern, rank in self.ranks.items():
            if rank < 1 or rank != int(rank):
                raise ValueError(
                    f"The rank of adapters for {pattern!r} must be a whole number from "
                    f"1, got {rank}; use for example poet_jax.update.lora(8)."
                )
        if self.last < 0 or self.last != int(self.last):
            raise ValueError(_last_problem(self.last))
        for kind in self.quantize.values():
            check_kind(kind)
        choices = {"channels": ("first", "norm"), "batch_stats": ("update", "keep")}
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                allowed = " or ".join(map(repr, allowed))
                raise ValueError(f"Update: {name} must be {allowed}, got {value!r}")
        if not (self.last or self.ranks or any(self.fractions.values())):
            raise ValueError(
                f"{self} trains nothing; give a pattern a fraction above 0, or use "
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

        `last_blocks` needs `loss(params, *rest)`, which is traced for the order of
        use. Adapters start as a product of zero: `a` is drawn from `key` (by default
        `jax.random.key(0)`), normal of variance 1 / inputs, and `b` is zero.

        Raises ValueError for a pattern that matches nothing, a fraction of a parameter
        without input channels, or an adapter of something other than a matrix.
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
        by_norm = self.channels == "norm"
        channels = {
            path: _largest(leaves[path], k) for path, k in rows.items() if k and by_norm
        }
        if not rows and not adapters:
            raise ValueError(
                f"{self} trains nothing of these parameters: the last matching pattern "
                "counts. Put the wider patterns first."
            )
        return Part(channels, adapters, tuple(sorted(rows.items())))

    def quantized(self, params: Any, part: Part) -> Any:
        """`params` with kernels that `part`, made by `of`, does not train quantized as
        this scheme says.

        Both are in RAM at once; where they do not fit, use `update.quantized` on each
        kernel as it is made. Raises ValueError for a pattern that matches nothing, or
        something other than a floating kernel.
        """
        leaves = dict(named(params))
        kinds: dict[str, str] = {}
        for pattern, kind in self.quantize.items():
            paths = [x for x in _matching(pattern, leaves) if not part.trains(x)]
            if pattern == KERNELS:
                paths = [x for x in paths if can_quantize(leaves[x])]
            kinds |= dict.fromkeys(paths, kind)

        def one(steps: Any, leaf: Any) -> Any:
            path = path_name(steps)
            if path not in kinds or is_quantized(leaf):
                return leaf
            return quantized(leaf, kinds[path], path)

        return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_quantized)

    def mask(self, params: Any, *rest: Any, loss: Callable | None = None) -> Any:
        """Which leaves of `params` are trained, for `optax.masked(optimizer, mask)`.

        Arguments are those of `of`. Raises ValueError for a scheme with adapters or
        fractions of a leaf.
        """
        part = self.of(params, *rest, loss=loss)
        if part.adapters or any(k is not None for _, k in part.trained or ()):
            raise ValueError(
                f"{self} has no mask, as it trains adapters or parts of leaves; use "
                "split and merge of part = update.of(params)."
            )
        paths = dict(part.trained or ())
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path_name(path) in paths, params
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
                    f"Adapters need matrices [inputs, outputs], but {pattern!r} also "
                    f"matches {path!r} of shape {list(leaves[path].shape)}. Use a "
                    "pattern that matches matrices only."
                )
            ranks |= dict.fromkeys(paths, rank)
        key = jax.random.key(0) if key is None else key
        keys = jax.random.split(key, max(len(ranks), 1))
        adapters = {}
        for (path, rank), key in zip(sorted(ranks.items()), keys, strict=False):
            inputs, outputs = leaves[path].shape
            dtype = leaves[path].dtype
            a = jax.random.normal(key, (inputs, rank), dtype) / math.sqrt(inputs)
            adapters[path] = Adapter(a, jnp.zeros((rank, outputs), dtype))
        return adapters

    def _last_blocks(self, params: Any, rest: tuple, loss: Any) -> Iterable[str]:
        """Paths of the parameters first used from the last blocks on."""
        if not self.last:
            return []
        if loss is None:
            raise ValueError(
                "last_blocks needs a loss(params, batch), to see what is used after "
                "them. Use update.of(params, batch, loss=loss)."
            )
        sizes = {path: math.prod(leaf.shape) for path, leaf in named(params)}
        blocks = numbered_blocks(sizes)
        if self.last > len(blocks):
            raise ValueError(
                f"last_blocks({self.last}): these parameters have "
                f"{len(blocks) or 'no'} numbered blocks, such as blocks_0 or "
                "layers/0. Use a smaller number, or patterns of paths."
            )
        used = dict(zip(sizes, first_uses(loss, whole(params), rest), strict=True))
        first = min(used[path] for block in blocks[-self.last :] for path in block)
        return [path for path, use in used.items() if first <= use < math.inf]


UpdateLike = Update | Mapping[str, float]
KERNELS = "**/kernel"


def full() -> Update:
    """Train everything."""
    return Update({"**": 1.0})


def bias_only() -> Update:
    """Train every parameter called bias, nothing else (Ben Zaken et al., ACL 2022)."""
    return Update({"**/bias": 1.0})


def last_blocks(number: int, quantize: str | None = None) -> Update:
    """Train the last blocks and everything first used after them, such as a head.

    Frozen kernels are kept as `quantize`, "int8" or "int4", if that is given.

    Blocks are numbered in the paths: blocks_0, blocks_1 or layers/0, layers/1. Of
    several numberings the one with most parameters counts, with those of equal length
    beside it. What comes after a block is found by tracing the loss, not by names.
    """
    if number < 1:
        raise ValueError(_last_problem(number))
    return Update(last=number, quantize=_frozen_kernels(quantize))


def _last_problem(number: Any) -> str:
    return (
        f"The number of last blocks must be a whole number from 1, got {number}; use "
        "for example poet_jax.update.last_blocks(2)."
    )


def lora(rank: int, pattern: str = KERNELS, quantize: str | None = None) -> Update:
    """Train adapters of `rank` for every matrix called kernel, nothing else.

    The model needs no change: it gets `kernel + a @ b`. Any other `pattern` must match
    matrices only. Kernels are kept as `quantize`, "int8" or "int4", if that is given.
    """
    return Update(ranks={pattern: rank}, quantize=_frozen_kernels(quantize))


def _frozen_kernels(quantize: str | None) -> Mapping[str, str]:
    return {} if quantize is None else {KERNELS: quantize}


def parse_update(update: Any) -> Update:
    """An `Update`, from one or from fractions by pattern. Raises TypeError."""
    if isinstance(update, Update):
        return update
    if isinstance(update, Mapping):
        return Update(update)
    raise TypeError(
        "`update` must be an Update or a dict of fractions by pattern, got "
        f'{update!r}; use poet_jax.update.bias_only() or {{"**/bias": 1.0}}.'
    )


def _matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern matches. Raises ValueError if there are none."""
    matching = [path for path in paths if matches(pattern, path)]
    if not matching:
        near = difflib.get_close_matches(pattern, list(paths), n=3, cutoff=0.0)
        raise ValueError(
            f"No parameter matches {pattern!r}; the nearest are "
            f"{', '.join(map(repr, near))}. Use one of these, or a pattern such as "
            "'**/bias', where ** matches any number of steps."
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
    """Number of input channels in a fraction of a leaf; None for all of it."""
    if fraction == 1:
        return None
    if len(leaf.shape) < 2 or path.endswith("embedding"):
        raise ValueError(
            f"{path!r} of shape {list(leaf.shape)} has no input channels to train a "
            f"fraction {fraction} of; kernels [..., inputs, outputs] have. Use 1.0 or "
            "0.0 for it, or a pattern such as '**/kernel'."
        )
    rows = math.ceil(fraction * leaf.shape[-2])
    return None if rows == leaf.shape[-2] else rows


def _largest(kernel: jax.Array, number: int) -> jax.Array:
    """[k] ascending numbers of the input channels of largest norm."""
    axes = [axis for axis in range(kernel.ndim) if axis != kernel.ndim - 2]
    squares = jnp.sum(jnp.square(jnp.asarray(kernel, jnp.float32)), axes)
    # Unsigned, so that JAX need not handle negative indices.
    return jnp.sort(lax.top_k(squares, number)[1]).astype(jnp.uint32)
