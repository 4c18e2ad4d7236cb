"""Self-checks of the exercises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class ExerciseError(AssertionError):
    """A wrong answer."""


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
        A number, an array, a boolean, a string, a tuple of these, or a function; the placeholder
        ``...`` for an exercise that was not attempted, which is not an error.
    expected
        The correct value; with `on`, a function that computes it.
    on
        Argument tuples on which the two functions are compared.
    tol
        Largest difference allowed, relative to ``max(1, |expected|)``.

    Raises
    ------
    ExerciseError
        If the answer is wrong; names the tuple of arguments or the part of the answer.
    """
    if answer is ...:
        print("Not attempted yet: replace the ... above and run the cell again.")
        return
    if on is None:
        _compare(answer, expected, tol, "your answer")
    else:
        if not isinstance(answer, Callable):  # type: ignore[arg-type]
            raise ExerciseError(f"your answer is {type(answer).__name__}; expected a function")
        for number, arguments in enumerate(on, 1):
            case = f"case {number} of {len(on)}"
            _compare(answer(*arguments), expected(*arguments), tol, case)
    print("Correct.")


def _compare(answer: Any, expected: Any, tol: float, place: str) -> None:
    if isinstance(expected, tuple):
        if not isinstance(answer, tuple) or len(answer) != len(expected):
            raise ExerciseError(f"{place} is {answer!r}; expected a tuple of {len(expected)}")
        for part, pair in enumerate(zip(answer, expected, strict=True), 1):
            _compare(*pair, tol, f"{place}, part {part}")
        return
    if isinstance(expected, (bool, str)):
        if answer != expected:
            raise ExerciseError(f"{place}: {answer!r} is wrong")
        return
    given, correct = _array(answer, place), _array(expected, "expected")
    if given.shape != correct.shape:
        raise ExerciseError(f"{place} has shape {given.shape}; expected {correct.shape}")
    error = np.max(np.abs(given - correct) / np.maximum(1, np.abs(correct)), initial=0.0)
    if not error <= tol:
        raise ExerciseError(f"{place} has error {error:.2e}; expected at most {tol:.0e}")


def _array(value: Any, place: str) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ExerciseError(f"{place} is {value!r}; expected a number or an array") from error
