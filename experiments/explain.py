"""Print a plan and its reasons, and draw it. Nothing is trained and no array is made.

    python -m experiments.explain --model=cnn --device=JETSON_TX2 --budget=75%
    python -m experiments.explain --instance=path.json --budget=50%

The first plans the step that experiments.train would run with the same flags, on its
shapes; it takes about 30 s on two cores, most of it to compile nodes. With
--device=host, the default, nodes are timed on zeros, too. The second plans an instance
of poet_jax.load_instance. The folder --output, outputs/explain by default, gets
plan.png, matrices.png, graph.dot, trace.json (for ui.perfetto.dev), report.html, and
graph.svg where Graphviz is installed and there are no more than 300 nodes. Energies are
always modelled.
"""

import logging
import pathlib
import shutil

import jax
import optax
from absl import app, flags
from flax import nnx

import poet_jax
from experiments import train
from experiments.models import load_for_model, loss_fn, make_model
from poet_jax.api.schedule import make_schedule
from poet_jax.viz.reasons import ESTIMATE

DRAWN_NODES = 300  # more take Graphviz minutes

# Flags of experiments.train that mean the same here, so that --help lists them.
for name in (
    "model", "framework", "dataset", "data_folder", "budget", "device", "planner",
    "solver", "objective", "time_limit", "plan_cache", "batch_size", "learning_rate",
    "seed", "output",
):  # fmt: skip
    flags.declare_key_flag(name)

INSTANCE = flags.DEFINE_string(
    "instance", None, "A planner instance, as JSON, instead of a model."
)
VALUES = flags.DEFINE_integer(
    "values", 20, "How many values are explained, the largest first.", lower_bound=0
)


def plan_model(planner, device) -> poet_jax.Schedule:
    """The schedule of the step that `experiments.train` runs, from shapes alone."""
    dataset = load_for_model(
        train.MODEL.value, train.DATASET.value, train.DATA_FOLDER.value
    )
    optimizer = optax.adamw(train.LEARNING_RATE.value)
    framework, seed = train.FRAMEWORK.value, train.SEED.value

    def make():
        return make_model(
            train.MODEL.value, framework, dataset_spec=dataset.spec, seed=seed
        )

    def make_optimizer(model):
        return nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    model = nnx.eval_shape(make) if framework == "nnx" else make()
    if framework == "nnx":
        optimizer = nnx.eval_shape(make_optimizer, model)
    step = poet_jax.train_step(
        model,
        train.make_budget(train.BUDGET.value, device),
        loss_fn=loss_fn,
        optimizer=optimizer,
        device=device,
        planner=planner,
        plan_cache=train.PLAN_CACHE.value,
    )
    batch = next(dataset.batches(train.BATCH_SIZE.value, seed, 1))
    if framework == "nnx":
        return step.plan(batch)
    return step.plan(jax.eval_shape(step.init, jax.random.key(seed), batch), batch)


def explain() -> poet_jax.Schedule:
    """Plan as the flags say, print and draw; returns the schedule."""
    planner = train.make_planner(
        train.PLANNER.value,
        train.SOLVER.value,
        train.OBJECTIVE.value,
        train.TIME_LIMIT.value,
    )
    if INSTANCE.value is not None:
        graph, costs = poet_jax.load_instance(INSTANCE.value)
        schedule = make_schedule(graph, costs, train.BUDGET.value or "80%", planner)
    else:
        schedule = plan_model(planner, train.make_device(train.DEVICE.value))
    print(schedule)
    print(f"\n{ESTIMATE}")
    largest = sorted(schedule.reasons(), key=lambda x: (-x.nbytes, x.value))
    for reason in largest[: VALUES.value]:
        print(f"- {reason}")
    if len(largest) > VALUES.value:
        print(f"- and {len(largest) - VALUES.value} more, all of them in report.html")
    folder = pathlib.Path(train.OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    schedule.plot(folder / "plan.png")
    schedule.plot_matrices(folder / "matrices.png")
    schedule.to_dot(folder / "graph.dot")
    schedule.to_perfetto(folder / "trace.json")
    schedule.to_html(folder / "report.html")
    if shutil.which("dot") and len(schedule.graph.nodes) <= DRAWN_NODES:
        schedule.to_dot(folder / "graph.svg")
    print(f"\nfiles in {folder}")
    return schedule


def main(argv: list[str]) -> None:
    """Explain; flags that do not go together end the program with their message."""
    if len(argv) > 1:
        raise SystemExit(
            f"The arguments {argv[1:]} were given. Only flags are understood. Type "
            "--help for the flags."
        )
    for name in ("jax", "mip"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        explain()
    except (
        ValueError,
        FileNotFoundError,
        poet_jax.BudgetTooSmall,
        poet_jax.PlanInvalid,
    ) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    flags.FLAGS.set_default("output", "outputs/explain")
    app.run(main)
