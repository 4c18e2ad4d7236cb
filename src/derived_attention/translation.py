"""Train a translator, evaluate it, and let it translate (chapter 10).

It is the machinery of `derived_attention.training`. All randomness of an epoch (the batches,
dropout) is a function of ``(seed, epoch)``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.data.translation import BEGIN, END, PAD, Pair, Vocabulary
from derived_attention.runtime import check_count
from derived_attention.training import (
    History,
    check_device,
    check_settings,
    describe_run,
    epoch_seed,
    run_rounds,
    schedule,
    take_step,
)

Tokens = tuple[Tensor, Tensor]  # source (n, S), target (n, T)


def fit_translation(
    model: nn.Module,
    vocabulary: Vocabulary,
    train: Sequence[Pair],
    *,
    epochs: int = 10,
    batch_size: int = 32,
    lr: float = 4e-3,
    smoothing: float = 0.1,
    seed: int = 0,
    device: torch.device | str | None = None,
    test: Sequence[Pair] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> History:
    """Minimise the cross-entropy of each next token of the translations with Adam, in place.

    The model is given the true tokens before it (teacher forcing). A batch holds pairs of similar
    length, so that little of it is padding. Learning rate, clipping and result are as in
    `derived_attention.training.fit`.

    Parameters
    ----------
    model : nn.Module
        ``model(source, target)`` returns logits (B, T, V) of the tokens after each of `target`: see
        `derived_attention.models.Translator`. It is moved to `device`, and comes back in evaluation
        mode.
    vocabulary : Vocabulary
        What turns sentences into the tokens that the model knows.
    train : sequence of (str, str)
        Source and translation.
    epochs, batch_size : int
    lr : float
        The highest learning rate.
    smoothing : float
        What share of the target's probability is spread over all tokens [Vaswani2017], below 1.
    seed : int
        Decides the batches and dropout; not the initial weights, which `model` has. The caller's
        own random generators are left as they were.
    device, progress
        As in `fit`.
    test : sequence of (str, str), optional
        Evaluated after each epoch, for you to look at. It has no influence on the training.
    checkpoint : path, optional
        As in `fit`.

    Returns
    -------
    dict of list of float
        Per epoch ``"loss"``, in bits per token without smoothing: the mean over the training
        batches as they came, with dropout. Given `test`, also ``"test_loss"``.

    Raises
    ------
    TypeError, ValueError, FloatingPointError
        As `fit`; for a sentence that has more tokens than the model reads.

    Examples
    --------
    >>> model = Translator(len(vocabulary), length=128)  # doctest: +SKIP
    >>> history = fit_translation(model, vocabulary, data.train)  # doctest: +SKIP
    """
    settings: dict[str, Any] = dict(epochs=epochs, batch_size=batch_size, lr=lr, seed=seed)
    check_settings(**settings)
    settings |= {"lr": float(lr), "smoothing": check_smoothing(smoothing)}
    device = check_device(model, device)
    check_vocabulary(model, vocabulary)
    pairs = encode_pairs("train", train, model, vocabulary)
    tested = None if test is None else encode_pairs("test", test, model, vocabulary)
    optimiser = torch.optim.Adam(model.to(device).parameters())

    def one_epoch(epoch: int) -> dict[str, float]:
        loss = train_translation(model, optimiser, pairs, device, epoch, **settings)
        if test is None:
            return {"loss": loss}
        return {"loss": loss, "test_loss": evaluate_translation(model, vocabulary, test)}

    path = None if checkpoint is None else Path(checkpoint)
    run = {} if path is None else describe_run("fit_translation", model, pairs, tested, settings)
    return run_rounds(one_epoch, epochs, "epochs", model, optimiser, path, run, progress)


def train_translation(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    pairs: Tokens,
    device: torch.device,
    epoch: int,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    smoothing: float,
    seed: int,
) -> float:
    """Take one pass over `pairs`; return the mean loss without smoothing, in bits per token.

    Raises
    ------
    FloatingPointError
        If the loss or the gradient becomes infinite or NaN; the weights are still finite then.
    """
    model.train()
    torch.manual_seed(epoch_seed(seed, epoch))
    batches = similar_batches(pairs, batch_size)
    bits, tokens = 0.0, 0
    for number, rows in enumerate(batches):
        source, target = (trim(side[rows]).to(device) for side in pairs)
        plain, spread = token_losses(model, source, target)
        loss = (1 - smoothing) * plain.mean() + smoothing * spread.mean()
        factor = schedule(epoch * len(batches) + number, epochs * len(batches))
        where = f"epoch {epoch + 1}, step {number + 1} of {len(batches)}"
        take_step(model, optimiser, loss, lr, factor, where)
        bits += plain.sum().item() / math.log(2)
        tokens += len(plain)
    return bits / tokens


def similar_batches(pairs: Tokens, batch_size: int) -> list[Tensor]:
    """Return the rows of all batches: pairs of similar length, together and in order by chance."""
    order = torch.randperm(len(pairs[0]))  # drawn on the CPU: the same everywhere
    for side in pairs:  # by source, then by target: at last by target, and by source where equal
        order = order[lengths(side)[order].argsort(stable=True)]
    batches = order.split(batch_size)
    return [batches[i] for i in torch.randperm(len(batches)).tolist()]


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


@torch.no_grad()
def evaluate_translation(
    model: nn.Module,
    vocabulary: Vocabulary,
    pairs: Sequence[Pair],
    *,
    batch_size: int = 64,
    device: torch.device | str | None = None,
) -> float:
    """Return the bits per token of the true translations under `model`, in evaluation mode.

    Each token is predicted from the source and the true tokens before it; the end counts as one.
    The number depends on how `vocabulary` cuts words: compare models with the same one.

    Parameters
    ----------
    model, vocabulary
        As in `fit_translation`. The model's mode is restored.
    pairs : sequence of (str, str)
        Source and translation.
    batch_size : int
        How many pairs to run at a time; has no influence on the result, but for rounding.
    device : torch.device or str, optional
        Where to evaluate; default, where the model is.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work, before any work.

    Examples
    --------
    >>> bits = evaluate_translation(model, vocabulary, data.test)  # doctest: +SKIP
    """
    check_count("batch_size", batch_size)
    device = check_device(model, device)
    check_vocabulary(model, vocabulary)
    both = encode_pairs("pairs", pairs, model, vocabulary)
    training, nats, tokens = model.training, 0.0, 0
    model.to(device).eval()
    for rows in lengths(both[1]).argsort(stable=True).split(batch_size):
        source, target = (trim(side[rows]).to(device) for side in both)
        plain, _ = token_losses(model, source, target)
        nats += float(plain.double().sum())
        tokens += len(plain)
    model.train(training)
    return nats / math.log(2) / tokens


@torch.no_grad()
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
        With the methods of `derived_attention.models.Translator`. Its mode is restored.
    vocabulary, batch_size, device
        As in `evaluate_translation`.
    sentences : sequence of str

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
    check_vocabulary(model, vocabulary)
    source = encode_sentences("sentences", sentences, model, vocabulary)
    training, written = model.training, [""] * len(source)
    model.to(device).eval()
    for rows in lengths(source).argsort(stable=True).split(batch_size):
        target = write_greedily(model, trim(source[rows]).to(device))
        for row, text in zip(rows.tolist(), vocabulary.decode(target), strict=True):
            written[row] = text
    model.train(training)
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


def encode_pairs(name: str, pairs: Sequence[Pair], model: Any, vocabulary: Vocabulary) -> Tokens:
    """Return the tokens of both languages; raise, naming the argument, where there are none."""
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise TypeError(f"{name} is {type(pairs).__name__}; expected a sequence of pairs")
    if not pairs:
        raise ValueError(f"{name} is empty; expected at least one pair of sentences")
    for i, pair in enumerate(pairs):
        fits = isinstance(pair, tuple | list) and len(pair) == 2
        if not fits or not all(isinstance(text, str) for text in pair):
            raise TypeError(f"{name}[{i}] is {pair!r}; expected (source, translation), two strings")
    sources, targets = zip(*pairs, strict=True)
    x = encode_sentences(f"{name} (source)", sources, model, vocabulary)
    y = encode_sentences(f"{name} (translation)", targets, model, vocabulary)
    return x, y


def encode_sentences(
    name: str, sentences: Sequence[str], model: Any, vocabulary: Vocabulary
) -> Tensor:
    """Return the tokens (n, T) of sentences; raise ValueError if the model cannot read so many."""
    tokens = vocabulary.encode(sentences)
    if tokens.shape[1] > model.length:
        found = f"{name} has a sentence of {tokens.shape[1]} tokens"
        raise ValueError(f"{found}; expected at most {model.length}, the length of the model")
    return tokens


def check_vocabulary(model: nn.Module, vocabulary: Vocabulary) -> None:
    """Raise TypeError or ValueError unless `vocabulary` is that of a translator `model`."""
    if not isinstance(vocabulary, Vocabulary):
        raise TypeError(f"vocabulary is {type(vocabulary).__name__}; expected a Vocabulary")
    for name in ("length", "vocabulary"):
        size = getattr(model, name, None)
        if not isinstance(size, int):
            raise TypeError(f"model.{name} is {size!r}; expected a model such as Translator")
    if model.vocabulary != len(vocabulary):
        found = f"vocabulary has {len(vocabulary)} tokens"
        raise ValueError(f"{found}; expected {model.vocabulary}, as the model has")


def check_smoothing(smoothing: float) -> float:
    """Return `smoothing` as a float; raise TypeError or ValueError unless it is in [0, 1)."""
    if isinstance(smoothing, bool) or not isinstance(smoothing, int | float):
        raise TypeError(f"smoothing is {smoothing!r}; expected a number")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing is {smoothing}; expected 0 <= smoothing < 1")
    return float(smoothing)
