"""German sentences and their English translations (chapter 10).

They are the examples of use in the dictionary of Ding, which Debian has as ``trans-de-en``. A line
of its file is one entry, ``German :: English``, and each side is a list, divided by ``|``, of which
items in the same place translate each other: the head word, its forms, and phrases and sentences.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from derived_attention.runtime import cache_dir

Pair = tuple[str, str]  # German, English

PARTS = ("test", "validation") + 18 * ("train",)  # a twentieth each, and the rest
FEWEST_WORDS = 3
# {m} gender, [coll.] usage, (a remark), <another spelling>; /abbreviation/ at the end.
MARKS = re.compile(r"\{[^{}]*\}|\[[^][]*\]|\([^()]*\)|<[^<>]*>|/[^/\s]+/\s*$")
PLAIN = str.maketrans("’‘´`“”„", "''''\"\"\"")
HOPE = re.compile(r"\S \S.*[.!?]")  # in every item that `clean` makes a sentence of
SENTENCE = re.compile(r"[A-ZÄÖÜ\"'].*[.!?]\"?")
# What still stands for several sentences or for none: alternatives, gaps, "something", half marks,
# and U+FFFD, which stands for bytes that are no text.
OPEN = re.compile(r"[/;|…{}<>()[\]\ufffd]|\.\.|\b(etw|jd|jdn|jdm|jds|sth|sb)\.")


@dataclasses.dataclass(frozen=True)
class TranslationData:
    """Pairs of sentences (German, English), in three parts.

    No sentence of either language comes twice, in one part or in two.

    Attributes
    ----------
    name : str
    train, validation, test : tuple of (str, str)
        German, English.
    """

    name: str
    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    test: tuple[Pair, ...]


def load_translation(name: str) -> TranslationData:
    """Load pairs of sentences in two languages.

    ``"ding"`` is German and English: the full sentences of the dictionary of Ding (licence, as its
    file states it: GPL version 2 or later), cleaned by `sentences`. From Debian's package
    ``trans-de-en`` where it is installed, or a copy of its file in ``cache_dir("text")``. Which
    part a pair belongs to follows from its English sentence alone: a twentieth each is for
    validation and test.

    Parameters
    ----------
    name : str
        ``"ding"``.

    Returns
    -------
    TranslationData

    Raises
    ------
    TypeError, ValueError
        For an unknown `name`; for a file that is not Ding's.
    FileNotFoundError
        If the dictionary is not installed; says how to install it.

    Examples
    --------
    >>> data = load_translation("ding")  # doctest: +SKIP
    >>> data.train[0]  # doctest: +SKIP
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; expected the name of a set as a string")
    if name != "ding":
        raise ValueError(f"name is {name!r}; expected 'ding'")
    file = _find()
    parts: dict[str, list[Pair]] = {part: [] for part in PARTS}
    with open(file, encoding="utf-8", errors="replace") as lines:
        for pair in sentences(lines):
            parts[part_of(pair[1])].append(pair)
    if not parts["train"]:
        raise ValueError(f"the file {file} has no sentences; expected the dictionary of Ding")
    return TranslationData(name, **{part: tuple(pairs) for part, pairs in parts.items()})


def sentences(lines: Iterable[str]) -> Iterator[Pair]:
    """Yield the full sentences in lines of Ding's file, clean, and each one once.

    A full sentence begins with a capital, ends with a full stop, ``!`` or ``?``, and has three
    words or more, in both languages. Marks of grammar and usage and remarks in brackets are taken
    out; quotes and apostrophes become ASCII. Of several sentences for one the first is kept. Left
    out are those that still hold alternatives (``queue/line up``) or gaps (``…``, ``sth.``), and
    those that have come before, in either language.

    Examples
    --------
    >>> list(sentences(["gut {adj} | Das ist gut. [ugs.] :: good | That’s very good."]))
    [('Das ist gut.', "That's very good.")]
    """
    seen: tuple[set[str], set[str]] = (set(), set())
    for items in _items(lines):
        if not all(map(HOPE.search, items)):  # most are not: this saves seconds
            continue
        german, english = map(clean, items)
        new = german not in seen[0] and english not in seen[1]
        if new and _is_sentence(german) and _is_sentence(english):
            seen[0].add(german)
            seen[1].add(english)
            yield german, english


def clean(item: str) -> str:
    """Take marks and remarks out of an item, and leave the first of several sentences."""
    text = MARKS.sub(" ", item.translate(PLAIN))
    text = re.split(r"(?<=[.!?\"]);\s", text)[0]
    text = " ".join(text.split())
    return re.sub(r"\s+([.,;!?])", r"\1", text)


def part_of(english: str) -> str:
    """Return ``train``, ``validation`` or ``test``: for one sentence the same everywhere."""
    number = int.from_bytes(hashlib.sha256(english.encode()).digest()[:8])
    return PARTS[number % len(PARTS)]


def _items(lines: Iterable[str]) -> Iterator[Pair]:
    """Yield items that translate each other; an entry with uneven lists has none."""
    for line in lines:
        german, separator, english = line.strip().partition(" :: ")
        both = german.split(" | "), english.split(" | ")
        if separator and not line.startswith("#") and len(both[0]) == len(both[1]):
            yield from zip(*both, strict=True)


def _is_sentence(text: str) -> bool:
    enough = len(text.split()) >= FEWEST_WORDS
    return bool(enough and SENTENCE.fullmatch(text) and not OPEN.search(text))


def _find() -> Path:
    system = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    own = cache_dir("text") / "de-en"
    for file in (own, *(Path(base) / "trans" / "de-en" for base in system.split(":"))):
        if file.is_file():
            return file
    raise FileNotFoundError(
        "Ding's German–English dictionary is not here. On Debian and its kin install it with "
        f"'apt-get install trans-de-en'; elsewhere put the file de-en of that package at {own}"
    )
