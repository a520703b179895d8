"""A schedule in words: keep-all beside the plan, and what became of the values."""

import dataclasses
from collections import Counter

from poet_jax.core.costs import node_flops
from poet_jax.core.graph import Graph
from poet_jax.core.plan import PageIn, Status
from poet_jax.core.planned import Planned
from poet_jax.core.program import Program
from poet_jax.core.simulate import Usage
from poet_jax.core.units import (
    format_bytes,
    format_count,
    format_joules,
    format_seconds,
)

LEAST_SHARE = 0.01  # of keep-all's peak; smaller loops are not listed


def decisions(program: Program) -> dict[int, str]:
    """ "keep", "remat" or "page" for every value that a node writes or a page-in loads.

    A value is paged if it is read back from storage, rematerialised if its node runs
    more than once, kept otherwise.
    """
    result = {
        v: "keep" if program.runs[number] < 2 else "remat"
        for number, node in enumerate(program.graph.nodes)
        for v in node.writes
    }
    result.update(
        (x.value, "page") for x in program.instructions if isinstance(x, PageIn)
    )
    return result


def counted(planned: Planned, compiled_bytes: int | None) -> Usage:
    """What the plan uses, with XLA's own count of memory where only that is within the
    budget."""
    if compiled_bytes is None or not _is_over(planned):
        return planned.usage
    return dataclasses.replace(planned.usage, peak_bytes=compiled_bytes)


def _is_over(planned: Planned) -> bool:
    """Whether the plan fits as it is compiled, and not as it is modelled."""
    return planned.usage.peak_bytes > planned.budget.memory_bytes


def comparison(usage: Usage, baseline: Usage) -> list[tuple[str, str, str, str]]:
    """Rows of what is used, keep-all's, the plan's, and the change."""
    rows = []
    for label, attribute, show in (
        ("memory", "peak_bytes", format_bytes),
        ("storage", "store_bytes", format_bytes),
        ("time", "seconds", format_seconds),
        ("energy (modelled)", "joules", format_joules),
    ):
        before, after = getattr(baseline, attribute), getattr(usage, attribute)
        change = f"{after / before - 1:+.1%}" if before else ""
        rows.append((label, show(before), show(after), change))
    return rows


def aligned(before: str, after: str, usage: Usage, baseline: Usage) -> list[str]:
    """Lines of `comparison` below the names of what is compared."""
    rows = [("", before, after, ""), *comparison(usage, baseline)]
    return [f"{a:18s} {b:>12s} {c:>12s} {d:>9s}" for a, b, c, d in rows]


def remarks(
    planned: Planned, compiled_bytes: int | None = None, compilations: int = 0
) -> list[str]:
    """What became of the values, and how good the plan is."""
    plan, program, baseline = planned.plan, planned.program, planned.baseline
    counts = Counter(decisions(program).values())
    lines = [
        f"values: {counts['keep']} kept, {counts['remat']} rematerialised, "
        f"{counts['page']} paged; "
        f"{format_count(program.recomputed, 'node')} run again",
        f"{plan.planner}, {plan.solve_seconds:.1f} s: bound {plan.bound:.6g}, gap "
        f"{plan.gap:.2%}",
    ]
    lines.append(plan.status.value)
    if loops := closed_loops(program.graph, int(LEAST_SHARE * baseline.peak_bytes)):
        lines.append(f"loops of one node each: {', '.join(loops)}")
    is_all_kept = not (counts["remat"] or counts["page"] or program.recomputed)
    if planned.budget.memory_bytes >= baseline.peak_bytes and is_all_kept:
        lines.append("The budget covers keep-all: nothing is repeated or paged.")
    is_whole = plan.planner == "keep_all" and plan.status is Status.OPTIMAL
    if is_whole and _is_over(planned):
        lines.append("It runs as jax.jit compiles it, which is within the budget.")
    if compiled_bytes is not None:
        lines.append(
            f"compiled: {format_bytes(compiled_bytes)} by XLA's own count, "
            f"{format_count(compilations, 'compilation')}"
        )
    if program.graph.devices > 1:
        lines.append(f"on {program.graph.devices} devices: bytes are those of each")
    return lines


def closed_loops(graph: Graph, least_bytes: int) -> list[str]:
    """Loops that a plan treats as one node, with the bytes that each writes."""
    loops = [
        (sum(graph.values[v].nbytes for v in node.writes), node.name)
        for node in graph.nodes
        if any(e.primitive.name in ("scan", "while") for e in node.equations)
        and not node.name.endswith("]")  # a piece of a loop
    ]
    return [
        f"{name} ({format_bytes(nbytes)})"
        for nbytes, name in sorted(loops, reverse=True)
        if nbytes >= least_bytes
    ]


def title(planned: Planned) -> str:
    nodes, values = planned.graph.nodes, planned.graph.values
    return f"{len(nodes)} nodes, {len(values)} values, budget {planned.budget}"


def sizes(**graphs: Graph) -> str:
    """Nodes, bytes and FLOPs of each graph, as a table: what passes make of a graph.

    *written* is of all that nodes write. *saved* is of what the forward pass writes and
    the backward pass reads; groups of both count as their last
    equation does, so that graphs of `trace` say it best.
    """
    rows = [("", "nodes", "written", "saved", "FLOPs")]
    for name, graph in graphs.items():
        written = {v for node in graph.nodes for v in node.writes}
        forward = {v for node in graph.nodes if not node.backward for v in node.writes}
        read = {v for node in graph.nodes if node.backward for v in node.reads}
        nbytes = [
            format_bytes(sum(graph.values[v].nbytes for v in values))
            for values in (written, forward & read)
        ]
        flops = sum(map(node_flops, graph.nodes))
        rows.append((name, str(len(graph.nodes)), nbytes[0], nbytes[1], f"{flops:.4g}"))
    width = max(len(row[0]) for row in rows)
    return "\n".join(
        f"{name:{width}s} {nodes:>6s} {written:>11s} {saved:>11s} {flops:>10s}"
        for name, nodes, written, saved, flops in rows
    )


def table(planned: Planned, compiled_bytes: int | None, compilations: int) -> str:
    """Keep-all beside the plan, what became of the values, and how good the plan is."""
    usage = counted(planned, compiled_bytes)
    lines = aligned("keep-all", "this plan", usage, planned.baseline)
    lines += remarks(planned, compiled_bytes, compilations)
    return "\n  ".join([title(planned), *lines])
