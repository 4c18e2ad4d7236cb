"""What the models of the tasks share: their configuration, layers and base classes.

Each task has its model in a module of its own, such as `derived_book.tasks.series.model`;
`derived_book.training.fit.fit` trains them all. A model takes the sizes of its data and, last,
a `Config`: the sizes that all models have, and the attention of their layers, by one rule: *a
function replaces the scaled dot product, a class replaces the layer.*

- A function ``f(q, k, v, *, attn_mask, is_causal, scale)`` works inside `MultiheadAttention`;
  ``functools.partial`` sets further keywords of the function.
- A class (a subclass of ``nn.Module``, or a partial of one) is called as ``attention(dim, heads)``
  for each layer, and has the ``forward`` of ``nn.MultiheadAttention(batch_first=True)``.

Where a decoder attends to the output of an encoder, a layer is told that it is cross-attention: a
class is called with ``cross=True`` as well, if it has this argument. A mechanism that mixes queries
along their length raises an error there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.common.checks import Mechanism, check_count
from derived_attention.common.convention import takes
from derived_attention.layer import MultiheadAttention
from derived_attention.softmax.core import softmax_attention
from derived_book.runtime import evaluating
from derived_book.tasks.checks import check_number

WEIGHTS = "the model's weights"  # in an error, where an input has another type


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and the attention of a model.

    Parameters
    ----------
    dim, heads, layers, hidden : int
        Width, heads per layer, layers, and width of the feed-forward part.
    dropout : float
        0 <= dropout < 1.
    attention : callable
        A function or a class: see the rule at the top of this module.

    Examples
    --------
    >>> Config(dim=32, heads=2).hidden
    128
    """

    dim: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int = 128
    dropout: float = 0.1
    attention: Mechanism = softmax_attention

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "layers", "hidden"):
            check_count(name, getattr(self, name), 1)
        check_number("dropout", self.dropout, least=0, below=1)
        is_layer(self.attention)


def is_layer(attention: Mechanism, name: str = "attention") -> bool:
    """Return True for a class and False for a function; raise TypeError if it is neither."""
    target = attention.func if isinstance(attention, functools.partial) else attention
    if isinstance(target, nn.Module) or not callable(target):  # layers would share a module
        raise TypeError(f"{name} is {attention!r}; expected a function, or a class of modules")
    return isinstance(target, type) and issubclass(target, nn.Module)


def make_attention(attention: Mechanism, dim: int, heads: int, *, cross: bool = False) -> nn.Module:
    """Build an attention layer by the rule at the top of this module."""
    if is_layer(attention):
        options = {"cross": True} if cross and takes(attention, "cross") else {}
        return attention(dim, heads, **options)
    return MultiheadAttention(dim, heads, attention=attention, cross=cross)


class EncoderLayer(nn.Module):
    """A transformer layer normalised after each residual connection by BatchNorm (post-norm).

    BatchNorm takes its statistics over batch *and* time, padded steps included, as the reference
    code of the papers does. There is no dropout of attention weights: the fused path has none.
    """

    masks: dict[str, bool] = {}  # keywords of every call of the attention

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim, hidden, dropout = config.dim, config.hidden, config.dropout
        self.attention = make_attention(config.attention, dim, config.heads)
        self.feedforward = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim)
        )
        self.norm1: nn.Module = nn.BatchNorm1d(dim)
        self.norm2: nn.Module = nn.BatchNorm1d(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Map (B, T, dim) to (B, T, dim)."""
        x = x + self.dropout(self._attend(x, padding))  # (B, T, dim)
        x = self.norm1(x.flatten(0, 1)).view_as(x)
        x = x + self.dropout(self.feedforward(x))
        return self.norm2(x.flatten(0, 1)).view_as(x)

    def maps(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return the attention weights (B, H, T, T) of the forward pass."""
        options = dict(key_padding_mask=padding, average_attn_weights=False)
        return self.attention(x, x, x, **options, **self.masks)[1]

    def _attend(self, x: Tensor, padding: Tensor | None) -> Tensor:
        options = dict(key_padding_mask=padding, need_weights=False)
        return self.attention(x, x, x, **options, **self.masks)[0]


class PreNormLayer(EncoderLayer):
    """A transformer layer normalised before each branch by LayerNorm (pre-norm)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Map (B, T, dim) to (B, T, dim)."""
        x = x + self.dropout(self._attend(self.norm1(x), padding))
        return x + self.dropout(self.feedforward(self.norm2(x)))

    def maps(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return the attention weights (B, H, T, T) of the forward pass."""
        return super().maps(self.norm1(x), padding)


class CausalLayer(PreNormLayer):
    """A pre-norm layer in which a step attends to itself and to earlier steps only."""

    masks = {"is_causal": True}


def stack(kind: Callable[[Config], nn.Module], config: Config) -> nn.ModuleList:
    """Build the layers of a model."""
    return nn.ModuleList(kind(config) for _ in range(config.layers))


class Model(nn.Module):
    """Base class of all models, whose ``repr`` contains the configuration.

    An invalid size raises TypeError or ValueError when a model is built, and so do inputs of a
    wrong shape, type or range in the forward pass.
    """

    config: Config
    length: int  # the most steps of a sequence
    shown: tuple[str, ...] = ("length",)  # attributes that the text has beside the layers

    def extra_repr(self) -> str:
        """Return the configuration, and the attributes that are `shown`."""
        return ", ".join([str(self.config), *(f"{x}={getattr(self, x)}" for x in self.shown)])


class Encoder(Model):
    """Base class of models whose layers run over one sequence of T steps."""

    layers: Any  # nn.ModuleList of EncoderLayer

    def attention_maps(self, x: Tensor, padding: Tensor | None = None) -> list[Tensor]:
        """Return each layer's weights (B, H, T, T); rows of padded queries mean nothing.

        A mechanism that leaves keys out has fewer columns. For a mechanism that is not linear in V
        the result is its output for V = I, or ValueError is raised.
        """
        with evaluating(self):
            return self._maps(self._embed(x, padding), padding)

    def _run(self, h: Tensor, padding: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            h = layer(h, padding)  # (B, T, dim)
        return h

    def _maps(self, h: Tensor, padding: Tensor | None) -> list[Tensor]:
        maps = []
        for layer in self.layers:
            maps.append(layer.maps(h, padding))
            if maps[-1] is None:
                raise ValueError(f"{type(layer.attention).__name__} has no attention weights")
            h = layer(h, padding)
        return maps

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Check the input and map it to (B, T, dim), positions included."""
        raise NotImplementedError


def sinusoids(length: int, dim: int, temperature: float = 10_000.0) -> Tensor:
    """Return the positions (T, dim) of [Vaswani2017]: ``sin(t ω_i), cos(t ω_i)`` side by side.

    ω_i = temperature^(-2i / dim), so that a step of s turns each pair of columns by the angle
    s ω_i.
    """
    omega = temperature ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.arange(length)[:, None] * omega  # (T, dim / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :dim].contiguous()


def check_sizes(config: Config, **sizes: int) -> None:
    """Raise TypeError or ValueError unless all sizes are at least 1 and `config` is a Config."""
    for name, size in sizes.items():
        check_count(name, size, 1)
    if not isinstance(config, Config):
        raise TypeError(f"config is {config!r}; expected a Config, such as Config(dim=64)")
