"""Models of images, each in flax nnx and in flax linen.

Images are [batch, height, width, channels], logits [batch, num_classes].
"""

import math

import flax.linen as nn
import jax
from flax import nnx

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


# By the first letters of a name in `experiments.models`.
FAMILIES = {
    "mlp": (NnxMLP, LinenMLP),
    "cnn": (NnxCNN, LinenCNN),
    "res": (NnxResNet, LinenResNet),
    "vgg": (NnxVGG, LinenVGG),
    "mob": (NnxMobileNetV2, LinenMobileNetV2),
}
