"""Train and evaluate a model: seeded, device-aware, and safe against a killed runtime.

All randomness of an epoch (the order of the series, dropout) is a function of ``(seed, epoch)``,
and the learning rate is a function of the step. So a run that resumes after any finished epoch
takes the same path, to the same weights bit by bit, as a run that was never interrupted (on a CPU
with the same number of threads; a GPU's kernels may add in another order). Language models and
translators have trainers of their own, made of the same parts.

The initial weights are yours. A run is reproducible end to end like this:

    seed_everything(seed)
    model = SeriesClassifier(data.channels, data.classes, data.length)
    history = fit(model, data.train, seed=seed)
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from derived_attention import runtime
from derived_attention.data.series import SeriesSplit, check_series, check_tokens
from derived_attention.runtime import check_count, check_seed, digest, write_atomically

WARMUP_STEPS = 30
CLIP_NORM = 4.0  # the largest norm of a gradient step, as in the papers' reference code

History = dict[str, list[float]]


def fit(
    model: nn.Module,
    train: SeriesSplit,
    *,
    epochs: int = 20,
    batch_size: int = 16,
    lr: float = 1e-3,
    seed: int = 0,
    device: torch.device | str | None = None,
    test: SeriesSplit | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> History:
    """Minimise the loss of `model` on `train` with Adam, in place.

    The loss is the cross-entropy where ``train.y`` holds classes. Where it holds numbers, it is the
    mean squared error in units of their variance: that of standardised targets.

    The learning rate rises for 30 steps to `lr` and then falls linearly to 0. Gradients are
    clipped to norm 4. The weights after the last epoch are the result: nothing is selected.

    Parameters
    ----------
    model : nn.Module
        ``model(x, padding)`` returns logits (B, classes), or numbers (B,) in the units of `y`. It
        is moved to `device`, and comes back in evaluation mode.
    train : SeriesSplit
        Series, images or tokens, with classes or numbers as targets.
    epochs, batch_size : int
    lr : float
        The highest learning rate.
    seed : int
        Decides the order of the series and dropout; not the initial weights, which `model` has.
        The caller's own random generators are left as they were.
    device : torch.device or str, optional
        Where to train; default, where the model is.
    test : SeriesSplit, optional
        Evaluated after each epoch, for you to look at. It has no influence on the training.
    checkpoint : path, optional
        A file that holds the run after every epoch, replaced atomically. If it exists, training
        resumes from it; if its run is finished, the trained weights are loaded at once.
    progress : bool
        False for no progress bar; see `derived_attention.runtime.progress_wanted`.

    Returns
    -------
    dict of list of float
        Per epoch ``"loss"`` and ``"accuracy"`` (both over the training batches as they came, with
        dropout) and, given `test`, ``"test_accuracy"``. For numbers, ``"rmse"`` and
        ``"test_rmse"``, in their units, in the place of the accuracies.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work, before any work. Also for a `checkpoint` that is damaged
        or belongs to another run; the file is left as it is.
    FloatingPointError
        If the loss or the gradient becomes infinite or NaN; names epoch and step.

    Examples
    --------
    >>> history = fit(model, data.train, test=data.test)  # doctest: +SKIP
    >>> history["test_accuracy"][-1], max(history["test_accuracy"])  # doctest: +SKIP
    """
    settings: dict[str, Any] = dict(epochs=epochs, batch_size=batch_size, lr=lr, seed=seed)
    check_settings(**settings)
    settings["lr"] = float(lr)
    device = check_device(model, device)
    check_split("train", train, model)
    if test is not None:
        check_split("test", test, model)

    optimiser = torch.optim.Adam(model.to(device).parameters())
    metric = "rmse" if train.y.is_floating_point() else "accuracy"

    def one_epoch(epoch: int) -> dict[str, float]:
        loss, score = train_epoch(model, optimiser, train, device, epoch, **settings)
        numbers = {"loss": loss, metric: score}
        return numbers if test is None else numbers | {f"test_{metric}": evaluate(model, test)}

    path = None if checkpoint is None else Path(checkpoint)
    run = {} if path is None else describe_run("fit", model, train, test, settings)
    return run_rounds(one_epoch, epochs, "epochs", model, optimiser, path, run, progress)


def run_rounds(
    one_round: Callable[[int], dict[str, float]],
    rounds: int,
    label: str,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    path: Path | None,
    run: dict[str, Any],
    progress: bool,
) -> History:
    """Call `one_round` for each round that the checkpoint at `path` has not; return the history.

    The numbers that it returns go to the history. Model, optimiser and history are saved after each
    round. The caller's random generators are left as they were.
    """
    history: History = {}
    if path is not None and path.exists():
        history = resume(path, run, model, optimiser)
    left = range(len(history.get("loss", [])), rounds)
    device = check_device(model, None)
    own_generator = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with own_generator, runtime.progress(left, label, progress) as bar:
        for number in bar:
            for name, value in one_round(number).items():
                history.setdefault(name, []).append(value)
            if path is not None:
                save(path, run, model, optimiser, history)
    model.eval()
    return history


def train_epoch(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    train: SeriesSplit,
    device: torch.device,
    epoch: int,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> tuple[float, float]:
    """Take one pass over `train`, in an order of its own; return mean loss, and accuracy or RMSE.

    Raises
    ------
    FloatingPointError
        If the loss or the gradient becomes infinite or NaN; the weights are still finite then.
    """
    x, padding, y = to_device(train, slice(None), device)
    spread = variance(y)
    model.train()
    torch.manual_seed(epoch_seed(seed, epoch))
    batches = torch.randperm(len(y)).split(batch_size)  # drawn on the CPU: the same everywhere
    loss_sum, score = 0.0, 0.0
    for batch, rows in enumerate(batches):
        rows = rows.to(device)
        outputs = model(x[rows], None if padding is None else padding[rows])  # (B, classes) or (B,)
        loss = batch_loss(outputs, y[rows], spread)
        factor = schedule(epoch * len(batches) + batch, epochs * len(batches))
        where = f"epoch {epoch + 1}, step {batch + 1} of {len(batches)}"
        take_step(model, optimiser, loss, lr, factor, where)
        loss_sum += loss.item() * len(rows)
        score += batch_score(outputs.detach(), y[rows])
    return loss_sum / len(y), mean_score(score, y)


def take_step(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    loss: torch.Tensor,
    lr: float,
    factor: float,
    where: str,
) -> None:
    """Go down the clipped gradient of `loss` at the learning rate ``lr · factor``.

    Raises
    ------
    FloatingPointError
        If the loss or the gradient is infinite or NaN, before the weights change; names `where`.
    """
    for group in optimiser.param_groups:
        group["lr"] = lr * factor
    optimiser.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    if not torch.isfinite(loss + norm):
        raise FloatingPointError(
            f"the loss is {loss.item()} and its gradient has norm {norm.item()} in {where}; "
            f"a smaller lr than {lr} may help"
        )
    optimiser.step()


def to_device(
    split: SeriesSplit, rows: slice, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return x, padding and y of some rows on `device`."""
    padding = None if split.padding is None else split.padding[rows].to(device)
    return split.x[rows].to(device), padding, split.y[rows].to(device)


