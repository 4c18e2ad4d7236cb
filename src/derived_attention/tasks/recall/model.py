"""Model recall."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from derived_attention.tasks.model import Config, PreNormLayer, check_sizes, stack


class Recaller(nn.Module):
    """A transformer encoder that answers questions about pairs, as in associative recall.

    A pair is one token, the sum of its key's and its value's embedding; a question is one token,
    its key's embedding plus one that all questions share. First all pairs, then all questions;
    no positions, as their order says nothing; pre-norm layers, LayerNorm, and a linear map of the
    questions.

    Parameters
    ----------
    symbols : int
        Number of different keys, and of different values.
    config : Config

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, for a wrong shape or type, or a symbol that is none.

    Examples
    --------
    >>> model = Recaller(symbols=64, config=Config())
    >>> keys, values, asked = torch.zeros(3, 2, 7, dtype=torch.int64)
    >>> model(keys, values, asked).shape
    torch.Size([2, 7, 64])
    """

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
        check_recall(self.symbols, keys=keys, values=values, asked=asked)
        pairs = self.keys(keys) + self.values(values)  # (B, N, dim)
        questions = self.keys(asked) + self.question  # (B, Q, dim)
        h = self.dropout(torch.cat([pairs, questions], 1))
        for layer in self.layers:
            h = layer(h, None)
        return self.head(self.norm(h[:, keys.shape[1] :]))

    def extra_repr(self) -> str:
        """Show what the layers do not; a checkpoint tells two models apart by this text."""
        return f"{self.config}, symbols={self.symbols}"


def check_recall(symbols: int, **given: Tensor) -> None:
    """Raise TypeError or ValueError, naming it, unless all are (B, N) int64, symbols there are."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; expected a tensor")
        if x.ndim != 2 or x.dtype != torch.int64 or x.numel() == 0:
            found = f"{x.dtype} of shape {tuple(x.shape)}"
            raise ValueError(f"{name} is {found}; expected int64 of shape (B, N), not empty")
        if x.min() < 0 or x.max() >= symbols:
            found = f"{int(x.min())} to {int(x.max())}"
            raise ValueError(f"{name} holds {found}; expected symbols 0 <= x < {symbols}")
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    if shapes["keys"] != shapes["values"] or shapes["keys"][0] != shapes["asked"][0]:
        raise ValueError(f"shapes are {shapes}; expected a value for each key, and equal B")
