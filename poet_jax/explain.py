"""A schedule as a table and as a figure."""

import os
from collections import Counter
from typing import Any

from poet_jax.graph import Graph
from poet_jax.plan import Budget, PageIn, Plan
from poet_jax.program import Free, Fused, Program, computed
from poet_jax.simulate import Usage
from poet_jax.units import format_bytes, format_count, format_joules, format_seconds


def decisions(program: Program) -> dict[int, str]:
    """ "keep", "remat" or "page" for every value that a node writes or a page-in loads.

    A value is paged if it is read back from storage, rematerialised if its node runs
    more than once, kept otherwise.
    """
    runs = Counter(node for x in program.instructions for node in computed(x))
    result = {
        v: "keep" if runs[number] < 2 else "remat"
        for number, node in enumerate(program.graph.nodes)
        for v in node.writes
    }
    result.update(
        (x.value, "page") for x in program.instructions if isinstance(x, PageIn)
    )
    return result


def table(
    graph: Graph,
    budget: Budget,
    plan: Plan,
    program: Program,
    usage: Usage,
    baseline: Usage,
) -> str:
    """Keep-all beside the plan, what became of the values, and how good the plan is."""
    counts = Counter(decisions(program).values())
    rows = [("", "keep-all", "this plan", "")]
    for label, attribute, show in (
        ("memory", "peak_bytes", format_bytes),
        ("storage", "store_bytes", format_bytes),
        ("time", "seconds", format_seconds),
        ("energy (modelled)", "joules", format_joules),
    ):
        before, after = getattr(baseline, attribute), getattr(usage, attribute)
        change = f"{after / before - 1:+.1%}" if before else ""
        rows.append((label, show(before), show(after), change))
    lines = [
        f"{len(graph.nodes)} nodes, {len(graph.values)} values, budget {budget}",
        *(f"  {a:18s} {b:>12s} {c:>12s} {d:>9s}" for a, b, c, d in rows),
        f"  values: {counts['keep']} kept, {counts['remat']} rematerialised, "
        f"{counts['page']} paged; "
        f"{format_count(program.recomputed, 'node')} run again",
        f"  {plan.planner}, {plan.solve_seconds:.1f} s: bound {plan.bound:.6g}, gap "
        f"{plan.gap:.2%}",
        f"  {plan.status.value}",
    ]
    if budget.memory_bytes >= baseline.peak_bytes:
        lines.append("  The budget covers keep-all: nothing is repeated or paged.")
    if program.computes == 1 < len(graph.nodes):
        lines.append("  The step is one executable, as under jax.jit.")
    return "\n".join(lines)


def new_figure(**options: Any) -> Any:
    """An empty matplotlib figure; ImportError with what to type without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "A figure was asked for, and matplotlib is not installed. It is an "
            'optional part of poet_jax. Type pip install "poet_jax[plot]".'
        ) from error
    return Figure(layout="constrained", **options)


def plot(
    path: str | os.PathLike, budget: Budget, program: Program, usage: Usage, base: Usage
) -> None:
    """Draw live bytes over the planned step, what fills them, and the two lanes.

    The file's type follows its name (.png, .svg, .pdf). Needs matplotlib, which
    `pip install "poet_jax[plot]"` brings; raises ImportError without it.
    """
    mib = 2.0**20
    layers = _live_by_decision(program)
    figure = new_figure(figsize=(9, 5))
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    # Okabe and Ito's colours, which are told apart without red or green.
    colours = {
        "argument": "#999999",
        "keep": "#56B4E9",
        "remat": "#E69F00",
        "page": "#009E73",
    }
    labels = {
        "argument": "arguments",
        "keep": "kept",
        "remat": "rematerialised",
        "page": "paged",
    }
    memory.stackplot(
        usage.stop_seconds,
        *([n / mib for n in layers[kind]] for kind in colours),
        step="pre",
        colors=list(colours.values()),
        labels=[labels[kind] for kind in colours],
        linewidth=0,
    )
    memory.plot(
        usage.stop_seconds,
        usage.live_bytes / mib,
        color="black",
        linewidth=0.6,
        drawstyle="steps-pre",
        label="with results and workspace",
    )
    memory.axhline(
        budget.memory_bytes / mib, color="#D55E00", linestyle="--", label="budget"
    )
    memory.axhline(
        base.peak_bytes / mib, color="black", linestyle=":", label="keep-all's peak"
    )
    memory.set_ylabel("RAM (MiB)")
    memory.set_ylim(0, 1.05 * max(base.peak_bytes, usage.peak_bytes) / mib)
    memory.set_title(
        f"planned: peak {format_bytes(usage.peak_bytes)}, "
        f"{format_seconds(usage.seconds)}, {format_joules(usage.joules)} (modelled)",
        fontsize=10,
    )
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    first, again, pages = [], [], []
    seen = set()
    for row, x in enumerate(program.instructions):
        start = float(usage.start_seconds[row])
        bar = start, float(usage.stop_seconds[row]) - start
        nodes = computed(x)
        if nodes:
            (first if seen.isdisjoint(nodes) else again).append(bar)
            seen.update(nodes)
        elif not isinstance(x, Free):
            pages.append(bar)
    lanes.broken_barh(first, (1.1, 0.8), color=colours["keep"])
    lanes.broken_barh(again, (1.1, 0.8), color=colours["remat"])
    lanes.broken_barh(pages, (0.1, 0.8), color=colours["page"])
    lanes.set_yticks([0.5, 1.5], ["storage", "compute"])
    lanes.set_ylim(0, 2)
    lanes.set_xlabel("planned time in the step (s)")
    lanes.set_xlim(0, usage.seconds)
    figure.savefig(path, dpi=150)


def _live_by_decision(program: Program) -> dict[str, list[int]]:
    """[I] bytes alive after each instruction, by what was decided for the value."""
    graph = program.graph
    kinds = dict.fromkeys(graph.initial, "argument") | decisions(program)
    resident = set(graph.initial)
    live = Counter({kind: 0 for kind in ("argument", "keep", "remat", "page")})
    for value in resident:
        live[kinds[value]] += graph.values[value].nbytes
    rows: dict[str, list[int]] = {kind: [] for kind in live}
    for x in program.instructions:
        arrived = set(program.writes(x)) - resident
        gone = {x.value} if isinstance(x, Free) else set()
        if isinstance(x, PageIn):
            arrived = {x.value} - resident
        if isinstance(x, Fused):
            gone = {old for old, _ in x.replaces}
        for value in arrived:
            live[kinds[value]] += graph.values[value].nbytes
        resident |= arrived
        resident -= gone
        for value in gone:
            live[kinds[value]] -= graph.values[value].nbytes
        for kind, column in rows.items():
            column.append(live[kind])
    return rows
