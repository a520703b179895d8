"""The questions of the POET paper, asked of traced models.

docs/benchmarks/poet.md has the findings.

    python -m experiments.paper.questions --question=ram
    python -m experiments.paper.questions --plot

The first command plans what its question needs, and appends rows to a CSV file in
experiments/results/paper/; a run that was stopped goes on where it was. On two cores
`ram` and `smallest` take 10 to 30 minutes each, `deadline` 5 to 10, `instances` 3 to 10
and `rules` 30. The second command draws every figure from the rows. All is modelled:
nothing runs, and no joule is measured.

ram: energy against RAM for each planner on four of the paper's devices.
instances: the same for the paper's own graphs (experiments/paper/layer_graphs.py).
deadline: energy against the deadline, in 45 % of keep-all's memory.
smallest: the least RAM in which a model trains, what sets it, and who has as much.
rules: plans by the published rules, judged by the simulator's.
"""

import itertools
import logging
import math
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
from absl import app, flags

import poet_jax
from experiments.paper import points
from experiments.paper.layer_graphs import instance_paths
from experiments.program import (
    appending,
    common_legend,
    program,
    read_rows,
    result_flags,
)
from poet_jax import cli
from poet_jax.planners.planner import keep_everything
from poet_jax.stores.paged import at_home
from poet_jax.viz.figures import drawn

