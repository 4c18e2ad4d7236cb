"""Train and evaluate a model, reproducibly.

A task defines two things: `Batches`, which yield the data in random order for training and in a
fixed order for evaluation, and a loss, a function ``loss(model, batch)`` that returns the value to
minimise and the numbers to report. `fit` and `evaluate` work with any task.

All randomness of an epoch (the batches, dropout) is a function of ``(seed, epoch)``, and the
learning rate is a function of the step. The caller draws the initial weights. So a run is
reproducible, bit for bit on a CPU with the same number of threads (the kernels of a GPU may add in
another order), like this:

    seed_everything(seed)
    model = SeriesClassifier(data.channels, data.classes, data.length, Config())
    history = fit(model, Examples(data.train, 32), class_loss, epochs=20, seed=seed)
    accuracy = evaluate(model, Examples(data.test), class_loss)["accuracy"]
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from derived_attention.common.checks import check_count
from derived_attention.primal.core import ksvd_objectives
from derived_book import runtime
from derived_book.runtime import check_seed, evaluating

WARMUP_STEPS = 30
CLIP_NORM = 4.0  # the largest norm of a gradient step, as in the papers' reference code
CHECK_STEPS = 100  # on a GPU: steps between two checks that all losses were finite
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A gradient that overflows float16 even when it is scaled by this is treated as infinite.
LEAST_SCALE = 2.0**-14


# --- What a task defines --------------------------------------------------------------------------


class Batches(abc.ABC):
    """The data of a task, cut into batches: each a tuple of tensors, with None for one left out.

    A subclass is a frozen dataclass. Fields that are integers, such as the size of a batch, are at
    least 1.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument.
    """

    batch_size: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.type in (int, "int"):
                check_count(field.name, getattr(self, field.name), 1)

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    @abc.abstractmethod
    def epoch(self, seed: int, number: int) -> Iterator[tuple]:
        """Yield the batches of one epoch of training.

        What is random comes from PyTorch's global generator, which `fit` has just seeded with
        ``mix_seed(seed, number)``.
        """

    @abc.abstractmethod
    def __iter__(self) -> Iterator[tuple]:
        """Yield the batches of an evaluation, in an order that never changes."""

    @abc.abstractmethod
    def check(self, name: str, model: Any) -> None:
        """Raise TypeError or ValueError unless `model` can process these batches, called `name`.

        It is called before any work; checks that need no model run when the batches are created.
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
            torch.manual_seed(mix_seed(seed, step))
            yield self.draw()

    @abc.abstractmethod
    def draw(self) -> tuple:
        """Return a batch by PyTorch's global generator."""


@dataclasses.dataclass(frozen=True)
class Mean:
    """A number to report, as a sum over `count` items.

    The sum may be a 0-dimensional tensor, float64 or integer, which is read from a GPU only at the
    end of an epoch.
    """

    total: float | torch.Tensor
    count: int

    def __add__(self, other: Mean) -> Mean:
        total, count = self.total + other.total, self.count + other.count
        return dataclasses.replace(self, total=total, count=count)

    @property
    def value(self) -> float:
        """The mean over all items."""
        return float(self.total / self.count)


class Bits(Mean):
    """The mean in bits, for sums of -ln P."""

    @property
    def value(self) -> float:
        """The mean of -log₂ P over all items."""
        return float(self.total / math.log(2) / self.count)


def mean_of(x: torch.Tensor, count: int) -> Mean:
    """Return the `Mean` of `count` items whose mean is the tensor `x`."""
    return Mean(x.detach().double() * count, count)


