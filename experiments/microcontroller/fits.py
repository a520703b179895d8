"""Which board holds which training step, by its profile: nothing is built or run.

Command:  python -m experiments.microcontroller.fits
Time:     two minutes.
Expect:   a row for each model and board: the RAM that a greedy plan needs within the
          board's RAM, with parameters and pages on an SD card, and modelled seconds.

Frozen parameters are in flash, and 4 KiB of RAM are left for the firmware's own data
and stack.
"""

import pathlib
from typing import Any

import jax
from absl import app, flags

import poet_jax
from experiments.microcontroller import models
from experiments.program import program, write_rows
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

DEVICES = "NRF52840", "STM32F746", "ESP32_S3", "RP2350", "STM32H7"
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
    try:
        usage = poet_jax.schedule(
            case.step,
            int(profile.ram_bytes) - OWN_BYTES + flash_bytes,
            device=profile,
            planner=poet_jax.greedy,
            donate_argnums=0,
        ).plan_for_board(*arguments).usage  # fmt: skip
    except poet_jax.BudgetTooSmall as error:
        least = error.smallest_bytes - flash_bytes
        return found | {"fits": 0, "plan_bytes": least, "modelled_seconds": ""}
    seconds = f"{usage.seconds:.4g}"
    plan_bytes = usage.peak_bytes - flash_bytes
    return found | {"plan_bytes": plan_bytes, "modelled_seconds": seconds}


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
                f"{rows[-1]['modelled_seconds'] or '-'} s a step",
                flush=True,
            )
    store.close()
    if ROWS.value:
        write_rows(pathlib.Path(ROWS.value), rows[0], rows)


if __name__ == "__main__":
    app.run(main)
