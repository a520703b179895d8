"""What `train.c` is to do, and its examples in flash."""

import pathlib
from typing import Any

import jax
import numpy as np

from experiments.microcontroller.models import Case


def write(
    case: Case,
    folder: pathlib.Path,
    *,
    batch_size: int,
    trained: int,
    steps: int,
    rate: float,
    restores: bool = False,
) -> None:
    """Write the examples of a case as bytes, and settings: how many of the first ones
    are trained on, and whether the state is that of a file and is saved to it."""
    pixels = case.pixels
    state = len(jax.tree.leaves(case.trained))
    first = state + len(jax.tree.leaves(case.frozen))
    settings: dict[str, Any] = {
        "BATCH": batch_size,
        "WIDTH": pixels[0].size,
        "EXAMPLES": len(pixels),
        "TRAINED": min(trained, len(pixels)),
        "STEPS": steps,
        "EVERY": max(1, steps // 10),
        "SAVES": int(not restores),
        "RESTORES": int(restores),
        "RATE": f"{np.float32(rate):.8e}f",
        "SCALE": f"{case.unit:.8e}f",
        "OFFSET": f"{case.offset:.8e}f",
        "TRAIN_STATE": state,
        "TRAIN_INPUTS": f"poet_argument_{first}",
        "TRAIN_LABELS": f"poet_argument_{first + 1}",
        "TRAIN_RATE": f"poet_argument_{first + 2}",
        "TRAIN_LOSS": f"poet_result_{state}",
        "TRAIN_CORRECT": f"poet_result_{state + 1}",
    }
    lines = [f"#define {name} {value}" for name, value in settings.items()]
    (folder / "train_settings.h").write_text("\n".join([*lines, ""]))
    text = ["#include <stdint.h>"]
    for name, data in (("inputs", pixels), ("labels", case.labels.astype(np.uint8))):
        numbers = ",\n".join(
            ", ".join(map(str, row)) for row in data.reshape(len(data), -1).tolist()
        )
        text.append(f"extern const uint8_t train_{name}[];")
        text.append(f"const uint8_t train_{name}[] = {{\n{numbers}}};")
    (folder / "train_examples.c").write_text("\n".join([*text, ""]))
