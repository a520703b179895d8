"""Models for the experiments by name, each in flax nnx and in flax linen.

A model is named `family`, or `family:option=value,option=value`:

  mlp                           layers=2, width=256
  cnn                           width=32, dropout=0.25
  resnet18, resnet34, resnet50  width=64 (of the first stage; 3x3 stem, no max-pool)
  vgg16                         width=64, dropout=0.5
  mobilenetv2                   width=1.0, depth=1.0 (of the published channels, and
                                of the blocks in each stage; for small images)
  bert2                         layers=2, width=128, heads=2, length=128, dropout=0,
                                norm=post (or pre): an encoder that classifies
  bert6, bert12, bert           the same with layers=6 or 12, width=768, heads=12
  gpt2layer                     as bert2 with norm=pre: a causal decoder
  gpt12, gpt                    the same with layers=12, width=768, heads=12

So `bert:layers=6,width=256,heads=4` is a model of its own, and `resnet50:width=16` is
narrow. Images are [batch, height, width, channels]; tokens are int32 [batch, length].
Logits are [batch, num_classes], for GPT [batch, length, vocabulary].

An nnx module follows `model.train()` and `model.eval()`, and starts in train mode. A
linen module takes `train` in its call. Equal names give equal parameter counts.
"""

from typing import Any

import flax.linen as nn
import jax
import optax
from flax import nnx

from experiments import image_models
from experiments.data import Dataset, DatasetSpec, load_dataset
from experiments.transformer import (
    LinenTransformer,
    NnxTransformer,
    TransformerConfig,
)

FRAMEWORKS = ("nnx", "linen")

_BASE = {"width": 768, "heads": 12, "length": 128, "dropout": 0.0}
_SMALL = _BASE | {"layers": 2, "width": 128, "heads": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "mlp": {"layers": 2, "width": 256},
    "cnn": {"width": 32, "dropout": 0.25},
    "resnet18": {"width": 64},
    "resnet34": {"width": 64},
    "resnet50": {"width": 64},
    "vgg16": {"width": 64, "dropout": 0.5},
    "mobilenetv2": {"width": 1.0, "depth": 1.0},
    "bert": _BASE | {"layers": 12, "norm": "post"},
    "bert2": _SMALL | {"norm": "post"},
    "bert6": _BASE | {"layers": 6, "norm": "post"},
    "bert12": _BASE | {"layers": 12, "norm": "post"},
    "gpt": _BASE | {"layers": 12, "norm": "pre"},
    "gpt2layer": _SMALL | {"norm": "pre"},
    "gpt12": _BASE | {"layers": 12, "norm": "pre"},
}


def parse_model(name: str) -> tuple[str, dict[str, Any]]:
    """The family of a model's name and all its options.

    Raises ValueError for a family, option or value that does not exist.
    """
    family, _, text = name.partition(":")
    if family not in OPTIONS:
        raise ValueError(
            f"A model named {name!r} was asked for. The models are "
            f"{', '.join(OPTIONS)}. Use for example --model=resnet18, or "
            "--model=bert:layers=6,width=256,heads=4."
        )
    options = dict(OPTIONS[family])
    for item in filter(None, text.split(",")):
        option, _, value = item.partition("=")
        try:
            options[option] = type(options[option])(value)
        except (KeyError, ValueError):
            known = ", ".join(f"{k}={v}" for k, v in OPTIONS[family].items())
            raise ValueError(
                f"The option {item!r} was asked for in {name!r}. The options of "
                f"{family} and their defaults are {known}. Use for example "
                f"--model={family}:{known.split(', ')[0]}."
            ) from None
    return family, options


def is_text_model(name: str) -> bool:
    """Whether the model called `name` reads tokens; otherwise it reads images."""
    return "length" in parse_model(name)[1]


def is_causal(name: str) -> bool:
    """Whether the model called `name` predicts the next token at every position."""
    return parse_model(name)[0].startswith("gpt")


def make_model(
    name: str, framework: str, *, dataset_spec: DatasetSpec, seed: int
) -> nnx.Module | nn.Module:
    """The model called `name` for examples of `dataset_spec`.

    `seed` sets an nnx module's parameters; a linen module gets its own in `init`.
    Raises ValueError for an unknown name or framework, and for text models of images.
    """
    family, options = parse_model(name)
    if framework not in FRAMEWORKS:
        raise ValueError(
            f"{name} was asked for in {framework!r}. Models are written in nnx and in "
            "linen. Use --framework=nnx."
        )
    if is_text_model(name) != (dataset_spec.vocabulary is not None):
        reads, given = "tokens", "images"
        if not is_text_model(name):
            reads, given = given, reads
        raise ValueError(
            f"{name} was asked for on {given} of shape {dataset_spec.input_shape}. It "
            f"reads {reads}. Use --dataset=text for bert and gpt, or for example "
            "--dataset=photos for the others."
        )
    classes, rngs = dataset_spec.num_classes, nnx.Rngs(seed)
    if dataset_spec.vocabulary is not None:
        config = _transformer_config(name, dataset_spec)
        if framework == "nnx":
            return NnxTransformer(config, rngs=rngs)
        return LinenTransformer(config)
    if family.startswith("resnet"):
        options["depth"] = int(family.removeprefix("resnet"))
    for_nnx, for_linen = image_models.FAMILIES[family[:3]]
    if framework == "nnx":
        shape = dataset_spec.input_shape
        return for_nnx(num_classes=classes, input_shape=shape, rngs=rngs, **options)
    return for_linen(num_classes=classes, **options)


def _transformer_config(name: str, spec: DatasetSpec) -> TransformerConfig:
    options = parse_model(name)[1]
    norm = options.pop("norm")
    if norm not in ("pre", "post") or options["width"] % options["heads"]:
        raise ValueError(
            f"{name} was asked for, with norm={norm}, width={options['width']} and "
            f"heads={options['heads']}. norm is pre or post, and heads divides width. "
            "Use for example --model=bert:layers=6,width=256,heads=4,norm=post."
        )
    options["length"] = max(options["length"], spec.input_shape[0])
    return TransformerConfig(
        vocabulary=spec.vocabulary or 0,
        num_classes=spec.num_classes,
        pre_norm=norm == "pre",
        causal=is_causal(name),
        **options,
    )


def load_for_model(model: str, dataset: str, folder: str | None = None) -> Dataset:
    """The dataset called `dataset`, with the text windows and labels `model` needs."""
    length = parse_model(model)[1].get("length", 128)
    return load_dataset(
        dataset, folder=folder, length=length, next_byte=is_causal(model)
    )


def loss_fn(model, batch) -> jax.Array:
    """Mean softmax cross-entropy over every label of `batch` (inputs, labels)."""
    inputs, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(model(inputs), labels)
    return losses.mean()
