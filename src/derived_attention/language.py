"""Train, evaluate and hear a language model on bytes (chapter 10).

It is the machinery of `derived_attention.training`, but a run counts steps instead of epochs. All
randomness of a step (the windows, dropout) is a function of ``(seed, step)``; a checkpoint is
written after every 100 steps.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from derived_attention.data.text import check_text, decode, encode
from derived_attention.runtime import check_count, check_seed
from derived_attention.training import (
    History,
    check_device,
    check_settings,
    describe_run,
    epoch_seed,
    run_rounds,
    schedule,
    take_step,
)

ROUND_STEPS = 100  # steps between two checkpoints


def fit_language(
    model: nn.Module,
    train: torch.Tensor,
    *,
    steps: int = 1000,
    batch_size: int = 16,
    lr: float = 1e-2,
    seed: int = 0,
    device: torch.device | str | None = None,
    test: torch.Tensor | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> History:
    """Minimise the cross-entropy of the next byte of `train` with Adam, in place.

    Each step takes `batch_size` windows of the text, each of ``model.length`` bytes and the one
    after them, from places drawn at random. Learning rate, clipping and result are as in
    `derived_attention.training.fit`.

    Parameters
    ----------
    model : nn.Module
        ``model(x)`` returns logits (B, T, 256) of the bytes after each of `x` (B, T) int64, and
        ``model.length`` is T. It is moved to `device`, and comes back in evaluation mode.
    train : torch.Tensor
        (n,) uint8: see `derived_attention.data.text.load_text`.
    steps, batch_size : int
    lr : float
        The highest learning rate.
    seed : int
        Decides the windows and dropout; not the initial weights, which `model` has. The caller's
        own random generators are left as they were.
    device, progress
        As in `fit`.
    test : torch.Tensor, optional
        (n,) uint8. Evaluated after every 100 steps, for you to look at. It has no influence.
    checkpoint : path, optional
        A file that holds the run after every 100 steps; otherwise as in `fit`.

    Returns
    -------
    dict of list of float
        ``"loss"``, in bits per byte: the mean over each 100 steps (over fewer, at the end), with
        dropout. Given `test`, also ``"test_loss"``, at the end of each.

    Raises
    ------
    TypeError, ValueError, FloatingPointError
        As `fit`.

    Examples
    --------
    >>> history = fit_language(ByteLM(32, dropout=0.0), data.train)  # doctest: +SKIP
    """
    settings: dict[str, Any] = dict(steps=steps, batch_size=batch_size, lr=lr, seed=seed)
    check_settings(**settings)
    settings["lr"] = float(lr)
    device = check_device(model, device)
    length = check_length(model)
    check_text("train", train, length + 1)
    if test is not None:
        check_text("test", test, 2)
    optimiser = torch.optim.Adam(model.to(device).parameters())
    text = train.to(device)

    def one_round(number: int) -> dict[str, float]:
        loss = train_language(model, optimiser, text, number * ROUND_STEPS, **settings)
        if test is None:
            return {"loss": loss}
        return {"loss": loss, "test_loss": evaluate_language(model, test)}

    path = None if checkpoint is None else Path(checkpoint)
    run = {} if path is None else describe_run("fit_language", model, train, test, settings)
    rounds = math.ceil(steps / ROUND_STEPS)
    return run_rounds(one_round, rounds, "rounds", model, optimiser, path, run, progress)


def train_language(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    text: torch.Tensor,
    first: int,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> float:
    """Take the steps of one round, from number `first`; return their mean loss, in bits per byte.

    Raises
    ------
    FloatingPointError
        If the loss or the gradient becomes infinite or NaN; the weights are still finite then.
    """
    length = check_length(model)
    offsets = torch.arange(length + 1)
    numbers = range(first, min(first + ROUND_STEPS, steps))
    model.train()
    bits = 0.0
    for step in numbers:
        torch.manual_seed(epoch_seed(seed, step))
        places = torch.randint(len(text) - length, (batch_size, 1))  # on the CPU: everywhere alike
        windows = text[(places + offsets).to(text.device)].long()  # (B, T + 1)
        loss = byte_losses(model, windows[:, :-1], windows[:, 1:]).mean()
        take_step(model, optimiser, loss, lr, schedule(step, steps), f"step {step + 1} of {steps}")
        bits += loss.item() / math.log(2)
    return bits / len(numbers)


def byte_losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return -ln P(y) for each byte `y` (B, T) after those of `x`, as (B · T,)."""
    logits = model(x)
    if logits.shape != (*x.shape, 256):
        expected = (*x.shape, 256)
        raise ValueError(f"model returns shape {tuple(logits.shape)}; expected {expected}")
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")


