"""Time series to classify: the UEA archive, read through aeon.

JapaneseVowels and BasicMotions are part of aeon's own package, so they need no download. Any other
set of the archive is downloaded by aeon on first use and kept in ``cache_dir("series")``.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from derived_attention.runtime import cache_dir


@dataclasses.dataclass(frozen=True)
class SeriesSplit:
    """n series of C channels, padded to T steps.

    Attributes
    ----------
    x : torch.Tensor
        (n, T, C) float32, standardised by the training split; 0 where padded.
    padding : torch.Tensor
        (n, T) bool, True where a step is padding.
    y : torch.Tensor
        (n,) int64, the class of each series.
    """

    x: torch.Tensor
    padding: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclasses.dataclass(frozen=True)
class SeriesData:
    """One data set of the archive, with its official split.

    Attributes
    ----------
    name : str
    train, test : SeriesSplit
    channels, classes, length : int
        C, the number of classes, and T, the length of the longest training series.
    labels : tuple of str
        The archive's name of each class, sorted: class c of `y` is ``labels[c]``.
    clipped : int
        How many test series were longer than T and lost their last steps.
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
    """Load a classification set of the UEA archive, standardised and padded.

    Every channel is shifted and scaled by the mean and the standard deviation of the real steps
    of the *training* split. T is the longest training series; a longer test series is clipped to
    T, as in the reference code of the papers (in JapaneseVowels that is one series of 370).

    Parameters
    ----------
    name : str
        The archive's name, such as ``"JapaneseVowels"``.

    Returns
    -------
    SeriesData

    Raises
    ------
    TypeError
        If `name` is not a string.
    ValueError
        If the archive has no classification set of that name, or the set has missing values.
    ConnectionError
        If the set is not shipped with aeon and cannot be downloaded.

    Examples
    --------
    >>> data = load_series("JapaneseVowels")
    >>> data.train.x.shape, data.classes, data.clipped
    (torch.Size([270, 26, 12]), 9, 1)
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; expected the name of a data set as a string")
    (train, train_labels), (test, test_labels) = _read(name)
    for case in train + test:
        if not np.isfinite(case).all():
            raise ValueError(f"name is {name!r}; this set has missing values, which no model takes")
    length = max(case.shape[1] for case in train)
    steps = np.concatenate(train, axis=1)  # (C, all real steps)
    mean, sd = steps.mean(axis=1), steps.std(axis=1)
    sd[sd == 0] = 1.0  # a constant channel becomes 0, not NaN
    labels = tuple(sorted({*train_labels, *test_labels}, key=_label_order))
    return SeriesData(
        name=name,
        train=_split(train, train_labels, labels, length, mean, sd),
        test=_split(test, test_labels, labels, length, mean, sd),
        channels=len(mean),
        classes=len(labels),
        length=length,
        labels=labels,
        clipped=sum(case.shape[1] > length for case in test),
    )


def check_series(
    x: torch.Tensor,
    padding: torch.Tensor | None,
    *,
    of: str = "",
    steps: int | None = None,
    channels: int | None = None,
) -> None:
    """Raise TypeError or ValueError unless x is floats (n, T, C) and padding None or bool (n, T).

    `steps` and `channels` are what T and C have to be; `of` goes before the names in a message.
    """
    for name, tensor in (("x", x), ("padding", padding)):
        if not isinstance(tensor, torch.Tensor | None):
            raise TypeError(f"{of}{name} is {type(tensor).__name__}; expected a tensor")
    sizes = zip(x.shape[1:], (steps, channels), strict=False)
    if x.ndim != 3 or not x.is_floating_point() or any(n not in (m, None) for m, n in sizes):
        expected = f"(n, {steps or 'T'}, {channels or 'C'})"
        found = f"{x.dtype} of shape {tuple(x.shape)}"
        raise ValueError(f"{of}x is {found}; expected floats of shape {expected}")
    if padding is not None and (padding.dtype != torch.bool or padding.shape != x.shape[:2]):
        found = f"{padding.dtype} of shape {tuple(padding.shape)}"
        raise ValueError(f"{of}padding is {found}; expected bool of shape {tuple(x.shape[:2])}")


def _label_order(label: str) -> tuple[bool, float, str]:
    """Sort numbers as numbers, before words: 2 comes before 10."""
    try:
        return False, float(label), label
    except ValueError:
        return True, 0.0, label


def _split(
    cases: list[np.ndarray],
    case_labels: list[str],
    labels: tuple[str, ...],
    length: int,
    mean: np.ndarray,
    sd: np.ndarray,
) -> SeriesSplit:
    x = torch.zeros(len(cases), length, len(mean))  # (n, T, C)
    padding = torch.ones(len(cases), length, dtype=torch.bool)
    for i, case in enumerate(cases):
        real = ((case[:, :length].T - mean) / sd).astype(np.float32)  # (steps of this case, C)
        x[i, : len(real)] = torch.from_numpy(real)
        padding[i, : len(real)] = False
    y = torch.tensor([labels.index(label) for label in case_labels])
    return SeriesSplit(x, padding, y)


Cases = tuple[list[np.ndarray], list[str]]


def _read(name: str) -> tuple[Cases, Cases]:
    """Return the cases, each (C, its own length), and the labels of both splits."""
    import aeon.datasets  # here, not above: importing aeon costs a second
    from aeon.datasets.tsc_datasets import tsc_zenodo

    load = aeon.datasets.load_classification
    shipped = Path(aeon.datasets.__file__).parent / "data"
    downloads = cache_dir("series")
    if name not in tsc_zenodo:
        near = difflib.get_close_matches(name, tsc_zenodo, n=3) or ["JapaneseVowels"]
        raise ValueError(
            f"name is {name!r}; expected a classification set of the UEA/UCR archive, "
            f"for example {' or '.join(near)}"
        )
    # The folder is always named: left to itself, aeon creates one in the reader's home.
    for folder in (shipped, downloads):
        if name in _sets(folder):
            return _load_both(load, name, folder)
    return _download(load, name, shipped, downloads)


def _sets(folder: Path) -> list[str]:
    return [path.parent.name for path in folder.glob("*/*_TEST.ts") if _is_set(path)]


def _is_set(path: Path) -> bool:
    name = path.parent.name
    return path.name == f"{name}_TEST.ts" and (path.parent / f"{name}_TRAIN.ts").is_file()


def _load_both(load: Callable[..., Any], name: str, folder: Path) -> tuple[Cases, Cases]:
    def cases(split: str) -> Cases:
        # Without load_equal_length=False some versions of aeon return a truncated variant.
        x, y = load(
            name,
            split=split,
            extract_path=str(folder),
            load_equal_length=False,
            load_no_missing=True,
        )
        return [np.asarray(case) for case in x], [str(label) for label in y]

    return cases("train"), cases("test")


def _download(
    load: Callable[..., Any], name: str, shipped: Path, downloads: Path
) -> tuple[Cases, Cases]:
    downloads.mkdir(parents=True, exist_ok=True)
    # Half a download must never pass for a set, so it gets its name only when it is whole.
    with tempfile.TemporaryDirectory(dir=downloads, prefix=".partial-") as partial:
        try:
            both = _load_both(load, name, Path(partial))
        except Exception as error:
            raise ConnectionError(
                f"{name} is not shipped with aeon and could not be downloaded. Without a network "
                f"use one of: {', '.join(_classification_sets(shipped))}. Otherwise connect and "
                f"call again, or put {name}_TRAIN.ts and {name}_TEST.ts in {downloads / name}."
            ) from error
        if (Path(partial) / name).is_dir():
            shutil.rmtree(downloads / name, ignore_errors=True)
            os.replace(Path(partial) / name, downloads / name)
    return both


def _classification_sets(folder: Path) -> list[str]:
    from aeon.datasets.tsc_datasets import tsc_zenodo

    return sorted(set(_sets(folder)) & set(tsc_zenodo))
