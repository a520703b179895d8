"""The Python in README.md and docs/ runs, and prints what the page says it prints.

The blocks of a page run in order in one namespace. A block ```text output directly
after a ```python block is what that block prints; planning times are not compared. A
block ```python FILE does not run: it is an excerpt of that file, word for word.
"""

import contextlib
import io
import pathlib
import re

import jax
import pytest

from experiments import devices
from experiments.benchmarks import tables

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
JAX_OF_PAGES = (0, 10)
FENCE = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<body>.*?)^```$", re.M | re.S)


def blocks(text):
    """(code, number of its first line, expected output or None) of each block."""
    fences = list(FENCE.finditer(text))
    for number, fence in enumerate(fences):
        if fence["kind"] != "python":
            continue
        expected = None
        following = fences[number + 1] if number + 1 < len(fences) else None
        if following and following["kind"] == "text output":
            between = text[fence.end() : following.start()]
            assert not between.strip(), f"{between!r} is before the output of a block"
            expected = following["body"]
        yield fence["body"], 1 + text.count("\n", 0, fence.start("body")), expected


def comparable(text):
    """`text` without trailing spaces and planning times; with another JAX than that of
    the pages, whose equations may be others, without numbers and alignment, too."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    times = r"(plan by \w+ in|  \w+Planner,) \d+\.\d s"
    text = re.sub(times, r"\1 _ s", "\n".join(lines))
    if jax.__version_info__[:2] != JAX_OF_PAGES:
        text = re.sub(r"[ ]+", " ", re.sub(r"\d[\d.,]*", "_", text))
    return text


def run(text, name):
    """Run the page's blocks; the number of those whose output was compared."""
    namespace, compared = {"__name__": "__main__"}, 0
    for code, line, expected in blocks(text):
        printed = io.StringIO()
        # Blank lines before it, so that a traceback shows the page's line numbers.
        compiled = compile("\n" * (line - 1) + code, name, "exec")
        with contextlib.redirect_stdout(printed):
            exec(compiled, namespace)
        if expected is not None:
            assert comparable(printed.getvalue()) == comparable(expected), line
            compared += 1
    return compared


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    assert text.count("```text output") == run(text, page.name)


def test_an_output_that_differs_fails():
    page = "```python\nprint('a' + 'b')\n```\n\n```text output\n{}\n```\n"
    assert run(page.format("ab"), "page") == 1
    with pytest.raises(AssertionError):
        run(page.format("ba"), "page")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_an_excerpt_is_what_its_file_says(page):
    for fence in FENCE.finditer(page.read_text()):
        language, _, file = fence["kind"].partition(" ")
        if language == "python" and file:
            assert fence["body"] in (ROOT / file).read_text(), file


def test_tables_are_those_of_the_rows_that_are_committed():
    for page in tables.PAGES:
        assert tables.written(page.read_text()) == page.read_text()


def test_the_page_of_devices_is_that_of_the_profiles():
    page = ROOT / "docs" / "reference" / "devices.md"
    assert page.read_text() == devices.page()
