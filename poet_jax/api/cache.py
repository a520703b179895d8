"""Plans kept in a folder, so that a restarted job does not plan again."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import types
from collections.abc import Callable
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

# Errors of reading a damaged file; PlanInvalid is a ValueError.
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)


class PlanCache:
    """A folder of JSON files, one per plan and one for the facts of its compilation.

    Files are named after a hash of graph, costs, budget and planner; delete the folder
    to plan again. A damaged file is written again. A file that cannot be written gives
    a warning. Plans of an interrupted search are not kept.

    Raises OSError for a folder that cannot be created or written to.
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
                f"plan_cache: {os.fspath(self.folder)!r} cannot be created or written "
                'to. Use another folder, such as plan_cache="plans", or leave it out.'
            )

    def plan(
        self,
        planner: Planner,
        graph: Graph,
        costs: Costs,
        budget: Budget,
        make: Callable[[], Plan] | None = None,
    ) -> Plan:
        """`planner(graph, costs, budget)`, or the plan kept of it, or else `make()`."""
        path = self._path("plan", graph, costs, budget, planner)
        with contextlib.suppress(*UNREADABLE):
            plan = plan_from_dict(graph, json.loads(path.read_text()))
            usage = simulate(lower(graph, plan), costs)
            if isinstance(plan.statistics, dict) and fits(usage, budget):
                return plan
        plan = make() if make else planner(graph, costs, budget)
        if not plan.statistics.get("interrupted"):
            self._save(path, plan_to_dict(graph, plan))
        return plan

    def planner(self, planner: Planner) -> Planner:
        """`planner`, with its plans kept."""
        return _Keeping(self, planner)

    def learnt(
        self, graph: Graph, costs: Costs, budget: BudgetLike, planner: Planner
    ) -> dict[str, int]:
        """The numbers that `learn` kept with this version of JAX; else empty."""
        path = self._path("compiled", graph, costs, budget, planner)
        with contextlib.suppress(*UNREADABLE):
            kept = json.loads(path.read_text())
            is_known = kept.pop("jax") == jax.__version__ and kept.get("allowed", 1)
            if is_known and all(type(x) is int and x >= 0 for x in kept.values()):
                return kept
        return {}

    def learn(
        self,
        graph: Graph,
        costs: Costs,
        budget: BudgetLike,
        planner: Planner,
        numbers: dict[str, int],
    ) -> None:
        """Keep numbers that only compiling tells."""
        path = self._path("compiled", graph, costs, budget, planner)
        self._save(path, {"jax": jax.__version__} | numbers)

    def _path(self, kind: str, *inputs: Any) -> pathlib.Path:
        return self.folder / f"{kind}-{plan_key(*inputs)}.json"

    def _save(self, path: pathlib.Path, data: dict[str, Any]) -> None:
        try:
            save_json(path, data)
        except OSError as error:
            logger.warning(
                "%s cannot be written: %s. The next start plans again; free disk space "
                "or use another plan_cache",
                path,
                error.strerror,
            )


class _Keeping(BasePlanner):
    """A planner whose plans are kept in a cache, whoever makes them `now`."""

    def __init__(self, cache: PlanCache, planner: Planner, now: Planner | None = None):
        self.cache, self.planner = cache, planner
        self.now = BasePlanner.of(now or planner)
        self.objective = self.now.objective

    def hastened(self) -> "_Keeping":
        return _Keeping(self.cache, self.planner, self.now.hastened())

    def __call__(
        self, graph: Graph, costs: Costs, budget: Budget, start: Plan | None = None
    ) -> Plan:
        make = functools.partial(self.now, graph, costs, budget, start)
        return self.cache.plan(self.planner, graph, costs, budget, make)


def plan_key(graph: Graph, costs: Costs, budget: BudgetLike, planner: Planner) -> str:
    """A hash of the inputs, the same in every process and on every machine.

    Names of values count only if the planner pins values by name. Raises ValueError for
    a planner that is neither a module's function nor a dataclass.
    """
    if isinstance(planner, types.FunctionType) and "<" not in planner.__qualname__:
        name = f"{planner.__module__}.{planner.__qualname__}"
    elif dataclasses.is_dataclass(planner) and not isinstance(planner, type):
        name = repr(planner)
    else:
        raise ValueError(
            "plan_cache needs a planner that is a module's function or a dataclass, "
            f"got {planner!r}. Write it as a frozen dataclass, or leave plan_cache out."
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
