"""The project of a perceptron, beside which `firmware/by_hand.c` is written."""

import pathlib

import jax

import poet_jax
from experiments.microcontroller import examples, models

BATCH_SIZE, RATE = 16, 0.2


def project(folder: pathlib.Path, steps: int) -> poet_jax.emit.Project:
    """The perceptron's project, with examples for so many steps."""
    case = models.make("mlp", "full", 400)
    arguments = case.arguments(BATCH_SIZE, RATE)
    schedule = poet_jax.schedule(
        case.step,
        "100%",
        device=poet_jax.devices.STM32H7,
        planner=poet_jax.keep_all,
        donate_argnums=0,
    ).plan_for_board(*arguments)
    written = poet_jax.emit.c(schedule, folder, arguments, flash_argnums=1)
    examples.write(
        case,
        folder,
        batch_size=BATCH_SIZE,
        trained=320,
        steps=steps,
        rate=RATE,
    )
    assert len(jax.tree.leaves(case.trained)) == 6, "as by_hand.c has it"
    return written