def means(sums: dict[str, Mean]) -> dict[str, float]:
    """Return the value of each mean; all tensors are read from the device at once."""
    held = {name: x.total for name, x in sums.items() if isinstance(x.total, torch.Tensor)}
    if held:
        totals = torch.stack([total.double() for total in held.values()]).tolist()
        read = dict(zip(held, totals, strict=True))
        sums = sums | {name: dataclasses.replace(sums[name], total=read[name]) for name in read}
    return {name: mean.value for name, mean in sums.items()}


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
        return value + self.eta * penalty, numbers | {"ksvd": mean_of(penalty, n)}


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
    precision: str | None = None,
) -> History:
    """Minimise `loss` of `model` on `train` with Adam, in place.

    The learning rate rises for 30 steps to `lr` and then falls linearly to 0. Gradients are
    clipped to norm 4. The weights after the last epoch are the result; there is no early stopping.
    Training runs on the model's device. A step does not wait for a GPU: its numbers are read at the
    end of an epoch, and whether all losses were finite every 100 steps. Only `detection_loss` waits
    in each step, because it matches objects with queries on the CPU.

    Parameters
    ----------
    model : nn.Module
        The module that `loss` calls. It is in evaluation mode afterwards.
    train : Batches
        `Examples` (series, images), or the class of the task: `Windows`, `Sessions`, `Questions` or
        `SceneBatches`.
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
    precision : str, optional
        ``"float32"``: the model's own types. ``"bfloat16"`` or ``"float16"``: autocast computes the
        matrix products of a float32 model in that type; for float16 the loss is scaled, so that
        small gradients are not lost, and a step whose scaled gradient overflows is skipped.
        ``"auto"`` or None: ``"float32"`` on a CPU; on a GPU ``"bfloat16"`` from compute capability
        8.0 and ``"float16"`` from 7.0 (a T4 has 7.5). Weights and `test` keep the model's types.

    Returns
    -------
    dict of list of float
        The numbers of `loss` for each epoch, such as ``"accuracy"`` (over the training batches,
        with dropout, while the weights change) and, with `test`, such as ``"test_accuracy"``.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, before any training.
    FloatingPointError
        If the loss or the gradient becomes infinite or NaN; names epoch and step. On a CPU it is
        raised before the weights change, on a GPU up to 100 steps later.

    Examples
    --------
    >>> history = fit(model, Examples(data.train, 32), class_loss, epochs=20)  # doctest: +SKIP
    """
    check_settings(epochs, lr, seed)
    device = check_device(model)
    check_task(model, loss, train=train, **({} if test is None else {"test": test}))
    trainer = Trainer(model, loss, chosen_precision(precision, model, device), device)
    history: History = {}
    restored_rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with restored_rng, runtime.progress(range(epochs), "epochs", epochs > 1) as bar:
        for epoch in bar:
            torch.manual_seed(mix_seed(seed, epoch))
            batches, n = move_batches(train.epoch(seed, epoch), device), len(train)
            rates = [lr * schedule(epoch * n + step, epochs * n) for step in range(n)]
            # A run of one epoch, as of a language model, has as many steps as others of many.
            with runtime.progress(rates, "steps", epochs == 1) as steps:
                place = f"epoch {epoch + 1}"
                numbers = train_epoch(trainer, batches, steps, place)
            if test is not None:
                tested = evaluate(model, test, loss)
                numbers |= {f"test_{name}": value for name, value in tested.items()}
            for name, value in numbers.items():
                history.setdefault(name, []).append(value)
    model.eval()
    return history


class Trainer:
    """A model in training: its loss, its optimiser, and what a precision needs."""

    def __init__(self, model: nn.Module, loss: Loss, precision: str, device: torch.device) -> None:
        self.model, self.loss, self.precision, self.device = model, loss, precision, device
        scaled = precision == "float16"
        # The fused optimiser leaves out a step on the device; others wait to know if they have to.
        self.optimiser = torch.optim.Adam(model.parameters(), fused=scaled or None)
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled)

    def gradient(self, batch: tuple) -> tuple[torch.Tensor, torch.Tensor, dict[str, Mean]]:
        """Set the clipped gradient of a batch; return the loss, the norm before, the numbers."""
        with self.autocast(), runtime.skip_range_checks():
            value, numbers = self.loss(self.model, batch)
        self.optimiser.zero_grad()
        self.scaler.scale(value).backward()
        self.scaler.unscale_(self.optimiser)
        return value, nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM), numbers

    def step(self, rate: float) -> None:
        """Move the weights."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimiser)
        self.scaler.update()

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context of a forward pass in the precision."""
        dtype = PRECISIONS[self.precision]
        return (
            contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)
        )

    def check(self, unread: list[tuple[torch.Tensor, torch.Tensor]], place: str, step: int) -> None:
        """Raise FloatingPointError unless all is finite up to a step, and empty the list."""
        pairs = torch.stack([torch.stack([x.double() for x in pair]) for pair in unread]).tolist()
        unread.clear()
        scaled = self.scaler.is_enabled()
        overflows = scaled and self.scaler.get_scale() < LEAST_SCALE
        for at, (value, norm) in enumerate(pairs, start=step + 1 - len(pairs)):
            # A scaled gradient may overflow: the scale is reduced, and the next one does not.
            if not (math.isfinite(value) and (scaled or math.isfinite(norm))) or (
                overflows and not math.isfinite(norm)
            ):
                raise FloatingPointError(
                    f"the loss is {value} and its gradient has norm {norm} in {place}, "
                    f"step {at}; a smaller lr may help"
                )


