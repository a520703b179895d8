"""What the TPU compiler says of plans, without a TPU.

    pip install "poet_jax[tpu]"
    python -m experiments.benchmarks.tpu
    python -m experiments.benchmarks.tpu --models=bert6 --shares=50
    python -m experiments.benchmarks.tpu --models=bert6,gpt12 --means=paging

The compiler in libtpu compiles training steps for chips of a TPU v5e that are not
there. Arguments are `jax.ShapeDtypeStruct`s whose shardings are on those chips, and
`Scheduled.lower` plans for them. Budgets leave a step its arguments, and a share of
what XLA itself takes beside them under `jax.jit`. Each row goes to
experiments/results/tpu/tpu.csv as soon as it is there. All of it takes about an hour on
two cores, most of it for resnet50. Nothing runs. Plans of the first command repeat
nodes, and those of the third page to the host's memory; with --means=both they do what
is modelled to be faster.

| | step, with AdamW |
|---|---|
| bert6 | BERT-base's width, 6 layers, 16 windows of text |
| gpt12 | GPT-2 small's width, 12 layers, 8 windows of text |
| resnet50 | ResNet-50, 32 photos |
| stacked | causal decoder, 12 layers in a scan, width 512 |
| sharded | the same, an eighth of each array on each of eight chips |

Columns: means; share, of jit_temp_bytes; planned_bytes; budget_bytes; compiled_bytes;
temp_bytes and host_temp_bytes, which XLA takes on the chip and on its host;
paged_bytes, that lie on the host at once by the plan; modelled_ratio, of the plan's
seconds over keep-all's; compilations; seconds, to plan and compile. Expect
compiled_bytes at most budget_bytes.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import poet_jax
from experiments.benchmarks.loop_models import gpt, plain
from experiments.program import appending, program, read_rows, result_flags
from experiments.steps import TrainingStep, flax_case
from poet_jax import cli

MODELS = flags.DEFINE_list("models", None, "Names of models; all by default.")
GIVEN_SHARES = flags.DEFINE_list("shares", "75,50,35", "Percentages of XLA's own room.")
MEANS = flags.DEFINE_enum(
    "means", "remat", ["remat", "paging", "both"], "What plans may do with values."
)
result_flags("tpu")
COLUMNS = (
    "model", "means", "share", "nodes", "argument_bytes", "jit_temp_bytes",
    "budget_bytes", "status", "planned_bytes", "compiled_bytes", "temp_bytes",
    "host_temp_bytes", "paged_bytes", "modelled_ratio", "compilations", "seconds",
)  # fmt: skip
# What libtpu asks a cloud machine for otherwise.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
CHIPS = 8


def flax_step(model: str, batch_size: int, dataset: str) -> TrainingStep:
    return TrainingStep.of(flax_case(model, batch_size, dataset), optax.adamw(1e-3))


STEPS: dict[str, Callable[[], TrainingStep]] = {
    "bert6": functools.partial(flax_step, "bert6", 16, "text"),
    "gpt12": functools.partial(flax_step, "gpt12", 8, "text"),
    "resnet50": functools.partial(flax_step, "resnet50", 32, "photos"),
    "stacked": functools.partial(gpt, 12, plain, width=512, heads=8),
    "sharded": functools.partial(gpt, 12, plain, width=512, heads=8),
}


def chips() -> Sequence[Any]:
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4", chips_per_host_bounds=(2, 4, 1)
    )
    return topology.devices


def shapes(model: str) -> Any:
    """(state, batch) of a step, on chips."""
    there = chips()
    mesh = jax.sharding.Mesh(there, ("data",))

    def place(x: Any) -> jax.ShapeDtypeStruct:
        sharding: Any = SingleDeviceSharding(there[0])
        if model == "sharded":
            fit = [n for n, size in enumerate(x.shape) if size % CHIPS == 0]
            axis = max(fit, key=lambda n: x.shape[n], default=None)
            spec = P() if axis is None else P(*[None] * axis, "data")
            sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state, batch = jax.eval_shape(STEPS[model]().init)
    if model == "sharded":  # the examples, not the words of one
        rows = NamedSharding(mesh, P("data"))
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch
        )
        return jax.tree.map(place, state), batch
    return jax.tree.map(place, (state, batch))


def measure(model: str, share: int, args: Any, jit: Any) -> dict[str, Any]:
    step = STEPS[model]().step
    needed = jit.argument_size_in_bytes + jit.output_size_in_bytes
    needed += -jit.alias_size_in_bytes + jit.temp_size_in_bytes * share // 100
    row = {
        "model": model,
        "means": MEANS.value,
        "share": share,
        "argument_bytes": jit.argument_size_in_bytes,
        "jit_temp_bytes": jit.temp_size_in_bytes,
        "budget_bytes": needed,
    }
    means = MEANS.value
    planner = poet_jax.MilpPlanner(
        objective="time", remat=means != "paging", paging=means != "remat"
    )
    device = poet_jax.devices.TPU_V5E
    options: dict[str, Any] = {"donate_argnums": 0, "planner": planner}
    scheduled = poet_jax.schedule(step, needed, device=device, **options)
    start = time.perf_counter()
    try:
        schedule = scheduled.lower(*args)
    except poet_jax.BudgetTooSmall as error:
        return row | {"status": "IMPOSSIBLE" if error.exact else "NONE"}
    seconds = time.perf_counter() - start
    found = schedule.compile().xla.memory_analysis()
    usage, baseline = schedule.usage, schedule.baseline
    return row | {
        "nodes": len(schedule.graph.nodes),
        "status": schedule.plan.status.name,
        "planned_bytes": usage.peak_bytes,
        "compiled_bytes": schedule.compiled_bytes,
        "temp_bytes": found.temp_size_in_bytes,
        "host_temp_bytes": found.host_temp_size_in_bytes,
        "paged_bytes": usage.store_bytes,
        "modelled_ratio": f"{usage.seconds / baseline.seconds:.4f}",
        "compilations": schedule.compilations,
        "seconds": f"{seconds:.1f}",
    }


@program
def main() -> None:
    os.environ.update(ENVIRONMENT)
    path = cli.output_folder() / "tpu.csv"
    done = {(row["model"], row["means"], row["share"]) for row in read_rows(path)}
    with appending(path, COLUMNS) as append:
        for model in MODELS.value or STEPS:
            left = [
                share
                for share in GIVEN_SHARES.value
                if (model, MEANS.value, share) not in done
            ]
            if not left:
                continue
            args = shapes(model)
            jitted = jax.jit(STEPS[model]().step, donate_argnums=0)
            jit = jitted.lower(*args).compile().memory_analysis()
            for share in left:
                append(measure(model, int(share), args, jit))


if __name__ == "__main__":
    app.run(main)
