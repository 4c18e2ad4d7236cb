"""Notice in the losses of any training loop that a run has collapsed after it had learned.

`watch_losses` notes each loss that a loop differentiates, and changes nothing. `has_collapsed`
decides from these losses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

WINDOWS = 20  # the losses are smoothed by the medians of so many equal parts of the run
CLEAR_NOISE = 9.0  # standard errors, and
CLEAR_SHARE = 0.05  # share of the first loss, above which a rise is not noise


@contextmanager
def watch_losses() -> Iterator[list[float]]:
    """Yield a list to which each ``loss.backward()`` in the block appends its loss.

    The losses are those of scalar tensors, in the order of the calls: several for a step that
    evaluates its loss, or accumulates its gradient, several times. A block inside another one keeps
    its losses to itself, so that a second training in a run can be left out.
    """
    losses: list[float] = []
    before = torch.Tensor.backward
    backward = getattr(before, "__wrapped__", before)  # PyTorch's, in a block in a block too

    @functools.wraps(backward)
    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.numel() == 1:
            losses.append(float(tensor.detach()))
        return backward(tensor, *args, **options)

    torch.Tensor.backward = noted  # type: ignore[method-assign]
    try:
        yield losses
    finally:
        torch.Tensor.backward = before  # type: ignore[method-assign]


def has_collapsed(losses: Sequence[float]) -> bool:
    """Return whether a run lost more than half of what it had learned, or was not finite.

    The losses are smoothed by the medians of twenty parts of the run. What was learned is the
    first median less the lowest one. The run has collapsed if the last median is above the lowest
    by more than half of that, and by more than noise explains: nine standard errors of a median, by
    the differences of successive losses, and 5 % of the first median. Fewer than twenty losses
    decide nothing, unless one is infinite or NaN.
    """
    found = np.asarray(losses, dtype=float)
    if not np.isfinite(found).all():
        return True
    if len(found) < WINDOWS:
        return False
    medians = np.array([np.median(part) for part in np.array_split(found, WINDOWS)])
    noise = np.median(np.abs(np.diff(found))) / (len(found) / WINDOWS) ** 0.5
    first, lowest = medians[0], medians.min()
    clear = max(CLEAR_NOISE * noise, CLEAR_SHARE * abs(first))
    return bool(medians[-1] - lowest > max(clear, (first - lowest) / 2))
