"""Associative recall: pairs of a key and a value, and a question for each key (chapters 4 and 12).

Whoever answers must find the pair with the key that is asked for, and bring its value: what softmax
attention can do by one look. Pairs are drawn anew for each sequence, so that there is nothing to be
learned by heart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention.runtime import check_count


class Recall(NamedTuple):
    """Sequences of N pairs and N questions, all (B, N) int64.

    ``answers`` are the values of the pairs whose keys are ``asked``; question i asks for the pair
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
    """Draw sequences: different keys, any values, and all keys asked for in random order.

    Parameters
    ----------
    batch, pairs : int
        B and N.
    symbols : int
        Number of different keys, N at least, and of different values.
    device : torch.device or str, optional
        Where to draw.
    generator : torch.Generator, optional
        Where chance comes from; default, PyTorch's own.

    Returns
    -------
    Recall

    Raises
    ------
    TypeError, ValueError
        For a size that cannot be.

    Examples
    --------
    >>> drawn = draw_recall(2, 5)
    >>> bool((drawn.values.gather(1, drawn.order) == drawn.answers).all())
    True
    """
    check_recall_sizes(batch=batch, pairs=pairs, symbols=symbols)
    how: dict[str, Any] = {"device": device, "generator": generator}
    keys = torch.rand(batch, symbols, **how).argsort(1)[:, :pairs]  # all different
    values = torch.randint(symbols, (batch, pairs), **how)
    order = torch.rand(batch, pairs, **how).argsort(1)
    return Recall(keys, values, keys.gather(1, order), values.gather(1, order), order)


def check_recall_sizes(*, pairs: int, symbols: int, **sizes: int) -> None:
    """Raise TypeError or ValueError, naming it, for a size that cannot be."""
    for name, size in ({"pairs": pairs, "symbols": symbols} | sizes).items():
        check_count(name, size)
    if pairs > symbols:
        raise ValueError(f"pairs is {pairs}; expected at most {symbols}, the number of symbols")
