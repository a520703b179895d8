"""Points of a sweep over models, devices, budgets and planners, and their rows."""

import dataclasses
import functools
import itertools
import math
import pathlib
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import poet_jax
from experiments import steps
from experiments.paper import baselines
from experiments.paper.layer_graphs import FOLDER
from experiments.program import appending, read_rows
from poet_jax.api.transform import PASSES
from poet_jax.cli import named_device
from poet_jax.planners.planner import (
    fits,
    floor_bytes,
    is_too_late,
    judge_plan,
    keep_everything,
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of a sweep, before it is planned; the fields are flags' values.

    With kind "instance" the model is the name of a planner instance, whose costs are
    its own: dataset is empty and device is only a label.
    """

    model: str
    dataset: str
    batch_size: int
    kind: str
    counted: str
    device: str
    share: float
    deadline: float | None
    planner: str

    @property
    def key(self) -> tuple[str, ...]:
        """The values as a CSV file holds them."""
        return tuple("" if x is None else str(x) for x in dataclasses.astuple(self))


RESULTS = (
    "nodes", "keep_all_bytes", "keep_all_joules", "keep_all_seconds", "memory_bytes",
    "status", "joules", "seconds", "peak_bytes", "bytes_paged_out", "recomputed", "gap",
    "planning_seconds", "reason",
)  # fmt: skip
COLUMNS = (*(field.name for field in dataclasses.fields(Point)), *RESULTS)


@functools.lru_cache(maxsize=1)
def traced(
    model: str, dataset: str, batch_size: int, kind: str
) -> tuple[poet_jax.Graph, int]:
    """The graph of a gradient or a whole step, and how many arguments are the batch."""
    case = steps.flax_case(model, batch_size, dataset)
    *_, batch = jax.eval_shape(case.init)
    return steps.traced(case, kind, PASSES), len(jax.tree.leaves(batch))


@functools.lru_cache(maxsize=1)
def priced(
    model: str,
    dataset: str,
    batch_size: int,
    kind: str,
    counted: str,
    device: str,
) -> tuple[poet_jax.Graph, poet_jax.Costs]:
    if kind == "instance":
        return poet_jax.load_instance(FOLDER / f"{model}.json")
    graph, batch = traced(model, dataset, batch_size, kind)
    costs = poet_jax.price(graph, named_device(device))
    if counted == "activations":
        costs = activations_only(graph, costs, graph.arguments[-batch:])
    return graph, costs


def activations_only(
    graph: poet_jax.Graph, costs: poet_jax.Costs, batch: Iterable[int]
) -> poet_jax.Costs:
    """`costs` for the published accounting, in which only activations take memory.

    What depends on parameters alone takes none, nor does a gradient of a parameter on
    its way out, nor what XLA allocates inside a node.
    """
    depends = set(batch)
    for node in graph.nodes:
        if not depends.isdisjoint(node.reads):
            depends.update(node.writes)
    nbytes = np.where(np.isin(np.arange(len(graph.values)), list(depends)), 1, 0)
    nbytes = nbytes * costs.nbytes
    nbytes[list(graph.outputs)] = 0
    for node in reversed(graph.nodes):
        for value in node.reads:
            if value in graph.producer and all(
                _passes_on(graph, costs, depends, value, reader)
                and any(
                    nbytes[w] == 0 and costs.nbytes[w] == costs.nbytes[value]
                    for w in graph.nodes[reader].writes
                )
                for reader in graph.readers[value]
            ):
                nbytes[value] = 0
    return dataclasses.replace(
        costs, nbytes=nbytes, workspace_bytes=np.zeros_like(costs.workspace_bytes)
    )


MOVES = {"transpose", "reshape", "rev", "squeeze", "convert_element_type", "copy"}


def _passes_on(graph, costs, depends: set[int], value: int, reader: int) -> bool:
    """Whether a node only moves a value, or updates with it what is as large."""
    node = graph.nodes[reader]
    return {e.primitive.name for e in node.equations} <= MOVES or any(
        v not in depends and costs.nbytes[v] == costs.nbytes[value] for v in node.reads
    )


class Sweep:
    """Plans points one after the other; what is planned for one serves the next."""

    def __init__(self, time_limit_seconds: float):
        milp = functools.partial(
            poet_jax.MilpPlanner, time_limit_seconds=time_limit_seconds, progress=False
        )
        self.planners: dict[str, Any] = {
            "keep_all": poet_jax.keep_all,
            "greedy": poet_jax.greedy,
            "sqrt": poet_jax.planners.sqrt,
            "capuchin": baselines.capuchin,
            "pofo": baselines.pofo,
            "paging": milp(remat=False),
            "remat": milp(paging=False),
            "milp": milp(),
        }
        self._last: dict[Any, poet_jax.Plan | poet_jax.BudgetTooSmall] = {}
        self._of: Any = None

    def plan(self, point: Point) -> dict[str, Any]:
        """The row of a point."""
        start = time.monotonic()
        if point.planner not in self.planners:
            raise ValueError(
                f"A planner named {point.planner!r} was asked for. The planners are "
                f"{', '.join(self.planners)}. Use --planner=milp."
            )
        storage = math.inf
        if point.kind != "instance":
            storage = named_device(point.device).store_bytes
        of = dataclasses.astuple(point)[:6]
        graph, costs = priced(*of)
        if self._of != of[:5]:
            self._of, self._last = of[:5], {}
        everything = keep_everything(graph, costs).usage
        seconds = point.deadline and point.deadline * everything.seconds
        budget = poet_jax.Budget(
            max(int(everything.peak_bytes * point.share / 100), 1), seconds
        ).on_storage_of(storage, graph)
        row = dataclasses.asdict(point) | {
            "nodes": len(graph.nodes),
            "keep_all_bytes": everything.peak_bytes,
            "keep_all_joules": everything.joules,
            "keep_all_seconds": everything.seconds,
            "memory_bytes": budget.memory_bytes,
        }
        plan = self._plan(point.planner, point.device, graph, costs, budget)
        row["planning_seconds"] = f"{time.monotonic() - start:.2f}"
        if isinstance(plan, poet_jax.BudgetTooSmall):
            status = verdict(plan, costs, budget)
            return row | {"status": status, "reason": str(plan)}
        program = poet_jax.lower(graph, plan)
        usage = poet_jax.simulate(program, costs)
        return row | {
            "status": plan.status.name,
            "joules": usage.joules,
            "seconds": usage.seconds,
            "peak_bytes": usage.peak_bytes,
            "bytes_paged_out": usage.bytes_paged_out,
            "recomputed": program.recomputed,
            "gap": f"{plan.gap:.6f}",
        }

    def _plan(self, name: str, device: str, graph, costs, budget):
        key = name, device, budget
        if key not in self._last:
            planner, parts = self.planners[name], [name]
            if name == "milp":  # it may do all that the others may
                parts += ["paging", "remat"]
                for part in parts[1:]:
                    self._plan(part, device, graph, costs, budget)
            if isinstance(planner, poet_jax.MilpPlanner):
                best = self._best(parts, graph, costs, budget)
                planner = functools.partial(planner, start=best)
            try:
                self._last[key] = planner(graph, costs, budget)
            except poet_jax.BudgetTooSmall as error:
                self._last[key] = error
        return self._last[key]

    def _best(self, parts, graph, costs, budget) -> poet_jax.Plan | None:
        """The cheapest plan that fits of those for any device, budget and deadline."""
        known = [
            (judge_plan(graph, costs, plan).usage, plan)
            for (part, _, asked), plan in self._last.items()
            if part in parts and asked.memory_bytes <= budget.memory_bytes
            if isinstance(plan, poet_jax.Plan)
        ]
        fitting = [(u.joules, n) for n, (u, _) in enumerate(known) if fits(u, budget)]
        return known[min(fitting)[1]][1] if fitting else None


def verdict(
    error: poet_jax.BudgetTooSmall, costs: poet_jax.Costs, budget: poet_jax.Budget
) -> str:
    """IMPOSSIBLE where that is proven, and NONE where no plan was found."""
    too_small = budget.memory_bytes < error.least_bytes
    return "IMPOSSIBLE" if too_small or is_too_late(costs, budget) else "NONE"


def run(
    points: Iterable[Point],
    path: pathlib.Path,
    time_limit: float,
) -> None:
    """Append a row to the CSV file at `path` for each point that is not there yet."""
    done = {tuple(row[x] for x in COLUMNS[:9]) for row in read_rows(path)}
    todo = [point for point in points if point.key not in done]
    sweep = Sweep(time_limit)
    with appending(path, COLUMNS) as append, tqdm(todo, unit="plan") as progress:
        for point in progress:
            progress.set_postfix_str(" ".join(point.key[i] for i in (0, 5, 6, 8)))
            append(sweep.plan(point))


def grid(
    models, datasets, batches, kinds, counted, devices, shares, deadlines, planners
) -> list[Point]:
    """Every combination, in an order in which a graph is traced and priced once."""
    return list(
        itertools.starmap(
            Point,
            itertools.product(
                models, datasets, batches, kinds, counted, devices, shares,
                deadlines, planners,
            ),
        )
    )  # fmt: skip


def rules_row(
    graph: poet_jax.Graph,
    costs: poet_jax.Costs,
    share: int,
    deadline: float,
    limit: float,
) -> dict[str, Any]:
    """A plan by the published rules, with what the simulator says of it, and ours."""
    most = keep_everything(graph, costs).usage.peak_bytes
    least = floor_bytes(graph, costs)
    memory_bytes = int(least + (most - least) * share / 100)
    seconds = deadline * float(costs.seconds.sum())
    budget = poet_jax.Budget(memory_bytes, seconds)
    row: dict[str, Any] = {
        "nodes": len(graph.nodes),
        "memory_bytes": memory_bytes,
        "deadline_seconds": seconds,
    }
    try:
        plan = poet_jax.PaperPlanner("HIGHS", time_limit_seconds=6 * limit)(
            graph, costs, budget
        )
        usage = judge_plan(graph, costs, plan).usage
        over = [
            name
            for name, bad in (
                ("memory", usage.peak_bytes > memory_bytes),
                ("deadline", usage.seconds > seconds),
            )
            if bad
        ]
        row |= {
            "published_status": plan.status.name,
            "published_joules": plan.objective,
            "peak_bytes": usage.peak_bytes,
            "seconds": usage.seconds,
            "refuted": " ".join(over),
        }
    except poet_jax.BudgetTooSmall:
        row["published_status"] = "NONE"  # found in its time
    try:
        planner = poet_jax.MilpPlanner(time_limit_seconds=limit, progress=False)
        plan = planner(graph, costs, budget)
        usage = judge_plan(graph, costs, plan).usage
        row |= {
            "milp_status": plan.status.name,
            "milp_joules": plan.objective,
            "milp_seconds": usage.seconds,
        }
    except poet_jax.BudgetTooSmall as error:
        row["milp_status"] = verdict(error, costs, budget)
    return row
