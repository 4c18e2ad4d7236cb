"""Two tables: rows of numbers and categories, with an answer each.

California Housing and Adult are files of the package shapiq, which is not imported.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import torch

from derived_attention.tasks.checks import check_name
from derived_attention.tasks.series.data import SeriesSplit

Rows = list[list[str]]

FILES = {"california_housing": "california_housing.csv", "adult": "adult_census.csv"}
ADULT_TEST = 16_281  # the file's first rows are UCI's test part
VALIDATION = {"california_housing": 3_303, "adult": 6_513}  # as in [Gorishniy2021]
CALIFORNIA_TEST = 4_128


@dataclasses.dataclass(frozen=True)
class TableData:
    """A table in three parts.

    Attributes
    ----------
    name : str
    train, validation, test : derived_attention.tasks.series.data.SeriesSplit
        `x` is (n, T, 1): a row is a sequence of T = numbers + len(categories) columns. First the
        numbers, each column mapped to a normal distribution by the ranks of the training part, then
        the categories, as codes. Code 0 is any category that the training part does not have.
        `padding` is None.
    numbers : int
        Number of columns that are numbers.
    categories : tuple of int
        The number of codes, 0 included, of each other column.
    classes : int
        Number of classes; 0 where the answers are numbers.
    columns : tuple of str
        The name of each column, in the order of `x`.
    target : (float, float) or None
        Mean and standard deviation of the training answers, where they are numbers.
    """

    name: str
    train: SeriesSplit
    validation: SeriesSplit
    test: SeriesSplit
    numbers: int
    categories: tuple[int, ...]
    classes: int
    columns: tuple[str, ...]
    target: tuple[float, float] | None = None

    @property
    def length(self) -> int:
        """T, the number of columns."""
        return self.numbers + len(self.categories)


def load_table(name: str) -> TableData:
    """Load a table from the package shapiq, split and scaled.

    - ``"california_housing"``: 20 640 districts, 8 numbers; the price of a house in 100 000
      dollars. There is no official split: a seeded permutation gives 13 209, 3 303 and 4 128 rows.
    - ``"adult"``: 48 842 people of a census, 6 numbers and 8 categories; whether the income is over
      50 000 dollars (class 1). The official test part has 16 281 rows; a seeded permutation of the
      others gives 26 048 for training and 6 513 for validation.

    The sizes of the parts are those of [Gorishniy2021]; their rows, but for the test of Adult, are
    not.

    Raises
    ------
    TypeError, ValueError
        For an unknown `name`; for a file with other rows and columns.
    FileNotFoundError
        If shapiq is not installed.

    Examples
    --------
    >>> data = load_table("adult")
    >>> data.train.x.shape, data.numbers, data.classes
    (torch.Size([26048, 14, 1]), 6, 2)
    """
    check_name("name", name, FILES)
    header, rows = _read(_find(FILES[name]))
    test, others = _test_part(name, len(rows))
    parts = {
        "train": others[VALIDATION[name] :],
        "validation": others[: VALIDATION[name]],
        "test": test,
    }
    texts = dict(zip(header, zip(*rows, strict=True), strict=True))
    y, classes = _answers(texts.pop(header[-1]))
    words = [column for column in texts if not _is_number(texts[column])]
    columns = [column for column in texts if column not in words] + words
    numeric = np.array([texts[c] for c in columns if c not in words], dtype=np.float64).T
    coded = [_codes(np.array(texts[c]), parts["train"]) for c in words]
    x = np.column_stack([_normal(numeric, parts["train"]), *(codes for codes, _ in coded)])
    x = x.astype(np.float32)

    def split(part: np.ndarray) -> SeriesSplit:
        return SeriesSplit(torch.from_numpy(x[part])[..., None], None, torch.from_numpy(y[part]))

    answers = y[parts["train"]].astype(np.float64)
    return TableData(
        name,
        **{part: split(at) for part, at in parts.items()},
        numbers=numeric.shape[1],
        categories=tuple(size for _, size in coded),
        classes=classes,
        columns=tuple(columns),
        target=None if classes else (float(answers.mean()), float(answers.std())),
    )


def _find(file: str) -> Path:
    spec = importlib.util.find_spec("shapiq")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "datasets" / "data" / file
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{file} is not installed; it is part of the package shapiq (pip install --no-deps shapiq)"
    )


def _read(path: Path) -> tuple[list[str], Rows]:
    """Return the names of the columns, and the rows as text; raise ValueError for other sizes."""
    with open(path, newline="", encoding="utf8") as file:
        header, *rows = csv.reader(file)
    size = len(rows), len(header)
    expected = (48_842, 15) if path.name == FILES["adult"] else (20_640, 9)
    if size != expected:
        raise ValueError(f"{path.name} has {size} rows and columns; expected {expected}")
    return header, rows


def _test_part(name: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the test rows, and of the others in random order."""
    if name == "adult":
        order = np.random.default_rng(0).permutation(n - ADULT_TEST)
        return np.arange(ADULT_TEST), ADULT_TEST + order
    order = np.random.default_rng(0).permutation(n)
    return order[:CALIFORNIA_TEST], order[CALIFORNIA_TEST:]


def _is_number(texts: tuple[str, ...]) -> bool:
    try:
        np.array(texts, dtype=np.float64)
    except ValueError:
        return False
    return True


def _answers(texts: tuple[str, ...]) -> tuple[np.ndarray, int]:
    """Return (n,) float32 and 0, or (n,) int64 and the number of classes, in sorted order."""
    if _is_number(texts):
        return np.array(texts, dtype=np.float32), 0
    labels, y = np.unique(texts, return_inverse=True)
    return y.astype(np.int64), len(labels)


def _normal(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Map each column to N(0, 1) by its ranks among the training rows."""
    from sklearn.preprocessing import QuantileTransformer

    # Fewer quantiles than rows smooth over ties: [Gorishniy2021] take a thirtieth, and noise.
    quantiles = QuantileTransformer(
        n_quantiles=max(len(train) // 30, 10),
        output_distribution="normal",
        subsample=None,
        random_state=0,
    )
    return quantiles.fit(x[train]).transform(x)


def _codes(texts: np.ndarray, train: np.ndarray) -> tuple[np.ndarray, int]:
    """Return codes (n,), 0 for texts that the training rows do not have, and their number."""
    known = np.unique(texts[train])
    at = np.minimum(np.searchsorted(known, texts), len(known) - 1)
    return np.where(known[at] == texts, at + 1, 0), len(known) + 1
