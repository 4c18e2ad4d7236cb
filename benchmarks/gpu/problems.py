"""Problems for the kernels that cover every pair of property values, and a test of their bits.

`derived_attention.common.kernel_cases` defines a problem, and compares a kernel with PyTorch's form
on it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from derived_attention.common.kernel_cases import DTYPES, PATTERNS, Trial, inputs, results


def repeats(trial: Trial, times: int, device: Any = "cpu") -> bool:
    """Return whether a kernel returns the same bits in all of `times` runs."""
    tensors, options = inputs(trial, device)
    first, *others = (results(trial, tensors, options | {"fused": True}) for _ in range(times))
    return all(torch.equal(x[name], first[name]) for x in others for name in first)


def pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield choices of a value for each factor, until each pair of values has occurred together.

    The first pair that is left decides two factors. Each other factor takes the value that forms
    the most new pairs with the values chosen before it.
    """
    names = list(factors)
    left = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    turn = 0
    while left:
        row = dict(min(left))
        for name in names:
            if name not in row:
                values = range(len(factors[name]))
                met = [len(left & _met(names, {**row, name: x})) for x in values]
                # Ties rotate, because otherwise the first value would be chosen in all of them.
                row[name] = max(values, key=lambda x: (met[x], (x + turn) % len(values)))  # noqa: B023
        left -= _met(names, row)
        turn += 1
        yield {name: factors[name][x] for name, x in row.items()}


def _met(names: Sequence[str], row: Mapping[str, int]) -> set[Any]:
    return set(itertools.combinations([(x, row[x]) for x in names if x in row], 2))


def design(length: Callable[[Trial], int], widths: Sequence[tuple[int, int]]) -> Iterator[Trial]:
    """Yield problems for all kernels but fla-core's that cover every pair of property values.

    Parameters
    ----------
    length : callable
        Returns the larger of N and M for a trial, as tiles of wide dtypes are small.
    widths : sequence of pairs
        D and Dv.
    """
    common: dict[str, Any] = {"dtype": tuple(DTYPES), "widths": widths, "strided": (False, True)}
    common |= {"shares": ((1, 0.9), (0.3, 1), (1, 0.5))}  # N and M as shares of the length
    sparse = {"kernel": PATTERNS, "mask": ("", "causal", "keys")}
    linear = {"kernel": ("linear", "mlk"), "mask": ("causal",), "R": (2, 3)}
    linear |= {"features": (False, True), "own": (False, True)}
    for factors in (common | linear, common | sparse):
        for row in pairs(factors):
            (D, DV), (n, m) = row.pop("widths"), row.pop("shares")
            D, DV = min(D, 128), min(DV, 128)  # the largest width of the kernels
            if "features" in row and row["dtype"] != "bf16":  # wider values need many parts of 16
                DV = min(DV, 24)
            trial = Trial(**row, D=D, DV=DV, B=1 + row["strided"], H=1 + row.get("own", False))
            N, M = (int(length(trial) * x) | 1 for x in (n, m))
            yield dataclasses.replace(trial, N=N, M=M)
