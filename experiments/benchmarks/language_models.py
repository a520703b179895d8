"""Fine-tuning of language models within a budget, beside `jax.jit` with all in RAM.

    python -m experiments.benchmarks.language_models

trains each of `CASES` in two processes whose steps take turns: within the budget, with
parameters and the optimizer's state in a file, and with `jax.jit`, the same quantized
kernels and everything in RAM. Parameters and tokens are random, the same in both.
Written to experiments/results/language_models: a row for each case. `rise_bytes` are
those of the process's high-water mark over what it held besides the state in RAM before
the second step. Takes about half an hour on two cores, and 12 GB of RAM and of disk.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import optax
from absl import app, flags
from flax import nnx

import poet_jax
from experiments.benchmarks import memory
from experiments.benchmarks.turns import steps_in_turn, train_in_turns
from experiments.language_model import train
from experiments.language_model.models import SIZES, loss_fn, make, placing
from experiments.program import program, read_rows, result_flags, write_rows
from experiments.steps import in_ram
from poet_jax.core.units import format_bytes
from poet_jax.stores import Store


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and within what.

    Attributes:
      size: of the model, of `SIZES`.
      update: of `train.UPDATES`; "lora" is of rank 8.
      quantize: of kernels that are not trained.
      batch, length: rows, and tokens of a row, of a step.
    """

    size: str
    update: str
    quantize: str | None
    batch: int
    length: int
    budget: str


CASES = {
    "lora_1b_int4": Case("1b", "lora", "int4", 1, 256, "800MiB"),
    "lora_1b_int8": Case("1b", "lora", "int8", 1, 256, "800MiB"),
    "lora_3b_int4": Case("3b", "lora", "int4", 1, 256, "1800MiB"),
    "lora_135m_int4": Case("135m", "lora", "int4", 2, 512, "768MiB"),
    "full_125m": Case("125m", "full", None, 1, 1024, "512MiB"),
}
ONLY = flags.DEFINE_list("cases", list(CASES), "Cases that are measured.")
STEPS = flags.DEFINE_integer("steps", 6, "Steps of each; the first compiles.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 6.0, "Seconds for the planner.")
CHILD = flags.DEFINE_string("child", None, "For the program's own children.")
result_flags("language_models")

COLUMNS = (
    "case", "size", "update", "quantize", "batch", "length", "budget_bytes", "status",
    "gap", "planned_bytes", "compiled_bytes", "rise_bytes", "first_seconds", "seconds",
    "bytes_paged_in", "bytes_paged_out", "storage_seconds", "waiting_seconds",
    "jit_rise_bytes", "jit_first_seconds", "jit_seconds", "ratio", "tokens_per_second",
    "jit_tokens_per_second", "loss_difference",
)  # fmt: skip


def measure(case: Case, is_ours: bool) -> None:
    """Train, and print one line of JSON."""
    store = poet_jax.FileStore() if is_ours else None
    model = make(SIZES[case.size], place=placing(case.quantize, store))
    keys = jax.random.split(jax.random.key(1), STEPS.value)
    shape = case.batch, case.length + 1
    words = SIZES[case.size].vocabulary
    batches = [jax.random.randint(key, shape, 0, words) for key in keys]
    start = time.perf_counter()
    step = poet_jax.train_step(
        model,
        case.budget,
        loss_fn=loss_fn,
        optimizer=_optimizer(store),
        update=train.update_of(case.update, 8, model),
        planner=poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value),
        executor=poet_jax.HostExecutor(store),
    )
    result: dict[str, Any] = {}
    run: Any = step
    if is_ours:
        schedule = step.plan(batches[0])
        print(schedule, file=sys.stderr)
        result |= {
            "budget_bytes": schedule.budget.memory_bytes,
            "status": schedule.plan.status.name,
            "gap": round(schedule.plan.gap, 6),
            "planned_bytes": schedule.usage.peak_bytes,
            "compiled_bytes": schedule.compiled_bytes,
        }
    else:
        jitted = nnx.jit(step.update, donate_argnums=(0, 1))

        def run(batch):
            return jitted(model, step.optimizer, batch)

    ready_seconds = time.perf_counter() - start
    waiting, losses, rise = iter(batches), [], memory.Rise()

    def take() -> None:
        state = nnx.state((model, step.optimizer))
        with rise.of(in_ram(state)):
            losses.append(float(run(next(waiting))))

    seconds = []
    for taken in steps_in_turn(STEPS.value, take):
        seconds.append(taken)
        if len(seconds) == 1:  # it has compiled
            poet_jax.release()
            rise = memory.Rise()
    result |= {
        "losses": losses,
        "first_seconds": ready_seconds + seconds[0],
        "seconds": statistics.median(seconds[1:]),
        "rise_bytes": rise.most_bytes,
    }
    if is_ours:
        last = step.last_run
        for name in ("bytes_paged_in", "bytes_paged_out"):
            result[name] = getattr(last, name)
        for name in ("storage_seconds", "waiting_seconds"):
            result[name] = round(getattr(last, name), 3)
    print(json.dumps(result))


def _optimizer(store: Store | None) -> optax.GradientTransformation:
    return train.optimizer_of("adamw", 1e-4, STEPS.value, store)


def row_of(name: str) -> dict[str, Any]:
    """The row of a case, by its two children."""
    case = CASES[name]
    ours, plain = train_in_turns((f"{name}:poet_jax", f"{name}:jax.jit"), STEPS.value)
    tokens = case.batch * case.length
    pairs = list(zip(ours.pop("losses"), plain["losses"], strict=True))
    row = {"case": name, **dataclasses.asdict(case), **ours}
    del row["budget"]
    return row | {
        "first_seconds": round(ours["first_seconds"], 2),
        "seconds": round(ours["seconds"], 3),
        "jit_rise_bytes": plain["rise_bytes"],
        "jit_first_seconds": round(plain["first_seconds"], 2),
        "jit_seconds": round(plain["seconds"], 3),
        "ratio": round(ours["seconds"] / plain["seconds"], 4),
        "tokens_per_second": round(tokens / ours["seconds"], 2),
        "jit_tokens_per_second": round(tokens / plain["seconds"], 2),
        "loss_difference": f"{max(abs(a - b) for a, b in pairs):.1e}",
    }


@program
def main() -> None:
    if CHILD.value:
        name, kind = CHILD.value.split(":")
        measure(CASES[name], kind == "poet_jax")
        return
    if unknown := sorted(set(ONLY.value) - CASES.keys()):
        raise ValueError(
            f"--cases={','.join(unknown)} is unknown. The cases are "
            f"{', '.join(CASES)}. Use one or more of these."
        )
    path = pathlib.Path(flags.FLAGS.output) / "language_models.csv"
    for name in ONLY.value:
        row = row_of(name)
        kept = [old for old in read_rows(path) if old["case"] != name]
        rows = sorted([*kept, row], key=lambda x: list(CASES).index(x["case"]))
        write_rows(path, COLUMNS, rows)
        print(
            f"{name}: {row['tokens_per_second']} tokens per second in "
            f"{format_bytes(row['budget_bytes'])}, ratio {row['ratio']}, rise "
            f"{format_bytes(row['rise_bytes'])}; jax.jit "
            f"{format_bytes(row['jit_rise_bytes'])}"
        )


if __name__ == "__main__":
    app.run(main)
