"""The dependency graph with the plan's decisions, in DOT, and drawn by Graphviz."""

import math
import os
import pathlib
import shutil
import subprocess

from poet_jax.core.planned import Planned
from poet_jax.core.units import format_bytes, format_joules, format_seconds
from poet_jax.viz.figures import COLOURS, LABELS
from poet_jax.viz.table import decisions

DRAWN = (".svg", ".png", ".pdf")
# Not by colour alone.
NAMED = 40  # more arguments than these are points without their names
CURVED = 300  # in graphs of more nodes, arrows that bend take minutes to lay out
STYLES = {"argument": "solid", "keep": "solid", "remat": "dotted", "page": "dashed"}


def to_dot(planned: Planned) -> str:
    """The graph as DOT: a box for each node, an arrow for each read.

    An arrow is drawn as the value that is read was decided for: kept ones solid,
    rematerialised ones dotted, paged ones dashed. A box says how often its node runs.
    """
    program, costs, graph = planned.program, planned.costs, planned.program.graph
    given = (*graph.initial, *graph.stored)
    kinds = dict.fromkeys(given, "argument") | decisions(program)
    styles = ", ".join(f"{LABELS[k]} {STYLES[k]}" for k in ("keep", "remat", "page"))
    legend = f"Values: {styles}, the thicker the larger. Energies are modelled."
    curved = "true" if len(graph.nodes) <= CURVED else "line"
    lines = [
        "digraph schedule {",
        '  graph [fontname="sans-serif", fontsize=12, labelloc=t, ranksep=0.3, '
        f"nodesep=0.1, nslimit=1, nslimit1=1, splines={curved}, "
        f"label={_quoted(legend)}];",
        '  node [fontname="sans-serif", fontsize=10, shape=box, style="filled,rounded",'
        ' color="#666666", fillcolor="#FFFFFF"];',
        "  edge [arrowsize=0.5];",
    ]
    for number, node in enumerate(graph.nodes):
        cost = (
            f"{format_seconds(costs.seconds[number])}, "
            f"{format_joules(costs.joules[number])}"
        )
        label, colour = f"{number} {node.name}\n{cost}", COLOURS["keep"] + "40"
        if program.runs[number] > 1:
            label += f"\nruns {program.runs[number]} times"
            colour = COLOURS["remat"]
        lines.append(
            f"  n{number} [label={_quoted(label)}, fillcolor={_quoted(colour)}];"
        )
    largest = max((int(n) for n in costs.nbytes), default=0) or 1
    sources = [v for v in kinds if v not in graph.producer and graph.readers[v]]
    for value in sources:
        name = f"{graph.values[value].name}\n{format_bytes(costs.nbytes[value])}"
        shape = "plain, style=solid, fontsize=8"
        if len(sources) > NAMED:
            name, shape = "", "point, width=0.05"
        lines.append(f"  v{value} [label={_quoted(name)}, shape={shape}];")
    for value, readers in enumerate(graph.readers):
        for reader in readers:
            producer = graph.producer.get(value)
            source = f"v{value}" if producer is None else f"n{producer}"
            kind = kinds[value]
            about = f"{graph.values[value]}: {LABELS[kind]}"
            width = 0.3 + 2.7 * math.sqrt(costs.nbytes[value] / largest)
            lines.append(
                f"  {source} -> n{reader} [tooltip={_quoted(about)}, "
                f"color={_quoted(COLOURS[kind])}, style={STYLES[kind]}, "
                f"penwidth={width:.2f}, weight={1 + round(5 * width)}];"
            )
    return "\n".join([*lines, "}\n"])


def write_dot(path: str | os.PathLike, planned: Planned) -> None:
    """Write `to_dot` to `path`; .svg, .png and .pdf are drawn by Graphviz's `dot`.

    Raises FileNotFoundError if a drawing is asked for and `dot` is not installed.
    """
    path, text = pathlib.Path(path), to_dot(planned)
    if path.suffix not in DRAWN:
        path.write_text(text)
        return
    drawer = shutil.which("dot")
    if drawer is None:
        raise FileNotFoundError(
            f"{path} needs Graphviz, whose program dot is not installed; use "
            f"apt install graphviz, or write {path.with_suffix('.dot')}, which is text"
        )
    command = [drawer, f"-T{path.suffix[1:]}", "-o", os.fspath(path)]
    subprocess.run(command, input=text, text=True, check=True)


def _quoted(text: str) -> str:
    """A string of DOT, in which a backslash starts an escape."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