def variance(y: torch.Tensor) -> float:
    """Return the variance of targets that are numbers; 1 where it is 0, and for classes."""
    return float(y.double().var(correction=0)) or 1.0 if y.is_floating_point() else 1.0


def batch_loss(outputs: torch.Tensor, y: torch.Tensor, spread: float) -> torch.Tensor:
    """Return the cross-entropy of logits, or the mean squared error of numbers over `spread`."""
    check_outputs(outputs, y)
    if y.is_floating_point():
        return nn.functional.mse_loss(outputs, y) / spread
    return nn.functional.cross_entropy(outputs, y)


def batch_score(outputs: torch.Tensor, y: torch.Tensor) -> float:
    """Return the number of correct answers, or the sum of squared errors."""
    check_outputs(outputs, y)
    if y.is_floating_point():
        return float((outputs.double() - y.double()).square().sum())
    return int((outputs.argmax(1) == y).sum())


def check_outputs(outputs: torch.Tensor, y: torch.Tensor) -> None:
    """Raise ValueError unless there is a row of logits, or one number, for each target.

    PyTorch would compare a column of numbers with a row of targets, each with each.
    """
    numbers = y.is_floating_point()
    if outputs.ndim != (1 if numbers else 2) or len(outputs) != len(y):
        found = f"shape {tuple(outputs.shape)} for {len(y)} targets"
        expected = "numbers; expected (B,)" if numbers else "classes; expected (B, classes)"
        raise ValueError(f"model returns {found} that are {expected}")


