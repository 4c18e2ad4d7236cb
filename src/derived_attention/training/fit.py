"""Train and evaluate a model, reproducibly, with checkpoints.

A task defines two things: `Batches`, which yield the data in random order for training and in a
fixed order for evaluation, and a loss, a function ``loss(model, batch)`` that returns the value to
minimise and the numbers to report. `fit` and `evaluate` work with any task.

All randomness of an epoch (the batches, dropout) is a function of ``(seed, epoch)``, and the
learning rate is a function of the step. So a run that resumes after a finished epoch reaches the
same weights, bit for bit, as a run without interruption (on a CPU with the same number of threads;
the kernels of a GPU may add in another order).

The caller draws the initial weights. A run is reproducible from end to end like this:

    seed_everything(seed)
    model = SeriesClassifier(data.channels, data.classes, data.length, Config())
    history = fit(model, Examples(data.train, 32), class_loss, epochs=20, seed=seed)
    accuracy = evaluate(model, Examples(data.test), class_loss)["accuracy"]
"""

from __future__ import annotations

import abc
import dataclasses
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from derived_attention import runtime
from derived_attention.attention.primal.fast import ksvd_objectives
from derived_attention.runtime import (
    check_count,
    check_seed,
    digest,
    evaluating,
    write_atomically,
)

WARMUP_STEPS = 30
CLIP_NORM = 4.0  # the largest norm of a gradient step, as in the papers' reference code


# --- What a task defines --------------------------------------------------------------------------


class Batches(abc.ABC):
    """The data of a task, cut into batches: each a tuple of tensors, with None for one left out.

    A subclass is a frozen dataclass: a checkpoint tells two runs apart by the `digest` of its
    fields. Fields that are integers, such as the size of a batch, are at least 1.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument.
    """

    batch_size: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.type in (int, "int"):
                check_count(field.name, getattr(self, field.name))

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    @abc.abstractmethod
    def epoch(self, seed: int, number: int) -> Iterator[tuple]:
        """Yield the batches of one epoch of training.

        What is random comes from PyTorch's global generator, which `fit` has just seeded with
        ``mixed_seed(seed, number)``.
        """

    @abc.abstractmethod
    def __iter__(self) -> Iterator[tuple]:
        """Yield the batches of an evaluation, in an order that never changes."""

    @abc.abstractmethod
    def check(self, name: str, model: Any) -> None:
        """Raise TypeError or ValueError, naming the argument `name`, if `model` cannot take them.

        It is called before any work; what needs no model is checked when the batches are made.
        """


class Endless(Batches):
    """Batches that are drawn at random without end: an epoch of training has `steps` of them.

    A random draw depends on the seed and the number of the step only: 7 epochs of 50 steps are one
    epoch of 350.
    """

    steps: int

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return self.steps

    def epoch(self, seed: int, number: int) -> Iterator[tuple]:
        """Yield the next `steps` batches."""
        for step in range(number * self.steps, (number + 1) * self.steps):
            torch.manual_seed(mixed_seed(seed, step))
            yield self.draw()

    @abc.abstractmethod
    def draw(self) -> tuple:
        """Return a batch by PyTorch's global generator."""


@dataclasses.dataclass(frozen=True)
class Mean:
    """A number to report, as a sum over `count` items."""

    total: float
    count: int

    def __add__(self, other: Mean) -> Mean:
        total, count = self.total + other.total, self.count + other.count
        return dataclasses.replace(self, total=total, count=count)

    @property
    def value(self) -> float:
        """The mean over all items."""
        return self.total / self.count


class RootMean(Mean):
    """The root of the mean, for sums of squares."""

    @property
    def value(self) -> float:
        """The root of the mean over all items."""
        return math.sqrt(self.total / self.count)


