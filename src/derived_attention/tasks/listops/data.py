"""ListOps: expressions of lists to be evaluated, generated as in the Long Range Arena (chapter 8).

``[MAX 1 [MIN 2 9] 0]`` is 2. The operators are MIN, MAX, MED (the median, rounded down) and SM (the
sum modulo 10). A node is an operator with probability 1/4, until the greatest depth, and else a
digit; an operator has from 2 to `max_args` arguments, each number as likely; sequences that are too
short or too long are thrown away [Nangia2018], [Tay2021].

Its answers can often be guessed, best from the operator at the root, which is the first token:
`prefix_rule` says how often. A model that reads the expression must do better.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from derived_attention.runtime import check_count, check_seed
from derived_attention.tasks.series.data import SeriesSplit

TOKENS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")  # token 0 is padding
FIRST_DIGIT, FIRST_OPERATOR, CLOSE = 1, 11, 15
OPERATOR_PROBABILITY = 0.25
MOST_FAILURES = 10_000  # draws in a row without a new sequence, until we say that there is none

# Keyword arguments of `make_listops`.
LRA: dict[str, Any] = dict(
    train=96_000, validation=2_000, test=2_000, min_length=500, max_length=2_000
)
SHORT: dict[str, Any] = dict(train=4_000, validation=1_000, test=1_000, min_length=8, max_length=32)


@dataclasses.dataclass(frozen=True)
class ListOpsData:
    """Sequences of tokens and the values of their expressions.

    Attributes
    ----------
    train, validation, test : derived_attention.tasks.series.data.SeriesSplit
        `x` (n, T) holds numbers of `TOKENS`, 0 where padded; `y` (n,) the values, 0 to 9.
    vocabulary, classes, length : int
        Number of tokens with padding, 10, and T.
    """

    train: SeriesSplit
    validation: SeriesSplit
    test: SeriesSplit
    vocabulary: int
    classes: int
    length: int


def make_listops(
    train: int,
    validation: int,
    test: int,
    *,
    min_length: int,
    max_length: int,
    max_depth: int = 10,
    max_args: int = 10,
    seed: int = 0,
) -> ListOpsData:
    """Generate ListOps: no two sequences are equal, in one split or in two.

    ``make_listops(**LRA)`` has the settings of the Long Range Arena, ``make_listops(**SHORT)`` is
    small. (The arena's first loader deleted the brackets, and then an expression may have several
    values: ``MAX 1 MIN 2 9 0`` is 2 if MIN ends at 9, and 1 if it ends at 0.)

    Parameters
    ----------
    train, validation, test : int
        Number of sequences.
    min_length, max_length : int
        ``min_length < tokens < max_length``, where ``]`` counts, as in the original.
    max_depth, max_args : int
        Greatest depth, where the root has depth 1, and most arguments of an operator.
    seed : int

    Returns
    -------
    ListOpsData
        Its ``length`` is `max_length`, to which all sequences are padded.

    Raises
    ------
    TypeError, ValueError
        For a size that cannot be; if there are not enough different sequences of these lengths.

    Examples
    --------
    >>> data = make_listops(200, 0, 100, min_length=3, max_length=16)
    >>> data.train.x.shape, data.vocabulary
    (torch.Size([200, 16]), 16)
    """
    _check_settings(train, validation, test, min_length, max_length, max_depth, max_args, seed)
    sizes = [train, validation, test]
    x = torch.zeros(sum(sizes), max_length, dtype=torch.int64)
    y = torch.zeros(sum(sizes), dtype=torch.int64)
    drawn = _expressions(min_length, max_length, max_depth, max_args, seed)
    for i, (tokens, value) in enumerate(_different(drawn, sum(sizes))):
        x[i, : len(tokens)] = torch.tensor(tokens)
        y[i] = value
    parts = zip(x.split(sizes), y.split(sizes), strict=True)
    learn, choose, judge = (SeriesSplit(x, x == 0, y) for x, y in parts)
    return ListOpsData(learn, choose, judge, vocabulary=len(TOKENS), classes=10, length=max_length)


def evaluate_expression(tokens: Iterable[int]) -> int:
    """Return the value of an expression, from its tokens (with brackets) alone.

    Raises
    ------
    ValueError
        If the tokens, padding left out, are not one expression.

    Examples
    --------
    >>> evaluate_expression([TOKENS.index(t) for t in "[MAX 1 [MIN 2 9 ] 0 ]".split()])
    2
    """
    tokens = [int(token) for token in tokens]
    lists: list[list[int]] = [[]]
    for token in tokens:
        if FIRST_DIGIT <= token < FIRST_OPERATOR:
            lists[-1].append(token - FIRST_DIGIT)
        elif FIRST_OPERATOR <= token < CLOSE:
            lists.append([token])
        elif token == CLOSE and len(lists) > 1 and len(lists[-1]) > 1:
            operator, *values = lists.pop()
            lists[-1].append(int(_FUNCTIONS[TOKENS[operator]](values)))
        elif token != 0:
            break
    else:
        if len(lists) == 1 and len(lists[0]) == 1:
            return lists[0][0]
    text = " ".join(TOKENS[t] if 0 <= t < len(TOKENS) else str(t) for t in tokens if t)
    raise ValueError(f"tokens are {text!r}; expected one expression with its brackets")


_FUNCTIONS: dict[str, Callable[[list[int]], Any]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": np.median,
    "[SM": lambda values: sum(values) % 10,
}


def prefix_rule(train: SeriesSplit, test: SeriesSplit, tokens: int) -> float:
    """Return the accuracy on `test` of a rule that reads the first few `tokens` only.

    It answers what is most frequent in `train` after the same first tokens, or, where there are
    none like them, what is most frequent. 0 tokens: the majority. 1 token: the root's operator.

    Raises
    ------
    TypeError, ValueError
        If `tokens` is not a whole number, at least 0; if `train` or `test` is empty.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"tokens is {tokens!r}; expected a whole number, at least 0")
    for name, split in (("train", train), ("test", test)):
        if not len(split):
            raise ValueError(f"{name} is empty; expected at least one sequence")
    counts: dict[tuple[int, ...], Counter[int]] = {}
    everything = Counter(train.y.tolist())
    for prefix, value in _prefixes(train, tokens):
        counts.setdefault(prefix, Counter())[value] += 1
    correct = 0
    for prefix, value in _prefixes(test, tokens):
        answer = counts.get(prefix, everything).most_common(1)[0][0]
        correct += answer == value
    return correct / len(test)


