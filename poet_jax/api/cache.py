"""Plans in a folder: the second start of a job plans nothing."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import types
from typing import Any

import jax
import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import (
    BasePlanner,
    Budget,
    BudgetLike,
    Plan,
    Planner,
    plan_from_dict,
    plan_to_dict,
    save_json,
)
from poet_jax.core.program import lower
from poet_jax.core.simulate import simulate
from poet_jax.planners.planner import fits

logger = logging.getLogger("poet_jax")

# What reading a file that is damaged may raise; PlanInvalid is a ValueError.
UNREADABLE = OSError, ValueError, LookupError, TypeError, AttributeError


class PlanCache:
    """A folder of JSON files, one per plan, and one for what compiling it told.

    A file is named after a hash of graph, costs, budget and planner: delete the folder
    to plan afresh. A file that cannot be read, or does not fit, is written again. One
    that cannot be written, for example on a full disk, is a warning; an interrupted
    search is not kept. The folder is made if it does not exist.

    Raises OSError for a folder that cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = pathlib.Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            usable = os.access(self.folder, os.R_OK | os.W_OK | os.X_OK)
        except OSError:
            usable = False
        if not usable:
            raise OSError(
                f"A plan_cache was asked for in {os.fspath(self.folder)!r}, which is "
                "not a folder that this user can write to, or cannot be made. It needs "
                'one that can. Type for example plan_cache="plans", or leave it out.'
            )

    def plan(
        self, planner: Planner, graph: Graph, costs: Costs, budget: Budget
    ) -> Plan:
        """`planner(graph, costs, budget)`, or what that was before."""
        path = self._path("plan", graph, costs, budget, planner)
        with contextlib.suppress(*UNREADABLE):
            plan = plan_from_dict(graph, json.loads(path.read_text()))
            if fits(simulate(lower(graph, plan), costs), budget):
                return plan
        plan = planner(graph, costs, budget)
        if not plan.statistics.get("interrupted"):
            self._save(path, plan_to_dict(graph, plan))
        return plan

    def planner(self, planner: Planner) -> Planner:
        """`planner`, whose plans are kept."""
        return _Keeping(self, planner)

    def learnt(
        self, graph: Graph, costs: Costs, budget: BudgetLike, planner: Planner
    ) -> dict[str, int]:
        """What `learn` kept for these, with this version of JAX."""
        path = self._path("compiled", graph, costs, budget, planner)
        with contextlib.suppress(*UNREADABLE):
            kept = json.loads(path.read_text())
            if kept.pop("jax") == jax.__version__:
                return {name: int(number) for name, number in kept.items()}
        return {}

    def learn(
        self,
        graph: Graph,
        costs: Costs,
        budget: BudgetLike,
        planner: Planner,
        numbers: dict[str, int],
    ) -> None:
        """Keep numbers that only a compilation tells."""
        path = self._path("compiled", graph, costs, budget, planner)
        self._save(path, {"jax": jax.__version__} | numbers)

    def _path(
        self,
        kind: str,
        graph: Graph,
        costs: Costs,
        budget: BudgetLike,
        planner: Planner,
    ) -> pathlib.Path:
        key = plan_key(graph, costs, budget, planner)
        return self.folder / f"{kind}-{key}.json"

    def _save(self, path: pathlib.Path, data: dict[str, Any]) -> None:
        try:
            save_json(path, data)
        except OSError as error:
            logger.warning(
                "%s was to be kept, which failed: %s. This run goes on, and the next "
                "start plans again. Free some room there, or type another "
                "plan_cache",
                path,
                error.strerror,
            )


class _Keeping(BasePlanner):
    """A planner whose plans are kept in a cache."""

    def __init__(self, cache: PlanCache, planner: Planner):
        self.cache, self.planner = cache, planner
        self.objective = BasePlanner.of(planner).objective

    def __call__(
        self, graph: Graph, costs: Costs, budget: Budget, start: Plan | None = None
    ) -> Plan:
        return self.cache.plan(self.planner, graph, costs, budget)


def plan_key(graph: Graph, costs: Costs, budget: BudgetLike, planner: Planner) -> str:
    """A hash that is the same on every run and machine for equal inputs.

    Names count where the planner has pins, which go by name. Raises ValueError for a
    planner that is neither a function of a module nor a dataclass.
    """
    if isinstance(planner, types.FunctionType) and "<" not in planner.__qualname__:
        name = f"{planner.__module__}.{planner.__qualname__}"
    elif dataclasses.is_dataclass(planner) and not isinstance(planner, type):
        name = repr(planner)
    else:
        raise ValueError(
            f"A plan_cache was asked for with the planner {planner!r}, whose choices "
            "cannot be told from its name. Plans are kept of functions defined in a "
            "module and of dataclasses. Write the planner as a frozen dataclass, or "
            "leave plan_cache out."
        )
    columns = [np.asarray(x, float).tobytes() for x in vars(costs).values()]
    asked = BasePlanner.of(planner)
    pins = asked.keep or asked.never_page or asked.never_remat
    names = repr([value.name for value in graph.values]) if pins else ""
    return _hash(graph.fingerprint, *columns, repr(budget), name, names)


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]
