"""Train a `Recaller` on associative recall."""

from __future__ import annotations

import functools

import torch

from derived_book.tasks.model import Config
from derived_book.tasks.recall.loss import Questions, answer_loss
from derived_book.tasks.recall.model import Recaller
from derived_book.tasks.run import Numbers, Task, Trained, runner
from derived_book.training.fit import evaluate

TEST_BATCHES = 8  # of 64 sequences


@runner(steps=500, batch_size=16, lr=1e-2)
def train_recall(config: Config, *, pairs: int = 32, symbols: int = 64) -> Task:
    """Train a `Recaller`; return ``"accuracy"`` of its answers after the last step, and the cost.

    Parameters
    ----------
    config : Config
    pairs, symbols : int
        As in `derived_book.Questions`. A guess is right once in `symbols` times.
    seed, steps, batch_size, lr, eta, device
        As in `derived_book.tasks.run.runner`.
    """

    def scores(trained: Trained) -> Numbers:
        test = Questions(pairs, symbols, 64, TEST_BATCHES)
        return {"accuracy": evaluate(trained.model, test, answer_loss)["accuracy"]}

    inputs = tuple(torch.zeros(3, 1, pairs, dtype=torch.int64))
    batches = functools.partial(Questions, pairs, symbols)
    return Task(functools.partial(Recaller, symbols, config), inputs, batches, answer_loss, scores)
