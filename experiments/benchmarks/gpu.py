"""Steps on a GPU: a budget beside `jax.jit` and the best of `jax.checkpoint`.

    python -m experiments.benchmarks.gpu
    python -m experiments.benchmarks.gpu --only_missing
    python -m experiments.benchmarks.gpu --size=small --shares=50,checkpoint --minutes=9

The first command ends after six minutes at most (--minutes), and is for a machine with
a GPU of 80 GB or more and 16 cores. By an estimate, which no GPU has confirmed, its 50
rows take about as long: a dozen seconds to start, 20 to 40 to plan and compile, side by
side, and three to draw arrays and to take steps, one row after the other. What is not
done by then is left out, and said; the second command measures what the file lacks. The
third needs no GPU: 20 rows of small models take about eight minutes on two cores. Each
row goes to experiments/results/gpu/gpu.csv as soon as it is measured.

| | large | small |
|---|---|---|
| unet | U-Net, 512 images of 64x64x3, float32 | 4 images, width 8 |
| gpt2_scan | GPT-2 medium's size, 8 x 1,024 words, bfloat16 | 2 layers, width 64 |
| gpt2_loop | the same, with layers in a Python loop instead of a scan | the same |
| resnet50 | ResNet-50, 256 images of 32x32x3, float32 | ResNet-18, width 4 |
| llama_lora | LoRA of rank 8 on TinyLlama 1.1B, 4 x 1,024 words, bfloat16 | 2 layers |

All are trained by AdamW on data drawn at random. float32 is in JAX's default precision,
TF32 on a GPU. GPT-2 computes in bfloat16, with parameters and moments in float32; all
of Llama but the loss is in bfloat16. Small models are in float32.

Each row has a process of its own, since an allocator's peak only grows. The processes
of some rows (--at_once) plan and compile side by side; then each in its turn draws its
arrays and takes its steps, while no other does anything.

Systems are `jax.jit`; `jax.checkpoint` around every block, which saves nothing
("checkpoint") or what the policy of that name says; and poet_jax, whose share is a
percentage of what keep-all needs, or the `jax.checkpoint` whose compiled_bytes are its
budget. --shares names both, in the order in which they are measured. Plans are of least
time, for rates that are measured first or those of a profile (--prices=H200), and page
to the host only with --paging.

Columns: compiled_bytes, by XLA's own count; allocator_peak_bytes, the allocator's
high-water mark, which has what autotuning and drawing took, too (none on a CPU);
rise_bytes, seen in use during steps, to be compared with the budget; planned_seconds
and modelled_ratio, of these over keep-all's; plan_seconds, with tracing, beside
compile_seconds; first_seconds, of both and one step; seconds, the median of eight steps
after two; ratio, of these over those of `jax.jit`; loss, of the third step. The status
of a budget that is too small is IMPOSSIBLE or NONE, and of a step that does not fit the
GPU OUT_OF_MEMORY.

Expect compiled_bytes at most budget_bytes; a ratio of at most 1.15 in a share of 50;
and, in the memory of the fastest `jax.checkpoint`, one of at most its own. The table
that is printed at the end has these ratios, and memory over that of `jax.jit`.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import app, flags

import poet_jax
from experiments.benchmarks import measuring, memory
from experiments.benchmarks.gpu_models import MODELS
from experiments.program import child, markdown, program, read_rows, result_flags
from experiments.steps import in_ram
from poet_jax import cli

JIT, OURS = "jax.jit", "poet_jax"
POLICIES = {"checkpoint": None} | {
    name: getattr(jax.checkpoint_policies, name)
    for name in ("dots_saveable", "dots_with_no_batch_dims_saveable")
}
COLUMNS = (
    "device", "size", "model", "system", "share", "budget_bytes", "status",
    "compiled_bytes", "allocator_peak_bytes", "rise_bytes", "planned_seconds",
    "modelled_ratio", "plan_seconds", "compile_seconds", "first_seconds", "seconds",
    "ratio", "loss",
)  # fmt: skip
WARM_UP, STEPS, WATCHED = 2, 8, 2
Part = tuple[str, ...]

SIZE = flags.DEFINE_enum("size", "large", ["large", "small"], "Of the models.")
NAMES = flags.DEFINE_list("models", list(MODELS), "Names of models.")
SHARES = flags.DEFINE_list(
    "shares", ["50", *POLICIES, "75", "35"], "Percentages, and kinds of jax.checkpoint."
)
MINUTES = flags.DEFINE_float("minutes", 6.0, "Minutes after which nothing runs.")
AT_ONCE = flags.DEFINE_integer(
    "at_once", max(1, (os.cpu_count() or 1) // 2), "Rows that compile side by side."
)
TIME_LIMIT = flags.DEFINE_float("time_limit", 6.0, "Seconds for each plan.")
PAGING = flags.DEFINE_bool("paging", False, "Whether plans may page to the host.")
PRICES = flags.DEFINE_string(
    "prices", "host", "Device that plans are priced for, such as H200, or this machine."
)
result_flags("gpu")


def prepared(model: str, system: str, budget: str) -> Callable[[], dict[str, Any]]:
    """Compile a step; a function that runs it, and returns the columns of its row."""
    again = {"checkpoint": True, "policy": POLICIES.get(system)}
    case = MODELS[model](SIZE.value == "small", **again if system in POLICIES else {})
    shapes = jax.eval_shape(case.init)
    row: dict[str, Any] = {}
    with measuring.compiling() as compiling:
        start = time.perf_counter()
        if system == OURS:
            planner = poet_jax.MilpPlanner(
                time_limit_seconds=TIME_LIMIT.value,
                objective="time",
                paging=PAGING.value,
            )
            device: Any = cli.named_device(PRICES.value)
            options = {"device": device, "planner": planner, "donate_argnums": 0}
            step: Any = poet_jax.schedule(case.step, budget, **options)
            try:
                schedule = step.plan(*shapes)
            except poet_jax.BudgetTooSmall as error:
                row["status"] = "IMPOSSIBLE" if error.exact else "NONE"
                return lambda: row
            usage, baseline = schedule.usage, schedule.baseline
            row["budget_bytes"] = schedule.budget.memory_bytes
            row["status"] = schedule.plan.status.name
            row["compiled_bytes"] = schedule.compiled_bytes
            row["planned_seconds"] = f"{usage.seconds:.6f}"
            row["modelled_ratio"] = f"{usage.seconds / baseline.seconds:.4f}"
        else:
            step = jax.jit(case.step, donate_argnums=0).lower(*shapes).compile()
            row["compiled_bytes"] = measuring.needed_bytes(step)
        seconds = time.perf_counter() - start
        row["plan_seconds"] = f"{seconds - compiling():.2f}"
        row["compile_seconds"] = f"{compiling():.2f}"
    init = jax.jit(case.init).lower().compile()

    def run() -> dict[str, Any]:
        try:
            return row | timed(step, *init(), seconds)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return row | {"status": "OUT_OF_MEMORY"}

    return run


def timed(step: Any, state: Any, batch: Any, ready_seconds: float) -> dict[str, Any]:
    """The columns that need steps to be run; `state` is donated."""
    one = measuring.Contestant(step, state)
    for _ in range(WARM_UP + STEPS):
        one.run(batch)
    first, counted = one.seconds[0], one.seconds[WARM_UP:]
    counts = jax.local_devices()[0].memory_stats() or {}
    rise = memory.Rise()
    for _ in range(WATCHED):
        with rise.of(in_ram((one.state, batch))):
            one.run(batch)
    return {
        "allocator_peak_bytes": counts.get("peak_bytes_in_use"),
        "rise_bytes": rise.most_bytes,
        "first_seconds": f"{ready_seconds + first:.2f}",
        "seconds": f"{statistics.median(counted):.6f}",
        "loss": one.losses[measuring.LOSS_STEPS - 1],
    }


def together(
    path: pathlib.Path, budgets: Mapping[Part, str], seconds: float
) -> list[Part]:
    """Measure rows whose processes get ready side by side; those that are not there
    after so many seconds, when the processes are ended."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = {
        part: subprocess.Popen(child(f"--child={part[2]},{part[3]},{budget}"), **pipes)
        for part, budget in budgets.items()
    }

    def end() -> None:
        for one in children.values():
            one.kill()

    def measure(*part: str) -> dict[str, Any]:
        one = children[part]
        said, _ = one.communicate("\n")
        if one.returncode:
            raise subprocess.CalledProcessError(one.returncode, one.args)
        row = json.loads(said)
        jit = row if part[3] == JIT else rows_of(path, part).get((JIT, ""), {})
        if row.get("seconds") and jit.get("seconds"):
            row["ratio"] = f"{float(row['seconds']) / float(jit['seconds']):.4f}"
        return row

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        for one in children.values():
            assert one.stdout is not None
            one.stdout.readline()  # it is ready, or has failed
        return measuring.filled(path, COLUMNS, list(children), measure)
    finally:
        timer.cancel()
        end()


