"""Measured steps: time and memory of whole training steps within budgets.

    python -m experiments.step_benchmark
    python -m experiments.step_benchmark --plot

The first command runs a training step with AdamW of each model, as `jax.jit`, as
`jax.jit` with `jax.checkpoint` around every block, and within budgets from 100 to 25 %
of keep-all's peak and 1.05 times the least that works, all in turns in one process per
model. It appends a row per budget to experiments/results/step_benchmark/steps.csv; rows
that are there already are not measured again. All of it takes about 90 minutes on two
cores; --models and --shares choose a part. The second command draws steps.png.

Seconds are medians over steps, ratios are medians over pairs of steps in turn. The
machine is not always as fast, so the nodes of a row, and its runs of them, are timed
before its steps and after them, between steps of `jax.jit`: planned and expected ratios
are of seconds over `jax.jit`'s beside them, and to be compared with the measured ratio.
The rise is of the process's high-water mark (VmHWM) in ten steps or more, one after the
other as in a training loop, over what the process held besides the step's arguments, so
it is to be compared with the budget. Each model's process measures this machine's rates
anew, and replaces the file at `poet_jax.host_path()`.

On an accelerator the models are larger ones, budgets are of its memory, and the rise is
of what its allocator was seen to have in use, asked again after every fifth of a
millisecond. Each row has a process of its own.
"""

import contextlib
import csv
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags, logging

import poet_jax
from experiments import memory
from experiments.steps import (
    flax_case,
    new_state,
    read_rows,
    training_step,
    unet_case,
)
from poet_jax.compile import Unit, compile_units
from poet_jax.fuse import timed
from poet_jax.simulate import expected_seconds
from poet_jax.timing import time_units

SHARES = flags.DEFINE_list(
    "shares", ["100", "75", "50", "35", "25", "min"], "Percentages of keep-all's peak."
)
MODELS = flags.DEFINE_list("models", None, "Names of models; all by default.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 30.0, "Seconds for each plan.")
SECONDS = flags.DEFINE_float("seconds", 30.0, "Seconds of steps for each budget.")
OUTPUT = flags.DEFINE_string(
    "output", "experiments/results/step_benchmark", "Folder for CSV and figure."
)
PLOT = flags.DEFINE_bool("plot", False, "Only draw the figure of the rows there are.")

CASES = {
    "mlp": functools.partial(flax_case, "mlp", 64, "digits"),
    "cnn": functools.partial(flax_case, "cnn", 64, "mnist"),
    "resnet18": functools.partial(flax_case, "resnet18", 64, "photos"),
    "resnet50": functools.partial(flax_case, "resnet50", 16, "photos"),
    "bert6": functools.partial(flax_case, "bert6", 8, "text"),
    "gpt12": functools.partial(flax_case, "gpt12:length=256", 4, "text"),
    "unet": unet_case,
}
LARGE_CASES = {"unet_large": functools.partial(unet_case, 512)}
ALL_CASES = CASES | LARGE_CASES
LEAST_PAIRS, MOST_PAIRS = 5, 2000
# Steps of ours alone whose memory is watched, for half of the seconds.
LEAST_WATCHED, MOST_WATCHED = 10, 40
# Steps of jax.jit, at least, and for how long, before nodes are timed and after that.
JIT_STEPS, JIT_SECONDS = 3, 0.3
# Steps after which losses are compared.
LOSS_STEPS = 3
# Steps of less are given another contestant's state before each turn.
SHORT_SECONDS = 1.0
COLUMNS = (
    "model", "share", "budget_bytes", "keep_all_bytes", "jit_bytes",
    "checkpoint_bytes", "status", "gap", "plan_seconds", "executables",
    "planned_seconds", "expected_seconds", "planned_before", "expected_before",
    "jit_before", "planned_after", "expected_after", "jit_after", "seconds",
    "jit_seconds", "checkpoint_seconds", "ratio", "checkpoint_ratio", "planned_ratio",
    "expected_ratio", "pairs", "planned_bytes", "peak_bytes", "rise_bytes",
    "watched_steps", "paged_bytes", "storage_seconds", "hidden_seconds",
    "loss_difference",
)  # fmt: skip


class Contestant:
    """A step with a state of its own and the seconds that it took."""

    def __init__(self, step, state):
        self.step, self.state = step, state
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def steps(self, batch) -> None:
        """Several that count, after one that does not."""
        self.run(batch)
        self.seconds.pop()
        count, deadline = 0, time.perf_counter() + JIT_SECONDS
        while count < JIT_STEPS or time.perf_counter() < deadline:
            self.run(batch)
            count += 1

    def turn(self, batch) -> None:
        """A step that counts, after one that does not: that one finds the heap and the
        caches as another contestant left them, which no step of a training loop does.
        """
        self.run(batch)
        self.seconds.pop()
        self.run(batch)

    def run(self, batch) -> None:
        start = time.perf_counter()
        self.state, loss = self.step(self.state, batch)
        jax.block_until_ready((self.state, loss))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))


