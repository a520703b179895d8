"""One small language model, fine-tuned by each scheme in a tenth of the memory.

    python -m experiments.language_model.schemes
    python -m experiments.language_model.schemes --plot

The first command trains a GPT-2 of 4 million parameters from scratch on the paragraphs
of Python's documentation, and fine-tunes it on source code of Python's library, 64 x
128 tokens a step, by each of `SCHEMES`. `searched` trains the layers that
`poet_jax.update.search` chooses by what each gains alone. The budget is a tenth of what
full training needs when everything is kept, or the least in which a scheme can be
planned. Each step takes its rows one by one (`microbatches`), and state lies in a file.
Losses are of rows that are not trained on.

Written to experiments/results/language_schemes: a row for each scheme, and a figure,
which the second command draws alone. Joules and seconds of a device are modelled: of
the plan for it within the same budget. Takes about 25 minutes on two cores, and goes on
where it stopped.
"""

import functools
import importlib.util
import itertools
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

import poet_jax
from experiments.benchmarks import memory
from experiments.language_model import checkpoint, text, train
from experiments.language_model.gpt2 import GPT2Config
from experiments.language_model.models import Model, loss_fn, make, placing
from experiments.program import appending, program, read_rows, result_flags
from experiments.sparse.schemes import trained_parameters
from experiments.steps import in_ram
from poet_jax.core.units import format_bytes
from poet_jax.update import Update, bias_only, contributions, last_blocks, lora, search
from poet_jax.viz.figures import drawn

VOCABULARY, LENGTH, BATCH, SEED = 2048, 128, 64, 0
SMALL_BATCH = 16  # from scratch, and for the gain of a layer
HELD_OUT = 64  # rows
TENTH = 10
# What is fine-tuned on, of Python's library.
MODULES = (
    "argparse", "ast", "collections", "dataclasses", "datetime", "enum", "functools",
    "inspect", "json.decoder", "logging", "pathlib", "random", "statistics", "textwrap",
    "threading", "typing", "unittest.mock", "uuid", "zipfile",
)  # fmt: skip
# Updates, bits of frozen kernels, and learning rates.
SCHEMES: dict[str, tuple[Update | None, str | None, float]] = {
    "full": (None, None, 5e-4),
    "last_block": (last_blocks(1), None, 1e-3),
    "bias": (bias_only(), None, 5e-3),
    "lora": (lora(8, train.ADAPTED), None, 3e-3),
    "lora_int8": (lora(8, train.ADAPTED), "int8", 3e-3),
    "lora_int4": (lora(8, train.ADAPTED), "int4", 3e-3),
    "searched": (None, None, 1e-3),
}
DEVICES = "RASPBERRY_PI_5", "JETSON_ORIN"
ONLY = flags.DEFINE_list("schemes", list(SCHEMES), "Schemes that are trained.")
LAYERS = flags.DEFINE_integer("layers", 4, "Layers of the model.", 1)
WIDTH = flags.DEFINE_integer("width", 256, "Width of the model.", 1)
BASE_STEPS = flags.DEFINE_integer("base_steps", 300, "Steps from scratch.", 1)
STEPS = flags.DEFINE_integer("steps", 25, "Steps of each scheme.", 1)
SCORED_STEPS = flags.DEFINE_integer("scored_steps", 10, "Steps for a gain.", 1)
TIME_LIMIT = flags.DEFINE_float("time_limit", 10.0, "Seconds for the planner.")
FOLDER = flags.DEFINE_string(
    "folder", "outputs/language_schemes", "Folder of the model and of states."
)
result_flags("language_schemes", plots=True)

COLUMNS = (
    "scheme", "trained_parameters", "keep_all_bytes", "budget_bytes", "compiled_bytes",
    "rise_bytes", "seconds", "paged_bytes", "loss_before", "loss_after",
    *(f"{device}_{what}" for device in DEVICES for what in ("seconds", "joules")),
)  # fmt: skip


def config() -> GPT2Config:
    return GPT2Config(VOCABULARY, WIDTH.value, LAYERS.value, heads=4, positions=LENGTH)


def parts() -> dict[str, float]:
    """What the search chooses from: attention and MLP of each layer."""
    pairs = itertools.product(range(LAYERS.value), ("attn", "mlp"))
    return {f"h/{number}/{part}/**": 1.0 for number, part in pairs}


