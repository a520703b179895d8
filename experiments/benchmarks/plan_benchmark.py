"""How good plans are, and how long they take: every planner, from tight to loose.

    python -m experiments.benchmarks.plan_benchmark --time_limit=20
    python -m experiments.benchmarks.plan_benchmark --plot

The first command plans each graph at shares of keep-all's peak (75 to 15 %) and at 1.05
times the smallest memory that works, with each planner, and appends a row per plan to
experiments/results/plan_benchmark/plans.csv. Rows that are there already, with the
same time limit, are not planned again, so it may be stopped and started at will; all of
it takes hours on two cores. --graphs, --planners and --kinds choose a part. The second
command draws plans.png from the rows, with the shortest limit of each.

    python -m experiments.benchmarks.plan_benchmark --gap=0.01 --planners=milp \
        --shares=75,50 --graphs=bert6,bert12,bert24,bert48 --repeats=5 \
        --output=outputs/layers

How planning time grows with the number of layers: --gap is the distance from the bound
at which a MILP stops. With --repeats, each plan is made so often, from a graph of which
nothing is known yet and with a solver that has to be started, and the row has the
median of the seconds.

Graphs are traced on shapes: forward and backward ("gradient"), the same with room for
parameters and gradients beside the budget ("activations", which --kinds has to name),
or the whole step with AdamW and donated state ("step"). A share may be a size, as in
--shares=293MB. Graphs are priced at 60 GFLOP/s and 8 GB/s, storage at 0.5 GB/s in and
0.3 GB/s out, and a watt while either works: joules are modelled, and equal seconds. The
paper's own layer graphs (experiments/paper/layer_graphs.py) have costs of their own.
"""

import dataclasses
import pathlib
import resource
import statistics
import time

import jax
import numpy as np
from absl import app, flags, logging

import poet_jax
from experiments.paper.layer_graphs import FOLDER, instance_paths
from experiments.program import (
    appending,
    common_legend,
    program,
    read_rows,
    result_flags,
)
from experiments.steps import (
    BENCHMARK_DEVICE,
    COARSE,
    flax_case,
    skips_case,
    traced,
    unet_case,
)
from poet_jax import cli
from poet_jax.core.errors import BudgetTooSmall
from poet_jax.core.units import parse_bytes
from poet_jax.planners.milp.solver import IDLE_SECONDS
from poet_jax.planners.planner import keep_everything
from poet_jax.viz.figures import drawn

PLANNERS = (
    "greedy", "sqrt", "paging_only", "milp", "milp_remat", "milp_highs", "paper"
)  # fmt: skip
TIME_LIMIT = flags.DEFINE_float("time_limit", 60.0, "Seconds for each MILP.")
GAP = flags.DEFINE_float("gap", 1e-4, "Relative gap at which a MILP stops.")
REPEATS = flags.DEFINE_integer(
    "repeats",
    1,
    "Times to make each plan, for the median of its seconds.",
    lower_bound=1,
)
GRAPHS = flags.DEFINE_list("graphs", None, "Names of graphs; all by default.")
CHOSEN = flags.DEFINE_list("planners", list(PLANNERS), "Names of planners.")
KINDS = flags.DEFINE_list(
    "kinds",
    ["gradient", "step", "instance"],
    "What to trace of a model (gradient, step, activations), and instances.",
)
SHARES = flags.DEFINE_list(
    "shares", ["75", "50", "35", "25", "15", "min"],
    "Percentages of keep-all's peak, or sizes.",
)  # fmt: skip
result_flags("plan_benchmark", plots=True)

CASES = {
    "resnet18": flax_case("resnet18", 32, "photos"),
    "bert2": flax_case("bert:layers=2,length=128", 8, "text"),
    "bert6": flax_case("bert:layers=6,length=128", 8, "text"),
    "bert12": flax_case("bert:layers=12,length=128", 8, "text"),
    "bert24": flax_case("bert:layers=24,length=128", 8, "text"),
    "bert48": flax_case("bert:layers=48,length=128", 8, "text"),
    "gpt12": flax_case("gpt:layers=12,length=256", 8, "text"),
    "gpt24": flax_case("gpt:layers=24,length=256", 8, "text"),
    "vgg16": flax_case("vgg16", 32, "photos"),
    "resnet50": flax_case("resnet50", 32, "photos"),
    "unet": unet_case(),
    "skips": skips_case(),
}
# Of the figure: a convolutional network, a transformer, one in which every layer's
# result waits for long, whose bound is the least tight, and a whole step.
PANELS = {
    ("resnet50", "gradient"): "ResNet-50",
    ("bert12", "gradient"): "BERT, 12 layers",
    ("skips", "gradient"): "long skips",
    ("gpt24", "step"): "GPT, 24 layers, step",
}
# Okabe and Ito's colours, which are told apart without red or green.
STYLES = {
    "greedy": ("greedy", "#E69F00", "v"),
    "sqrt": ("sqrt", "#999999", "s"),
    "paging_only": ("paging only", "#56B4E9", "^"),
    "milp": ("MILP", "#000000", "o"),
}
PAPER_NODES = 60  # more are out of reach of the published formulation
COLUMNS = (
    "graph", "kind", "nodes", "keep_all_bytes", "share", "memory_bytes", "planner",
    "time_limit", "status", "over_keep_all", "gap", "seconds", "binaries", "rss_bytes",
)  # fmt: skip


