"""What do libraries allocate that XLA does not report? The rules of `poet_jax.scratch`,
from outside.

    python -m experiments.benchmarks.scratch

runs each operation in a process of its own: it resets the process's high-water mark,
calls the compiled operation once, and takes what the mark rose by, less what XLA's own
`memory_analysis` says of temporaries and results. The larger of two calls counts, and
one before them warms up. It writes experiments/results/scratch/scratch.csv, with what
the rules say beside it, in about five minutes on two cores. Linux only.
"""

import csv
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

import poet_jax
from experiments.benchmarks import memory
from poet_jax.passes.cpu.scratch import node_scratch

OUTPUT = flags.DEFINE_string("output", "experiments/results/scratch", "Folder.")
ONLY = flags.DEFINE_string("only", "", "Measure this one, in this process.")
CALLS = 2
COLUMNS = ("operation", "operands", "xla_bytes", "beyond_bytes", "rule_bytes")


def convolution(stride: int = 1, padding: str = "SAME", **options: Any) -> Callable:
    def fun(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (stride, stride), padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"), **options,
        )  # fmt: skip

    return fun


def filter_gradient(image, slope):
    kernel = jnp.zeros((3, 3, image.shape[-1], slope.shape[-1]))
    return jax.vjp(lambda kernel: convolution()(image, kernel), kernel)[1](slope)


def svd(x):
    return jnp.linalg.svd(x, full_matrices=False)


# Name: the function, and shapes of its operands.
CASES: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "convolution, 64 channels": (convolution(), ((32, 32, 32, 64), (3, 3, 64, 64))),
    "convolution, 128 channels": (convolution(), ((32, 16, 16, 128), (3, 3, 128, 128))),
    "convolution, 512 channels": (convolution(), ((32, 4, 4, 512), (3, 3, 512, 512))),
    "convolution, 256 to 64": (convolution(), ((32, 16, 16, 256), (3, 3, 256, 64))),
    "convolution, 3 channels": (convolution(), ((64, 64, 64, 3), (3, 3, 3, 64))),
    "convolution, 5x5": (convolution(), ((32, 32, 32, 64), (5, 5, 64, 64))),
    "convolution, 1x1": (convolution(), ((32, 32, 32, 64), (1, 1, 64, 128))),
    "convolution, stride 2": (convolution(2), ((32, 64, 64, 32), (3, 3, 32, 64))),
    "convolution, VALID": (
        convolution(padding="VALID"),
        ((32, 64, 64, 32), (3, 3, 32, 32)),
    ),
    "convolution, depthwise": (
        convolution(feature_group_count=64),
        ((32, 64, 64, 64), (3, 3, 1, 64)),
    ),
    "filter gradient": (filter_gradient, ((32, 16, 16, 128), (32, 16, 16, 128))),
    "dot": (jnp.matmul, ((2048, 2048), (2048, 2048))),
    "sort": (jnp.sort, ((2**22,),)),
    "sort of rows": (jnp.sort, ((2**11, 2**11),)),
    "argsort": (jnp.argsort, ((2**22,),)),
    "median": (jnp.median, ((2**22,),)),
    "top_k": (lambda x: jax.lax.top_k(x, 16), ((2**22,),)),
    "svd": (svd, ((700, 700),)),
    "svd of many rows": (svd, ((2000, 400),)),
    "eigh": (lambda x: jnp.linalg.eigh(x + x.T), ((1000, 1000),)),
    "eig": (jnp.linalg.eig, ((500, 500),)),
    "qr": (jnp.linalg.qr, ((1500, 1500),)),
    "lu": (jax.lax.linalg.lu, ((1500, 1500),)),
    "fft": (jnp.fft.rfft, ((2**22,),)),
    "cumsum": (jnp.cumsum, ((2**22,),)),
    "scatter": (lambda x: x.at[jnp.arange(2**20)].add(1.0), ((2**22,),)),
    "max pooling": (
        lambda x: jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
        ),
        ((32, 64, 64, 64),),
    ),
}


def measure(name: str) -> dict[str, Any]:
    fun, shapes = CASES[name]
    generator = np.random.default_rng(0)
    operands = [jnp.asarray(generator.random(x, np.float32)) for x in shapes]
    compiled = jax.jit(fun).lower(*operands).compile()
    analysis = compiled.memory_analysis()
    known = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    jax.block_until_ready(compiled(*operands))
    rises = []
    for _ in range(CALLS):
        memory.reset_high_water()
        before = memory.resident_bytes()
        jax.block_until_ready(compiled(*operands))
        rises.append(memory.high_water_bytes() - before - known)
    graph = poet_jax.trace(fun, *operands)
    return {
        "operation": name,
        "operands": " ".join("x".join(map(str, x)) for x in shapes),
        "xla_bytes": known,
        "beyond_bytes": max(*rises, 0),
        "rule_bytes": max(map(node_scratch, graph.nodes)),
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if ONLY.value:
        csv.DictWriter(sys.stdout, COLUMNS).writerow(measure(ONLY.value))
        return
    path = pathlib.Path(OUTPUT.value) / "scratch.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerow(COLUMNS)
        for name in CASES:
            command = [
                sys.executable,
                "-m",
                "experiments.benchmarks.scratch",
                f"--only={name}",
            ]
            row = subprocess.run(command, capture_output=True, text=True, check=True)
            logging.info(row.stdout.strip())
            file.write(row.stdout.replace("\r\n", "\n"))
            file.flush()


if __name__ == "__main__":
    app.run(main)
