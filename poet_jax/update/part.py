"""The trainable part of a tree of parameters: split it off, and merge it again."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.trace import path_name
from poet_jax.stores.paged import copied_to_ram
from poet_jax.update.quantization import dequantized, is_quantized


class Adapter(NamedTuple):
    """Low-rank addition `a @ b` to a kernel [inputs, outputs].

    Attributes:
      a: [inputs, rank].
      b: [rank, outputs].
    """

    a: jax.Array
    b: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
    """The trainable part of a tree of parameters; made by `Update.of`.

    It is a pytree, for use in a training state. A trainable tree has the structure of
    the parameters, with None for frozen leaves, the trained input channels of a kernel,
    and an Adapter for a kernel that has one. Frozen kernels may be `Quantized`:

        trainable = part.split(params)
        loss, gradients = jax.value_and_grad(
            lambda trainable: loss_fn(part.merge(trainable, params))
        )(trainable)
        updates, moments = optimizer.update(gradients, moments, trainable)
        params, part = part.replace(optax.apply_updates(trainable, updates), params)

    Attributes:
      channels: by path of a kernel, [k] ascending numbers of its trained input
        channels; absent if these are the first k.
      adapters: by path.
      trained: (path, k) of each trained parameter, with k input channels or None for
        all; None if everything is trained.
    """

    channels: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    adapters: dict[str, Adapter] = dataclasses.field(default_factory=dict)
    trained: tuple[tuple[str, int | None], ...] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def trains(self, path: str) -> bool:
        """Whether it trains the leaf at `path` itself, or channels of it."""
        return self.trained is None or path in dict(self.trained)

    def split(self, params: Any) -> Any:
        """The trainable tree of `params`."""
        if self.trained is None:
            return params
        trained = dict(self.trained)

        def part_of(steps: Any, leaf: Any) -> Any:
            path = path_name(steps)
            if path in self.adapters:
                return self.adapters[path]
            if path not in trained:
                return None
            if path in self.channels:
                return jnp.asarray(leaf).at[..., self.channels[path], :].get(**_SURE)
            rows = trained[path]
            return leaf if rows is None else leaf[..., :rows, :]

        return jax.tree_util.tree_map_with_path(part_of, params, is_leaf=is_quantized)

    def merge(self, trainable: Any, params: Any) -> Any:
        """The parameters to compute with: `params`, dequantized, with `trainable` put
        in."""

        def add(_: str, kernel: Any, adapter: Adapter) -> Any:
            return dequantized(kernel) + adapter.a @ adapter.b

        return self._put(trainable, params, add, dequantized)

    def replace(self, trainable: Any, params: Any) -> tuple[Any, "Part"]:
        """(parameters, part) after an update; adapters are not added to kernels."""
        if self.trained is None:
            return trainable, self
        adapters = {}

        def keep(path: str, kernel: Any, adapter: Adapter) -> Any:
            adapters[path] = adapter
            return kernel

        kept = self._put(trainable, params, keep, lambda leaf: leaf)
        return kept, dataclasses.replace(self, adapters=adapters)

    def merged(self, params: Any) -> Any:
        """`params` in RAM, dequantized and with adapters added, to evaluate or save.

        No array is one of the given ones, which the next step may take.
        """
        part, params = copied_to_ram((self, params))
        return part.merge(part.split(params), params)

    def _put(
        self, trainable: Any, params: Any, adapt: Callable, freeze: Callable
    ) -> Any:
        if self.trained is None:
            return trainable

        def whole(steps: Any, leaf: Any, part: Any) -> Any:
            path = path_name(steps)
            if part is None:
                return freeze(leaf)
            if path in self.adapters:
                return adapt(path, leaf, part)
            if path in self.channels:
                kernel = jnp.asarray(leaf)
                return kernel.at[..., self.channels[path], :].set(part, **_SURE)
            if part.shape == leaf.shape:
                return part
            return lax.dynamic_update_slice(leaf, part, (0,) * leaf.ndim)

        return jax.tree_util.tree_map_with_path(
            whole, params, trainable, is_leaf=is_quantized
        )


EVERYTHING = Part()
_SURE: Any = dict(
    mode="promise_in_bounds", indices_are_sorted=True, unique_indices=True
)


def named(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of each leaf of a pytree, as `path_name` joins paths.

    A `Quantized` kernel is one leaf.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
    return [(path_name(path), leaf) for path, leaf in leaves]