def rows_of(path: pathlib.Path, part: Part) -> dict[Part, dict[str, str]]:
    """Rows of the same device, size and model, by system and share."""
    return {
        (row["system"], row["share"]): row
        for row in read_rows(path)
        if tuple(row[name] for name in COLUMNS[:3]) == part[:3]
    }


def budget_of(path: pathlib.Path, part: Part) -> str | None:
    """None if it is the memory of a `jax.checkpoint` that was not measured."""
    *_, system, share = part
    if system == OURS and share in POLICIES:
        nbytes = rows_of(path, part).get((share, ""), {}).get("compiled_bytes")
        return nbytes and f"{nbytes}B"
    return f"{share}%" if system == OURS else ""


def summary(path: pathlib.Path, parts: Sequence[Part]) -> str:
    """Ratios and parts of the memory of `jax.jit`, a line for each model."""
    lines = [("", "half of keep-all", "best jax.checkpoint", "in its memory")]
    for part in dict.fromkeys(part[:3] for part in parts):
        rows = {key: row for key, row in rows_of(path, part).items() if row["ratio"]}
        said = {key: f"{float(row['ratio']):.2f}" for key, row in rows.items()}
        if jit := rows.get((JIT, "")):
            for key, row in rows.items():
                used = int(row["compiled_bytes"]) / int(jit["compiled_bytes"])
                said[key] += f" in {100 * used:.0f} %"
        ways = [key for key in rows if key[0] in POLICIES]
        best = min(ways, key=lambda key: float(rows[key]["ratio"]), default=("", ""))
        keys = (OURS, "50"), best, (OURS, best[0])
        half, theirs, ours = (said.get(key, "") for key in keys)
        lines.append((part[2], half, f"{best[0]} {theirs}", ours))
    return markdown(lines)


