"""Draw the figure of a plan in docs/tutorials.

    python -m experiments.plan_figure

plans its step within 52 MiB for a Jetson TX2, and writes
docs/plan.png, in half a minute. Everything in the figure is planned: nothing runs.
"""

import pathlib

import jax
import jax.numpy as jnp
from absl import app

import poet_jax
from experiments.program import program

PATH = pathlib.Path(__file__).parent.parent / "docs" / "plan.png"


def loss_fn(weights, x, y):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def step(weights, x, y):
    loss, gradients = jax.value_and_grad(loss_fn)(weights, x, y)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


@program
def main() -> None:
    data = jax.ShapeDtypeStruct((8192, 256), jnp.float32)
    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    train = poet_jax.schedule(
        step,
        "52MiB",
        donate_argnums=0,
        device=poet_jax.devices.JETSON_TX2,
        planner=poet_jax.MilpPlanner(time_limit_seconds=10),
    )
    schedule = train.plan(weights, data, data)
    print(schedule)
    schedule.plot(PATH)


if __name__ == "__main__":
    app.run(main)