QUESTIONS = ("ram", "instances", "deadline", "smallest", "rules")
QUESTION = flags.DEFINE_enum("question", None, QUESTIONS, "What to ask.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 10.0, "Seconds for each MILP.")
result_flags("paper", plots=True)

DEVICES = ("MKR1000", "NRF52840", "RASPBERRY_PI_4", "JETSON_TX2")
PLANNERS = ("sqrt", "capuchin", "pofo", "paging", "remat", "milp")
MODELS = (
    ("resnet18", "photos", 32),
    ("vgg16", "photos", 32),
    ("bert:layers=12,length=512", "text", 1),
)


def ram() -> list[points.Point]:
    shares = (90.0, 75.0, 60.0, 45.0)
    lean = (84.0, 67.0, 35.0)  # near the least of each model
    bert = MODELS[-1]  # of which parameters and gradients are most
    return [
        point
        for (model, dataset, batch), counted, devices, percent, planners in (
            *((model, "all", DEVICES, shares, PLANNERS) for model in MODELS),
            *((x, "all", ["JETSON_TX2"], lean, ["pofo", "milp"]) for x in MODELS),
            (bert, "activations", DEVICES, (75.0, 50.0, 35.0, 25.0), PLANNERS),
        )
        for point in points.grid(
            [model], [dataset], [batch], ["gradient"], [counted], devices, percent,
            [None], planners,
        )
    ]  # fmt: skip


def at_equal_time(rows: list[dict[str, str]]) -> Iterator[str]:
    """For each POFO-like plan on the TX2, what the integrated plan of the same share
    takes, and what the leanest integrated plan of the rows saves that is as fast."""
    rows = [r for r in rows if r["device"] == "JETSON_TX2" and r["joules"]]
    rows = [r for r in rows if r["counted"] == "all"]
    for pofo in rows:
        ours = [
            r for r in rows if (r["model"], "milp") == (pofo["model"], r["planner"])
        ]
        same = [float(r["seconds"]) for r in ours if r["share"] == pofo["share"]]
        if pofo["planner"] == "pofo" and same:
            seconds = float(pofo["seconds"])
            peaks = [
                int(r["peak_bytes"]) for r in ours if float(r["seconds"]) <= seconds
            ]
            saved = 1 - min(peaks, default=math.nan) / int(pofo["peak_bytes"])
            yield (
                f"{pofo['model']} in {pofo['share']} %: integrated has "
                f"{seconds / same[0] - 1:.1%} more throughput than POFO-like, or is as "
                f"fast with {saved:.1%} less peak"
            )


def instances() -> list[points.Point]:
    shares = (90.0, 75.0, 60.0, 45.0, 30.0)
    return [
        point
        for path in instance_paths()
        for point in points.grid(
            [path.stem], [""], [1], ["instance"], ["activations"],
            [path.stem.rpartition("-")[2]], shares, [None], PLANNERS,
        )
    ]  # fmt: skip


def deadline() -> list[points.Point]:
    factors = (1.5, 1.25, 1.1, 1.05, 1.02, 1.01, 1.0)  # a plan may serve the next
    return points.grid(
        ["resnet18"], ["photos"], [32], ["gradient"], ["all"],
        ["RASPBERRY_PI_4", "JETSON_TX2"], [45.0], factors,
        ["paging", "remat", "milp"],
    )  # fmt: skip


SMALLEST = (
    ("resnet18", "photos", 1), ("resnet18", "photos", 8), ("resnet18", "photos", 32),
    ("resnet18:width=8", "photos", 1), ("vgg16", "photos", 1), ("vgg16", "photos", 32),
    ("bert:layers=12,length=16", "text", 1), ("bert:layers=12,length=128", "text", 1),
    ("bert:layers=12,length=512", "text", 1),
    ("bert:layers=2,width=64,heads=2,length=32", "text", 1),
)  # fmt: skip
STATES = ("all", "state on storage", "activations")
SMALLEST_COLUMNS = (
    "model", "batch_size", "counted", "nodes", "keep_all_bytes", "smallest_bytes",
    "proven_bytes", "node", "alive", "devices",
)  # fmt: skip


def smallest(path: pathlib.Path) -> None:
    """The least RAM of a whole step with AdamW, by what takes memory."""
    done = {tuple(row[x] for x in SMALLEST_COLUMNS[:3]) for row in read_rows(path)}
    with appending(path, SMALLEST_COLUMNS) as append:
        for (model, dataset, batch), counted in itertools.product(SMALLEST, STATES):
            if (model, str(batch), counted) not in done:
                key = {"model": model, "batch_size": batch, "counted": counted}
                append(key | _smallest(model, dataset, batch, counted))


def _smallest(model: str, dataset: str, batch_size: int, counted: str) -> dict:
    graph, batch = points.traced(model, dataset, batch_size, "step")
    if counted == "state on storage":
        state = range(len(graph.arguments) - batch)
        large = [n for n in state if graph.values[graph.arguments[n]].nbytes >= 2**12]
        graph = poet_jax.passes.stream_state(at_home(graph, large))
    costs = poet_jax.price(graph, poet_jax.devices.RASPBERRY_PI_4)
    if counted == "activations":
        costs = points.activations_only(graph, costs, graph.arguments[-batch:])
    planner = poet_jax.MilpPlanner(time_limit_seconds=TIME_LIMIT.value, progress=False)
    try:
        planner(graph, costs, poet_jax.Budget(1))
    except poet_jax.BudgetTooSmall as error:
        found = error
    fitting = [
        name
        for name, device in poet_jax.devices.ALL.items()
        if device.ram_bytes >= found.smallest_bytes
    ]
    return {
        "nodes": len(graph.nodes),
        "keep_all_bytes": keep_everything(graph, costs).usage.peak_bytes,
        "smallest_bytes": found.smallest_bytes,
        "proven_bytes": found.least_bytes,
        "node": found.node,
        "alive": " ".join(found.values[:3]),
        "devices": " ".join(fitting),
    }


RULES_COLUMNS = (
    "instance", "nodes", "share", "deadline", "memory_bytes", "deadline_seconds",
    "published_status", "published_joules", "peak_bytes", "seconds", "refuted",
    "milp_status", "milp_joules", "milp_seconds",
)  # fmt: skip
PAPER_NODES = 120  # more are out of reach of the published formulation
SHARES = (75, 50, 25, 10)  # percent of the way from the largest node to keep-all
DEADLINES = (1.02, 4.0)  # times the compute


def rules(path: pathlib.Path) -> None:
    """Plans within the same memory and deadline, by both rules."""
    done = {
        tuple(r[x] for x in ("instance", "share", "deadline")) for r in read_rows(path)
    }
    with appending(path, RULES_COLUMNS) as append:
        for instance in instance_paths():
            graph, costs = poet_jax.load_instance(instance)
            if len(graph.nodes) > PAPER_NODES:
                continue
            for share, deadline in itertools.product(SHARES, DEADLINES):
                name = {"instance": instance.stem, "share": share, "deadline": deadline}
                if tuple(map(str, name.values())) not in done:
                    limit = TIME_LIMIT.value
                    row = points.rules_row(graph, costs, share, deadline, limit)
                    append(row | name)


# Okabe and Ito's colours, which are told apart without red or green.
STYLES = {
    "sqrt": ("#999999", "s", "sqrt"),
    "capuchin": ("#E69F00", "v", "Capuchin-like"),
    "pofo": ("#CC79A7", "d", "POFO-like"),
    "paging": ("#56B4E9", "^", "paging only"),
    "remat": ("#D55E00", "P", "remat only"),
    "milp": ("#000000", "o", "integrated"),
}


# Of figures with more rows than these: (model, what is counted, device).
PANELS = {
    "ram": (
        ("resnet18", "all", "NRF52840"),
        ("resnet18", "all", "JETSON_TX2"),
        ("bert", "activations", "NRF52840"),
        ("bert", "activations", "JETSON_TX2"),
    ),
    "instances": (
        ("poet-resnet18_cifar", "activations", "a72"),
        ("poet-resnet18_cifar", "activations", "m4"),
        ("poet-bert", "activations", "a72"),
        ("poet-bert", "activations", "m4"),
    ),
}


def case(row: dict[str, str]) -> tuple[str, str, str]:
    """(model, what is counted, device) of a row; an instance is called after its
    device, too."""
    model = row["model"].removesuffix(f"-{row['device']}").partition(":")[0]
    return model, row["counted"], row["device"]


def plot_panels(
    rows: list[dict[str, str]], x: str, label: str, path, chosen: Sequence = ()
) -> None:
    """A panel per model and device: joules over keep-all's against the column `x`.

    Of those that are `chosen`, if some are.
    """
    cases = list(dict.fromkeys(map(case, rows)))
    cases = [one for one in chosen if one in cases] or cases
    lines = -(-len(cases) // 2)
    with drawn(path, 0.9 + 1.9 * lines) as figure:
        axes = figure.subplots(lines, 2, squeeze=False, sharex=True, sharey=True)
        for axis, one in zip(axes.flat, cases, strict=False):
            model, counted, device = one
            _lines(axis, [row for row in rows if case(row) == one], x)
            if counted == "activations" and not model.startswith("poet-"):
                model += "'s activations"
            axis.set_title(f"{model}, {device}")
        common_legend(figure, axes)
        top = 2 * max(_extra(row) for row in rows if row["joules"])
        axes[0, 0].set_ylim(LEAST * 0.8, top)
        ticks = (0.01, 0.1, 1, 10, 100)
        axes[0, 0].set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
        figure.supxlabel(f"{label};\nhollow: over 1 % above what is proven")
        figure.supylabel(
            f"extra energy over keep-all\n(modelled; {LEAST} % is that or less)"
        )


LEAST = 0.01  # percent; the axis is logarithmic


def _extra(row: dict[str, str]) -> float:
    """Percent of energy over keep-all's, or LEAST."""
    extra = 100 * (float(row["joules"]) / float(row["keep_all_joules"]) - 1)
    return max(extra, LEAST)


def _lines(axis, rows: list[dict[str, str]], x: str) -> None:
    for planner, (colour, marker, name) in STYLES.items():
        found = sorted(
            (
                float(r[x]),
                _extra(r),
                r["status"] == "FEASIBLE" and float(r["gap"]) > 0.01,
            )
            for r in rows
            if r["planner"] == planner and r["joules"]
        )
        if found:
            places, extra, _ = zip(*found, strict=True)
            axis.plot(
                places, extra, marker=marker, color=colour, label=name,
            )  # fmt: skip
        for place, extra, unproven in found:
            if unproven:
                axis.plot(
                    place, extra, marker=marker, color=colour, markerfacecolor="white",
                    markersize=5,
                )  # fmt: skip
    places = sorted({float(r[x]) for r in rows})
    none = sorted({*places} - {float(r[x]) for r in rows if r["joules"]})
    close = 0.04 * (places[-1] - places[0])  # one text for several
    for place in (
        b for a, b in zip([-1.0, *none], none, strict=False) if b - a > close
    ):
        axis.text(
            place, LEAST * 1.2, "no plan", rotation=90, color="#555555",
            ha="center", va="bottom",
        )  # fmt: skip
    axis.set_yscale("log")
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)


def plot_smallest(rows: list[dict[str, str]], path) -> None:
    """Bars of the least RAM by what is counted, and lines for the devices' RAM."""
    names = list(dict.fromkeys((r["model"], r["batch_size"]) for r in rows))
    colours = dict(zip(STATES, ("#0072B2", "#56B4E9", "#E69F00"), strict=True))
    with drawn(path, 0.42 * len(names) + 1.2) as figure:
        axis = figure.subplots()
        for offset, counted in enumerate(STATES):
            found = {
                (r["model"], r["batch_size"]): int(r["smallest_bytes"])
                for r in rows
                if r["counted"] == counted
            }
            axis.barh(
                [i + 0.27 * (1 - offset) for i in range(len(names))],
                [found.get(name, np.nan) / 2**20 for name in names],
                height=0.25, color=colours[counted],
                label={"all": "everything"}.get(counted, counted),
            )  # fmt: skip
        for n, name in enumerate(("NRF52840", "ESP32_S3", "STM32H7", "RASPBERRY_PI_4")):
            mib = poet_jax.devices.ALL[name].ram_bytes / 2**20
            axis.axvline(mib, color="black", linewidth=0.8, linestyle=":")
            axis.text(
                mib, len(names) - 0.5 + 0.4 * (n % 2), f" {name} ",
                va="bottom", ha="left" if name == "STM32H7" else "right",
            )  # fmt: skip
        labels = []
        for model, batch in names:
            model, _, options = model.partition(":")
            lines = [model + ", " * bool(batch) + f"batch {batch}"]
            lines += [options.replace(",heads=2", "").replace(",length", ",\nlength")]
            labels.append("\n".join(filter(None, lines)))
        axis.set_yticks(range(len(names)), labels)
        axis.set_ylim(-0.6, len(names) + 0.4)
        axis.set_xscale("log")
        axis.set_xlim(left=0.015)
        axis.set_xlabel("least RAM of a training step (MiB, modelled)")
        figure.legend(loc="outside upper center", ncols=3)


def plot_rules(rows: list[dict[str, str]], path) -> None:
    """What the published rules' plans take under the simulator's, over the budget."""
    with drawn(path, 3.2) as figure:
        axis = figure.subplots()
        for marker, kind, test in (
            ("o", "holds", lambda r: not r["refuted"]),
            ("x", "refuted", lambda r: bool(r["refuted"])),
        ):
            chosen = [r for r in rows if r["peak_bytes"] and test(r)]
            axis.scatter(
                [100 * float(r["peak_bytes"]) / float(r["memory_bytes"])
                 for r in chosen],
                [100 * float(r["seconds"]) / float(r["deadline_seconds"])
                 for r in chosen],
                marker=marker, color={"o": "#0072B2", "x": "#D55E00"}[marker], s=14,
                label=f"published plan {kind} ({len(chosen)})",
            )  # fmt: skip
        axis.axhline(100, color="black", linewidth=0.8)
        axis.axvline(100, color="black", linewidth=0.8)
        axis.set_xlabel("peak, in-flight pages counted (% of the budget)")
        axis.set_ylabel("time, transfers counted (% of the deadline)")
        figure.legend(loc="outside upper center", ncols=2)


def plot(folder: pathlib.Path) -> None:
    for name, x, label in (
        ("ram", "share", "RAM (% of keep-all's peak)"),
        ("instances", "share", "RAM (% of keep-all's peak)"),
        ("deadline", "deadline", "deadline (times keep-all's seconds)"),
    ):
        rows = read_rows(folder / f"{name}.csv")
        if rows:
            chosen = PANELS.get(name, ())
            plot_panels(rows, x, label, folder / f"{name}.png", chosen)
    for name, draw in (("smallest", plot_smallest), ("rules", plot_rules)):
        rows = read_rows(folder / f"{name}.csv")
        if rows:
            draw(rows, folder / f"{name}.png")


@program
def main() -> None:
    if QUESTION.value is None and not flags.FLAGS.plot:
        raise ValueError(
            "No question was asked. The questions are "
            f"{', '.join(QUESTIONS)}. Use --question=ram, or --plot for the figures."
        )
    logging.getLogger("poet_jax").setLevel(logging.ERROR)
    folder = cli.output_folder()
    path = folder / f"{QUESTION.value}.csv"
    match QUESTION.value:
        case "ram" | "instances" | "deadline" as name:
            ask = {"ram": ram, "instances": instances, "deadline": deadline}[name]
            points.run(ask(), path, TIME_LIMIT.value)
            if name == "ram":
                print(*at_equal_time(read_rows(path)), sep="\n")
        case "smallest":
            smallest(path)
        case "rules":
            rules(path)
    plot(folder)


if __name__ == "__main__":
    app.run(main)
