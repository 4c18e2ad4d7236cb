"""Series of the UEA archive: facts, standardisation, padding, and errors without a network."""

import sys
from pathlib import Path
from urllib.error import URLError

import aeon.datasets
import numpy as np
import pytest
import torch

from derived_book.tasks.series.data import load_series

SHIPPED = Path(aeon.datasets.__file__).parent / "data"
FACTS = {  # train, test, channels, length, classes, clipped
    "JapaneseVowels": (270, 370, 12, 26, 9, 1),
    "BasicMotions": (40, 40, 6, 100, 4, 0),
}


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Neither the reader's home nor the cache of a real session is touched."""
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("DERIVED_ATTENTION_SERIES", str(tmp_path / "series"))
    monkeypatch.delenv("AEON_DATA", raising=False)


@pytest.mark.parametrize("name", FACTS)
def test_facts(name, tmp_path):
    data = load_series(name)
    train, test, channels, length, classes, clipped = FACTS[name]
    assert (len(data.train), len(data.test)) == (train, test)
    assert (data.channels, data.length, data.classes) == (channels, length, classes)
    assert data.clipped == clipped and data.name == name
    assert list(data.labels) == sorted(data.labels) and len(data.labels) == classes
    for split in (data.train, data.test):
        assert split.x.shape == (len(split), length, channels) and split.x.dtype == torch.float32
        assert split.padding.shape == (len(split), length) and split.padding.dtype == torch.bool
        assert split.y.shape == (len(split),) and split.y.dtype == torch.int64
        assert sorted(set(split.y.tolist())) == list(range(classes))
        assert torch.isfinite(split.x).all()
        assert (split.x[split.padding] == 0).all()
    assert not list(tmp_path.iterdir())  # nothing is written


def test_padding_is_a_tail_and_lengths_are_the_archive_s():
    data = load_series("JapaneseVowels")
    for split, mean_length in ((data.train, 4274 / 270), (data.test, (5687 - 3) / 370)):
        lengths = (~split.padding).sum(1)
        assert (split.padding == (torch.arange(26) >= lengths[:, None])).all()
        assert lengths.min() == 7 and lengths.max() == 26
        assert lengths.float().mean() == pytest.approx(mean_length)
    assert not load_series("BasicMotions").train.padding.any()


def test_values_are_those_of_the_file():
    """The first training series, undone by hand: order of steps and channels, and its label."""
    text = (SHIPPED / "JapaneseVowels" / "JapaneseVowels_TRAIN.ts").read_text()
    rows = [line.split(":") for line in text.split("@data")[1].split()]
    cases = [np.array([[float(v) for v in c.split(",")] for c in row[:-1]]) for row in rows]
    steps = np.concatenate(cases, axis=1)
    data = load_series("JapaneseVowels")
    for i in (0, 137, 269):
        expected = (cases[i] - steps.mean(1, keepdims=True)) / steps.std(1, keepdims=True)
        actual = data.train.x[i][~data.train.padding[i]].T.numpy()
        np.testing.assert_allclose(actual, expected, atol=1e-5)
        assert data.labels[data.train.y[i]] == rows[i][-1]


def fake(train, test, train_labels, test_labels):
    """Stand in for aeon's loader."""

    def load(name, split, extract_path, load_equal_length, load_no_missing):
        assert load_equal_length is False and load_no_missing is True
        x, y = (train, train_labels) if split == "train" else (test, test_labels)
        return x, np.array(list(y))

    return load


def test_clipping_constant_channels_and_label_order(monkeypatch):
    train = [np.array([[1.0, 3.0], [5.0, 5.0]]), np.array([[2.0], [5.0]])]
    test = [np.array([[1.0, 2.0, 9.0], [5.0, 6.0, 7.0]])]
    monkeypatch.setattr(aeon.datasets, "load_classification", fake(train, test, "aa", ["b"]))
    data = load_series("BasicMotions")
    sd = np.std([1, 3, 2])
    assert torch.allclose(data.train.x[0], torch.tensor([[-1 / sd, 0], [1 / sd, 0]]).float())
    assert torch.allclose(data.test.x[0], torch.tensor([[-1 / sd, 0], [0, 1]]).float())
    assert data.train.padding.tolist() == [[False, False], [False, True]]
    assert data.clipped == 1 and data.length == 2 and data.labels == ("a", "b")
    numbers = fake(train, test * 2, ["10", "2"], ["1", "10"])
    monkeypatch.setattr(aeon.datasets, "load_classification", numbers)
    data = load_series("BasicMotions")
    assert data.labels == ("1", "2", "10") and data.train.y.tolist() == [2, 1]


