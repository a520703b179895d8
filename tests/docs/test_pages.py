"""The Python in README.md and docs/ runs, and prints what the page says it prints.

`experiments.pages` says which blocks of a page run, and what is not compared. Notebooks
in docs/ run as pages do: their outputs are those that are committed.
"""

import pathlib

import markdown
import nbformat
import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import File
from mkdocs.structure.pages import Page

from experiments import devices, pages
from experiments.benchmarks import tables

ROOT = pathlib.Path(__file__).parents[2]
MARKDOWN = [page for page in pages.PAGES if page.suffix == ".md"]


def name(page):
    return page.relative_to(ROOT).as_posix()


def compare(blocks, page):
    """Run the blocks; the number of those whose output was compared."""
    compared = 0
    for (_, line, expected), found in zip(blocks, pages.run(blocks, page), strict=True):
        if expected is not None:
            assert pages.comparable(found) == pages.comparable(expected), line
            compared += 1
    return compared


@pytest.mark.parametrize("page", pages.PAGES, ids=name)
def test_the_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = pages.blocks(page)
    compared = compare(blocks, page.name)
    if page in pages.NOTEBOOKS:
        assert compared == len(blocks)
    else:
        assert compared == page.read_text().count("```text output")


def test_an_output_that_differs_fails():
    page = "```python\nprint('a' + 'b')\n```\n\n```text output\n{}\n```\n"
    assert compare(list(pages.fenced(page.format("ab"))), "page") == 1
    with pytest.raises(AssertionError):
        compare(list(pages.fenced(page.format("ba"))), "page")


@pytest.mark.parametrize("printed", ["", "4\n"])
def test_a_cell_that_prints_something_else_fails(printed, tmp_path):
    path = tmp_path / "page.ipynb"
    cell = nbformat.v4.new_code_cell("print(1 + 2)")
    cell.outputs = [nbformat.v4.new_output("stream", text=printed)]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    with pytest.raises(AssertionError):
        compare(pages.blocks(path), "page")
    pages.write_outputs(path)
    assert compare(pages.blocks(path), "page") == 1


@pytest.mark.parametrize("page", pages.NOTEBOOKS, ids=name)
def test_a_notebook_is_valid(page):
    notebook = nbformat.read(page, 4)
    nbformat.validate(notebook)
    assert {cell.cell_type for cell in notebook.cells} == {"code", "markdown"}


@pytest.mark.parametrize("page", MARKDOWN, ids=name)
def test_an_excerpt_is_what_its_file_says(page):
    for fence in pages.FENCE.finditer(page.read_text()):
        language, _, file = fence["kind"].partition(" ")
        if language == "python" and file:
            assert fence["body"] in (ROOT / file).read_text(), file


@pytest.mark.parametrize("page", pages.PAGES, ids=name)
def test_links_lead_to_files(page):
    cells = pages.markdown(page) if page in pages.NOTEBOOKS else page.read_text()
    for link in pages.links(cells):
        assert (page.parent / link).exists(), link


@pytest.fixture(scope="module")
def site():
    return load_config(str(ROOT / "mkdocs.yml"))


@pytest.mark.parametrize("page", pages.PAGES[1:], ids=name)
def test_the_site_shows_blocks_and_not_their_fences(page, site):
    text = pages.markdown(page) if page in pages.NOTEBOOKS else page.read_text()
    file = File(page.relative_to(ROOT / "docs").as_posix(), None, "", True)
    text = pages.on_page_markdown(text, Page(None, file, site))
    options = {"extension_configs": site.mdx_configs}
    html = markdown.markdown(text, extensions=site.markdown_extensions, **options)
    assert "```" not in html
    assert html.count('<div class="highlight">') >= len(pages.FENCE.findall(text))


def test_tables_are_those_of_the_rows_that_are_committed():
    for page in tables.PAGES:
        assert tables.written(page.read_text()) == page.read_text()


def test_the_page_of_devices_is_that_of_the_profiles():
    page = ROOT / "docs" / "reference" / "devices.md"
    assert page.read_text() == devices.page()
