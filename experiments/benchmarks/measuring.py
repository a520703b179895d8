"""What the benchmarks of steps share: first steps, steps in turns, and rows, each of
which is measured in a process of its own."""

import contextlib
import itertools
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags, logging

import poet_jax
from experiments.benchmarks import memory
from experiments.program import child, read_rows, result_flags, write_rows
from experiments.steps import TrainingStep, in_ram
from poet_jax import cli

CHILD = flags.DEFINE_list("child", None, "For the program's own children.")
ONLY_MISSING = flags.DEFINE_bool(
    "only_missing", False, "Measure no row that is in the file already."
)

LEAST = "least"  # the name of the smallest share
LEAST_SHARE = "5%"
LEAST_PAIRS, MOST_PAIRS = 5, 2000
# Steps of one alone whose memory is watched.
LEAST_WATCHED, MOST_WATCHED = 10, 40
# Steps after which losses are compared.
LOSS_STEPS = 3
# Steps of less are given another contestant's state before each turn.
SHORT_SECONDS = 1.0
BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
STEP_COLUMNS = (
    "model", "share", "budget_bytes", "keep_all_bytes", "status", "gap",
    "plan_seconds", "compile_seconds", "first_seconds", "jit_compile_seconds",
    "jit_first_seconds", "first_ratio", "planned_bytes", "compiled_bytes",
    "rise_bytes", "watched_steps", "jit_bytes", "jit_rise_bytes", "seconds",
    "jit_seconds", "ratio", "pairs", "paged_bytes", "loss_difference",
)  # fmt: skip


class Contestant:
    """A step with a state of its own and the seconds that it took."""

    def __init__(self, step, state):
        self.step, self.state = step, state
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def run(self, batch) -> None:
        start = time.perf_counter()
        self.state, loss = self.step(self.state, batch)
        # All of a program is there at once, and a loop asks for the loss alone.
        loss.block_until_ready()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    def turn(self, batch) -> None:
        """A step that counts, after one that does not: that one finds the heap and the
        caches as another contestant left them, which no step of a training loop does.
        """
        self.run(batch)
        self.seconds.pop()
        self.run(batch)


def watched(contestant: Contestant, batch, seconds: float) -> tuple[int, int]:
    """How far steps of it alone raise what the process holds, and how many steps."""
    rise, steps = memory.Rise(), 0
    deadline = time.perf_counter() + seconds
    with rise.of(in_ram((contestant.state, batch))):
        while steps < LEAST_WATCHED or (
            steps < MOST_WATCHED and time.perf_counter() < deadline
        ):
            contestant.run(batch)
            steps += 1
    return rise.most_bytes, steps


def in_turns(contestants: Sequence[Contestant], batch, seconds: float) -> None:
    """Turns of all for so long, in an order that changes; their `seconds` afterwards
    are of these alone."""
    chance, order = random.Random(0), list(contestants)
    short = max(contestant.seconds[-1] for contestant in order) < SHORT_SECONDS
    for contestant in order:
        contestant.seconds.clear()
    deadline, pairs = time.perf_counter() + seconds, 0
    while pairs < LEAST_PAIRS or (
        pairs < MOST_PAIRS and time.perf_counter() < deadline
    ):
        chance.shuffle(order)
        if short:
            # One copy of a state may lie better in memory than another, which was seen
            # to make 4 % of a step of a millisecond.
            states = [contestant.state for contestant in order]
            chance.shuffle(states)
            for contestant, state in zip(order, states, strict=True):
                contestant.state = state
        for contestant in order:
            contestant.turn(batch)
        pairs += 1


def median_ratio(ours: Contestant, theirs: Contestant) -> float:
    """The median over turns of the seconds of one over those of the other."""
    pairs = zip(ours.seconds, theirs.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)


@contextlib.contextmanager
def compiling() -> Iterator[Callable[[], float]]:
    """While it lasts, seconds so far in which XLA's compiler was at work, in one thread
    or in several."""
    times: list[tuple[float, float]] = []

    def listen(event: str, seconds: float, **_) -> None:
        if event == BACKEND_COMPILE:
            now = time.perf_counter()
            times.append((now - seconds, now))

    def so_far() -> float:
        total, end = 0.0, 0.0
        for start, stop in sorted(times):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield so_far
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def needed_bytes(compiled: jax.stages.Compiled) -> int:
    """What XLA says that a step needs: arguments, results and temporaries."""
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def smallest_bytes(function, *args, start: str = "1B", **options) -> int:
    """The budget `start` if there is a schedule within it, or the smallest that works;
    `options` are those of `poet_jax.schedule`."""
    try:
        schedule = poet_jax.schedule(function, start, **options).plan(*args)
    except poet_jax.BudgetTooSmall as error:
        return error.smallest_bytes
    return schedule.budget.memory_bytes


