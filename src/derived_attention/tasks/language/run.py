"""Train models on text: `ByteLM` to continue it, `TokenClassifier` to name its topic."""

from __future__ import annotations

import functools

import torch
from torch import nn

from derived_attention.attention.frame.checks import Mechanism
from derived_attention.attention.softmax.fast import softmax_attention
from derived_attention.runtime import seed_everything
from derived_attention.tasks.language.data import load_text, make_topics
from derived_attention.tasks.language.loss import Windows, byte_loss
from derived_attention.tasks.language.model import ByteLM
from derived_attention.tasks.language.sessions import Sessions
from derived_attention.tasks.model import Config, TokenClassifier
from derived_attention.tasks.run import Numbers, Task, Trained, classification, runner
from derived_attention.training.fit import Batches, evaluate, fit


@runner(steps=1000, batch_size=16, lr=1e-2)
def train_language(config: Config, *, text: str = "python", length: int = 32) -> Task:
    """Train a `ByteLM`; return ``"bits"`` per byte of the test part of `text`, and the cost.

    Parameters
    ----------
    config : Config
    text : str
        As in `derived_attention.load_text`.
    length : int
        As in `derived_attention.Windows`.
    seed, steps, batch_size, lr, eta, device
        As in `derived_attention.tasks.run.runner`.
    """
    data = load_text(text)

    def scores(trained: Trained) -> Numbers:
        return evaluate(trained.model, Windows(data.test, length), byte_loss)

    model = functools.partial(ByteLM, length, config)
    inputs = (torch.zeros(1, length, dtype=torch.int64),)
    return Task(model, inputs, functools.partial(Windows, data.train, length), byte_loss, scores)


@runner(epochs=4, batch_size=32, lr=3e-3)
def train_topics(config: Config, *, length: int = 128, train: int = 4000, test: int = 2000) -> Task:
    """Train a `TokenClassifier` on bytes to name a text's topic; return as `train_series` does.

    Parameters
    ----------
    config : Config
    length, train, test : int
        As in `derived_attention.make_topics`.
    seed, epochs, batch_size, lr, eta, device
        As in `derived_attention.tasks.run.runner`.
    """
    data = make_topics(length, train, test)
    model = functools.partial(TokenClassifier, data.vocabulary, data.classes, length, config)
    return classification(model, torch.zeros(1, length, dtype=torch.int64), data)


def small_model(
    attention: Mechanism | type[nn.Module] = softmax_attention,
    *,
    text: str = "sessions",
    seed: int = 0,
    steps: int = 600,
    device: torch.device | str | None = None,
) -> ByteLM:
    """Train the small model that the book carries along from chapter 1, and return it.

    Two layers of four heads, of width 64, read 64 bytes. All but the mechanism is the same in every
    chapter, the batches of a seed too.

    Parameters
    ----------
    attention : callable
        A function or a class, as in `derived_attention.tasks.model.Config`.
    text : str
        ``"sessions"``, see `derived_attention.draw_sessions`: the model reads each byte together
        with the three before it. Otherwise a name for `derived_attention.load_text`: each byte is
        read alone.
    seed, device
        As in `derived_attention.training.fit.fit`; the seed is also that of the initial weights.
    steps : int
        Of 16 windows each.
    """
    seed_everything(seed)
    config = Config(heads=4, dropout=0.0, attention=attention)
    train: Batches
    if text == "sessions":
        model, train = ByteLM(64, config, taps=4), Sessions(64, batch_size=16, steps=steps)
    else:
        data = load_text(text)
        model, train = ByteLM(64, config), Windows(data.train, 64, batch_size=16, steps=steps)
    fit(model.to(device), train, byte_loss, epochs=1, lr=1e-2, seed=seed)
    return model
