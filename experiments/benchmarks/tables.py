"""Write the tables of results into README.md and docs/benchmarks/.

    python -m experiments.benchmarks.tables

They come from the rows under experiments/results/ that are committed, and stand
between the comments `<!-- table: NAME -->` and `<!-- end -->` of a page, where NAME is
a key of `TABLES`.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from absl import app

from experiments.benchmarks import plan_tables
from experiments.benchmarks.rows import (
    ROOT,
    Row,
    percent,
    read,
    read_json,
    rows_of,
    size,
)
from experiments.edge import tables as edge
from experiments.program import markdown, program
from poet_jax.core.units import format_seconds

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "benchmarks").glob("*.md")))
README_ROWS = (
    ("ResNet-18, batch 64", "resnet18", "50"),
    ("ResNet-50, batch 16", "resnet50", "50"),
    ("BERT, 6 layers", "bert6", "75"),
    ("GPT, 24 layers scanned", "gpt24", "20"),
    ("128,000 words, loss", "vocabulary", "20"),
)
SHARES = ("75", "50", "35", "25", "15")  # percent, of the tables of plans
LOOP_WAYS = {
    "checkpoint": "`jax.checkpoint`",
    "nested": "nested scans",
}  # of training through loops with JAX alone
SMALL_SHARES = ("75", "50", "25")  # of those of the paper's own graphs


def ratios(name: str, shares: Sequence[str]) -> str:
    """Ratios to `jax.jit` of each model, by share."""
    rows = rows_of(name)

    def cell(model: str, share: str) -> str:
        row = rows.get((model, share))
        if row is None:
            return ""
        return f"{float(row['ratio']):.2f}" if row["ratio"] else "does not fit"

    lines = []
    for model in dict.fromkeys(model for model, _ in rows):
        used = next(
            row["jit_bytes"]
            for (other, _), row in rows.items()
            if other == model and row["jit_bytes"]
        )
        cells = [cell(model, share) for share in shares]
        lines.append([model, size(used), *cells])
    return markdown([["step", "`jax.jit`", *headed(shares)], *lines])


def headed(shares: Sequence[str]) -> list[str]:
    """Heads of columns by share of memory."""
    return [x if x == "least" else f"{x} %" for x in shares]


def readme() -> str:
    """A few steps, and two whose state does not fit."""
    rows = rows_of("step_benchmark") | rows_of("loops")
    lines = []
    for title, model, share in README_ROWS:
        row = rows[model, share]
        sizes = size(row["jit_bytes"]), size(row["budget_bytes"])
        lines.append([title, *sizes, f"{float(row['ratio']):.2f}"])
    paged = read_json("paged_state/bert12")
    ours, plain = paged["rows"]
    sizes = size(plain["rise_bytes"]), size(ours["budget_bytes"])
    lines.append(["BERT-base, state in a file", *sizes, f"{paged['ratio']:.2f}"])
    adapted = {row["case"]: row for row in read("language_models/language_models")}
    row = adapted["lora_1b_int4"]
    sizes = size(row["jit_rise_bytes"]), size(row["budget_bytes"])
    lines.append(["LoRA of 1.1 billion, int4", *sizes, f"{float(row['ratio']):.2f}"])
    head = ["step", "memory of `jax.jit`", "budget", "time of `jax.jit`"]
    return markdown([head, *lines])


def checkpoint() -> str:
    """Memory and time of each step with `jax.checkpoint` around every block."""
    lines = []
    for (model, share), row in rows_of("step_benchmark").items():
        if share == "100" and row["checkpoint_bytes"]:
            sizes = size(row["jit_bytes"]), size(row["checkpoint_bytes"])
            lines.append([model, *sizes, f"{float(row['checkpoint_ratio']):.2f}"])
    head = ["step", "`jax.jit`", "with `jax.checkpoint`", "time of `jax.jit`"]
    return markdown([head, *lines])


def paged_state() -> str:
    """BERT-base with its state in a file, and in RAM."""
    result = read_json("paged_state/bert12")
    lines = []
    for row in result["rows"]:
        moved = "bytes_paged_in" in row
        lines.append([
            f"`{row['step']}`",
            size(row["state_bytes"]),
            size(row["budget_bytes"]) if moved else "none",
            size(row["compiled_bytes"]) if moved else "",
            size(row["rise_bytes"]),
            format_seconds(row["seconds"]),
            f"{size(row['bytes_paged_in'])}, {size(row['bytes_paged_out'])}"
            if moved else "",
            format_seconds(row["waiting_seconds"]) if moved else "",
        ])  # fmt: skip
    head = ["step", "state", "budget", "XLA's count", "rise", "seconds", "in, out"]
    return markdown([[*head, "waiting"], *lines])


def language_models() -> str:
    """Memory and speed of fine-tuning, beside `jax.jit` with all in RAM."""
    lines = []
    for row in read("language_models/language_models"):
        base = row["quantize"] or "float32"
        lines.append([
            f"{row['size']}, {row['update']}, {base}",
            f"{row['batch']} x {row['length']}",
            *(size(row[x]) for x in ("jit_rise_bytes", "budget_bytes", "rise_bytes")),
            *(row[x] for x in ("jit_tokens_per_second", "tokens_per_second")),
            f"{float(row['ratio']):.2f}",
        ])  # fmt: skip
    head = ["model, update, base", "tokens", "rise of `jax.jit`", "budget", "rise"]
    speed = ["tokens per second of `jax.jit`", "within the budget", "ratio of times"]
    return markdown([[*head, *speed], *lines])


def language_schemes() -> str:
    """What each scheme of fine-tuning a small language model learns and costs."""
    lines = []
    for row in read("language_schemes/language_schemes"):
        lines.append([
            row["scheme"].replace("_", " "),
            f"{int(row['trained_parameters']):,}",
            size(row["compiled_bytes"]),
            f"{float(row['seconds']):.2f}",
            *(f"{float(row[x]):.3g}" for x in row if x.endswith("_joules")),
            f"{float(row['loss_before']):.3f}",
            f"{float(row['loss_after']):.3f}",
        ])  # fmt: skip
    head = ["scheme", "trained", "memory", "seconds a step"]
    joules = ["joules, Raspberry Pi 5", "Jetson Orin", "loss before", "after"]
    return markdown([[*head, *joules], *lines])


SYSTEMS = {
    "torch": "PyTorch",
    "torch_checkpoint": "PyTorch, gradient checkpointing",
    "torch_budget": "PyTorch, compiled, a fifth of activations",
    "jit": "`jax.jit`",
    "jit_checkpoint": "`jax.jit`, `jax.checkpoint`",
    "poet_jax": "`poet_jax`",
    "poet_jax_int4": "`poet_jax`, int4 base",
}


def beside_torch() -> str:
    """Memory and speed of fine-tuning by several systems."""
    lines = []
    for row in read("beside_torch/beside_torch"):
        lines.append([
            f"{row['task']}, {row['batch']} x {row['length']}",
            SYSTEMS[row["system"]],
            *(size(row[x]) if row[x] else "" for x in ("budget_bytes", "step_bytes")),
            size(row["process_bytes"]),
            row["tokens_per_second"],
        ])  # fmt: skip
    head = ["task", "system", "budget", "memory of a step", "of the process"]
    return markdown([[*head, "tokens per second"], *lines])


def store() -> str:
    """Rates of pages beside plain transfers of the same file."""
    lines = []
    for row in read_json("store_benchmark/store")["rows"]:
        cells = [size(row["page_bytes"])]
        for kind in ("write", "read"):
            rate = row[f"{kind}_bytes_per_second"]
            cells += [f"{rate / 1e9:.2f} GB/s", f"{row[f'{kind}_ratio']:.2f}"]
        lines.append(cells)
    head = ["page", "out", "of plain writes", "in", "of plain reads"]
    return markdown([head, *lines])


def hard_limit() -> str:
    """What became of a process under a limit of the operating system's."""
    lines = []
    titles = {"resnet18": "ResNet-18", "bert12": "BERT-base, state in a file"}
    for name, title in titles.items():
        for row in read_json(f"hard_limit/{name}")["rows"]:
            sizes = size(row["budget_bytes"]), size(row["limit_bytes"])
            lines.append([title, f"`{row['step']}`", *sizes, row["outcome"]])
    head = ["model", "step", "budget", "limit of the process", "outcome"]
    return markdown([head, *lines])