@torch.no_grad()
def evaluate_language(
    model: nn.Module,
    text: torch.Tensor,
    *,
    batch_size: int = 64,
    device: torch.device | str | None = None,
) -> float:
    """Return the bits per byte of `text` under `model`, in evaluation mode.

    The text is cut into windows of ``model.length`` bytes that do not overlap (the last is what is
    left), so that every byte but the first is predicted once. The first byte of a window has one
    byte before it to go by, the last has all: longer windows give fewer bits.

    Parameters
    ----------
    model : nn.Module
        As in `fit_language`. Its mode is restored.
    text : torch.Tensor
        (n,) uint8, n at least 2.
    batch_size : int
        How many windows to run at a time; has no influence on the result, but for rounding.
    device : torch.device or str, optional
        Where to evaluate; default, where the model is.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work, before any work.

    Examples
    --------
    >>> bits = evaluate_language(model, data.test)  # doctest: +SKIP
    """
    check_count("batch_size", batch_size)
    device = check_device(model, device)
    length = check_length(model)
    check_text("text", text, 2)
    training, nats = model.training, 0.0
    model.to(device).eval()
    whole = (len(text) - 1) // length * length  # bytes in whole windows
    cuts = [*range(0, whole, batch_size * length), whole, len(text) - 1]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        if start < stop:
            x, y = (text[start + i : stop + i].to(device).long() for i in (0, 1))
            rows = (-1, length if stop <= whole else stop - start)
            nats += float(byte_losses(model, x.view(rows), y.view(rows)).double().sum())
    model.train(training)
    return nats / math.log(2) / (len(text) - 1)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: str, n: int, *, temperature: float = 0.0, seed: int = 0
) -> str:
    """Return `prompt` and the `n` bytes that `model` writes after it, as text.

    Parameters
    ----------
    model : nn.Module
        As in `fit_language`. It sees the last ``model.length`` bytes at a time, in evaluation mode.
    prompt : str
        At least one character.
    n : int
    temperature : float
        A byte is drawn from the softmax of ``logits / temperature``; at 0 the likeliest is taken.
    seed : int
        Decides what is drawn. The caller's own random generators are left as they were.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work, before any work.

    Examples
    --------
    >>> generate(ByteLM(32), "The ", 40)  # doctest: +SKIP
    """
    device, length = check_device(model, None), check_length(model)
    check_prompt(prompt, n, temperature)
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: everywhere alike
    training, text = model.training, encode(prompt)
    model.eval()
    for _ in range(n):
        logits = model(text[-length:].long().to(device)[None])[0, -1].cpu()  # (256,)
        if temperature == 0:
            byte = logits.argmax(0, keepdim=True)
        else:
            byte = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        text = torch.cat([text, byte.to(torch.uint8)])
    model.train(training)
    return decode(text)


def check_length(model: nn.Module) -> int:
    """Return the number of bytes that a language model reads; raise TypeError if it has none."""
    length = getattr(model, "length", None)
    if not isinstance(length, int):
        raise TypeError(f"model.length is {length!r}; expected a language model, such as ByteLM")
    return length


def check_prompt(prompt: str, n: int, temperature: float) -> None:
    """Raise TypeError or ValueError, naming the argument, for one that `generate` cannot use."""
    if not isinstance(prompt, str):
        raise TypeError(f"prompt is {type(prompt).__name__}; expected a string")
    if not prompt:
        raise ValueError("prompt is empty; expected at least one character")
    check_count("n", n)
    if not isinstance(temperature, int | float):
        raise TypeError(f"temperature is {temperature!r}; expected a number")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; expected 0 or more")
