"""A transformer encoder that names the class of a time series."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from derived_attention.common.checks import check_floating
from derived_book.tasks.checks import check_series
from derived_book.tasks.model import (
    WEIGHTS,
    Config,
    Encoder,
    EncoderLayer,
    check_sizes,
    stack,
)


class SeriesClassifier(Encoder):
    """A transformer encoder that names the class of a multivariate time series.

    Linear projection (times √dim), learned positions, encoder layers, GELU, then one linear map of
    all steps at once, with zeros at padded steps.

    Parameters
    ----------
    channels, classes, length : int
        C, the number of classes, and T: see `derived_book.tasks.series.data.SeriesData`.
    config : Config

    Examples
    --------
    >>> model = SeriesClassifier(channels=12, classes=9, length=26, config=Config())
    >>> model(torch.zeros(4, 26, 12)).shape
    torch.Size([4, 9])
    """

    def __init__(self, channels: int, classes: int, length: int, config: Config) -> None:
        super().__init__()
        check_sizes(config, channels=channels, classes=classes, length=length)
        self.channels, self.classes, self.length, self.config = channels, classes, length, config
        self.embed = nn.Linear(channels, config.dim)
        self.positions = nn.Parameter(torch.empty(length, config.dim).uniform_(-0.02, 0.02))
        self.layers = stack(EncoderLayer, config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(length * config.dim, classes)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return logits (B, classes) of `x` (B, T, C); `padding` (B, T) is True where padded."""
        h = self._run(self._embed(x, padding), padding)
        h = self.dropout(nn.functional.gelu(h))
        if padding is not None:
            h = h.masked_fill(padding[..., None], 0.0)
        return self.head(h.flatten(1))  # (B, T * dim) -> (B, classes)

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_series(x, padding, steps=self.length, channels=self.channels)
        check_floating({WEIGHTS: self.positions, "x": x})
        h = self.embed(x) * math.sqrt(self.positions.shape[1])  # (B, T, dim)
        return self.dropout(h + self.positions)
