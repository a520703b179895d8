"""A training step under a limit that the operating system enforces.

    python -m experiments.benchmarks.hard_limit

Two child processes in turn, one that trains with poet_jax within a budget and one that
trains with `jax.jit`, get everything ready: data, state, compiled executables. Then a
memory limit is set on them: what they hold at that moment, without cached files, what
malloc keeps idle and the step's arguments, plus the budget and 8 MiB. They run three
steps. The child with a budget finishes; the other is killed by the kernel. Both
outcomes are printed, and written to a file of the model's name in
experiments/results/hard_limit. Needs Linux and a memory cgroup that this user may make:
root has that in most containers. Takes about two minutes on two cores.

    python -m experiments.benchmarks.hard_limit --paged_state --model=bert12 \
        --dataset=words --batch_size=8 --budget=384MiB --time_limit=60

does the same with parameters and moments in a file. The child with `jax.jit`, whose
state alone exceeds the limit, makes it under the limit. Expect both to be killed: while
pages move, the process takes 10 to 25 MiB more than XLA counts.
"""

import json
import os
import signal
import subprocess
import sys

import jax
import optax
from absl import app, flags

import poet_jax
from experiments.benchmarks import memory
from experiments.program import child, program, result_flags, write_result
from experiments.steps import TrainingStep, flax_case, in_ram
from poet_jax.core.units import format_bytes

MODEL = flags.DEFINE_string("model", "resnet18", "Model; see experiments.models.")
DATASET = flags.DEFINE_string("dataset", "photos", "Dataset; see experiments.data.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Examples in a batch.", 1)
BUDGET = flags.DEFINE_string("budget", "40%", "Budget: a size or a percentage.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 25.0, "Seconds for the planner.")
PAGED_STATE = flags.DEFINE_bool(
    "paged_state", False, "Keep parameters and moments in a file between steps."
)
STEPS = flags.DEFINE_integer("steps", 3, "Steps under the limit.", 1)
result_flags("hard_limit")
CHILD = flags.DEFINE_enum(
    "child", None, ["poet_jax", "jax.jit"], "For the program's own children."
)
LIMIT = flags.DEFINE_integer("budget_bytes", None, "For the program's own children.")
SLACK_BYTES = 8 * 2**20


def train(kind: str) -> None:
    """Get ready, say so, wait for a line on standard input, and train."""
    case = flax_case(MODEL.value, BATCH_SIZE.value, DATASET.value)
    training = TrainingStep.of(case, optax.adamw(1e-3))
    step, budget_bytes = jax.jit(training.step, donate_argnums=0), LIMIT.value
    state = batch = None
    if kind == "poet_jax":
        store = poet_jax.FileStore()
        planner = poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value)
        step = poet_jax.schedule(
            training.step,
            BUDGET.value,
            planner=planner,
            donate_argnums=0,
            executor=poet_jax.HostExecutor(store),
        )
        state, batch = training.init()
        if PAGED_STATE.value:
            state = poet_jax.to_storage(state, store)
        budget_bytes = step.plan(state, batch).budget.memory_bytes
    elif PAGED_STATE.value:
        step.lower(*jax.eval_shape(training.init)).compile()
    else:
        state, batch = training.init()
    if state is not None:
        state, loss = jax.block_until_ready(step(state, batch))
    poet_jax.release()  # what the step left in RAM of state on storage
    memory.settle()
    ready = {"arguments": in_ram((state, batch)), "budget": budget_bytes}
    print(json.dumps(ready), flush=True)
    sys.stdin.readline()
    if state is None:
        state, batch = training.init()
    for _ in range(STEPS.value):
        state, loss = jax.block_until_ready(step(state, batch))
    print(json.dumps({"loss": float(loss)}), flush=True)


def outcome(kind: str, budget_bytes: int | None) -> dict[str, object]:
    """Run a child of `kind` under its limit, and say what became of it."""
    group = memory.MemoryGroup(f"poet_jax-{os.getpid()}")
    command = child(f"--child={kind}", f"--budget_bytes={budget_bytes or 0}")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        group.add(process.pid)
        assert process.stdout is not None and process.stdin is not None
        ready = json.loads(process.stdout.readline())
        allowed = ready["budget"] + SLACK_BYTES
        limit = group.limit(allowed - ready["arguments"])
        process.stdin.write("\n")
        process.stdin.flush()
        said = process.stdout.readline()
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        group.remove()
    ended = "finished" if code == 0 else f"exit status {code}"
    if code == -signal.SIGKILL:
        ended = "killed by the kernel"
    return {
        "step": kind,
        "outcome": ended,
        "budget_bytes": ready["budget"],
        "argument_bytes": ready["arguments"],
        "limit_bytes": limit,
        "loss": json.loads(said)["loss"] if said else None,
    }


@program
def main() -> None:
    if CHILD.value:
        train(CHILD.value)
        return
    ours = outcome("poet_jax", None)
    plain = outcome("jax.jit", ours["budget_bytes"])
    more = format_bytes(ours["budget_bytes"]), format_bytes(SLACK_BYTES)
    print(
        f"{MODEL.value}, batch {BATCH_SIZE.value}, {STEPS.value} steps, limited by the "
        f"operating system to what was held before, a budget of {more[0]} and {more[1]}"
    )
    for row in (ours, plain):
        print(f"  {row['step']:9s} {row['outcome']}")
    write_result(MODEL.value, {"rows": [ours, plain]})


if __name__ == "__main__":
    app.run(main)
