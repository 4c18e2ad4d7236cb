"""Train a `TokenClassifier` on ListOps."""

from __future__ import annotations

import functools
from typing import Any

import torch

from derived_attention.tasks.listops.data import SHORT, make_listops
from derived_attention.tasks.model import Config, TokenClassifier
from derived_attention.tasks.run import Task, classification, runner


@runner(epochs=6, batch_size=128, lr=8e-3)
def train_listops(config: Config, *, sizes: dict[str, Any] = SHORT) -> Task:
    """Train a `TokenClassifier` on ListOps; return scores and cost as `train_series` does.

    Parameters
    ----------
    config : Config
    sizes : dict
        Keyword arguments of `derived_attention.make_listops`, such as `SHORT`.
    seed, epochs, batch_size, lr, eta, device
        As in `derived_attention.tasks.run.runner`.
    """
    data = make_listops(**sizes)
    model = functools.partial(TokenClassifier, data.vocabulary, data.classes, data.length, config)
    return classification(model, torch.ones(1, data.length, dtype=torch.int64), data)
