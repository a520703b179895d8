"""A model trains on emulated microcontrollers, with the bits of this machine's C.

Command:  python -m experiments.microcontroller --model=mlp --board=mps2-an386
Time:     a minute for the MLP; emulation takes a third of it.
Expect:   over 90 % of held-out digits right; one checksum of the weights on all
          boards, and JAX's weights to rounding; an arena at most 5 % above the plan.

With --board=all, all boards run in turn. It needs

    apt-get install gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm

and of these nothing for --board=host. Rows for --rows say what a step takes: bytes of
code, constants, arena and plan, emulated instructions, modelled seconds and joules.
"""

import csv
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import poet_jax
from experiments.microcontroller import boards, examples, models
from experiments.program import program
from poet_jax import cli
from poet_jax.api.schedule import Schedule
from poet_jax.core.plan import is_percentage
from poet_jax.core.units import format_bytes, format_joules, format_seconds, parse_bytes

MODEL = flags.DEFINE_string("model", "mlp", "Model, such as mlp:width=32 or lenet.")
UPDATE = flags.DEFINE_enum("update", "full", list(models.UPDATES), "What is trained.")
BOARD = flags.DEFINE_list("board", ["mps2-an386"], "Boards, or all; host is one, too.")
BUDGET = flags.DEFINE_string(
    "budget", "100%", "RAM of the plan, beside constants: a size, or a percentage."
)
DEVICE = flags.DEFINE_string("device", "STM32H7", "Profile that prices the plan.")
RAM = flags.DEFINE_string("ram", "4MiB", "RAM of the boards, for arena and stack.")
STEPS = flags.DEFINE_integer("steps", 10, "Training steps.", 1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Examples of a step.", 1)
SHRINK = flags.DEFINE_integer(
    "shrink", 1, "Factor by which images shrink, on each side.", 1
)
EXAMPLES = flags.DEFINE_integer("examples", 1600, "Examples in flash.", 1)
TRAINED = flags.DEFINE_integer("trained", 1280, "Of these, those trained on.", 1)
RATE = flags.DEFINE_float("learning_rate", 0.2, "Of gradient descent.")
STORED = flags.DEFINE_string(
    "stored", None, "Size of parameters that lie on storage between steps, and above."
)
PAGING = flags.DEFINE_bool("paging", True, "Whether plans may page.")
ROWS = flags.DEFINE_string("rows", None, "CSV file to add a row for each board to.")
PLANNER = flags.DEFINE_enum("planner", "milp", ["milp", "greedy"], "Of the plan.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 20.0, "Seconds for the planner.")
OUTPUT = flags.DEFINE_string("output", "outputs/microcontroller", "Folder of projects.")


def planned(case: models.Case, arguments: tuple[Any, ...]) -> Schedule:
    """The schedule of a case, whose frozen parameters count as flash, not as RAM."""
    device = cli.named_device(DEVICE.value)
    planner: Any = poet_jax.greedy
    if PLANNER.value == "milp":
        planner = poet_jax.MilpPlanner(
            paging=PAGING.value, time_limit_seconds=TIME_LIMIT.value
        )

    def schedule(budget: Any, planner: Any) -> Schedule:
        return poet_jax.schedule(
            case.step, budget, device=device, planner=planner, donate_argnums=0
        ).plan_for_board(*arguments)

    flash_bytes = sum(x.nbytes for x in jax.tree.leaves(case.frozen))
    if is_percentage(BUDGET.value):
        everything = schedule("100%", poet_jax.keep_all).usage.peak_bytes - flash_bytes
        ram_bytes = int(float(BUDGET.value.rstrip("%")) / 100 * everything)
    else:
        ram_bytes = parse_bytes(BUDGET.value)
    return schedule(ram_bytes + flash_bytes, planner)


def trained_by_jax(case: models.Case) -> list[np.ndarray]:
    """The weights after all steps of `jax.jit`, on the same examples."""
    step = jax.jit(case.step)
    trained = case.trained
    turns = min(TRAINED.value, len(case.pixels)) // BATCH_SIZE.value
    for number in range(STEPS.value):
        batch = case.batch(number % turns * BATCH_SIZE.value, BATCH_SIZE.value)
        trained, *_ = step(trained, case.frozen, *batch, jnp.float32(RATE.value))
    return [np.asarray(x) for x in jax.tree.leaves(trained)]


def difference(
    folder: pathlib.Path, expected: list[np.ndarray], stored: dict[int, int]
) -> float:
    """Relative norm of what the weights that a run has left behind differ from others.

    Those of the numbers `stored` begin at so many bytes of its storage.
    """
    error = norm = 0.0
    storage = (folder / "storage.bin").read_bytes() if stored else b""
    for number, x in enumerate(expected):
        path = folder / f"state_{number:03d}.bin"
        data = storage[stored[number] :] if number in stored else path.read_bytes()
        saved = np.frombuffer(data, np.float32, x.size).reshape(x.shape)
        error += float(np.square(saved.astype(float) - x).sum())
        norm += float(np.square(x.astype(float)).sum())
    return (error / norm) ** 0.5 if norm else 0.0


def asked_boards() -> list[str]:
    names = list(boards.BOARDS) if BOARD.value == ["all"] else ["host", *BOARD.value]
    unknown = set(names) - boards.BOARDS.keys()
    if unknown:
        raise ValueError(
            f"The board {', '.join(unknown)} was asked for. There are "
            f"{', '.join(boards.BOARDS)}. Use --board=mps2-an386, or --board=all."
        )
    if boards.missing() and names != ["host", "host"]:
        raise SystemExit(
            f"{' and '.join(boards.missing())} are not installed. Install them with "
            f"`{boards.INSTALL}`, or use --board=host."
        )
    return list(dict.fromkeys(names))


@program
def main() -> None:
    names = asked_boards()
    case = models.make(MODEL.value, UPDATE.value, EXAMPLES.value, SHRINK.value)
    arguments = case.arguments(BATCH_SIZE.value, RATE.value)
    if STORED.value:
        store = poet_jax.FileStore()
        least_bytes = parse_bytes(STORED.value)
        paged = poet_jax.to_storage(case.trained, store, least_bytes)
        arguments = paged, *arguments[1:]
    schedule = planned(case, arguments)
    name = f"{MODEL.value}_{UPDATE.value}".replace(":", "_").replace("=", "_")
    folder = (pathlib.Path(OUTPUT.value) / name.replace(",", "_")).resolve()
    project = poet_jax.emit.c(schedule, folder, arguments, flash_argnums=1)
    print(f"{schedule.usage}\n{project}", flush=True)
    examples.write(
        case,
        folder,
        batch_size=BATCH_SIZE.value,
        trained=TRAINED.value,
        steps=STEPS.value,
        rate=RATE.value,
    )
    expected = trained_by_jax(case)
    checksums = {}
    for name in names:
        board = boards.BOARDS[name]
        built, code_bytes = boards.build(board, folder, parse_bytes(RAM.value))
        print(f"{name} ({board.processor}), {format_bytes(code_bytes)} of code:")
        found = boards.run(board, built)
        checksums[name] = found["checksum"]
        files = built.parent / f"{built.name}_files"
        apart = difference(files, expected, project.stored)
        print(f"  weights are {apart:.1e} from those of jax.jit")
        if ROWS.value:
            write_row(name, schedule, project, code_bytes, found, apart)
    same = len(set(checksums.values())) == 1
    print(f"The weights are {'the same bits' if same else 'NOT the same'} on all.")
    if not same:
        raise SystemExit(1)
    print(
        f"Modelled on {DEVICE.value}: {format_seconds(schedule.usage.seconds)} and "
        f"{format_joules(schedule.usage.joules)} a step."
    )


def write_row(
    name: str,
    schedule: Schedule,
    project: poet_jax.emit.Project,
    code_bytes: int,
    found: dict[str, int],
    apart: float,
) -> None:
    path = pathlib.Path(ROWS.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {
        "model": MODEL.value,
        "update": UPDATE.value,
        "shrink": SHRINK.value,
        "batch_size": BATCH_SIZE.value,
        "budget": BUDGET.value,
        "board": name,
        "processor": boards.BOARDS[name].processor,
        "code_bytes": code_bytes,
        "constant_bytes": project.constant_bytes,
        "arena_bytes": project.arena_bytes,
        "plan_bytes": project.plan_bytes,
        "state_on_storage_bytes": project.stored_bytes,
        "page_bytes": project.page_bytes,
        "steps": STEPS.value,
        "instructions_per_step": found["instructions"],
        "accuracy_percent": found.get("accuracy", ""),
        "checksum": found["checksum"],
        "difference_from_jax": f"{apart:.1e}",
        "device": DEVICE.value,
        "modelled_seconds": f"{schedule.usage.seconds:.4g}",
        "modelled_joules": f"{schedule.usage.joules:.4g}",
    }
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    app.run(main)
