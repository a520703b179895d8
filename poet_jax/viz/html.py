"""One HTML page about a schedule, which needs no other file and no network."""

import contextlib
import html
import os
import pathlib
from collections.abc import Iterable

from poet_jax.core.graph import Value
from poet_jax.core.planned import Planned
from poet_jax.core.representation import TOP, html_table
from poet_jax.core.units import format_bytes, format_joules, format_seconds
from poet_jax.viz.figures import LABELS, inline_svg
from poet_jax.viz.reasons import ESTIMATE, Reason, reasons
from poet_jax.viz.table import comparison, counted, remarks, title

COLUMNS = ("value", "decision", "size", "in RAM", "time", "energy", "reason")

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .8rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 40rem; height: auto; }
figure text { fill: currentColor !important; }
[style*="stroke: #000000"] { stroke: currentColor !important; }
[style*="fill: #ffffff"] { fill: none !important; }
#values { width: 100%; font-size: .87rem; }
#values th { position: sticky; top: 0; background: Canvas; }
#values td:first-child { overflow-wrap: anywhere; min-width: 9rem; }
th button { all: unset; cursor: pointer; white-space: nowrap; }
th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.keep, .remat, .page, .pinned { white-space: nowrap; }
.keep::before, .remat::before, .page::before, .pinned::before { content: "";
  display: inline-block; width: .7em; height: .7em; margin-right: .4em; }
.keep::before { background: #56B4E9; } .remat::before { background: #E69F00; }
.page::before { background: #009E73; } .pinned::before { background: #999999; }
input { font: inherit; padding: .3rem .6rem; width: 100%; box-sizing: border-box;
  max-width: 30rem; }
.note { color: GrayText; font-size: .87rem; font-weight: 400; }
@media (max-width: 45rem) {
  #values thead { display: none; }
  #values tr { display: block; padding: .6rem 0; border-bottom: 1px solid var(--line); }
  #values td { display: block; border: 0; padding: .1rem 0; text-align: left; }
  #values td:first-child { font-weight: 600; }
  #values .number { display: inline-block; margin-right: 1rem; }
  #values .number::before { content: attr(data-label) " "; color: GrayText; }
}
@media print {
  body { margin: 0; max-width: none; font-size: 10pt; } input { display: none; }
  tr { break-inside: avoid; } #values th { position: static; }
  figure svg { min-width: 0; }
}
"""

SCRIPT = """
const rows = [...document.querySelectorAll("#values tbody tr")];
const body = document.querySelector("#values tbody");
const count = document.querySelector("#count");
document.querySelector("#search").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\\s+/);
  let shown = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    shown += !row.hidden;
  }
  count.textContent = shown;
});
document.querySelectorAll("#values th").forEach((head, column) => {
  head.firstChild.addEventListener("click", () => {
    const key = (row) => row.cells[column].dataset.key ?? row.cells[column].textContent;
    const up = head.getAttribute("aria-sort") === "descending";
    const compare = (a, b) => head.className ? key(a) - key(b)
      : key(a).localeCompare(key(b), undefined, {numeric: true});
    rows.sort((a, b) => up ? compare(a, b) : compare(b, a));
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows);
  });
});
"""


def summary(planned: Planned, compiled_bytes: int | None, compilations: int) -> str:
    """A part of a page: what is used, the step's figure, and the largest values.

    Without matplotlib there is no figure.
    """
    head = ("", "keep-all", "this plan", "change")
    used = comparison(counted(planned, compiled_bytes), planned.baseline)
    lines = remarks(planned, compiled_bytes, compilations)
    parts = [
        f"<p><b>{html.escape(title(planned))}</b></p>",
        html_table(head, used),
        *(f"<p>{html.escape(line)}</p>" for line in lines),
    ]
    with contextlib.suppress(ImportError):
        parts.append(inline_svg(planned))
    about = _largest_first(planned)
    rows = [
        (x.name, x.decision, format_bytes(x.nbytes), format_seconds(x.resident_seconds))
        for x in about[:TOP]
    ]
    return "".join((*parts, html_table(("value", "decision", "size", "in RAM"), rows)))


def report(planned: Planned, compiled_bytes: int | None) -> str:
    """The page: a summary, the step's figure, and a row for each value.

    Rows can be searched, and sorted by any column. Needs matplotlib, as
    `Schedule.plot`.
    """
    about = _largest_first(planned)
    used = comparison(counted(planned, compiled_bytes), planned.baseline)
    summary = "".join(
        _row([(label, ""), (before, "number"), (after, "number"), (change, "number")])
        for label, before, after, change in used
    )
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in remarks(planned))
    head, values = html.escape(title(planned)), planned.graph.values
    rows = "".join(_value(x, values[x.value]) for x in about)
    heads = "".join(
        f"<th{' class=number' * (2 <= n <= 5)}><button>{name}</button></th>"
        for n, name in enumerate(COLUMNS)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>poet_jax: {head}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{head}</h1>
<table><thead><tr><th></th><th class="number">keep-all</th>
<th class="number">this plan</th><th class="number">change</th></tr></thead>
<tbody>{summary}</tbody></table>
<ul>{lines}</ul>
<h2>The step, as planned</h2>
<figure>{inline_svg(planned)}</figure>
<h2>Values: <span id="count">{len(about)}</span> of {len(about)}</h2>
<p>{html.escape(ESTIMATE)} Time and energy are what was decided costs; the repeats of a
node are in the row of each of its results.</p>
<p><input id="search" type="search" placeholder="Search: a name, paged, float32 ..."
aria-label="Search the values"></p>
<table id="values"><thead><tr>{heads}</tr></thead>
<tbody>{rows}</tbody></table>
<script>{SCRIPT}</script>
</body>
</html>
"""


def write_report(
    path: str | os.PathLike, planned: Planned, compiled_bytes: int | None
) -> None:
    """Write `report(planned, compiled_bytes)` to `path`."""
    text = report(planned, compiled_bytes)
    pathlib.Path(path).write_text(text, encoding="utf-8")


def _largest_first(planned: Planned) -> list[Reason]:
    found = reasons(planned.program.graph, planned.costs, planned.plan)
    return sorted(found, key=lambda x: (-x.nbytes, x.value))


def _value(x: Reason, value: Value) -> str:
    numbers = (
        ("size", x.nbytes, format_bytes),
        ("in RAM", x.resident_seconds, format_seconds),
        ("time", x.seconds, format_seconds),
        ("energy", x.joules, format_joules),
    )
    kind = f"{value.dtype}{list(value.shape)}" if value.dtype is not None else ""
    cells = "".join(
        f'<td class="number" data-label="{label}" data-key="{key!r}">{show(key)}</td>'
        for label, key, show in numbers
    )
    return (
        f'<tr><td>{html.escape(x.name)}<div class="note">{html.escape(kind)}</div></td>'
        f'<td><span class="{x.decision}">{LABELS.get(x.decision, "pinned")}</span></td>'
        f"{cells}<td>{html.escape(x.text)}</td></tr>\n"
    )


def _row(cells: Iterable[tuple[str, str]]) -> str:
    texts = (
        f"<td{f' class={kind}' * bool(kind)}>{html.escape(text)}</td>"
        for text, kind in cells
    )
    return f"<tr>{''.join(texts)}</tr>"