def step_options(time_limit: float) -> dict[str, Any]:
    """Of `poet_jax.schedule`, for the step of a benchmark."""
    planner = poet_jax.MilpPlanner(time_limit_seconds=time_limit)
    return {"planner": planner, "donate_argnums": 0}


def under_jit(step, begin, batch) -> tuple[Contestant, Any, float, float]:
    """A step after its first call under `jax.jit`, on a copy of the state `begin`.

    Returns it, what it was compiled to, and the seconds of that first call and of XLA's
    compiler in there.
    """
    contestant = Contestant(None, jax.tree.map(jnp.copy, begin))
    with compiling() as compiled_seconds:
        start = time.perf_counter()
        contestant.step = jitted = jax.jit(step, donate_argnums=0)
        # JAX keeps what it compiled, for the first call.
        compiled = jitted.lower(contestant.state, batch).compile()
        contestant.run(batch)
        first = time.perf_counter() - start
        return contestant, compiled, first, compiled_seconds()


def measure_step(
    case: TrainingStep,
    budget: str,
    *,
    seconds: float,
    time_limit: float,
    beside: Mapping[str, Callable[..., Any]] | None = None,
) -> dict[str, Any]:
    """The columns of a row, but for `model` and `share`.

    Steps of `beside` take their turns, too; a column `<name>_ratio` has their time over
    that of `jax.jit`, and `<name>_bytes` what XLA says that they need. `first_seconds`
    are of tracing, planning, compiling and one step; `compile_seconds` of XLA's
    compiler in there, and `plan_seconds` those of `Scheduled.plan` without it.
    """
    begin, batch = case.init()
    # What any first step has to wait for is not that of one or the other.
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((64, 64))))
    poet_jax.host()
    others, needs, seconds_of = {}, {}, {}
    for name, step in {"jit": case.step, **(beside or {})}.items():
        others[name], needs[name], *seconds_of[name] = under_jit(step, begin, batch)
    jit_first, jit_compile = seconds_of["jit"]
    row = {f"{name}_bytes": needed_bytes(compiled) for name, compiled in needs.items()}
    jax.clear_caches()  # what was traced for jax.jit is traced anew for us
    for other in others.values():
        other.run(batch)  # and compiled anew
    options = step_options(time_limit)
    step = poet_jax.schedule(case.step, budget, **options)
    ours = Contestant(step, jax.tree.map(jnp.copy, begin))
    with compiling() as compiled_seconds:
        start = time.perf_counter()
        try:
            schedule = ours.step.plan(ours.state, batch)
        except poet_jax.BudgetTooSmall as error:
            return row | {"status": "IMPOSSIBLE" if error.exact else "NONE"}
        plan_seconds = time.perf_counter() - start - compiled_seconds()
        ours.run(batch)
        first = time.perf_counter() - start
        compile_seconds = compiled_seconds()
    rise, steps = watched(ours, batch, seconds / 2)
    jit = others["jit"]
    jit_rise, _ = watched(jit, batch, seconds / 4)
    difference = abs(ours.losses[LOSS_STEPS - 1] - jit.losses[LOSS_STEPS - 1])
    in_turns([ours, *others.values()], batch, seconds)
    run = ours.step.last_run
    row |= {
        "budget_bytes": schedule.budget.memory_bytes,
        "keep_all_bytes": schedule.baseline.peak_bytes,
        "status": schedule.plan.status.name,
        "gap": f"{schedule.plan.gap:.6f}",
        "plan_seconds": f"{plan_seconds:.2f}",
        "compile_seconds": f"{compile_seconds:.2f}",
        "first_seconds": f"{first:.2f}",
        "jit_compile_seconds": f"{jit_compile:.2f}",
        "jit_first_seconds": f"{jit_first:.2f}",
        "first_ratio": f"{first / jit_first:.3f}",
        "planned_bytes": schedule.usage.peak_bytes,
        "compiled_bytes": schedule.compiled_bytes,
        "rise_bytes": rise,
        "watched_steps": steps,
        "jit_rise_bytes": jit_rise,
        "seconds": f"{statistics.median(ours.seconds):.6f}",
        "jit_seconds": f"{statistics.median(jit.seconds):.6f}",
        "ratio": f"{median_ratio(ours, jit):.4f}",
        "pairs": len(ours.seconds),
        "paged_bytes": run.bytes_paged_out + run.bytes_paged_in,
        "loss_difference": f"{difference:.2e}",
    }
    for name in beside or {}:
        row[f"{name}_ratio"] = f"{median_ratio(others[name], jit):.4f}"
    return row


