"""Does a plan say how long a step takes? Predicted beside measured seconds.

    python -m experiments.prediction

prices every node of a training step on this machine, one by one, and adds them up, for
ResNet-18 (batch of 64) and a BERT of two layers; then runs the step, everything kept,
node by node as it was priced, and as one executable under `jax.jit`, in turns. It
writes a row for each model to experiments/results/prediction/prediction.csv, in about
three minutes on two cores. Expect a predicted step within a tenth of what is measured;
on a machine with other work, of which pricing sees as little as a plan, it is less.
With --nodes it prints the nodes whose times differ most.
"""

import csv
import pathlib
import statistics
import time

import jax
import numpy as np
import optax
from absl import app, flags, logging

import poet_jax
from experiments.steps import flax_case, training_step

MODELS = {"resnet18": ("photos", 64), "bert:layers=2": ("text", 8)}
TURNS = flags.DEFINE_integer("turns", 5, "Timed steps of each kind.", lower_bound=1)
NODES = flags.DEFINE_integer("nodes", 0, "How many nodes to print.", lower_bound=0)
OUTPUT = flags.DEFINE_string(
    "output", "experiments/results/prediction", "Folder for the CSV file."
)
COLUMNS = (
    "model", "batch_size", "nodes", "predicted_seconds", "measured_seconds",
    "predicted_over_measured", "jit_seconds", "turns",
)  # fmt: skip


def measure(model: str, dataset: str, batch_size: int) -> dict:
    case = flax_case(model, batch_size, dataset)
    optimizer = optax.adamw(1e-3)
    step = training_step(case.loss, optimizer)

    def fresh():
        params, rest, batch = case.init()
        return (params, rest, optimizer.init(params)), batch

    (state, batch), (other, _) = fresh(), fresh()
    ours = poet_jax.schedule(
        step,
        2**40,
        planner=poet_jax.keep_all,
        executor=poet_jax.HostExecutor(fuse=False),
        donate_argnums=0,
    )
    theirs = jax.jit(step, donate_argnums=0)
    schedule = ours.plan(state, batch)
    states = [state, other]
    seconds: list[list[float]] = [[], []]
    runs = []
    for turn in range(TURNS.value + 1):
        for kind, run in enumerate((ours, theirs)):
            start = time.perf_counter()
            states[kind], _ = jax.block_until_ready(run(states[kind], batch))
            if turn:  # the first compiles
                seconds[kind].append(time.perf_counter() - start)
        runs.append(ours.last_run)
    if NODES.value:
        print_differences(schedule, runs[1:])
    measured, jit = map(statistics.median, seconds)
    predicted = schedule.usage.seconds
    return {
        "model": model,
        "batch_size": batch_size,
        "nodes": len(schedule.graph.nodes),
        "predicted_seconds": f"{predicted:.4f}",
        "measured_seconds": f"{measured:.4f}",
        "predicted_over_measured": f"{predicted / measured:.4f}",
        "jit_seconds": f"{jit:.4f}",
        "turns": TURNS.value,
    }


def print_differences(schedule: poet_jax.Schedule, runs: list) -> None:
    """The instructions whose median time is furthest from the predicted one."""
    took = np.median([np.subtract(x.stop_seconds, x.start_seconds) for x in runs], 0)
    rows = []
    for instruction, seconds in zip(schedule.program.instructions, took, strict=True):
        if isinstance(instruction, poet_jax.program.Compute):
            node = schedule.graph.nodes[instruction.node]
            predicted = float(schedule.costs.seconds[instruction.node])
            rows.append((seconds - predicted, seconds, predicted, node.name))
    rows.sort(reverse=True)
    print(f"computes {sum(row[1] for row in rows):.3f} s of {took.sum():.3f} s")
    for difference, seconds, predicted, name in rows[: NODES.value]:
        print(f"{difference:+.4f} = {seconds:.4f} - {predicted:.4f} s  {name}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    path = pathlib.Path(OUTPUT.value) / "prediction.csv"
    rows = []
    for model, (dataset, batch_size) in MODELS.items():
        rows.append(measure(model, dataset, batch_size))
        logging.info("%s", rows[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    app.run(main)
