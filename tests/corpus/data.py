"""Data of the corpus, without downloads: scikit-learn's bundled sets, the standard library's own text, seeded noise."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pydoc_data.topics import topics

import numpy as np
from sklearn import datasets

Batch = tuple[np.ndarray, ...]


def batches(sizes: Sequence[int], *arrays: np.ndarray) -> list[Batch]:
    """The arrays' rows, in order, in batches of these sizes."""
    ends = np.cumsum(sizes)
    if ends[-1] > len(arrays[0]):
        raise ValueError(f"{ends[-1]} rows are asked for, and there are {len(arrays[0])}")
    return [tuple(array[end - size : end] for array in arrays) for size, end in zip(sizes, ends, strict=True)]


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


@cache
def digits(dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    """Handwritten digits of 8 × 8 pixels from 0 to 1, [n, 8, 8, 1], and what they show."""
    bunch = datasets.load_digits()
    return (bunch.images[:400, :, :, None] / 16.0).astype(dtype), bunch.target[:400].astype("int64")


@cache
def tumours(dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    """30 standardized measures of each tumour, and whether it is benign, in a random order."""
    bunch = datasets.load_breast_cancer()
    order = rng().permutation(len(bunch.data))
    scaled = (bunch.data - bunch.data.mean(axis=0)) / bunch.data.std(axis=0)
    return scaled[order].astype(dtype), bunch.target[order].astype("int64")


@cache
def diabetes(dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    """10 standardized measures of each patient, and how the disease went on, [n, 1], standardized."""
    bunch = datasets.load_diabetes()
    target = (bunch.target - bunch.target.mean()) / bunch.target.std()
    return (bunch.data * 20.0).astype(dtype), target[:, None].astype(dtype)


@cache
def wines() -> tuple[np.ndarray, np.ndarray]:
    """13 standardized measures of each wine, and its cultivar, in a random order."""
    bunch = datasets.load_wine()
    order = rng().permutation(len(bunch.data))
    return ((bunch.data - bunch.data.mean(axis=0)) / bunch.data.std(axis=0))[order], bunch.target[order].astype("int64")


@cache
def text() -> str:
    """What Python's own help says."""
    return " ".join(" ".join(topics[name].split()) for name in sorted(topics)[:20])


@cache
def characters(rows: int, length: int, vocabulary: int = 32) -> np.ndarray:
    """Pieces of text as numbers of characters, the most frequent ones; 0 is any other one."""
    common = [letter for letter, _ in Counter(text()).most_common(vocabulary - 1)]
    numbers = [1 + common.index(letter) if letter in common else 0 for letter in text()[: rows * length]]
    return np.array(numbers, "int64").reshape(rows, length)


@cache
def sentences(rows: int, length: int, vocabulary: int = 24) -> np.ndarray:
    """Sentences as numbers of words from 1 on, 1 being any rare one, padded with 0 to `length`."""
    split = [sentence.lower().split() for sentence in text().split(". ")]
    common = [word for word, _ in Counter(word for words in split for word in words).most_common(vocabulary - 2)]
    result = np.zeros((rows, length), "int64")
    for row, words in zip(result, (words for words in split if words), strict=False):
        numbers = [2 + common.index(word) if word in common else 1 for word in words[:length]]
        row[: len(numbers)] = numbers
    result.setflags(write=False)  # All programs of a process are given the same.
    return result


@cache
def ratings(count: int, users: int = 11, items: int = 9) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Who rated what, and how: users and items have three tastes each. Some of both come often."""
    generator = rng(3)
    tastes = generator.normal(size=(users, 3)), generator.normal(size=(items, 3))
    user, item = (np.minimum(generator.geometric(0.2, count) - 1, n - 1).astype("int64") for n in (users, items))
    return user, item, (tastes[0][user] * tastes[1][item]).sum(axis=1) + 0.1 * generator.normal(size=count)


def series(rows: int, length: int, seed: int = 2) -> np.ndarray:
    """Noisy waves, [rows, length]."""
    generator = rng(seed)
    phase, speed = generator.uniform(0, 6, (rows, 1)), generator.uniform(0.2, 1.0, (rows, 1))
    return np.sin(phase + speed * np.arange(length)) + 0.1 * generator.normal(size=(rows, length))