def test_missing_values_are_refused(monkeypatch):
    case = np.array([[1.0, np.nan]])
    monkeypatch.setattr(aeon.datasets, "load_classification", fake([case], [case], "a", "a"))
    with pytest.raises(ValueError, match="'BasicMotions'; this set has missing values"):
        load_series("BasicMotions")


def test_a_name_is_text_and_an_unknown_one_gives_a_near_one():
    with pytest.raises(TypeError, match="name is"):
        load_series(None)
    for name, near in (("BasicMotion", "BasicMotions"), ("", "JapaneseVowels")):
        message = f"name is '{name}'; expected a classification set .* {near}"
        with pytest.raises(ValueError, match=message):
            load_series(name)


def test_variant_without_missing_values_is_read(tmp_path):
    """As aeon leaves it after a download: both variants in one folder."""
    folder = tmp_path / "series" / "DodgerLoopDay"
    folder.mkdir(parents=True)
    for part in ("TRAIN", "TEST"):
        text = (SHIPPED / "BasicMotions" / f"BasicMotions_{part}.ts").read_text()
        (folder / f"DodgerLoopDay_nmv_{part}.ts").write_text(text)
        head, values = text.split("@data\n")
        head = head.replace("@missing false", "@missing true")
        text = f"{head}@data\n?,{values.partition(',')[2]}"
        (folder / f"DodgerLoopDay_{part}.ts").write_text(text)
    data = load_series("DodgerLoopDay")
    torch.testing.assert_close(data.train.x, load_series("BasicMotions").train.x)
    for path in folder.glob("*_nmv_*"):
        path.unlink()
    with pytest.raises(ValueError, match="'DodgerLoopDay'; this set has missing values"):
        load_series("DodgerLoopDay")


@pytest.mark.parametrize("error", [URLError("no route"), ValueError("could not"), OSError("x")])
def test_no_network(monkeypatch, tmp_path, error):
    def load(name, split, extract_path, **_):
        folder = Path(extract_path) / name  # what aeon has written when the network fails
        folder.mkdir()
        (folder / f"{name}_TRAIN.ts").write_text("half a fi")
        raise error

    monkeypatch.setattr(aeon.datasets, "load_classification", load)
    with pytest.raises(ConnectionError) as caught:
        load_series("Libras")
    message = str(caught.value)
    assert caught.value.__cause__ is error
    for part in ("Libras is not shipped with aeon", "BasicMotions", "JapaneseVowels"):
        assert part in message
    assert str(tmp_path / "series" / "Libras") in message
    assert list((tmp_path / "series").iterdir()) == []  # no partial download is left


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DERIVED_ATTENTION_SERIES", str(tmp_path / "file" / "series"))
    with pytest.raises(OSError, match=r"series cannot be written .*: set DERIVED_ATTENTION_SERIES"):
        load_series("Libras")


def test_download_is_kept(monkeypatch, tmp_path):
    """With a network, the set is downloaded once, to the cache, and read from there afterwards."""
    real, calls = aeon.datasets.load_classification, []

    def load(name, split, extract_path, **how):
        calls.append(extract_path)
        folder = Path(extract_path) / name
        if not folder.exists():
            assert Path(extract_path).is_relative_to(tmp_path)
            folder.mkdir()
            for part in ("TRAIN", "TEST"):
                text = (SHIPPED / "BasicMotions" / f"BasicMotions_{part}.ts").read_text()
                (folder / f"{name}_{part}.ts").write_text(text)
        return real(name, split=split, extract_path=extract_path, **how)

    monkeypatch.setattr(aeon.datasets, "load_classification", load)
    first = load_series("Libras")
    second = load_series("Libras")
    assert torch.equal(first.train.x, second.train.x)
    series = tmp_path / "series"
    assert [path.name for path in series.iterdir()] == ["Libras"]
    assert calls[2:] == [str(series)] * 2
    if sys.platform != "win32":
        assert not (tmp_path / "home").exists()
