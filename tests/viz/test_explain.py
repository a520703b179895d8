"""What a schedule shows of itself: energies, matrices, reasons, traces and pages."""

import dataclasses
import functools
import html.parser
import itertools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from strategies import DEVICE, HEURISTICS, budgeted_graphs, examples
from toy import OPTIONS, W, X, chain, gradient, long_chain

import poet_jax
from poet_jax.api.planning import make_schedule
from poet_jax.viz.dot import to_dot
from poet_jax.viz.perfetto import trace_events
from poet_jax.viz.timeline import timeline


def schedules(problem):
    """The schedules that the heuristics find for (graph, costs, bytes)."""
    graph, costs, memory_bytes = problem
    for planner in HEURISTICS.values():
        try:
            yield make_schedule(graph, costs, max(memory_bytes, 1), planner)
        except poet_jax.BudgetTooSmall:
            continue


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "traced"])
def ran(request):
    """(schedule, run) of a small gradient that is paged.

    `traced`: with the times of stages.
    """
    executor = poet_jax.HostExecutor(poet_jax.HostStore(), trace=request.param)
    options = OPTIONS | {"executor": executor, "planner": poet_jax.planners.paging_only}
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        poet_jax.schedule(gradient, 1, **options).plan(W, X)
    scheduled = poet_jax.schedule(gradient, caught.value.smallest_bytes, **options)
    scheduled(W, X)
    assert scheduled.last_run.bytes_paged_in
    return scheduled.plan(W, X), scheduled.last_run


def is_transfer(instruction):
    return isinstance(instruction, poet_jax.core.PageIn | poet_jax.core.PageOut)


def is_compute(instruction):
    return isinstance(instruction, poet_jax.core.Run)


# Timelines


@given(budgeted_graphs())
def test_the_joules_of_instructions_and_of_idling_are_the_steps(problem):
    for schedule in schedules(problem):
        usage, costs = schedule.usage, schedule.costs
        idle = costs.static_watts * usage.seconds
        assert usage.joules == pytest.approx(usage.instruction_joules.sum() + idle)
        for x, joules in zip(
            schedule.program.instructions, usage.instruction_joules, strict=True
        ):
            match x:
                case poet_jax.core.Run((node,)):
                    assert joules == costs.joules[node]
                case poet_jax.core.PageIn(value):
                    assert joules == costs.page_in_joules[value]
                case poet_jax.core.PageOut(value):
                    assert joules == costs.page_out_joules[value]
                case poet_jax.core.Free():
                    assert joules == 0


def test_a_run_measures_each_transfer_and_if_traced_each_stage(ran, request):
    schedule, run = ran
    is_traced = request.node.callspec.params["ran"]
    graph, instructions = schedule.graph, schedule.program.instructions
    moves = [x for x in run.spans if x.lane == "storage"]
    assert len(moves) == sum(map(is_transfer, instructions))
    for kind, nbytes in (
        (poet_jax.core.PageIn, run.bytes_paged_in),
        (poet_jax.core.PageOut, run.bytes_paged_out),
    ):
        moved = [x.value for x in instructions if isinstance(x, kind)]
        assert nbytes == sum(graph.values[v].nbytes for v in moved)
    seconds = sum(x.stop_seconds - x.start_seconds for x in moves)
    assert run.storage_seconds == pytest.approx(seconds)
    stages = [x for x in run.spans if x.lane == "compute"]
    assert bool(stages) == is_traced
    for before, after in itertools.pairwise(stages):
        assert before.stop_seconds <= after.start_seconds
    for x in run.spans:
        assert -1e-3 <= x.start_seconds <= x.stop_seconds <= run.seconds + 1e-3
    assert run.peak_bytes == schedule.compiled_bytes <= schedule.budget.memory_bytes
    assert "spans" not in repr(run)


