"""Tables of what ``python -m benchmarks`` has measured, from its JSON files alone.

Needs nothing but Python, so that the book's build can import it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"
MODES = ("forward", "forward + backward")
NOTE = (
    "Operations are those of the products of matrices, as a share of those that SDPA would take "
    "without a mask. A goal is for the forward pass."
)

Table = tuple[list[str], list[list[str]]]  # header and rows


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Read the results of each kind of device that has been measured, the CPU's first.

    Raises
    ------
    ValueError
        If a file was written under another schema.
    """
    found = []
    for path in (folder / f"attention_{kind}.json" for kind in ("cpu", "cuda")):
        if path.exists():
            data = json.loads(path.read_text("utf8"))
            if data.get("schema") != SCHEMA:
                raise ValueError(
                    f"{path.name} has schema {data.get('schema')}; expected {SCHEMA}: "
                    "run python -m benchmarks again"
                )
            found.append(data)
    return found


def time_table(
    results: Sequence[dict[str, Any]], names: Iterable[str] | None = None, length: int = 4096
) -> Table:
    """Time as a share of the baseline's: median over the rounds, and the quartiles beside it.

    Parameters
    ----------
    results : sequence of dict
        What `load` returns; each device and dtype of each gets its columns.
    names : iterable of str, optional
        Cases, each to be found in all `results`; default all of the first. Their baselines come
        first, with the time that is 1.
    length : int
        N.

    Returns
    -------
    header, rows
        Lists of text.

    Raises
    ------
    ValueError
        If `results` is empty, or does not have what is asked for.
    """
    cases, names = _choose(results, names)
    columns = [
        (data, dtype, mode)
        for data in results
        for dtype in data["settings"]["dtypes"]
        for mode in MODES
    ]
    kinds = {(data["device"], dtype) for data, dtype, _ in columns}
    header = [f"time, N = {length}", "beside", "operations", "goal"]
    for data, dtype, mode in columns:
        header.append(mode if len(kinds) == 1 else f"{mode} ({data['device'].upper()}, {dtype})")
    rows = []
    for name in names:
        found = [_time(data, name, length, dtype, mode) for data, dtype, mode in columns]
        case, baseline = cases[name], cases[cases[name]["baseline"]]
        if case is baseline:
            times = [f"1 = {_seconds(row['seconds']['median'])}" for row in found]
            rows.append([case["label"], "", "", "", *times])
        else:
            front = [case["label"], baseline["label"], f"{found[0]['operations']:.2g}"]
            front.append(_goal(case["goal"], found))
            rows.append([*front, *(_share(row["ratio"]) for row in found)])
    return header, rows


def memory_table(data: dict[str, Any], names: Iterable[str] | None = None) -> Table:
    """Extra memory at its peak, and its growth from half that length: mechanisms and formulas.

    Arguments, result and errors are those of `time_table`, for the results of one device.
    """
    cases, names = _choose([data], names)
    header = ["extra memory"]
    header += [part + column for part in ("", "formula: ") for column in ("N", *MODES)]
    rows = []
    for name in names:
        row = [cases[name]["label"]]
        for form in ("fast", "reference"):
            wanted = {"case": name, "form": form}
            found = [x for x in data["memory"] if wanted.items() <= x.items()]
            row += [str(found[0]["lengths"][1]), *map(_growth, found)]
        rows.append(row)
    return header, rows


def caption(data: dict[str, Any]) -> str:
    """One line on where the numbers of a device come from."""
    machine, settings = data["machine"], data["settings"]
    where = machine["gpu"] or f"{machine['processor']}, threads: {machine['threads']}"
    sizes = ", ".join(f"{key} = {settings[key]}" for key in ("B", "H", "D"))
    return (
        f"{where}; {sizes}; medians of {settings['rounds']} rounds, quartiles in brackets; "
        f"PyTorch {machine['torch']}, {machine['date']}"
    )


def markdown(table: Table) -> str:
    """Write a table in Markdown."""
    header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _choose(
    results: Sequence[dict[str, Any]], names: Iterable[str] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the cases of the first results, and the names asked for, after their baselines."""
    if not results:
        raise ValueError("results is empty; expected what load() finds after python -m benchmarks")
    cases = results[0]["cases"]
    names = list(cases if names is None else names)
    missing = [name for name in names if not all(name in data["cases"] for data in results)]
    if missing:
        raise ValueError(f"no results for {', '.join(missing)}; there are {', '.join(cases)}")
    baselines = [cases[name]["baseline"] for name in names]
    return cases, list(dict.fromkeys([*baselines, *names]))


def _time(data: dict[str, Any], name: str, length: int, dtype: str, mode: str) -> dict[str, Any]:
    wanted = {"case": name, "length": length, "dtype": dtype, "mode": mode}
    for row in data["times"]:
        if wanted.items() <= row.items():
            return row
    raise ValueError(f"no result for {wanted} on {data['device']}")


def _goal(goal: float | None, rows: list[dict[str, Any]]) -> str:
    """Goal and verdict, where one of the rows has a verdict."""
    verdicts = [row["met"] for row in rows if row["met"] is not None]
    return f"≤ {goal:.2f}: {'met' if all(verdicts) else 'missed'}" if verdicts else ""


def _share(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _growth(row: dict[str, Any]) -> str:
    before, after = row["bytes"]
    return f"{after / 2**20:.3g} MiB, ×{after / before:.1f}"