def _prefixes(split: SeriesSplit, tokens: int) -> Iterator[tuple[tuple[int, ...], int]]:
    prefixes = map(tuple, split.x[:, :tokens].tolist())
    return zip(prefixes, split.y.tolist(), strict=True)


# --- The generator --------------------------------------------------------------------------------

Expression = tuple[list[int], int]  # tokens and value


class _TooLong(Exception):
    """Ends an expression that has become too long to be kept."""


def _expressions(
    min_length: int, max_length: int, max_depth: int, max_args: int, seed: int
) -> Iterator[Expression | None]:
    """Draw expressions without end; None for one that is thrown away.

    The root is always an operator. In the original it may be a digit, but that is too short.
    """
    draw = _uniform(np.random.default_rng(seed)).__next__
    tokens: list[int] = []

    def grow(depth: int) -> int:
        if depth > 1 and (depth == max_depth or draw() > OPERATOR_PROBABILITY):
            digit = int(10 * draw())
            tokens.append(FIRST_DIGIT + digit)
            return digit
        if len(tokens) >= max_length:
            raise _TooLong
        operator = int(4 * draw())
        tokens.append(FIRST_OPERATOR + operator)
        values = [grow(depth + 1) for _ in range(2 + int((max_args - 1) * draw()))]
        tokens.append(CLOSE)
        return _apply(operator, values)

    while True:
        tokens = []
        try:
            value = grow(1)
        except _TooLong:
            yield None
            continue
        yield (tokens, value) if min_length < len(tokens) < max_length else None


def _apply(operator: int, values: list[int]) -> int:
    """Apply MIN, MAX, MED or SM (0 to 3)."""
    if operator == 3:
        return sum(values) % 10
    values.sort()
    n = len(values)
    return (values[0], values[-1], (values[(n - 1) // 2] + values[n // 2]) // 2)[operator]


def _uniform(generator: np.random.Generator) -> Iterator[float]:
    """Draw numbers from [0, 1), many at a time: one by one NumPy is ten times slower."""
    while True:
        yield from generator.random(1 << 14).tolist()


def _different(drawn: Iterator[Expression | None], n: int) -> Iterator[Expression]:
    """Yield the first n different ones."""
    seen: set[bytes] = set()
    failures = 0
    while len(seen) < n:
        expression = next(drawn)
        key = b"" if expression is None else bytes(expression[0])
        if expression is None or key in seen:
            failures += 1
            if failures > MOST_FAILURES:
                raise ValueError(
                    f"train + validation + test is {n}; found only {len(seen)} different "
                    "expressions between min_length and max_length; expected enough of them"
                )
            continue
        failures = 0
        seen.add(key)
        yield expression


def _check_settings(
    train: int,
    validation: int,
    test: int,
    min_length: int,
    max_length: int,
    max_depth: int,
    max_args: int,
    seed: int,
) -> None:
    for name, size in (("validation", validation), ("test", test)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} is {size!r}; expected an integer")
        if size < 0:
            raise ValueError(f"{name} is {size}; expected at least 0")
    check_count("train", train)
    check_count("min_length", min_length)
    for name, value, least in (
        ("max_length", max_length, min_length + 2),
        ("max_depth", max_depth, 2),
        ("max_args", max_args, 2),
    ):
        check_count(name, value)
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
    check_seed(seed)
