"""Transformer encoders that name the class of a time series, or predict a number for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from derived_attention.common.checks import check_floating
from derived_book.tasks.checks import check_series
from derived_book.tasks.model import (
    WEIGHTS,
    Config,
    Encoder,
    EncoderLayer,
    at_least_float32,
    check_sizes,
    check_target,
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


class SeriesRegressor(SeriesClassifier):
    """A `SeriesClassifier` with one output: a number for each series, in the units of the target.

    The last linear map gives z, and the result is ``mean + sd · z``, so that the network itself
    works on standardised targets. Mean, deviation and result are float32 at least, also where the
    network runs in half precision, which cannot resolve a number such as 1995 ± 10.

    Parameters
    ----------
    channels, length : int
        C and T.
    target : (float, float)
        Mean and standard deviation of the training targets.
    config : Config

    Examples
    --------
    >>> model = SeriesRegressor(channels=12, length=26, target=(0.0, 1.0), config=Config())
    >>> model(torch.zeros(4, 26, 12)).shape
    torch.Size([4])
    """

    mean: Tensor
    sd: Tensor

    def __init__(
        self, channels: int, length: int, target: tuple[float, float], config: Config
    ) -> None:
        super().__init__(channels, 1, length, config)
        check_target(target)
        self.classes = 0
        for name, value in zip(("mean", "sd"), target, strict=True):
            self.register_buffer(name, torch.tensor(float(value)))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return numbers (B,) for `x` (B, T, C); `padding` (B, T) is True where padded."""
        return self.mean + self.sd * at_least_float32(super().forward(x, padding).squeeze(1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SeriesRegressor:
        """Move or cast the model, but keep mean and deviation of the target in float32."""
        mean, sd = self.mean, self.sd
        super()._apply(fn, recurse)
        if self.mean.dtype.itemsize < 4:
            self.mean, self.sd = (at_least_float32(x.to(self.mean.device)) for x in (mean, sd))
        return self
