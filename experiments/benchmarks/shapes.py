"""Does the budget hold for several shapes, several steps, and scratch of libraries?

    python -m experiments.benchmarks.shapes
    python -m experiments.benchmarks.shapes --only_missing

Every scenario runs in a process of its own, within the least budget in which all of its
steps can be planned and 2 % more, planned for a Raspberry Pi 4 and for this machine:

- five_shapes: a training step on batches of five sizes in turns;
- train_and_evaluate: a training step and an evaluation step in turns;
- sort, median, svd: a training step with an operation for which a library takes memory
  that XLA does not report.

It writes a row for each to experiments/results/shapes/shapes.csv as soon as it is
measured: the budget; what XLA counts in the compiled step that needs most, with the
scratch of libraries (compiled_bytes); and by how much the process's high-water mark
(VmHWM) rose over what it held besides a step's arguments (rise_bytes). Takes about five
minutes on two cores. Expect compiled_bytes of at most budget_bytes, and rise_bytes of
at most that and 8 MiB.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import poet_jax
from experiments.benchmarks import measuring, memory
from experiments.program import program, result_flags
from experiments.steps import in_ram
from poet_jax import cli
from poet_jax.cli import named_device

SIZE = flags.DEFINE_integer("size", 32768, "Examples in the largest batch.", 8)
WIDTH = flags.DEFINE_integer("width", 256, "Width of the network.", 8)
STEPS = flags.DEFINE_integer("steps", 12, "Steps that are watched.", 1)
SCENARIO_NAMES = flags.DEFINE_list("scenarios", None, "Scenarios; all by default.")
DEVICES = flags.DEFINE_list(
    "devices", ["RASPBERRY_PI_4", "this_machine"], "What steps are planned for."
)
result_flags("shapes")
COLUMNS = (
    "scenario", "device", "budget_bytes", "compiled_bytes", "rise_bytes",
    "beyond_bytes", "steps",
)  # fmt: skip
LAYERS, MORE = 4, 1.02


@dataclasses.dataclass(frozen=True)
class Call:
    """A step on a batch of `examples`: (weights, batch) -> (weights, loss), donating
    the weights, or -> results where it does not train."""

    step: Callable[..., Any]
    examples: int
    trains: bool = True


def forward(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def training(of_results: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent on `of_results` of what the network computes."""

    def loss(weights, x):
        return of_results(forward(weights, x))

    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        new = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        return new, value

    return step


def square(y):
    return jnp.mean(y**2)


def evaluate(weights, x):
    return jnp.tanh(x @ weights[0]) @ weights[1], square(forward(weights, x))


def of_sorted(y):
    return jnp.mean(jnp.sort(y, axis=0) * jnp.linspace(0, 1, len(y))[:, None])


def of_medians(y):
    return square(y - jnp.median(y, axis=0))


def of_singular_values(y):
    """On a part of the results that is as tall as wide, as it takes long."""
    return jnp.mean(jnp.linalg.svd(y[: y.shape[1]], compute_uv=False))


def scenarios(size: int) -> dict[str, list[Call]]:
    shares = (1.0, 0.92, 0.85, 0.79, 0.73)
    plain = training(square)
    return {
        "five_shapes": [Call(plain, int(share * size)) for share in shares],
        "train_and_evaluate": [Call(plain, size), Call(evaluate, size, trains=False)],
        "sort": [Call(training(of_sorted), size // 4)],
        "median": [Call(training(of_medians), size // 4)],
        "svd": [Call(training(of_singular_values), size // 4)],
    }


def measure(scenario: str, device: str) -> dict[str, Any]:
    options: dict[str, Any] = {"planner": poet_jax.greedy}
    if device != "this_machine":
        options["device"] = named_device(device)
    calls = scenarios(SIZE.value)[scenario]
    width = WIDTH.value
    weights = [
        jax.random.normal(key, (width, width)) / math.sqrt(width)
        for key in jax.random.split(jax.random.key(0), LAYERS)
    ]
    sizes = {call.examples for call in calls}
    batches = {n: jax.random.normal(jax.random.key(1), (n, width)) for n in sizes}

    def given(call):
        donated = {"donate_argnums": 0} if call.trains else {}
        return (call.step, weights, batches[call.examples]), options | donated

    budget_bytes = int(
        MORE
        * max(
            measuring.smallest_bytes(*args, **more) for args, more in map(given, calls)
        )
    )
    # One function for all shapes of a step, as in a training loop.
    within = {
        call.step: poet_jax.schedule(call.step, budget_bytes, **given(call)[1])
        for call in calls
    }
    compiled_bytes = max(
        within[call.step].plan(weights, batches[call.examples]).compiled_bytes
        for call in calls
    )

    def run(call):
        nonlocal weights
        results = within[call.step](weights, batches[call.examples])
        jax.block_until_ready(results)
        if call.trains:
            weights = results[0]

    for call in calls:
        run(call)
    rise = memory.Rise()
    for call in itertools.islice(itertools.cycle(calls), STEPS.value):
        arguments = in_ram((weights, batches[call.examples]))
        with rise.of(arguments):
            run(call)
    return {
        "budget_bytes": budget_bytes,
        "compiled_bytes": compiled_bytes,
        "rise_bytes": rise.most_bytes,
        "beyond_bytes": rise.most_bytes - budget_bytes,
        "steps": STEPS.value,
    }


@program
def main() -> None:
    if measuring.CHILD.value:
        print(json.dumps(measure(*measuring.CHILD.value)))
        return
    known = list(scenarios(SIZE.value))
    names = SCENARIO_NAMES.value or known
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(
            f"--scenarios has {unknown}. The scenarios are {', '.join(known)}. Use "
            "some of these, or no --scenarios for all."
        )
    measuring.fill(
        cli.output_folder() / "shapes.csv",
        COLUMNS,
        list(itertools.product(names, DEVICES.value)),
        measuring.in_process,
    )


if __name__ == "__main__":
    app.run(main)