def code() -> str:
    """Source code of `MODULES`, of the Python that runs."""
    found = map(importlib.util.find_spec, MODULES)
    paths = [pathlib.Path(spec.origin) for spec in found if spec and spec.origin]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def rows_of(words: str, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on, and rows that are held out, spread over the text."""
    rows = text.pack(tokenizer.encode(words).ids, LENGTH)
    is_held = np.zeros(len(rows), bool)
    is_held[np.linspace(0, len(rows) - 1, HELD_OUT).astype(int)] = True
    return rows[~is_held], rows[is_held]


def step_of(
    model: Model, rate: float, steps: int, budget: Any, update: Any = None, **options
) -> Any:
    """A step of AdamW whose rate falls over `steps`."""
    return poet_jax.train_step(
        model,
        budget,
        loss_fn=loss_fn,
        optimizer=train.optimizer_of("adamw", rate, steps, options.pop("store", None)),
        update=update,
        planner=poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value),
        plan_cache=pathlib.Path(FOLDER.value) / "plans",
        **options,
    )


def load_tokenizer(folder: pathlib.Path) -> Any:
    """The tokenizer in `folder`, which is trained on the documentation at first."""
    path = folder / "tokenizer.json"
    if not path.exists():
        made = text.train_tokenizer(text.read_text(), VOCABULARY)
        made.save(str(path))
    return text.load_tokenizer(path)


def trained_base(folder: pathlib.Path, tokenizer: Any) -> int:
    """Train the model in `folder` from scratch, unless that is done.

    Returns what a step of it needs when everything is kept, in bytes.
    """
    step = step_of(make(config()), 2e-3, BASE_STEPS.value, "100%")
    rows, _ = rows_of(text.read_text(), tokenizer)
    if not (folder / "config.json").exists():
        settings = {"steps": BASE_STEPS.value, "batch_size": SMALL_BATCH, "seed": SEED}
        train.fine_tune(step, rows, folder.parent, settings, save_every=100)
        checkpoint.save(step.merged(), folder)
    return step.plan(text.batch(rows, 0, BATCH, SEED)).baseline.peak_bytes


@nnx.jit
def _loss(model: Model, rows: jax.Array) -> jax.Array:
    return loss_fn(model, rows)


def held_out_loss(model: Model, rows: np.ndarray) -> float:
    """Mean loss of rows, a batch at a time."""
    return statistics.fmean(
        float(_loss(model, jax.device_put(part)))
        for part in np.array_split(rows, len(rows) // SMALL_BATCH)
    )


def gains(
    base: pathlib.Path, rows: np.ndarray, held_out: np.ndarray
) -> dict[str, float]:
    """By how much training each of `parts()` alone lowers the loss."""
    rate = SCHEMES["searched"][2]
    graphdef, params = nnx.split(checkpoint.load(base))
    optimizer = train.optimizer_of("adamw", rate, SCORED_STEPS.value)

    @jax.jit
    def step(params, state, mask, batch):
        def loss(params):
            return loss_fn(nnx.merge(graphdef, params), batch)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        updates = jax.tree.map(jnp.multiply, updates, mask)
        return jax.tree.map(jnp.add, params, updates), state

    def score(update: Update | None) -> float:
        trained, state = params, optimizer.init(params)
        chosen = {} if update is None else update.mask(nnx.as_pure(params))
        mask = jax.tree.unflatten(
            jax.tree.structure(params),
            [jnp.float32(x) for x in jax.tree.leaves(chosen)]
            or [jnp.float32(0) for _ in jax.tree.leaves(params)],
        )
        for batch in text.batches(rows, SMALL_BATCH, SEED + 1, 0, SCORED_STEPS.value):
            trained, state = step(trained, state, mask, batch)
        return -held_out_loss(nnx.merge(graphdef, trained), held_out)

    return contributions(score, parts(), path=base.parent / "gains.jsonl")


def budgeted(
    name: str,
    base: pathlib.Path,
    update: Any,
    budget: int,
    batch: np.ndarray,
    store: poet_jax.FileStore | None,
) -> Any:
    """The scheme's step within the budget, or the least in which it can be planned;
    its state is in a store, if there is one."""
    _, bits, rate = SCHEMES[name]
    options = {
        "update": update,
        "store": store,
        "executor": poet_jax.HostExecutor(store),
        "microbatches": BATCH,
    }

    def at(budget: int) -> Any:
        model = checkpoint.load(base, place=placing(bits, store))
        step = step_of(model, rate, STEPS.value, budget, **options)
        step.plan(batch)
        return step

    try:
        return at(budget)
    except poet_jax.BudgetTooSmall as error:
        return at(error.smallest_bytes)


def modelled(made: poet_jax.Schedule) -> dict[str, float]:
    """Seconds and joules of a step on each device, of a plan for it."""
    planner = poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value)
    found = {}
    for name in DEVICES:
        costs = poet_jax.price(made.graph, getattr(poet_jax.devices, name))
        plan = planner(made.graph, costs, made.budget)
        usage = poet_jax.simulate(poet_jax.lower(made.graph, plan), costs)
        found |= {f"{name}_seconds": usage.seconds, f"{name}_joules": usage.joules}
    return {key: float(f"{value:.5g}") for key, value in found.items()}


def measured(
    name: str, base: pathlib.Path, most_bytes: int, data: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    """The row of a scheme."""
    rows, held_out = data
    batch = text.batch(rows, 0, BATCH, SEED)
    update = SCHEMES[name][0]
    if name == "searched":
        tenth = most_bytes // TENTH  # of a step whose state is in RAM, for a search
        step = budgeted(name, base, Update(parts()), tenth, batch, None)
        found = search(step, batch, gains=gains(base, rows, held_out))
        print(found)
        update = found.update
    before = held_out_loss(checkpoint.load(base), held_out)
    store = poet_jax.FileStore()
    step = budgeted(name, base, update, most_bytes // TENTH, batch, store)
    made = step.plan(batch)
    print(f"{name}: {made}")
    state = functools.partial(nnx.state, (step.model, step.optimizer))
    rise, losses, seconds = memory.Rise(), [], []
    for number, batch in enumerate(text.batches(rows, BATCH, SEED, 0, STEPS.value)):
        if number == 1:  # it has compiled
            rise = memory.Rise()
        with rise.of(in_ram(state())):
            losses.append(float(step(jax.device_put(batch))))
        seconds.append(step.last_run.seconds)
    return {
        "scheme": name,
        "trained_parameters": trained_parameters(step),
        "keep_all_bytes": made.baseline.peak_bytes,
        "budget_bytes": made.budget.memory_bytes,
        "compiled_bytes": made.compiled_bytes,
        "rise_bytes": rise.most_bytes,
        "seconds": round(statistics.median(seconds), 3),
        "paged_bytes": step.last_run.bytes_paged_in + step.last_run.bytes_paged_out,
        "loss_before": round(before, 4),
        "loss_after": round(held_out_loss(step.merged(), held_out), 4),
        **modelled(made),
    }


def draw(path: pathlib.Path, rows: list[dict[str, str]]) -> None:
    """The loss of each scheme over its modelled energy, and over its seconds."""
    axes_of = {
        f"{DEVICES[0]}_joules": "modelled joules a step\non a Raspberry Pi 5",
        "seconds": "measured seconds a step",
    }
    with drawn(path, 4.2) as figure:
        axes = figure.subplots(1, len(axes_of), sharey=True)
        for ax, (column, label) in zip(axes, axes_of.items(), strict=True):
            for row, marker in zip(rows, "os^Dv<P", strict=False):
                ax.plot(
                    float(row[column]),
                    float(row["loss_after"]),
                    marker,
                    fillstyle="none",
                    label=row["scheme"].replace("_", " "),
                )
            ax.set_xlabel(label)
            ax.set_xlim(left=0)
            ax.margins(y=0.1)
        axes[0].set_ylabel("loss of rows held out")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4)


@program
def main() -> None:
    output = pathlib.Path(flags.FLAGS.output)
    path = output / "language_schemes.csv"
    if unknown := sorted(set(ONLY.value) - SCHEMES.keys()):
        raise ValueError(
            f"--schemes={','.join(unknown)} is unknown. The schemes are "
            f"{', '.join(SCHEMES)}. Use one or more of these."
        )
    done = {row["scheme"] for row in read_rows(path)}
    if not flags.FLAGS.plot and not done.issuperset(ONLY.value):
        base = pathlib.Path(FOLDER.value) / "model"
        base.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(base)
        data = rows_of(code(), tokenizer)
        most_bytes = trained_base(base, tokenizer)
        with appending(path, COLUMNS) as append:
            for name in ONLY.value:
                if name in done:
                    continue
                row = measured(name, base, most_bytes, data)
                append(row)
                print(
                    f"{name}: loss {row['loss_before']} to {row['loss_after']} in "
                    f"{format_bytes(row['budget_bytes'])}, {row['seconds']} s a step"
                )
    draw(output / "language_schemes.png", read_rows(path))


if __name__ == "__main__":
    app.run(main)
