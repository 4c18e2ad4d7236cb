"""Train a `VisionTransformer` on a set of images."""

from __future__ import annotations

import functools

import torch

from derived_book.tasks.images.data import load_images
from derived_book.tasks.images.model import VisionTransformer
from derived_book.tasks.model import Config
from derived_book.tasks.run import Task, classification, runner


@runner(epochs=20, batch_size=32, lr=2e-3)
def train_images(config: Config, name: str, *, patch: int) -> Task:
    """Train a `VisionTransformer`; return scores and cost as `train_series` does.

    Parameters
    ----------
    config : Config
    name, patch
        As in `derived_book.load_images`.
    seed, epochs, batch_size, lr, eta, device
        As in `derived_book.tasks.run.runner`.
    """
    data = load_images(name, patch)
    sizes = data.grid, data.channels, data.classes
    model = functools.partial(VisionTransformer, *sizes, config)
    return classification(model, torch.zeros(1, data.length, data.channels), data)