class Bits(Mean):
    """The mean in bits, for sums of -ln P."""

    @property
    def value(self) -> float:
        """The mean of -log₂ P over all items."""
        return self.total / math.log(2) / self.count


Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, dict[str, Mean]]]
History = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Regularised:
    """A loss plus the kernel-SVD objective, with which Primal-Attention is trained (chapter 12).

    ``loss + η mean(J²)`` as in the code of [Chen2023]: for each sequence and each `PrimalAttention`
    layer that is ``regularised``, J is the mean over heads, and its square is averaged over layers
    and sequences. The square bounds the objective from below (chapter 11). mean(J²) is reported as
    ``"ksvd"`` beside the numbers of `loss`, also in evaluation.

    Parameters
    ----------
    loss : callable
        As in `fit`.
    eta : float
        η ≥ 0; with 0 the objective is only reported.

    Raises
    ------
    TypeError, ValueError
        If `loss` is not callable or `eta` is not a finite number ≥ 0; in a call, if the model has
        no such layer, or one runs without gradients during training.

    Examples
    --------
    >>> history = fit(model, train, Regularised(class_loss, 0.1), epochs=20)  # doctest: +SKIP
    """

    loss: Loss
    eta: float

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise TypeError(f"loss is {self.loss!r}; expected a function loss(model, batch)")
        if isinstance(self.eta, bool) or not isinstance(self.eta, int | float):
            raise TypeError(f"eta is {self.eta!r}; expected a number")
        if not 0 <= self.eta < math.inf:
            raise ValueError(f"eta is {self.eta}; expected a finite number, at least 0")

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, Mean]]:
        """Return the regularised loss, and the numbers of `loss` with ``"ksvd"``."""
        with ksvd_objectives() as objectives:
            value, numbers = self.loss(model, batch)
        if not objectives:
            raise ValueError(
                f"model {type(model).__name__} has no layer PrimalAttention(regularised=True); "
                "expected at least one"
            )
        penalty = torch.stack([J.mean(-1).square().mean() for J in objectives]).mean()
        if self.eta and torch.is_grad_enabled() and not all(J.requires_grad for J in objectives):
            raise ValueError(
                "a regularised layer ran without gradients, so eta has no effect on it; "
                "expected gradients: with torch.utils.checkpoint, pass use_reentrant=False"
            )
        n = len(objectives[0])
        return value + self.eta * penalty, numbers | {"ksvd": Mean(penalty.item() * n, n)}


# --- Training and evaluation ----------------------------------------------------------------------


