"""Training steps as plain functions of pytrees, for the benchmarks."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import poet_jax
from experiments.image_models import NnxConvNorm, NnxResidual
from experiments.models import load_for_model, loss_fn, make_model
from experiments.transformer import NnxAttention, NnxFeedForward
from poet_jax import DeviceProfile, PagedArray
from poet_jax.passes import Pass

COARSE = poet_jax.passes.group, poet_jax.passes.reorder
# What `plan_benchmark` prices graphs for, the same on every machine.
BENCHMARK_DEVICE = DeviceProfile(
    name="60 GFLOP/s, 8 GB/s",
    ram_bytes=2**34,
    flops_per_second=60e9,
    flops_per_joule=60e9,
    bytes_per_second=8e9,
    page_in_bytes_per_second=0.5e9,
    page_out_bytes_per_second=0.3e9,
    paging_watts=1.0,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with data.

    Attributes:
      init: () -> (params, rest, batch), also under `jax.eval_shape`; `rest` is state
        without gradients, such as the statistics of BatchNorm.
      loss: (params, rest, batch) -> (loss, rest).
    """

    init: Callable[[], tuple[Any, Any, Any]]
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """A step, and what it begins with.

    Attributes:
      init: () -> (state, batch).
      step: (state, batch) -> (state, loss).
    """

    init: Callable[[], tuple[Any, Any]]
    step: Callable[[Any, Any], tuple[Any, jax.Array]]

    @classmethod
    def of(cls, case: Case, optimizer: optax.GradientTransformation) -> "TrainingStep":
        """The step of `training_step`, whose state is (params, rest, moments)."""

        def init():
            params, rest, batch = case.init()
            return (params, rest, optimizer.init(params)), batch

        return cls(init, training_step(case.loss, optimizer))


def training_step(loss, optimizer: optax.GradientTransformation):
    """(state, batch) -> (state, loss), where state is (params, rest, moments)."""

    def step(state, batch):
        params, rest, moments = state
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, rest), gradients = gradient(params, rest, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), rest, moments), value

    return step


def plain_step(
    model: nnx.Module, optimizer: optax.GradientTransformation
) -> Callable[[Any], jax.Array]:
    """Full training by `nnx.jit`: a function from a batch to its loss."""
    state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    def step(model, state, batch):
        loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
        state.update(model, gradients)
        return loss

    jitted = nnx.jit(step, donate_argnums=(0, 1))
    return lambda batch: jitted(model, state, batch)


def new_state(optimizer: optax.GradientTransformation, params, rest):
    """State for `training_step`, of copies of its own, so that it can be donated."""
    own = jax.tree.map(jnp.copy, (params, rest))
    return *own, optimizer.init(own[0])


def traced(case: Case, kind: str, passes: Iterable[Pass]) -> poet_jax.Graph:
    """The graph of a "step" with AdamW, or of its gradient alone, traced on shapes."""
    params, rest, batch = jax.eval_shape(case.init)
    if kind != "step":
        gradient = jax.value_and_grad(case.loss, has_aux=True)
        graph = poet_jax.trace(jax.jit(gradient), params, rest, batch)
    else:
        optimizer = optax.adamw(1e-3)
        moments = jax.eval_shape(optimizer.init, params)
        step = jax.jit(training_step(case.loss, optimizer), donate_argnums=0)
        graph = poet_jax.trace(step, (params, rest, moments), batch)
    return functools.reduce(lambda graph, change: change(graph), passes, graph)


def in_ram(tree) -> int:
    """Bytes of the arrays in a pytree that are in RAM."""
    return sum(
        x.copied_bytes if isinstance(x, PagedArray) else x.nbytes
        for x in jax.tree.leaves(tree)
    )


# What `jax.checkpoint` is put around, layer by layer, where a model has one of them.
BLOCKS = (NnxResidual, NnxAttention, NnxFeedForward, NnxConvNorm)


def nnx_case(
    make: Callable[[], nnx.Module],
    loss_of: Callable[[nnx.Module, Any], jax.Array],
    data: Callable[[], Any],
    trained: Any = nnx.Param,
) -> Case:
    """The module that `make` makes, its loss on a batch, and a batch.

    Variables of the kind `trained` are its parameters; others are `rest`.
    """

    def init():
        _, params, rest = nnx.split(make(), trained, ...)
        return params, rest, jax.tree.map(jnp.asarray, data())

    def loss(params, rest, batch):
        graphdef, _, _ = nnx.split(nnx.eval_shape(make), trained, ...)
        module = nnx.merge(graphdef, params, rest, copy=True)
        value = loss_of(module, batch)
        return value, nnx.split(module, trained, ...)[2]

    return Case(init, loss)


