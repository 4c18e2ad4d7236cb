"""ListOps: expressions of lists to be evaluated, generated as in the Long Range Arena.

``[MAX 1 [MIN 2 9] 0]`` is 2. The operators are MIN, MAX, MED (the median, rounded down) and SM (the
sum modulo 10). A node above the greatest depth is an operator with probability 1/4, and else a
digit; the number of arguments is uniform from 2 to `max_args`; sequences that are too short or too
long are discarded [Nangia2018], [Tay2021].

The answer can often be guessed from the operator at the root, which is the first token:
`prefix_rule` returns how often. A model that reads the expression must do better.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from derived_attention.common.checks import check_count
from derived_book.runtime import check_seed
from derived_book.tasks.series.data import SeriesSplit

TOKENS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")  # token 0 is padding
FIRST_DIGIT, FIRST_OPERATOR, CLOSE = 1, 11, 15
OPERATOR_PROBABILITY = 0.25
MOST_FAILURES = 10_000  # draws in a row without a new sequence, before an error


@dataclasses.dataclass(frozen=True)
class ListOpsData:
    """Sequences of tokens and the values of their expressions.

    Attributes
    ----------
    train, validation, test : derived_book.tasks.series.data.SeriesSplit
        `x` (n, T) holds indices of `TOKENS`, 0 where padded; `y` (n,) the values, 0 to 9.
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
    """Generate ListOps; no two sequences are equal, within a split or between splits.

    The Long Range Arena has 96,000, 2,000 and 2,000 sequences with ``min_length=500`` and
    ``max_length=2000``. (Its first loader deleted the brackets, which made values ambiguous:
    ``MAX 1 MIN 2 9 0`` is 2 if MIN ends at 9, and 1 if it ends at 0.)

    Parameters
    ----------
    train, validation, test : int
        Number of sequences.
    min_length, max_length : int
        ``min_length < tokens < max_length``, where ``]`` counts, as in the original. Sequences are
        padded to `max_length`.
    max_depth, max_args : int
        Greatest depth, where the root has depth 1, and most arguments of an operator.
    seed : int

    Raises
    ------
    TypeError, ValueError
        For an invalid size; if there are not enough different sequences of these lengths.

    Examples
    --------
    >>> data = make_listops(200, 0, 100, min_length=3, max_length=16)
    >>> data.train.x.shape, data.vocabulary
    (torch.Size([200, 16]), 16)
    """
    sizes = [train, validation, test]
    for name, size, least in zip(("train", "validation", "test"), sizes, (1, 0, 0), strict=True):
        check_count(name, size, least)
    check_count("min_length", min_length, 1)
    check_count("max_length", max_length, min_length + 2)
    check_count("max_depth", max_depth, 2)
    check_count("max_args", max_args, 2)
    check_seed(seed)
    x = torch.zeros(sum(sizes), max_length, dtype=torch.int64)
    y = torch.zeros(sum(sizes), dtype=torch.int64)
    drawn = _expressions(min_length, max_length, max_depth, max_args, seed)
    for i, (tokens, value) in enumerate(_different(drawn, sum(sizes))):
        x[i, : len(tokens)] = torch.tensor(tokens)
        y[i] = value
    parts = zip(x.split(sizes), y.split(sizes), strict=True)
    splits = [SeriesSplit(x, x == 0, y) for x, y in parts]
    return ListOpsData(splits[0], splits[1], splits[2], len(TOKENS), 10, max_length)


def evaluate_expression(tokens: Iterable[int]) -> int:
    """Return the value of an expression from its tokens, brackets included.

    Tokens that are not one expression, padding aside, raise ValueError.

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
            lists[-1].append(apply(operator - FIRST_OPERATOR, values))
        elif token != 0:
            break
    else:
        if len(lists) == 1 and len(lists[0]) == 1:
            return lists[0][0]
    text = " ".join(TOKENS[t] if 0 <= t < len(TOKENS) else str(t) for t in tokens if t)
    raise ValueError(f"tokens are {text!r}; expected one expression with its brackets")


def apply(operator: int, values: list[int]) -> int:
    """Return MIN, MAX, MED or SM (0 to 3) of the values, which it sorts."""
    if operator == 3:
        return sum(values) % 10
    values.sort()
    n = len(values)
    return (values[0], values[-1], (values[(n - 1) // 2] + values[n // 2]) // 2)[operator]


def prefix_rule(train: SeriesSplit, test: SeriesSplit, tokens: int) -> float:
    """Return the accuracy on `test` of a rule that reads the first few `tokens` only.

    Its answer is the most frequent value in `train` after the same first tokens, or of all `train`
    if there are none. 0 tokens give the majority; 1 token is the operator of the root.
    """
    check_count("tokens", tokens, 0)
    for name, split in (("train", train), ("test", test)):
        if not len(split):
            raise ValueError(f"{name} is empty; expected at least one sequence")
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for prefix, value in _prefixes(train, tokens):
        counts.setdefault(prefix, Counter())[value] += 1
    total = Counter(train.y.tolist())
    answers = (
        (counts.get(prefix, total).most_common(1)[0][0], value)
        for prefix, value in _prefixes(test, tokens)
    )
    return sum(answer == value for answer, value in answers) / len(test)


def _prefixes(split: SeriesSplit, tokens: int) -> Iterator[tuple[tuple[int, ...], int]]:
    prefixes = map(tuple, split.x[:, :tokens].tolist())
    return zip(prefixes, split.y.tolist(), strict=True)


# --- The generator --------------------------------------------------------------------------------

Expression = tuple[list[int], int]  # tokens and value


class _TooLong(Exception):
    """Ends an expression that is too long."""


def _expressions(
    min_length: int, max_length: int, max_depth: int, max_args: int, seed: int
) -> Iterator[Expression | None]:
    """Draw expressions without end; None for one that is discarded.

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
        return apply(operator, values)

    while True:
        tokens = []
        try:
            value = grow(1)
        except _TooLong:
            yield None
            continue
        yield (tokens, value) if min_length < len(tokens) < max_length else None


def _uniform(generator: np.random.Generator) -> Iterator[float]:
    """Draw numbers from [0, 1), many at a time: single draws of NumPy are ten times slower."""
    while True:
        yield from generator.random(1 << 14).tolist()


def _different(drawn: Iterator[Expression | None], n: int) -> Iterator[Expression]:
    """Yield the first n different ones."""
    seen: set[bytes] = set()
    failures = 0
    while len(seen) < n:
        expression = next(drawn)
        if expression is not None and (key := bytes(expression[0])) not in seen:
            failures = 0
            seen.add(key)
            yield expression
        elif (failures := failures + 1) > MOST_FAILURES:
            raise ValueError(
                f"train + validation + test is {n}; found only {len(seen)} different expressions "
                "between min_length and max_length; expected fewer sequences, or other lengths"
            )
