"""Figures of a schedule: RAM over the step, and the schedule matrices."""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from poet_jax.core.graph import Graph
from poet_jax.core.plan import PageIn, PageOut, Plan
from poet_jax.core.planned import Planned
from poet_jax.core.program import Run, lower
from poet_jax.core.units import format_bytes, format_joules, format_seconds
from poet_jax.viz.matrices import Matrices, matrices
from poet_jax.viz.table import decisions
from poet_jax.viz.timeline import timeline

# Okabe and Ito's colours, which are told apart without red or green.
COLOURS = {
    "argument": "#999999",
    "keep": "#56B4E9",
    "remat": "#E69F00",
    "page": "#009E73",
}
LABELS = {
    "argument": "arguments",
    "keep": "kept",
    "remat": "rematerialised",
    "page": "paged",
}


WIDTH = 5.0  # inches; on a telephone, 400 pixels wide, letters are then 9 pixels high
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "figure.labelsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.0,
    "lines.markersize": 4.0,
    "savefig.dpi": 200,
    # Text stays text, and the same figure has the same ids.
    "svg.fonttype": "none",
    "svg.hashsalt": "poet_jax",
}


@contextlib.contextmanager
def drawn(
    file: Any,
    height: float,
    width: float = WIDTH,
    layout: Any = "constrained",
    **options: Any,
) -> Iterator[Any]:
    """An empty matplotlib figure of so many inches, which the block draws.

    Then it is saved to `file` with `savefig`'s `options`. All figures have one style:
    letters that can be read on a telephone, dark on white whatever the page around it.
    Raises ImportError, with what to use, without matplotlib.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "A figure needs matplotlib, an optional part of poet_jax, which is not "
            'installed; use pip install "poet_jax[plot]"'
        ) from error
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(width, height), layout=layout)
        yield figure
        figure.savefig(file, **options)


def _unit(most: float, units: dict[str, float]) -> tuple[float, str]:
    """The largest unit that is no larger than `most`, or the last."""
    for name, size in units.items():
        if most >= size:
            return size, name
    return size, name


STEP_HEIGHT = 4.4  # inches


def draw_step(figure: Any, planned: Planned) -> None:
    """Live bytes over the planned step, what fills them, and the two lanes.

    Of nodes that are fused into one executable, results that never leave it are part of
    its workspace.
    """
    program, usage, base = planned.program, planned.usage, planned.baseline
    budget_bytes = planned.budget.memory_bytes
    most = max(base.peak_bytes, usage.peak_bytes, 1)
    size, size_name = _unit(
        most, {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}
    )
    second, second_name = _unit(usage.seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6})
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    line = timeline(planned)
    workspace = line.live_bytes - sum(line.layers.values())
    memory.stackplot(
        line.seconds / second,
        *(layer / size for layer in (*line.layers.values(), workspace)),
        step="post",
        colors=[*COLOURS.values(), "#DDDDDD"],
        labels=[*LABELS.values(), "workspace"],
        linewidth=0,
    )
    memory.step(
        line.seconds / second,
        line.live_bytes / size,
        where="post",
        color="black",
        linewidth=0.6,
    )
    memory.axhline(
        budget_bytes / size,
        color="#D55E00",
        linestyle="--",
        label=f"budget, {format_bytes(budget_bytes)}",
    )
    memory.axhline(
        base.peak_bytes / size,
        color="black",
        linestyle=":",
        label=f"keep-all's peak, {format_bytes(base.peak_bytes)}",
    )
    memory.set_ylabel(f"RAM ({size_name})")
    memory.set_ylim(0, 1.05 * most / size)
    memory.set_title(
        f"planned: peak {format_bytes(usage.peak_bytes)}, "
        f"{format_seconds(usage.seconds)}, {format_joules(usage.joules)} (modelled)"
    )
    figure.legend(loc="outside lower center", ncols=2)
    rows = (("keep", 2.1), ("remat", 2.1), ("in", 1.1), ("out", 0.1))
    bars: dict[str, list[tuple[float, float]]] = {kind: [] for kind, _ in rows}
    seen: set[int] = set()
    times = zip(usage.start_seconds, usage.stop_seconds, strict=True)
    for x, (start, stop) in zip(program.instructions, times, strict=True):
        match x:
            case Run((node,)):
                kind = "remat" if node in seen else "keep"
                seen.add(node)
            case PageIn() | PageOut():
                kind = "in" if isinstance(x, PageIn) else "out"
            case _:
                continue
        bars[kind].append((start / second, (stop - start) / second))
    for kind, bottom in rows:
        colour = COLOURS.get(kind, COLOURS["page"])
        bar = lanes.broken_barh(bars[kind], (bottom, 0.8), color=colour)
        bar.set(edgecolor=colour, linewidth=0.3 if kind == "keep" else 1.0)
    lanes.set_yticks([0.5, 1.5, 2.5], ["page out", "page in", "compute"])
    lanes.set_ylim(0, 3)
    lanes.set_xlabel(f"planned time in the step ({second_name})")
    lanes.set_xlim(0, usage.seconds / second or None)


def plot_matrices(file: Any, graph: Graph, plan: Plan) -> None:
    """The matrices of `plan` by node, and a column for each argument that is paged.

    A column of S holds all values of its node. The figure is as large as its cells ask
    for.
    """
    made = decisions(lower(graph, plan))
    paged = [v for v in graph.arguments if v in made]
    columns = dict(graph.producer)
    columns |= {v: number - len(paged) for number, v in enumerate(paged)}
    cells = len(graph.nodes) + len(paged)
    inches = min(max(0.015 * cells, 3.6), 5.5)
    points = max(72 * inches / (cells + 1), 1.0)  # the side of a cell
    height, width = inches + 1.2, 3 * inches + 1.2
    with drawn(file, height, width, "compressed", bbox_inches="tight") as figure:
        _draw_matrices(figure, graph, matrices(graph, plan), made, columns, points)


def _draw_matrices(
    figure: Any,
    graph: Graph,
    found: Matrices,
    made: dict[int, str],
    columns: dict[int, int],
    points: float,
) -> None:
    count, first = len(graph.nodes), min(columns.values(), default=0)
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for axes, words in zip(
        panels,
        (
            "R: computed in the stage",
            "S_RAM: in RAM when it starts",
            "S_storage: on storage when it starts",
        ),
        strict=True,
    ):
        axes.set_title(words)
        axes.set_xlabel("node" + ", and paged arguments left of 0" * (first < 0))
        axes.set_aspect("equal")
        if first < 0:
            axes.axvline(-0.5, color="black", linewidth=0.6)
    panels[0].set_ylabel("stage")
    panels[0].set_xlim(first - 0.5, max(count, 1) - 0.5)
    panels[0].set_ylim(count + 0.5, -0.5)
    for axis in (panels[0].xaxis, panels[0].yaxis):
        axis.get_major_locator().set_params(integer=True)
    base = np.eye(*found.R.shape, dtype=bool)
    for kind, runs, side in (
        ("keep", base, max(points, 2.0)),
        ("remat", found.R > base, max(points, 3.0)),
    ):
        stage, node = np.nonzero(runs)
        panels[0].scatter(
            node, stage, s=side**2, marker="s", linewidths=0, color=COLOURS[kind]
        )
    labels = {"keep": "kept, or run first", "remat": "rematerialised, or run again"}
    for axes, present in ((panels[1], found.S_ram), (panels[2], found.S_storage)):
        for kind in ("keep", "remat", "page"):
            runs = [
                (columns[v], start - 0.5, stop - 0.5)
                for v in columns
                if made.get(v) == kind
                for start, stop in _runs(present[:, v])
            ]
            lines = axes.vlines(*np.reshape(runs, (-1, 3)).T, color=COLOURS[kind])
            lines.set(linewidth=points, label=labels.get(kind, "paged"))
    handles = panels[1].get_legend_handles_labels()
    legend = figure.legend(*handles, loc="outside lower center", ncols=3)
    for handle in legend.legend_handles:
        handle.set_linewidth(8)


def _runs(present: np.ndarray) -> zip:
    """(start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], present, [False]])))
    return zip(edges[::2], edges[1::2], strict=True)


def inline_svg(planned: Planned) -> str:
    """`draw_step`'s figure as an SVG element for HTML."""
    return as_svg(STEP_HEIGHT, lambda figure: draw_step(figure, planned))


def as_svg(height: float, draw: Callable[[Any], None]) -> str:
    """A figure as an SVG element for HTML, which needs no name spaces."""
    file = io.StringIO()
    with drawn(file, height, format="svg", metadata={"Date": None}) as figure:
        draw(figure)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    needless = r'<metadata>.*?</metadata>| xmlns(:\w+)?="[^"]*"'
    return re.sub(needless, "", text, flags=re.S)
