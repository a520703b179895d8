"""Fine-tuning of a language model within a budget, beside PyTorch and PEFT.

    pip install ".[language_model,torch]"
    python -m experiments.benchmarks.beside_torch

writes a model of 135 million random parameters in the public format, and trains it in a
process for each of `SYSTEMS`, with the same rows of random tokens; the processes take
their steps in turn. PyTorch is transformers' Llama with eager kernels, `checkpoint` its
gradient checkpointing or `jax.checkpoint` around each layer, and `budget` PyTorch's
memory budget, `torch._functorch.config.activation_memory_budget`, under torch.compile.
The task is adapters of rank 8 by AdamW, PEFT's for PyTorch.

Written to experiments/results/beside_torch: a row for each task and system.
`step_bytes` are the state in RAM and the rise of the process's high-water mark over
what it held before a step; `process_bytes` are all that the process holds more in a
step than after its imports, with what compilers left. PyTorch's arithmetic is in
float32, as that of JAX. Takes about ten minutes on two cores, and 16 GB of RAM.
"""

import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

from experiments.benchmarks import memory
from experiments.benchmarks.turns import steps_in_turn, train_in_turns
from experiments.program import program, read_rows, result_flags, write_rows
from poet_jax.core.units import format_bytes

RANK, RATE = 8, 1e-4


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, and within what.

    Attributes:
      update: of the experiment's `train.UPDATES`.
      batch, length: rows, and tokens of a row, of a step.
      budgets: of poet_jax, by the name of the system.
    """

    update: str
    batch: int
    length: int
    budgets: dict[str, str]


TASKS = {
    "lora": Task("lora", 1, 512, {"poet_jax": "768MiB", "poet_jax_int4": "512MiB"}),
}
# The share of activations that PyTorch keeps at most.
SHARE = 0.2
SYSTEMS = (
    "torch", "torch_checkpoint", "torch_budget", "jit", "jit_checkpoint", "poet_jax",
    "poet_jax_int4",
)  # fmt: skip
SIZE = flags.DEFINE_string("size", "135m", "Size of the model.")
ONLY_TASKS = flags.DEFINE_list("tasks", list(TASKS), "Tasks that are measured.")
ONLY = flags.DEFINE_list("systems", list(SYSTEMS), "Systems that are measured.")
STEPS = flags.DEFINE_integer("steps", 5, "Steps of each; the first compiles.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 20.0, "Seconds for the planner.")
FOLDER = flags.DEFINE_string("folder", None, "For the program's own children.")
CHILD = flags.DEFINE_string("child", None, "For the program's own children.")
result_flags("beside_torch")

COLUMNS = (
    "task", "system", "batch", "length", "budget_bytes", "compiled_bytes", "step_bytes",
    "process_bytes", "first_seconds", "seconds", "tokens_per_second", "first_loss",
    "last_loss",
)  # fmt: skip


@dataclasses.dataclass
class Trained:
    """A step of a system.

    Attributes:
      run: takes a step with a batch of rows, and gives its loss.
      state_bytes: of the state that lies in RAM between steps.
      facts: columns of its row.
    """

    run: Callable[[np.ndarray], float]
    state_bytes: Callable[[], int]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def torch_step(task: Task, system: str) -> Trained:
    """A step by PyTorch."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(
        FOLDER.value, dtype=torch.float32, attn_implementation="eager"
    )
    model.config.use_cache = False
    if task.update == "lora":
        from peft import LoraConfig, get_peft_model

        matrices = [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=matrices)
        model = get_peft_model(model, config)
    model.train()
    if system == "torch_checkpoint":
        if task.update == "lora":
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE)
    called = model
    if system == "torch_budget":
        import torch._functorch.config

        torch._functorch.config.activation_memory_budget = SHARE
        called = torch.compile(model)

    def run(rows: np.ndarray) -> float:
        tokens = torch.from_numpy(rows.astype(np.int64))
        logits = called(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def state_bytes() -> int:
        moments = [x for state in optimizer.state.values() for x in state.values()]
        return sum(x.nbytes for x in [*model.parameters(), *moments])

    return Trained(run, state_bytes)


def jax_step(task: Task, system: str) -> Trained:
    """A step by `jax.jit` or by poet_jax, whose state is in a file."""
    import jax
    import optax
    from flax import nnx

    import poet_jax
    from experiments.language_model import checkpoint, train
    from experiments.language_model.models import loss_fn, placing
    from experiments.steps import in_ram

    class Checkpointed(nnx.Module):
        """A layer whose activations are computed again."""

        def __init__(self, layer: nnx.Module):
            self.layer = layer

        def __call__(self, x, angles, cache, start):
            call = nnx.remat(lambda layer, x, angles: layer(x, angles, None, 0)[0])
            return call(self.layer, x, angles), None

    store = poet_jax.FileStore() if system.startswith("poet_jax") else None
    quantize = "int4" if system.endswith("int4") else None
    model: Any = checkpoint.load(FOLDER.value, place=placing(quantize, store))
    if system == "jit_checkpoint":
        model.layers = nnx.List(Checkpointed(layer) for layer in model.layers)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE))
    if store is not None:
        optimizer = train.on_storage(optimizer, store)
    step = poet_jax.train_step(
        model,
        task.budgets.get(system, "1TiB"),
        loss_fn=loss_fn,
        optimizer=optimizer,
        update=train.update_of(task.update, RANK, model),
        planner=poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value),
        executor=poet_jax.HostExecutor(store),
    )

    def state_bytes() -> int:
        return in_ram(nnx.state((model, step.optimizer)))

    if store is None:
        jitted = nnx.jit(step.update, donate_argnums=(0, 1))

        def run(rows: np.ndarray) -> float:
            return float(jitted(model, step.optimizer, jax.device_put(rows)))

        return Trained(run, state_bytes)
    shape = task.batch, task.length + 1
    schedule = step.plan(jax.ShapeDtypeStruct(shape, np.int32))
    print(schedule, file=sys.stderr)
    facts = {
        "budget_bytes": schedule.budget.memory_bytes,
        "compiled_bytes": schedule.compiled_bytes,
    }
    return Trained(lambda rows: float(step(jax.device_put(rows))), state_bytes, facts)


