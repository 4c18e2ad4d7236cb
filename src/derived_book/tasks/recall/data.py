"""Associative recall: pairs of a key and a value, and a question for each key (chapters 4 and 12).

The answer is the value of the pair whose key is asked for, which one layer of softmax attention can
look up. Each sequence has new pairs, so that a model cannot memorise them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_book.runtime import check_count


class Recall(NamedTuple):
    """Sequences of N pairs and N questions, all (B, N) int64.

    `answers` are the values of the pairs whose keys are `asked`; question i asks for pair
    ``order[:, i]``.
    """

    keys: Tensor
    values: Tensor
    asked: Tensor
    answers: Tensor
    order: Tensor


def draw_recall(
    batch: int,
    pairs: int,
    *,
    symbols: int = 64,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Recall:
    """Draw sequences of distinct keys with any values; each key is asked for, in random order.

    Parameters
    ----------
    batch, pairs : int
        B and N.
    symbols : int
        Number of different keys, at least N, and of different values.
    device : torch.device or str, optional
    generator : torch.Generator, optional
        Default, the global generator of PyTorch.

    Examples
    --------
    >>> drawn = draw_recall(2, 5)
    >>> bool((drawn.values.gather(1, drawn.order) == drawn.answers).all())
    True
    """
    for name, size in (("batch", batch), ("pairs", pairs), ("symbols", symbols)):
        check_count(name, size)
    check_pairs(pairs, symbols)
    options: dict[str, Any] = {"device": device, "generator": generator}
    keys = torch.rand(batch, symbols, **options).argsort(1)[:, :pairs]  # all different
    values = torch.randint(symbols, (batch, pairs), **options)
    order = torch.rand(batch, pairs, **options).argsort(1)
    return Recall(keys, values, keys.gather(1, order), values.gather(1, order), order)


def check_pairs(pairs: int, symbols: int) -> None:
    """Raise ValueError unless there are enough symbols for distinct keys."""
    if pairs > symbols:
        raise ValueError(f"pairs is {pairs}; expected at most {symbols}, the number of symbols")
