"""Language models on bytes: the small one of chapter 1, and the one of the page on language."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from derived_attention.common.checks import Mechanism
from derived_attention.common.masks import Mask
from derived_book.tasks.checks import check_no_padding, check_tokens
from derived_book.tasks.model import CausalLayer, Config, Encoder, check_sizes, sinusoids, stack

VOCABULARY = 256


class Cache(NamedTuple):
    """Keys and values of the steps so far, in tensors with room for more steps."""

    keys: Tensor  #: (B, H, room, D)
    values: Tensor  #: (B, H, room, D)
    used: int  #: steps


class Past(NamedTuple):
    """What a layer of `LanguageModel` keeps of the bytes so far."""

    last: Tensor  #: (B, 3, dim), the last inputs of the taps
    attention: Any  #: a `Cache`, or the state of an attention that has one


class ByteLM(Encoder):
    """A language model on bytes: logits of the next byte from the bytes so far.

    Embedding, positions that start as `sinusoids` and are learned (which makes "one byte back" easy
    to find), causal pre-norm layers, LayerNorm and one linear map at every step. Row t of the
    result depends on ``x[:, : t + 1]`` only. A mechanism that cannot be causal raises its own error
    in the forward pass.

    Parameters
    ----------
    length : int
        T, the most bytes that the model reads at a time.
    config : Config
    taps : int
        With more than 1, a causal convolution of the embeddings by as many taps is added to them:
        each byte is read together with the ``taps - 1`` before it.

    Examples
    --------
    >>> model = ByteLM(length=64, config=Config())
    >>> model(torch.zeros(3, 64, dtype=torch.int64)).shape
    torch.Size([3, 64, 256])
    """

    def __init__(self, length: int, config: Config, taps: int = 1) -> None:
        super().__init__()
        check_sizes(config, length=length, taps=taps)
        self.length, self.config = length, config
        self.embed = nn.Embedding(VOCABULARY, config.dim)
        self.positions = nn.Parameter(sinusoids(length, config.dim))
        self.layers = stack(CausalLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY)
        self.before = nn.Conv1d(config.dim, config.dim, taps) if taps > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, T, 256) of the byte after each of `x` (B, T) int64, T ≤ length."""
        return self.head(self.norm(self._run(self._embed(x, None))))

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_bytes(x, padding, self.length)
        h = self.embed(x)  # (B, T, dim)
        if self.before is not None:
            h = h + self.before(pad(h.mT, (self.before.kernel_size[0] - 1, 0))).mT
        return self.dropout(h + self.positions[: x.shape[1]])


class LanguageModel(Encoder):
    """The language model that the book trains on code: logits of the next byte.

    It has no table of positions, and its layers are causal. `Taps` mix each byte with the three
    before it ahead of every attention.

    Parameters
    ----------
    length : int
        T, the most bytes that the model reads at a time.
    config : Config
    attentions : sequence of callable, optional
        One for each layer, as in `Config`; default, ``config.attention`` in all layers.

    Examples
    --------
    >>> model = LanguageModel(64, Config())
    >>> model(torch.zeros(3, 64, dtype=torch.int64)).shape
    torch.Size([3, 64, 256])
    """

    def __init__(
        self, length: int, config: Config, attentions: Sequence[Mechanism] | None = None
    ) -> None:
        super().__init__()
        check_sizes(config, length=length)
        self.length, self.config = length, config
        attentions = [config.attention] * config.layers if attentions is None else attentions
        if len(attentions) != config.layers:
            raise ValueError(
                f"attentions has {len(attentions)}; expected {config.layers}, one for each layer"
            )
        self.embed = nn.Embedding(VOCABULARY, config.dim)
        self.layers = nn.ModuleList(
            LayerWithTaps(dataclasses.replace(config, attention=x)) for x in attentions
        )
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, T, 256) of the byte after each of `x` (B, T) int64, T ≤ length."""
        return self.head(self.norm(self._run(self._embed(x, None))))

    @torch.no_grad()
    def step(self, x: Tensor, past: Sequence[Past] | None = None) -> tuple[Tensor, list[Past]]:
        """Read n more bytes; return logits (B, n, 256) of the byte after each, and the new past.

        A text that is read in pieces has the same logits as in one, up to rounding, and may be
        longer than `length`. Attention with a state stores its state, any other keys and values.

        Parameters
        ----------
        x : Tensor
            (B, n) int64.
        past : sequence of Past, optional
            One for each layer, from the last call; left out for the first bytes.
        """
        check_tokens(x, None, vocabulary=VOCABULARY)
        h, kept = self.embed(x), []
        for i, layer in enumerate(self.layers):
            h, after = layer.step(h, past[i] if past else None)
            kept.append(after)
        return self.head(self.norm(h)), kept

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_bytes(x, padding, self.length)
        return self.dropout(self.embed(x))


class LayerWithTaps(CausalLayer):
    """A causal layer whose attention reads each step together with the three before it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm1 = nn.Sequential(self.norm1, Taps(config.dim))

    def step(self, x: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        """Map the next steps (B, n, dim), without dropout; return what is kept, too."""
        norm, taps = self.norm1.children()
        y = norm(x)
        last, kept = past or (y.new_zeros(len(y), 3, y.shape[2]), None)
        y = torch.cat([last, y], 1)
        a, kept = attend_next(self.attention, taps(y)[:, 3:], kept)
        x = x + a
        return x + self.feedforward(self.norm2(x)), Past(y[:, -3:], kept)


class Taps(nn.Module):
    """Mix each step with the three before it, feature by feature; at first, mix nothing."""

    def __init__(self, dim: int, taps: int = 4) -> None:
        super().__init__()
        start = torch.zeros(taps, dim)
        start[-1] = 1
        self.weight = nn.Parameter(start)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, dim) to (B, T, dim)."""
        T, before = x.shape[1], len(self.weight) - 1
        x = pad(x, (0, 0, before, 0))
        return sum(w * x[:, i : i + T] for i, w in enumerate(self.weight))


def attend_next(layer: Any, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
    """Attend from the next steps (B, n, dim) to all so far; return what is kept, too.

    `layer` is a `derived_attention.MultiheadAttention`, or a layer that is derived from it.
    """
    if layer.has_state:
        return layer.step(x, past)
    q, *new = (layer.project(part, x, slice(None)) for part in range(3))
    *kept, used = past or (*(y[..., :0, :] for y in new), 0)
    end = used + x.shape[1]
    if end > kept[0].shape[-2]:  # room for as many steps again
        kept = [torch.cat([y, y.new_empty(*y.shape[:-2], end, y.shape[-1])], -2) for y in kept]
    for y, added in zip(kept, new, strict=True):
        y[..., used:end, :] = added  # in place
    k, v = (y[..., :end, :] for y in kept)
    seen = torch.ones(x.shape[1], end, dtype=torch.bool, device=x.device).tril(used)
    mask = Mask(seen if x.shape[1] > 1 else None)
    heads = layer.attend(layer.mechanism(layer.attention, slice(None)), q, k, v, mask)
    return layer.out_proj(heads.transpose(1, 2).flatten(2)), Cache(kept[0], kept[1], end)


def check_bytes(x: Tensor, padding: Tensor | None, length: int) -> None:
    """Raise TypeError or ValueError unless `x` is (B, T) int64 of bytes, with T ≤ length."""
    check_tokens(x, padding, vocabulary=VOCABULARY)
    check_no_padding(padding, "a text")
    if x.shape[1] > length:
        raise ValueError(f"x has {x.shape[1]} bytes in a row; expected at most {length}")
