"""Sentences: what a translator trains on, and the translations that it writes (chapter 10).

`Sentences` and `token_loss` are what `derived_attention.training.fit.fit` takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.runtime import check_count, evaluating
from derived_attention.tasks.translation.data import BEGIN, END, PAD, Pair, Vocabulary
from derived_attention.training.fit import Batches, Bits, Mean, check_device

Tokens = tuple[Tensor, Tensor]  # source (n, S), target (n, T)


@dataclasses.dataclass(frozen=True)
class Sentences(Batches):
    """Pairs of sentences, some at a time: those of similar length, so that little is padding.

    A batch is ``(source, target)``, tokens (B, S) and (B, T) of a vocabulary.

    Parameters
    ----------
    pairs : sequence of (str, str)
        Source and translation.
    vocabulary : Vocabulary
        What turns sentences into the tokens that the model knows.
    batch_size : int

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work. `fit` and `evaluate` see that the model has as many tokens
        as `vocabulary`, and reads the longest sentence.

    Examples
    --------
    >>> batches = Sentences(data.train, vocabulary, 32)  # doctest: +SKIP
    """

    pairs: Sequence[Pair]
    vocabulary: Vocabulary
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_pairs(self.pairs)
        check_vocabulary(self.vocabulary)

    @functools.cached_property
    def tokens(self) -> Tokens:
        """All sentences of either language."""
        source, target = zip(*self.pairs, strict=True)
        return self.vocabulary.encode(source), self.vocabulary.encode(target)

    def __len__(self) -> int:
        return math.ceil(len(self.pairs) / self.batch_size)

    def epoch(self, seed: int, number: int) -> Iterator[Tokens]:
        """Yield every pair once, those of similar length together, in an order by chance."""
        order = torch.randperm(len(self.pairs))  # drawn on the CPU: the same everywhere
        for side in self.tokens:  # at last by target, by source where equal, and else by chance
            order = order[lengths(side)[order].argsort(stable=True)]
        batches = order.split(self.batch_size)
        return self._rows(batches[i] for i in torch.randperm(len(batches)).tolist())

    def __iter__(self) -> Iterator[Tokens]:
        return self._rows(lengths(self.tokens[1]).argsort(stable=True).split(self.batch_size))

    def _rows(self, batches: Iterable[Tensor]) -> Iterator[Tokens]:
        source, target = self.tokens
        for rows in batches:
            yield trim(source[rows]), trim(target[rows])

    def check(self, name: str, model: Any) -> None:
        """Raise TypeError or ValueError unless `model` reads these tokens, and so many."""
        check_translator(model, self.vocabulary)
        for tokens, side in zip(self.tokens, ("source", "translation"), strict=True):
            check_lengths(f"{name} ({side})", tokens, model)


def token_loss(
    model: nn.Module, batch: Tokens, smoothing: float = 0.1
) -> tuple[Tensor, dict[str, Mean]]:
    """Return the smoothed cross-entropy of each next token; report ``"bits"``, without smoothing.

    ``model(source, target)`` returns logits (B, T, V) of the tokens after each of the target: it is
    given the true tokens before it (teacher forcing). The end counts as a token, padding does not.
    Bits per token depend on how the vocabulary cuts words: compare models with the same one.

    Parameters
    ----------
    model : nn.Module
        Such as `derived_attention.tasks.translation.model.Translator`.
    batch : (Tensor, Tensor)
        Of `Sentences`.
    smoothing : float
        What share of the target's probability is spread over all tokens [Vaswani2017], below 1.
        ``functools.partial`` sets it.

    Raises
    ------
    TypeError, ValueError
        For a `smoothing` out of range; for a result of another shape.
    """
    check_smoothing(smoothing)
    plain, spread = token_losses(model, *batch)
    loss = (1 - smoothing) * plain.mean() + smoothing * spread.mean()
    return loss, {"bits": Bits(plain.detach().double().sum().item(), len(plain))}


def token_losses(model: nn.Module, source: Tensor, target: Tensor) -> Tokens:
    """Return, for each token of `target` but the first, -ln P and the mean of -ln P over all.

    Both are (K,) for the K tokens that are not padding. The second is what smoothing adds: the
    cross-entropy with a distribution that gives all tokens of the vocabulary the same.
    """
    logits, y = model(source, target[:, :-1]), target[:, 1:]  # (B, T, V), (B, T)
    if logits.ndim != 3 or logits.shape[:2] != y.shape:
        expected = f"({y.shape[0]}, {y.shape[1]}, V)"
        raise ValueError(f"model returns shape {tuple(logits.shape)}; expected {expected}")
    log_p, real = logits.log_softmax(-1), y != PAD
    plain = -log_p.gather(2, y[..., None]).squeeze(2)  # (B, T)
    return plain[real], -log_p.mean(2)[real]


def translate(
    model: nn.Module,
    vocabulary: Vocabulary,
    sentences: Sequence[str],
    *,
    batch_size: int = 64,
    device: torch.device | str | None = None,
) -> list[str]:
    """Return the translations that `model` writes, token by token, always the likeliest.

    A translation ends after twice as many tokens as its source, if the model does not end it.

    Parameters
    ----------
    model : nn.Module
        Such as `derived_attention.Translator`. Its mode is restored.
    vocabulary : Vocabulary
        What turns sentences into the tokens that the model knows.
    sentences : sequence of str
    batch_size : int
        How many sentences to run at a time; has no influence on the result, but for rounding.
    device : torch.device or str, optional
        Where to translate; default, where the model is.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work, before any work.

    Examples
    --------
    >>> translate(model, vocabulary, ["Das ist gut."])  # doctest: +SKIP
    """
    check_count("batch_size", batch_size)
    device = check_device(model, device)
    check_vocabulary(vocabulary)
    check_translator(model, vocabulary)
    source = vocabulary.encode(sentences)
    check_lengths("sentences", source, model)
    written = [""] * len(source)
    with evaluating(model.to(device)):
        for rows in lengths(source).argsort(stable=True).split(batch_size):
            target = write_greedily(model, trim(source[rows]).to(device))
            for row, text in zip(rows.tolist(), vocabulary.decode(target), strict=True):
                written[row] = text
    return written


def write_greedily(model: Any, source: Tensor) -> Tensor:
    """Return the tokens (B, T) that a `Translator` writes for `source` (B, S)."""
    memory, padding = model.encode(source), source == PAD
    most = (2 * lengths(source)).clamp(max=model.length)
    target = torch.full_like(source[:, :1], BEGIN)
    done = torch.zeros_like(most, dtype=torch.bool)
    while not done.all():
        logits = model.logits(model.decode(target, memory, padding)[:, -1])  # (B, V)
        token = (logits[:, END:].argmax(1) + END).masked_fill(done, PAD)
        target = torch.cat([target, token[:, None]], 1)
        done |= (token == END) | (target.shape[1] >= most)
    return target


def lengths(tokens: Tensor) -> Tensor:
    """Return how many of each row of tokens (n, T) are not padding."""
    return (tokens != PAD).sum(1)


def trim(tokens: Tensor) -> Tensor:
    """Cut off the columns that hold nothing but padding."""
    return tokens[:, : int(lengths(tokens).max())]


# --- Checks ---------------------------------------------------------------------------------------


def check_pairs(pairs: Sequence[Pair]) -> None:
    """Raise TypeError or ValueError unless `pairs` are two strings each, and there are some."""
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise TypeError(f"pairs is {type(pairs).__name__}; expected a sequence of pairs")
    if not pairs:
        raise ValueError("pairs is empty; expected at least one pair of sentences")
    for i, pair in enumerate(pairs):
        fits = isinstance(pair, tuple | list) and len(pair) == 2
        if not fits or not all(isinstance(text, str) for text in pair):
            raise TypeError(f"pairs[{i}] is {pair!r}; expected (source, translation), two strings")


def check_vocabulary(vocabulary: Vocabulary) -> None:
    """Raise TypeError unless `vocabulary` is one."""
    if not isinstance(vocabulary, Vocabulary):
        raise TypeError(f"vocabulary is {type(vocabulary).__name__}; expected a Vocabulary")


def check_translator(model: Any, vocabulary: Vocabulary) -> None:
    """Raise TypeError or ValueError unless `vocabulary` is that of a translator `model`."""
    for name in ("length", "vocabulary"):
        size = getattr(model, name, None)
        if not isinstance(size, int):
            raise TypeError(f"model.{name} is {size!r}; expected a model such as Translator")
    if model.vocabulary != len(vocabulary):
        found = f"vocabulary has {len(vocabulary)} tokens"
        raise ValueError(f"{found}; expected {model.vocabulary}, as the model has")


def check_lengths(name: str, tokens: Tensor, model: Any) -> None:
    """Raise ValueError, naming the argument, if a row of `tokens` is too long for the model."""
    if tokens.shape[1] > model.length:
        found = f"{name} has a sentence of {tokens.shape[1]} tokens"
        raise ValueError(f"{found}; expected at most {model.length}, the length of the model")


def check_smoothing(smoothing: float) -> None:
    """Raise TypeError or ValueError unless `smoothing` is a number in [0, 1)."""
    if isinstance(smoothing, bool) or not isinstance(smoothing, int | float):
        raise TypeError(f"smoothing is {smoothing!r}; expected a number")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing is {smoothing}; expected 0 <= smoothing < 1")
