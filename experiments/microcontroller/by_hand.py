"""The perceptron's generated step beside one that is written by hand.

Command:  python -m experiments.microcontroller.by_hand
Time:     half a minute.
Expect:   fewer instructions than by hand where the board has an FPU, and the same
          weights to rounding.

`firmware/by_hand.c` is what takes the place of the generated `poet_step.c`: forward,
backward and gradient descent in plain C99, with the same functions for exp and log.
"""

import pathlib

import numpy as np
from absl import app, flags

from experiments.microcontroller import boards, perceptron
from experiments.program import program, write_rows
from poet_jax.core.units import parse_bytes

BOARD = flags.DEFINE_list("board", ["mps2-an386", "mps2-an500"], "Boards.")
STEPS = flags.DEFINE_integer("steps", 10, "Training steps.", 1)
OUTPUT = flags.DEFINE_string("output", "outputs/by_hand", "Folder of the project.")
ROWS = flags.DEFINE_string("rows", None, "CSV file for the rows, written anew.")


def weights(folder: pathlib.Path) -> np.ndarray:
    """[W] float32, what a run has saved."""
    files = sorted(folder.glob("state_*.bin"))
    return np.concatenate([np.frombuffer(x.read_bytes(), np.float32) for x in files])


@program
def main() -> None:
    if missing := boards.missing():
        raise SystemExit(
            f"{' and '.join(missing)} are not installed. Install them with "
            f"`{boards.INSTALL}`."
        )
    folder = pathlib.Path(OUTPUT.value).resolve()
    print(perceptron.project(folder, STEPS.value))
    rows = []
    for name in BOARD.value:
        board = boards.BOARDS[name]
        found = {}
        for kind, step in ("generated", None), ("by hand", "by_hand.c"):
            path = boards.FIRMWARE / step if step else None
            built, code = boards.build(board, folder, parse_bytes("4MiB"), path)
            result = boards.run(board, built, show=False)
            found[kind] = weights(built.parent / f"{built.name}_files")
            rows.append({
                "board": name,
                "processor": board.processor,
                "step": kind,
                "steps": STEPS.value,
                "instructions_per_step": result["instructions"],
                "code_bytes": code,
            })  # fmt: skip
        generated, by_hand = (row["instructions_per_step"] for row in rows[-2:])
        apart = np.abs(found["generated"] - found["by hand"]).max()
        print(
            f"{board.processor}: {generated} instructions a step, {by_hand} by hand: "
            f"{100 * (generated / by_hand - 1):+.1f} %; weights differ by {apart:.1e}",
            flush=True,
        )
    if ROWS.value:
        write_rows(pathlib.Path(ROWS.value), rows[0], rows)


if __name__ == "__main__":
    app.run(main)
