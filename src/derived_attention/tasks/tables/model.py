"""Model tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from derived_attention.attention.frame.checks import (
    check_floating,
)
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
from derived_attention.tasks.series.data import check_series


class TableTransformer(Encoder):
    """The FT-Transformer of [Gorishniy2021]: a row of a table is a sequence of its columns.

    Each column has its own embedding: of a number x_j it is ``x_j w_j + b_j``, of a category a
    vector for each code, plus b_j. A class token comes first; pre-norm layers; LayerNorm, ReLU and
    a linear map of that token. (The original has no LayerNorm at the very beginning, and gated
    units in the feed-forward part.)

    Parameters
    ----------
    numbers : int
        How many columns are numbers; they come first.
    categories : sequence of int
        The number of codes of each other column: see `TableData`.
    classes : int
        0 for a number as the answer.
    config : Config
    target : (float, float), optional
        Mean and standard deviation of training answers that are numbers: what the model says is
        ``mean + sd · z``, in float32 at least, as in `SeriesRegressor`.

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, a wrong shape or type, a code that is none, a type
        too short for the codes, as bfloat16 is above 256, or any `padding`: a table has none.

    Examples
    --------
    >>> model = TableTransformer(numbers=6, categories=(3, 42), classes=2, config=Config())
    >>> model(torch.zeros(5, 8, 1)).shape
    torch.Size([5, 2])
    """

    channels = 1

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

        def drawn(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, config.dim).uniform_(-1, 1) * config.dim**-0.5)

        self.class_token, self.scales, self.biases = drawn(1), drawn(numbers), drawn(self.length)
        self.codes = drawn(sum(self.categories))  # the tables of all categories, one under another
        first = torch.tensor([0, *self.categories]).cumsum(0)[:-1]
        self.first: Tensor
        self.register_buffer("first", first, persistent=False)
        self.layers = stack(PreNormLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, classes or 1)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return logits (B, classes), or numbers (B,), of rows `x` (B, T, 1)."""
        h = self._embed(x, padding)
        for layer in self.layers:
            h = layer(h, None)  # (B, 1 + T, dim)
        z = self.head(self.norm(h[:, 0]).relu())
        mean, sd = self.target
        return z if self.classes else mean + sd * at_least_float32(z.squeeze(1))

    def extra_repr(self) -> str:
        """Show what the layers do not; a checkpoint tells two models apart by this text."""
        return f"{super().extra_repr()}, categories={self.categories}, target={self.target}"

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_series(x, None, steps=self.length, channels=1)
        if padding is not None:
            raise ValueError("padding is given; expected None, as a table has no padding")
        check_floating({WEIGHTS: self.scales, "x": x})
        if max(self.categories, default=0) - 1 > 2 / torch.finfo(x.dtype).eps:
            what = f"x is {x.dtype}, and a column has {max(self.categories)} codes"
            raise ValueError(f"{what}; expected float32, by autocast where half is wanted")
        numbers, given = x[:, : self.numbers], x[:, self.numbers :, 0]
        codes, most = given.long(), torch.tensor(self.categories, device=x.device)
        if ((codes < 0) | (codes >= most) | (codes != given)).any():
            raise ValueError(f"x holds a code that is none; expected codes below {self.categories}")
        found = nn.functional.embedding(codes + self.first, self.codes)  # (B, categories, dim)
        h = torch.cat([numbers * self.scales, found], 1) + self.biases  # (B, T, dim)
        return self.dropout(with_first(self.class_token[0], h))
