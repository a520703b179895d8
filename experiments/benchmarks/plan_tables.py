"""Tables of plans: of this package's graphs, and of the paper's questions."""

from collections.abc import Sequence

from experiments.benchmarks.rows import Row, percent, read, size
from experiments.program import markdown


def plans(kind: str, shares: Sequence[str]) -> str:
    """What each planner costs over keep-all, for every graph of a kind."""
    rows = {
        (row["graph"], row["share"], row["planner"]): row
        for row in read("plan_benchmark/plans")
        if row["kind"] == kind and float(row["time_limit"]) == 20
    }

    def cell(graph: str, share: str, planner: str) -> str:
        row = rows.get((graph, share, planner))
        if row is None or not row["over_keep_all"] or row["status"] == "REFUTED":
            return ""
        return percent(float(row["over_keep_all"]))

    lines = []
    planners = ("greedy", "sqrt", "paging_only", "milp_remat", "milp_highs", "milp")
    for graph in dict.fromkeys(graph for graph, _, _ in rows):
        for share in shares:
            best = rows[graph, share, "milp"]
            cells = [cell(graph, share, planner) for planner in planners]
            if cells[-1]:
                name = f"{graph}, {best['nodes']} nodes"
                rest = percent(float(best["gap"])), f"{float(best['seconds']):.1f}"
                lines.append([name, f"{share} %", *cells, *rest])
    head = ["graph", "memory", "`greedy`", "`sqrt`", "`paging_only`", "remat alone"]
    return markdown([[*head, "HiGHS", "CBC", "gap", "seconds"], *lines])


def solvers() -> str:
    """How often one MILP's plan costs more than another's."""
    costs = {}
    for row in read("plan_benchmark/plans"):
        if float(row["time_limit"]) == 20 and row["over_keep_all"]:
            key = row["graph"], row["kind"], row["share"]
            cost = float(row["over_keep_all"])
            costs.setdefault(key, {})[row["planner"]] = cost
    lines = []
    for planner, name in (
        ("milp_highs", "HiGHS"),
        ("milp_remat", "CBC, remat alone"),
        ("greedy", "`greedy`"),
    ):
        both = [x for x in costs.values() if planner in x and "milp" in x]
        less = sum(x["milp"] < x[planner] - 1e-3 for x in both)
        more = sum(x["milp"] > x[planner] + 1e-3 for x in both)
        only = sum("milp" in x and planner not in x for x in costs.values())
        equal = len(both) - less - more
        lines.append([name, *map(str, (less, equal, more, only))])
    head = ["CBC's plan beside that of", "costs less", "as much", "more"]
    return markdown([[*head, "is the only one"], *lines])


def activations() -> str:
    """Plans with room for parameters and gradients beside the budget."""
    lines = []
    for row in read("plan_benchmark/plans"):
        if row["kind"] == "activations":
            sizes = (size(row[name]) for name in ("keep_all_bytes", "memory_bytes"))
            extra = percent(float(row["over_keep_all"]), 1)
            lines.append([row["graph"], *sizes, extra, percent(float(row["gap"]))])
    return markdown([["graph", "keep-all", "memory", "extra", "gap"], *lines])


def layers() -> str:
    """Seconds until a plan is within 1 % of its bound, by the number of layers."""
    rows = read("plan_benchmark/layers")
    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    lines = {}
    for row in rows:
        words = {"gradient": "gradient", "step": "whole step"}[row["kind"]]
        text = f"{float(row['seconds']):.1f}"
        if row["status"] != "OPTIMAL":
            text += f" (gap {percent(float(row['gap']), 1)})"
        lines.setdefault(f"{words} in {row['share']} %", {})[row["graph"]] = text
    body = [[name, *(cells[g] for g in graphs)] for name, cells in lines.items()]
    return markdown([["", *graphs], *body])


PAPER_PLANNERS = {
    "sqrt": "`sqrt`",
    "capuchin": "Capuchin-like",
    "pofo": "POFO-like",
    "paging": "paging alone",
    "remat": "remat alone",
    "milp": "integrated",
}


def energies(question: str, column: str) -> str:
    """Extra energy of each planner by model, device and `column`."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in read(f"paper/{question}"):
        model = row["model"].removesuffix(f"-{row['device']}").partition(":")[0]
        if row["counted"] == "activations" and question == "ram":
            model += "'s activations"
        key = model, row["device"], row[column]
        found.setdefault(key, {})[row["planner"]] = row

    def cell(row: Row | None) -> str:
        if row is None or not row["joules"]:
            return ""
        return percent(float(row["joules"]) / float(row["keep_all_joules"]) - 1)

    planners = [x for x in PAPER_PLANNERS if any(x in one for one in found.values())]
    lines = []
    order = sorted(found, key=lambda key: (*key[:2], float(key[2])))
    for key in order:
        cells = [cell(found[key].get(planner)) for planner in planners]
        if cells[-1]:
            gap = percent(float(found[key]["milp"]["gap"]))
            shown = f"{float(key[2]):g}" + " %" * (column == "share")
            lines.append([key[0], f"`{key[1]}`", shown, *cells, gap])
    names = [PAPER_PLANNERS[planner] for planner in planners]
    head = ["model", "device", {"share": "RAM"}.get(column, column)]
    return markdown([[*head, *names, "gap"], *lines])


def smallest() -> str:
    """The least RAM of a training step, by what is counted."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in read("paper/smallest"):
        key = row["model"], row["batch_size"]
        found.setdefault(key, {})[row["counted"]] = size(row["smallest_bytes"])
    kinds = list(dict.fromkeys(kind for cells in found.values() for kind in cells))
    lines = [
        [f"`{model}`", batch, *(cells.get(kind, "") for kind in kinds)]
        for (model, batch), cells in found.items()
    ]
    return markdown([["model", "batch", *kinds], *lines])


def rules() -> str:
    """Published plans by deadline, as the simulator judges them."""
    lines = []
    rows = read("paper/rules")
    for deadline in dict.fromkeys(row["deadline"] for row in rows):
        own = [row for row in rows if row["deadline"] == deadline]
        published = [row for row in own if row["published_joules"]]
        refuted = [row for row in published if row["refuted"]]
        ours = [row for row in own if row["milp_joules"]]
        proven = [row for row in ours if row["milp_status"] == "OPTIMAL"]
        counts = map(len, (own, published, refuted, ours, proven))
        lines.append([f"{deadline} times the compute", *map(str, counts)])
    head = ["deadline", "points", "published plans", "refuted", "plans here"]
    return markdown([[*head, "proven optimal"], *lines])
