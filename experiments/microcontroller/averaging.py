"""Two boards that see five digits each learn all ten, as their weights are averaged.

Command:  python -m experiments.microcontroller.averaging
Time:     half a minute.
Expect:   half of all digits right by each board alone, and over 90 % by the average of
          both after ten rounds.

A board trains on its digits, saves its weights with `poet_save`, and goes on from the
average that it gets back with `poet_restore`: federated averaging, after McMahan et
al., 2017. Held-out digits are of all ten kinds. Boards alone train as long, and get
nothing back.
"""

import dataclasses
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import poet_jax
from experiments.microcontroller import boards, examples, models
from experiments.program import program, write_rows
from poet_jax.api.schedule import Schedule
from poet_jax.core.units import parse_bytes

BOARD = flags.DEFINE_enum("board", "mps2-an386", list(boards.BOARDS), "Of both.")
ROUNDS = flags.DEFINE_integer("rounds", 10, "How often weights are averaged.", 1)
EXAMPLES = flags.DEFINE_integer("examples", 1600, "Of which 320 are held out.", 400)
RATE = flags.DEFINE_float("learning_rate", 0.2, "Of gradient descent.")
OUTPUT = flags.DEFINE_string("output", "outputs/averaging", "Folder of projects.")
ROWS = flags.DEFINE_string("rows", None, "CSV file for the rows, written anew.")

BATCH_SIZE, HELD_OUT = 16, 320
DIGITS = (range(0, 5), range(5, 10))  # of each board
HEAD_WORDS = 5  # of a saved state; the last one is the checksum


@dataclasses.dataclass(frozen=True)
class Learner:
    """A board with digits in its flash.

    Attributes:
      board, built: what it is, and its program.
      fingerprint: of that.
    """

    board: boards.Board
    built: pathlib.Path
    fingerprint: int

    def trained(self, weights: np.ndarray) -> np.ndarray:
        """The weights [W] float32 after a round that begins with others.

        They go in and out as a saved state.
        """
        folder = self.built.parent / f"{self.built.name}_files"
        folder.mkdir(exist_ok=True)
        data = weights.astype(np.float32).tobytes()
        head = [0x54454F50, 1, self.fingerprint, 4 * HEAD_WORDS + len(data)]
        words = np.array(head, np.uint32).tobytes()
        checksum = np.uint32(zlib.crc32(words + data)).tobytes()
        (folder / "state.bin").write_bytes(words + checksum + data)
        boards.run(self.board, self.built, show=False)
        data = (folder / "state.bin").read_bytes()
        return np.frombuffer(data, np.float32, offset=4 * HEAD_WORDS)


def planned(case: models.Case) -> Schedule:
    return poet_jax.schedule(
        case.step,
        "100%",
        device=poet_jax.devices.STM32H7,
        planner=poet_jax.keep_all,
        donate_argnums=0,
    ).plan_for_board(*case.arguments(BATCH_SIZE, RATE.value))


def learner(case: models.Case, schedule: Schedule, digits: range) -> Learner:
    """A board with the digits of a range, and those that are held out."""
    held = np.arange(len(case.labels)) >= len(case.labels) - HELD_OUT
    mine = np.flatnonzero(~held & np.isin(case.labels, digits))
    mine = mine[: len(mine) // BATCH_SIZE * BATCH_SIZE]
    order = np.concatenate([mine, np.flatnonzero(held)])
    own = dataclasses.replace(
        case, pixels=case.pixels[order], labels=case.labels[order]
    )
    folder = (pathlib.Path(OUTPUT.value) / f"digits_from_{digits[0]}").resolve()
    arguments = own.arguments(BATCH_SIZE, RATE.value)
    poet_jax.emit.c(schedule, folder, arguments, flash_argnums=1)
    examples.write(
        own,
        folder,
        batch_size=BATCH_SIZE,
        trained=len(mine),
        steps=len(mine) // BATCH_SIZE,
        rate=RATE.value,
        restores=True,
    )
    board = boards.BOARDS[BOARD.value]
    built, _ = boards.build(board, folder, parse_bytes("4MiB"))
    return Learner(board, built, int(schedule.graph.fingerprint[:8], 16))


def percent_right(case: models.Case, weights: np.ndarray) -> float:
    """Of the examples that are held out."""
    leaves, structure = jax.tree.flatten(case.trained)
    ends = np.cumsum([x.size for x in leaves])[:-1]
    parts = np.split(weights, ends)
    pairs = zip(parts, leaves, strict=True)
    trained = jax.tree.unflatten(
        structure, [jnp.asarray(part.reshape(x.shape)) for part, x in pairs]
    )
    batch = case.batch(len(case.labels) - HELD_OUT, HELD_OUT)
    *_, correct = jax.jit(case.step)(trained, case.frozen, *batch, jnp.float32(0))
    return 100 * int(correct) / HELD_OUT


@program
def main() -> None:
    if boards.missing() and BOARD.value != "host":
        raise SystemExit(
            f"{' and '.join(boards.missing())} are not installed. Install them with "
            f"`{boards.INSTALL}`, or use --board=host."
        )
    case = models.make("mlp", "full", EXAMPLES.value)
    schedule = planned(case)
    learners = [learner(case, schedule, digits) for digits in DIGITS]
    average = np.concatenate([np.ravel(x) for x in jax.tree.leaves(case.trained)])
    alone, rows = [average for _ in learners], []
    for number in range(1, ROUNDS.value + 1):
        alone = [one.trained(x) for one, x in zip(learners, alone, strict=True)]
        average = np.mean([one.trained(average) for one in learners], 0)
        low, high = (percent_right(case, weights) for weights in alone)
        row = {
            "round": number,
            "board": BOARD.value,
            "digits_0_to_4_percent": low,
            "digits_5_to_9_percent": high,
            "average_percent": percent_right(case, average),
        }
        rows.append(row)
        print(
            f"round {number}: held-out digits right by the board of 0 to 4 {low:.0f} %,"
            f" of 5 to 9 {high:.0f} %, by the average {row['average_percent']:.0f} %",
            flush=True,
        )
    if ROWS.value:
        write_rows(pathlib.Path(ROWS.value), rows[0], rows)


if __name__ == "__main__":
    app.run(main)
