"""Adapt a MobileNetV2 to new classes by sparse backpropagation within a budget.

    python -m experiments.sparse.adapt
    python -m experiments.sparse.adapt --budget=25% --update=full --update=pockengine
    python -m experiments.sparse.adapt --plot

A small MobileNetV2 learns the digits 0 to 4 of mnist, at half of its resolution, and is
kept in outputs/adapt. Then its classifier is replaced, and it learns the digits 5 to 9
from --examples images of each: once for each --update, --budget and --seed, which sets
the classifier, the images and their order. Each gets a row in
experiments/results/adapt/schemes.csv; rows that are there already are not measured
again. The first command takes about 20 minutes on two cores, for 13 schemes. Expect an
accuracy around 0.8 where chance is 0.2. The last one draws schemes.png.

An update is one of SCHEMES, or "searched", which is what
`experiments.sparse.adapt_search` found, or JSON with a fraction for each pattern of
paths, such as '{"blocks/[5-6]/expand/**": 1, "head/**": 1}'. A budget is a size, a
percentage of what full training needs when everything is kept, or "all", which is no
limit.

Full training normalises by the statistics of the batch and updates those that are kept,
as usual (batch_stats="update", train mode). Every other scheme, from JSON too,
normalises by those that the old classes left, and keeps them (batch_stats="keep", eval
mode): what is frozen then needs nothing for the backward pass. "full_kept" is full
training in that mode.

What is measured and what is modelled is said in `experiments.sparse.schemes`. Costs are
measured once for all seeds of a command, and ratios are over full training in the usual
mode.
"""

import collections
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging
from flax import nnx

import poet_jax
from experiments.models import loss_fn
from experiments.program import program, read_rows
from experiments.sparse import schemes
from experiments.sparse.halves import Halves, learned, load_halves, with_new_head
from experiments.steps import plain_step
from poet_jax import cli
from poet_jax.update import Update, bias_only, full, last_blocks

HEAD = {"head/**": 1.0}  # the classifier is new, so every scheme trains it
KEEP = {"batch_stats": "keep"}
EXPAND = "expand/linear/kernel"
LATE, EARLY = "blocks/[4-6]", "blocks/[1-3]"
# Each with its learning rate: the best of 0.001, 0.003, 0.01, 0.03 and, where that was
# 0.03, of 0.1, for --seed=100, which is not measured otherwise.
SCHEMES: dict[str, tuple[Update, float]] = {
    "full": (full(), 1e-2),
    "full_kept": (Update(full().fractions, **KEEP), 1e-3),
    "head": (Update(HEAD, **KEEP), 1e-1),
    "bias_only": (Update({**bias_only().fractions, **HEAD}, **KEEP), 3e-2),
    "last_blocks_1": (dataclasses.replace(last_blocks(1), **KEEP), 3e-3),
    "last_blocks_2": (dataclasses.replace(last_blocks(2), **KEEP), 3e-3),
    "lora_4": (Update(HEAD, ranks={"**/linear/kernel": 4}, **KEEP), 1e-2),
    "first_pointwise": (Update({f"blocks/*/{EXPAND}": 1, **HEAD}, **KEEP), 1e-2),
    "depthwise": (Update({"blocks/*/depthwise/conv/*": 1, **HEAD}, **KEEP), 1e-2),
    "second_pointwise": (
        Update({"blocks/*/project/linear/*": 1, **HEAD}, **KEEP),
        3e-3,
    ),
    "early": (Update({f"{EARLY}/**": 1, **HEAD}, **KEEP), 3e-3),
    "late": (Update({f"{LATE}/**": 1, **HEAD}, **KEEP), 3e-3),
    # After PockEngine's choice for MobileNetV2: biases and the first pointwise
    # convolutions of the later blocks.
    "pockengine": (
        Update({f"{LATE}/**/bias": 1, f"{LATE}/{EXPAND}": 1, **HEAD}, **KEEP),
        1e-2,
    ),
}

SEARCHED = pathlib.Path(__file__).parents[1] / "results" / "adapt" / "searched.json"
schemes.define_flags(SCHEMES, "adapt", pairs=9, least_steps=1)
SEEDS = flags.DEFINE_multi_integer("seed", [0, 1, 2], "Of classifier and images.")
EXAMPLES = flags.DEFINE_integer("examples", 20, "Images of a new class.", lower_bound=1)
MODEL = flags.DEFINE_string(
    "model", "mobilenetv2:width=0.5,depth=0.25", "An image model of experiments.models."
)
DATASET = flags.DEFINE_string("dataset", "mnist", "Images of experiments.data.")
PIXELS = flags.DEFINE_integer("pixels", 2, "Side of a square that is one pixel.", 1)
OLD_STEPS = flags.DEFINE_integer("old_steps", 300, "Steps on old classes.", 0)
COMPILED = "outputs/jax"  # keeps what was compiled
LEARNED = pathlib.Path("outputs/adapt")  # keeps what learned the old classes

