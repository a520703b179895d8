"""What does a budget cost steps in the style of what people write?

    python -m experiments.benchmarks.clients
    python -m experiments.benchmarks.clients --models=sam,muon --shares=100,60

The steps are the clients of tests/clients, which the tests hold to the numbers of
`jax.jit`: Flax, Equinox and Haiku-like models, optimizers of optax, solvers, PPO. Each
takes 0.1 to 1 ms. It runs in 100 % of what keep-all needs, in turns with `jax.jit`, in
a process of its own. Each row goes to experiments/results/clients/clients.csv as soon
as it is measured; --only_missing measures only rows that the file lacks. All of it
takes four minutes on two cores.

Columns are those of `experiments.benchmarks.measuring.measure_step`. Expect seconds to
be up to 10 us more than those of `jax.jit`, as each call first sees to it that no other
step runs. That is a ratio of 0.92 to 1.07. Expect first_seconds as those of `jax.jit`,
and below 100 % two seconds more. A share that is too small has no ratio.
"""

import itertools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
from absl import app, flags

from experiments.benchmarks import measuring
from experiments.program import program, result_flags
from experiments.steps import TrainingStep
from poet_jax import cli

TESTS = pathlib.Path(__file__).parents[2] / "tests"
MODELS = flags.DEFINE_list("models", None, "Names of clients; all by default.")
SHARES = flags.DEFINE_list("shares", "100", "Percentages of keep-all's peak.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 6.0, "Seconds for each plan.")
SECONDS = flags.DEFINE_float("seconds", 4.0, "Seconds of steps for each budget.")
result_flags("clients")


def training_step(name: str) -> TrainingStep:
    """The client `name` as a step whose result is a number."""
    client = clients()[name]()

    def step(state, batch):
        state, result = client.step(state, batch)
        numbers = [
            x for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.number)
        ]
        return state, sum(jnp.mean(x, dtype=jnp.float32) for x in numbers)

    return TrainingStep(lambda: (client.state, client.batches[0]), step)


def clients():
    """Those of the tests, by name."""
    sys.path.insert(0, str(TESTS))
    from clients import libraries, optimizers, programs  # noqa: F401
    from clients.case import CLIENTS

    return CLIENTS


@program
def main() -> None:
    if measuring.CHILD.value:
        name, share = measuring.CHILD.value
        row = measuring.measure_step(
            training_step(name),
            f"{share}%",
            seconds=SECONDS.value,
            time_limit=TIME_LIMIT.value,
        )
        print(json.dumps(row))
        return
    names = MODELS.value or list(clients())
    measuring.fill(
        cli.output_folder() / "clients.csv",
        measuring.STEP_COLUMNS,
        list(itertools.product(names, SHARES.value)),
        measuring.in_process,
    )


if __name__ == "__main__":
    app.run(main)
