"""Time series with a class each: the UEA/UCR archives, read through aeon.

JapaneseVowels and BasicMotions are part of aeon's package, so they need no download. Any other set
of the archives is downloaded by aeon on first use and kept in ``cache_dir("series")``.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from derived_attention.common.files import cache_dir
from derived_book.runtime import make_folder
from derived_book.tasks.checks import check_type

PARTS = ("TRAIN", "TEST")


@dataclasses.dataclass(frozen=True)
class SeriesSplit:
    """n sequences of T steps and their answers, as most loaders return them.

    Attributes
    ----------
    x : torch.Tensor
        (n, T, C) float32, standardised by the training split, 0 where padded: series of C
        channels, or images of T patches. Or (n, T) int64: sequences of tokens.
    padding : torch.Tensor or None
        (n, T) bool, True where a step is padding; None where no step can be.
    y : torch.Tensor
        (n,) int64, the class of each sequence.
    """

    x: torch.Tensor
    padding: torch.Tensor | None
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclasses.dataclass(frozen=True)
class SeriesData:
    """One data set of the archives, with its official split.

    Attributes
    ----------
    name : str
    train, test : SeriesSplit
    channels, classes, length : int
        C, the number of classes, and T, the length of the longest training series.
    labels : tuple of str
        The names of the classes in the archive, sorted: class c of `y` is ``labels[c]``.
    clipped : int
        Number of test series that were longer than T and lost their last steps.
    """

    name: str
    train: SeriesSplit
    test: SeriesSplit
    channels: int
    classes: int
    length: int
    labels: tuple[str, ...]
    clipped: int


def load_series(name: str) -> SeriesData:
    """Load a set of the UEA/UCR archives with classes, standardised and padded.

    Each channel is standardised by the mean and the standard deviation of the real steps of the
    *training* split. T is the longest training series; a longer test series is clipped to T, as in
    the reference code of the papers (in JapaneseVowels one series of 370). Of a set with missing
    values, the variant of the archive with imputed values is read.

    Parameters
    ----------
    name : str
        The name in the archive, such as ``"JapaneseVowels"``.

    Raises
    ------
    TypeError, ValueError
        For an unknown `name`; for a set with missing values and no variant without them.
    ConnectionError
        If the set is not shipped with aeon and cannot be downloaded.

    Examples
    --------
    >>> data = load_series("JapaneseVowels")
    >>> data.train.x.shape, data.classes, data.clipped
    (torch.Size([270, 26, 12]), 9, 1)
    """
    check_type("name", name, str, "the name of a data set")
    (train, train_answers), (test, test_answers) = _read(name, _archive(name))
    labels = tuple(sorted({*train_answers, *test_answers}, key=_label_order))
    train_y, test_y = (
        torch.tensor([labels.index(answer) for answer in answers])
        for answers in (train_answers, test_answers)
    )
    for numbers in (*train, *test):
        if not np.isfinite(numbers).all():
            raise ValueError(f"name is {name!r}; this set has missing values; expected a full one")
    length = max(case.shape[1] for case in train)
    steps = np.concatenate(train, axis=1)  # (C, all real steps)
    mean, sd = steps.mean(axis=1), steps.std(axis=1)
    sd[sd == 0] = 1.0  # a constant channel becomes 0, not NaN
    return SeriesData(
        name=name,
        train=_split(train, train_y, length, mean, sd),
        test=_split(test, test_y, length, mean, sd),
        channels=len(mean),
        classes=len(labels),
        length=length,
        labels=labels,
        clipped=sum(case.shape[1] > length for case in test),
    )


def _label_order(label: str) -> tuple[bool, float, str]:
    """Return a key that sorts numbers by value (2 before 10), before words."""
    try:
        return False, float(label), label
    except ValueError:
        return True, 0.0, label


def _split(
    cases: list[np.ndarray], y: torch.Tensor, length: int, mean: np.ndarray, sd: np.ndarray
) -> SeriesSplit:
    x = torch.zeros(len(cases), length, len(mean))  # (n, T, C)
    padding = torch.ones(len(cases), length, dtype=torch.bool)
    for i, case in enumerate(cases):
        real = ((case[:, :length].T - mean) / sd).astype(np.float32)  # (steps of this case, C)
        x[i, : len(real)] = torch.from_numpy(real)
        padding[i, : len(real)] = False
    return SeriesSplit(x, padding, y)


Cases = tuple[list[np.ndarray], list[str]]


def _archive(name: str) -> list[str]:
    """Return the names of the archive's sets; raise ValueError unless one is `name`."""
    from aeon.datasets.tsc_datasets import tsc_zenodo  # here: importing aeon costs a second

    if name not in tsc_zenodo:
        near = difflib.get_close_matches(name, tsc_zenodo, n=3) or ["JapaneseVowels"]
        raise ValueError(
            f"name is {name!r}; expected a classification set of the UEA/UCR archives, for example "
            f"{' or '.join(near)}"
        )
    return list(tsc_zenodo)


def _read(name: str, names: list[str]) -> tuple[Cases, Cases]:
    """Return the cases, each (C, length), and the answers of both splits."""
    import aeon.datasets

    shipped = Path(aeon.datasets.__file__).parent / "data"
    downloads = cache_dir("series")
    for folder in (shipped, downloads):  # named, as aeon would create one in the user's home
        if name in _sets(folder, [name]):
            return _load_both(name, folder)
    return _download(name, downloads, _sets(shipped, names))


def _sets(folder: Path, names: list[str]) -> list[str]:
    """Return which of the names have both files in a folder, sorted."""
    files = {name: [folder / name / f"{name}_{part}.ts" for part in PARTS] for name in names}
    return sorted(name for name in names if all(file.is_file() for file in files[name]))


def _load_both(name: str, folder: Path) -> tuple[Cases, Cases]:
    import aeon.datasets

    def cases(split: str) -> Cases:
        # Without load_equal_length=False some versions of aeon return a truncated variant.
        options = dict(load_equal_length=False, load_no_missing=True)
        x, y = aeon.datasets.load_classification(
            name, split=split, extract_path=str(folder), **options
        )
        return [np.asarray(case) for case in x], [str(answer) for answer in y]

    return cases("train"), cases("test")


def _download(name: str, downloads: Path, others: list[str]) -> tuple[Cases, Cases]:
    make_folder(downloads, "set DERIVED_ATTENTION_SERIES")
    # The folder gets its name when it is complete, so that half a download is never read.
    with tempfile.TemporaryDirectory(dir=downloads, prefix=".partial-") as partial:
        try:
            both = _load_both(name, Path(partial))
        except Exception as error:
            raise ConnectionError(
                f"{name} is not shipped with aeon and could not be downloaded. Connect to a "
                f"network, or put {name}_TRAIN.ts and {name}_TEST.ts in {downloads / name}. "
                f"Without a network, use one of: {', '.join(others)}."
            ) from error
        if (Path(partial) / name).is_dir():
            shutil.rmtree(downloads / name, ignore_errors=True)
            os.replace(Path(partial) / name, downloads / name)
    return both
