"""Text as rows of tokens, and batches of rows as a function of the step's number."""

import pathlib
import re
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.language_model.models import Config


def read_text(path: str | None = None) -> str:
    """The text of a file, or without one the paragraphs of `pydoc_data.topics`.

    These are of the Python documentation, and come with Python. Raises OSError.
    """
    if path is not None:
        return pathlib.Path(path).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    paragraphs = re.split(r"\n\s*\n", "\n\n".join(topics.values()))
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def train_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` tokens, but at least the 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def load_tokenizer(path: pathlib.Path) -> Tokenizer:
    """The tokenizer of a file in the format of tokenizer.json.

    Raises FileNotFoundError without the file, and ValueError for another file.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not a file. A tokenizer is a tokenizer.json, as public "
            "checkpoints have it. Use --tokenizer=FILE, or leave out --checkpoint to "
            "train one on the text."
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other class
        raise ValueError(
            f"{path} is not a tokenizer: {error}. Use another --tokenizer=FILE, a "
            "tokenizer.json as public checkpoints have it."
        ) from error


def check_fits(tokenizer: Tokenizer, length: int, config: Config) -> None:
    """Raises ValueError for more tokens, or longer rows, than the model has."""
    size = tokenizer.get_vocab_size()
    if size > config.vocabulary:
        raise ValueError(
            f"The tokenizer has {size} tokens, and the model an embedding of "
            f"{config.vocabulary}. A token needs a row of the embedding. Use the "
            "tokenizer of the model's checkpoint, or a --size of a larger vocabulary."
        )
    if length > config.positions:
        raise ValueError(
            f"A sequence has {length} tokens, and the model has {config.positions} "
            "positions. A token needs a position. Use --length and --generate of "
            f"{config.positions} or less together with the prompt."
        )


def pack(tokens: np.ndarray | list[int], length: int) -> np.ndarray:
    """The tokens in rows [N, length + 1] int32, without a remainder.

    A row is `length` inputs and as many next tokens. Raises ValueError for fewer tokens
    than a row has.
    """
    count = len(tokens) // (length + 1)
    if not count:
        raise ValueError(
            f"The text has {len(tokens)} tokens, and a row has {length + 1}. At least "
            "one row is needed. Use a longer --text or a smaller --length."
        )
    return np.asarray(tokens[: count * (length + 1)], np.int32).reshape(count, -1)


def batch(rows: np.ndarray, number: int, size: int, seed: int) -> np.ndarray:
    """Batch `number`, [size, length + 1]: every row once before any again."""
    places = range(number * size, (number + 1) * size)
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(len(rows))
        for epoch in {place // len(rows) for place in places}
    }
    return rows[[orders[place // len(rows)][place % len(rows)] for place in places]]


def batches(
    rows: np.ndarray, size: int, seed: int, start: int, stop: int
) -> Iterator[np.ndarray]:
    """Batches `start` to `stop - 1`, the same wherever they start."""
    for number in range(start, stop):
        yield batch(rows, number, size, seed)
