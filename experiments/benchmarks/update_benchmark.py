"""Sparse updates: what training a part of BERT's parameters saves.

    python -m experiments.benchmarks.update_benchmark

BERT with 6 layers on 8 windows of 128 bytes, AdamW, in flax linen: everything is
trained, then only biases, the last two blocks, the first quarter of the input channels
of every kernel in a block, and adapters of rank 8. Each runs within a budget of its own
keep-all peak, which is `jax.jit`; and all but the first within --share per cent of the
full step's keep-all peak. Bytes of a compiled step are XLA's own count. Steps are timed
in turns, after one that compiles, and ratios are medians over turns of the seconds over
the full step's. It writes experiments/results/update_benchmark/<model>.csv, a row for
each, in about twenty minutes on two cores; --model=bert2 --batch_size=2 takes one.
"""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags, logging

import poet_jax
from experiments.models import load_for_model, loss_fn, make_model
from experiments.program import program, result_flags, write_rows
from experiments.steps import in_ram
from poet_jax import cli
from poet_jax.core.costs import node_flops
from poet_jax.update import Update, bias_only, full, last_blocks, lora

MODEL = flags.DEFINE_string("model", "bert6", "A text model of experiments.models.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Windows in a batch.")
SHARE = flags.DEFINE_float("share", 42.0, "Of the full step's keep-all, in per cent.")
TURNS = 5  # timed steps of each
TIME_LIMIT = flags.DEFINE_float("time_limit", 20.0, "Seconds for each plan.")
result_flags("update_benchmark")

SCHEMES = {
    "full": full(),
    "bias_only": bias_only(),
    "last_blocks(2)": last_blocks(2),
    "quarter": Update({"Linen*/**/kernel": 0.25}),
    "lora(8)": lora(8),
}
COLUMNS = (
    "scheme", "trained", "state_bytes", "nodes", "flops", "saved_bytes",
    "keep_all_bytes", "keep_all_compiled_bytes", "keep_all_ratio", "seconds", "ratio",
    "budget_bytes", "budget_compiled_bytes", "budget_seconds", "budget_ratio",
)  # fmt: skip


class Contestant:
    """A step within a budget, its state, and the seconds of each turn."""

    def __init__(self, module, update: Update, budget: Any, batch):
        self.batch = batch
        self.step: Any = poet_jax.train_step(
            module,
            budget,
            loss_fn=loss_fn,
            update=update,
            planner=poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value),
            device=poet_jax.devices.RASPBERRY_PI_4,
        )
        self.state = self.step.init(jax.random.key(0), batch)
        self.seconds: list[float] = []

    def run(self) -> None:
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - start)


def saved_bytes(graph: poet_jax.Graph) -> int:
    """What the forward pass writes and the backward pass reads."""
    forward = {v for node in graph.nodes if not node.backward for v in node.writes}
    read = {v for node in graph.nodes if node.backward for v in node.reads}
    return sum(graph.values[v].nbytes for v in forward & read)


def describe(name: str, module, batch) -> dict[str, Any]:
    """The row of a scheme as far as its schedule says it."""
    kept = Contestant(module, SCHEMES[name], "100%", batch)
    state = kept.state
    traced = poet_jax.trace(jax.jit(kept.step.update, donate_argnums=0), state, batch)
    narrowed = poet_jax.passes.reassociate(poet_jax.passes.push_slices(traced))
    print(name, poet_jax.viz.table.sizes(traced=traced, narrowed=narrowed), sep="\n")
    trainable = jax.tree.leaves(state.part.split(state.params))
    schedule = kept.step.plan(state, batch)
    return {
        "scheme": name,
        "trained": sum(x.size for x in trainable),
        "state_bytes": in_ram(state),
        "nodes": len(narrowed.nodes),
        "flops": f"{sum(map(node_flops, narrowed.nodes)):.4g}",
        "saved_bytes": saved_bytes(narrowed),
        "keep_all_bytes": schedule.baseline.peak_bytes,
        "keep_all_compiled_bytes": schedule.compiled_bytes,
    }


@program
def main() -> None:
    data = load_for_model(MODEL.value, "text")
    module = make_model(MODEL.value, "linen", dataset_spec=data.spec, seed=0)
    batch = jax.tree.map(jnp.asarray, next(iter(data.batches(BATCH_SIZE.value, 0, 1))))
    rows = {name: describe(name, module, batch) for name in SCHEMES}
    whole_bytes = rows["full"]["keep_all_bytes"]
    budget_bytes = int(whole_bytes * SHARE.value / 100)
    contestants: dict[tuple[str, str], Contestant] = {}
    for name, update in SCHEMES.items():
        budgets = {"": "100%", "budget_": budget_bytes}
        for prefix, budget in budgets.items():
            if (name, prefix) == ("full", "budget_"):
                continue
            contestant = Contestant(module, update, budget, batch)
            try:
                contestant.run()  # compiles
            except poet_jax.BudgetTooSmall as error:
                logging.warning("%s: %s", name, error)
                continue
            contestants[name, prefix] = contestant
            logging.info("%s within %s: %s", name, budget, contestant.step.last_run)
    for contestant in contestants.values():
        contestant.seconds.clear()
    turn = list(contestants.values())
    for _ in range(TURNS):
        for contestant in turn:
            contestant.run()
        turn.append(turn.pop(0))
    base = contestants["full", ""].seconds
    for (name, prefix), contestant in contestants.items():
        ratios = [a / b for a, b in zip(contestant.seconds, base, strict=True)]
        row = rows[name]
        row["keep_all_ratio"] = f"{row['keep_all_bytes'] / whole_bytes:.4f}"
        row[f"{prefix}seconds"] = f"{statistics.median(contestant.seconds):.4f}"
        row[f"{prefix}ratio"] = f"{statistics.median(ratios):.4f}"
        if prefix:
            row["budget_bytes"] = budget_bytes
            row["budget_compiled_bytes"] = contestant.step.last_run.peak_bytes
    path = cli.output_folder() / f"{MODEL.value.partition(':')[0]}.csv"
    write_rows(path, COLUMNS, rows.values())
    print(path.read_text())


if __name__ == "__main__":
    app.run(main)
