"""Results of the longer experiments, recorded in this folder by ``make experiments``.

Chapters show them and read their verdicts from them, on any machine. Only the standard library is
needed, so the book's build can read them too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = 1
FOLDER = Path(__file__).parent


def load_experiment(name: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Read the results of an experiment, one dict for each kind of device, the CPU's first.

    Parameters
    ----------
    name : str
        For example ``"chapter10_both"``.
    folder : Path, optional
        The folder of the files.

    Returns
    -------
    list of dict
        Every experiment has ``title``, ``settings``, ``machine``, ``columns`` (metric, heading,
        factor, decimals), and ``rows``, one for each run: ``arm``, ``seed``, ``parameters``,
        ``flops``, times, metrics. An experiment of the protocol (appendix E) also has ``budget``,
        all numbers of ``steps``, the learning ``rates`` by arm, the runs of their ``tuning``, the
        ``rule`` by which rates were chosen, the collapsed runs (``collapses``), and the runs with
        eight times as many steps (``eightfold``).

    Raises
    ------
    ValueError
        If there are no results of that name, or they have another schema.
    """
    paths = [folder / f"{name}_{kind}.json" for kind in ("cpu", "cuda")]
    results = [json.loads(path.read_text("utf8")) for path in paths if path.exists()]
    if not results:
        names = ", ".join(sorted(path.stem.rpartition("_")[0] for path in folder.glob("*.json")))
        raise ValueError(f"name is {name!r}; expected one of the results in {folder}: {names}")
    for data in results:
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema of {name} is {data.get('schema')}; expected {SCHEMA}")
    return results


def scores(name: str, metric: str) -> dict[str, list[float]]:
    """Return the values of a metric, one for each seed, of each arm of an experiment.

    The CPU's results are used, if there are any; with several numbers of steps, values are those at
    the budget. Arguments and errors are those of `load_experiment`.

    Raises
    ------
    ValueError
        Also if the runs have no such metric.

    Examples
    --------
    >>> accuracy = scores("chapter10_both", "accuracy")
    >>> len(accuracy["two keys, D = 32"])
    8
    """
    data = load_experiment(name)[0]
    return _values(data["rows"], metric, data.get("budget"))


def curves(name: str, metric: str) -> dict[str, dict[int, list[float]]]:
    """Return the values of a metric of each arm and number of steps: ``{arm: {steps: values}}``.

    Arguments and errors are those of `scores`; ValueError also if the experiment has no curves.
    """
    data = load_experiment(name)[0]
    if "steps" not in data:
        raise ValueError(f"name is {name!r}; expected an experiment with several numbers of steps")
    found: dict[str, dict[int, list[float]]] = {}
    for steps in data["steps"]:
        for arm, values in _values(data["rows"], metric, steps).items():
            found.setdefault(arm, {})[steps] = values
    return found


def _values(rows: list[dict[str, Any]], metric: str, steps: int | None) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for row in rows:
        if metric not in row:
            raise ValueError(f"metric is {metric!r}; expected one of {', '.join(row)}")
        if steps in (None, row.get("steps")):
            values.setdefault(row["arm"], []).append(row[metric])
    return values
