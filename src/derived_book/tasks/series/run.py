"""Train a `SeriesClassifier` on a set of the archives."""

from __future__ import annotations

import functools

import torch

from derived_book.tasks.model import Config
from derived_book.tasks.run import Task, classification, runner
from derived_book.tasks.series.data import load_series
from derived_book.tasks.series.model import SeriesClassifier


@runner(epochs=20, batch_size=16, lr=1e-3)
def train_series(config: Config, name: str) -> Task:
    """Train a `SeriesClassifier`; return its scores and its cost.

    ``"accuracy"`` is that of the test part after the last epoch. ``"best"`` is the highest of all
    epochs: the score that one would report after choosing the epoch on the test part.

    Parameters
    ----------
    config : Config
    name : str
        As in `derived_book.load_series`.
    seed, epochs, batch_size, lr, eta, device
        As in `derived_book.tasks.run.runner`.
    """
    data = load_series(name)
    model = functools.partial(SeriesClassifier, data.channels, data.classes, data.length, config)
    return classification(model, torch.zeros(1, data.length, data.channels), data)
