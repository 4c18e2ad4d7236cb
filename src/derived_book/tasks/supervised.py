"""Sequences (series, images) with a class each: batches and their loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from derived_book.tasks.checks import (
    check_output,
    check_range,
    check_series,
    check_tensor,
    check_type,
)
from derived_book.tasks.series.data import SeriesSplit
from derived_book.training.fit import Batches, Mean, mean_of

Batch = tuple[Tensor, Tensor | None, Tensor]  # x, padding, y of some sequences


@dataclasses.dataclass(frozen=True)
class Examples(Batches):
    """Batches ``(x, padding, y)``, rows of a split; in training, in random order.

    `fit` and `evaluate` compare the split with the attributes ``length``, ``channels``
    and ``classes`` of the model, where it has them.

    Parameters
    ----------
    split : SeriesSplit
        Series or images, with classes as `y`.
    batch_size : int
    """

    split: SeriesSplit
    batch_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_split(self.split)

    def __len__(self) -> int:
        return math.ceil(len(self.split) / self.batch_size)

    def epoch(self, seed: int, number: int) -> Iterator[Batch]:
        """Yield every sequence once, in random order."""
        return self._rows(torch.randperm(len(self.split)))  # on the CPU: the same on every machine

    def __iter__(self) -> Iterator[Batch]:
        return self._rows(torch.arange(len(self.split)))

    def _rows(self, order: Tensor) -> Iterator[Batch]:
        x, padding, y = self.split.x, self.split.padding, self.split.y
        for rows in order.split(self.batch_size):
            yield x[rows], None if padding is None else padding[rows], y[rows]

    def check(self, name: str, model: Any) -> None:
        """Raise ValueError unless sizes and answers fit `model`."""
        x, padding, y = self.split.x, self.split.padding, self.split.y
        sizes = ("length", "channels", "classes")
        steps, channels, classes = (getattr(model, size, None) for size in sizes)
        check_series(x, padding, of=f"{name}.", steps=steps, channels=channels)
        check_range(f"{name}.y", y, classes, "classes")


def class_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Mean]]:
    """Return the cross-entropy of classes; report it as ``"loss"``, with the ``"accuracy"``.

    ``model(x, padding)`` returns logits (B, classes); another shape raises ValueError.
    """
    x, padding, y = batch
    logits = model(x, padding)
    check_output(logits, (len(y), "classes"))
    return cross_entropy(logits, y)


def cross_entropy(logits: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Mean]]:
    """Return the mean cross-entropy of logits (n, classes); report ``"loss"``, ``"accuracy"``."""
    loss = nn.functional.cross_entropy(logits, y)
    n, correct = len(y), (logits.argmax(1) == y).sum()
    return loss, {"loss": mean_of(loss, n), "accuracy": Mean(correct, n)}


def check_split(split: SeriesSplit) -> None:
    """Raise TypeError or ValueError unless `split` is valid training data."""
    check_type("split", split, SeriesSplit, "a SeriesSplit")
    x, padding, y = split.x, split.padding, split.y
    check_series(x, padding, of="split.")
    if len(x) == 0:
        raise ValueError("split is empty; expected at least one sequence")
    check_tensor("split.y", y, "int64", (len(x),))
    if not torch.isfinite(x).all():
        raise ValueError("split.x holds NaN or infinity; expected finite numbers")
    check_range("split.y", y, None, "classes")
