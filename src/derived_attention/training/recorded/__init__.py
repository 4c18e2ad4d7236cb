"""Scores of the longer experiments, as ``make experiments`` has recorded them here.

Chapters show them and read their verdicts from them, wherever they run. Nothing but
Python is needed, so that the book's build can read them, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = 1
FOLDER = Path(__file__).parent


def load_experiment(name: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Read the results of an experiment, of each kind of device that has run it, the CPU's first.

    Parameters
    ----------
    name : str
        For example ``"mixtures_language"``.
    folder : Path, optional
        Where the files are.

    Returns
    -------
    list of dict
        ``title``, ``settings``, ``machine``, ``columns`` (metric, heading, factor, decimals), and
        ``rows``, a run each: ``arm``, ``seed``, ``parameters``, ``flops``, times, and its metrics.

    Raises
    ------
    ValueError
        If there are none, or they were written under another schema.
    """
    paths = [folder / f"{name}_{kind}.json" for kind in ("cpu", "cuda")]
    found = [json.loads(path.read_text("utf8")) for path in paths if path.exists()]
    if not found:
        there = ", ".join(sorted(path.stem.rpartition("_")[0] for path in folder.glob("*.json")))
        raise ValueError(f"name is {name!r}, which has no results; there are {there or 'none'}")
    if any(data.get("schema") != SCHEMA for data in found):
        raise ValueError(f"results of {name} have another schema; expected {SCHEMA}")
    return found


def scores(name: str, metric: str) -> dict[str, list[float]]:
    """Return the values of a metric, one for each seed, of each arm of an experiment.

    Of the CPU's runs, where there are any. Arguments and errors are those of `load_experiment`.

    Raises
    ------
    ValueError
        Also for a metric that the runs do not have.

    Examples
    --------
    >>> bits = scores("mixtures_language", "bits")
    >>> len(bits["MGK, 2 heads"])
    3
    """
    rows = load_experiment(name)[0]["rows"]
    found: dict[str, list[float]] = {}
    for row in rows:
        if metric not in row:
            raise ValueError(f"metric is {metric!r}; expected one of {', '.join(row)}")
        found.setdefault(row["arm"], []).append(row[metric])
    return found
