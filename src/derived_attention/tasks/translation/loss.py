"""Translation: batches of sentences, the loss of a translator, and what it writes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.runtime import check_count, evaluating
from derived_attention.tasks.checks import check_length, check_number, check_output, check_type
from derived_attention.tasks.translation.data import BEGIN, END, PAD, Pair, Vocabulary
from derived_attention.training.fit import Batches, Bits, Mean, check_device

Tokens = tuple[Tensor, Tensor]  # source (n, S), target (n, T)


@dataclasses.dataclass(frozen=True)
class Sentences(Batches):
    """Batches of pairs of sentences of similar length, so that there is little padding.

    A batch is ``(source, target)``, tokens (B, S) and (B, T) of a vocabulary.

    Parameters
    ----------
    pairs : sequence of (str, str)
        Source and translation.
    vocabulary : Vocabulary
        That of the model.
    batch_size : int
    """

    pairs: Sequence[Pair]
    vocabulary: Vocabulary
    batch_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pairs(self.pairs)
        check_type("vocabulary", self.vocabulary, Vocabulary, "a Vocabulary")

    @functools.cached_property
    def tokens(self) -> Tokens:
        """The tokens of all sentences, in either language."""
        source, target = zip(*self.pairs, strict=True)
        return self.vocabulary.encode(source), self.vocabulary.encode(target)

    def __len__(self) -> int:
        return math.ceil(len(self.pairs) / self.batch_size)

    def epoch(self, seed: int, number: int) -> Iterator[Tokens]:
        """Yield every pair once, with pairs of similar length together, in random order."""
        order = torch.randperm(len(self.pairs))  # on the CPU: the same on every machine
        for side in self.tokens:  # sorts by target, then by source, and else at random
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
        """Raise TypeError or ValueError unless `model` has the vocabulary, and enough length."""
        check_translator(model, self.vocabulary)
        for tokens, side in zip(self.tokens, ("source", "translation"), strict=True):
            longest = tokens.shape[1]
            check_length(f"{name} ({side})", f"a sentence of {longest} tokens", longest, model)


def token_loss(
    model: nn.Module, batch: Tokens, smoothing: float = 0.1
) -> tuple[Tensor, dict[str, Mean]]:
    """Return the smoothed cross-entropy of each next token; report ``"bits"``, without smoothing.

    ``model(source, target)`` returns logits (B, T, V) of the token after each token of the target,
    from the true tokens up to there (teacher forcing). The end counts as a token, padding does not.
    Bits per token depend on the vocabulary: compare models that have the same one.

    Parameters
    ----------
    model : nn.Module
        Such as `derived_attention.Translator`.
    batch : (Tensor, Tensor)
        Of `Sentences`.
    smoothing : float
        The share, below 1, of the probability of the target that is spread over all tokens
        [Vaswani2017]. ``functools.partial`` sets it.

    Raises
    ------
    TypeError, ValueError
        For a `smoothing` out of range; for logits of another shape.
    """
    check_number("smoothing", smoothing, least=0, below=1)
    plain, spread = token_losses(model, *batch)
    loss = (1 - smoothing) * plain.mean() + smoothing * spread.mean()
    return loss, {"bits": Bits(plain.detach().double().sum().item(), len(plain))}


def token_losses(model: nn.Module, source: Tensor, target: Tensor) -> Tokens:
    """Return, for each token of `target` but the first, -ln P and the mean of -ln P over all.

    Both are (K,) for the K tokens that are not padding. The second is the cross-entropy with the
    uniform distribution over the vocabulary, which smoothing adds.
    """
    logits, y = model(source, target[:, :-1]), target[:, 1:]  # (B, T, V), (B, T)
    check_output(logits, (*y.shape, "V"))
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
    """Return the translations that `model` writes token by token, always the likeliest one.

    A translation is cut after twice as many tokens as its source has.

    Parameters
    ----------
    model : nn.Module
        Such as `derived_attention.Translator`. Its mode is restored.
    vocabulary : Vocabulary
        That of the model.
    sentences : sequence of str
    batch_size : int
        Changes the result by rounding only.
    device : torch.device or str, optional
        Default, where the model is.
    """
    check_count("batch_size", batch_size)
    device = check_device(model, device)
    check_type("vocabulary", vocabulary, Vocabulary, "a Vocabulary")
    check_translator(model, vocabulary)
    source = vocabulary.encode(sentences)
    longest = source.shape[1]
    check_length("sentences", f"a sentence of {longest} tokens", longest, model)
    written = [""] * len(source)
    with evaluating(model.to(device)):
        for rows in lengths(source).argsort(stable=True).split(batch_size):
            target = write_greedily(model, trim(source[rows]).to(device))
            for row, text in zip(rows.tolist(), vocabulary.decode(target), strict=True):
                written[row] = text
    return written


def write_greedily(model: Any, source: Tensor) -> Tensor:
    """Return the likeliest tokens (B, T) of a `Translator` for `source` (B, S)."""
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
    """Return the number of tokens (n,) in each row of (n, T), without padding."""
    return (tokens != PAD).sum(1)


def trim(tokens: Tensor) -> Tensor:
    """Cut off the columns that hold only padding."""
    return tokens[:, : int(lengths(tokens).max())]


def check_pairs(pairs: Sequence[Pair]) -> None:
    """Raise TypeError or ValueError unless `pairs` is a sequence of two strings each, not empty."""
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise TypeError(f"pairs is {type(pairs).__name__}; expected a sequence of pairs")
    if not pairs:
        raise ValueError("pairs is empty; expected at least one pair of sentences")
    for i, pair in enumerate(pairs):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise TypeError(f"pairs[{i}] is {pair!r}; expected (source, translation), two strings")


def check_translator(model: Any, vocabulary: Vocabulary) -> None:
    """Raise TypeError or ValueError unless `model` translates, and has this vocabulary."""
    for name in ("length", "vocabulary"):
        size = getattr(model, name, None)
        if not isinstance(size, int):
            raise TypeError(f"model.{name} is {size!r}; expected a model such as Translator")
    if model.vocabulary != len(vocabulary):
        expected = f"{model.vocabulary}, as the model has"
        raise ValueError(f"vocabulary has {len(vocabulary)} tokens; expected {expected}")
