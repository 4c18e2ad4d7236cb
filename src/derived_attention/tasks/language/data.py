"""Text to be modelled byte by byte (chapter 10) or classified (chapter 8), and what counting does.

"python" is the documentation of Python's own language, which Python carries for ``help()``: it is
always there. WikiText-103 is read through Hugging Face's `datasets`, where that is installed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable

import numpy as np
import torch

from derived_attention.runtime import cache_dir, check_count, check_seed
from derived_attention.tasks.series.data import SeriesSplit

HELD_OUT = 0.1  # of all bytes, at most: for validation, and again for the test
MOST_ORDER = 6  # a context and its next byte fit in one int64

Splits = dict[str, str]


@dataclasses.dataclass(frozen=True)
class TopicsData:
    """Windows of some documents; the answer is the document.

    Attributes
    ----------
    train, test : derived_attention.tasks.series.data.SeriesSplit
        `x` (n, T) bytes, as int64; `y` (n,) the number of the document in `topics`.
    vocabulary, classes, length : int
        256, the number of documents, and T.
    topics : tuple of str
        Their names, the longest first.
    """

    train: SeriesSplit
    test: SeriesSplit
    vocabulary: int
    classes: int
    length: int
    topics: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TextData:
    """Text as bytes, 0 to 255, in three parts that have no document in common.

    Attributes
    ----------
    name : str
    train, validation, test : torch.Tensor
        (n,) uint8: the documents of each part, one after another, in UTF-8.
    """

    name: str
    train: torch.Tensor
    validation: torch.Tensor
    test: torch.Tensor


def load_text(name: str) -> TextData:
    """Load a text, divided by documents.

    - ``"python"``: the reference of the Python language, from the standard library's own
      ``pydoc_data.topics`` (licence: that of Python, PSF). Its topics repeat each other, nearly a
      quarter of them word for word, so each paragraph is kept once (`without_repeats`) before the
      topics are divided (`split_documents`). The text is that of the Python that runs: from 3.11 to
      3.13 it grows by a tenth.
    - ``"wikitext-103"``: 541 MB of Wikipedia, official split, raw text (licence as its page states
      it: CC BY-SA 3.0 and GFDL). Through Hugging Face's `datasets`, which downloads it once to
      ``cache_dir("text")``.

    Parameters
    ----------
    name : str
        ``"python"`` or ``"wikitext-103"``.

    Returns
    -------
    TextData

    Raises
    ------
    TypeError, ValueError
        For an unknown `name`.
    ConnectionError
        If WikiText-103 cannot be read: the package is missing, or the network.

    Examples
    --------
    >>> data = load_text("python")
    >>> bytes(data.train[:9].tolist())  # doctest: +SKIP
    b'Special m'
    """
    loaders: dict[str, Callable[[], Splits]] = {"python": _python, "wikitext-103": _wikitext}
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; expected the name of a text as a string")
    if name not in loaders:
        raise ValueError(f"name is {name!r}; expected one of {', '.join(map(repr, loaders))}")
    return TextData(name, **{part: encode(text) for part, text in loaders[name]().items()})


def encode(text: str) -> torch.Tensor:
    """Return the bytes (n,) of `text` in UTF-8, as uint8."""
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


def decode(text: torch.Tensor) -> str:
    """Return the text of bytes (n,); half a character at the end becomes U+FFFD."""
    return text.cpu().numpy().tobytes().decode(errors="replace")


def without_repeats(documents: dict[str, str]) -> dict[str, str]:
    """Keep each paragraph once, in the longest document that has it; drop what is left empty.

    Two paragraphs are the same if their letters and digits are: a heading may be underlined in
    another way, an example set in further.
    """
    seen: set[str] = set()
    kept = {}
    for name in sorted(documents, key=lambda name: (-len(documents[name]), name)):
        new = []
        for paragraph in documents[name].split("\n\n"):
            words = " ".join(re.findall(r"\w+", paragraph))
            if words and words not in seen:
                seen.add(words)
                new.append(paragraph.strip("\n"))
        if new:
            kept[name] = "\n\n".join(new) + "\n"
    return kept


def split_documents(documents: dict[str, str]) -> dict[str, list[str]]:
    """Return the names of the documents for ``train``, ``validation`` and ``test``.

    In an order that looks random but follows from the names alone, each document goes to the test
    if it still fits into a tenth of all the text, else to the validation if it fits there, else to
    the training.
    """
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    most = HELD_OUT * sum(map(len, documents.values()))
    left = {"test": most, "validation": most, "train": math.inf}
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        part = next(part for part in left if len(documents[name]) <= left[part])
        left[part] -= len(documents[name])
        parts[part].append(name)
    return parts


def _python_documents() -> dict[str, str]:
    from pydoc_data.topics import topics

    return without_repeats(topics)


def _python() -> Splits:
    documents = _python_documents()
    parts = split_documents(documents)
    return {part: "\n".join(documents[name] for name in parts[part]) for part in parts}


def _wikitext() -> Splits:
    try:
        from datasets import load_dataset

        folder = str(cache_dir("text"))
        found = load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1", cache_dir=folder)
    except Exception as error:
        raise ConnectionError(
            "WikiText-103 could not be read. It needs the package datasets (pip install datasets) "
            "and, the first time, a network and 1 GB on the disk. Without them, use 'python'."
        ) from error
    return {part: "".join(found[part]["text"]) for part in ("train", "validation", "test")}


def make_topics(length: int, train: int, test: int, classes: int = 8, seed: int = 0) -> TopicsData:
    """Cut windows out of the longest topics of Python's documentation, and ask which it was.

    Windows of the training part are from the first four fifths of a topic, those of the test from
    the last, at random places; as many of each topic, or one more.

    Parameters
    ----------
    length : int
        T, in bytes.
    train, test : int
        Number of windows.
    classes : int
        Number of topics, at least 2.
    seed : int

    Raises
    ------
    TypeError, ValueError
        For a size that cannot be, or a window that is longer than what a topic has for its part.

    Examples
    --------
    >>> data = make_topics(64, train=100, test=50)
    >>> data.train.x.shape, data.classes
    (torch.Size([100, 64]), 8)
    """
    sizes = {"length": length, "train": train, "test": test, "classes": classes}
    for name, count in sizes.items():
        check_count(name, count)
    check_seed(seed)
    documents = _python_documents()
    if not 2 <= classes <= len(documents):
        raise ValueError(f"classes is {classes}; expected 2 <= classes <= {len(documents)}")
    topics = sorted(documents, key=lambda name: (-len(documents[name]), name))[:classes]
    texts = [encode(documents[name]) for name in topics]
    cuts = [len(text) * 4 // 5 for text in texts]
    generator = torch.Generator().manual_seed(seed)

    def split(parts: list[torch.Tensor], n: int) -> SeriesSplit:
        if (least := min(map(len, parts))) < length:
            raise ValueError(f"length is {length}; expected at most {least}, the shortest part")
        y = torch.arange(n) % classes
        places = torch.rand(n, generator=generator, dtype=torch.float64)
        windows = []
        for part, place in zip((parts[c] for c in y.tolist()), places.tolist(), strict=True):
            first = int(place * (len(part) - length + 1))
            windows.append(part[first : first + length].long())
        return SeriesSplit(torch.stack(windows), None, y)

    learn = split([text[:cut] for text, cut in zip(texts, cuts, strict=True)], train)
    judge = split([text[cut:] for text, cut in zip(texts, cuts, strict=True)], test)
    return TopicsData(learn, judge, 256, classes, length, tuple(topics))


def check_text(name: str, text: torch.Tensor, least: int) -> None:
    """Raise TypeError or ValueError unless `text` is uint8 (n,) with n at least `least`."""
    if not isinstance(text, torch.Tensor):
        raise TypeError(f"{name} is {type(text).__name__}; expected a tensor")
    if text.dtype != torch.uint8 or text.ndim != 1:
        found = f"{text.dtype} of shape {tuple(text.shape)}"
        raise ValueError(f"{name} is {found}; expected uint8 of shape (n,)")
    if len(text) < least:
        raise ValueError(f"{name} has {len(text)} bytes; expected at least {least}")


def ngram_bits(train: torch.Tensor, test: torch.Tensor, order: int) -> float:
    """Return the bits per byte of `test` under counts of `train`, with `order` bytes of context.

    The probability of byte b after the context c of n bytes is interpolated with that after the
    shorter context c' that lacks the first byte [Witten1991]::

        P_n(b | c) = (count(c b) + kinds(c) · P_{n-1}(b | c')) / (count(c) + kinds(c))

    where kinds(c) is how many different bytes follow c in `train`, and P_{-1} = 1/256. There is
    nothing to tune. Every byte of `test` is predicted, from all its context; the first ones, which
    have less than `order` bytes before them, from what they have.

    Parameters
    ----------
    train, test : torch.Tensor
        (n,) uint8.
    order : int
        From 0 (the frequencies of single bytes) to 6. Memory: some 50 bytes for each of `train`.

    Raises
    ------
    TypeError, ValueError
        For texts that are not uint8 (n,), or are empty; for an `order` out of range.

    Examples
    --------
    >>> text = encode("ab" * 500)
    >>> ngram_bits(text, text, 0) > 1 > 100 * ngram_bits(text, text, 1) / 3
    True
    """
    check_text("train", train, 1)
    check_text("test", test, 1)
    if isinstance(order, bool) or not isinstance(order, int):
        raise TypeError(f"order is {order!r}; expected an integer")
    if not 0 <= order <= MOST_ORDER:
        raise ValueError(f"order is {order}; expected 0 <= order <= {MOST_ORDER}")
    p = np.full(len(test), 1 / 256)
    for n in range(min(order, len(train) - 1, len(test) - 1) + 1):
        p[n:] = _interpolate(_grams(train, n), _grams(test, n), p[n:])
    return float(-np.log2(p).mean())


def _grams(text: torch.Tensor, n: int) -> np.ndarray:
    """Write each run of n + 1 bytes as a number in base 256: (len - n,)."""
    numbers = text.cpu().numpy().astype(np.int64)
    grams = np.zeros(len(numbers) - n, dtype=np.int64)
    for i in range(n + 1):
        grams = 256 * grams + numbers[i : len(numbers) - n + i]
    return grams


def _interpolate(seen: np.ndarray, asked: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Mix the counts of `seen` into the probabilities `p` of `asked`, by the formula above."""
    grams, counts = np.unique(seen, return_counts=True)
    contexts, first, kinds = np.unique(grams // 256, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first)
    count = _look_up(asked, grams, counts)
    total, kind = (_look_up(asked // 256, contexts, values) for values in (totals, kinds))
    return np.where(total > 0, (count + kind * p) / np.maximum(total + kind, 1), p)


def _look_up(asked: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the value of each key asked for, 0 where it is not among the sorted `keys`."""
    at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[at] == asked, values[at], 0)