def mean_score(total: float, y: torch.Tensor) -> float:
    """Return the accuracy, or the root of the mean squared error, from a sum of `batch_score`."""
    return math.sqrt(total / len(y)) if y.is_floating_point() else total / len(y)


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear from 0 to 1, then linear to 0 at `steps`.

    The rise takes `WARMUP_STEPS` steps, or half of a shorter run.
    """
    warmup = min(WARMUP_STEPS, max(1, steps // 2))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of one epoch, or step: unrelated for different ``(seed, epoch)``."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: SeriesSplit,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
) -> float:
    """Return the accuracy of `model` on `split`, in [0, 1], or its RMSE, in evaluation mode.

    Where ``split.y`` holds numbers, it is the root of the mean squared error, in their units.

    Parameters
    ----------
    model : nn.Module
        ``model(x, padding)`` returns logits (B, classes), or numbers (B,). Its mode is restored.
    split : SeriesSplit
    batch_size : int
        How many sequences to run at a time; has no influence on the result, but for rounding.
    device : torch.device or str, optional
        Where to evaluate; default, where the model is.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work, before any work.

    Examples
    --------
    >>> accuracy = evaluate(model, data.test)  # doctest: +SKIP
    """
    check_count("batch_size", batch_size)
    device = check_device(model, device)
    check_split("split", split, model)
    training, score = model.training, 0.0
    model.to(device).eval()
    for start in range(0, len(split), batch_size):
        x, padding, y = to_device(split, slice(start, start + batch_size), device)
        score += batch_score(model(x, padding), y)
    model.train(training)
    return mean_score(score, split.y)


# --- Checks ---------------------------------------------------------------------------------------


def check_settings(*, lr: float, seed: int, **counts: int) -> None:
    """Raise TypeError or ValueError, naming the argument, for a setting that cannot work."""
    for name, count in counts.items():
        check_count(name, count)
    if not isinstance(lr, int | float):
        raise TypeError(f"lr is {lr!r}; expected a number")
    if not 0 < lr < math.inf:
        raise ValueError(f"lr is {lr}; expected a positive number")
    check_seed(seed)


def check_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return `device`, by default the model's; raise if there is no such device or model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    if device is None:
        return next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {str(device)!r}, which this machine has not") from error
    return torch.device(device)


def check_split(name: str, split: SeriesSplit, model: nn.Module) -> None:
    """Raise TypeError or ValueError, naming the tensor, unless `split` can be learned from."""
    if not isinstance(split, SeriesSplit):
        raise TypeError(f"{name} is {type(split).__name__}; expected a SeriesSplit")
    x, padding, y = split.x, split.padding, split.y
    for field, tensor in (("x", x), ("y", y)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}.{field} is {type(tensor).__name__}; expected a tensor")
    steps, vocabulary, channels = (
        getattr(model, size, None) for size in ("length", "vocabulary", "channels")
    )
    if vocabulary or (x.ndim == 2 and not channels):
        check_tokens(x, padding, of=f"{name}.", steps=steps, vocabulary=vocabulary)
    else:
        check_series(x, padding, of=f"{name}.", steps=steps, channels=channels)
    if len(x) == 0:
        raise ValueError(f"{name} is empty; expected at least one sequence")
    if not torch.isfinite(x).all():
        raise ValueError(f"{name}.x holds NaN or infinity; expected finite numbers")
    check_targets(f"{name}.y", y, len(x), getattr(model, "classes", None))


def check_targets(name: str, y: torch.Tensor, n: int, classes: int | None) -> None:
    """Raise ValueError unless `y` is n classes, or n numbers where the model's `classes` are 0."""
    kinds = "int64" if classes else "floats" if classes == 0 else "int64 or floats"
    fits = {"int64": y.dtype == torch.int64, "floats": y.is_floating_point()}
    if y.shape != (n,) or not any(fits[kind] for kind in kinds.split(" or ")):
        found = f"{y.dtype} of shape {tuple(y.shape)}"
        raise ValueError(f"{name} is {found}; expected {kinds} of shape {(n,)}")
    if not torch.isfinite(y).all():
        raise ValueError(f"{name} holds NaN or infinity; expected finite numbers")
    if fits["int64"] and (y.min() < 0 or y.max() >= (classes or math.inf)):
        found = f"{int(y.min())} to {int(y.max())}"
        raise ValueError(f"{name} holds {found}; expected classes 0 <= y < {classes or 'C'}")