@program
def main() -> None:
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # compiles fast
    if measuring.CHILD.value:
        run = prepared(*measuring.CHILD.value)
        print("ready", flush=True)
        sys.stdin.readline()  # its turn
        print(json.dumps(run()))
        return
    deadline = time.monotonic() + 60 * MINUTES.value
    # This process leaves a GPU's memory to the others, and each of them to the rest.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if unknown := sorted(set(NAMES.value) - set(MODELS)):
        raise ValueError(
            f"--models has {unknown}. The models are {', '.join(MODELS)}. Use some of "
            "these, or no --models for all."
        )
    if SIZE.value == "large" and jax.default_backend() == "cpu":
        raise ValueError(
            "Large models were to be measured, and JAX has no GPU here. Use "
            "--size=small, or install JAX for the GPU."
        )
    cli.named_device(PRICES.value)  # measures this machine while nothing else runs
    path = cli.output_folder() / "gpu.csv"
    key = jax.devices()[0].device_kind, SIZE.value
    beside = [(JIT, ""), *((x, "") for x in SHARES.value if x in POLICIES)]
    parts, missing = [], []
    for systems in (beside, [(OURS, share) for share in SHARES.value]):
        of_all = [(*key, name, *system) for system in systems for name in NAMES.value]
        parts += of_all
        left = [
            part
            for part in of_all
            if not (measuring.ONLY_MISSING.value and part[3:] in rows_of(path, part))
        ]
        while left:
            now, left = left[: AT_ONCE.value], left[AT_ONCE.value :]
            seconds = deadline - time.monotonic()
            budgets = {part: budget_of(path, part) for part in now}
            known = {part: x for part, x in budgets.items() if x is not None}
            missing += [part for part in now if seconds <= 0 or part not in known]
            if seconds > 0:
                missing += together(path, known, seconds)
    print(summary(path, parts))
    if missing:
        sys.exit(
            f"{len(missing)} of {len(parts)} rows are missing: {missing}. They ended "
            f"in an error, which is above, or were not done in {MINUTES.value:g} "
            "minutes. Use the same command with --only_missing to try these again."
        )


if __name__ == "__main__":
    app.run(main)
