"""Train a model within a memory budget, and write down what every step took.

    python -m experiments.train --model=cnn --dataset=mnist --steps=100 --budget=80%

takes about 30 s on two cores, planning included. Expect a budget of 53.0 MiB, 66.3 MiB
for keep-all, and a loss that falls from 2.705 to 0.273 whatever the plan is. Seconds
and the plan depend on the machine, unless --device names another. Energies are always
modelled.
"""

import json
import logging
import math
import pathlib
import time
from typing import Any

import jax
import optax
from absl import app, flags
from flax import nnx
from tqdm import tqdm

import poet_jax
from experiments.data import DATASETS
from experiments.models import FRAMEWORKS, load_for_model, loss_fn, make_model
from experiments.steps import named_device
from poet_jax.core.units import format_bytes, format_joules, format_seconds

PLANNERS = ("keep_all", "sqrt", "greedy", "paging_only", "paper", "milp")

MODEL = flags.DEFINE_string(
    "model", "cnn", "Model, such as resnet18 or bert:layers=2,width=128,heads=2."
)
FRAMEWORK = flags.DEFINE_enum(
    "framework", "nnx", FRAMEWORKS, "Flax interface that the model is written in."
)
DATASET = flags.DEFINE_string("dataset", "mnist", f"One of {', '.join(DATASETS)}.")
DATA_FOLDER = flags.DEFINE_string(
    "data_folder", None, "Folder with data_batch_1 to data_batch_5 of cifar10."
)
BUDGET = flags.DEFINE_string(
    "budget",
    None,
    "Memory of a step, as 64MiB or as 30% of what keep-all needs; by default 80% on "
    "host and the device's RAM on any other device.",
)
DEVICE = flags.DEFINE_string(
    "device",
    "host",
    "Whose costs the plan is for: host, this machine as measured, the path of a "
    f"profile in TOML or JSON, or one of {', '.join(poet_jax.devices.ALL)}.",
)
BATTERY = flags.DEFINE_float(
    "battery_wh", None, "Watt hours of a battery, to say how long it lasts."
)
PLANNER = flags.DEFINE_enum(
    "planner", "milp", PLANNERS, "What decides to keep, remat or page each value."
)
SOLVER = flags.DEFINE_enum(
    "solver", "CBC", ("CBC", "HIGHS"), "Solver of the milp and paper planners."
)
OBJECTIVE = flags.DEFINE_enum(
    "objective", "energy", ("energy", "time"), "What the milp planner minimises."
)
TIME_LIMIT = flags.DEFINE_float(
    "time_limit", 60.0, "Seconds that the milp and paper planners may take."
)
PLAN_CACHE = flags.DEFINE_string(
    "plan_cache", None, "Folder that keeps plans, so that a later start plans nothing."
)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Examples per step.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 100, "Steps to train for.", lower_bound=1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Learning rate of AdamW.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of parameters, dropout and batches.")
OUTPUT = flags.DEFINE_string(
    "output", "outputs/train", "Folder for what is written down."
)


def make_device(name: str) -> poet_jax.DeviceProfile:
    """This machine for "host", or `named_device`."""
    return poet_jax.host() if name == "host" else named_device(name, also=("host",))


def make_budget(budget: str | None, device: poet_jax.DeviceProfile) -> str | int:
    """`budget`, or what a device has where that is not said."""
    if budget is not None:
        return budget
    return "80%" if device.rates else device.ram_bytes


def spent(
    schedule: poet_jax.Schedule,
    device: poet_jax.DeviceProfile,
    steps_per_epoch: int,
    battery_wh: float | None = None,
) -> dict[str, float]:
    """What `device` would have spent, modelled: keys name their units."""
    usage = schedule.usage
    result = {
        "seconds_per_step": usage.seconds,
        "joules_per_step": usage.joules,
        "seconds_per_epoch": usage.seconds * steps_per_epoch,
        "joules_per_epoch": usage.joules * steps_per_epoch,
        "bytes_written_per_step": usage.bytes_paged_out,
    }
    if battery_wh is not None:
        result["steps_per_battery"] = battery_wh * 3600 / usage.joules
    if usage.bytes_paged_out and math.isfinite(device.store_endurance_bytes):
        result["steps_until_worn"] = (
            device.store_endurance_bytes / usage.bytes_paged_out
        )
    return result


