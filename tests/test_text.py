"""Text: Python's documentation without repeated paragraphs, and its division into parts."""

import collections
from pydoc_data.topics import topics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from derived_book.tasks.language import data as text
from derived_book.tasks.language.data import (
    decode,
    encode,
    load_text,
    split_documents,
    without_repeats,
)

# --- Python's documentation -----------------------------------------------------------------------


def words(paragraph):
    return " ".join("".join(c if c.isalnum() or c == "_" else " " for c in paragraph).split())


def paragraphs(document):
    return {words(paragraph) for paragraph in document.split("\n\n")} - {""}


def test_python():
    data = load_text("python")
    parts = (data.train, data.validation, data.test)
    assert data.name == "python" and all(x.dtype == torch.uint8 and x.ndim == 1 for x in parts)
    total = sum(map(len, parts))
    assert 300_000 < total < 0.85 * sum(map(len, topics.values()))
    assert all(0.08 * total < len(part) <= 0.1005 * total for part in parts[1:])
    again = load_text("python")
    for part, same in zip(parts, (again.train, again.validation, again.test), strict=True):
        assert torch.equal(part, same)


def test_no_paragraph_of_python_is_in_two_parts_and_none_is_lost():
    data = load_text("python")
    parts = [paragraphs(decode(part)) for part in (data.train, data.validation, data.test)]
    union = set().union(*parts)
    assert sum(map(len, parts)) == len(union)
    assert union == set().union(*map(paragraphs, topics.values()))
    raw = collections.Counter(p for topic in topics.values() for p in paragraphs(topic))
    assert sum(n > 1 for n in raw.values()) > 300  # the topics do repeat paragraphs


def test_most_of_the_test_is_new():
    """Runs of 60 bytes of the test text rarely occur in the training text."""
    data = load_text("python")
    train, test = (bytes(part.tolist()) for part in (data.train, data.test))
    places = range(0, len(test) - 60, 50)
    assert sum(test[i : i + 60] in train for i in places) < 0.02 * len(places)


def test_repeats():
    documents = {
        "short": "Head\n****\n\nSame text,\nhere.\n\nOnly short.\n",
        "long": "Head\n====\n\n   Same text, here.\n\nOnly long, longer.\n\nSame  text here\n",
        "nothing new": "Same text, here.",
        "symbols": "*** ===",
    }
    assert without_repeats(documents) == {
        "long": "Head\n====\n\n   Same text, here.\n\nOnly long, longer.\n",
        "short": "Only short.\n",
    }
    assert without_repeats(dict(reversed(documents.items()))) == without_repeats(documents)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), max_size=40))
def test_division(lengths):
    documents = {f"topic {i}": "x" * length for i, length in enumerate(lengths)}
    parts = split_documents(documents)
    assert sorted(sum(parts.values(), [])) == sorted(documents)
    for part in ("test", "validation"):
        assert sum(len(documents[name]) for name in parts[part]) <= sum(lengths) / 10
    assert parts == split_documents(dict(reversed(documents.items())))


def test_division_is_by_name_and_fills_the_test_first():
    documents = {f"topic {i}": "x" * 100 for i in range(100)}
    parts = split_documents(documents)
    sizes = {part: len(names) for part, names in parts.items()}
    assert sizes == {"train": 80, "validation": 10, "test": 10}
    assert parts["test"] == sorted(parts["test"], key=hash_of)
    assert max(map(hash_of, parts["test"])) < min(map(hash_of, parts["validation"]))
    assert max(map(hash_of, parts["validation"])) < min(map(hash_of, parts["train"]))


def hash_of(name):
    return text.hashlib.sha256(name.encode()).hexdigest()


def test_bytes():
    assert encode("aé\n").tolist() == [97, 0xC3, 0xA9, 10]
    assert decode(encode("„Ja“ – é")) == "„Ja“ – é"
    assert decode(encode("é")[:1]) == "\ufffd"
    assert encode("").shape == (0,)


def test_wrong_name():
    with pytest.raises(TypeError, match="name is None; expected a string"):
        load_text(None)
    with pytest.raises(ValueError, match="name is 'books'; expected 'python'"):
        load_text("books")