KEY = (
    "update", "budget", "steps", "examples", "learning_rate", "batch_size", "model",
    "dataset", "pixels", "old_steps", "seed",
)  # fmt: skip
COLUMNS = (*KEY, "batch_stats", *schemes.COLUMNS)


def beginning(key: dict[str, Any], halves: Halves, seed: int, keep: bool) -> nnx.Module:
    """The model that knows the old classes, with a new classifier.

    In eval mode if `keep`, so that it normalises by the statistics it has.
    """
    model = learned(key["model"], halves.old, key["old_steps"], LEARNED)
    model = with_new_head(model, halves.new.num_classes, seed)
    model.eval() if keep else model.train()
    return model


def copied(module: nnx.Module) -> nnx.State:
    return jax.tree.map(jnp.copy, nnx.state(module))


def measure(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of one scheme and budget, one for each of the seeds that are asked."""
    schemes.keep_compiled(COMPILED)
    key = dict(asked)
    seeds, (update, _) = key.pop("seed"), parse_scheme(key["update"])
    halves = load_halves(key["dataset"], key["pixels"])
    rate = optax.cosine_decay_schedule(key["learning_rate"], key["steps"])
    optimizer = optax.adamw(rate)
    example = next(halves.new.batches(key["batch_size"], 0, 1))
    keep = update.batch_stats == "keep"
    usual = beginning(key, halves, 0, keep=False)
    full_bytes = schemes.full_keep_all_bytes(
        usual, example, optimizer, flags.FLAGS.plan_cache
    )
    step = poet_jax.train_step(
        beginning(key, halves, 0, keep),
        schemes.budget_bytes(key["budget"], full_bytes),
        loss_fn=loss_fn,
        optimizer=optimizer,
        update=update,
        planner=poet_jax.MilpPlanner(time_limit_seconds=flags.FLAGS.time_limit),
        plan_cache=flags.FLAGS.plan_cache,
    )
    row = key | {"batch_stats": update.batch_stats, "full_keep_all_bytes": full_bytes}
    row |= schemes.planned(step, example)
    if "planned_bytes" not in row:
        return [row | {"seed": seed} for seed in seeds]
    untrained = copied(step.optimizer)
    rows = []
    for seed in seeds:
        nnx.update(step.model, nnx.state(beginning(key, halves, seed, keep)))
        nnx.update(step.optimizer, jax.tree.map(jnp.copy, untrained))
        train, held_out = halves.few(key["examples"], seed)
        losses = [
            float(step(batch))
            for batch in train.batches(key["batch_size"], seed, key["steps"])
        ]
        model = step.merged()
        model.eval()
        result = schemes.outcome(losses, model, held_out)
        rows.append({"seed": seed} | result)
        logging.info("%s", rows[-1])
    row |= schemes.measured(
        step, example, plain_step(usual, optimizer), flags.FLAGS.pairs
    )
    return [row | result for result in rows]


def by_seeds(keys: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keys that differ by their seeds alone as one, with a list of these."""
    seeds = collections.defaultdict(list)
    for key in keys:
        seeds[tuple(key.items())[:-1]].append(key["seed"])
    return [{**dict(key), "seed": found} for key, found in seeds.items()]


def parse_scheme(text: str) -> tuple[Update, float]:
    """The update that a flag names, and its learning rate; ValueError for no scheme."""
    if text == "searched":
        return Update(json.loads(SEARCHED.read_text()), **KEEP), 3e-3
    return schemes.named_scheme(text, SCHEMES, **KEEP)


def plot(rows: list[dict[str, str]], path: pathlib.Path) -> None:
    """Accuracy, memory, time and energy of each named scheme: without a limit, and in
    the least budget that it was tried in."""
    groups = collections.defaultdict(list)
    for row in rows:
        if row["update"] in (*SCHEMES, "searched") and row["accuracy"] and row["ratio"]:
            groups[row["update"], int(row["budget_bytes"])].append(row)
    marks = collections.defaultdict(list)
    for (name, limit), group in groups.items():
        free = limit == schemes.WITHOUT_LIMIT
        if not free and limit > min(x for other, x in groups if other == name):
            continue
        accuracies = [100 * float(row["accuracy"]) for row in group]
        marks[name].append(
            schemes.Mark(
                not free,
                statistics.mean(accuracies),
                standard_error(accuracies),
                statistics.mean(int(row["peak_bytes"]) for row in group),
                statistics.mean(float(row["ratio"]) for row in group),
                schemes.mean_joules(group),
            )
        )
    schemes.plot_schemes(
        marks,
        groups["full", schemes.WITHOUT_LIMIT],
        path,
        filled="in the least budget tried",
        hollow="without limit",
    )


def standard_error(values: list[float]) -> float:
    """Of the mean of `values`; none of a single one."""
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) / len(values) ** 0.5


@program
def main() -> None:
    path = cli.output_folder() / "schemes.csv"
    if not flags.FLAGS.plot:
        keys = schemes.todo(KEY, read_rows(path), parse_scheme)
        schemes.run(path, COLUMNS, by_seeds(keys), measure)
    plot(read_rows(path), path.with_suffix(".png"))


if __name__ == "__main__":
    app.run(main)
