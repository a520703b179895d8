"""The paper's own layer graphs, as planner instances.

    python -m experiments.paper.layer_graphs

writes a JSON file for each network and board to outputs/instances, within a second.
`poet_jax.load_instance` reads them; `experiments.paper.questions` and
`experiments.benchmarks.plan_benchmark` plan them.

What a layer takes follows the rules that were published with the POET code (Patil et
al., ICML 2022): FLOPs are counted from shapes, four bytes are a number, a layer's
gradient takes twice its FLOPs, and the constants are those of `poet_jax.devices.paper`.
Only activations are counted. These are the rules as published, oddities included: a
linear layer's FLOPs do not grow with the length of a sequence.
"""

import dataclasses
import json
import math
import pathlib

from absl import app

from experiments.program import program
from poet_jax.core.device import DeviceProfile
from poet_jax.devices import paper

FOLDER = pathlib.Path("outputs/instances")
BOARDS = {"a72": paper.RASPBERRY_PI_4, "m4": paper.NRF52840}
NUMBER_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer, or a gradient.

    Attributes:
      name: its kind, numbered in the order of the network's definition.
      shape: of its result, [batch, channels, height, width] for an image.
      flops: of one run.
      reads: numbers of the layers that it reads; a gradient may read one twice.
      backward: whether it is a gradient.
    """

    name: str
    shape: tuple[int, ...]
    flops: int
    reads: tuple[int, ...]
    backward: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Network:
    """Layers, each of which reads the last one unless `reads` says otherwise."""

    def __init__(self, *shape: int):
        self.layers: list[Layer] = []
        self.add("InputLayer", shape, 0, reads=())

    @property
    def last(self) -> Layer:
        return self.layers[-1]

    def add(self, kind: str, shape, flops: int, reads=None, backward=False) -> int:
        """The number of a new layer."""
        number = len(self.layers)
        reads = (number - 1,) if reads is None else tuple(reads)
        name = f"layer{number}_{kind}"
        self.layers.append(Layer(name, tuple(shape), flops, reads, backward))
        return number

    def linear(self, outputs: int, relu: bool = False) -> int:
        length, inputs = self.last.shape
        shape = (length, outputs)
        flops = 2 * (inputs + 1) * outputs + outputs + relu * math.prod(shape)
        return self.add("LinearLayerReLU" if relu else "LinearLayer", shape, flops)

    def convolution(self, channels: int, stride: int = 1, of: int | None = None) -> int:
        """Of 3x3 with a bias, padded by one."""
        of = len(self.layers) - 1 if of is None else of
        batch, _, *sizes = self.layers[of].shape
        shape = (batch, channels, *((size - 1) // stride + 1 for size in sizes))
        flops = 2 * 9 * self.layers[of].size * channels + math.prod(shape)
        return self.add("Conv2dLayer", shape, flops, [of])

    def elementwise(self, kind: str, flops_each: int = 1) -> int:
        return self.add(kind, self.last.shape, flops_each * self.last.size)

    def skip(self, first: int, second: int) -> int:
        shape, size = self.layers[first].shape, self.layers[first].size
        return self.add("SkipAddLayer", shape, size, [first, second])

    def pool(self, kind: str, window: int) -> int:
        batch, channels, *sizes = self.last.shape
        shape = (batch, channels, *(size // window for size in sizes))
        return self.add(kind, shape, 2 * window**2 * math.prod(shape))

    def flatten(self) -> int:
        batch, *rest = self.last.shape
        return self.add("FlattenLayer", (batch, math.prod(rest)), self.last.size)

    def loss(self, classes: int) -> None:
        """Cross-entropy, and the gradient of every layer below it.

        A layer's gradient has the shape of the layer above it, and reads both and the
        gradient before.
        """
        self.add("CrossEntropyLoss", (classes,), self.last.size * classes)
        for number in reversed(range(len(self.layers) - 1)):
            self.add(
                "GradientLayer",
                self.layers[number + 1].shape,
                2 * self.layers[number].flops,
                [number, number + 1, len(self.layers) - 1],
                backward=True,
            )


def linear() -> Network:
    net = Network(1, 784)
    for width in (10, 120, 100, 200, 10, 10):
        net.linear(width)
        net.elementwise("ReLULayer")
    net.loss(10)
    return net


def vgg16() -> Network:
    """For images of 32x32x3 and ten classes."""
    net = Network(1, 3, 32, 32)
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            net.convolution(channels)
            net.elementwise("ReLULayer")
        net.pool("MaxPool2d", 2)
    net.flatten()
    for _ in range(2):
        net.linear(4096)
        net.elementwise("ReLULayer")
        net.elementwise("DropoutLayer")
    net.linear(10)
    net.loss(10)
    return net


def resnet18() -> Network:
    """For images of 32x32x3 and ten classes; six blocks, each with a convolution in its
    skip connection."""
    net = Network(1, 3, 32, 32)
    net.convolution(16)
    block = net.elementwise("BatchNorm2d", 2)
    for channels, stride in ((16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)):
        above = block
        for step in (stride, 1):
            net.convolution(channels, step)
            net.elementwise("BatchNorm2d", 2)
            block = net.elementwise("ReLULayer")
        net.convolution(channels, stride, of=above)
        net.skip(block, net.elementwise("BatchNorm2d", 2))
        block = net.elementwise("ReLULayer")
    net.pool("AvgPool2d", 8)
    net.flatten()
    net.linear(10)
    net.loss(10)
    return net


def bert(blocks: int = 12, length: int = 512, width: int = 768) -> Network:
    """Of twelve heads of 64, without its look-up."""
    net = Network(length, width)
    heads, head = 12, 64
    for _ in range(blocks):
        above = len(net.layers) - 1
        product = length * width * head * heads
        net.add("QueryKeyValueMatrix", (3 * length, head, heads), 3 * product)
        scores = (length, length, heads)
        flops = head * math.prod(scores) + 2 * math.prod(scores)  # a mask and dropout
        net.add("QKTMatrix", scores, flops)
        flops = 2 * head * math.prod(scores)
        net.add("QKTVMatrix", (length, head * heads), flops)
        attention = net.linear(width)
        net.skip(above, attention)
        net.linear(4 * width, relu=True)
        net.skip(attention, net.linear(width))  # as published
    net.loss(length)
    return net


NETWORKS = {
    "bert": bert,
    "linear": linear,
    "resnet18_cifar": resnet18,
    "transformer": lambda: bert(blocks=1),
    "vgg16_cifar": vgg16,
}


def execution_order(layers: list[Layer]) -> list[int]:
    """By the number of layers that still have to follow, as in the published code,
    which breaks ties at random; here they stay as they were listed."""
    following = [0] * len(layers)
    for number in reversed(range(len(layers))):
        for read in layers[number].reads:
            following[read] = max(following[read], following[number] + 1)
    return sorted(range(len(layers)), key=lambda number: -following[number])


def instance(name: str, network: Network, device: DeviceProfile) -> dict:
    """What `poet_jax.load_instance` reads, as JSON types."""
    layers = network.layers
    order = execution_order(layers)
    place = {number: position for position, number in enumerate(order)}
    nodes = []
    for layer in (layers[number] for number in order):
        nbytes = NUMBER_BYTES * layer.size
        page_in = device.page_in_seconds(nbytes)
        page_out = device.page_out_seconds(nbytes)
        nodes.append(
            {
                "name": layer.name,
                "backward": layer.backward,
                "bytes": nbytes,
                "seconds": layer.flops / device.flops_per_second,
                "joules": layer.flops / device.flops_per_joule,
                "page_in_seconds": page_in,
                "page_out_seconds": page_out,
                "page_in_joules": page_in * device.paging_watts,
                "page_out_joules": page_out * device.paging_watts,
            }
        )
    edges = [
        [place[read], position]
        for position, number in enumerate(order)
        for read in layers[number].reads
    ]
    return {"name": name, "nodes": nodes, "edges": edges}


def instance_paths() -> list[pathlib.Path]:
    """The paper's instances, written to outputs/instances first."""
    return write(FOLDER)


def write(folder: pathlib.Path) -> list[pathlib.Path]:
    """The file of each network and board."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for network, make in NETWORKS.items():
        for board, device in BOARDS.items():
            name = f"poet-{network}-{board}"
            paths.append(folder / f"{name}.json")
            text = json.dumps(instance(name, make(), device), indent=1)
            paths[-1].write_text(text + "\n")
    return paths


@program
def main() -> None:
    for path in instance_paths():
        print(path)


if __name__ == "__main__":
    app.run(main)