def load(name: str, kind: str) -> tuple[poet_jax.Graph, poet_jax.Costs]:
    """The graph and its costs; prints how long that takes."""
    start = time.monotonic()
    if kind == "instance":
        return poet_jax.load_instance(FOLDER / f"{name}.json")
    # `reorder` would keep operands instead of gradients, which take no room there.
    graph = traced(CASES[name], kind, COARSE[: 1 if kind == "activations" else 2])
    costs = poet_jax.price(graph, BENCHMARK_DEVICE)
    costs = dataclasses.replace(costs, joules=costs.seconds)  # a watt throughout
    if kind == "activations":
        count = len(jax.tree.leaves(jax.eval_shape(CASES[name].init)[0]))
        nbytes = costs.nbytes.copy()
        nbytes[[*graph.arguments[:count], *graph.outputs[-count:]]] = 0
        costs = dataclasses.replace(costs, nbytes=nbytes)
    seconds = time.monotonic() - start
    logging.info("%s %s: %d nodes in %.0f s", name, kind, len(graph.nodes), seconds)
    return graph, costs


def planner_called(name: str) -> poet_jax.core.plan.Planner:
    limits = {"time_limit_seconds": TIME_LIMIT.value, "gap": GAP.value}
    return {
        "greedy": poet_jax.greedy,
        "sqrt": poet_jax.planners.sqrt,
        "paging_only": poet_jax.planners.paging_only,
        "paper": poet_jax.PaperPlanner(time_limit_seconds=TIME_LIMIT.value),
        "milp": poet_jax.MilpPlanner(**limits),
        "milp_remat": poet_jax.MilpPlanner(**limits, paging=False),
        "milp_highs": poet_jax.MilpPlanner("HIGHS", **limits),
    }[name]


