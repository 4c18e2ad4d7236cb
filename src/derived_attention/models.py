"""The miniature models of the book, in one readable file. Here: a classifier of time series.

The `attention` argument of a model says how its layers mix positions, by one rule: *a function
replaces the scaled dot product, a class replaces the layer.*

- A function ``f(q, k, v, *, attn_mask, is_causal, scale)`` works inside `MultiheadAttention`;
  ``functools.partial`` sets keywords of its own.
- A class (a subclass of ``nn.Module``, or a partial of one) is called as ``attention(dim, heads)``
  for each layer, and has the ``forward`` of ``nn.MultiheadAttention(batch_first=True)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.attention.softmax import MultiheadAttention, softmax_attention
from derived_attention.data.series import check_series
from derived_attention.runtime import check_count

Mechanism = Callable[..., Any]


def make_attention(attention: Mechanism, dim: int, heads: int) -> nn.Module:
    """Build one attention layer by the rule at the top of this module; else raise TypeError."""
    target = attention.func if isinstance(attention, functools.partial) else attention
    if isinstance(target, type) and issubclass(target, nn.Module):
        return attention(dim, heads)
    if isinstance(target, nn.Module) or not callable(target):  # a module would be shared by layers
        raise TypeError(f"attention is {attention!r}; expected a function, or a class of modules")
    return MultiheadAttention(dim, heads, attention=attention)


class EncoderLayer(nn.Module):
    """One transformer layer, normalised after each residual by BatchNorm (post-norm).

    BatchNorm takes its statistics over batch *and* time, padded steps included, as the reference
    code of the papers does. Attention weights are not dropped out: the fused path needs them whole.
    """

    def __init__(
        self, dim: int, heads: int, hidden: int, dropout: float, attention: Mechanism
    ) -> None:
        super().__init__()
        self.attention = make_attention(attention, dim, heads)
        self.feedforward = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim)
        )
        self.norm1, self.norm2 = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Map (B, T, dim) to (B, T, dim)."""
        mixed, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        x = x + self.dropout(mixed)  # (B, T, dim)
        x = self.norm1(x.flatten(0, 1)).view_as(x)
        x = x + self.dropout(self.feedforward(x))
        return self.norm2(x.flatten(0, 1)).view_as(x)


class SeriesClassifier(nn.Module):
    """A transformer encoder that names the class of a multivariate time series.

    Linear projection (times √dim), learned positions, encoder layers, GELU, then one linear map of
    all steps at once, with zeros where a step is padding.

    Parameters
    ----------
    channels, classes, length : int
        C, the number of classes, and T: see `derived_attention.data.series.SeriesData`.
    dim, heads, layers, hidden : int
        Width, heads per layer, layers, and width of the feed-forward part.
    dropout : float
    attention : callable
        A function or a class: see the rule at the top of this module.

    Raises
    ------
    TypeError, ValueError
        For a wrong size, `dropout` or `attention`; in the forward pass, a wrong shape or type.

    Examples
    --------
    >>> model = SeriesClassifier(channels=12, classes=9, length=26)
    >>> model(torch.zeros(4, 26, 12)).shape
    torch.Size([4, 9])
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        length: int,
        dim: int = 128,
        heads: int = 8,
        layers: int = 2,
        hidden: int = 256,
        dropout: float = 0.1,
        attention: Mechanism = softmax_attention,
    ) -> None:
        super().__init__()
        for name in ("channels", "classes", "length", "dim", "heads", "layers", "hidden"):
            check_count(name, locals()[name])
        self.channels, self.classes, self.length = channels, classes, length
        self.mechanism = attention
        self.embed = nn.Linear(channels, dim)
        self.positions = nn.Parameter(torch.empty(length, dim).uniform_(-0.02, 0.02))
        self.layers = nn.ModuleList(
            EncoderLayer(dim, heads, hidden, dropout, attention) for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(length * dim, classes)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return logits (B, classes) of `x` (B, T, C); `padding` (B, T) is True where padded."""
        h = self._embed(x, padding)
        for layer in self.layers:
            h = layer(h, padding)  # (B, T, dim)
        h = self.dropout(nn.functional.gelu(h))
        if padding is not None:
            h = h.masked_fill(padding[..., None], 0.0)
        return self.head(h.flatten(1))  # (B, T * dim) -> (B, classes)

    @torch.no_grad()
    def attention_maps(self, x: Tensor, padding: Tensor | None = None) -> list[Tensor]:
        """Return each layer's weights (B, H, T, T); rows of padded queries mean nothing."""
        training, maps = self.training, []
        try:
            h = self.eval()._embed(x, padding)
            for layer in self.layers:
                how = dict(key_padding_mask=padding, average_attn_weights=False)
                maps.append(layer.get_submodule("attention")(h, h, h, **how)[1])
                h = layer(h, padding)
        finally:
            self.train(training)
        return maps

    def extra_repr(self) -> str:
        """Show what the layers do not; a checkpoint tells two models apart by this text."""
        return f"mechanism={self.mechanism}, length={self.length}"

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_series(x, padding, steps=self.length, channels=self.channels)
        h = self.embed(x) * math.sqrt(self.positions.shape[1])  # (B, T, dim)
        return self.dropout(h + self.positions)