# A checkpoint is one file of torch.save: tensors, numbers and text, never code. It holds
#   run:     what was run (settings, model, digests of the data and of the initial weights)
#   state:   weights, optimiser and history after the last finished epoch (or 100 steps)
#   digest:  of all that, because torch.load does not notice a flipped bit
# The schedule and the random generators need no place in it: they follow from seed and epoch.


def describe_run(
    trainer: str, model: nn.Module, train: Any, test: Any, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return all that decides the result of a run, to compare with a checkpoint's.

    `trainer` is the name of the function that makes it; `digest` takes `train` and `test`.
    """
    return settings | {
        "trainer": trainer,
        "model": re.sub(r" at 0x[0-9a-fA-F]+", "", repr(model)),
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
    """Write the run so far to `path`, atomically."""
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
        If the file is damaged, or belongs to another run than `run`. It is left as it is.
    """
    cause: Exception | None = None
    try:
        saved = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
        there, state = saved["run"], saved["state"]
        whole = saved["digest"] == digest(there, state) and "trainer" in there
    except OSError:
        raise
    except Exception as error:  # a damaged archive raises almost anything
        whole, cause = False, error
    if not whole:
        raise ValueError(
            f"checkpoint {path} is damaged, or is no checkpoint of {run['trainer']}. It was left "
            "as it is. Delete it to train again, or give another path."
        ) from cause
    start = "initial weights"
    if run[start] == digest(state["model"]):  # the cell was run again, with the trained model
        run[start] = there[start]
    if changed := differences(there, run):
        raise ValueError(
            f"checkpoint {path} belongs to another run: {'; '.join(changed)}. It was left as it "
            "is. Repeat that run exactly, or give another path."
        )
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return state["history"]


def differences(there: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Say in words where the run of a checkpoint, `there`, differs from `run`."""
    one_kind = there["trainer"] == run["trainer"]  # otherwise nothing else can be compared
    keys = run if one_kind else ["trainer"]
    return [_difference(key, there[key], run[key]) for key in keys if there[key] != run[key]]


def _difference(key: str, there: Any, here: Any) -> str:
    if isinstance(here, int | float) or key == "trainer":
        return f"{key} is {there} there and {here} here"
    again = " (build the model again, after the same seed)" if key == "initial weights" else ""
    return f"{key} differ{'' if key.endswith('s') else 's'}{again}"