def train_epoch(
    trainer: Trainer, batches: Iterable[tuple], rates: Iterable[float], place: str
) -> dict[str, float]:
    """Take a step with the clipped gradient of each batch; return the numbers of the loss.

    Raises
    ------
    FloatingPointError
        If the loss or the gradient is infinite or NaN; names `place`. On a CPU the weights have not
        changed.
    """
    trainer.model.train()
    sums: dict[str, Mean] = {}
    unread: list[tuple[torch.Tensor, torch.Tensor]] = []  # losses and norms of the last steps
    every, step = 1 if trainer.device.type == "cpu" else CHECK_STEPS, 0
    for step, (rate, batch) in enumerate(zip(rates, batches, strict=True), start=1):
        value, norm, numbers = trainer.gradient(batch)
        unread.append((value.detach(), norm))
        if len(unread) == every:
            trainer.check(unread, place, step)
        trainer.step(rate)
        runtime.counted["steps"] += 1
        add(sums, numbers)
    if unread:
        trainer.check(unread, place, step)
    return means(sums)


def chosen_precision(precision: str | None, model: nn.Module, device: torch.device) -> str:
    """Return one of `PRECISIONS` for an argument of `fit`, which is checked."""
    if precision is not None and not isinstance(precision, str):
        raise TypeError(f"precision is {precision!r}; expected a string or None")
    expected = ["auto", *PRECISIONS]
    if precision not in (None, *expected):
        raise ValueError(f"precision is {precision!r}; expected one of {', '.join(expected)}")
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if precision in (None, "auto"):
        if device.type != "cuda" or dtypes != {torch.float32}:
            return "float32"
        capability = torch.cuda.get_device_capability(device)
        return (
            "bfloat16" if capability >= (8, 0) else "float16" if capability >= (7, 0) else "float32"
        )
    if precision != "float32" and dtypes != {torch.float32}:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"precision is {precision!r}, and the model has parameters of {found or 'no type'}; "
            "expected a model of torch.float32, or precision 'float32': to train it as it is"
        )
    return str(precision)


def evaluate(model: nn.Module, batches: Batches, loss: Loss) -> dict[str, float]:
    """Return the numbers that `loss` reports for `model` on `batches`, in evaluation mode.

    Parameters
    ----------
    model : nn.Module
        The module that `loss` calls, on its device. Its mode is restored.
    batches : Batches
        Their size has no influence on the result, except by rounding. But an evaluation with
        `Sessions` or `Questions` has ``batch_size * steps`` sequences.
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
        for batch in move_batches(batches, device):
            with runtime.skip_range_checks():
                add(sums, loss(model, batch)[1])
    return means(sums)


def move_batches(batches: Iterable[tuple], device: torch.device) -> Iterator[tuple]:
    """Yield the batches, moved to `device`, which works on while they are copied."""

    def move(x: torch.Tensor) -> torch.Tensor:
        x = x.pin_memory() if device.type == "cuda" and not x.is_cuda else x
        return x.to(device, non_blocking=True)

    for batch in batches:
        yield tuple(None if x is None else move(x) for x in batch)


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


def mix_seed(seed: int, number: int) -> int:
    """Return a seed for an epoch or a step, independent for different ``(seed, number)``."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])


# --- Checks ---------------------------------------------------------------------------------------


def check_settings(epochs: int, lr: float, seed: int) -> None:
    """Raise TypeError or ValueError, naming the argument, if a setting is invalid."""
    check_count("epochs", epochs, 1)
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