def fit(
    model: nn.Module,
    train: Batches,
    loss: Loss,
    *,
    epochs: int,
    lr: float = 1e-3,
    seed: int = 0,
    test: Batches | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> History:
    """Minimise `loss` of `model` on `train` with Adam, in place.

    The learning rate rises for 30 steps to `lr` and then falls linearly to 0. Gradients are
    clipped to norm 4. The weights after the last epoch are the result; there is no early stopping.
    Training runs on the model's device.

    Parameters
    ----------
    model : nn.Module
        The module that `loss` calls. It is in evaluation mode afterwards.
    train : Batches
        `Examples` (series, images, tokens), or the class of the task: `Windows`, `Sentences`,
        `Questions`, `Trajectories`, `SceneBatches`.
    loss : callable
        ``loss(model, batch)`` returns a scalar tensor and a dict of `Mean`: the function that is
        defined beside those batches.
    epochs : int
    lr : float
        The highest learning rate.
    seed : int
        Determines the batches and dropout, not the initial weights. The state of the caller's
        random generators does not change.
    test : Batches, optional
        Evaluated after each epoch. It has no influence on the training.
    checkpoint : path, optional
        A file that stores the run after every epoch, replaced atomically. If it exists, training
        resumes from it; if its run is finished, the trained weights are loaded at once.

    Returns
    -------
    dict of list of float
        The numbers of `loss` for each epoch, such as ``"accuracy"`` (over the training batches,
        with dropout, while the weights change) and, with `test`, such as ``"test_accuracy"``.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, before any training. Also if `checkpoint` is damaged or belongs
        to another run; the file is not changed.
    FloatingPointError
        If the loss or the gradient becomes infinite or NaN; names epoch and step.

    Examples
    --------
    >>> history = fit(model, Examples(data.train, 32), class_loss, epochs=20)  # doctest: +SKIP
    """
    check_settings(epochs, lr, seed)
    device = check_device(model)
    check_task(model, loss, train=train, **({} if test is None else {"test": test}))
    optimiser = torch.optim.Adam(model.parameters())
    path, run, history = None if checkpoint is None else Path(checkpoint), {}, {}
    if path is not None:
        run = {"epochs": epochs, "lr": float(lr), "seed": seed}
        run |= describe_task(model, loss, train, test)
        history = resume(path, run, model, optimiser) if path.exists() else {}
    left = range(max(map(len, history.values()), default=0), epochs)
    restored_rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with restored_rng, runtime.progress(left, "epochs", epochs > 1) as bar:
        for epoch in bar:
            torch.manual_seed(mixed_seed(seed, epoch))
            batches, n = on(device, train.epoch(seed, epoch)), len(train)
            rates = [lr * schedule(epoch * n + step, epochs * n) for step in range(n)]
            # A run of one epoch, as of a language model, has as many steps as others of many.
            with runtime.progress(rates, "steps", epochs == 1) as steps:
                place = f"epoch {epoch + 1}"
                numbers = train_epoch(model, optimiser, loss, batches, steps, place)
            if test is not None:
                tested = evaluate(model, test, loss)
                numbers |= {f"test_{name}": value for name, value in tested.items()}
            for name, value in numbers.items():
                history.setdefault(name, []).append(value)
            if path is not None:
                save(path, run, model, optimiser, history)
    model.eval()
    return history


def train_epoch(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    loss: Loss,
    batches: Iterable[tuple],
    rates: Iterable[float],
    place: str,
) -> dict[str, float]:
    """Take a step with the clipped gradient of each batch; return the numbers of the loss.

    Raises
    ------
    FloatingPointError
        If the loss or the gradient is infinite or NaN, before the weights change; names `place`.
    """
    model.train()
    sums: dict[str, Mean] = {}
    for step, (rate, batch) in enumerate(zip(rates, batches, strict=True), start=1):
        value, numbers = loss(model, batch)
        optimiser.zero_grad()
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        if not torch.isfinite(value + norm):
            raise FloatingPointError(
                f"the loss is {value.item()} and its gradient has norm {norm.item()} in {place}, "
                f"step {step}; a smaller lr may help"
            )
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        runtime.counted["steps"] += 1
        add(sums, numbers)
    return {name: mean.value for name, mean in sums.items()}


def evaluate(model: nn.Module, batches: Batches, loss: Loss) -> dict[str, float]:
    """Return the numbers that `loss` reports for `model` on `batches`, in evaluation mode.

    Parameters
    ----------
    model : nn.Module
        The module that `loss` calls, on its device. Its mode is restored.
    batches : Batches
        Their size has no influence on the result, except by rounding.
    loss : callable
        As in `fit`.

    Returns
    -------
    dict of float
        Such as ``{"loss": 0.1, "accuracy": 0.97}``.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, before the model is called.

    Examples
    --------
    >>> accuracy = evaluate(model, Examples(data.test), class_loss)["accuracy"]  # doctest: +SKIP
    """
    device = check_device(model)
    check_task(model, loss, batches=batches)
    sums: dict[str, Mean] = {}
    with evaluating(model):
        for batch in on(device, batches):
            add(sums, loss(model, batch)[1])
    return {name: mean.value for name, mean in sums.items()}


def on(device: torch.device, batches: Iterable[tuple]) -> Iterator[tuple]:
    """Yield the batches, moved to `device`."""
    for batch in batches:
        yield tuple(None if tensor is None else tensor.to(device) for tensor in batch)


def add(sums: dict[str, Mean], numbers: dict[str, Mean]) -> None:
    """Add the numbers of one batch to the sums so far."""
    for name, number in numbers.items():
        sums[name] = sums[name] + number if name in sums else number


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear from 0 to 1, then linear to 0 at `steps`.

    The rise takes `WARMUP_STEPS` steps, or half of a shorter run.
    """
    warmup = min(WARMUP_STEPS, max(1, steps // 2))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def mixed_seed(seed: int, number: int) -> int:
    """Return a seed for an epoch or a step, independent for different ``(seed, number)``."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])


# --- Checks ---------------------------------------------------------------------------------------


def check_settings(epochs: int, lr: float, seed: int) -> None:
    """Raise TypeError or ValueError, naming the argument, if a setting is invalid."""
    check_count("epochs", epochs)
    if not isinstance(lr, int | float):
        raise TypeError(f"lr is {lr!r}; expected a number")
    if not 0 < lr < math.inf:
        raise ValueError(f"lr is {lr}; expected a positive number")
    check_seed(seed)


def check_device(model: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Return `device`, by default the model's; raise TypeError if `model` is not a module.

    A `device` that this machine does not have raises ValueError.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    if device is None:
        return next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {str(device)!r}; expected one of this machine") from error
    return torch.device(device)


def check_task(model: nn.Module, loss: Loss, **data: Batches) -> None:
    """Raise TypeError or ValueError unless `model` and `loss` can process the batches `data`."""
    for name, batches in data.items():
        if not isinstance(batches, Batches):
            raise TypeError(
                f"{name} is {type(batches).__name__}; expected Batches, such as "
                "Examples(data.train, 32)"
            )
        batches.check(name, model)
    if not callable(loss):
        raise TypeError(f"loss is {loss!r}; expected a function loss(model, batch)")


# --- Checkpoints ----------------------------------------------------------------------------------

# A checkpoint is one file of torch.save: tensors, numbers and text, never code. It contains
#   run:     settings, model, loss, digests of the data and of the initial weights
#   state:   weights, optimiser and history after the last finished epoch
#   digest:  of both, because torch.load does not notice a flipped bit
# The schedule and the random generators follow from seed and epoch, and are not stored.


def describe_task(
    model: nn.Module, loss: Loss, train: Batches, test: Batches | None
) -> dict[str, Any]:
    """Return what determines the result of a run beside its settings, for comparison."""
    model_text, loss_text = (re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x)) for x in (model, loss))
    return {
        "model": model_text,
        "loss": loss_text,
        "train": digest(train),
        "test": digest(test),
        "initial weights": digest(model.state_dict()),
    }


