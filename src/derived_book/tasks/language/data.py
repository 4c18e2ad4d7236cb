"""Text to model byte by byte (chapters 3 and 16).

"python" is the reference of the Python language, which is part of Python for ``help()``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re

import numpy as np
import torch

from derived_book.tasks.checks import check_name, check_tensor

HELD_OUT = 0.1  # the share of all bytes, at most, for validation, and again for the test


@dataclasses.dataclass(frozen=True)
class TextData:
    """Text as bytes, 0 to 255, in three parts without a common document.

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
    """Load a text, split by documents.

    - ``"python"``: the reference of the Python language, from ``pydoc_data.topics`` of the standard
      library (licence: PSF). Its topics repeat each other, nearly a quarter of them word for word,
      so each paragraph is kept once (`without_repeats`) before the topics are split
      (`split_documents`). The text is that of the running version of Python: it grows by a tenth
      from 3.11 to 3.13.

    Raises
    ------
    TypeError, ValueError
        For an unknown `name`.
    """
    check_name("name", name, ["python"])
    from pydoc_data.topics import topics

    documents = without_repeats(topics)
    parts = split_documents(documents).items()
    texts = {part: "\n".join(documents[topic] for topic in names) for part, names in parts}
    return TextData(name, **{part: encode(text) for part, text in texts.items()})


def encode(text: str) -> torch.Tensor:
    """Return the bytes (n,) of `text` in UTF-8, as uint8."""
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


def decode(text: torch.Tensor) -> str:
    """Return the text of bytes (n,); an incomplete character becomes U+FFFD."""
    return text.cpu().numpy().tobytes().decode(errors="replace")


def without_repeats(documents: dict[str, str]) -> dict[str, str]:
    """Keep each paragraph once, in the longest document that has it; drop empty documents.

    Two paragraphs are the same if their letters and digits are, whatever their underlines and
    indentation.
    """
    seen: set[str] = set()
    kept = {}
    for name in _longest_first(documents):
        new = []
        for paragraph in documents[name].split("\n\n"):
            words = " ".join(re.findall(r"\w+", paragraph))
            if words and words not in seen:
                seen.add(words)
                new.append(paragraph.strip("\n"))
        if new:
            kept[name] = "\n\n".join(new) + "\n"
    return kept


def _longest_first(documents: dict[str, str]) -> list[str]:
    return sorted(documents, key=lambda name: (-len(documents[name]), name))


def split_documents(documents: dict[str, str]) -> dict[str, list[str]]:
    """Return the names of the documents for ``train``, ``validation`` and ``test``.

    In the order of a hash of the names, each document goes to the test if it still fits into a
    tenth of all text, else to the validation if it fits there, else to the training.
    """
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    most = HELD_OUT * sum(map(len, documents.values()))
    left = {"test": most, "validation": most, "train": math.inf}
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        part = next(part for part in left if len(documents[name]) <= left[part])
        left[part] -= len(documents[name])
        parts[part].append(name)
    return parts


def check_text(name: str, text: torch.Tensor, least: int) -> None:
    """Raise TypeError or ValueError unless `text` is uint8 (n,) with n at least `least`."""
    check_tensor(name, text, "uint8", ("n",))
    if len(text) < least:
        raise ValueError(f"{name} has {len(text)} bytes; expected at least {least}")
