"""A transformer that reads rows of a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from derived_attention.attention.frame.checks import check_floating
from derived_attention.tasks.checks import check_no_padding, check_series
from derived_attention.tasks.model import (
    WEIGHTS,
    Config,
    Encoder,
    PreNormLayer,
    at_least_float32,
    check_sizes,
    check_target,
    stack,
    with_first,
)


class TableTransformer(Encoder):
    """The FT-Transformer of [Gorishniy2021]: a row of a table is a sequence of its columns.

    Each column has its own embedding: ``x_j w_j + b_j`` for a number x_j; for a category, a vector
    of each code, plus b_j. A class token comes first; pre-norm layers, LayerNorm, ReLU and a linear
    map of this token follow. (The original has no LayerNorm at the beginning, and gated units in
    the feed-forward part.)

    Parameters
    ----------
    numbers : int
        How many columns are numbers; they come first.
    categories : sequence of int
        The number of codes of each other column: see `TableData`.
    classes : int
        0 where the answer is a number.
    config : Config
    target : (float, float), optional
        Mean and standard deviation of training answers that are numbers: the result is
        ``mean + sd · z``, in float32 at least, as in `SeriesRegressor`.

    Examples
    --------
    >>> model = TableTransformer(numbers=6, categories=(3, 42), classes=2, config=Config())
    >>> model(torch.zeros(5, 8, 1)).shape
    torch.Size([5, 2])
    """

    channels = 1
    shown = ("length", "categories", "target")

    def __init__(
        self,
        numbers: int,
        categories: Sequence[int],
        classes: int,
        config: Config,
        target: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        super().__init__()
        sizes = {f"categories[{i}]": size for i, size in enumerate(categories)}
        check_sizes(config, length=numbers + len(sizes), **sizes)
        if classes != 0:
            check_sizes(config, classes=classes)
        check_target(target)
        self.numbers, self.categories, self.classes = numbers, tuple(categories), classes
        self.length, self.config, self.target = numbers + len(sizes), config, target

        def uniform(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, config.dim).uniform_(-1, 1) * config.dim**-0.5)

        self.class_token, self.scales, self.biases = (
            uniform(1),
            uniform(numbers),
            uniform(self.length),
        )
        self.codes = uniform(sum(self.categories))  # embeddings of all columns, one after another
        first = torch.tensor([0, *self.categories]).cumsum(0)[:-1]
        self.first: Tensor
        self.register_buffer("first", first, persistent=False)
        self.layers = stack(PreNormLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, classes or 1)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return logits (B, classes), or numbers (B,), of rows `x` (B, T, 1)."""
        h = self._run(self._embed(x, padding))  # (B, 1 + T, dim)
        z = self.head(self.norm(h[:, 0]).relu())
        mean, sd = self.target
        return z if self.classes else mean + sd * at_least_float32(z.squeeze(1))

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_series(x, None, steps=self.length, channels=1)
        check_no_padding(padding, "a table")
        check_floating({WEIGHTS: self.scales, "x": x})
        if max(self.categories, default=0) - 1 > 2 / torch.finfo(x.dtype).eps:
            actual = (
                f"x is {x.dtype}, which cannot hold all {max(self.categories)} codes of a column"
            )
            raise ValueError(f"{actual}; expected float32 (with autocast for half precision)")
        numbers, values = x[:, : self.numbers], x[:, self.numbers :, 0]
        codes, sizes = values.long(), torch.tensor(self.categories, device=x.device)
        if ((codes < 0) | (codes >= sizes) | (codes != values)).any():
            rule = f"whole numbers 0 <= code < {self.categories}, one size for each column"
            raise ValueError(f"x holds a wrong code of a category; expected {rule}")
        categories = nn.functional.embedding(codes + self.first, self.codes)  # (B, categories, dim)
        h = torch.cat([numbers * self.scales, categories], 1) + self.biases  # (B, T, dim)
        return self.dropout(with_first(self.class_token[0], h))
