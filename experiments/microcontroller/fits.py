"""Which board holds which training step, by its profile: nothing is built or run.

Command:  python -m experiments.microcontroller.fits
Time:     two minutes.
Expect:   a row for each model and board: the RAM that a greedy plan needs within the
          board's RAM, with parameters and pages on an SD card, and modelled seconds.

Frozen parameters are in flash, and 4 KiB of RAM are left for the firmware's own data
and stack. Where steps.csv or storage.csv has the step on the board's core, the row says
how many instructions the emulator counted. At one a cycle they are `correction` times
the modelled seconds of computing; corrected_seconds has these in their place. The plan
of the emulated step may be another.
"""

import dataclasses
import pathlib
from typing import Any

import jax
from absl import app, flags

import poet_jax
from experiments.microcontroller import models
from experiments.program import program, read_rows, write_rows
from poet_jax.core.units import format_bytes

MODELS = flags.DEFINE_spaceseplist(
    "models",
    [
        "mlp/full",
        "resnet18:width=4/full",
        "bert2:width=32,length=32/full",
        "mobilenetv2:width=0.35,depth=0.34/quarter",
    ],
    "Models and what is trained of them.",
)
ROWS = flags.DEFINE_string("rows", None, "CSV file for the rows, written anew.")

# Cycles a second, and the emulated board that has the core, if one has.
DEVICES = {
    "NRF52840": (64e6, "mps2-an386"),
    "STM32F746": (216e6, "mps2-an500"),
    "ESP32_S3": (240e6, None),
    "RP2350": (150e6, "mps2-an505"),
    "STM32H7": (550e6, "mps2-an500"),
}
RESULTS = pathlib.Path(__file__).parents[1] / "results" / "microcontroller"
EMULATED = "steps.csv", "storage.csv"
COUNTED = "instructions_per_step", "correction", "corrected_seconds"
OWN_BYTES = 4096
STORED_BYTES = 2048  # and above


def row(name: str, part: str, device: str, case: models.Case, store: Any) -> dict:
    """Whether a board holds the step of one example, and what it takes there."""
    profile = getattr(poet_jax.devices, device)
    flash_bytes = sum(x.nbytes for x in jax.tree.leaves(case.frozen))
    trained, *others = case.arguments(1, 0.01)
    arguments = poet_jax.to_storage(trained, store, STORED_BYTES), *others
    found = {"model": name, "update": part, "device": device}
    found |= {"ram_bytes": int(profile.ram_bytes), "fits": 1}
    nothing = dict.fromkeys(("modelled_seconds", *COUNTED), "")
    try:
        schedule = poet_jax.schedule(
            case.step,
            int(profile.ram_bytes) - OWN_BYTES + flash_bytes,
            device=profile,
            planner=poet_jax.greedy,
            donate_argnums=0,
        ).plan_for_board(*arguments)
    except poet_jax.BudgetTooSmall as error:
        least = error.smallest_bytes - flash_bytes
        return found | {"fits": 0, "plan_bytes": least} | nothing
    usage = schedule.usage
    found |= {"plan_bytes": usage.peak_bytes - flash_bytes} | nothing
    found |= {"modelled_seconds": f"{usage.seconds:.4g}"}
    return found | corrected(schedule, device, counted(name, part, device))


def counted(name: str, part: str, device: str) -> int:
    """Instructions of a step of one example on the device's core; 0 if none ran."""
    same = {
        "model": name,
        "update": part,
        "batch_size": "1",
        "board": DEVICES[device][1],
    }
    rows = [x for path in EMULATED for x in read_rows(RESULTS / path)]
    found = [x for x in rows if all(x[key] == value for key, value in same.items())]
    return int(found[0]["instructions_per_step"]) if found else 0


def corrected(schedule: poet_jax.Schedule, device: str, instructions: int) -> dict:
    """Columns for the seconds of a step that takes so many instructions."""
    if not instructions:
        return {}
    cycles_per_second = DEVICES[device][0]
    costs, usage = schedule.costs, schedule.usage
    correction = instructions / cycles_per_second / usage.compute_seconds
    slower = dataclasses.replace(costs, seconds=costs.seconds * correction)
    seconds = poet_jax.simulate(schedule.program, slower).seconds
    values = instructions, f"{correction:.3g}", f"{seconds:.4g}"
    return dict(zip(COUNTED, values, strict=True))


@program
def main() -> None:
    store, rows = poet_jax.FileStore(), []
    for text in MODELS.value:
        name, _, part = text.rpartition("/")
        shrink = 2 if name.startswith("mobilenet") else 1
        case = models.make(name, part, 16, shrink)
        for device in DEVICES:
            rows.append(row(name, part, device, case, store))
            fits = "fits" if rows[-1]["fits"] else "does not fit"
            print(
                f"{text} {fits} {device}: {format_bytes(rows[-1]['plan_bytes'])} of "
                f"{format_bytes(rows[-1]['ram_bytes'])}, "
                f"{rows[-1]['modelled_seconds'] or '-'} s a step, "
                f"{rows[-1]['corrected_seconds'] or '-'} s by counted instructions",
                flush=True,
            )
    store.close()
    if ROWS.value:
        write_rows(pathlib.Path(ROWS.value), rows[0], rows)


if __name__ == "__main__":
    app.run(main)