def measure(graph, costs, budget, name) -> dict[str, object]:
    """The row of one plan."""
    row: dict[str, object] = {}
    seconds = []
    for _ in range(REPEATS.value):
        if REPEATS.value > 1:
            time.sleep(IDLE_SECONDS + 0.5)  # the solver's process ends
            graph = dataclasses.replace(graph)  # without what is known of it
        start = time.monotonic()
        try:
            plan = planner_called(name)(graph, costs, budget)
            seconds.append(time.monotonic() - start)
            row = judged(graph, costs, budget, plan)
        except BudgetTooSmall as error:
            seconds.append(time.monotonic() - start)
            row = {"status": "IMPOSSIBLE" if error.exact else "NONE"}
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = max(used, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    median = statistics.median(seconds)
    return row | {"seconds": f"{median:.2f}", "rss_bytes": used * 1024}


def judged(graph, costs, budget, plan) -> dict[str, object]:
    """What a row says of a plan."""
    usage = poet_jax.simulate(poet_jax.lower(graph, plan), costs)
    fits = usage.peak_bytes <= budget.memory_bytes
    keep_all = keep_everything(graph, costs).usage.joules
    return {
        "status": plan.status.name if fits else "REFUTED",  # by the simulator
        "over_keep_all": f"{plan.objective / keep_all - 1:.6f}",
        "gap": f"{plan.gap:.6f}",
        "binaries": plan.statistics.get("binaries", 0),
    }


def run(path: pathlib.Path) -> None:
    rows = read_rows(path)
    limit = TIME_LIMIT.value
    done = {
        (r["graph"], r["kind"], r["share"], r["planner"])
        for r in rows
        if float(r["time_limit"]) == limit
    }
    least = {  # so that planners that are added later get the same
        (r["graph"], r["kind"]): int(r["memory_bytes"])
        for r in rows
        if r["share"] == "min"
    }
    kinds = [kind for kind in KINDS.value if kind != "instance"]
    names = [(name, kind) for name in CASES for kind in kinds]
    if "instance" in KINDS.value:
        names += [(path.stem, "instance") for path in instance_paths()]
    with appending(path, COLUMNS) as append:
        for name, kind in names:
            todo = [
                (share, planner)
                for share in SHARES.value
                for planner in CHOSEN.value
                if (name, kind, share, planner) not in done
            ]
            if not todo or (GRAPHS.value and name not in GRAPHS.value):
                continue
            graph, costs = load(name, kind)
            keep_all_bytes = keep_everything(graph, costs).usage.peak_bytes
            for share, planner in todo:
                if planner == "paper" and len(graph.nodes) > PAPER_NODES:
                    continue
                if share == "min":
                    if (name, kind) not in least:
                        least[name, kind] = int(1.05 * smallest_bytes(graph, costs))
                    memory_bytes = least[name, kind]
                elif share.replace(".", "", 1).isdigit():
                    memory_bytes = int(keep_all_bytes * float(share) / 100)
                else:
                    memory_bytes = parse_bytes(share)
                budget = poet_jax.Budget(memory_bytes)
                row = measure(graph, costs, budget, planner) | {
                    "graph": name,
                    "kind": kind,
                    "nodes": len(graph.nodes),
                    "keep_all_bytes": keep_all_bytes,
                    "share": share,
                    "memory_bytes": memory_bytes,
                    "planner": planner,
                    "time_limit": limit,
                }
                logging.info("%s", {k: row[k] for k in COLUMNS if k in row})
                append(row)


def smallest_bytes(graph, costs) -> int:
    """The smallest memory for which the MILP finds a plan."""
    try:
        planner_called("milp")(graph, costs, poet_jax.Budget(1))
    except BudgetTooSmall as error:
        return error.smallest_bytes
    return 1


def plot(rows: list[dict[str, str]], path: pathlib.Path) -> None:
    """What planners cost over keep-all, against memory: a panel for each of `PANELS`.

    Or for the first graphs there are, if there are none of these. The other graphs and
    planners are in the tables of docs/benchmarks/plans.md.
    """
    shortest = {
        (row["graph"], row["kind"], row["planner"], row["share"]): row
        for row in sorted(rows, key=lambda row: -float(row["time_limit"]))
    }
    there = list(dict.fromkeys((row["graph"], row["kind"]) for row in rows))
    panels = [x for x in PANELS if x in there] or there[: len(PANELS)]
    with drawn(path, 4.8) as figure:
        axes = figure.subplots(2, 2, sharex=True, sharey=True)
        for axis, panel in zip(axes.flat, panels, strict=False):
            here = [row for key, row in shortest.items() if key[:2] == panel]
            for planner in STYLES:
                _draw(axis, [row for row in here if row["planner"] == planner], planner)
            title = f"{PANELS.get(panel, ' '.join(panel))}, {here[0]['nodes']} nodes"
            axis.set(title=title, yscale="log", ylim=(0.5, 250))
            ticks = (1, 10, 100)
            axis.set_yticks(ticks, [f"{tick} %" for tick in ticks])
            axis.grid(color="#DDDDDD", linewidth=0.6)
            axis.set_axisbelow(True)
        figure.supxlabel("memory budget (% of keep-all's peak)")
        figure.supylabel("extra over keep-all (modelled)")
        common_legend(figure, axes)


def _draw(axis, rows: list[dict[str, str]], planner: str) -> None:
    """A planner's line, and for the MILP the room down to what is proven."""
    name, colour, marker = STYLES[planner]
    points = []
    for row in rows:
        if row["over_keep_all"] and row["status"] != "REFUTED":
            memory = float(row["memory_bytes"]) / float(row["keep_all_bytes"])
            cost = 1 + float(row["over_keep_all"])
            bound = cost * (1 - float(row["gap"]))
            points.append((100 * memory, 100 * (cost - 1), 100 * (bound - 1)))
    if not points:
        return
    memory, extra, bound = np.array(sorted(points)).T
    axis.plot(memory, extra, color=colour, marker=marker, label=name)
    if planner == "milp":
        style = {"color": "#BBBBBB", "linewidth": 0, "label": "down to its bound"}
        axis.fill_between(memory, np.maximum(bound, 0.01), extra, **style)


@program
def main() -> None:
    folder = cli.output_folder()
    if not flags.FLAGS.plot:
        run(folder / "plans.csv")
    rows = read_rows(folder / "plans.csv")
    plot(rows, folder / "plans.png")


if __name__ == "__main__":
    app.run(main)
