"""The code in README.md and docs/, and what it prints.

    python -m experiments.pages
    python -m experiments.pages docs/tutorials/first_budget.ipynb

runs the code cells of the notebooks, each in a process of its own, and writes what they
print into them, in a minute. A cell whose output differs in planning times alone keeps
what it has.

For a page, the blocks ```python run in order in one namespace. A block ```text output
directly after one is what it prints. A block ```python FILE does not run: it is an
excerpt of that file. For a notebook, every code cell runs, and prints its output.

mkdocs.yml names this file as a hook, too: notebooks become pages of the site as they
are, without running, and figures and rows under experiments/results/ become a part of
it.
"""

import contextlib
import importlib.metadata
import io
import multiprocessing
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import nbformat
from absl import app

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *NOTEBOOKS]
JAX_OF_PAGES = "0.10"
FENCE = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<body>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
NOT_COMPARED = (
    (r"(plan by \w+ in|  \w+Planner,) \d+\.\d s", r"\1 _ s"),
    (r"\d[\d.]* [mu]?s, peak ", "_ s, peak "),  # a run's
)


class Block(NamedTuple):
    """Code of a page, the number of its first line, and what it prints, if it says."""

    code: str
    line: int
    output: str | None


def blocks(path: pathlib.Path) -> list[Block]:
    """The code of a page, or of a notebook, whose lines begin anew in each cell."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, 4).cells
        code = [cell for cell in cells if cell.cell_type == "code"]
        return [Block(cell.source, 1, printed(cell)) for cell in code]
    return list(fenced(path.read_text()))


def fenced(text: str) -> Iterator[Block]:
    """The code of a page in Markdown."""
    fences = list(FENCE.finditer(text))
    for number, fence in enumerate(fences):
        if fence["kind"] != "python":
            continue
        output = None
        following = fences[number + 1] if number + 1 < len(fences) else None
        if following and following["kind"] == "text output":
            between = text[fence.end() : following.start()]
            assert not between.strip(), f"{between!r} is before the output of a block"
            output = following["body"]
        yield Block(fence["body"], 1 + text.count("\n", 0, fence.start("body")), output)


def printed(cell: Any) -> str:
    """What a code cell of a notebook printed."""
    assert all(output.output_type == "stream" for output in cell.outputs)
    return "".join(output.text for output in cell.outputs)


def links(text: str) -> list[str]:
    """The files that a page links to or shows, by their paths from its folder."""
    return LINK.findall(FENCE.sub("", text))


def run(blocks: list[Block], name: str) -> list[str]:
    """What each block prints, run in order in one namespace."""
    namespace, outputs = {"__name__": "__main__"}, []
    for code, line, _ in blocks:
        out = io.StringIO()
        # Blank lines before it, so that a traceback shows the page's line numbers.
        compiled = compile("\n" * (line - 1) + code, name, "exec")
        with contextlib.redirect_stdout(out):
            exec(compiled, namespace)
        outputs.append(out.getvalue())
    return outputs


def comparable(text: str) -> str:
    """`text` without trailing spaces and what a clock says; with another JAX than that
    of the pages, whose equations may be others, without numbers and alignment, too."""
    text = "\n".join(line.rstrip() for line in text.strip().splitlines())
    for pattern, instead in NOT_COMPARED:
        text = re.sub(pattern, instead, text)
    if not importlib.metadata.version("jax").startswith(f"{JAX_OF_PAGES}."):
        text = re.sub(r"[ ]+", " ", re.sub(r"\d[\d.,]*", "_", text))
    return text


def write_outputs(path: pathlib.Path) -> None:
    """Run a notebook, and write what its cells print into it."""
    notebook = nbformat.read(path, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        outputs = run(blocks(path), path.name)
    for cell, text in zip(cells, outputs, strict=True):
        cell.execution_count = None
        if comparable(printed(cell)) != comparable(text):
            stream = nbformat.v4.new_output("stream", name="stdout", text=text)
            cell.outputs = [stream] if text else []
    nbformat.write(notebook, path)


def markdown(path: pathlib.Path) -> str:
    """A notebook as a page in Markdown."""
    parts = []
    for cell in nbformat.read(path, 4).cells:
        code = cell.cell_type == "code"
        parts.append(f"```python\n{cell.source}\n```" if code else cell.source)
        if code and printed(cell):
            parts.append(f"```text output\n{printed(cell).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """MkDocs' hook: what docs/ does not hold as pages or pictures."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            uri = file.src_uri.removesuffix(".ipynb") + ".md"
            text = markdown(pathlib.Path(file.abs_src_path))
            files.append(File.generated(config, uri, content=text))
    for path in sorted((ROOT / "experiments" / "results").rglob("*.*")):
        uri = path.relative_to(ROOT / "experiments").as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs' hook: blocks of code, and links to notebooks and results, as the site has
    them."""
    for kind, title in (
        (r"text output", r'text title="Output"'),
        (r"python (\S+)", r'python title="\1"'),
    ):
        markdown = re.sub(f"^```{kind}$", f"```{title}", markdown, flags=re.M)
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"]({up}../experiments/results/", f"]({up}results/")
    return re.sub(r"\]\(([\w./]+)\.ipynb", r"](\1.md", markdown)


def main(argv: list[str]) -> None:
    paths = [pathlib.Path(path).resolve() for path in argv[1:]] or NOTEBOOKS
    for path in paths:  # a planner's threads and a store's files end with the process
        process = multiprocessing.get_context("spawn").Process(
            target=write_outputs, args=[path]
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{os.path.relpath(path)} fails: see above.")


if __name__ == "__main__":
    app.run(main)
