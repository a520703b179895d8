"""A schedule as a trace for ui.perfetto.dev: planned, and beside it measured."""

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.plan import Free, PageIn, PageOut
from poet_jax.core.planned import Planned
from poet_jax.core.simulate import Usage
from poet_jax.emit.executor import Run, Span
from poet_jax.viz.figures import LABELS
from poet_jax.viz.table import decisions
from poet_jax.viz.timeline import timeline

PLANNED, MEASURED = 1, 2  # processes
COMPUTE, STORAGE = 1, 2  # threads

Event = dict[str, Any]


def trace_events(planned: Planned, run: Run | None = None) -> list[Event]:
    """The planned step as process 1 and `run` as process 2, in trace-event format.

    The planned one has a slice for every compute and every transfer, on two threads,
    and counters of live bytes and of joules since the start. The measured one has the
    run's spans, and its compiled bytes; without traced stages the step is one slice.
    The format is that of Chrome's tracing: times in microseconds.
    """
    events = [
        *_process(PLANNED, "planned"),
        *_slices(planned),
        *_live(planned),
        *_energy(planned.costs, planned.usage),
    ]
    if run is None:
        return events
    events.extend(_process(MEASURED, "measured"))
    spans = run.spans
    if not any(span.lane == "compute" for span in spans):
        spans = (Span("the step", "compute", 0.0, run.seconds), *spans)
    lanes = {"compute": COMPUTE, "storage": STORAGE}
    for span in spans:
        times = span.start_seconds, span.stop_seconds
        events.append(_slice(MEASURED, lanes[span.lane], span.name, *times, {}))
    compiled = {"bytes": run.peak_bytes}
    events.append(_counter(MEASURED, "compiled bytes", 0.0, compiled))
    return events


def write_trace(path: str | os.PathLike, planned: Planned, run: Run | None) -> None:
    """Write `trace_events` to `path`, as JSON."""
    events = trace_events(planned, run)
    with open(path, "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _process(pid: int, name: str) -> Iterator[Event]:
    names = ((0, "process", name), (COMPUTE, "thread", "compute"))
    for tid, kind, text in (*names, (STORAGE, "thread", "storage")):
        about = {"ph": "M", "pid": pid, "tid": tid}
        yield about | {"name": f"{kind}_name", "args": {"name": text}}
        order = {"sort_index": tid if tid else pid}
        yield about | {"name": f"{kind}_sort_index", "args": order}


def _slices(planned: Planned) -> Iterator[Event]:
    program, costs, usage = planned.program, planned.costs, planned.usage
    graph, made = program.graph, decisions(program)
    seen: set[int] = set()
    for row, x in enumerate(program.instructions):
        start, stop = usage.start_seconds[row], usage.stop_seconds[row]
        about: dict[str, Any] = {"instruction": row}
        about["joules (modelled)"] = float(usage.instruction_joules[row])
        if isinstance(x, PageIn | PageOut):
            value = graph.values[x.value]
            word = "page in" if isinstance(x, PageIn) else "page out"
            about["bytes"] = int(costs.nbytes[x.value])
            yield _slice(PLANNED, STORAGE, f"{word} {value.name}", start, stop, about)
        elif not isinstance(x, Free):
            (number,) = x.nodes
            again = number in seen
            seen.add(number)
            about |= {
                "node": number,
                "run again": again,
                "reads": [graph.values[v].name for v in x.reads],
                "writes": {graph.values[v].name: LABELS[made[v]] for v in x.writes},
                "workspace bytes": int(costs.workspace_bytes[number]),
            }
            name = graph.nodes[number].name + " (again)" * again
            yield _slice(PLANNED, COMPUTE, name, start, stop, about)


def _live(planned: Planned) -> Iterator[Event]:
    line = timeline(planned)
    for seconds, live in zip(line.seconds, line.live_bytes, strict=True):
        yield _counter(PLANNED, "live bytes", seconds, {"bytes": int(live)})


def _energy(costs: Costs, usage: Usage) -> Iterator[Event]:
    """Joules since the start: what is done by then, and static power."""
    order = np.argsort(usage.stop_seconds, kind="stable")
    seconds = np.append(usage.stop_seconds[order], usage.seconds)
    spent = np.append(0.0, usage.instruction_joules[order]).cumsum()
    spent = np.append(spent[1:], spent[-1]) + costs.static_watts * seconds
    yield _counter(PLANNED, "energy (modelled)", 0.0, {"joules": 0.0})
    last = np.append(np.diff(seconds) > 0, True)
    for second, joules in zip(seconds[last], spent[last], strict=True):
        values = {"joules": float(joules)}
        yield _counter(PLANNED, "energy (modelled)", second, values)


def _microseconds(seconds: float) -> float:
    """In whole nanoseconds, so that slices which meet do not overlap."""
    return round(float(seconds) * 1e9) / 1e3


def _slice(
    pid: int, tid: int, name: str, start: float, stop: float, about: dict[str, Any]
) -> Event:
    ts = _microseconds(start)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": ts,
        "dur": round(_microseconds(stop) - ts, 3),
        "args": about,
    }


def _counter(pid: int, name: str, seconds: float, values: dict[str, Any]) -> Event:
    ts = _microseconds(seconds)
    return {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": ts, "args": values}
