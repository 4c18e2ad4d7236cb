"""The encoder–decoder transformer that translates."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from derived_attention.tasks.checks import check_filled, check_range, check_tensor
from derived_attention.tasks.model import (
    Config,
    DecoderLayer,
    Model,
    PreNormLayer,
    check_sizes,
    sinusoids,
    stack,
)


class Translator(Model):
    """The encoder–decoder of [Vaswani2017], normalised before each branch: reads, then writes.

    The layers of the encoder mix the tokens of the source. Those of the decoder mix the tokens of
    the target so far, causally, and attend to the output of the encoder: three attentions, all of
    one kind. One embedding serves source, target and output; positions start as `sinusoids` and are
    learned. Token 0 is padding, at the end of a sentence; no other token attends to it.

    Parameters
    ----------
    vocabulary : int
        Number of different tokens, in both languages together.
    length : int
        The most tokens of a sentence, in either language.
    config : Config
        `layers` in the encoder, and as many in the decoder.

    Examples
    --------
    >>> model = Translator(vocabulary=100, length=16, config=Config())
    >>> source, target = torch.ones(3, 7, dtype=torch.int64), torch.ones(3, 5, dtype=torch.int64)
    >>> model(source, target).shape
    torch.Size([3, 5, 100])
    """

    encoder: Any  # nn.ModuleList of PreNormLayer
    decoder: Any  # nn.ModuleList of DecoderLayer

    def __init__(self, vocabulary: int, length: int, config: Config) -> None:
        super().__init__()
        check_sizes(config, vocabulary=vocabulary, length=length)
        self.vocabulary, self.length, self.config, dim = vocabulary, length, config, config.dim
        self.embed = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)  # so that logits start near N(0, 1)
        self.positions = nn.Parameter(sinusoids(length, dim))
        self.encoder = stack(PreNormLayer, config)
        self.decoder = stack(DecoderLayer, config)
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits (B, T, V) of the token after each of `target` (B, T), given `source`."""
        return self.logits(self.decode(target, self.encode(source), source == 0))

    def encode(self, source: Tensor) -> Tensor:
        """Read tokens (B, S) int64: return the memory (B, S, dim)."""
        h, padding = self._embed("source", source), source == 0
        for layer in self.encoder:
            h = layer(h, padding)  # (B, S, dim)
        return self.encoder_norm(h)

    def decode(self, target: Tensor, memory: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the features (B, T, dim) from which `logits` finds the token after each."""
        h = self._embed("target", target)
        if len(memory) != len(target):
            expected = f"{len(memory)}, as source has"
            raise ValueError(f"target has {len(target)} sentences; expected {expected}")
        for layer in self.decoder:
            h = layer(h, memory, padding)  # (B, T, dim)
        return self.decoder_norm(h)

    def logits(self, features: Tensor) -> Tensor:
        """Map (..., dim) to logits (..., V), by the embedding that reads the tokens."""
        return nn.functional.linear(features, self.embed.weight)

    def _embed(self, name: str, tokens: Tensor) -> Tensor:
        check_sentences(name, tokens, self.vocabulary, self.length)
        h = self.embed(tokens) * math.sqrt(self.positions.shape[1])
        return self.dropout(h + self.positions[: tokens.shape[1]])  # (B, T, dim)


def check_sentences(name: str, tokens: Tensor, vocabulary: int, length: int) -> None:
    """Raise TypeError or ValueError unless tokens are (B, T) with T <= length, padded at the end.

    A sentence has at least one token before its padding.
    """
    check_tensor(name, tokens, "int64", ("B", "T"))
    check_filled(name, tokens)
    if tokens.shape[1] > length:
        raise ValueError(f"{name} has {tokens.shape[1]} tokens in a row; expected at most {length}")
    check_range(name, tokens, vocabulary, "tokens")
    if (tokens[:, 0] == 0).any() or ((tokens[:, :-1] == 0) & (tokens[:, 1:] != 0)).any():
        raise ValueError(f"{name} has padding, token 0, before a token; expected it at the end")