def shapes() -> str:
    """What the process's memory rose by, beside budget and count."""
    names = ("budget_bytes", "compiled_bytes", "rise_bytes")
    lines = [
        [row["scenario"].replace("_", " "), row["device"].replace("_", " ").lower()]
        + [size(row[name]) for name in names]
        for row in read("shapes/shapes")
    ]
    head = ["steps", "planned for", "budget", "XLA's count", "rise"]
    return markdown([head, *lines])


def tpu() -> str:
    """What the TPU compiler takes beside a step's arguments, for budgets of a share."""
    lines = []
    for row in read("tpu/tpu"):
        room_bytes = int(row["jit_temp_bytes"]) * int(row["share"]) // 100
        cells = [row["model"], row["means"]]
        cells += [size(row["jit_temp_bytes"]), size(room_bytes)]
        if row["compiled_bytes"]:
            cells += [size(row["temp_bytes"]), f"{float(row['modelled_ratio']):.2f}"]
        else:
            cells += ["does not fit", ""]
        lines.append(cells)
    head = ["step", "means", "`jax.jit`", "budget", "compiled", "modelled time"]
    return markdown([head, *lines])


def harnesses() -> str:
    """How many of JAX's own tests of operations give what they give under `jax.jit`."""
    rows = read("harnesses/harnesses")
    columns = ("harnesses", "to_the_bit", "to_rounding", "different")
    counts = [str(sum(int(row[column]) for row in rows)) for column in columns]
    head = ("primitives", "harnesses", "equal to the bit", "to rounding", "different")
    return markdown([head, (str(len(rows)), *counts)])


