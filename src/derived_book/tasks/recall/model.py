"""A transformer that answers questions about pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from derived_book.tasks.checks import check_filled, check_range, check_tensor
from derived_book.tasks.model import Config, Model, PreNormLayer, check_sizes, stack


class Recaller(Model):
    """A transformer encoder that answers questions about pairs, as in associative recall.

    A pair is one token, the sum of the embeddings of its key and its value. A question is one
    token, the embedding of its key plus one that all questions share. The sequence is all pairs,
    then all questions, without positions, as their order does not matter. Pre-norm layers,
    LayerNorm, and a linear map of the questions follow.

    Parameters
    ----------
    symbols : int
        Number of different keys, and of different values.
    config : Config

    Examples
    --------
    >>> model = Recaller(symbols=64, config=Config())
    >>> keys, values, asked = torch.zeros(3, 2, 7, dtype=torch.int64)
    >>> model(keys, values, asked).shape
    torch.Size([2, 7, 64])
    """

    shown = ("symbols",)

    def __init__(self, symbols: int, config: Config) -> None:
        super().__init__()
        check_sizes(config, symbols=symbols)
        self.symbols, self.config = symbols, config
        self.keys = nn.Embedding(symbols, config.dim)
        self.values = nn.Embedding(symbols, config.dim)
        self.question = nn.Parameter(torch.empty(config.dim).normal_())
        self.layers = stack(PreNormLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, symbols)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return logits (B, Q, symbols) of the values of `asked` (B, Q), given pairs (B, N)."""
        self._check(keys=keys, values=values, asked=asked)
        pairs = self.keys(keys) + self.values(values)  # (B, N, dim)
        questions = self.keys(asked) + self.question  # (B, Q, dim)
        h = self.dropout(torch.cat([pairs, questions], 1))
        for layer in self.layers:
            h = layer(h, None)
        return self.head(self.norm(h[:, keys.shape[1] :]))

    def _check(self, **inputs: Tensor) -> None:
        for name, x in inputs.items():
            check_tensor(name, x, "int64", ("B", "N"))
            check_filled(name, x)
            check_range(name, x, self.symbols, "symbols")
        shapes = {name: tuple(x.shape) for name, x in inputs.items()}
        if shapes["keys"] != shapes["values"] or shapes["keys"][0] != shapes["asked"][0]:
            raise ValueError(f"shapes are {shapes}; expected a value for each key, and equal B")
