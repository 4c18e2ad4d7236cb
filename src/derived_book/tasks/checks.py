"""Checks that the tasks share: an error names the argument, its value and what is expected."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from derived_book.runtime import may_ask

T = TypeVar("T")
Sizes = Sequence[int | str]  # of a shape: numbers, and names of sizes that may be any


def check_type(name: str, value: Any, kind: type[T], expected: str) -> T:
    """Return `value`; raise TypeError unless it is of a kind, which `expected` describes."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {type(value).__name__}; expected {expected}")
    return value


def check_name(name: str, value: str, known: Iterable[str]) -> None:
    """Raise TypeError or ValueError unless `value` is one of the names known."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; expected a string")
    if value not in (names := list(known)):
        expected = ("one of " if len(names) > 1 else "") + ", ".join(map(repr, names))
        raise ValueError(f"{name} is {value!r}; expected {expected}")


def check_number(
    name: str, value: float, least: float = -math.inf, below: float = math.inf
) -> None:
    """Raise TypeError or ValueError unless `value` is a finite number, least <= value < below."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; expected a number")
    if not (math.isfinite(value) and least <= value < below):
        limits = "" if math.isinf(least) else f", at least {least}"
        limits += "" if math.isinf(below) else f" and below {below}"
        raise ValueError(f"{name} is {value}; expected a finite number{limits}")


def check_tensor(name: str, x: Tensor, kind: str, shape: Sizes) -> None:
    """Raise TypeError or ValueError unless `x` is a tensor of a kind and a shape.

    `kind` is ``"floats"``, or a type such as ``"int64"``. A name in the shape fits any size.
    """
    check_type(name, x, Tensor, "a tensor")
    right = x.is_floating_point() if kind == "floats" else x.dtype == getattr(torch, kind)
    if not right or not has_shape(x, shape):
        actual = f"{x.dtype} of shape {tuple(x.shape)}"
        raise ValueError(f"{name} is {actual}; expected {kind} of shape {show_shape(shape)}")


def check_shape(name: str, x: Tensor, shape: Sizes) -> None:
    """Raise ValueError unless `x` has the shape; a name in it fits any size."""
    if not has_shape(x, shape):
        expected = show_shape(shape)
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {expected}")


def check_output(outputs: Tensor, shape: Sizes) -> None:
    """Raise ValueError unless a model's outputs have the shape."""
    if not has_shape(outputs, shape):
        expected = show_shape(shape)
        raise ValueError(f"model returns shape {tuple(outputs.shape)}; expected {expected}")


def has_shape(x: Tensor, shape: Sizes) -> bool:
    """Return whether `x` has the shape, in which a name fits any size."""
    pairs = zip(x.shape, shape, strict=False)
    return x.ndim == len(shape) and all(isinstance(n, str) or m == n for m, n in pairs)


def show_shape(shape: Sizes) -> str:
    """Write a shape as Python does: ``(n, 6, 3)``."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def check_filled(name: str, x: Tensor) -> None:
    """Raise ValueError if `x` is empty."""
    if x.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected one that is not empty")


def check_range(
    name: str, x: Tensor, below: int | None, what: str = "integers", least: int = 0
) -> None:
    """Raise ValueError unless least <= x < below for all integers of `x`; None sets no limit.

    On a GPU it waits for the device, except in `runtime.skip_range_checks`, where it is skipped.
    """
    if not may_ask(x):
        return
    if x.numel() and (x.min() < least or (below is not None and x.max() >= below)):
        rule = f"{what} {least} <= x" + ("" if below is None else f" < {below}")
        raise ValueError(f"{name} holds {int(x.min())} to {int(x.max())}; expected {rule}")


def check_series(
    x: Tensor,
    padding: Tensor | None,
    of: str = "",
    steps: int | None = None,
    channels: int | None = None,
) -> None:
    """Raise TypeError or ValueError unless x is floats (n, T, C) and padding None or bool (n, T).

    `steps` and `channels` are what T and C have to be; `of` goes before the names in a message.
    """
    check_tensor(f"{of}x", x, "floats", ("n", steps or "T", channels or "C"))
    check_padding(x, padding, of)


def check_tokens(
    x: Tensor,
    padding: Tensor | None,
    of: str = "",
    steps: int | None = None,
    vocabulary: int | None = None,
) -> None:
    """Raise TypeError or ValueError unless x is int64 (n, T) and padding None or bool (n, T).

    `steps` is what T has to be, and every token is at least 0 and less than `vocabulary`.
    """
    check_tensor(f"{of}x", x, "int64", ("n", steps or "T"))
    check_range(f"{of}x", x, vocabulary, "tokens")
    check_padding(x, padding, of)


def check_padding(x: Tensor, padding: Tensor | None, of: str = "") -> None:
    """Raise TypeError or ValueError unless `padding` is None, or bool (n, T) for x (n, T, ...)."""
    if padding is not None:
        check_type(f"{of}padding", padding, Tensor, "a tensor or None")
        check_tensor(f"{of}padding", padding, "bool", x.shape[:2])


def check_no_padding(padding: Tensor | None, who: str) -> None:
    """Raise ValueError if there is any padding, which `who` cannot have."""
    if padding is not None:
        raise ValueError(f"padding is given; expected None, as {who} has no padding")


def check_length(name: str, content: str, length: int, model: nn.Module) -> None:
    """Raise ValueError if what a batch has, named by `content`, is longer than a model reads."""
    most: Any = model.length
    if length > most:
        expected = f"at most {most}, the length of the model"
        raise ValueError(f"{name} has {content}; expected {expected}")


@contextlib.contextmanager
def needs(package: str, install: str = 'pip install "derived-attention[data]"') -> Iterator[None]:
    """Let imports of a package that is not there end in an error that says how to install it."""
    try:
        yield
    except ImportError as error:
        raise ModuleNotFoundError(f"{package} is not installed ({install})") from error