def endurance() -> str:
    """What a process holds as steps go on."""
    result = read_json("endurance/endurance")
    lines = []
    for moment in ("after_a_tenth", "halfway", "at_the_end"):
        held = result[moment]
        sizes = [held[f"{name}_bytes"] for name in ("resident", "store", "file")]
        counts = str(held["threads"]), str(held["open_files"])
        lines.append([moment.replace("_", " "), *map(size, sizes), *counts])
    return markdown([["", "RAM", "store", "its file", "threads", "open files"], *lines])


def schemes(name: str) -> str:
    """Accuracy and cost of training a part; means over seeds."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in read(f"{name}/schemes"):
        label = row["update"]
        if not label.startswith("{"):
            groups.setdefault((label, row["budget"]), []).append(row)

    def mean(rows: Iterable[Row], column: str) -> float | None:
        values = [float(row[column]) for row in rows if row[column]]
        return sum(values) / len(values) if values else None

    lines = []
    for (update, budget), rows in groups.items():
        accuracy = mean((r for r in rows if int(r["steps"])), "accuracy")
        if accuracy is None:
            continue
        ratio, nbytes = mean(rows, "ratio"), mean(rows, "peak_bytes")
        lines.append([
            f"`{update}`",
            "none" if budget == "all" else budget,
            percent(accuracy, 1),
            "" if nbytes is None else size(round(nbytes)),
            "" if ratio is None else f"{ratio:.2f}",
        ])  # fmt: skip
    head = ["what is trained", "budget", "accuracy", "memory", "time of `nnx.jit`"]
    return markdown([head, *lines])


def points(name: str, ways: dict[str, str], shares: Sequence[str]) -> str:
    """Memory and time of `jax.jit` of each step, written in each way, and by share."""
    found: dict[str, dict[str, Row]] = {}
    for (model, share), row in rows_of(name).items():
        found.setdefault(model, {})[share] = row

    def point(row: Row | None, nbytes: str, ratio: str) -> str:
        if row is None:
            return ""
        if not row[ratio]:
            return "does not fit"
        return f"{size(row[nbytes])}, {float(row[ratio]):.2f}"

    lines = []
    for model, rows in found.items():
        first = rows[shares[0]]
        beside = [(first, f"{way}_bytes", f"{way}_ratio") for way in ways]
        beside += [(rows.get(share), "compiled_bytes", "ratio") for share in shares]
        lines.append([model, size(first["jit_bytes"]), *(point(*x) for x in beside)])
    head = ["step", "`jax.jit`", *ways.values(), *headed(shares)]
    return markdown([head, *lines])


def loop_compilers() -> str:
    """Seconds to plan and to compile loops."""
    lines = [
        [
            row["model"],
            row["share"] + (" %" if row["share"].isdigit() else ""),
            *(f"{float(row[name]):.1f}" for name in (
                "plan_seconds", "compile_seconds", "jit_compile_seconds"
            )),
        ]
        for row in read("loops/loops")
        if row["ratio"]
    ]  # fmt: skip
    return markdown([["step", "budget", "plan", "compile", "`jax.jit`"], *lines])


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "steps": lambda: ratios("step_benchmark", ("100", "75", "50", "least")),
    "small_steps": lambda: ratios("small_steps", ("100", "60", "least")),
    "checkpoint": checkpoint,
    "plans_gradient": lambda: plan_tables.plans("gradient", SHARES),
    "plans_step": lambda: plan_tables.plans("step", SHARES),
    "plans_instance": lambda: plan_tables.plans("instance", SMALL_SHARES),
    "solvers": plan_tables.solvers,
    "activations": plan_tables.activations,
    "layers": plan_tables.layers,
    "loops": lambda: points("loops", LOOP_WAYS, ("50", "20", "10", "3", "1")),
    "loop_compilers": loop_compilers,
    "paged_state": paged_state,
    "language_models": language_models,
    "beside_torch": beside_torch,
    "language_schemes": language_schemes,
    "store": store,
    "hard_limit": hard_limit,
    "shapes": shapes,
    "endurance": endurance,
    "harnesses": harnesses,
    "tpu": tpu,
    "shards": lambda: points(
        "shards", {"checkpoint": "`jax.checkpoint`"}, ("75", "50", "least")
    ),
    "ram": lambda: plan_tables.energies("ram", "share"),
    "instances": lambda: plan_tables.energies("instances", "share"),
    "deadline": lambda: plan_tables.energies("deadline", "deadline"),
    "smallest": plan_tables.smallest,
    "rules": plan_tables.rules,
    "finetune": lambda: schemes("finetune"),
    "adapt": lambda: schemes("adapt"),
    "edge_memory": edge.memory,
    "edge_seconds": edge.seconds,
    "edge_programs": edge.programs,
}


def written(text: str) -> str:
    """`text` with each table as the files have it now."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}",
        text,
        flags=re.S,
    )


@program
def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    app.run(main)