def needed_bytes(jitted, *args) -> int:
    """What XLA says that a step needs: arguments, results and temporaries."""
    analysis = jitted.lower(*args).compile().memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def measure_model(name: str, shares: list[str], writer, flush) -> None:
    """Write the rows of one model."""
    poet_jax.host_path().unlink(missing_ok=True)  # storage is as fast as it is today
    optimizer = optax.adamw(1e-3)
    case = ALL_CASES[name]()
    params, rest, batch = case.init()
    fresh_state = functools.partial(new_state, optimizer, params, rest)
    step = training_step(case.loss, optimizer)
    checkpointed = training_step(ALL_CASES[name](checkpoint=True).loss, optimizer)
    plain = jax.jit(step, donate_argnums=0)
    checkpoint = jax.jit(checkpointed, donate_argnums=0)
    state = fresh_state()
    common: dict[str, Any] = {
        "model": name,
        "jit_bytes": needed_bytes(plain, state, batch),
        "checkpoint_bytes": needed_bytes(checkpoint, state, batch),
    }
    state_bytes = sum(x.nbytes for x in jax.tree.leaves((state, batch)))
    del state
    for share in shares:
        row = common | {"share": share}
        planner = poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value)
        scheduled = functools.partial(
            poet_jax.schedule, step, planner=planner, donate_argnums=0
        )
        start = time.perf_counter()
        try:
            within = scheduled(f"{share}%") if share != "min" else None
            if within is None:
                least = smallest_bytes(scheduled, fresh_state(), batch)
                within = scheduled(int(1.05 * least))
            schedule = within.plan(fresh_state(), batch)
        except poet_jax.BudgetTooSmall as error:
            row |= {"status": "IMPOSSIBLE" if error.exact else "NONE"}
            writer.writerow(row)
            flush()
            continue
        row |= {
            "plan_seconds": f"{time.perf_counter() - start:.1f}",
            "budget_bytes": schedule.budget.memory_bytes,
            "keep_all_bytes": schedule.baseline.peak_bytes,
            "planned_bytes": schedule.usage.peak_bytes,
            "planned_seconds": f"{schedule.usage.seconds:.6f}",
            "expected_seconds": f"{schedule.expected_seconds:.6f}",
            "status": schedule.plan.status.name,
            "gap": f"{schedule.plan.gap:.6f}",
            "executables": schedule.program.computes,
        }
        beside = functools.partial(timed_again, schedule, plain, fresh_state, batch)
        before = beside()
        row |= compare(within, plain, checkpoint, fresh_state, batch, state_bytes)
        row |= predictions(before, beside())
        logging.info("%s", row)
        writer.writerow(row)
        flush()