def test_what_reads_no_page_runs_beside_the_page_that_comes_in():
    """In one of five steps at least: another process may have the processor."""
    executor = poet_jax.HostExecutor(poet_jax.HostStore(), trace=True)
    options = OPTIONS | {"executor": executor, "planner": poet_jax.planners.paging_only}
    w, x = jnp.eye(256), jnp.ones((16384, 256))  # activations of 16 MiB
    scheduled = poet_jax.schedule(gradient, "75%", **options)
    beside = []
    for _ in range(5):
        scheduled(w, x)
        spans = scheduled.last_run.spans
        stages = [x for x in spans if x.lane == "compute"]
        pages = [x for x in spans if x.name.startswith("page in")]
        assert pages
        beside += [
            (stage, page)
            for page in pages
            for stage in stages
            if page.start_seconds <= stage.start_seconds + 1e-3
            and stage.start_seconds < (page.start_seconds + page.stop_seconds) / 2
            and stage.stop_seconds > page.stop_seconds
        ]
    assert beside


@given(budgeted_graphs())
def test_ram_over_time_is_what_each_value_takes_for_as_long_as_it_is_there(problem):
    """The timeline goes by instructions, the reasons go by values."""
    for schedule in schedules(problem):
        usage = schedule.usage
        line = timeline(schedule)
        assert line.live_bytes.max() == usage.peak_bytes
        assert list(line.seconds) == sorted(line.seconds)
        lengths = np.diff(np.append(line.seconds, usage.seconds))
        by_time = (sum(line.layers.values()) * lengths).sum()
        by_value = sum(x.nbytes * x.resident_seconds for x in schedule.reasons())
        assert by_time == pytest.approx(by_value)


# Matrices


@given(budgeted_graphs())
def test_the_matrices_are_the_program(problem):
    for schedule in schedules(problem):
        graph, program = schedule.graph, schedule.program
        found = schedule.matrices()
        count = len(graph.nodes)
        assert (np.diag(found.R) == 1).all() and not np.triu(found.R, 1).any()
        assert found.R.sum() == count + program.recomputed
        nbytes, stage, begins = schedule.costs.nbytes, 0, True
        for x, live_bytes in zip(
            program.instructions, schedule.usage.live_bytes, strict=True
        ):
            if begins and isinstance(x, poet_jax.core.Run | poet_jax.core.PageIn):
                present = found.S_ram[stage]
                if isinstance(x, poet_jax.core.Run):
                    (node,), new, over = x.nodes, x.writes, x.over
                    more = schedule.costs.workspace_bytes[node]
                else:
                    new, over, more = [x.value], (), 0
                more += sum(nbytes[v] for v in new if not present[v])
                more -= sum(nbytes[v] for v, _ in over)
                assert live_bytes == present @ nbytes + more
                begins = False
            if is_compute(x) and x.nodes == (stage,):
                stage, begins = stage + 1, True
        if begins:
            present = np.flatnonzero(found.S_ram[-1])
            assert {*graph.pinned, *graph.returned} == {*present}
        for stage, node in enumerate(graph.nodes):
            made = {
                v for n in np.flatnonzero(found.R[stage]) for v in graph.nodes[n].writes
            }
            there = np.flatnonzero(found.S_ram[stage] | found.S_storage[stage])
            assert {*node.reads} <= {*there} | made
        assert (found.S_storage @ nbytes).max() <= schedule.usage.store_bytes


# Reasons


@given(budgeted_graphs())
def test_a_reason_has_the_costs_of_what_was_decided(problem):
    for schedule in schedules(problem):
        graph, costs = schedule.graph, schedule.costs
        joules = [0.0] * len(graph.values)
        runs = [0] * len(graph.nodes)
        for x, cost in zip(
            schedule.program.instructions,
            schedule.usage.instruction_joules,
            strict=True,
        ):
            if is_transfer(x):
                joules[x.value] += cost
            elif is_compute(x):
                runs[x.nodes[0]] += 1
        for value, number in graph.producer.items():
            joules[value] += (runs[number] - 1) * costs.joules[number]
        found = schedule.reasons()
        assert [x.value for x in found] == list(range(len(graph.values)))
        assert [x.joules for x in found] == pytest.approx(joules)
        for x in found:
            again = x.value in graph.producer and runs[graph.producer[x.value]] > 1
            assert (x.decision == "remat") <= again
            assert (x.decision == "pinned") <= (x.value in graph.pinned)


