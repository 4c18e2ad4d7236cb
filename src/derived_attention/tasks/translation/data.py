"""German sentences and their English translations (chapter 10).

They are the examples of use in the dictionary of Ding, which Debian has as ``trans-de-en``. A line
of its file is one entry, ``German :: English``, and each side is a list, divided by ``|``, of which
items in the same place translate each other: the head word, its forms, and phrases and sentences.

`train_vocabulary` cuts sentences of both languages into pieces of words, for a model to read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece
import torch

from derived_attention.runtime import cache_dir, check_count

Pair = tuple[str, str]  # German, English
PAD, BEGIN, END, UNKNOWN = range(4)  # the tokens that are no piece of a word

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


# --- Pieces of words ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Pieces of words, numbered: what a translator reads and writes.

    Token 0 is padding, 1 begins a sentence, 2 ends it, 3 stands for a character that no piece has.
    `train_vocabulary` makes one.

    Parameters
    ----------
    model : bytes
        A model of `sentencepiece`, in its own format.
    """

    model: bytes = dataclasses.field(repr=False)

    @functools.cached_property
    def processor(self) -> sentencepiece.SentencePieceProcessor:
        """What `sentencepiece` makes of the model."""
        return sentencepiece.SentencePieceProcessor(model_proto=self.model)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.processor.get_piece_size()

    def pieces(self, sentence: str) -> list[str]:
        """Return the pieces of a sentence; "▁" stands for a space before a word."""
        check_sentences([sentence])
        return self.processor.encode(sentence, out_type=str)

    def encode(self, sentences: Sequence[str]) -> torch.Tensor:
        """Return the tokens (n, T) int64 of sentences: begin, pieces, end, padding to the longest.

        Raises
        ------
        TypeError, ValueError
            For anything but a sequence of strings; for none.
        """
        check_sentences(sentences)
        rows = self.processor.encode(list(sentences), add_bos=True, add_eos=True)
        tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=PAD)

    def decode(self, tokens: torch.Tensor) -> list[str]:
        """Return the sentences of tokens (n, T), each up to its end; begin and padding are silent.

        Raises
        ------
        ValueError
            For tokens that are not integers (n, T) below the size of the vocabulary.
        """
        kind = (tokens.ndim, tokens.is_floating_point())
        if kind != (2, False) or (tokens.numel() and not 0 <= tokens.max() < len(self)):
            found = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
            raise ValueError(f"tokens is {found}; expected integers (n, T) below {len(self)}")
        rows = tokens.tolist()
        ends = (row.index(END) if END in row else len(row) for row in rows)
        pieces = ([t for t in row[:end] if t > END] for row, end in zip(rows, ends, strict=True))
        return [self.processor.decode(row) for row in pieces]


def train_vocabulary(pairs: Sequence[Pair], size: int) -> Vocabulary:
    """Find the pieces of words that write the sentences of both languages in few tokens.

    Byte-pair encoding by `sentencepiece`: single characters at first, then again and again the
    most frequent pair of neighbours in a word becomes one piece. It follows from `pairs` alone.

    Parameters
    ----------
    pairs : sequence of (str, str)
        The training part, and nothing else.
    size : int
        The number of tokens, the four special ones and all characters among them.

    Raises
    ------
    TypeError, ValueError
        For pairs that are not two strings each; for a `size` that has no place for the characters,
        or that so few sentences cannot fill.

    Examples
    --------
    >>> vocabulary = train_vocabulary(data.train, 2000)  # doctest: +SKIP
    >>> vocabulary.pieces("Das ist gut.")  # doctest: +SKIP
    ['▁Das', '▁ist', '▁gut', '.']
    """
    check_count("size", size)
    sentences = [sentence for pair in pairs for sentence in pair]
    check_sentences(sentences)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            character_coverage=1.0,
            pad_id=PAD,
            bos_id=BEGIN,
            eos_id=END,
            unk_id=UNKNOWN,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].strip()
        raise ValueError(f"size is {size}, which does not fit the sentences: {reason}") from error
    return Vocabulary(model.getvalue())


def check_sentences(sentences: Sequence[str]) -> None:
    """Raise TypeError or ValueError unless `sentences` is a sequence of strings, not empty."""
    if isinstance(sentences, str) or not isinstance(sentences, Sequence):
        raise TypeError(f"sentences is {type(sentences).__name__}; expected a sequence of strings")
    for i, sentence in enumerate(sentences):
        if not isinstance(sentence, str):
            raise TypeError(f"sentences[{i}] is {type(sentence).__name__}; expected a string")
    if not sentences:
        raise ValueError("sentences is empty; expected at least one")
