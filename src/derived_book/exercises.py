"""Self-checks of the exercises.

`check` compares an answer with a value, or with a function on given arguments. `check_properties`
tests properties of a correct answer. A property is a function on the page: its docstring states the
property in one sentence, and it yields each case with its error, or with whether the answer is
right. A property can also test what a task forbids: `Once` counts how many items of an iterator
are kept, and `largest_tensor` shows whether a matrix has been formed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from derived_attention.testing.cases import Largest

Property = Callable[[Any], Iterable[tuple[str, Any]]]


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
        if not callable(answer):
            raise ExerciseError(f"your answer is {type(answer).__name__}; expected a function")
        for number, arguments in enumerate(on, 1):
            case = f"case {number} of {len(on)}"
            _compare(answer(*arguments), expected(*arguments), tol, case)
    print("Correct.")


def check_properties(answer: Any, *properties: Property, tol: float = 1e-8, seed: int = 0) -> None:
    """Check an answer, property by property.

    PyTorch's random draws within the properties are the same each time, so that an answer always
    gets the same verdict; the caller's generator on the CPU stays as it was.

    Parameters
    ----------
    answer
        A function, usually; the placeholder ``...`` is not an error.
    properties
        Functions of the answer, each with a docstring that states the property. They yield pairs
        ``(case, error)``: a text with the case and its size, and either a boolean, True if the
        answer is right in this case, or the error, a number or an array.
    tol
        Largest error allowed.
    seed
        Seed of the random draws in the properties.

    Raises
    ------
    ExerciseError
        If a case is wrong, or if the answer raises an error; names the property and the case.

    Examples
    --------
    >>> def is_even(f):
    ...     "f(-x) = f(x)"
    ...     for x in (1.0, 3.0):
    ...         yield f"x = {x}", abs(f(-x) - f(x))
    >>> check_properties(lambda x: x * x, is_even)
    Correct.
    """
    if answer is ...:
        print("Not attempted yet: replace the ... above and run the cell again.")
        return
    if not properties:
        raise ValueError("properties is empty; expected at least one")
    for property_ in properties:
        _check_property(answer, property_, tol, seed)
    print("Correct.")


def check_refuses(test: str, wrong: Sequence[str], world: dict[str, Any]) -> None:
    """Make sure that a test still refuses wrong answers: if not, somebody has changed the checker.

    Parameters
    ----------
    test
        Code that checks an answer.
    wrong
        For each wrong answer the code that defines it.
    world
        The names that the code needs; they stay as they are.

    Raises
    ------
    ExerciseError
        If the test accepts one of them.

    Examples
    --------
    >>> check_refuses("check(answer, 2)", ["answer = 3"], {"check": check})
    """
    for code in wrong:
        trial = dict(world)
        exec(code, trial)
        try:
            exec(test, trial)
        except Exception:  # a wrong answer may break a check that is not made of properties
            continue
        raise ExerciseError(
            f"the check accepts an answer that is known to be wrong, {code!r}: something that it "
            "uses has been changed in this notebook"
        )


def _check_property(answer: Any, property_: Property, tol: float, seed: int) -> None:
    if not property_.__doc__:
        raise ValueError(f"property {property_.__name__} has no docstring; expected its statement")
    text, last = " ".join(property_.__doc__.split()), "before the first case"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            for last, error in property_(answer):
                _check_case(f"Failed: {text} ({last})", error, tol)
        except ExerciseError:
            raise
        except Exception as error:
            where = last if last.startswith("before") else f"after the case {last}"
            raise ExerciseError(
                f"{text}: could not be checked, {where}. {type(error).__name__}: {error}"
            ) from error
        if last == "before the first case":
            raise ValueError(f"property {property_.__name__} yields no case; expected at least one")


def _check_case(place: str, error: Any, tol: float) -> None:
    value = np.asarray(_numpy(error))
    if not value.size:
        raise ExerciseError(f"{place}: the answer is empty; expected numbers to compare")
    if value.dtype == bool:
        if not value.all():
            raise ExerciseError(place)
        return
    size = float(np.max(np.abs(_array(error, place))))
    if not size <= tol:
        raise ExerciseError(f"{place}: it is off by {size:.2g}; expected at most {tol:.0e}")


class Once:
    """An iterator that makes tensors one by one, and counts how many are alive at once.

    Parameters
    ----------
    make : callable
        ``make(i)`` returns the i-th item: a tensor, or a tuple with tensors.
    n : int
        Number of items.

    Attributes
    ----------
    kept : int
        The most tensors that were alive at once, the newest item's included.
    """

    def __init__(self, make: Callable[[int], Any], n: int) -> None:
        self._items, self.kept = map(make, range(n)), 0
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        tensors = (x for x in tree_leaves(item) if isinstance(x, torch.Tensor))
        self._alive = [x for x in self._alive if x() is not None]
        self._alive += map(weakref.ref, tensors)
        self.kept = max(self.kept, len(self._alive))
        return item


def largest_tensor(function: Callable[..., Any], *args: Any, **keywords: Any) -> int:
    """Return the number of elements of the largest tensor that any operation in a call returns.

    Tensors inside PyTorch's own attention do not count: whether its kernel forms the matrix of
    weights depends on the number of dimensions, on widths and on masks.
    """
    with Largest() as seen, _AttentionAsOne(seen):
        function(*args, **keywords)
    return seen.numel


class _AttentionAsOne(TorchFunctionMode):
    """Let a record of sizes take PyTorch's own attention for one operation."""

    def __init__(self, seen: Largest) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, out = self.seen.numel, func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.seen.numel = max(before, out.numel())
        return out


def _compare(answer: Any, expected: Any, tol: float, place: str) -> None:
    if isinstance(expected, tuple):
        if not isinstance(answer, tuple) or len(answer) != len(expected):
            raise ExerciseError(f"{place} is {answer!r}; expected a tuple of {len(expected)}")
        for part, pair in enumerate(zip(answer, expected, strict=True), 1):
            _compare(*pair, tol, f"{place}, part {part}")
        return
    if isinstance(expected, (bool, str)):
        if getattr(answer, "ndim", 0) > 0 or answer != expected:
            raise ExerciseError(f"{place} is {answer!r}; that is not right")
        return
    given, correct = _array(answer, place), _array(expected, "expected")
    if given.shape != correct.shape:
        raise ExerciseError(f"{place} has shape {given.shape}; expected {correct.shape}")
    with np.errstate(invalid="ignore"):
        errors = np.abs(given - correct) / np.maximum(1, np.abs(correct))
    error = np.max(np.where(given == correct, 0.0, errors), initial=0.0)  # ∞ is right where it is
    if not error <= tol:
        raise ExerciseError(f"{place} has error {error:.2e}; expected at most {tol:.0e}")


def _numpy(value: Any) -> Any:
    """Return a tensor as an array; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu().resolve_conj().resolve_neg()
    return (value.double() if value.dtype == torch.bfloat16 else value).numpy()


def _array(value: Any, place: str) -> np.ndarray:
    value = _numpy(value)
    try:
        array = np.asarray(value)
        # float64 would make NaN of None, a number of "1", and the real part of 1 + 2j.
        no_number = (type(None), str, complex)
        objects = array.flat if array.dtype.hasobject else ()
        if array.dtype.kind in "cSU" or any(isinstance(x, no_number) for x in objects):
            raise TypeError("not a real number")
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ExerciseError(f"{place} is {value!r}; expected a number or an array") from error
