"""German–English: which sentences of Ding's file are taken; cleaning, parts, pieces of words."""

import os
from pathlib import Path

import pytest
import torch

from derived_attention.tasks.translation import data as translation
from derived_attention.tasks.translation.data import (
    BEGIN,
    END,
    PAD,
    UNKNOWN,
    clean,
    load_translation,
    part_of,
    sentences,
    train_vocabulary,
)

FILE = """\
# Version :: of a test
# Das ist kein Eintrag. :: This is no entry.
gut {adj} | besser | Das ist gut. [ugs.] | Mir geht es (sehr) gut! :: good | better | \
That’s quite good. [coll.] | I am (very) well!
Haus {n} [arch.] | Häuser {pl} | Das Haus ist alt. :: house | houses
die Kosten tragen {vt} :: to bear the costs
Schlange stehen {vi} | Wir standen Schlange. :: to queue [Br.] | We had to queue/line up.
Frage {f} | Wie geht es dir?; Wie geht’s? <gehts> | Wann kommt …? :: question | How are you?; How \
do you do? | When does … come?
etw. tun {vt} | Er will etw. tun. | Der Tee ist fertig. :: to do sth. | He wants to do sth. | Tea \
is ready now.
Zitat {n} | „Ich bin müde“, sagte sie. | Bitte beeilen Sie sich. /ASAP/ :: quote | ‘I’m tired,’ \
she said. | Please be quick now.
Das ist gut. :: This is good.
Das ist prima. :: That's quite good.
Ja, gern! | Nein danke, wirklich. | ich habe keine zeit. :: Yes, please! | No, I'm good. | i have \
no time.
Anfang {m :: Ein Anfang ohne Ende.
Es fehlt {adj die Klammer. :: A bracket is missing here.
Der Rest ist neu. :: This is good.
"""
PAIRS = [
    ("Das ist gut.", "That's quite good."),
    ("Mir geht es gut!", "I am well!"),
    ("Wie geht es dir?", "How are you?"),
    ("Der Tee ist fertig.", "Tea is ready now."),
    ('"Ich bin müde", sagte sie.', "'I'm tired,' she said."),
    ("Bitte beeilen Sie sich.", "Please be quick now."),
    ("Nein danke, wirklich.", "No, I'm good."),
    ("Der Rest ist neu.", "This is good."),  # it came before, but was not taken
]


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Neither the reader's home nor what is installed is touched."""
    monkeypatch.setenv("DERIVED_ATTENTION_TEXT", str(tmp_path / "text"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "share"))


def write(folder, content=FILE):
    folder.mkdir(parents=True)
    (folder / "de-en").write_text(content, encoding="utf-8")


def everything(data):
    return [*data.train, *data.validation, *data.test]


def test_which_sentences_are_taken():
    assert list(sentences(FILE.splitlines(keepends=True))) == PAIRS


@pytest.mark.parametrize(
    "item, text",
    [
        ("Es {n} regnet [ugs.] heute.", "Es regnet heute."),
        ("Er kam (gestern) .", "Er kam."),
        ("Das {n} [ugs.] , ja!", "Das, ja!"),
        ("Er lachte; sie weinte.", "Er lachte; sie weinte."),
        ("Er lachte.; Sie weinte.", "Er lachte."),
        ("Warum?; Weshalb?", "Warum?"),
        ("Auf 1/2 Wegen. /a. h. W./", "Auf 1/2 Wegen. /a. h. W./"),
        ("Auf Wegen. /ahW/", "Auf Wegen."),
        ("„Nein“, <nain> so ‚nicht‘", '"Nein", so ‚nicht\''),
    ],
)
def test_cleaning(item, text):
    assert clean(item) == text


@pytest.mark.parametrize("place", ["share/trans", "text"])
def test_load(tmp_path, place):
    write(tmp_path / place)
    data = load_translation("ding")
    assert data.name == "ding" and sorted(everything(data)) == sorted(PAIRS)
    for part in ("train", "validation", "test"):
        assert all(part_of(english) == part for _, english in getattr(data, part))
    assert load_translation("ding") == data


