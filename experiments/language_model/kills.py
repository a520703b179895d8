"""A run that is killed at random moments has the losses of one that was not.

Command:  python -m experiments.language_model.kills
Time:     six minutes on two cores.
Expect:   no difference between the losses of both runs, wherever the kills fell.

One run of `experiments.language_model` is not disturbed. The other gets SIGKILL, its
children with it, --kills times, each at a random moment in the first fifth of the
seconds that the undisturbed run took; then it completes. Both keep parameters and
moments in a file, and save their state after every second step. A row is a start of the
second run: how long it lived, and how many steps were saved by then.
"""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

from absl import app, flags

from experiments.language_model import train
from experiments.program import appending, program, read_rows, result_flags
from poet_jax import cli, load_paged

KILLS = flags.DEFINE_integer("kills", 10, "How often the run is killed.", 1)
STEPS = flags.DEFINE_integer("steps", 1000, "Training steps.", 1)
SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")
FOLDER = flags.DEFINE_string("folder", "outputs/kills", "Folder of both runs.")
result_flags("language_models")

COLUMNS = ("start", "seconds", "killed", "steps_saved", "largest_loss_difference")


def command(folder: pathlib.Path) -> list[str]:
    """Full training of a million parameters, with all state in a file."""
    sizes = f"--steps={STEPS.value}", "--batch_size=4", "--length=64", "--generate=0"
    what = "--size=1m", "--update=full", "--on_storage", "--save_every=2"
    module = [sys.executable, "-m", "experiments.language_model"]
    return [*module, *what, *sizes, "--budget=80%", f"--folder={folder}"]


def run(folder: pathlib.Path, seconds: float | None = None) -> tuple[float, bool]:
    """Run until the end, or be killed after `seconds`: (seconds, whether killed).

    Raises RuntimeError if the run fails by itself.
    """
    begun = time.monotonic()
    with open(folder / "log.txt", "ab") as log:
        process = subprocess.Popen(
            command(folder), stdout=log, stderr=log, start_new_session=True
        )
        try:
            status, killed = process.wait(seconds), False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status, killed = 0, True
    if status:
        raise RuntimeError(f"{command(folder)} failed: see {folder / 'log.txt'}.")
    return time.monotonic() - begun, killed


def losses(folder: pathlib.Path) -> list[float]:
    return [float(row["loss"]) for row in read_rows(folder / "losses.csv")]


def steps_saved(folder: pathlib.Path) -> int:
    path = folder / train.STATE
    return int(load_paged(path)["optimizer/step"]) if path.exists() else 0


@program
def main() -> None:
    whole, killed = (pathlib.Path(FOLDER.value) / x for x in ("whole", "killed"))
    for folder in (whole, killed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    seconds, _ = run(whole)
    print(f"undisturbed: {seconds:.0f} s")
    moments = random.Random(SEED.value)
    rows = cli.output_folder() / "kills.csv"
    rows.unlink(missing_ok=True)
    with appending(rows, COLUMNS) as append:
        for start in range(KILLS.value + 1):
            last = start == KILLS.value
            limit = None if last else moments.uniform(0, seconds / 5)
            lived, was_killed = run(killed, limit)
            if not (was_killed or last):
                raise RuntimeError("It was done before all kills. Use more --steps.")
            row = {"start": start, "seconds": f"{lived:.1f}", "killed": was_killed}
            row["steps_saved"] = steps_saved(killed)
            if last:
                pairs = zip(losses(whole), losses(killed), strict=True)
                row["largest_loss_difference"] = max(abs(a - b) for a, b in pairs)
            append(row)
            print(row)


if __name__ == "__main__":
    app.run(main)
