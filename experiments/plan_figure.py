"""Draw the figure of the plan that docs/tutorials/reading_a_plan.ipynb reads.

    python -m experiments.plan_figure

plans the step of the notebook's first cell, and writes docs/plan.png, in half a minute.
Everything in the figure is planned: nothing runs.
"""

from typing import Any

from absl import app

from experiments.pages import ROOT, blocks
from experiments.program import program


@program
def main() -> None:
    cell = blocks(ROOT / "docs" / "tutorials" / "reading_a_plan.ipynb")[0]
    namespace: dict[str, Any] = {}
    exec(cell.code, namespace)
    namespace["schedule"].plot(ROOT / "docs" / "plan.png")


if __name__ == "__main__":
    app.run(main)
