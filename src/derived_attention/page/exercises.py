"""Self-checks of the exercises: they need nothing but this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class ExerciseError(AssertionError):
    """An answer that is not right yet."""


def check(
    answer: Any,
    expected: Any,
    *,
    on: Sequence[tuple] | None = None,
    tol: float = 1e-8,
) -> None:
    """Compare your answer with the expected one.

    Parameters
    ----------
    answer
        A number, an array, a truth value, a string, a tuple of these, or a function. The
        placeholder ``...`` means that you have not tried yet, which is not an error.
    expected
        The right value; with `on`, a function that computes it.
    on
        Argument tuples on which the two functions are compared.
    tol
        Largest difference allowed, relative to ``max(1, |expected|)``.

    Raises
    ------
    ExerciseError
        With what was expected, what you gave and, for a function, on which arguments.
    """
    if answer is ...:
        print("Not attempted yet: replace the ... above and run the cell again.")
        return
    if on is None:
        _compare(answer, expected, tol, "your answer")
    else:
        if not isinstance(answer, Callable):  # type: ignore[arg-type]
            raise ExerciseError(f"your answer must be a function, got {type(answer).__name__}")
        for number, arguments in enumerate(on, 1):
            place = f"case {number} of {len(on)}"
            _compare(answer(*arguments), expected(*arguments), tol, place)
    print("Correct.")


def _compare(answer: Any, expected: Any, tol: float, place: str) -> None:
    if isinstance(expected, tuple):
        if not isinstance(answer, tuple) or len(answer) != len(expected):
            raise ExerciseError(f"{place}: expected a tuple of {len(expected)}, got {answer!r}")
        for part, (mine, theirs) in enumerate(zip(answer, expected, strict=True), 1):
            _compare(mine, theirs, tol, f"{place}, part {part}")
        return
    if isinstance(expected, (bool, str)):
        if answer != expected:
            raise ExerciseError(f"{place}: {answer!r} is not right")
        return
    mine, theirs = _array(answer, place), _array(expected, "expected")
    if mine.shape != theirs.shape:
        raise ExerciseError(f"{place}: shape {mine.shape}, expected {theirs.shape}")
    error = np.max(np.abs(mine - theirs) / np.maximum(1, np.abs(theirs)), initial=0.0)
    if not error <= tol:
        raise ExerciseError(f"{place}: off by {error:.2e}, allowed {tol:.0e}")


def _array(value: Any, place: str) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ExerciseError(f"{place}: {value!r} is not a number or an array") from error
