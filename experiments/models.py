"""Models for the experiments, each in flax nnx and in flax linen.

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

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.data import Dataset, DatasetSpec, load_dataset

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

# depth: (blocks in each stage, bottleneck blocks)
RESNET_STAGES = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
}
# (convolutions, width in units of the first) before each max-pool
VGG16_STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
# (expansion, channels, blocks, stride of the first) of each stage; the strides of 2
# that are published for the stem and the second stage are left out for small images
MOBILENET_STEM, MOBILENET_FEATURES = 32, 1280
MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
BATCH_NORM_MOMENTUM = 0.9


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
    for_nnx, for_linen = {
        "mlp": (NnxMLP, LinenMLP),
        "cnn": (NnxCNN, LinenCNN),
        "res": (NnxResNet, LinenResNet),
        "vgg": (NnxVGG, LinenVGG),
        "mob": (NnxMobileNetV2, LinenMobileNetV2),
    }[family[:3]]
    if framework == "nnx":
        shape = dataset_spec.input_shape
        return for_nnx(num_classes=classes, input_shape=shape, rngs=rngs, **options)
    return for_linen(num_classes=classes, **options)


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


# Multilayer perceptron.


class NnxMLP(nnx.Module):
    def __init__(self, num_classes, layers, width, input_shape, *, rngs):
        sizes = [math.prod(input_shape), *[width] * layers]
        self.hidden = nnx.List(
            nnx.Linear(a, b, rngs=rngs)
            for a, b in zip(sizes[:-1], sizes[1:], strict=True)
        )
        self.head = nnx.Linear(sizes[-1], num_classes, rngs=rngs)

    def __call__(self, x):
        x = x.reshape(len(x), -1)
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return self.head(x)


class LinenMLP(nn.Module):
    num_classes: int
    layers: int
    width: int

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = x.reshape(len(x), -1)
        for _ in range(self.layers):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.num_classes)(x)


# Convolution with BatchNorm, which all image models but the MLP are made of.


class NnxConvNorm(nnx.Module):
    def __init__(self, inputs, outputs, kernel=3, stride=1, groups=1, *, rngs):
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (kernel, kernel),
            stride,
            feature_group_count=groups,
            use_bias=False,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(outputs, momentum=BATCH_NORM_MOMENTUM, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x))


class LinenConvNorm(nn.Module):
    outputs: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(
            self.outputs,
            (self.kernel, self.kernel),
            self.stride,
            feature_group_count=self.groups,
            use_bias=False,
        )(x)
        return nn.BatchNorm(not train, momentum=BATCH_NORM_MOMENTUM)(x)


def _pool(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (2, 2), (2, 2), padding="SAME")


# A small CNN: two convolutions with BatchNorm, then Dropout.


class NnxCNN(nnx.Module):
    def __init__(self, num_classes, width, dropout, input_shape, *, rngs):
        rows, columns, channels = input_shape
        features = -(-rows // 4) * -(-columns // 4) * 2 * width
        self.first = NnxConvNorm(channels, width, rngs=rngs)
        self.second = NnxConvNorm(width, 2 * width, rngs=rngs)
        self.hidden = nnx.Linear(features, 4 * width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(4 * width, num_classes, rngs=rngs)

    def __call__(self, x):
        x = _pool(nnx.relu(self.first(x)))
        x = _pool(nnx.relu(self.second(x)))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.head(self.dropout(x))


class LinenCNN(nn.Module):
    num_classes: int
    width: int
    dropout: float

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = _pool(nn.relu(LinenConvNorm(self.width)(x, train)))
        x = _pool(nn.relu(LinenConvNorm(2 * self.width)(x, train)))
        x = nn.relu(nn.Dense(4 * self.width)(x.reshape(len(x), -1)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


# ResNet (He et al., CVPR 2016) with the stem for small images.


def _residual_convolutions(width: int, stride: int, bottleneck: bool):
    """(outputs, kernel, stride) of each convolution of a residual block."""
    if bottleneck:
        return ((width, 1, 1), (width, 3, stride), (4 * width, 1, 1))
    return ((width, 3, stride), (width, 3, 1))


def _resnet_blocks(depth: int, width: int):
    """(width, stride, bottleneck) of each residual block."""
    stages, bottleneck = RESNET_STAGES[depth]
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            yield width * 2**stage, stride, bottleneck


class NnxResidual(nnx.Module):
    def __init__(self, inputs, width, stride, bottleneck, *, rngs):
        self.convs = nnx.List()
        channels = inputs
        for outputs, kernel, step in _residual_convolutions(width, stride, bottleneck):
            self.convs.append(NnxConvNorm(channels, outputs, kernel, step, rngs=rngs))
            channels = outputs
        self.outputs = channels
        same = inputs == channels and stride == 1
        self.shortcut = nnx.data(
            None if same else NnxConvNorm(inputs, channels, 1, stride, rngs=rngs)
        )

    def __call__(self, x):
        y = x
        for conv in self.convs[:-1]:
            y = nnx.relu(conv(y))
        y = self.convs[-1](y)
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class NnxResNet(nnx.Module):
    def __init__(self, depth, num_classes, width, input_shape, *, rngs):
        self.stem = NnxConvNorm(input_shape[-1], width, rngs=rngs)
        self.blocks = nnx.List()
        inputs = width
        for block in _resnet_blocks(depth, width):
            self.blocks.append(NnxResidual(inputs, *block, rngs=rngs))
            inputs = self.blocks[-1].outputs
        self.head = nnx.Linear(inputs, num_classes, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


class LinenResidual(nn.Module):
    width: int
    stride: int
    bottleneck: bool

    @nn.compact
    def __call__(self, x, train: bool):
        y = x
        convs = _residual_convolutions(self.width, self.stride, self.bottleneck)
        for conv in convs[:-1]:
            y = nn.relu(LinenConvNorm(*conv)(y, train))
        y = LinenConvNorm(*convs[-1])(y, train)
        if x.shape != y.shape:
            x = LinenConvNorm(y.shape[-1], 1, self.stride)(x, train)
        return nn.relu(y + x)


class LinenResNet(nn.Module):
    depth: int
    num_classes: int
    width: int

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.relu(LinenConvNorm(self.width)(x, train))
        for block in _resnet_blocks(self.depth, self.width):
            x = LinenResidual(*block)(x, train)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))


# VGG-16 (Simonyan and Zisserman, ICLR 2015) with BatchNorm and one dense layer.


class NnxVGG(nnx.Module):
    def __init__(self, num_classes, width, dropout, input_shape, *, rngs):
        self.stages = nnx.List()
        channels = input_shape[-1]
        for convs, factor in VGG16_STAGES:
            stage = nnx.List()
            for _ in range(convs):
                stage.append(NnxConvNorm(channels, factor * width, rngs=rngs))
                channels = factor * width
            self.stages.append(stage)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(channels, num_classes, rngs=rngs)

    def __call__(self, x):
        for stage in self.stages:
            for conv in stage:
                x = nnx.relu(conv(x))
            x = _pool(x)
        return self.head(self.dropout(x.mean(axis=(1, 2))))


class LinenVGG(nn.Module):
    num_classes: int
    width: int
    dropout: float

    @nn.compact
    def __call__(self, x, train: bool = True):
        for convs, factor in VGG16_STAGES:
            for _ in range(convs):
                x = nn.relu(LinenConvNorm(factor * self.width)(x, train))
            x = _pool(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x.mean(axis=(1, 2)))
        return nn.Dense(self.num_classes)(x)


# MobileNetV2 (Sandler et al., CVPR 2018). A pointwise convolution is a product with the
# channels of each pixel, and written as one: its kernel is a matrix.


def _divisible(channels: float) -> int:
    """A multiple of 8 near `channels`, below it by a tenth at most, as published."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def _mobilenet_blocks(width: float, depth: float):
    """(expansion, channels, stride) of each inverted residual block."""
    for expansion, channels, blocks, stride in MOBILENET_STAGES:
        for block in range(math.ceil(depth * blocks)):
            yield expansion, _divisible(width * channels), 1 if block else stride


