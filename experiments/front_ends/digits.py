"""What the examples here share: a step on real digits, within a budget and by jax.jit.

A step takes (state, images, labels), images [256, 8, 8, 1] float32 and labels [256]
int32, and returns (state, loss).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import poet_jax
from experiments.data import load_dataset


def train(
    step: Callable, state: Any, budget: str, steps: int, **schedule_options: Any
) -> tuple[Any, list[tuple[float, float]], poet_jax.Schedule]:
    """Train with `step` from `state`, which is consumed.

    Returns the last state, of each step the losses (within the budget, by jax.jit), and
    the schedule. Raises AssertionError if a step took more than the budget.
    """
    plain, beside = jax.jit(step), jax.tree.map(jnp.copy, state)
    scheduled = poet_jax.schedule(step, budget, donate_argnums=0, **schedule_options)
    losses = []
    for batch in load_dataset("digits").batches(256, 0, steps):
        schedule = scheduled.plan(state, *batch)
        state, loss = scheduled(state, *batch)
        beside, expected = plain(beside, *batch)
        losses.append((float(loss), float(expected)))
        run = scheduled.last_run
        assert run is not None and run.peak_bytes <= schedule.budget.memory_bytes
    return state, losses, schedule


def main(step: Callable, state: Any) -> None:
    """Train, and print the plan and both losses of every step."""
    budget = flags.DEFINE_string("budget", "85%", "A size or a percentage.")
    steps = flags.DEFINE_integer("steps", 20, "Training steps.", 1)

    def run(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {argv[1:]}")
        planner = poet_jax.MilpPlanner(time_limit_seconds=10)
        _, losses, schedule = train(
            step, state, budget.value, steps.value, planner=planner
        )
        print(f"{schedule}\n\n  step    loss  jax.jit's")
        for number, (loss, expected) in enumerate(losses):
            print(f"{number:6d}{loss:8.4f}{expected:11.4f}")

    app.run(run)
