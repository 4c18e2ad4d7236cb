"""One model on one task: build it, train it, and return its scores and its cost.

`runner` makes such a function of each task: `derived_book.train_series`, `train_images`
and `train_detection`. Each trains one model from one seed and returns numbers that JSON can hold,
as `derived_book.training.grids.run_grid` requires of a function that calls one of them.

The argument `config` goes to the model: see `derived_book.tasks.model.Config`. For half as many
heads, each as wide as before, pass ``Config(heads=2, attention=partial(MultiheadAttention,
head_dim=16))``.

Beside its scores each function returns the cost of all attention layers, projections included:
``"parameters"``, and ``"flops"``, the operations of one forward pass over one full sequence, as
`derived_book.training.measure.count_flops` counts them while it runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from derived_attention.layer import MultiheadAttention
from derived_book.runtime import evaluating, seed_everything
from derived_book.tasks.supervised import Examples, class_loss
from derived_book.training.fit import Batches, History, Loss, Regularised, check_device, fit
from derived_book.training.measure import count_flops

Numbers = dict[str, float]


class Trained(NamedTuple):
    """A model after its training, and the history that `fit` returned."""

    model: Any
    history: History


class Task(NamedTuple):
    """What `runner` needs of a task."""

    model: Callable[[], nn.Module]  # builds it, from the seed that has just been set
    inputs: tuple[Tensor, ...]  # of one full sequence, to count operations
    batches: Callable[..., Batches]  # of `batch_size` examples, and of `steps` where they say so
    loss: Loss
    scores: Callable[[Trained], Numbers]
    test: Batches | None = None  # evaluated after each epoch


def runner(
    *, batch_size: int, lr: float, epochs: int | None = None, steps: int | None = None
) -> Callable[[Callable[..., Task]], Callable[..., Numbers]]:
    """Turn a function that describes a `Task` into one that trains on it and returns the scores.

    The new function has the arguments of the old one, and these keyword arguments, whose defaults
    the caller of `runner` sets:

    Parameters
    ----------
    seed : int
        Of the initial weights, the batches and dropout; the data do not depend on it. Default 0.
    epochs, steps : int
        How long to train: a task takes either `epochs` or `steps`, depending on its batches.
    batch_size : int
    lr : float
        The highest learning rate; see `derived_book.training.fit.fit`.
    eta : float
        For a model with Primal-Attention, the weight of the objective of kernel SVD in the loss, as
        in `derived_book.training.fit.Regularised`. Default 0, which leaves it out.
    device : torch.device or str, optional
        Where to train; default, the CPU.
    """
    length = {"epochs": epochs} if steps is None else {"steps": steps}
    defaults = {"seed": 0, **length, "batch_size": batch_size, "lr": lr, "eta": 0.0, "device": None}
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(name, keyword, default=x) for name, x in defaults.items()]

    def decorate(describe: Callable[..., Task]) -> Callable[..., Numbers]:
        @functools.wraps(describe)
        def run(*args: Any, **keywords: Any) -> Numbers:
            chosen = {name: keywords.pop(name, default) for name, default in defaults.items()}
            return train(describe(*args, **keywords), **chosen)

        signature = inspect.signature(describe)
        parameters = [*signature.parameters.values(), *options]
        signature = signature.replace(parameters=parameters, return_annotation="Numbers")
        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    return decorate


def train(
    task: Task,
    *,
    seed: int,
    eta: float,
    device: torch.device | str | None,
    epochs: int = 1,
    **options: Any,
) -> Numbers:
    """Build the model of a task, train it, and return its scores and its cost."""
    sizes = {name: options.pop(name) for name in ("batch_size", "steps") if name in options}
    seed_everything(seed)
    model = task.model()
    device = check_device(model, device)
    cost = attention_cost(model, *task.inputs)
    batches, loss = task.batches(**sizes), with_objective(task.loss, eta)
    model.to(device)
    history = fit(model, batches, loss, epochs=epochs, seed=seed, test=task.test, **options)
    return task.scores(Trained(model, history)) | cost


def classification(model: Callable[[], nn.Module], inputs: Tensor, data: Any) -> Task:
    """Describe the task of naming the class of each sequence of ``data.train`` and ``data.test``.

    ``"accuracy"`` is that of the test part after the last epoch. ``"best"`` is the highest of all
    epochs: the score that one would report after choosing the epoch on the test part.
    """

    def scores(trained: Trained) -> Numbers:
        curve = trained.history["test_accuracy"]
        return {"accuracy": curve[-1], "best": max(curve)}

    batches = functools.partial(Examples, data.train)
    return Task(model, (inputs,), batches, class_loss, scores, Examples(data.test))


def with_objective(loss: Loss, eta: float) -> Loss:
    """Return `loss` with the objective of kernel SVD added, unless `eta` is 0."""
    return Regularised(loss, eta) if eta else loss


def attention_cost(model: nn.Module, *inputs: Tensor) -> Numbers:
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
    with evaluating(model):
        try:
            model(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
        runs = (functools.partial(layer, *args, **keywords) for layer, args, keywords in calls)
        flops = sum(map(count_flops, runs))
    parameters = {id(p): p.numel() for layer in layers for p in layer.parameters()}
    return {"parameters": sum(parameters.values()), "flops": flops}
