"""BERT's tokens: words in lower case, cut into the longest pieces of a vocabulary.

After the uncased tokenizer of Devlin et al. (NAACL 2019), and WordPiece as Wu et al.
(2016, arXiv 1609.08144) describe it.
"""

import dataclasses
import functools
import pathlib
import re
import unicodedata
from collections.abc import Iterable

import numpy as np

LONGEST_WORD = 100  # characters; BERT takes longer words for unknown ones


def words_of(text: str) -> list[str]:
    """The words and marks of a text, in lower case and without accents."""
    text = unicodedata.normalize("NFD", text.lower())
    return re.findall(r"\S+", "".join(map(_spaced, text)))


def _spaced(character: str) -> str:
    """A character, alone between spaces if it is a word of its own, or nothing."""
    kind = unicodedata.category(character)
    if character.isspace():
        return " "
    if kind == "Mn" or kind.startswith("C") or character == "\ufffd":
        return ""
    # BERT takes every ASCII character that is no letter or digit for punctuation.
    is_symbol = character.isascii() and not character.isalnum()
    if is_symbol or kind.startswith("P") or _is_ideograph(character):
        return f" {character} "
    return character


def _is_ideograph(character: str) -> bool:
    return unicodedata.name(character, "").startswith("CJK ")


@dataclasses.dataclass(frozen=True)
class WordPiece:
    """A vocabulary of pieces; "##" before one says that it goes on with a word.

    Attributes:
      pieces: a token is its piece's place here.
    """

    pieces: tuple[str, ...]

    @classmethod
    def read(cls, path: pathlib.Path) -> "WordPiece":
        """The vocabulary in a file of one piece per line, such as BERT's vocab.txt."""
        return cls(tuple(path.read_text(encoding="utf-8").splitlines()))

    @functools.cached_property
    def tokens(self) -> dict[str, int]:
        """The token of each piece."""
        return {piece: token for token, piece in enumerate(self.pieces)}

    def cut(self, text: str) -> list[str]:
        """The pieces of a text; "[UNK]" for a word that has none."""
        return [piece for word in words_of(text) for piece in self._cut_word(word)]

    def _cut_word(self, word: str) -> list[str]:
        pieces, start = [], 0
        while start < len(word):
            mark = "##" if start else ""
            for end in range(len(word), start, -1):
                if mark + word[start:end] in self.tokens:
                    break
            else:
                return ["[UNK]"]
            pieces.append(mark + word[start:end])
            start = end
        return pieces if len(word) <= LONGEST_WORD else ["[UNK]"]

    def encode(self, texts: Iterable[str], length: int) -> np.ndarray:
        """[N, length] int32: "[CLS]", as many pieces as there is room for, "[SEP]",
        and "[PAD]" in what is left."""
        rows = []
        for text in texts:
            pieces = ["[CLS]", *self.cut(text)[: length - 2], "[SEP]"]
            row = [self.tokens[piece] for piece in pieces]
            rows.append(row + [self.tokens["[PAD]"]] * (length - len(row)))
        return np.array(rows, np.int32).reshape(-1, length)