def checkpointed(
    case: Case, blocks: Iterable[type[nnx.Module]] = BLOCKS, policy: Any = None
) -> Case:
    """`case` with `nnx.remat` around every module of the kinds `blocks`, which saves
    what `policy` says, or by default nothing."""

    def loss(params, rest, batch):
        with contextlib.ExitStack() as stack:
            for block in blocks:
                call = nnx.remat(block.__call__, policy=policy)
                stack.enter_context(mock.patch.object(block, "__call__", call))
            return case.loss(params, rest, batch)

    return Case(case.init, loss)


def flax_case(
    model: str, batch_size: int, dataset: str, *, checkpoint: bool = False
) -> Case:
    """A model of `experiments.models` on a batch of real data.

    `checkpoint` rematerialises every block in the backward pass, as `nnx.remat` does.
    """

    def make() -> nnx.Module:
        spec = load_for_model(model, dataset).spec
        module = make_model(model, "nnx", dataset_spec=spec, seed=0)
        assert isinstance(module, nnx.Module)
        return module

    def data():
        return next(iter(load_for_model(model, dataset).batches(batch_size, 0, 1)))

    case = nnx_case(make, loss_fn, data)
    return checkpointed(case) if checkpoint else case


def _normal(seed: int, shapes):
    """Arrays of these shapes, scaled for their fan-in (He et al. 2015)."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            jax.random.normal(key, shape) * math.sqrt(2 * shape[-1] / math.prod(shape))
            for key, shape in zip(keys, leaves, strict=True)
        ],
    )


def _convolution(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def unet_case(
    batch_size: int = 16,
    widths: Sequence[int] = (32, 64, 128, 256),
    *,
    checkpoint: bool = False,
    policy: Any = None,
) -> Case:
    """A U-Net (Ronneberger et al. 2015) on images of 64x64x3, which learns to return
    its input; it has a level for each of `widths`.

    `checkpoint` rematerialises every block in the backward pass, but for what `policy`
    saves.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    before = 3
    for level, width in enumerate(widths):
        shapes[f"down{level}"] = [(3, 3, before, width), (3, 3, width, width)]
        before = width
    for level, width in reversed(list(enumerate(widths[:-1]))):
        shapes[f"up{level}"] = [(3, 3, before + width, width), (3, 3, width, width)]
        before = width
    shapes["head"] = [(1, 1, before, 3)]

    def block(kernels, x):
        for kernel in kernels:
            x = jax.nn.relu(_convolution(x, kernel))
        return x

    if checkpoint:
        block = jax.checkpoint(block, policy=policy)

    def loss(params, rest, batch):
        x, skips = batch, []
        for level in range(len(widths)):
            if level:
                x = nnx.max_pool(x, (2, 2), (2, 2))
            x = block(params[f"down{level}"], x)
            skips.append(x)
        for level in reversed(range(len(widths) - 1)):
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = block(params[f"up{level}"], jnp.concatenate([x, skips[level]], -1))
        return jnp.mean((_convolution(x, params["head"][0]) - batch) ** 2), rest

    def init():
        batch = jax.random.uniform(jax.random.key(1), (batch_size, 64, 64, 3))
        return _normal(0, shapes), (), batch

    return Case(init, loss)


def skips_case(batch_size: int = 4096) -> Case:
    """Thirty-two layers, each of which also reads what half as many layers made."""
    layers, width = 32, 512

    def loss(params, rest, batch):
        made = [batch]
        for number, kernel in enumerate(params):
            made.append(jnp.tanh(made[-1] @ kernel) + made[(number + 1) // 2])
        return jnp.mean(made[-1] ** 2), rest

    def init():
        batch = jax.random.normal(jax.random.key(1), (batch_size, width))
        return _normal(0, [(width, width)] * layers), (), batch

    return Case(init, loss)


def gru_case(batch_size: int = 32, length: int = 64, width: int = 128) -> Case:
    """A gated recurrent unit (Cho et al. 2014) under `lax.scan`, which classifies."""

    def loss(params, rest, batch):
        inputs, labels = batch

        def cell(state, x):
            of_input = jnp.split(x @ params[0], 3, -1)
            of_state = jnp.split(state @ params[1], 3, -1)
            reset, update = (
                jax.nn.sigmoid(a + b)
                for a, b in zip(of_input[:2], of_state[:2], strict=True)
            )
            new = jnp.tanh(of_input[2] + reset * of_state[2])
            return (1 - update) * new + update * state, None

        state, _ = jax.lax.scan(cell, jnp.zeros((batch_size, width)), inputs)
        logits = state @ params[2]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), rest

    def init():
        inputs = jax.random.normal(jax.random.key(1), (length, batch_size, width))
        kernels = _normal(0, [(width, 3 * width), (width, 3 * width), (width, 10)])
        return kernels, (), (inputs, jnp.zeros(batch_size, jnp.int32))

    return Case(init, loss)