@pytest.mark.parametrize(
    ("planner", "memory_bytes", "expected"),
    [
        (
            poet_jax.MilpPlanner(paging=False),
            28,
            [
                "x (8 B), keep: A donated argument: in RAM until its last read. "
                "Freeing it while it is idle would save 8 B for 4 s. No node can make "
                "it again. Paging it out and in would cost 2 s, 500 mJ.",
                "layer1 (8 B), remat: layer1 runs 2 times; running it again costs 1 s, "
                "5 J. 8 B less in RAM for 3 s. Paging it out and in would cost 2 s, "
                "500 mJ.",
                "layer2 (8 B), keep: Freeing it while it is idle would save 8 B for 1 "
                "s. Running layer2 again would cost 1 s, 1 J. Paging it out and in "
                "would cost 2 s, 500 mJ.",
                "layer3 (8 B), keep: Never idle: freeing it earlier saves nothing.",
            ],
        ),
        (
            poet_jax.MilpPlanner(remat=False),
            20,
            [
                "x (8 B), page: Paged out, and in once: 2 s, of which 1 s hidden under "
                "computing, and 500 mJ. 8 B less in RAM for 6 s. No node can make it "
                "again.",
                "layer1 (8 B), page: Paged out, and in once: 2 s, of which 1 s hidden "
                "under computing, and 500 mJ. 8 B less in RAM for 3 s. Running layer1 "
                "again would cost 1 s, 5 J.",
            ],
        ),
    ],
    ids=["remat", "page"],
)
def test_reasons_are_sentences(planner, memory_bytes, expected):
    """By hand: every node and every transfer of the chain takes a second."""
    schedule = make_schedule(*chain(), memory_bytes, planner)
    assert [str(x) for x in schedule.reasons()][: len(expected)] == expected


def test_a_reason_says_why_a_value_is_never_paged():
    """Keys, and scalars whose type JAX may promote away."""

    def fun(key, x):
        first = jax.random.split(key)[0]
        factor = jnp.where(x.sum() > 0, 1.0, 2.0)
        return jnp.sin(factor * x) @ x + factor * jax.random.normal(first, x.shape)

    passes = (poet_jax.passes.reorder,)
    scheduled = poet_jax.schedule(fun, "1MiB", device=DEVICE, passes=passes)
    schedule = scheduled.plan(jax.random.key(0), jnp.ones((8, 8)))
    said = {"a weakly typed array": set(), "a PRNG key": set()}
    for reason in schedule.reasons():
        for kind, values in said.items():
            if f"It is {kind}, which is never paged." in str(reason):
                values.add(schedule.graph.values[reason.value])
    assert all(value.weak_type for value in said["a weakly typed array"])
    assert all("key" in str(value.dtype) for value in said["a PRNG key"])
    assert all(said.values())


# Traces


def slices(events, process):
    return [x for x in events if x["ph"] == "X" and x["pid"] == process]


def counters(events, process, name):
    """[[seconds, value]] of a counter."""
    return np.array(
        [
            (x["ts"] / 1e6, *x["args"].values())
            for x in events
            if (x["ph"], x["pid"], x["name"]) == ("C", process, name)
        ]
    )


def assert_is_a_step(events, process, program, seconds):
    """One slice for each compute and transfer, in two lanes without overlap."""
    bars = slices(events, process)
    for lane, belongs in ((1, is_compute), (2, is_transfer)):
        row = [x for x in bars if x["tid"] == lane]
        assert len(row) == sum(map(belongs, program.instructions))
        for before, after in itertools.pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    ends = [x["ts"] + x["dur"] for x in bars]
    assert all(0 <= end <= seconds * 1e6 + 1e-3 for end in ends)


@given(budgeted_graphs())
def test_a_trace_is_the_planned_step(problem):
    for schedule in schedules(problem):
        program, usage = schedule.program, schedule.usage
        events = trace_events(schedule)
        assert json.loads(json.dumps(events)) == events
        assert_is_a_step(events, 1, program, usage.seconds)
        ends = [x["ts"] + x["dur"] for x in slices(events, 1)]
        assert max(ends) == pytest.approx(usage.seconds * 1e6)
        assert counters(events, 1, "live bytes")[:, 1].max() == usage.peak_bytes
        energy = counters(events, 1, "energy (modelled)")
        assert energy[-1] == pytest.approx([usage.seconds, usage.joules])
        assert (np.diff(energy, axis=0) >= -1e-9).all()


