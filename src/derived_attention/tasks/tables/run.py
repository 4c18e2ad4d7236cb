"""Train a `TableTransformer` on a table."""

from __future__ import annotations

import functools

import torch

from derived_attention.tasks.model import Config
from derived_attention.tasks.run import Numbers, Task, Trained, runner
from derived_attention.tasks.series.data import SeriesSplit
from derived_attention.tasks.supervised import Examples, class_loss, number_loss
from derived_attention.tasks.tables.data import load_table
from derived_attention.tasks.tables.model import TableTransformer
from derived_attention.training.fit import evaluate


@runner(epochs=7, batch_size=256, lr=1e-3)
def train_table(config: Config, name: str, *, rows: int | None = None) -> Task:
    """Train a `TableTransformer`; return ``"accuracy"`` or ``"rmse"`` of the test part, and cost.

    The score is that after the last epoch: nothing is selected, and the validation part is not
    used. The cost is that of one row.

    Parameters
    ----------
    config : Config
    name : str
        As in `derived_attention.load_table`.
    rows : int, optional
        Train on the first rows of the training part only.
    seed, epochs, batch_size, lr, eta, device
        As in `derived_attention.tasks.run.runner`.
    """
    data = load_table(name)
    target = data.target or (0.0, 1.0)
    sizes = data.numbers, data.categories, data.classes
    model = functools.partial(TableTransformer, *sizes, config, target)
    loss = class_loss if data.classes else functools.partial(number_loss, variance=target[1] ** 2)
    train = SeriesSplit(data.train.x[:rows], None, data.train.y[:rows])

    def scores(trained: Trained) -> Numbers:
        metric = "accuracy" if data.classes else "rmse"
        return {metric: evaluate(trained.model, Examples(data.test, 2048), loss)[metric]}

    inputs = (torch.zeros(1, data.length, 1),)
    return Task(model, inputs, functools.partial(Examples, train), loss, scores)
