"""Does the model of this machine say how long a step takes? Planned beside measured.

    python -m experiments.benchmarks.prediction

adds up the modelled seconds of the nodes of training steps with AdamW, everything kept,
and times `jax.jit` of the same step: as it was written, and in the forms that
`poet_jax.passes.PASSES` give it. Then it times the distinct nodes of the latter one by
one (`price(..., measure=True)`), and compares what the model says of each: rank
correlation and the quartiles of planned over measured. The machine is calibrated anew
before each model, as other work on it would count otherwise. It writes
experiments/results/prediction/prediction.csv, in some four minutes on two cores.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from absl import app, flags, logging

import poet_jax
from experiments.program import program, result_flags, write_rows
from experiments.steps import (
    Case,
    flax_case,
    gru_case,
    new_state,
    training_step,
    unet_case,
)
from poet_jax import cli
from poet_jax.core.graph import Graph
from poet_jax.devices.calibrate import calibrated

CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: flax_case("mlp:width=512", 128, "digits"),
    "cnn": lambda: flax_case("cnn:dropout=0", 32, "photos"),
    "gru": gru_case,
    "gpt4": lambda: flax_case("gpt:layers=4,width=128,heads=4", 8, "text"),
    "unet": lambda: unet_case(16),
    "resnet18_32": lambda: flax_case("resnet18", 32, "photos"),
    "resnet18": lambda: flax_case("resnet18", 64, "photos"),
    "bert6": lambda: flax_case("bert6", 8, "text"),
}
MODELS = flags.DEFINE_list("models", list(CASES), "Which of the cases.")
TURNS = 5  # timed steps of each kind
result_flags("prediction")
SHORT_SECONDS = 0.1  # of a step that is timed ten times as often


def device() -> poet_jax.DeviceProfile:
    launch_seconds, rates = calibrated()
    return dataclasses.replace(
        poet_jax.host(), dispatch_seconds=launch_seconds, rates=rates
    )


def graphs(step: Callable, state, batch) -> dict[str, Graph]:
    """The step as it was written and in the forms that the passes give it."""
    traced = poet_jax.trace(jax.jit(step, donate_argnums=0), state, batch)
    lowered = functools.reduce(
        lambda g, change: change(g), poet_jax.passes.PASSES, traced
    )
    return {
        "written": poet_jax.passes.reorder(poet_jax.passes.group(traced)),
        "lowered": lowered,
    }


def evaluated(graph: Graph) -> Callable:
    """The function of pytrees that computes a graph."""

    def fun(state, batch):
        leaves = jax.tree.leaves(((state, batch), {}))
        return jax.tree.unflatten(graph.out_tree, graph(*leaves))

    return fun


def measure(name: str) -> dict[str, str]:
    case, optimizer = CASES[name](), optax.adamw(1e-3)
    step = training_step(case.loss, optimizer)
    params, rest, batch = case.init()
    state = new_state(optimizer, params, rest)
    of = graphs(step, state, batch)
    before = device()
    runs = {"written": step, "lowered": evaluated(of["lowered"])}
    took = timed(runs, lambda: new_state(optimizer, params, rest), batch)
    after = device()
    row = {"model": name, "nodes": str(len(of["lowered"].nodes))}
    for kind, graph in of.items():
        costs = [poet_jax.price(graph, x).seconds.sum() for x in (before, after)]
        planned = statistics.mean(costs)
        row[f"{kind}_planned_seconds"] = f"{planned:.5f}"
        row[f"{kind}_jit_seconds"] = f"{took[kind]:.5f}"
        row[f"{kind}_ratio"] = f"{planned / took[kind]:.3f}"
    return row | nodes_beside(of["lowered"], after)


def timed(runs: dict[str, Callable], fresh: Callable, batch) -> dict[str, float]:
    """Median seconds of a step of each, in turns, on donated state."""
    compiled = {
        kind: jax.jit(run, donate_argnums=0).lower(fresh(), batch).compile()
        for kind, run in runs.items()
    }
    states = {kind: fresh() for kind in runs}
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    turns = 0
    while turns <= TURNS or (
        sum(map(sum, seconds.values())) < 2 * TURNS * SHORT_SECONDS
    ):
        for kind, run in compiled.items():
            start = time.perf_counter()
            states[kind], _ = jax.block_until_ready(run(states[kind], batch))
            if turns:  # the first one warms up
                seconds[kind].append(time.perf_counter() - start)
        turns += 1
    return {kind: statistics.median(x) for kind, x in seconds.items()}


def nodes_beside(graph: Graph, host: poet_jax.DeviceProfile) -> dict[str, str]:
    """How modelled nodes compare with measured ones, and workspaces with XLA's."""
    model = poet_jax.price(graph, host)
    real = poet_jax.price(graph, host, measure=True)
    seconds = np.stack([model.seconds, real.seconds])
    large = real.seconds > 1e-3 * real.seconds.sum()
    ratios = seconds[0] / np.maximum(seconds[1], 1e-9)
    quartiles = np.percentile(ratios[large], [25, 50, 75])
    most = [x.workspace_bytes for x in (model, real)]
    return {
        "nodes_planned_seconds": f"{model.seconds.sum():.5f}",
        "nodes_seconds": f"{real.seconds.sum():.5f}",
        "rank_correlation": f"{np.corrcoef(ranks(seconds[:, large]))[0, 1]:.3f}",
        "quartiles": " ".join(f"{x:.2f}" for x in quartiles),
        "workspace_mib": f"{most[0].max() / 2**20:.2f}",
        "xla_workspace_mib": f"{most[1].max() / 2**20:.2f}",
        "under_mib": f"{np.maximum(most[1] - most[0], 0).max() / 2**20:.2f}",
        "over_mib": f"{np.maximum(most[0] - most[1], 0).max() / 2**20:.2f}",
    }


def ranks(rows: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(rows, axis=1), axis=1)


@program
def main() -> None:
    path = cli.output_folder() / "prediction.csv"
    rows = []
    for name in MODELS.value:
        rows.append(measure(name))
        logging.info("%s", rows[-1])
        write_rows(path, rows[0], rows)


if __name__ == "__main__":
    app.run(main)
