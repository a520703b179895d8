"""Training through loops: a budget beside what JAX offers for a scan.

    python -m experiments.benchmarks.loops
    python -m experiments.benchmarks.loops --models=lstm,wave --shares=10
    python -m experiments.benchmarks.loops --plot

The first command runs each step in 50, 20 and 10 % of what keep-all needs, in a
process of its own and in turns with `jax.jit` of the same step, with `jax.checkpoint`
around the body, and with two nested scans of which the inner one is checkpointed. It
writes each row to experiments/results/loops/loops.csv as soon as it is measured. All of
it takes about half an hour on two cores. The third command draws loops.png.

| | loop | trained |
|---|---|---|
| gpt12, gpt24, gpt48 | causal decoder of 12, 24, 48 stacked layers, width 128 | AdamW |
| lstm | LSTM of 1,000 steps, width 128, that adds up marked numbers | Adam |
| ode | neural ODE of 2,000 steps of Heun's rule, width 64 | Adam |
| wave | wave equation on 64 x 64 points, 10,000 steps, for its speed | Adam |
| vocabulary | no loop: logits of 2,048 tokens over 128,000 words | SGD |
| attention | no loop: causal attention over 8,192 tokens, 2 heads | SGD |

For the last two, `jax.checkpoint` is around the body of a scan over 16 blocks of
tokens, written by hand.

Columns are those of `experiments.benchmarks.measuring.measure_step`. Expect
compiled_bytes at most budget_bytes in every row, and in 10 % a ratio of at most that of
the nested scans (nested_ratio) in less memory (nested_bytes).
"""

import math
import pathlib
from collections.abc import Callable
from typing import Any

from absl import app

from experiments.benchmarks import measuring
from experiments.benchmarks.loop_models import MODELS, checkpoint, nested, plain
from experiments.program import program
from poet_jax.viz.figures import drawn

measuring.step_flags("loops", shares="50,20,10", seconds=6.0, time_limit=6.0)
BESIDE = ("checkpoint", "nested")
COLUMNS = (
    *measuring.STEP_COLUMNS,
    *(f"{name}_{what}" for name in BESIDE for what in ("bytes", "ratio")),
)
CASES = {name: lambda make=make: make(plain) for name, make in MODELS.items()}


def beside(model: str) -> dict[str, Callable[..., Any]]:
    """The same step with what JAX offers instead of a budget."""
    ways = {"checkpoint": checkpoint, "nested": nested}
    return {name: MODELS[model](ways[name]).step for name in BESIDE}


def plot(rows: list[dict[str, str]], path: pathlib.Path) -> None:
    """Time over memory of each step, as parts of those of `jax.jit`."""
    rows = [row for row in rows if row["ratio"]]
    names = [name for name in MODELS if name in {row["model"] for row in rows}]
    styles = {"checkpoint": ("#E69F00", "jax.checkpoint"),
              "nested": ("#009E73", "nested scans, checkpointed")}  # fmt: skip
    shares = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    with drawn(path, 1.2 + 2.0 * math.ceil(len(names) / 2)) as figure:
        axes = figure.subplots(math.ceil(len(names) / 2), 2, squeeze=False)
        for axis, name in zip(axes.flat, names, strict=False):
            own = [row for row in rows if row["model"] == name]
            jit_bytes = float(own[0]["jit_bytes"])
            points = sorted(
                (float(row["compiled_bytes"]) / jit_bytes, float(row["ratio"]))
                for row in own
            )
            label = "poet_jax, in a budget"
            axis.plot(*zip(*points, strict=True), "o-", color="#0072B2", label=label)
            for way, (colour, label) in styles.items():
                used = float(own[0][f"{way}_bytes"]) / jit_bytes
                style = {"color": colour, "label": label}
                axis.plot([used], [float(own[0][f"{way}_ratio"])], "s", **style)
            axis.plot([1], [1], "k*", label="jax.jit")
            axis.set_xscale("log")
            low, _ = axis.get_xlim()
            ticks = [share for share in shares if share > low]
            axis.set_xticks(ticks, [f"{100 * share:g}" for share in ticks])
            axis.set_xticks((), minor=True)
            axis.set_ylim(0, None)
            axis.set_title(name)
            axis.set_xlabel("memory, % of jax.jit's")
            axis.set_ylabel("time over jax.jit's")
        for axis in axes.flat[len(names) :]:
            axis.set_axis_off()
        handles = axes.flat[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=2)


@program
def main() -> None:
    measuring.run_steps(CASES, plot, file="loops", columns=COLUMNS, beside=beside)


if __name__ == "__main__":
    app.run(main)
