"""How long a model's convolutions and pooling take in every way that fits them.

    python -m experiments.lowerings --model=resnet18 --dataset=photos --batch_size=64
    python -m experiments.lowerings --model=unet --batch_size=16
    python -m experiments.lowerings --model=mobilenetv2 --dataset=photos --batch_size=16

takes about a minute each on two cores, and writes a row for each distinct one of a
training step's gradient to experiments/results/lowerings: its FLOPs, how often it runs,
milliseconds as `jax.jit` computes it ("jit"), as XLA does with the options that
poet_jax gives it ("xla") and in each other way, and MiB of workspace as `jax.jit` and
in the chosen way. Expect narrow convolutions to take half to two thirds of `jax.jit`'s
time and a fraction of its workspace, depthwise ones and their gradients a tenth or
less, and so the gradient of max pooling.
"""

import csv
import pathlib
from collections import Counter

import jax
from absl import app, flags
from tqdm import tqdm

import poet_jax
from experiments.steps import flax_case, unet_case
from poet_jax import lowerings
from poet_jax.graph import equation_signature
from poet_jax.price import node_flops

MODEL = flags.DEFINE_string(
    "model", "resnet18", "Model, as in experiments.train, or unet on noise."
)
DATASET = flags.DEFINE_string("dataset", "photos", "What the model's batch is from.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Examples per step.")
APPROXIMATE = flags.DEFINE_bool("approximate", False, "Try what rounds more, too.")
OUTPUT = flags.DEFINE_string(
    "output", "experiments/results/lowerings", "Folder for the CSV file."
)
WAYS = (
    "jit", "xla", "im2col", "channels_first", "as_matrix_product", "by_comparison",
    "by_additions", "as_sum_over_taps", "as_sums_over_images", "by_images",
)  # fmt: skip
ROUGH = ("winograd", "bfloat16_product")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if MODEL.value == "unet":
        case = unet_case(BATCH_SIZE.value)
    else:
        case = flax_case(MODEL.value, BATCH_SIZE.value, DATASET.value)
    gradient = jax.value_and_grad(case.loss, has_aux=True)
    graph = poet_jax.trace(jax.jit(gradient), *jax.eval_shape(case.init))
    nodes = {
        equation_signature(e): node
        for node in graph.nodes
        for e in node.equations
        if any(lowerings.others(e, APPROXIMATE.value))
    }
    runs = Counter(equation_signature(e) for n in graph.nodes for e in n.equations)
    ways = (*WAYS, *(ROUGH if APPROXIMATE.value else ()))
    folder = pathlib.Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{MODEL.value.partition(':')[0]}.csv"
    total = dict.fromkeys(("jit", "xla", "chosen"), 0.0)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["operands", "backward", "runs", "mflops", *ways]
            + ["chosen", "jit_mib", "xla_mib", "chosen_mib"]
        )
        for key, node in tqdm(nodes.items(), unit="equation"):
            (equation,) = node.equations
            measured = lowerings.measure(node, APPROXIMATE.value, plain=True)
            plain = measured.pop("jit")
            chosen = lowerings.choice(measured)
            measured["jit"] = plain
            seconds = {name: x.seconds for name, x in measured.items()}
            shapes = " ".join(
                f"{x.dtype}{list(x.shape)}" for x in equation.operand_shapes
            )
            writer.writerow(
                [shapes, node.backward, runs[key], f"{node_flops(node) / 1e6:.1f}"]
                + [f"{1e3 * seconds[w]:.3f}" if w in seconds else "" for w in ways]
                + [chosen]
                + [
                    f"{measured[w].workspace_bytes / 2**20:.1f}"
                    for w in ("jit", "xla", chosen)
                ]
            )
            file.flush()
            for name in ("jit", "xla"):
                total[name] += runs[key] * seconds[name]
            total["chosen"] += runs[key] * seconds[chosen]
    print(
        f"{path}: {len(nodes)} distinct equations take {total['jit']:.3f} s of a step "
        f"under jax.jit, {total['xla']:.3f} s as XLA computes them for poet_jax, "
        f"{total['chosen']:.3f} s in the fastest ways"
    )


if __name__ == "__main__":
    app.run(main)
