"""Problems for the kernels in which any two of their properties meet, and whether bits repeat.

`derived_attention.common.kernel_cases` says what a problem is, and compares a kernel with PyTorch's
form on it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from derived_attention.common.kernel_cases import DTYPES, PATTERNS, Trial, inputs, results


def repeats(trial: Trial, times: int, device: Any = "cpu") -> bool:
    """Return whether a kernel gives the same bits every time, whatever was in its memory before."""
    tensors, options = inputs(trial, device)
    first, *others = (results(trial, tensors, options | {"fused": True}) for _ in range(times))
    return all(torch.equal(x[name], first[name]) for x in others for name in first)


def pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield choices of a value for each factor, so that any two values meet at least once.

    The first choice that is left decides two factors, and each other one takes the value that meets
    most of those decided for the first time.
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
                # Of equals not always the first, which would be left with all the rest.
                row[name] = max(values, key=lambda x: (met[x], (x + turn) % len(values)))  # noqa: B023
        left -= _met(names, row)
        turn += 1
        yield {name: factors[name][x] for name, x in row.items()}


def _met(names: Sequence[str], row: Mapping[str, int]) -> set[Any]:
    return set(itertools.combinations([(x, row[x]) for x in names if x in row], 2))


def design(length: Callable[[Trial], int], widths: Sequence[tuple[int, int]]) -> Iterator[Trial]:
    """Yield problems for every kernel, in which any two properties meet.

    Parameters
    ----------
    length : callable
        Gives the larger of N and M for what else a trial is: tiles of wide numbers are small.
    widths : sequence of pairs
        D and Dv.
    """
    common: dict[str, Any] = {"dtype": tuple(DTYPES), "widths": widths, "strided": (False, True)}
    common |= {"shares": ((1, 0.9), (0.3, 1), (1, 0.5))}  # N and M of the length
    sparse = {"kernel": PATTERNS, "mask": ("", "causal", "keys")}
    linear = {"kernel": ("linear", "mlk"), "mask": ("causal",), "R": (2, 3)}
    linear |= {"features": (False, True), "own": (False, True)}
    for factors in (common | linear, common | sparse):
        for row in pairs(factors):
            (D, DV), (n, m) = row.pop("widths"), row.pop("shares")
            D, DV = min(D, 128), min(DV, 128)  # the widest
            if "features" in row and row["dtype"] != "bf16":  # else many parts of 16 values
                DV = min(DV, 24)
            trial = Trial(**row, D=D, DV=DV, B=1 + row["strided"], H=1 + row.get("own", False))
            N, M = (int(length(trial) * x) | 1 for x in (n, m))
            yield dataclasses.replace(trial, N=N, M=M)
