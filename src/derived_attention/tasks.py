"""One mechanism on one task: build the model, train it, and say what it scores and what it costs.

Each function trains one miniature from one seed, and returns numbers that JSON can hold, so that
`derived_attention.experiments.run_grid` can run a grid of them. `attention` and `heads` go to the
model: see the rule at the top of `derived_attention.models`. Half the heads at the same width of a
head: ``functools.partial(MultiheadAttention, head_dim=16)`` and 2 heads in a model of width 64.

Beside its scores each returns the cost of all its attention layers, projections included:
``"parameters"``, and ``"flops"``, the operations of one forward pass over one full sequence, as
`derived_attention.measure.count_flops` finds them in what really runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from derived_attention.attention.softmax import MultiheadAttention
from derived_attention.data.listops import SHORT, make_listops
from derived_attention.data.series import load_series
from derived_attention.data.text import load_text
from derived_attention.data.translation import load_translation, train_vocabulary
from derived_attention.language import evaluate_language, fit_language
from derived_attention.measure import count_flops
from derived_attention.models import (
    ByteLM,
    Mechanism,
    SeriesClassifier,
    TokenClassifier,
    Translator,
)
from derived_attention.runtime import seed_everything
from derived_attention.training import History, fit
from derived_attention.translation import evaluate_translation, fit_translation, translate

TRANSLATION_LENGTH = 128  # tokens of a sentence, at most

Device = torch.device | str | None
Numbers = dict[str, float]


def language(
    attention: Mechanism,
    heads: int,
    *,
    seed: int = 0,
    text: str = "python",
    length: int = 32,
    dim: int = 64,
    layers: int = 2,
    hidden: int = 128,
    steps: int = 1000,
    batch_size: int = 16,
    lr: float = 1e-2,
    device: Device = None,
) -> Numbers:
    """Train a `ByteLM`; return ``"bits"`` per byte of the test part of `text`, and the cost.

    Parameters
    ----------
    attention, heads
        See the top of this module.
    text : str
        As in `derived_attention.data.text.load_text`.
    length, dim, layers, hidden
        As in `ByteLM`.
    seed, steps, batch_size, lr, device
        As in `derived_attention.language.fit_language`; the seed is also that of the initial
        weights.
    """
    data = load_text(text)
    seed_everything(seed)
    options: dict[str, Any] = {"dropout": 0.0, "attention": attention}
    model = ByteLM(length, dim, heads, layers, hidden, **options)
    cost = attention_cost(model, torch.zeros(1, length, dtype=torch.int64))
    how: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "lr": lr, "device": device}
    fit_language(model, data.train, seed=seed, progress=False, **how)
    return {"bits": evaluate_language(model, data.test)} | cost


def series(
    name: str,
    attention: Mechanism,
    heads: int,
    *,
    seed: int = 0,
    dim: int = 64,
    layers: int = 2,
    hidden: int = 128,
    epochs: int = 20,
    batch_size: int = 16,
    lr: float = 1e-3,
    device: Device = None,
) -> Numbers:
    """Train a `SeriesClassifier`; return test ``"accuracy"`` after the last epoch, and the cost.

    ``"best"`` is the highest test accuracy of all epochs, which an epoch chosen on the test set
    would claim.

    Parameters
    ----------
    name : str
        As in `derived_attention.data.series.load_series`.
    attention, heads
        See the top of this module.
    dim, layers, hidden
        As in `SeriesClassifier`.
    seed, epochs, batch_size, lr, device
        As in `derived_attention.training.fit`; the seed is also that of the initial weights.
    """
    data = load_series(name)
    seed_everything(seed)
    sizes = (dim, heads, layers, hidden)
    model = SeriesClassifier(data.channels, data.classes, data.length, *sizes, attention=attention)
    cost = attention_cost(model, torch.zeros(1, data.length, data.channels))
    how: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "device": device}
    history = fit(model, data.train, test=data.test, seed=seed, progress=False, **how)
    return _accuracy(history) | cost


def listops(
    attention: Mechanism,
    heads: int,
    *,
    seed: int = 0,
    sizes: dict[str, Any] = SHORT,
    dim: int = 32,
    layers: int = 2,
    hidden: int = 64,
    epochs: int = 6,
    batch_size: int = 128,
    lr: float = 8e-3,
    device: Device = None,
) -> Numbers:
    """Train a `TokenClassifier` on ListOps; return ``"accuracy"``, ``"best"`` as `series` does.

    Parameters
    ----------
    attention, heads
        See the top of this module.
    sizes : dict
        Keyword arguments of `derived_attention.data.listops.make_listops`, such as `SHORT`.
    dim, layers, hidden
        As in `TokenClassifier`.
    seed, epochs, batch_size, lr, device
        As in `derived_attention.training.fit`; the seed is also that of the initial weights.
    """
    data = make_listops(**sizes)
    seed_everything(seed)
    model = TokenClassifier(
        data.vocabulary, data.classes, data.length, dim, heads, layers, hidden, attention=attention
    )
    cost = attention_cost(model, torch.ones(1, data.length, dtype=torch.int64))
    how: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "device": device}
    history = fit(model, data.train, test=data.test, seed=seed, progress=False, **how)
    return _accuracy(history) | cost


def translation(
    attention: Mechanism,
    heads: int,
    *,
    seed: int = 0,
    pieces: int = 4000,
    dim: int = 64,
    layers: int = 2,
    hidden: int = 128,
    dropout: float = 0.0,
    epochs: int = 10,
    batch_size: int = 32,
    lr: float = 4e-3,
    device: Device = None,
) -> Numbers:
    """Train a `Translator` from German to English; return its scores on the test part.

    ``"bleu"`` and ``"chrf"`` are those of `sacrebleu`, of greedy translations; ``"bits"`` per token
    depend on `pieces`. The cost is that of a sentence of 16 tokens into another of 16.

    Parameters
    ----------
    attention, heads
        See the top of this module; they serve all three attentions of the model.
    pieces : int
        Size of the vocabulary that `train_vocabulary` learns from the training part.
    dim, layers, hidden, dropout
        As in `Translator`.
    seed, epochs, batch_size, lr, device
        As in `derived_attention.translation.fit_translation`; the seed is also that of the initial
        weights.
    """
    from sacrebleu import corpus_bleu, corpus_chrf  # half a second, which other tasks need not wait

    data = load_translation("ding")
    vocabulary = train_vocabulary(data.train, pieces)
    seed_everything(seed)
    sizes = (dim, heads, layers, hidden, dropout)
    model = Translator(len(vocabulary), TRANSLATION_LENGTH, *sizes, attention=attention)
    cost = attention_cost(model, *torch.ones(2, 1, 16, dtype=torch.int64))
    how: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "device": device}
    fit_translation(model, vocabulary, data.train, seed=seed, progress=False, **how)
    german, english = zip(*data.test, strict=True)
    written = translate(model, vocabulary, german)
    return {
        "bleu": corpus_bleu(written, [english]).score,
        "chrf": corpus_chrf(written, [english]).score,
        "bits": evaluate_translation(model, vocabulary, data.test),
    } | cost


def _accuracy(history: History) -> Numbers:
    return {"accuracy": history["test_accuracy"][-1], "best": max(history["test_accuracy"])}


@torch.no_grad()
def attention_cost(model: nn.Module, *inputs: torch.Tensor) -> Numbers:
    """Return the ``"parameters"`` and ``"flops"`` of the attention layers of a model.

    Parameters
    ----------
    model : nn.Module
        Its attention layers are those of its modules that are a `MultiheadAttention`.
    inputs : Tensor
        What the model is called with; `flops` are those of that call, in evaluation mode.

    Raises
    ------
    ValueError
        If there is no attention layer.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    if not layers:
        raise ValueError(f"model {type(model).__name__} has no MultiheadAttention; expected one")
    calls: list[tuple[nn.Module, Any, Any]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
        for layer in layers
    ]
    training = model.training
    try:
        model.eval()(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    flops = sum(count_flops(functools.partial(layer, *args, **how)) for layer, args, how in calls)
    model.train(training)
    parameters = {id(p): p.numel() for layer in layers for p in layer.parameters()}
    return {"parameters": sum(parameters.values()), "flops": flops}
