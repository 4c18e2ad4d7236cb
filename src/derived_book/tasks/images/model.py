"""A vision transformer that names the class of an image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from derived_attention.common.checks import check_floating
from derived_book.tasks.checks import check_no_padding, check_series
from derived_book.tasks.model import (
    WEIGHTS,
    Config,
    Encoder,
    PreNormLayer,
    check_sizes,
    stack,
)


class VisionTransformer(Encoder):
    """A vision transformer: names the class of an image that is a grid of patches.

    Linear patch embedding, learned positions, pre-norm layers, the mean over all patches. There is
    no class token: the sequence stays a grid, so that a mechanism may convolve it or pool it in two
    dimensions, and every row of an attention map is a position in the image.

    Parameters
    ----------
    grid : (int, int)
        Rows and columns of patches. The sequence is the grid row by row: T = rows · columns.
    channels, classes : int
        Numbers in a patch, and classes: see `derived_book.tasks.images.data.ImageData`.
    config : Config

    Examples
    --------
    >>> model = VisionTransformer(grid=(4, 4), channels=4, classes=10, config=Config())
    >>> model(torch.zeros(3, 16, 4)).shape
    torch.Size([3, 10])
    """

    shown = ("length", "grid")

    def __init__(self, grid: Sequence[int], channels: int, classes: int, config: Config) -> None:
        if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
            raise TypeError(f"grid is {grid!r}; expected (rows, columns)")
        sides = {f"grid[{i}]": n for i, n in enumerate(grid)}
        check_sizes(config, channels=channels, classes=classes, **sides)
        super().__init__()
        self.grid, self.length = tuple(grid), grid[0] * grid[1]
        self.channels, self.classes, self.config = channels, classes, config
        self.positions = nn.Parameter(torch.empty(self.length, config.dim).normal_(std=0.5))
        self.layers = stack(PreNormLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, classes)
        self.embed = nn.Linear(channels, config.dim)

    def forward(self, x: Tensor, padding: None = None) -> Tensor:
        """Map patches (B, T, channels) to logits (B, classes); an image has no padding."""
        return self.head(self.norm(self._run(self._embed(x, padding))).mean(1))

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_series(x, None, steps=self.length, channels=self.channels)
        check_no_padding(padding, "an image")
        check_floating({WEIGHTS: self.positions, "x": x})
        return self.dropout(self.embed(x) + self.positions)  # (B, T, dim)