def save(
    path: Path,
    run: dict[str, Any],
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    history: History,
) -> None:
    """Write the checkpoint to `path`, atomically."""
    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "history": history}
    buffer = io.BytesIO()
    torch.save({"run": run, "state": state, "digest": digest(run, state)}, buffer)
    write_atomically(path, buffer.getvalue())


def resume(
    path: Path, run: dict[str, Any], model: nn.Module, optimiser: torch.optim.Optimizer
) -> History:
    """Load the checkpoint at `path` into model and optimiser; return its history.

    Raises
    ------
    ValueError
        If the file is damaged, or belongs to another run than `run`. The file is not changed.
    """
    cause: Exception | None = None
    try:
        saved = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
        stored, state = saved["run"], saved["state"]
        intact = saved["digest"] == digest(stored, state) and stored.keys() == run.keys()
    except OSError:
        raise
    except Exception as error:  # a damaged archive raises almost anything
        intact, cause = False, error
    if not intact:
        raise ValueError(
            f"checkpoint {path} is damaged or was not written by fit; the file was not changed. "
            "Delete it to train again, or pass another path."
        ) from cause
    start = "initial weights"
    if run[start] == digest(state["model"]):  # the cell was run again, with the trained model
        run[start] = stored[start]
    changed = [difference(key, stored[key], run[key]) for key in run if stored[key] != run[key]]
    if changed:
        raise ValueError(
            f"checkpoint {path} belongs to another run: {'; '.join(changed)}; the file was not "
            "changed. Repeat that run exactly, or pass another path."
        )
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return state["history"]


def difference(key: str, stored: Any, current: Any) -> str:
    """Describe a difference between the run of a checkpoint and the current run."""
    if isinstance(current, int | float):
        return f"{key} is {stored} in the checkpoint and {current} now"
    hint = " (build the model again, after the same seed)" if key == "initial weights" else ""
    return f"{key} differ{'' if key.endswith('weights') else 's'}{hint}"