def least_budget(case: TrainingStep, time_limit: float) -> str:
    """A twentieth of keep-all's peak, or the smallest budget that works."""
    args = case.init()
    options = step_options(time_limit)
    return f"{smallest_bytes(case.step, *args, start=LEAST_SHARE, **options)}B"


def step_flags(folder: str, *, shares: str, seconds: float, time_limit: float) -> None:
    """Define what `run_steps` reads, with these defaults."""
    flags.DEFINE_list("models", None, "Names of models; all by default.")
    flags.DEFINE_list("shares", shares, "Percentages of keep-all's peak, and least.")
    flags.DEFINE_float("time_limit", time_limit, "Seconds for each plan.")
    flags.DEFINE_float("seconds", seconds, "Seconds of steps for each budget.")
    result_flags(folder, plots=True)


def run_steps(
    cases: Mapping[str, Callable[[], TrainingStep]],
    plot: Callable[[list[dict[str, str]], pathlib.Path], None],
    *,
    file: str,
    models: Sequence[str] | None = None,
    columns: Sequence[str] = STEP_COLUMNS,
    beside: Callable[[str], Mapping[str, Callable[..., Any]]] | None = None,
) -> None:
    """The main of a program that measures steps: a row for each model and share.

    `models` are measured if none are named; `beside` says what `measure_step` takes as
    that for a model.
    """
    options = flags.FLAGS
    if CHILD.value:
        model, budget = CHILD.value
        if budget == LEAST:
            said: Any = least_budget(cases[model](), options.time_limit)
        else:
            said = measure_step(
                cases[model](),
                budget,
                seconds=options.seconds,
                time_limit=options.time_limit,
                beside=beside and beside(model),
            )
        print(json.dumps(said))
        return
    names = options.models or models or list(cases)
    unknown = sorted(set(names) - set(cases))
    if unknown:
        raise ValueError(
            f"--models has {unknown}. The models are {', '.join(cases)}. Use some of "
            "these, or no --models for all."
        )

    def row(model: str, share: str) -> dict[str, Any]:
        least = share == LEAST
        return in_process(model, in_process(model, LEAST) if least else f"{share}%")

    path = cli.output_folder() / f"{file}.csv"
    if not options.plot:
        fill(path, columns, list(itertools.product(names, options.shares)), row)
    rows = read_rows(path)
    if not rows:
        sys.exit(
            f"Rows of {path} were to be drawn, and there are none. Use the same "
            "command without --plot to measure them."
        )
    plot(rows, path.with_suffix(".png"))


def in_process(*asked: str) -> Any:
    """What this program says on its last line, of JSON, as a child that is `asked`."""
    command = child(f"--child={','.join(asked)}")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def fill(
    path: pathlib.Path,
    columns: Sequence[str],
    parts: Sequence[tuple[str, ...]],
    measure: Callable[..., dict[str, Any]],
) -> None:
    """As `filled`; raises SystemExit at the end if a row failed."""
    if failed := filled(path, columns, parts, measure):
        sys.exit(
            f"{len(failed)} of {len(parts)} rows ended in an error, which is above: "
            f"{failed}. Use the same command with --only_missing to try these again."
        )


def filled(
    path: pathlib.Path,
    columns: Sequence[str],
    parts: Sequence[tuple[str, ...]],
    measure: Callable[..., dict[str, Any]],
) -> list[tuple[str, ...]]:
    """Measure a row for each of `parts`, the values of its first columns, and write it
    at once: over an older one, or at the end of the file.

    A row whose process fails is not written, and does not stop the others. Returns the
    parts of these.
    """
    failed = []
    for part in parts:
        rows = read_rows(path)
        names = columns[: len(part)]
        if rows and tuple(rows[0]) != tuple(columns):
            sys.exit(
                f"Rows were to be added to {path}, whose columns are others: it is of "
                "another version. Move it away, or use another --output."
            )
        places = [tuple(row[name] for name in names) for row in rows]
        if part in places and ONLY_MISSING.value:
            continue
        try:
            row = dict(zip(names, part, strict=True)) | measure(*part)
        except subprocess.CalledProcessError as error:
            logging.error("%s: %s", ", ".join(part), error)
            failed.append(part)
            continue
        logging.info("%s", row)
        if part in places:
            rows[places.index(part)] = row
        else:
            rows.append(row)
        write_rows(path, columns, rows)
    return failed
