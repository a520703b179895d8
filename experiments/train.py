"""Train a model within a memory budget, and write down what every step took.

    python -m experiments.train --model=cnn --dataset=mnist --steps=100 --budget=80%

takes about 30 s on two cores, planning included. Expect a budget of 53.0 MiB, 66.3 MiB
for keep-all, and a loss that falls from 2.705 to 0.273 whatever the plan is. Seconds
and the plan depend on the machine, unless --device names another. Energies are always
modelled.
"""

import json
import math
import time
from typing import Any

import jax
from absl import app, flags
from flax import nnx
from tqdm import tqdm

import poet_jax
from experiments import zoo
from experiments.program import program
from poet_jax import cli
from poet_jax.core.units import format_bytes, format_joules, format_seconds

BATTERY = flags.DEFINE_float(
    "battery_wh", None, "Watt hours of a battery, to say how long it lasts."
)
STEPS = flags.DEFINE_integer("steps", 100, "Steps to train for.", lower_bound=1)
flags.adopt_module_key_flags(zoo)


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
    dataset = zoo.load_data()
    model = zoo.load_model(dataset)
    device = cli.asked_device() or poet_jax.host()
    step = zoo.train_step(model)
    output, batch_size, seed = cli.output_folder(), zoo.BATCH_SIZE.value, zoo.SEED.value

    example = next(dataset.batches(batch_size, seed, 1))
    schedule, update = bind(step, model, seed, example)
    print(schedule)
    steps_per_epoch = -(-len(dataset.inputs) // batch_size)
    modelled = spent(schedule, device, steps_per_epoch, BATTERY.value)
    (output / "device.json").write_text(json.dumps(modelled, indent=1) + "\n")
    print(describe(modelled, device))
    print(f"  energies are modelled, not measured, from these constants: {device}")
    schedule.to_json(output / "plan.json")
    schedule.plot(output / "plan.png")

    lines = []
    batches = dataset.batches(batch_size, seed, STEPS.value)
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


@program
def main() -> None:
    train()


if __name__ == "__main__":
    flags.FLAGS.set_default("output", "outputs/train")
    flags.FLAGS.set_default("time_limit", 60.0)
    app.run(main)
