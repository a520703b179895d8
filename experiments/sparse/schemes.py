"""Schemes that train a part of a model: how each is named, measured and written down.

What `experiments.sparse.finetune` and `experiments.sparse.adapt` share. Schemes are
named in a table of updates with their learning rates, or fractions as JSON. Seconds are
medians, beside `nnx.jit` of full training in turns; the ratio is the median over pairs.
The rise is of the process's high-water mark (VmHWM) in a step over what the process
held besides the step's arguments. Joules are modelled, for the plan that ran, if a
device had the memory that the budget grants.
"""

import dataclasses
import itertools
import json
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import flags, logging
from flax import nnx

import poet_jax
from experiments.benchmarks import memory
from experiments.data import Dataset
from experiments.models import loss_fn
from experiments.program import appending, child, result_flags
from experiments.steps import in_ram
from poet_jax.core.plan import parse_budget
from poet_jax.update import Update
from poet_jax.viz.figures import drawn

flags.disclaim_key_flags()  # what is defined here is a flag of the caller's
Schemes = Mapping[str, tuple[Update, float]]
DEVICES = ("RASPBERRY_PI_4", "JETSON_TX2")
WITHOUT_LIMIT = 2**40
EVALUATED = 32  # examples at once
OTHER_RATE = 1e-3  # of a scheme in JSON

# What a row says besides its key.
COLUMNS = (
    "trained_parameters", "accuracy", "chance", "held_out", "first_loss", "last_loss",
    "full_keep_all_bytes", "keep_all_bytes", "budget_bytes", "status", "gap",
    "planned_bytes", "peak_bytes", "rise_bytes", "paged_bytes", "recomputed",
    "seconds", "full_jit_seconds", "ratio", "pairs",
    *(f"{device}_{what}" for device in DEVICES for what in ("seconds", "joules")),
)  # fmt: skip


# Handed on to the process of one row, beside what its key says.
OTHERS = ("pairs", "time_limit", "plan_cache", "output", "verbosity")


def define_flags(schemes: Schemes, folder: str, pairs: int, least_steps: int) -> None:
    """Define what a program reads that measures `schemes`, with results in `folder`."""
    text = f"One of {', '.join(schemes)}, searched, or fractions as JSON."
    flags.DEFINE_multi_string("update", list(schemes), text)
    flags.DEFINE_multi_string("budget", ["all"], "A size, a percentage, or all.")
    flags.DEFINE_integer("steps", 60, "Steps to train for.", lower_bound=least_steps)
    flags.DEFINE_float("learning_rate", None, "Instead of the scheme's.")
    flags.DEFINE_integer("batch_size", 16, "Examples per step.", lower_bound=1)
    flags.DEFINE_integer("pairs", pairs, "Steps of each kind to time in turns.")
    flags.DEFINE_float("time_limit", 20.0, "Seconds for each plan.")
    flags.DEFINE_string("plan_cache", "outputs/plans", "Folder that keeps plans.")
    result_flags(folder, plots=True)


def named_scheme(text: str, schemes: Schemes, **options: Any) -> tuple[Update, float]:
    """The update that a flag names, and its learning rate.

    Args:
      text: one of `schemes`, or fractions by pattern as JSON.
      options: of an `Update` from JSON.

    Raises ValueError for no scheme.
    """
    if text in schemes:
        return schemes[text]
    try:
        return Update(json.loads(text), **options), OTHER_RATE
    except (json.JSONDecodeError, TypeError, AttributeError):
        raise ValueError(
            f"The update {text!r} was asked for. The schemes are {', '.join(schemes)}, "
            "and fractions by pattern as JSON. Use for example --update=bias_only, or "
            '--update=\'{"blocks/5/**": 1, "head/**": 1}\'.'
        ) from None


def budget_bytes(budget: str, full_bytes: int) -> int:
    """A budget in bytes, percentages being of `full_bytes`."""
    if budget == "all":
        return WITHOUT_LIMIT
    return int(parse_budget(budget, full_bytes).memory_bytes)


def full_keep_all_bytes(
    model: nnx.Module,
    batch: Any,
    optimizer: optax.GradientTransformation,
    plan_cache: str,
) -> int:
    """What a step of full training needs when everything is kept."""
    step = poet_jax.train_step(
        model,
        WITHOUT_LIMIT,
        loss_fn=loss_fn,
        optimizer=optimizer,
        planner=poet_jax.keep_all,
        device=poet_jax.devices.ALL[DEVICES[0]],
        plan_cache=plan_cache,
    )
    return step.plan(batch).baseline.peak_bytes