def timed_again(
    schedule: poet_jax.Schedule, plain, fresh_state, batch
) -> dict[str, float]:
    """Planned and expected seconds with nodes, and runs of them, as fast as they are
    now, and jax.jit's before and after that."""
    jit = Contestant(plain, fresh_state())
    jit.steps(batch)
    program, memory_bytes = schedule.program, schedule.budget.memory_bytes
    graph = program.graph
    nodes = [Unit.of(graph, number) for number in range(len(graph.nodes))]
    for executable in compile_units(graph, [*nodes, *program.units.values()]):
        executable.seconds = None
    seconds = time_units(graph, nodes, [math.inf] * len(nodes))
    costs = dataclasses.replace(schedule.costs, seconds=np.array(seconds, float))
    program = timed(program, costs, memory_bytes)
    jit.steps(batch)
    return {
        "planned": poet_jax.simulate(program, costs).seconds,
        "expected": expected_seconds(program, costs),
        "jit": statistics.median(jit.seconds),
    }


def predictions(before: dict[str, float], after: dict[str, float]) -> dict[str, str]:
    """What `timed_again` said before and after the steps of a row, and ratios to
    jax.jit's seconds, each the mean of the two."""
    both = {"before": before, "after": after}
    seconds = {
        f"{name}_{when}": f"{found[name]:.6f}"
        for when, found in both.items()
        for name in found
    }
    ratios = {
        name: statistics.mean(found[name] / found["jit"] for found in both.values())
        for name in ("planned", "expected")
    }
    return seconds | {f"{name}_ratio": f"{x:.4f}" for name, x in ratios.items()}


def smallest_bytes(scheduled, *args) -> int:
    """The smallest memory for which the planner finds a plan."""
    try:
        scheduled(1).plan(*args)
    except poet_jax.BudgetTooSmall as error:
        return error.smallest_bytes
    raise AssertionError("one byte was enough for a training step")


def compare(within, plain, checkpoint, fresh_state, batch, state_bytes):
    """Three contestants in turns, after steps of ours whose memory is watched."""
    ours = Contestant(within, fresh_state())
    ours.run(batch)  # compiles
    rise, watched = watch(ours, batch, state_bytes)
    others = [Contestant(x, fresh_state()) for x in (plain, checkpoint)]
    for other in others:
        for _ in range(LOSS_STEPS):
            other.run(batch)
    difference = abs(ours.losses[LOSS_STEPS - 1] - others[0].losses[LOSS_STEPS - 1])
    contestants = [ours, *others]
    chance = random.Random(0)
    for contestant in contestants:
        del contestant.seconds[:-1]
    deadline = time.perf_counter() + SECONDS.value
    while len(ours.seconds) <= LEAST_PAIRS or (
        time.perf_counter() < deadline and len(ours.seconds) <= MOST_PAIRS
    ):
        chance.shuffle(contestants)
        if ours.seconds[-1] < SHORT_SECONDS:
            exchange_states(contestants, chance)
        for contestant in contestants:
            contestant.turn(batch)
    for contestant in contestants:
        del contestant.seconds[0]  # before the turns
    run = within.last_run
    median, plain_median, checkpoint_median = (
        statistics.median(x.seconds) for x in (ours, *others)
    )
    ratios = [
        statistics.median(
            a / b for a, b in zip(x.seconds, others[0].seconds, strict=True)
        )
        for x in (ours, others[1])
    ]
    return {
        "seconds": f"{median:.6f}",
        "jit_seconds": f"{plain_median:.6f}",
        "checkpoint_seconds": f"{checkpoint_median:.6f}",
        "ratio": f"{ratios[0]:.4f}",
        "checkpoint_ratio": f"{ratios[1]:.4f}",
        "pairs": len(ours.seconds),
        "peak_bytes": run.peak_bytes,
        "rise_bytes": rise,
        "watched_steps": watched,
        "paged_bytes": run.bytes_paged_out + run.bytes_paged_in,
        "storage_seconds": f"{run.storage_seconds:.6f}",
        "hidden_seconds": f"{run.hidden_seconds:.6f}",
        "loss_difference": f"{difference:.2e}",
    }


