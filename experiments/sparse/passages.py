"""Passages of the Python documentation, each with the chapter it is from.

The text is `pydoc_data.topics`, which comes with Python. A passage is one paragraph or
a few short ones, and no paragraph is in two passages. Chance is to name the largest
chapter.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

import numpy as np

from experiments.data import Dataset
from experiments.sparse.wordpiece import WordPiece

# The topics of each chapter but those whose text is in another topic of it.
CHAPTERS = {
    "expressions": "atom-identifiers atom-literals attribute-references await binary "
    "bitwise booleans calls comparisons conversions dict exprlists in lambda lists "
    "operator-summary power shifting slicings subscriptions unary",
    "simple statements": "assert assignment augassign break continue del global import "
    "nonlocal pass raise return yield",
    "compound statements": "compound",
    "data model": "objects types specialnames",
    "execution model": "execmodel",
    "lexical analysis": "floating id-classes identifiers imaginary integers strings",
    "built-in types": "specialattrs string-methods truth typesfunctions typesmapping "
    "typesmethods typesmodules typesseq",
    "string formatting": "formatstrings",
    "debugger": "debugger",
}
LEAST_PIECES = 32
HELD_OUT = 3  # every third passage


@dataclasses.dataclass(frozen=True)
class Task:
    """A text classification task.

    Attributes:
      train, held_out: their inputs are tokens [N, length].
    """

    train: Dataset
    held_out: Dataset


def chapters_task(
    word_piece: WordPiece, length: int = 128, chapters: Mapping[str, str] = CHAPTERS
) -> Task:
    """The passages as tokens [N, length], cut or padded, with their chapters' numbers.

    `chapters` has the topics of each, separated by spaces. Every third passage is held
    out.
    """
    seen: set[str] = set()
    found = [
        (text, number)
        for number, names in enumerate(chapters.values())
        for text in passages(names.split(), word_piece, seen)
    ]
    texts, labels = zip(*found, strict=True)
    inputs, labels = word_piece.encode(texts, length), np.array(labels, np.int32)
    held_out = np.arange(len(labels)) % HELD_OUT == 0

    def part(chosen) -> Dataset:
        vocabulary = len(word_piece.pieces)
        return Dataset(
            inputs[chosen], labels[chosen], len(chapters), "chapters", vocabulary
        )

    return Task(part(~held_out), part(held_out))


def passages(names: list[str], word_piece: WordPiece, seen: set[str]) -> Iterator[str]:
    """The passages of some topics, without the paragraphs in `seen`, which grows."""
    from pydoc_data.topics import topics

    for name in names:
        waiting = ""
        for paragraph in re.split(r"\n\s*\n", topics.get(name, "")):
            paragraph = " ".join(paragraph.split())
            if paragraph in seen:
                continue
            seen.add(paragraph)
            waiting = f"{waiting} {paragraph}".strip()
            if len(word_piece.cut(waiting)) >= LEAST_PIECES:
                yield waiting
                waiting = ""