def describe(spent: dict[str, float], device: poet_jax.DeviceProfile) -> str:
    """`spent` as a sentence for each of its parts."""
    step, epoch = (
        f"{format_seconds(spent[f'seconds_per_{x}'])} and "
        f"{format_joules(spent[f'joules_per_{x}'])}"
        for x in ("step", "epoch")
    )
    lines = [
        f"on {device.name}, modelled: {step} a step, {epoch} an epoch, "
        f"{format_bytes(spent['bytes_written_per_step'])} written to storage a step"
    ]
    for name, what in (
        ("steps_per_battery", "steps from one battery"),
        ("steps_until_worn", "steps until the storage is worn"),
    ):
        if name in spent:
            hours = spent[name] * spent["seconds_per_step"] / 3600
            lines.append(f"  {spent[name]:,.0f} {what}, {hours:,.3g} hours")
    return "\n".join(lines)


def make_planner(
    name: str, solver: str, objective: str, time_limit_seconds: float
) -> Any:
    """The planner called `name`; the rest is for those that solve a MILP."""
    if name == "milp":
        return poet_jax.MilpPlanner(
            solver=solver, objective=objective, time_limit_seconds=time_limit_seconds
        )
    if name == "paper":
        return poet_jax.PaperPlanner(
            solver=solver, time_limit_seconds=time_limit_seconds
        )
    return getattr(poet_jax.planners, name)


def bind(step, model, seed: int, batch) -> tuple[poet_jax.Schedule, Any]:
    """The schedule of `step`, and a function from a batch to its loss after a step."""
    if isinstance(model, nnx.Module):
        return step.plan(batch), step
    state = step.init(jax.random.key(seed), batch)

    def update(batch):
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return step.plan(state, batch), update


def record(number: int, loss: float, seconds: float, run: poet_jax.Run) -> dict:
    """One line of metrics.jsonl: what step `number` gave and took."""
    return {
        "step": number,
        "loss": loss,
        "seconds": seconds,
        "peak_bytes": run.peak_bytes,
        "bytes_paged_in": run.bytes_paged_in,
        "bytes_paged_out": run.bytes_paged_out,
        "recomputed": run.recomputed,
    }


def train() -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl.

    Raises ValueError and FileNotFoundError for flags that do not go together.
    """
    dataset = load_for_model(MODEL.value, DATASET.value, DATA_FOLDER.value)
    model = make_model(
        MODEL.value, FRAMEWORK.value, dataset_spec=dataset.spec, seed=SEED.value
    )
    device = make_device(DEVICE.value)
    step = poet_jax.train_step(
        model,
        make_budget(BUDGET.value, device),
        loss_fn=loss_fn,
        optimizer=optax.adamw(LEARNING_RATE.value),
        device=device,
        planner=make_planner(
            PLANNER.value, SOLVER.value, OBJECTIVE.value, TIME_LIMIT.value
        ),
        plan_cache=PLAN_CACHE.value,
    )
    output = pathlib.Path(OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)

    example = next(dataset.batches(BATCH_SIZE.value, SEED.value, 1))
    schedule, update = bind(step, model, SEED.value, example)
    print(schedule)
    steps_per_epoch = -(-len(dataset.inputs) // BATCH_SIZE.value)
    modelled = spent(schedule, device, steps_per_epoch, BATTERY.value)
    (output / "device.json").write_text(json.dumps(modelled, indent=1) + "\n")
    print(describe(modelled, device))
    print(f"  energies are modelled, not measured, from these constants: {device}")
    schedule.to_json(output / "plan.json")
    schedule.plot(output / "plan.png")

    lines = []
    batches = dataset.batches(BATCH_SIZE.value, SEED.value, STEPS.value)
    progress = tqdm(batches, total=STEPS.value, unit="step")
    with open(output / "metrics.jsonl", "w") as file:
        for number, batch in enumerate(progress):
            start = time.perf_counter()
            loss = float(update(batch))
            seconds = time.perf_counter() - start
            lines.append(record(number, loss, seconds, step.last_run))
            print(json.dumps(lines[-1]), file=file, flush=True)
            progress.set_postfix(loss=f"{loss:.4f}")
    seconds = sorted(line["seconds"] for line in lines)[len(lines) // 2]
    print(
        f"loss {lines[0]['loss']:.4f} at the first step, {lines[-1]['loss']:.4f} at "
        f"the last; median step {seconds:.4f} s; files in {output}"
    )
    return lines


def main(argv: list[str]) -> None:
    """Train; flags that do not go together end the program with their message."""
    if len(argv) > 1:
        raise SystemExit(
            f"The arguments {argv[1:]} were given. Only flags are understood. Type "
            "--help for the flags."
        )
    for name in ("jax", "mip"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        train()
    except (ValueError, FileNotFoundError, poet_jax.BudgetTooSmall) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    app.run(main)