def test_a_trace_has_the_measured_step_beside_the_planned_one(ran, tmp_path):
    schedule, run = ran
    schedule.to_perfetto(tmp_path / "trace.json", run)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert_is_a_step(events, 1, schedule.program, schedule.usage.seconds)
    moves = [[x["name"] for x in slices(events, n) if x["tid"] == 2] for n in (1, 2)]
    assert sorted(moves[0]) == sorted(moves[1])
    stages = [x for x in slices(events, 2) if x["tid"] == 1]
    assert len(stages) == max(1, len(run.spans) - len(moves[1]))
    assert counters(events, 2, "compiled bytes")[0, 1] == run.peak_bytes
    assert not len(counters(events, 2, "energy (modelled)"))


def test_a_trace_of_a_step_without_spans_is_one_slice(tmp_path):
    scheduled = poet_jax.schedule(gradient, "1GiB", **OPTIONS)
    scheduled(W, X)
    whole, run = scheduled.plan(W, X), scheduled.last_run
    assert run.spans == ()
    whole.to_perfetto(tmp_path / "trace.json", run)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert_is_a_step(events, 1, whole.program, whole.usage.seconds)
    (step,) = slices(events, 2)
    assert step["dur"] == pytest.approx(run.seconds * 1e6, abs=1e-3)


# Graphs


def renamed(schedule, name):
    """`schedule` with `name` as the name of every node and value."""
    graph = schedule.graph
    values = [dataclasses.replace(v, name=name) for v in graph.values]
    nodes = [dataclasses.replace(n, name=name) for n in graph.nodes]
    graph = dataclasses.replace(graph, values=tuple(values), nodes=tuple(nodes))
    return poet_jax.Schedule.of(graph, schedule.costs, schedule.budget, schedule.plan)


ODD = 'a "quoted" \\N & <script>alert(1)</script>'


@given(budgeted_graphs())
def test_dot_has_a_box_for_each_node_and_an_arrow_for_each_read(problem):
    for schedule in schedules(problem):
        for each in (schedule, renamed(schedule, ODD)):
            text = to_dot(each)
            quoted = re.sub(r'"([^"\\]|\\.)*"', "''", text)
            assert '"' not in quoted and "\\" not in quoted
            assert len(re.findall(r"^  n\d+ \[", quoted, re.M)) == len(each.graph.nodes)
            reads = sum(len(node.reads) for node in each.graph.nodes)
            assert len(re.findall(r"^  [nv]\d+ -> n\d+ \[", quoted, re.M)) == reads


def test_a_drawing_needs_graphviz(ran, tmp_path, monkeypatch):
    schedule = renamed(ran[0], ODD)
    schedule.to_dot(tmp_path / "graph.dot")
    assert (tmp_path / "graph.dot").read_text().startswith("digraph")
    if shutil.which("dot"):
        schedule.to_dot(tmp_path / "graph.svg")
        assert "</svg>" in (tmp_path / "graph.svg").read_text()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="apt install graphviz"):
        schedule.to_dot(tmp_path / "graph.pdf")


# Pages and figures


