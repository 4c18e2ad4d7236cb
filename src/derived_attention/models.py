"""The miniature models of the book, in one readable file. Here: a classifier of time series.

The `attention` argument of a model says how its layers mix positions, by one rule: *a function
replaces the scaled dot product, a class replaces the layer.*

- A function ``f(q, k, v, *, attn_mask, is_causal, scale)`` works inside `MultiheadAttention`;
  ``functools.partial`` sets keywords of its own.
- A class (a subclass of ``nn.Module``, or a partial of one) is called as
  ``attention(dim, heads, dropout=dropout)``, once per layer. Its instances have the ``forward`` of
  ``nn.MultiheadAttention(batch_first=True)``. Use one where there is something to learn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from derived_attention.attention.softmax import MultiheadAttention, softmax_attention


def make_attention(
    attention: Callable[..., Any], dim: int, heads: int, dropout: float = 0.0
) -> nn.Module:
    """Build one attention layer by the rule at the top of this module.

    Raises
    ------
    TypeError
        If `attention` cannot be called, or is a layer already made: all layers would share it.
    """
    target = attention.func if isinstance(attention, functools.partial) else attention
    if isinstance(target, type) and issubclass(target, nn.Module):
        return attention(dim, heads, dropout=dropout)
    if isinstance(target, nn.Module) or not callable(target):
        raise TypeError(f"attention is {attention!r}; expected a function or a class, not a layer")
    return MultiheadAttention(dim, heads, dropout=dropout, attention=attention)


class EncoderLayer(nn.Module):
    """One transformer layer, normalised after each residual by BatchNorm (post-norm).

    BatchNorm takes its statistics over batch *and* time, padded steps included, as the reference
    code of the papers does.
    """

    def __init__(
        self, dim: int, heads: int, hidden: int, dropout: float, attention: Callable[..., Any]
    ) -> None:
        super().__init__()
        self.attention = make_attention(attention, dim, heads, dropout)
        self.feedforward = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim)
        )
        self.norm1, self.norm2 = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Map (B, T, dim) to (B, T, dim)."""
        mixed, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        x = x + self.dropout(mixed)  # (B, T, dim)
        x = self.norm1(x.flatten(0, 1)).view_as(x)
        x = x + self.dropout(self.feedforward(x))
        return self.norm2(x.flatten(0, 1)).view_as(x)


class SeriesClassifier(nn.Module):
    """A transformer encoder that names the class of a multivariate time series.

    Linear projection (times √dim), learned positions, encoder layers, GELU, then one linear map of
    all steps at once, where padded steps count as zero.

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
        For a size below 1, a `dropout` outside [0, 1), or a wrong `attention`; in the forward
        pass, for inputs of the wrong shape or type.

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
        attention: Callable[..., Any] = softmax_attention,
    ) -> None:
        super().__init__()
        sizes = dict(channels=channels, classes=classes, length=length, dim=dim, heads=heads)
        for name, size in (sizes | dict(layers=layers, hidden=hidden)).items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}; expected an integer of at least 1")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout!r}; expected 0 <= dropout < 1")
        self.channels, self.classes, self.length = channels, classes, length
        self.mechanism = attention
        self.embed = nn.Linear(channels, dim)
        self.positions = nn.Parameter(torch.empty(length, dim).uniform_(-0.02, 0.02))
        self.layers = nn.ModuleList(
            EncoderLayer(dim, heads, hidden, dropout, attention) for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(length * dim, classes)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits (B, classes) of series `x` (B, T, C).

        `padding` (B, T) is True at padded steps. In evaluation mode the values of `x` there
        change nothing.
        """
        h = self._embed(x, padding)
        for layer in self.layers:
            h = layer(h, padding)  # (B, T, dim)
        h = self.dropout(nn.functional.gelu(h))
        if padding is not None:
            h = h.masked_fill(padding[..., None], 0.0)
        return self.head(h.flatten(1))  # (B, T * dim) -> (B, classes)

    @torch.no_grad()
    def attention_maps(
        self, x: torch.Tensor, padding: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return, for each layer, the attention weights (B, H, T, T) in evaluation mode.

        Row i of a map holds the weights of query i. The rows of padded queries are there too, and
        mean nothing.
        """
        training, maps = self.training, []
        self.eval()
        h = self._embed(x, padding)
        for layer in self.layers:
            how = dict(key_padding_mask=padding, need_weights=True, average_attn_weights=False)
            maps.append(layer.attention(h, h, h, **how)[1])
            h = layer(h, padding)
        self.train(training)
        return maps

    def extra_repr(self) -> str:
        """Name the attention, so that two models with equal shapes can be told apart."""
        return f"mechanism={describe(self.mechanism)}, length={self.length}"

    def _embed(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        expected = f"(B, {self.length}, {self.channels})"
        if x.ndim != 3 or x.shape[1:] != (self.length, self.channels):
            raise ValueError(f"x has shape {tuple(x.shape)}; expected {expected}")
        if padding is not None and (padding.dtype != torch.bool or padding.shape != x.shape[:2]):
            found = f"{padding.dtype} of shape {tuple(padding.shape)}"
            raise ValueError(f"padding is {found}; expected bool of shape {tuple(x.shape[:2])}")
        h = self.embed(x) * math.sqrt(self.positions.shape[1])  # (B, T, dim)
        return self.dropout(h + self.positions)


def describe(attention: Callable[..., Any]) -> str:
    """Return the name of an attention function or class, with its own keywords."""
    if isinstance(attention, functools.partial):
        keywords = "".join(f", {k}={v!r}" for k, v in sorted(attention.keywords.items()))
        return f"{describe(attention.func)}{keywords}"
    return getattr(attention, "__qualname__", type(attention).__qualname__)
