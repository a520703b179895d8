"""A part of a tree of parameters: what a step trains of it, and how to put it back."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.trace import path_name
from poet_jax.stores.paged import in_ram


class Adapter(NamedTuple):
    """What is added to a kernel [inputs, outputs]: the product of two thin matrices.

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

    A pytree itself, as part of a training state. The trainable tree that its methods
    give and take is the parameters' own, with None for what is frozen, the trained
    input channels of a kernel, and the adapter in place of a kernel that has one:

        trainable = part.split(params)
        loss, gradients = jax.value_and_grad(
            lambda trainable: loss_fn(part.merge(trainable, params))
        )(trainable)
        updates, moments = optimizer.update(gradients, moments, trainable)
        params, part = part.replace(optax.apply_updates(trainable, updates), params)

    Attributes:
      channels: [k] numbers, ascending, of the trained input channels of each kernel
        whose first k they are not, by path.
      adapters: by path.
      trained: (path, k) of each trained parameter: k input channels, or None for all
        of it. None if everything is trained.
    """

    channels: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    adapters: dict[str, Adapter] = dataclasses.field(default_factory=dict)
    trained: tuple[tuple[str, int | None], ...] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def split(self, params: Any) -> Any:
        """The trainable tree of `params`, from which it takes all but adapters."""
        if self.trained is None:
            return params
        trained = dict(self.trained)

        def part_of(path: str, leaf: Any) -> Any:
            if path in self.adapters:
                return self.adapters[path]
            if path not in trained:
                return None
            if path in self.channels:
                return _channels(leaf, self.channels[path])
            rows = trained[path]
            return leaf if rows is None else leaf[..., :rows, :]

        return jax.tree.unflatten(
            jax.tree.structure(params),
            [part_of(path, leaf) for path, leaf in named(params)],
        )

    def merge(self, trainable: Any, params: Any) -> Any:
        """The parameters that a model computes with: `trainable` put into `params`."""
        return self._put(trainable, params, lambda kernel, x: kernel + x.a @ x.b)

    def replace(self, trainable: Any, params: Any) -> tuple[Any, "Part"]:
        """(parameters, part) after an update: adapters stay beside their kernels."""
        if self.trained is None:
            return trainable, self
        adapters = {
            path: part
            for (path, _), part in zip(
                named(params),
                jax.tree.structure(params).flatten_up_to(trainable),
                strict=True,
            )
            if path in self.adapters
        }
        kept = self._put(trainable, params, lambda kernel, _: kernel)
        return kept, dataclasses.replace(self, adapters=adapters)

    def merged(self, params: Any) -> Any:
        """`params` in RAM, with the adapters added to their kernels, to evaluate or to
        save."""
        part, params = in_ram((self, params))
        return part.merge(part.split(params), params)

    def _put(self, trainable: Any, params: Any, adapt: Callable) -> Any:
        if self.trained is None:
            return trainable
        tree = jax.tree.structure(params)

        def whole(path: str, leaf: Any, part: Any) -> Any:
            if part is None:
                return leaf
            if path in self.adapters:
                return adapt(leaf, part)
            if path in self.channels:
                kernel = jnp.asarray(leaf)
                return kernel.at[..., self.channels[path], :].set(part, **_SURE)
            if part.shape == leaf.shape:
                return part
            return lax.dynamic_update_slice(leaf, part, (0,) * leaf.ndim)

        return jax.tree.unflatten(
            tree,
            [
                whole(path, leaf, part)
                for (path, leaf), part in zip(
                    named(params), tree.flatten_up_to(trainable), strict=True
                )
            ],
        )


EVERYTHING = Part()
# Of channels that are there, ascending, each once.
_SURE: Any = {
    "mode": "promise_in_bounds",
    "indices_are_sorted": True,
    "unique_indices": True,
}


def _channels(kernel: jax.Array, channels: jax.Array) -> jax.Array:
    return jnp.asarray(kernel).at[..., channels, :].get(**_SURE)


def named(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of each leaf of a pytree; steps of a path are joined by "/"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(path_name(path), leaf) for path, leaf in leaves]
