"""A model whose parameters and moments exceed the budget: BERT-base in 384 MiB.

    python -m experiments.benchmarks.paged_state

BERT-base with the vocabulary of the original (110 million parameters) and AdamW has a
state of 1.2 GiB. It is made in a file and trained from there, with at most 384 MiB of
array data in RAM. A second process trains the same model with `jax.jit` and everything
in RAM, a step of each in turns. Written to experiments/results/paged_state: losses of
both, seconds per step, the bytes that XLA counts in the compiled step, and the rise of
the process's high-water mark over what it held besides the state, the most and of each
step. Takes about five minutes on two cores.
Expect losses that agree to 1e-5, and 1.6 times the seconds of `jax.jit`, or more where
the disk is slower: a step moves 3.1 GB.
"""

import json
import statistics
import sys

import jax
import optax
from absl import app, flags

import poet_jax
from experiments.benchmarks import memory
from experiments.benchmarks.turns import steps_in_turn, train_in_turns
from experiments.models import load_for_model, loss_fn, make_model
from experiments.program import program, result_flags, write_result
from experiments.steps import in_ram
from poet_jax.core.units import format_bytes, format_seconds

MODEL = flags.DEFINE_string("model", "bert12", "Model; see experiments.models.")
DATASET = flags.DEFINE_string("dataset", "words", "Dataset; see experiments.data.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Examples in a batch.", 1)
BUDGET = flags.DEFINE_string("budget", "384MiB", "Budget of poet_jax.")
STEPS = flags.DEFINE_integer("steps", 10, "Steps of each.", 1)
TIME_LIMIT = flags.DEFINE_float("time_limit", 60.0, "Seconds for the planner.")
result_flags("paged_state")
CHILD = flags.DEFINE_enum(
    "child", None, ["poet_jax", "jax.jit"], "For the program's own children."
)


def train(kind: str) -> None:
    """Train, and print one line of JSON."""
    dataset = load_for_model(MODEL.value, DATASET.value)
    batches = list(dataset.batches(BATCH_SIZE.value, 0, STEPS.value))
    store = poet_jax.FileStore()
    step = poet_jax.train_step(
        make_model(MODEL.value, "linen", dataset_spec=dataset.spec, seed=0),
        BUDGET.value,
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-4),
        planner=poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value),
        executor=poet_jax.HostExecutor(store),
    )
    key, run, result = jax.random.key(0), step, {"step": kind}
    if kind == "poet_jax":
        state = step.init(key, batches[0], store=store)
        schedule = step.plan(state, batches[0])
        print(schedule, file=sys.stderr)
        result |= {
            "budget_bytes": schedule.budget.memory_bytes,
            "planned_bytes": schedule.usage.peak_bytes,
            "compiled_bytes": schedule.compiled_bytes,
            "planned_seconds": schedule.usage.seconds,
            "gap": schedule.plan.gap,
        }
    else:
        run = jax.jit(step.update, donate_argnums=0)
        state = step.init(key, batches[0])
    result["state_bytes"] = sum(
        x.nbytes for x in jax.tree.leaves(state) if hasattr(x, "nbytes")
    )
    losses, rises, waiting = [], [], iter(batches)
    rise = memory.Rise()

    def take() -> None:
        nonlocal state
        batch = next(waiting)
        with rise.of(in_ram((state, batch))):
            state, metrics = run(state, batch)
            losses.append(float(metrics["loss"]))

    seconds = []
    for taken in steps_in_turn(len(batches), take):
        seconds.append(taken)
        rises.append(rise.last_bytes)
        if len(losses) < 2:  # the first step has compiled
            poet_jax.release()  # what it left in RAM of state on storage
            rise = memory.Rise()
    # The first step compiles.
    result |= {
        "losses": losses,
        "seconds": statistics.median(seconds[1:] or seconds),
        "rises_bytes": rises,
        "rise_bytes": max(rises if kind == "poet_jax" else rises[1:] or rises),
    }
    if kind == "poet_jax":
        last = step.last_run
        result |= {
            "bytes_paged_in": last.bytes_paged_in,
            "bytes_paged_out": last.bytes_paged_out,
            "storage_seconds": last.storage_seconds,
            "waiting_seconds": last.waiting_seconds,
        }
    print(json.dumps(result))


@program
def main() -> None:
    if CHILD.value:
        train(CHILD.value)
        return
    ours, plain = train_in_turns(("poet_jax", "jax.jit"), STEPS.value)
    pairs = list(zip(ours["losses"], plain["losses"], strict=True))
    result = {
        "ratio": ours["seconds"] / plain["seconds"],
        "largest_loss_difference": max(abs(a - b) for a, b in pairs),
        "rows": [ours, plain],
    }
    print(f"{MODEL.value}, state of {format_bytes(ours['state_bytes'])}")
    for row in (ours, plain):
        rise = format_bytes(row["rise_bytes"])
        print(
            f"  {row['step']:9s} {format_seconds(row['seconds'])} a step, RAM {rise}, "
            f"last loss {row['losses'][-1]:.6f}"
        )
    print(
        f"  ratio {result['ratio']:.2f}, losses differ by at most "
        f"{result['largest_loss_difference']:.1e}"
    )
    write_result(MODEL.value, result)


if __name__ == "__main__":
    app.run(main)