def watch(ours: Contestant, batch, state_bytes: int) -> tuple[int, int]:
    """How far the process's high-water mark rises in how many steps of ours alone."""
    time.sleep(0.1)  # what XLA frees a little after the results are ready
    poet_jax.release()
    before = held_bytes() - state_bytes
    steps, deadline = 0, time.perf_counter() + SECONDS.value / 2
    with most_held() as most:
        while steps < LEAST_WATCHED or (
            steps < MOST_WATCHED and time.perf_counter() < deadline
        ):
            ours.run(batch)
            steps += 1
        return most() - before, steps


def held_bytes() -> int:
    """By the process, or on an accelerator by its allocator's count."""
    counts = jax.local_devices()[0].memory_stats()
    return memory.resident_bytes() if counts is None else counts["bytes_in_use"]


@contextlib.contextmanager
def most_held() -> Iterator[Callable[[], int]]:
    """While it lasts, what `held_bytes` was at most since it began."""
    if jax.default_backend() == "cpu":
        memory.reset_high_water()
        yield memory.high_water_bytes
    else:  # its own high-water mark has what autotuning took, and cannot be reset
        with memory.sampled(held_bytes) as most:
            yield most


def exchange_states(contestants: list[Contestant], chance: random.Random) -> None:
    """Deal the states out anew: one copy may lie better in memory than another, which
    was seen to make 4 % of a step of a millisecond."""
    states = [contestant.state for contestant in contestants]
    chance.shuffle(states)
    for contestant, state in zip(contestants, states, strict=True):
        contestant.state = state


def plot(rows: list[dict[str, str]], path: pathlib.Path) -> None:
    """Time over jax.jit's against memory over keep-all's, a line for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    # Okabe and Ito's colours, which are told apart without red or green.
    colours = ["#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00",
               "#CC79A7"]  # fmt: skip
    measured = {row["model"] for row in rows}
    names = [name for name in ALL_CASES if name in measured]
    for name, colour, marker in zip(names, colours, "osv^Dx*", strict=False):
        points = sorted(
            (
                100 * float(row["budget_bytes"]) / float(row["keep_all_bytes"]),
                float(row["ratio"]),
            )
            for row in rows
            if row["model"] == name and row["ratio"]
        )
        if points:
            axis.plot(*np.array(points).T, color=colour, marker=marker, label=name)
    axis.axhline(1, color="#999999", linewidth=0.8)
    axis.set_xlabel("memory budget (% of keep-all's peak)")
    axis.set_ylabel("measured step time over jax.jit's")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    # The process that starts the others leaves an accelerator's memory to them.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    on_cpu = jax.default_backend() == "cpu"
    names = MODELS.value or list(CASES if on_cpu else LARGE_CASES)
    unknown = sorted(set(names) - set(ALL_CASES))
    if unknown:
        raise app.UsageError(
            f"--models has {unknown}; the models are {list(ALL_CASES)}"
        )
    folder = pathlib.Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "steps.csv"
    # What one part leaves in memory is not the next one's.
    together = [",".join(SHARES.value)] if on_cpu else SHARES.value
    parts = list(itertools.product(names, together))
    if len(parts) > 1 and not PLOT.value:
        for name, shares in parts:
            subprocess.run(
                [sys.executable, "-m", "experiments.step_benchmark", *sys.argv[1:],
                 f"--models={name}", f"--shares={shares}"],
                check=True,
            )  # fmt: skip
    elif not PLOT.value:
        rows = read_rows(path)
        done = {(row["model"], row["share"]) for row in rows}
        shares = [x for x in SHARES.value if (names[0], x) not in done]
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if not rows:
                writer.writeheader()
            measure_model(names[0], shares, writer, file.flush)
    plot(read_rows(path), folder / "steps.png")


if __name__ == "__main__":
    app.run(main)