def accuracy(model: Any, examples: Dataset) -> float:
    """The part of `examples` that the model puts into the right class."""
    answer = nnx.jit(lambda model, inputs: model(inputs).argmax(-1))
    missing = -len(examples.inputs) % EVALUATED
    widths = [(0, missing)] + [(0, 0)] * (examples.inputs.ndim - 1)
    padded = np.pad(examples.inputs, widths, mode="edge")
    answers = [
        answer(model, part) for part in np.split(padded, len(padded) // EVALUATED)
    ]
    right = np.concatenate(answers)[: len(examples.labels)] == examples.labels
    return float(right.mean())


def move_to_storage(step: Any, batch: Any, store: poet_jax.FileStore) -> None:
    """Keep parameters and moments of an nnx step in `store`, where they are large."""
    step.array_step(batch)  # makes the optimizer's state
    for module in (step.model, step.optimizer):
        nnx.update(module, poet_jax.to_storage(nnx.state(module), store))


def trained_parameters(step: Any) -> int:
    """How many numbers an nnx step trains."""
    params = nnx.as_pure(nnx.state(step.model, nnx.Param))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    part = getattr(step.optimizer, "part", None)
    trainable = shapes
    if part is not None:
        trainable = jax.eval_shape(nnx.as_pure(part).split, shapes)
    return sum(x.size for x in jax.tree.leaves(trainable))


def planned(step: Any, batch: Any) -> dict[str, Any]:
    """What the plan of an nnx step says, also of devices that would run it.

    It says no more than a status, IMPOSSIBLE or NONE, if there is no plan.
    """
    try:
        schedule = step.plan(batch)
    except poet_jax.BudgetTooSmall as error:
        return {"status": "IMPOSSIBLE" if error.exact else "NONE"}
    logging.info("%s", schedule)
    row = {
        "trained_parameters": trained_parameters(step),
        "keep_all_bytes": schedule.baseline.peak_bytes,
        "budget_bytes": schedule.budget.memory_bytes,
        "planned_bytes": schedule.usage.peak_bytes,
        "status": schedule.plan.status.name,
        "gap": f"{schedule.plan.gap:.6f}",
    }
    for name in DEVICES:
        costs = poet_jax.price(schedule.graph, poet_jax.devices.ALL[name])
        program = poet_jax.lower(schedule.graph, schedule.plan)
        usage = poet_jax.simulate(program, costs)
        row[f"{name}_seconds"] = f"{usage.seconds:.4f}"
        row[f"{name}_joules"] = f"{usage.joules:.4f}"
    return row


def outcome(losses: Sequence[float], model: Any, held_out: Dataset) -> dict[str, Any]:
    """What training with these losses came to."""
    return {
        "chance": f"{held_out.chance:.4f}",
        "held_out": len(held_out.labels),
        "first_loss": f"{losses[0]:.4f}",
        "last_loss": f"{statistics.mean(losses[-5:]):.4f}",
        "accuracy": f"{accuracy(model, held_out):.4f}",
    }


def measured(
    step: Any, batch: Any, plain: Callable[[Any], jax.Array], pairs: int
) -> dict[str, Any]:
    """Memory of a step that has run, and its time beside that of `plain` in turns."""
    rises = []
    for _ in range(2):
        poet_jax.release()  # what a step left in RAM for the next one
        rise = memory.Rise()
        state = in_ram((nnx.state(step.model), nnx.state(step.optimizer), batch))
        with rise.of(state):
            step(batch)
        rises.append(rise.last_bytes)
    run = step.last_run
    row = {
        "peak_bytes": run.peak_bytes,
        "rise_bytes": max(rises),
        "paged_bytes": run.bytes_paged_out + run.bytes_paged_in,
        "recomputed": run.recomputed,
        "pairs": pairs,
    }
    if not pairs:
        return row
    plain(batch)  # compiles
    ours, theirs = [], []
    for number in range(pairs):
        turns = [(step, ours), (plain, theirs)]
        for contestant, seconds in turns if number % 2 else reversed(turns):
            start = time.perf_counter()
            jax.block_until_ready(contestant(batch))
            seconds.append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return row | {
        "seconds": f"{statistics.median(ours):.4f}",
        "full_jit_seconds": f"{statistics.median(theirs):.4f}",
        "ratio": f"{statistics.median(ratios):.4f}",
    }


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a figure shows of one plan of a scheme; None is not shown.

    Attributes:
      filled: False for a hollow mark, above the filled ones of its scheme.
      accuracy: in percent, with its standard `error`.
      memory_bytes: of arrays at once.
      ratio: of a step's seconds, over those of full training by `nnx.jit`.
      joules: {device: of a step}, modelled.
    """

    filled: bool
    accuracy: float | None = None
    error: float | None = None
    memory_bytes: float | None = None
    ratio: float | None = None
    joules: Mapping[str, float] = dataclasses.field(default_factory=dict)


def mean_joules(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """{device: mean of a step's modelled joules}."""
    return {
        device: statistics.mean(float(row[f"{device}_joules"]) for row in rows)
        for device in DEVICES
    }


def plot_schemes(
    marks: Mapping[str, Sequence[Mark]],
    full: Sequence[Mapping[str, str]],
    path: pathlib.Path,
    *,
    filled: str,
    hollow: str,
    budget_bytes: float | None = None,
) -> None:
    """A line for each scheme, the most accurate first, with its marks in four panels.

    Args:
      marks: of each scheme, by name.
      full: rows of full training, by whose modelled joules others are divided.
      filled, hollow: what the legend says of such marks.
      budget_bytes: where a line shows the budget, if one is to be shown.
    """
    if not (marks and full):
        logging.warning(
            "%s was not drawn. It shows schemes that were trained and timed, beside "
            "full training. Run this with --update=full, and with steps and pairs.",
            path,
        )
        return
    from matplotlib.lines import Line2D

    full_joules = mean_joules(full)

    def best(name: str) -> float:
        return max(x.accuracy for x in marks[name] if x.accuracy is not None)

    names = sorted(marks, key=best)
    with drawn(path, 1.6 + 0.36 * len(names)) as figure:
        accuracy, memory, time, energy = figure.subplots(2, 2, sharey=True).flat
        # Okabe and Ito's colours, which are told apart without red or green.
        devices = dict(zip(DEVICES, (("#0072B2", "o"), ("#D55E00", "|")), strict=True))
        for line, name in enumerate(names):
            for mark in marks[name]:
                y = line - 0.15 if mark.filled else line + 0.15
                style = {"linestyle": "none", "markersize": 4}
                style |= {"fillstyle": "full" if mark.filled else "none"}
                black = style | {"color": "black", "marker": "o"}
                if mark.accuracy is not None:
                    accuracy.errorbar(mark.accuracy, y, xerr=mark.error, **black)
                if mark.memory_bytes is not None:
                    memory.plot(mark.memory_bytes / 2**20, y, **black)
                if mark.ratio is not None:
                    time.plot(mark.ratio, y, **black)
                for device, joules in mark.joules.items():
                    colour, marker = devices[device]
                    size = 8 if marker == "|" else 4
                    style |= {"color": colour, "marker": marker, "markersize": size}
                    energy.plot(joules / full_joules[device], y, **style)
        for axis in (accuracy, memory, time, energy):
            axis.set_yticks(range(len(names)), names)
            axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
            axis.set_axisbelow(True)
        for axis in (memory, time, energy):
            axis.set_xlim(0)
        if budget_bytes is not None:
            memory.axvline(budget_bytes / 2**20, color="#999999", linewidth=0.8)
        for axis in (time, energy):
            axis.axvline(1, color="#999999", linewidth=0.8)
        accuracy.set_xlabel("accuracy (%), measured")
        memory.set_xlabel("MiB of arrays at once")
        time.set_xlabel("step time over full\ntraining's by jax.jit, measured")
        energy.set_xlabel("joules over full\ntraining's, modelled")
        black = {"linestyle": "none", "color": "black", "marker": "o", "markersize": 4}
        handles = [
            Line2D([], [], label=filled, **black),
            Line2D([], [], label=hollow, fillstyle="none", **black),
            *(
                Line2D(
                    [], [], linestyle="none", color=colour, marker=marker, label=device
                )
                for device, (colour, marker) in devices.items()
            ),
        ]
        figure.legend(handles=handles, ncols=2, loc="outside upper center")


def keep_compiled(folder: str) -> None:
    """Keep all that XLA compiles in `folder`, for processes to come."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def missing(
    keys: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, str]]
) -> list[Mapping[str, Any]]:
    """The keys that no row has."""
    keys, rows = list(keys), list(rows)
    done = {tuple(row[name] for name in keys[0]) for row in rows} if keys else set()
    return [key for key in keys if tuple(map(str, key.values())) not in done]


def todo(
    names: Sequence[str],
    rows: Iterable[Mapping[str, str]],
    parse: Callable[[str], tuple[Update, float]],
) -> list[Mapping[str, Any]]:
    """The keys that flags ask for and `rows` lack.

    A key has the value of each flag in `names`: one of those that are given several
    times, and the learning rate of the scheme that `parse` names, if none is given.
    Raises ValueError for a bad flag.
    """
    given = {name: flags.FLAGS[name].value for name in names}
    several = [name for name, value in given.items() if isinstance(value, list)]
    keys = []
    for values in itertools.product(*(given[name] for name in several)):
        key = given | dict(zip(several, values, strict=True))
        budget_bytes(key["budget"], 2**30)
        key["learning_rate"] = given["learning_rate"] or parse(key["update"])[1]
        keys.append(key)
    return missing(keys, rows)


def run(
    path: pathlib.Path,
    columns: Sequence[str],
    keys: Sequence[Mapping[str, Any]],
    measure: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]],
) -> None:
    """Append rows to a CSV file: those that `measure` says of a single key, else those
    of each key by this program in a process of its own.

    What one row leaves in memory is not the next one's. Lists in a key are flags that
    are given several times.
    """
    if len(keys) == 1:
        with appending(path, columns) as append:
            for row in measure(keys[0]):
                append(row)
        return
    for key in keys:
        command = child()[:3]
        asked = {**key, **{name: flags.FLAGS[name].value for name in OTHERS}}
        for name, value in asked.items():
            values = value if isinstance(value, list) else [value]
            command += [f"--{name}={one}" for one in values]
        subprocess.run(command, check=True)
