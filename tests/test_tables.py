"""Tables: parts, scales, codes, and what is said where the files are not."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from derived_attention.tasks.tables import data as tables
from derived_attention.tasks.tables.data import load_table

FOLDER = Path(importlib.util.find_spec("shapiq").submodule_search_locations[0], "datasets", "data")


def rows_of(data):
    """All rows in the order test, training, validation, with their answers."""
    parts = (data.test, data.train, data.validation)
    return torch.cat([p.x[..., 0] for p in parts]), torch.cat([p.y for p in parts])


def column(name, which):
    with open(FOLDER / tables.FILES[name], newline="") as file:
        return [row[which] for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    "name, sizes, numbers, classes",
    [
        ("california_housing", (13_209, 3_303, 4_128), 8, 0),
        ("adult", (26_048, 6_513, 16_281), 6, 2),
    ],
)
def test_parts_and_scales(name, sizes, numbers, classes):
    data = load_table(name)
    parts = (data.train, data.validation, data.test)
    assert tuple(map(len, parts)) == sizes
    assert (data.numbers, data.classes, len(data.columns)) == (numbers, classes, data.length)
    for part in parts:
        assert part.x.shape == (len(part), data.length, 1) and part.x.dtype == torch.float32
        assert part.padding is None and part.x.isfinite().all()
        assert part.y.dtype == (torch.int64 if classes else torch.float32)
    for j in range(numbers):  # the ranks of the training part are normal, where values are many
        x = data.train.x[:, j, 0]
        if len(x.unique()) > 1000:
            found = x.quantile(torch.tensor([0.1587, 0.5, 0.8413]))
            assert (found - torch.tensor([-1.0, 0.0, 1.0])).abs().max() < 0.02
    for j, size in enumerate(data.categories, numbers):
        codes = rows_of(data)[0][:, j]
        assert torch.equal(codes, codes.round()) and 0 <= codes.min() and codes.max() == size - 1
    assert "shapiq" not in sys.modules  # its files are read; it is never imported


def test_adult_s_test_part_is_the_official_one():
    data, answers = load_table("adult"), column("adult", "class")
    y = [answer == ">50K" for answer in answers]
    assert data.test.y.tolist() == y[:16_281]
    assert int(rows_of(data)[1].sum()) == sum(y)
    at, sex = data.columns.index("sex"), column("adult", "sex")
    assert data.test.x[:, at, 0].tolist() == [1 + (s == "Male") for s in sex[:16_281]]


def test_numbers_keep_their_order_and_rows_their_answers():
    data = load_table("california_housing")
    prices, incomes = (
        np.array(column("california_housing", c), float) for c in ("MedHouseVal", "MedInc")
    )
    x, y = rows_of(data)
    assert np.array_equal(np.sort(y), np.sort(prices.astype(np.float32)))
    order = np.random.default_rng(0).permutation(len(prices))
    assert np.array_equal(data.test.y, prices[order[:4128]].astype(np.float32))
    by_file = np.argsort(incomes[order[:4128]], kind="stable")
    assert (np.diff(data.test.x[by_file, 0, 0]) >= 0).all()
    y = data.train.y.double()
    assert data.target == pytest.approx((float(y.mean()), float(y.std(correction=0))))


def test_a_category_that_training_lacks_is_code_0():
    codes, size = tables._codes(np.array(["b", "", "c", "a", "z"]), np.array([0, 1, 2]))
    assert (codes.tolist(), size) == ([2, 1, 3, 0, 0], 4)


@pytest.mark.parametrize(
    "name, error, message",
    [
        (3, TypeError, "name is 3; expected a string"),
        ("higgs", ValueError, "name is 'higgs'; expected one of 'california_housing', 'adult'"),
    ],
)
def test_wrong_names(name, error, message):
    with pytest.raises(error, match=message):
        load_table(name)


def test_without_shapiq_or_with_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        FileNotFoundError, match="adult_census.csv is not installed; .*install.* shapiq"
    ):
        load_table("adult")
    (tmp_path / "datasets" / "data").mkdir(parents=True)
    (tmp_path / "datasets" / "data" / "adult_census.csv").write_text("a,b\n1,2\n")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(
        ValueError, match=r"adult_census.csv has \(1, 2\) rows and columns; expected"
    ):
        load_table("adult")
