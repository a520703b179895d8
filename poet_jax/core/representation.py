"""Objects on one line, and tables for notebooks."""

import dataclasses
import html
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

LONGEST = 60  # characters that a field may take
TOP = 10  # values, of the largest, that a notebook shows


def brief(self: Any) -> str:
    """`__repr__` of a dataclass whose fields may hold thousands of things: a long field
    is shown by its length."""
    shown = (
        f"{field.name}={_short(getattr(self, field.name))}"
        for field in dataclasses.fields(self)
        if field.repr
    )
    return f"{type(self).__name__}({', '.join(shown)})"


def _short(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return f"<array {x.dtype}{list(x.shape)}>"
    if dataclasses.is_dataclass(x) and type(x).__repr__ is brief:
        return f"<{type(x).__name__}>"
    if isinstance(x, Collection) and not isinstance(x, str) and len(x) > LONGEST:
        return f"<{type(x).__name__} of {len(x)}>"
    text = repr(x)
    if len(text) <= LONGEST:
        return text
    if isinstance(x, Collection) and not isinstance(x, str):
        return f"<{type(x).__name__} of {len(x)}>"
    return f"{text[: LONGEST - 3]}..."


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, for `_repr_html_`: the first column is text, the others are numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        aligned = ("left", *["right"] * (len(cells) - 1))
        texts = (
            f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
            for cell, side in zip(cells, aligned, strict=True)
        )
        return f"<tr>{''.join(texts)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table>"