def test_the_copy_of_the_reader_comes_first(tmp_path):
    write(tmp_path / "share" / "trans")
    write(tmp_path / "text", "Nur das hier. :: Only this here.\n")
    assert everything(load_translation("ding")) == [("Nur das hier.", "Only this here.")]


def many(n):
    return "".join(f"Das ist Satz {i}. :: This is sentence {i}.\n" for i in range(n))


def test_parts(tmp_path):
    """A twentieth each for validation and test, within five standard errors; nothing is shared."""
    write(tmp_path / "text", many(4000) + many(4100))
    data = load_translation("ding")
    assert len(everything(data)) == 4100
    for part in (data.validation, data.test):
        assert len(part) == pytest.approx(205, abs=5 * (4100 * 0.05 * 0.95) ** 0.5)
    check_parts(data)


def check_parts(data):
    for language in (0, 1):
        seen = [pair[language] for pair in everything(data)]
        assert len(set(seen)) == len(seen)


def test_the_part_of_a_sentence_never_changes():
    """A page compares models across machines and versions: these are the parts of today."""
    parts = [part_of(f"This is sentence {i}.") for i in range(100)]
    assert [i for i, part in enumerate(parts) if part == "test"] == [14, 16, 24, 49, 77, 82, 92]
    assert [i for i, part in enumerate(parts) if part == "validation"] == [66]
    assert set(parts) == {"train", "validation", "test"}


