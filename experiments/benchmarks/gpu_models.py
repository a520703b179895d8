"""Training steps that fill a GPU, each also at a small size."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.benchmarks.loop_models import Scan, gpt, loop, plain
from experiments.data import DatasetSpec
from experiments.image_models import NnxResidual
from experiments.language_model import models as decoders
from experiments.language_model.llama import LlamaConfig, LlamaLayer
from experiments.models import loss_fn, make_model
from experiments.steps import Case, TrainingStep, checkpointed, nnx_case, unet_case

IMAGES = DatasetSpec((32, 32, 3), 10)
RANK = 8  # of LoRA


def adamw(case: Case) -> TrainingStep:
    return TrainingStep.of(case, optax.adamw(1e-3))


def by_blocks(
    case: Case, block: Any, checkpoint: bool = False, policy: Any = None
) -> TrainingStep:
    return adamw(checkpointed(case, (block,), policy) if checkpoint else case)


def unet(is_small: bool, **remat: Any) -> TrainingStep:
    sizes = (4, (8, 16, 32, 64)) if is_small else (512,)
    return adamw(unet_case(*sizes, **remat))


def resnet(is_small: bool, **remat: Any) -> TrainingStep:
    name, images = ("resnet18:width=4", 4) if is_small else ("resnet50", 256)

    def make() -> Any:
        return make_model(name, "nnx", dataset_spec=IMAGES, seed=0)

    def data():
        drawn = np.random.default_rng(0)
        inputs = drawn.normal(size=(images, *IMAGES.input_shape))
        labels = drawn.integers(IMAGES.num_classes, size=images)
        return inputs.astype(np.float32), labels.astype(np.int32)

    return by_blocks(nnx_case(make, loss_fn, data), NnxResidual, **remat)


def gpt2(
    scan: Scan, is_small: bool, checkpoint: bool = False, policy: Any = None
) -> TrainingStep:
    def blocks(body, *rest):
        if checkpoint:  # a scan keeps the two passes apart by itself
            body = jax.checkpoint(body, policy=policy, prevent_cse=scan is loop)
        return scan(body, *rest)

    sizes: dict[str, Any] = {"layers": 2, "width": 64, "length": 32}
    if not is_small:
        sizes = {"layers": 24, "width": 1024, "heads": 16, "words": 50_257,
                 "length": 1024, "dtype": jnp.bfloat16}  # fmt: skip
    return gpt(scan=blocks, apart=scan is loop, **sizes)


def adapt(part: nnx.Module, dtype: Any, rngs: nnx.Rngs) -> None:
    """Put LoRA beside each linear layer of a module."""
    for name, base in list(vars(part).items()):
        if isinstance(base, nnx.Linear):
            sizes = base.in_features, RANK, base.out_features
            kept: Any = {"base_module": base, "param_dtype": dtype}
            setattr(part, name, nnx.LoRA(*sizes, **kept, rngs=rngs))


def llama(is_small: bool, **remat: Any) -> TrainingStep:
    config: Any = decoders.SIZES["1b"]
    length, dtype = 1024, jnp.bfloat16
    if is_small:
        config, length, dtype = LlamaConfig(256, 32, 2, 4, 2, 8, 64), 32, jnp.float32

    def make() -> nnx.Module:
        model, rngs = decoders.make(config, dtype=dtype), nnx.Rngs(0)
        assert isinstance(model, decoders.Llama)
        for layer in model.layers:
            for part in (layer.self_attn, layer.mlp):
                adapt(part, dtype, rngs)
        return model

    def data():
        drawn = np.random.default_rng(0)
        return drawn.integers(config.vocabulary, size=(4, length + 1), dtype=np.int32)

    case = nnx_case(make, decoders.loss_fn, data, nnx.LoRAParam)
    return by_blocks(case, LlamaLayer, **remat)


MODELS: dict[str, Callable[..., TrainingStep]] = {
    "unet": unet,
    "gpt2_scan": functools.partial(gpt2, plain),
    "gpt2_loop": functools.partial(gpt2, loop),
    "resnet50": resnet,
    "llama_lora": llama,
}
