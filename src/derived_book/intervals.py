"""Decide by a confidence interval whether the runs of one arm are ahead of those of another.

A page takes its adjectives from `decided`, and `derived_book.claims.measured` shows the interval.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.05


def decided(
    a: Any, b: Any, *, within: float | None = None, comparisons: int = 1, paired: bool = False
) -> str:
    """Return whether arm `a` is ahead of arm `b`, as far as the interval decides it.

    The interval is that of `difference`. Higher scores are ahead; for errors, exchange the arms.

    Parameters
    ----------
    a, b : array_like
        Scores of the runs of two arms, one for each seed.
    within : float, optional
        δ > 0: differences up to δ do not matter.
    comparisons : int
        Number of comparisons in the same table, for which the interval is corrected.
    paired : bool
        Whether the runs of both arms share seeds, in the same order.

    Returns
    -------
    str
        ``"within δ"`` if the interval is inside ±δ, even if it excludes 0; otherwise ``"ahead"`` if
        all of it is above zero, ``"behind"`` if all is below, and ``"open"`` if zero is in it.

    Raises
    ------
    ValueError
        If an arm has fewer than two runs or one that is not finite, paired arms differ in length,
        or `within` or `comparisons` is not positive.

    Examples
    --------
    >>> decided([0.91, 0.93, 0.92], [0.70, 0.74, 0.71])
    'ahead'
    >>> decided([0.91, 0.93, 0.92], [0.92, 0.92, 0.91], within=0.05)
    'within δ'
    """
    if within is not None and not 0 < within < math.inf:
        raise ValueError(f"within is {within}; expected a positive number, or None")
    mean, half = difference(a, b, comparisons=comparisons, paired=paired)
    if within is not None and abs(mean) + half < within:
        return "within δ"
    return "open" if abs(mean) <= half else "ahead" if mean > 0 else "behind"


def difference(
    a: Any,
    b: Any,
    *,
    comparisons: int = 1,
    paired: bool = False,
    names: tuple[str, str] = ("a", "b"),
) -> tuple[float, float]:
    """Return the mean of `a` less that of `b`, and half the width of its 95 % interval.

    The interval is Student's of the differences by seed if `paired`, otherwise Welch's. It is
    corrected for the number of `comparisons` (Bonferroni): all of them hold with a probability of
    at least 95 %. If no arm varies, its width is 0. Parameters and errors are those of `decided`;
    errors call the arms by `names`.
    """
    arms = [np.asarray(x, dtype=float).ravel() for x in (a, b)]
    for name, x in zip(names, arms, strict=True):
        if len(x) < 2 or not np.isfinite(x).all():
            raise ValueError(f"{name} is {x}; expected two finite values or more")
    if paired and len(arms[0]) != len(arms[1]):
        raise ValueError(
            f"{names[0]} has {len(arms[0])} runs and {names[1]} {len(arms[1])}; expected pairs"
        )
    if not comparisons >= 1:
        raise ValueError(f"comparisons is {comparisons}; expected at least 1")
    if paired:
        arms = [arms[0] - arms[1]]
    parts = np.array([x.var(ddof=1) / len(x) for x in arms])
    dividers = parts**2 / [len(x) - 1 for x in arms]  # of Welch and Satterthwaite
    degrees = parts.sum() ** 2 / dividers.sum() if dividers.sum() else 1.0
    mean = float(arms[0].mean() - (0.0 if paired else arms[1].mean()))
    critical = stats.t.ppf(1 - LEVEL / 2 / comparisons, degrees)
    return mean, float(critical * math.sqrt(parts.sum()))