def test_not_installed(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_translation("ding")
    for words in ("apt-get install trans-de-en", str(tmp_path / "text" / "de-en")):
        assert words in str(caught.value)


@pytest.mark.parametrize("content", ["", "no dictionary\n", "gut :: good\n"])
def test_another_file(tmp_path, content):
    write(tmp_path / "text", content)
    with pytest.raises(ValueError, match="de-en has no sentences; expected the dictionary of Ding"):
        load_translation("ding")


def test_bytes_that_are_no_text(tmp_path):
    write(tmp_path / "text")
    with open(tmp_path / "text" / "de-en", "ab") as file:
        file.write(b"Das ist \xff hier. :: This is here.\n")
    assert len(everything(load_translation("ding"))) == len(PAIRS)


@pytest.mark.parametrize(
    "name, error, message",
    [
        (None, TypeError, "name is None; expected a string"),
        ("iwslt", ValueError, "name is 'iwslt'; expected 'ding'"),
    ],
)
def test_wrong_name(name, error, message):
    with pytest.raises(error, match=message):
        load_translation(name)


REAL = Path(os.sep, "usr", "share", "trans", "de-en")


@pytest.mark.skipif(
    not REAL.is_file(), reason="NO trans-de-en HERE: DING'S REAL DICTIONARY IS NOT TESTED"
)
def test_real_dictionary(monkeypatch):
    monkeypatch.delenv("XDG_DATA_DIRS")
    data = load_translation("ding")
    check_parts(data)
    assert len(everything(data)) > 15_000
    for pair in everything(data):
        for text in pair:
            assert text == clean(text) and len(text.split()) >= 3
            assert not translation.OPEN.search(text)


# --- Pieces of words ------------------------------------------------------------------------------

SENTENCES = [sentence for pair in PAIRS for sentence in pair]


@pytest.fixture(scope="module")
def vocabulary():
    return train_vocabulary(PAIRS, 60)


def test_tokens_of_sentences(vocabulary):
    tokens = vocabulary.encode(SENTENCES)
    pieces = [vocabulary.pieces(sentence) for sentence in SENTENCES]
    assert tokens.dtype == torch.int64 and len(vocabulary) == 60
    assert tokens.shape == (len(SENTENCES), 2 + max(map(len, pieces)))
    assert tokens.min() == PAD == 0 and tokens.max() < 60 and not (tokens == UNKNOWN).any()
    for row, own, sentence in zip(tokens.tolist(), pieces, SENTENCES, strict=True):
        assert row[0] == BEGIN and row[len(own) + 1] == END
        assert set(row[len(own) + 2 :]) <= {PAD} and min(row[1 : len(own) + 1]) > UNKNOWN
        assert "".join(own) == "▁" + sentence.replace(" ", "▁")
        assert vocabulary.encode([sentence]).tolist() == [row[: len(own) + 2]]
    assert vocabulary.decode(tokens) == SENTENCES


def test_decoding_stops_at_the_end(vocabulary):
    tokens = vocabulary.encode(["Das ist gut."])
    again = torch.cat([tokens, tokens, tokens], 1)
    assert vocabulary.decode(again) == ["Das ist gut."]
    assert vocabulary.decode(tokens[:, 1:-1]) == ["Das ist gut."]  # neither begin nor end
    assert vocabulary.decode(torch.tensor([[BEGIN, END], [PAD, PAD]])) == ["", ""]


def test_an_unknown_character_is_one_token(vocabulary):
    (row,) = vocabulary.encode(["Das ☃ ist"]).tolist()
    assert row.count(UNKNOWN) == 1
    assert "☃" not in vocabulary.decode(torch.tensor([row]))[0]


def test_pieces_are_the_frequent_pairs_of_neighbours():
    """Byte-pair encoding by hand: "ab" comes most often, then "abc", and nothing else fits in."""
    pairs = [("abc abc abd", "abc cd ab")]
    vocabulary = train_vocabulary(pairs, 4 + 5 + 2)  # a b c d ▁, and two more
    assert vocabulary.pieces("abcd") == ["▁ab", "c", "d"]
    assert vocabulary.pieces("dab") == ["▁", "d", "ab"]


def test_more_pieces_give_fewer_tokens():
    counts = [len(train_vocabulary(PAIRS, n).pieces("Das ist gut.")) for n in (50, 70, 90)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def test_a_vocabulary_follows_from_its_sentences(tmp_path, monkeypatch, capfd):
    """Also on a machine with other cores; it says nothing, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    one, two, other = (train_vocabulary(pairs, 60) for pairs in (PAIRS, list(PAIRS), PAIRS[:-1]))
    proto = [v.processor.serialized_model_proto() for v in (one, two, other)]
    assert proto[0] == proto[1] and one.encode(SENTENCES).equal(two.encode(SENTENCES))
    assert not one.encode(SENTENCES).equal(other.encode(SENTENCES))
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "pairs, size, error, message",
    [
        (PAIRS, 0, ValueError, "size is 0; expected at least 1"),
        (PAIRS, 60.0, TypeError, "size is 60.0; expected an integer"),
        (
            PAIRS,
            9,
            ValueError,
            "size is 9; expected one that fits the sentences: .*smaller than requ",
        ),
        (PAIRS, 9999, ValueError, "size is 9999; expected one that fits the sentences: .*too high"),
        ((), 60, ValueError, "sentences is empty; expected at least one"),
        ([("Das", 3)], 60, TypeError, r"sentences\[1\] is int; expected a string"),
    ],
)
def test_wrong_training_of_a_vocabulary(pairs, size, error, message):
    with pytest.raises(error, match=message):
        train_vocabulary(pairs, size)


def test_wrong_sentences(vocabulary):
    for wrong, error, message in (
        ("Das ist", TypeError, "sentences is str; expected a sequence of strings"),
        (None, TypeError, "sentences is NoneType"),
        ([], ValueError, "sentences is empty"),
        ([b"Das"], TypeError, r"sentences\[0\] is bytes"),
    ):
        with pytest.raises(error, match=message):
            vocabulary.encode(wrong)
    with pytest.raises(TypeError, match=r"sentences\[0\] is int"):
        vocabulary.pieces(3)
    for wrong in (torch.tensor([3]), torch.tensor([[0.5]]), torch.tensor([[60]])):
        with pytest.raises(ValueError, match="tokens is .*; expected integers .n, T. below 60"):
            vocabulary.decode(wrong)