class NnxPointwise(nnx.Module):
    def __init__(self, inputs, outputs, *, rngs):
        self.linear = nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, momentum=BATCH_NORM_MOMENTUM, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class NnxInvertedResidual(nnx.Module):
    def __init__(self, inputs, expansion, outputs, stride, *, rngs):
        width = expansion * inputs
        self.expand = nnx.data(
            None if expansion == 1 else NnxPointwise(inputs, width, rngs=rngs)
        )
        self.depthwise = NnxConvNorm(width, width, 3, stride, width, rngs=rngs)
        self.project = NnxPointwise(width, outputs, rngs=rngs)

    def __call__(self, x):
        y = x if self.expand is None else nnx.relu6(self.expand(x))
        y = self.project(nnx.relu6(self.depthwise(y)))
        return x + y if x.shape == y.shape else y


class NnxMobileNetV2(nnx.Module):
    def __init__(self, num_classes, width, depth, input_shape, *, rngs):
        inputs = _divisible(width * MOBILENET_STEM)
        self.stem = NnxConvNorm(input_shape[-1], inputs, rngs=rngs)
        self.blocks = nnx.List()
        for expansion, outputs, stride in _mobilenet_blocks(width, depth):
            block = NnxInvertedResidual(inputs, expansion, outputs, stride, rngs=rngs)
            self.blocks.append(block)
            inputs = outputs
        features = _divisible(width * MOBILENET_FEATURES)
        self.features = NnxPointwise(inputs, features, rngs=rngs)
        self.head = nnx.Linear(features, num_classes, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu6(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.head(nnx.relu6(self.features(x)).mean(axis=(1, 2)))


class LinenPointwise(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(self.outputs, use_bias=False)(x)
        return nn.BatchNorm(not train, momentum=BATCH_NORM_MOMENTUM)(x)


class LinenInvertedResidual(nn.Module):
    expansion: int
    outputs: int
    stride: int

    @nn.compact
    def __call__(self, x, train: bool):
        y, width = x, self.expansion * x.shape[-1]
        if self.expansion > 1:
            y = nn.relu6(LinenPointwise(width)(y, train))
        y = nn.relu6(LinenConvNorm(width, 3, self.stride, width)(y, train))
        y = LinenPointwise(self.outputs)(y, train)
        return x + y if x.shape == y.shape else y


class LinenMobileNetV2(nn.Module):
    num_classes: int
    width: float
    depth: float

    @nn.compact
    def __call__(self, x, train: bool = True):
        stem = _divisible(self.width * MOBILENET_STEM)
        x = nn.relu6(LinenConvNorm(stem)(x, train))
        for block in _mobilenet_blocks(self.width, self.depth):
            x = LinenInvertedResidual(*block)(x, train)
        features = _divisible(self.width * MOBILENET_FEATURES)
        x = nn.relu6(LinenPointwise(features)(x, train))
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))


# BERT (Devlin et al., NAACL 2019), mean-pooled, and GPT (Radford et al., 2018).


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a transformer; its inputs are tokens [batch, length].

    Attributes:
      num_classes: logits per example, ignored by a causal model.
      pre_norm: LayerNorm before each sublayer instead of after the residual sum.
      causal: attend to the past only, and predict a token at every position.
    """

    vocabulary: int
    num_classes: int
    layers: int
    width: int
    heads: int
    length: int
    dropout: float
    pre_norm: bool
    causal: bool


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


def _attend(query, key, value, heads: int, causal: bool) -> jax.Array:
    """Scaled dot-product attention of [batch, length, width] over `heads` heads."""
    batch, length, width = query.shape
    query, key, value = (
        x.reshape(batch, length, heads, width // heads) for x in (query, key, value)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // heads) ** 0.5
    if causal:
        past = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(past, scores, jnp.finfo(scores.dtype).min)
    result = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return result.reshape(batch, length, width)


_POSITION_INIT = nn.initializers.normal(0.02)


class NnxAttention(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs):
        self.config = config
        linear = functools.partial(nnx.Linear, config.width, config.width, rngs=rngs)
        self.query, self.key, self.value, self.out = (linear() for _ in range(4))

    def __call__(self, x):
        heads, causal = self.config.heads, self.config.causal
        x = _attend(self.query(x), self.key(x), self.value(x), heads, causal)
        return self.out(x)


class NnxFeedForward(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs):
        self.up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class NnxTransformer(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs):
        self.config = config
        width = config.width
        self.token = nnx.Embed(config.vocabulary, width, rngs=rngs)
        self.position = nnx.Param(_POSITION_INIT(rngs.params(), (config.length, width)))
        self.sublayers, self.norms = nnx.List(), nnx.List()
        for _ in range(config.layers):
            self.sublayers.append(NnxAttention(config, rngs=rngs))
            self.sublayers.append(NnxFeedForward(config, rngs=rngs))
        for _ in range(2 * config.layers + 1):
            self.norms.append(nnx.LayerNorm(width, rngs=rngs))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.head = nnx.data(
            None if config.causal else nnx.Linear(width, config.num_classes, rngs=rngs)
        )

    def __call__(self, tokens):
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        # The norm left over: BERT's after the embeddings, GPT's before the logits.
        if not self.config.pre_norm:
            x = self.norms[-1](x)
        x = self.dropout(x)
        for sublayer, norm in zip(self.sublayers, self.norms, strict=False):
            if self.config.pre_norm:
                x = x + self.dropout(sublayer(norm(x)))
            else:
                x = norm(x + self.dropout(sublayer(x)))
        if self.config.pre_norm:
            x = self.norms[-1](x)
        return self.token.attend(x) if self.head is None else self.head(x.mean(axis=1))


class LinenAttention(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x):
        query, key, value = (nn.Dense(self.config.width)(x) for _ in range(3))
        x = _attend(query, key, value, self.config.heads, self.config.causal)
        return nn.Dense(self.config.width)(x)


class LinenFeedForward(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x):
        width = self.config.width
        return nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(x)))


class LinenTransformer(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, tokens, train: bool = True):
        config = self.config
        token = nn.Embed(config.vocabulary, config.width)
        shape = (config.length, config.width)
        position = self.param("position", _POSITION_INIT, shape)
        dropout = nn.Dropout(config.dropout, deterministic=not train)
        x = token(tokens) + position[: tokens.shape[1]]
        if not config.pre_norm:
            x = nn.LayerNorm(name="embedding_norm")(x)
        x = dropout(x)
        for number in range(2 * config.layers):
            norm = nn.LayerNorm(name=f"norm_{number}")
            attends = number % 2 == 0
            sublayer = (LinenAttention if attends else LinenFeedForward)(config)
            if config.pre_norm:
                x = x + dropout(sublayer(norm(x)))
            else:
                x = norm(x + dropout(sublayer(x)))
        if config.pre_norm:
            x = nn.LayerNorm(name="final_norm")(x)
        if config.causal:
            return token.attend(x)
        return nn.Dense(config.num_classes)(x.mean(axis=1))
