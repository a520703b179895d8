"""Steps on eight devices: a budget of each device's memory beside `jax.jit`.

    python -m experiments.benchmarks.shards
    python -m experiments.benchmarks.shards --models=full --shares=50

A CPU is given eight devices, which share its cores. A causal decoder of 12 layers in a
scan, trained by AdamW, lies on them in three ways:

| | parameters and moments | tokens |
|---|---|---|
| data | all on each device | an eighth on each |
| full | an eighth of each array on each device | an eighth on each |
| tensor | products of a layer over four devices | a half on each four |

The first command runs each in 100, 75 and 50 % of what keep-all needs, and in the
smallest budget that works, in turns with `jax.jit` of the same step and with
`jax.checkpoint` around each layer. It writes each row to
experiments/results/shards/shards.csv as soon as it is measured. All of it takes about
20 minutes on two cores.

Columns are those of `experiments.benchmarks.measuring.measure_step`. Bytes are those of
each device, but rise_bytes, of the process. Expect compiled_bytes at most budget_bytes
in every row, and for `full` far less than jit_bytes.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import app
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.benchmarks import measuring
from experiments.benchmarks.loop_models import Scan, checkpoint, gpt, plain
from experiments.program import program
from experiments.steps import TrainingStep

DEVICES = 8
LAYERS, WIDTH = 12, 256
# Axes of a layer's stacked kernels that the tensor layout cuts.
CUT = {"qkv": 2, "up": 2, "out": 1, "down": 1}

measuring.step_flags("shards", shares="100,75,50,least", seconds=6.0, time_limit=6.0)
COLUMNS = (*measuring.STEP_COLUMNS, "checkpoint_bytes", "checkpoint_ratio")


def data(path: Any, x: jax.Array) -> P:
    return P()


def full(path: Any, x: jax.Array) -> P:
    """Along the longest axis that can be cut, of stacked arrays not the layers'."""
    axes = range(1 if x.ndim > 2 else 0, x.ndim)
    fit = [axis for axis in axes if x.shape[axis] % DEVICES == 0]
    return _at(max(fit, key=lambda axis: x.shape[axis])) if fit else P()


def tensor(path: Any, x: jax.Array) -> P:
    names = {getattr(key, "key", None) for key in path}
    cut = names.intersection(CUT)
    return _at(CUT[cut.pop()], "model") if cut else P()


def _at(axis: int, name: str = "data") -> P:
    return P(*[None] * axis, name)


LAYOUTS = {"data": data, "full": full, "tensor": tensor}


def case(layout: str, scan: Scan = plain) -> TrainingStep:
    shape, names = (
        ((2, 4), ("data", "model")) if layout == "tensor" else ((8,), ("data",))
    )
    whole = gpt(LAYERS, scan, width=WIDTH)

    def init():
        mesh = jax.make_mesh(shape, names, (jax.sharding.AxisType.Auto,) * len(names))
        state, tokens = whole.init()

        def place(path: Any, x: jax.Array) -> jax.Array:
            return jax.device_put(x, NamedSharding(mesh, LAYOUTS[layout](path, x)))

        state = jax.tree.map_with_path(place, state)
        return state, jax.device_put(tokens, NamedSharding(mesh, P("data")))

    return TrainingStep(init, whole.step)


CASES = {name: functools.partial(case, name) for name in LAYOUTS}


def beside(layout: str) -> Mapping[str, Callable[..., Any]]:
    return {"checkpoint": case(layout, checkpoint).step}


def no_plot(rows: list[dict[str, str]], path: pathlib.Path) -> None:
    """The table in docs/benchmarks/steps.md shows all rows."""


@program
def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    measuring.run_steps(CASES, no_plot, file="shards", columns=COLUMNS, beside=beside)


if __name__ == "__main__":
    app.run(main)