class Page(html.parser.HTMLParser):
    """The tables of a page, as texts of their cells, and all attributes."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.open, self.attributes = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes.extend((tag, *attribute) for attribute in attrs)
        if tag not in ("meta", "input", "path", "use", "rect", "stop"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag == "td":
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.tables[-1][-1][-1] += data


@examples(5)
@given(budgeted_graphs())
def test_a_page_stands_alone_and_has_a_row_for_each_value(tmp_path, problem):
    for schedule in itertools.islice(schedules(problem), 1):
        schedule = renamed(schedule, ODD)
        schedule.to_html(tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text()
        page = Page(text)
        assert not page.open and "http" not in text and "<script>alert" not in text
        assert not [x for x in page.attributes if x[1] in ("src", "href")]
        rows = page.tables[1][1:]
        assert len(rows) == len(schedule.graph.values)
        assert all(row[0].startswith(ODD) and len(row) == 7 for row in rows)
        sizes = sorted(value.nbytes for value in schedule.graph.values)
        keys = [float(x[2]) for x in page.attributes if x[1] == "data-key"]
        assert sorted(keys[::4]) == sizes


@examples(5)
@given(budgeted_graphs())
def test_figures_of_any_schedule_are_drawn(tmp_path, problem):
    for schedule in itertools.islice(schedules(problem), 1):
        for name, draw in (
            ("plan.svg", schedule.plot),
            ("matrices.svg", schedule.plot_matrices),
        ):
            draw(tmp_path / name)
            assert "</svg>" in (tmp_path / name).read_text()


@pytest.mark.parametrize("fun", [lambda x: x, lambda x: None, lambda x: x[:0] * 2])
def test_figures_of_a_step_without_cost_are_drawn(fun, tmp_path):
    schedule = poet_jax.schedule(fun, "100%", **OPTIONS).plan(jnp.ones((0, 5)))
    schedule.plot(tmp_path / "plan.svg")
    schedule.plot_matrices(tmp_path / "matrices.svg")
    assert len(list(tmp_path.iterdir())) == 2


def test_what_runs_as_jax_jit_compiles_it_is_shown_with_its_bytes(tmp_path):
    """Where its plan, of single equations, is not within the budget."""
    scheduled = poet_jax.schedule(
        lambda x: jnp.sum(jnp.tanh(x) * 2), "1.5MiB", passes=(), **OPTIONS
    )
    schedule = scheduled.plan(jnp.ones(2**18))
    assert schedule.usage.peak_bytes > schedule.budget.memory_bytes
    schedule.to_html(tmp_path / "report.html")
    for shown in (
        str(schedule),
        schedule._repr_html_(),
        (tmp_path / "report.html").read_text(),
    ):
        assert "It runs as jax.jit compiles it" in shown
        memory = re.sub(r"(<[^>]*>|\s)+", " ", shown).split(" memory ")[1]
        assert memory.split(" storage ")[0].startswith("3.0 MiB 1.0 MiB -66")


# In a notebook.


@functools.cache
def public_objects():
    """One of each kind that a user meets, of a step of hundreds of values."""

    def step(ws, x):
        def loss(ws):
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return jnp.sum(h**2)

        value, gradients = jax.value_and_grad(loss)(ws)
        return [w - g for w, g in zip(ws, gradients, strict=True)], value

    ws, x = [jnp.ones((32, 32)) for _ in range(40)], jnp.ones((64, 32))
    options = dict(device=poet_jax.devices.JETSON_TX2, planner=poet_jax.greedy)
    scheduled = poet_jax.schedule(step, "80%", **options)
    plan = scheduled.plan(ws, x)
    scheduled(ws, x)
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        poet_jax.schedule(step, 1, **options).plan(ws, x)
    front = scheduled.pareto(ws, x, budgets=["80%", "100%"])
    store = poet_jax.HostStore()
    return [
        *(plan, plan.plan, front, caught.value),  # with HTML
        *(scheduled, plan.graph, plan.costs, plan.program, plan.usage, plan.budget),
        *(scheduled.last_run, scheduled.executor, plan.compile(), plan.graph.nodes[0]),
        *(front.points[0], plan.matrices(), plan.reasons()[0], poet_jax.host()),
        make_schedule(*long_chain(14), "100%", poet_jax.greedy).matrices(),
        *(options["device"], poet_jax.MilpPlanner(), poet_jax.PaperPlanner(), store),
        *(poet_jax.to_storage(jnp.ones((600, 600)), store), scheduled.effects(ws, x)),
    ]


def test_every_object_is_a_line_or_two():
    for x in public_objects():
        assert len(repr(x)) <= 2000, type(x)
        assert type(x).__name__ in repr(x)


def test_notebooks_show_tables_figures_and_the_largest_values():
    schedule, plan, front, error = public_objects()[:4]
    shown = [x._repr_html_() for x in (schedule, plan, front, error)]
    for text in shown:
        html.parser.HTMLParser().feed(text)
        assert "<table>" in text and "<script" not in text
    assert all("<svg" in text for text in (shown[0], shown[2]))
    largest = sorted(schedule.reasons(), key=lambda x: -x.nbytes)[:10]
    assert all(html.escape(x.name) in shown[0] for x in largest)
    assert schedule.plan.status.value in shown[1]
    assert all(html.escape(name) in shown[3] for name in error.values[:10])
    assert str(error.smallest_bytes) in shown[3]