def measure(task: Task, system: str) -> None:
    """Train, and print one line of JSON."""
    is_torch = system.startswith("torch")
    if is_torch:
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401
    else:
        import flax.nnx  # noqa: F401
        import optax  # noqa: F401

        import poet_jax.flax  # noqa: F401
    imported_bytes = memory.resident_bytes()
    config = json.loads((pathlib.Path(FOLDER.value) / "config.json").read_text())
    vocabulary, random = config["vocab_size"], np.random.default_rng(1)
    shape = STEPS.value, task.batch, task.length + 1
    batches = iter(random.integers(0, vocabulary, shape, dtype=np.int32))
    start = time.perf_counter()
    step = (torch_step if is_torch else jax_step)(task, system)
    ready_seconds = time.perf_counter() - start
    losses: list[float] = []
    seconds: list[float] = []
    before_bytes = 0
    for taken in steps_in_turn(
        STEPS.value, lambda: losses.append(step.run(next(batches)))
    ):
        seconds.append(taken)
        if len(seconds) == 1:  # it has compiled
            memory.settle()
            before_bytes = memory.resident_bytes() - step.state_bytes()
            memory.reset_high_water()
    most_bytes = memory.high_water_bytes()
    print(
        json.dumps(
            {
                **step.facts,
                "step_bytes": most_bytes - before_bytes,
                "process_bytes": most_bytes - imported_bytes,
                "first_seconds": round(ready_seconds + seconds[0], 2),
                "seconds": round(statistics.median(seconds[1:]), 3),
                "first_loss": round(losses[0], 5),
                "last_loss": round(losses[-1], 5),
            }
        )
    )


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a task, by a child for each system."""
    task = TASKS[name]
    systems = [
        x for x in ONLY.value if x in task.budgets or not x.startswith("poet_jax")
    ]
    rows = train_in_turns([f"{name}:{system}" for system in systems], STEPS.value)
    size = task.batch, task.length
    return [
        {
            "task": name,
            "system": system,
            "batch": task.batch,
            "length": task.length,
            **row,
            "tokens_per_second": round(math.prod(size) / row["seconds"], 2),
        }
        for system, row in zip(systems, rows, strict=True)
    ]


def write_model(folder: str) -> None:
    from experiments.language_model import checkpoint
    from experiments.language_model.models import SIZES, make

    checkpoint.save(make(SIZES[SIZE.value]), pathlib.Path(folder))


@program
def main() -> None:
    if CHILD.value:
        name, system = CHILD.value.split(":")
        measure(TASKS[name], system)
        return
    for flag, known in ((ONLY_TASKS, TASKS), (ONLY, SYSTEMS)):
        if unknown := sorted(set(flag.value) - set(known)):
            raise ValueError(
                f"--{flag.name}={','.join(unknown)} is unknown. Known are "
                f"{', '.join(known)}. Use one or more of these."
            )
    path = pathlib.Path(flags.FLAGS.output) / "beside_torch.csv"
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        sys.argv.append(f"--folder={folder}")  # of the children
        for name in ONLY_TASKS.value:
            new = rows_of(name)
            measured = {(name, row["system"]) for row in new}
            kept = [
                old
                for old in read_rows(path)
                if (old["task"], old["system"]) not in measured
            ]
            write_rows(path, COLUMNS, sorted([*kept, *new], key=_place))
            for row in new:
                print(
                    f"{name}, {row['system']}: {row['tokens_per_second']} tokens per "
                    f"second, {format_bytes(row['step_bytes'])} in a step, "
                    f"{format_bytes(row['process_bytes'])} in all"
                )


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return list(TASKS).index(row["task"]), SYSTEMS.index(row["system"])


if __name__ == "__main__":
    app.run(main)
