"""Sequences with an answer each: series, images and tokens, and a class or a number for them.

`Examples` and a loss are what `derived_attention.training.fit.fit` takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.runtime import check_count
from derived_attention.tasks.series.data import SeriesSplit, check_series, check_tokens
from derived_attention.training.fit import Batches, Mean, RootMean

Batch = tuple[Tensor, Tensor | None, Tensor]  # x, padding, y of some sequences


@dataclasses.dataclass(frozen=True)
class Examples(Batches):
    """Sequences with their answers, some at a time: in random order to train on.

    A batch is ``(x, padding, y)``, rows of the split.

    Parameters
    ----------
    split : SeriesSplit
        Series, images or tokens, with classes or numbers as `y`.
    batch_size : int

    Raises
    ------
    TypeError, ValueError
        For a split that nothing can be learned from. `fit` and `evaluate` compare it with the
        model's own ``length``, ``channels``, ``vocabulary`` and ``classes``, where it has them;
        ``classes`` is 0 for numbers.

    Examples
    --------
    >>> batches = Examples(data.train, 32)  # doctest: +SKIP
    """

    split: SeriesSplit
    batch_size: int = 256

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_split(self.split)

    def __len__(self) -> int:
        return math.ceil(len(self.split) / self.batch_size)

    def epoch(self, seed: int, number: int) -> Iterator[Batch]:
        """Yield every sequence once, in an order of this epoch's own."""
        return self._rows(torch.randperm(len(self.split)))  # on the CPU: the same everywhere

    def __iter__(self) -> Iterator[Batch]:
        return self._rows(torch.arange(len(self.split)))

    def _rows(self, order: Tensor) -> Iterator[Batch]:
        x, padding, y = self.split.x, self.split.padding, self.split.y
        for rows in order.split(self.batch_size):
            yield x[rows], None if padding is None else padding[rows], y[rows]

    def check(self, name: str, model: Any) -> None:
        """Raise ValueError unless sizes, tokens and answers are those of `model`."""
        x, padding, y = self.split.x, self.split.padding, self.split.y
        sizes = ("length", "vocabulary", "channels", "classes")
        steps, vocabulary, channels, classes = (getattr(model, size, None) for size in sizes)
        if vocabulary or (x.ndim == 2 and not channels):
            check_tokens(x, padding, of=f"{name}.", steps=steps, vocabulary=vocabulary)
        else:
            check_series(x, padding, of=f"{name}.", steps=steps, channels=channels)
        if classes is None:
            return
        if y.is_floating_point() != (classes == 0):
            expected = "int64 classes" if classes else "floats"
            raise ValueError(f"{name}.y is {y.dtype}; expected {expected}, as the model answers")
        if classes and y.max() >= classes:
            found = f"{int(y.min())} to {int(y.max())}"
            raise ValueError(f"{name}.y holds {found}; expected classes 0 <= y < {classes}")


def class_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Mean]]:
    """Return the cross-entropy of classes; report it as ``"loss"``, with the ``"accuracy"``.

    ``model(x, padding)`` returns logits (B, classes).

    Raises
    ------
    ValueError
        For a result of another shape; for answers that are numbers.
    """
    x, padding, y = batch
    logits = model(x, padding)
    if y.is_floating_point():
        raise ValueError(f"y is {y.dtype}; expected int64 classes (number_loss is for numbers)")
    if logits.ndim != 2 or len(logits) != len(y):
        found = f"model returns shape {tuple(logits.shape)} for {len(y)} targets that are classes"
        raise ValueError(f"{found}; expected (B, classes)")
    loss = nn.functional.cross_entropy(logits, y)
    correct = int((logits.argmax(1) == y).sum())
    return loss, {"loss": Mean(loss.item() * len(y), len(y)), "accuracy": Mean(correct, len(y))}


def number_loss(
    model: nn.Module, batch: Batch, variance: float = 1.0
) -> tuple[Tensor, dict[str, Mean]]:
    """Return the mean squared error over `variance`; report ``"loss"``, and ``"rmse"`` in units.

    ``model(x, padding)`` returns numbers (B,) in the units of y. With the variance of the training
    targets (``functools.partial`` sets it) the loss is that of standardised targets.

    Raises
    ------
    ValueError
        For a result of another shape; for answers that are classes; for a `variance` that is not
        positive.
    """
    x, padding, y = batch
    outputs = model(x, padding)
    if not y.is_floating_point():
        raise ValueError(f"y is {y.dtype}; expected floats (class_loss is for classes)")
    if not 0 < variance < math.inf:
        raise ValueError(f"variance is {variance}; expected a positive number")
    if outputs.shape != y.shape:  # PyTorch would compare a column with a row, each with each
        found = f"model returns shape {tuple(outputs.shape)} for {len(y)} targets that are numbers"
        raise ValueError(f"{found}; expected (B,)")
    loss = nn.functional.mse_loss(outputs, y) / variance
    squares = float((outputs.detach().double() - y.double()).square().sum())
    return loss, {"loss": Mean(loss.item() * len(y), len(y)), "rmse": RootMean(squares, len(y))}


def check_split(split: SeriesSplit) -> None:
    """Raise TypeError or ValueError, naming the tensor, unless `split` can be learned from."""
    if not isinstance(split, SeriesSplit):
        raise TypeError(f"split is {type(split).__name__}; expected a SeriesSplit")
    x, padding, y = split.x, split.padding, split.y
    for field, tensor in (("x", x), ("y", y)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"split.{field} is {type(tensor).__name__}; expected a tensor")
    (check_tokens if x.ndim == 2 else check_series)(x, padding, of="split.")
    if len(x) == 0:
        raise ValueError("split is empty; expected at least one sequence")
    if y.shape != (len(x),) or not (y.dtype == torch.int64 or y.is_floating_point()):
        found = f"{y.dtype} of shape {tuple(y.shape)}"
        raise ValueError(f"split.y is {found}; expected int64 or floats of shape {(len(x),)}")
    for field, tensor in (("x", x), ("y", y)):
        if not torch.isfinite(tensor).all():
            raise ValueError(f"split.{field} holds NaN or infinity; expected finite numbers")
    if not y.is_floating_point() and y.min() < 0:
        raise ValueError(f"split.y holds {int(y.min())}; expected classes 0 <= y")
