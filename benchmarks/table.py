"""Tables of what ``python -m benchmarks`` and its experiments have measured, from their JSON alone.

Needs nothing but Python, so that the book's build can import it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
EXPERIMENT_SCHEMA = 1
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

    The last column is how many times as much the formula needs, where both are of one length.

    Arguments, result and errors are those of `time_table`, for the results of one device.
    """
    cases, names = _choose([data], names)
    header = ["extra memory"]
    header += [part + column for part in ("", "formula: ") for column in ("N", *MODES)]
    header.append("formula, forward, times as much")
    rows = []
    for name in names:
        row = [cases[name]["label"]]
        for form in ("fast", "reference"):
            wanted = {"case": name, "form": form}
            found = [x for x in data["memory"] if wanted.items() <= x.items()]
            row += [str(found[0]["lengths"][1]), *map(_growth, found)]
        rows.append([*row, _times_as_much(data, name)])
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


def load_experiment(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Read the results of an experiment, such as ``mixtures_language``, as `load` does.

    Raises
    ------
    ValueError
        If there are none, or they were written under another schema.
    """
    paths = [folder / f"{name}_{kind}.json" for kind in ("cpu", "cuda")]
    found = [json.loads(path.read_text("utf8")) for path in paths if path.exists()]
    if not found:
        raise ValueError(f"there are no results of an experiment {name!r}")
    if any(data.get("schema") != EXPERIMENT_SCHEMA for data in found):
        raise ValueError(f"results of {name} have another schema; expected {EXPERIMENT_SCHEMA}")
    return found


def experiment_table(data: dict[str, Any]) -> Table:
    """Cost and scores of each arm: mean and standard deviation over the seeds.

    Returns
    -------
    header, rows
        Lists of text.
    """
    header = ["attention", "parameters", "MFLOP"]
    header += [heading for _, heading, *_ in data["columns"]] + ["time of a run"]
    rows = []
    for arm in dict.fromkeys(row["arm"] for row in data["rows"]):
        runs = [row for row in data["rows"] if row["arm"] == arm]
        costs = [f"{runs[0]['parameters']:,}", f"{runs[0]['flops'] / 1e6:.2f}"]
        scores = [_spread(runs, *column) for column in data["columns"]]
        seconds = statistics.median(run["cpu_seconds"] for run in runs)
        rows.append([arm, *costs, *scores, f"{seconds:.3g} s"])
    return header, rows


def _spread(runs: list[dict[str, Any]], metric: str, _: str, factor: float, digits: int) -> str:
    """Mean and sample standard deviation of a metric, in units of 1/factor."""
    values = [factor * run[metric] for run in runs]
    sd = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{sd}"


def experiment_caption(data: dict[str, Any]) -> str:
    """One line on what was run, how often, and on what machine."""
    machine = data["machine"]
    where = machine["gpu"] or f"{machine['processor']}, threads: {machine['threads']}"
    settings = ", ".join(f"{key} = {value}" for key, value in data["settings"].items())
    return (
        f"{data['title']} ({settings}), mean ± standard deviation of "
        f"{len({row['seed'] for row in data['rows']})} seeds; parameters and operations of all "
        f"attention layers, forward, one sequence; {where}; PyTorch {machine['torch']}, "
        f"{machine['date']}"
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
    size = f"{after / 2**20:.3g} MiB" if after < 1000 * 2**20 else f"{after / 2**30:.3g} GiB"
    return f"{size}, ×{after / before:.1f}"


def _times_as_much(data: dict[str, Any], name: str) -> str:
    """Memory of the formula as a multiple of the mechanism's, where both are of one length."""
    wanted = {"case": name, "mode": MODES[0]}
    fast, formula = (
        next(x for x in data["memory"] if (wanted | {"form": form}).items() <= x.items())
        for form in ("fast", "reference")
    )
    same = fast["lengths"] == formula["lengths"]
    return f"{formula['bytes'][1] / fast['bytes'][1]:.0f}" if same else ""
