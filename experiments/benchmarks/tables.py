"""Write the tables of measured steps into README.md and docs/benchmarks.md.

    python -m experiments.benchmarks.tables

They come from the committed rows of `experiments.benchmarks.step_benchmark`,
`small_steps` and `paged_state`, between the comments `<!-- table: NAME -->` and `<!--
end -->` of a page.
"""

import json
import pathlib
import re
from collections.abc import Sequence

from absl import app

from experiments.program import markdown, program, read_rows
from poet_jax.core.units import format_bytes

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
README_ROWS = (
    ("ResNet-18, batch 64", "resnet18", "50"),
    ("ResNet-50, batch 16", "resnet50", "50"),
    ("BERT, 6 layers", "bert6", "75"),
    ("GPT, 12 layers", "gpt12", "50"),
    ("U-Net, diffusion", "unet", "50"),
)


def rows_of(name: str) -> dict[tuple[str, str], dict[str, str]]:
    """Rows of a benchmark's CSV file, by model and share."""
    file = "steps" if name == "step_benchmark" else name
    rows = read_rows(RESULTS / name / f"{file}.csv")
    return {(row["model"], row["share"]): row for row in rows}


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
        lines.append([model, format_bytes(int(used)), *cells])
    head = [x if x == "least" else f"{x} %" for x in shares]
    return markdown([["step", "`jax.jit`", *head], *lines])


def readme() -> str:
    """A few steps, and one whose state does not fit."""
    rows = rows_of("step_benchmark")
    lines = []
    for title, model, share in README_ROWS:
        row = rows[model, share]
        sizes = (int(row[name]) for name in ("jit_bytes", "budget_bytes"))
        lines.append([title, *map(format_bytes, sizes), f"{float(row['ratio']):.2f}"])
    paged = json.loads((RESULTS / "paged_state" / "bert12.json").read_text())
    ours, plain = paged["rows"]
    sizes = (plain["rise_bytes"], ours["budget_bytes"])
    title = "BERT-base, state in a file"
    lines.append([title, *map(format_bytes, sizes), f"{paged['ratio']:.2f}"])
    head = ["step", "memory of `jax.jit`", "budget", "time of `jax.jit`"]
    return markdown([head, *lines])


def written(text: str) -> str:
    """`text` with each table as the files have it now."""
    tables = {
        "readme": readme(),
        "steps": ratios("step_benchmark", ("100", "75", "50", "least")),
        "small_steps": ratios("small_steps", ("100", "60", "least")),
    }
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{tables[match[2]]}\n\n{match[3]}",
        text,
        flags=re.S,
    )


@program
def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    app.run(main)
