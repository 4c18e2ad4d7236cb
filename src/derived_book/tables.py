"""Tables of what ``python -m benchmarks`` and its experiments have measured, from their JSON alone.

Needs nothing but Python, so that the book's build can import it.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 2
DIM = 64  # of rows that were written before there were others
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"  # in a checkout
KERNELS = RESULTS / "kernels.json"
SPILLS = RESULTS / "spills.json"
MODES = ("forward", "forward + backward")
# What a kernel has to do, and the name of the rate at which a device does it.
RATES = {"peak": "operations", "bandwidth": "bytes", "exponential": "exponentials"}
SAME = 0.01  # of a time: bounds that differ by less are one
GOAL: dict[str, Any] = {
    "length": 4096,
    "dtype": "float32",
}  # of what rows goals are, on CPUs, for each mode
NOTE = (
    "Operations are those of the products of matrices, as a share of those that SDPA would take "
    "without a mask. Goals, forward / forward + backward, are for one thread of a CPU, and hold if "
    "both hold on every one that was measured."
)

Files = dict[str, dict[str, Any]]  # by case
Table = tuple[list[str], list[list[str]]]  # header and rows


def load(
    names: Iterable[str] | None = None, folder: Path = RESULTS, peers: bool = False
) -> dict[str, Files]:
    """Read results by machine and by case: those of CPUs first.

    Parameters
    ----------
    names : iterable of str, optional
        Cases; default all.
    folder : Path
        Has a folder for each machine, with a file for each case.
    peers : bool
        Whether to read what was measured of other libraries instead.

    Raises
    ------
    ValueError
        If a file was written under another schema.
    """
    found: dict[str, Files] = {}
    for name in ["*"] if names is None else names:
        for path in sorted(folder.glob(f"*/peers/{name}.json" if peers else f"*/{name}.json")):
            data = json.loads(path.read_text("utf8"))
            if (schema := data.get("schema")) != SCHEMA:
                raise ValueError(
                    f"{path.relative_to(folder)} has schema {schema}; expected {SCHEMA}: "
                    "run python -m benchmarks again"
                )
            found.setdefault(path.relative_to(folder).parts[0], {})[path.stem] = data
    return dict(sorted(found.items(), key=lambda item: (_first(item[1])["device"], item[0])))


def machine_name(machine: dict[str, Any]) -> str:
    """Return what a machine is called: its GPU, or else its processor."""
    name = machine["gpu"] or machine["processor"]
    return " ".join(re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b", " ", name).split())


def slug(machine: dict[str, Any]) -> str:
    """Return the name of a machine's folder."""
    return re.sub(r"[^a-z0-9]+", "-", machine_name(machine).lower()).strip("-")


def time_table(
    results: dict[str, Files],
    names: Iterable[str] | None = None,
    length: int = GOAL["length"],
    dim: int = DIM,
) -> Table:
    """Time as a share of the baseline's: median over the rounds, and the quartiles beside it.

    Parameters
    ----------
    results : dict
        What `load` returns; each dtype of each machine gets its columns, with empty cells for what
        it has not measured.
    names : iterable of str, optional
        Cases; default all. Their baselines come first, with the time that is 1: its range, where
        cases were measured at other times.
    length, dim : int
        N and D.

    Returns
    -------
    header, rows
        Lists of text.

    Raises
    ------
    ValueError
        If no machine has what is asked for.
    """
    cases = _choose(results, names)
    kinds = [
        (machine, dtype)
        for machine, files in results.items()
        for dtype in dict.fromkeys(d for data in files.values() for d in data["settings"]["dtypes"])
    ]
    rows = {
        name: [
            _time(results[m].get(name), length, d, mode, dim) for m, d in kinds for mode in MODES
        ]
        for name in cases
    }
    size = f", D = {dim}" if dim != DIM else ""
    header = [f"time, N = {length}{size}", "beside", "operations", "goal"]
    for machine, dtype in kinds:
        of = f" ({machine_name(_first(results[machine])['machine'])}, {dtype})"
        header += [mode + of * (len(kinds) > 1) for mode in MODES]
    lines = []
    for baseline, group in _baselines(cases).items():
        beside = zip(*(rows[name] for name in group), strict=True)
        lines.append([baseline, "", "", "", *map(_seconds, beside)])
    for name, case in cases.items():
        found = [row for row in rows[name] if row]
        if not found:
            raise ValueError(f"no results for {name} at N = {length}")
        counted = next((f"{row['operations']:.2g}" for row in found if row["operations"]), "–")
        front = [case["label"], case["baseline"]["label"], counted]
        goal = _goal(name, case["goal"], results) if length == GOAL["length"] else ""
        lines.append([*front, goal, *map(_share, rows[name])])
    return header, lines


def memory_table(files: Files) -> Table:
    """Extra memory at its peak, and its growth from half that length: mechanisms and formulas.

    The last column is how many times as much the formula needs, where both are of one length.

    Parameters
    ----------
    files : dict
        Results of one machine, by case.

    Returns
    -------
    header, rows
        Lists of text.
    """
    header = [f"extra memory, {machine_name(_first(files)['machine'])}"]
    header += [part + column for part in ("", "formula: ") for column in ("N", *MODES)]
    header.append("formula, forward, times as much")
    rows = {label: files[names[0]]["baseline_memory"] for label, names in _baselines(files).items()}
    rows |= {data["label"]: data["memory"] for data in files.values()}
    return header, [[label, *_memory(found)] for label, found in rows.items()]


def fused_table(files: Files) -> Table | None:
    """Time with the kernel and without it, as a share of the baseline's; None where none has run.

    Parameters
    ----------
    files : dict
        Results of one machine, by case.

    Returns
    -------
    header, rows
        Lists of text.
    """
    header = ["time", "N", "D", "", "with the kernel", "without", "faster"]
    rows = []
    for data in files.values():
        for row in data["times"]:
            if "unfused_ratio" in row:
                pair = row["ratio"]["median"], row["unfused_ratio"]["median"]
                faster = "the kernel" if pair[0] <= pair[1] else "without"
                sizes = [str(row["length"]), str(row["dim"]), row["mode"]]
                rows.append([data["label"], *sizes, *(f"{x:.2f}" for x in pair), faster])
    return (header, rows) if rows else None


def peer_table(files: Files, length: int = GOAL["length"], dim: int = DIM) -> Table:
    """Time and memory of other libraries, as multiples of ours.

    Parameters
    ----------
    files : dict
        What `load` returns of the peers of one machine.
    length, dim : int
        N, or the longest below it that was measured, and D.

    Returns
    -------
    header, rows
        Lists of text.
    """
    header = ["library", "beside ours"]
    header += [f"{what}, {mode}" for what in ("time", "memory") for mode in MODES] + ["computes"]
    rows = []
    for data in files.values():
        reached = max(n for n in data["settings"]["lengths"] if n <= length)
        dtype = data["settings"]["dtypes"][0]
        pair = [_time(data, reached, dtype, mode, dim) for mode in MODES]
        at = f", N = {reached}" if reached < length else ""
        front = [f"{data['label']} ({data['version']}{at})", data["ours"]]
        cells = [*map(_share, pair), *map(_times_as_much, pair)]
        rows.append([*front, *cells, data["differs"] or "the same"])
    return header, rows


def load_kernels(path: Path = KERNELS) -> dict[str, Any]:
    """Read what ``python -m benchmarks.kernels`` has computed; nothing, where there is no file."""
    empty: dict[str, Any] = {"usage": [], "rooflines": []}
    return json.loads(path.read_text("utf8")) if path.exists() else empty


def load_verified(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Read what ``python -m benchmarks.gpu.verify`` has found, on each GPU.

    ``"current"`` says whether it has tried the kernels as they are now.
    """
    from derived_attention.common.kernel_selftest import digest

    found = [json.loads(path.read_text("utf8")) for path in sorted(folder.glob("verified-*.json"))]
    return [data | {"current": data["place"].endswith(f"kernels {digest()}")} for data in found]


def load_tuned(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Read how long kernels take with other sizes of tiles, on each GPU that has tried them."""
    return [json.loads(path.read_text("utf8")) for path in sorted(folder.glob("tiles-*.json"))]


def load_spills(path: Path = SPILLS) -> dict[str, Any]:
    """Read what ``python -m benchmarks.tiles`` has found to spill: by version, oldest first."""
    found = json.loads(path.read_text("utf8")) if path.exists() else {}
    return dict(sorted(found.items(), key=lambda item: [int(x) for x in item[0].split(".")]))


def spills_table(data: dict[str, Any]) -> Table:
    """Return spilled bytes a thread: a row for a kernel as it is compiled, a column for a Triton.

    Architectures with the same numbers share a row. What spills with no version has none.
    """
    found: dict[tuple[str, ...], dict[tuple[int, ...], list[str]]] = {}
    for name in sorted({name for version in data.values() for name in version["spills"]}):
        kernel, dtype, dim, _, architecture = name.rsplit(" ", 4)
        numbers = tuple(version["spills"].get(name, 0) for version in data.values())
        found.setdefault((kernel, dtype, dim), {}).setdefault(numbers, []).append(architecture)
    lines = [
        [*what, ", ".join(architectures), *map(str, numbers)]
        for what, rows in found.items()
        for numbers, architectures in rows.items()
    ]
    header = ["spilled bytes of", "dtype", "D", "architecture"]
    return [*header, *(f"Triton {version}" for version in data)], lines


def usage_table(data: dict[str, Any], dtype: str = "bfloat16") -> Table:
    """Return what each kernel takes of a GPU: a row for a kernel and D, cells for architectures."""
    found: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in data["usage"]:
        if row["dtype"] == dtype:
            found.setdefault((row["kernel"], row["head_dim"]), {})[row["capability"]] = row
    capabilities = sorted({row["capability"] for row in data["usage"]})
    header = ["kernel", "D", "warps"]
    for what in ("registers", "shared memory, KiB", "spilled bytes", "resident warps of 64"):
        header += [f"{what}, sm_{capability}" for capability in capabilities]
    lines = []
    for (kernel, dim), rows in found.items():
        cells = [kernel, str(dim), " / ".join({str(row["num_warps"]) for row in rows.values()})]
        for key, factor in (("registers", 1), ("shared", 1024), ("spills", 1), ("resident", 1)):
            cells += [f"{rows[c][key] / factor:.0f}" if c in rows else "" for c in capabilities]
        lines.append(cells)
    return header, lines


def roofline_table(
    data: dict[str, Any], length: int, dim: int = DIM, device: str = "H100 SXM"
) -> Table:
    """Return the least time of each kernel, in ms, and its share of that of SDPA on one `device`.

    The last column says what bounds the kernel there. Two entries in a cell are those of both
    modes.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in data["rooflines"]:
        if (row["length"], row["dim"]) == (length, dim):
            found.setdefault(row["label"], {})[row["mode"]] = row
    devices = data.get("devices", {})
    header = [f"N = {length}, D = {dim}", *(f"{device}, ms" for device in devices)]
    header += [f"share of SDPA's, {device}", "bound by"]
    lines = []
    for label, modes in found.items():
        rows, cells = [modes[mode] for mode in MODES], [label]
        for name in devices:
            cells.append(" / ".join(f"{1000 * row['seconds'][name]:.3g}" for row in rows))
        shares = (row["seconds"][device] / row["sdpa_seconds"][device] for row in rows)
        cells.append(" / ".join(f"{share:.2g}" for share in shares))
        limits = dict.fromkeys(bound_by(row, devices[device]) for row in rows)
        lines.append([*cells, " / ".join(limits)])
    return header, lines


def bound_by(row: dict[str, Any], device: dict[str, float]) -> str:
    """Return what takes a device longest: operations, bytes or exponentials, or several."""
    times = {what: row[what] / device[rate] for rate, what in RATES.items()}
    most = max(times.values())
    return " and ".join(what for what, time in times.items() if time >= (1 - SAME) * most)


def winnings(
    data: dict[str, Any], label: str, length: int, dim: int, device: str
) -> dict[str, tuple[float, str]]:
    """Return what its bound leaves a kernel to win: in each mode its share of SDPA's, and why.

    The share is 1 where both bounds are the same; then, or above, nothing is left.
    """
    found = {}
    for row in data["rooflines"]:
        if (row["label"], row["length"], row["dim"]) == (label, length, dim):
            share = row["seconds"][device] / row["sdpa_seconds"][device]
            same = abs(share - 1) <= SAME
            found[row["mode"]] = 1 if same else share, bound_by(row, data["devices"][device])
    return found


def _times_as_much(row: dict[str, Any] | None) -> str:
    return f"{row['bytes'] / row['ours_bytes']:.1f}" if row else ""


def of_each_kind(results: dict[str, Files]) -> list[Files]:
    """Return the results of one CPU and of one GPU: memory is counted, not timed.

    Of several of a kind it is the one that has most cases.
    """
    kinds: dict[str, Files] = {}
    for files in sorted(results.values(), key=len, reverse=True):
        kinds.setdefault(_first(files)["device"], files)
    return [kinds[kind] for kind in sorted(kinds)]


def caption(files: Files) -> str:
    """One line on where the numbers of a machine come from."""

    def all_of(values: Iterable[Any]) -> str:
        return " and ".join(dict.fromkeys(map(str, values)))

    unknown = [data["label"] for data in files.values() if "code" not in data]
    machines = [data["machine"] for data in files.values()]
    settings, where = _first(files)["settings"], machine_name(machines[0])
    if machines[0]["gpu"] is None:
        where += f", threads: {machines[0]['threads']}"
    sizes = ", ".join(f"{key} = {settings[key]}" for key in ("B", "H", "D"))
    return (
        f"{where}; {sizes}; medians of {all_of(data['rounds'] for data in files.values())} rounds, "
        f"quartiles in brackets; PyTorch {all_of(sorted(m['torch'] for m in machines))}, "
        f"{all_of(sorted(m['date'] for m in machines))}"
        + ("; " + _of_unknown_code(len(unknown), len(files)) if unknown else "")
    )


def _of_unknown_code(count: int, every: int) -> str:
    which = "all" if count == every else f"{count} of {every}"
    return f"{which} were measured before files named the code, which may have changed since"


def experiment_table(data: dict[str, Any]) -> Table:
    """Cost and scores of each arm: mean and standard deviation over the seeds.

    If there are several numbers of steps, scores are those at the budget, and the first one is also
    shown at twice the budget.

    Returns
    -------
    header, rows
        Lists of text.
    """
    budget, first = data.get("budget"), data["columns"][0]
    header = ["attention", "parameters", "MFLOP"]
    header += [heading for _, heading, *_ in data["columns"]]
    header += ([f"{first[1]}, {2 * budget:,} steps"] if budget else []) + ["time of a run"]
    rows = []
    for arm in dict.fromkeys(row["arm"] for row in data["rows"]):
        every = [row for row in data["rows"] if row["arm"] == arm]
        runs = [row for row in every if budget in (None, row.get("steps"))]
        costs = ["–", "–"]  # an experiment that trains no layer has none
        if "parameters" in runs[0]:
            costs = [f"{runs[0]['parameters']:,}", f"{runs[0]['flops'] / 1e6:.2f}"]
        scores = [_spread(runs, *column) for column in data["columns"]]
        if budget:
            scores.append(_spread([row for row in every if row["steps"] == 2 * budget], *first))
        # Runs that another machine has taken have no time.
        seconds = [run["cpu_seconds"] for run in runs if "cpu_seconds" in run]
        taken = f"{statistics.median(seconds):.3g} s" if seconds else "–"
        rows.append([arm, *costs, *scores, taken])
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


def _first(files: Files) -> dict[str, Any]:
    return next(iter(files.values()))


def _choose(results: dict[str, Files], names: Iterable[str] | None) -> Files:
    """Return the cases asked for, as the first machine that has each describes them."""
    cases: Files = {}
    for files in results.values():
        cases = files | cases
    names = list(cases if names is None else names)
    missing = [name for name in names if name not in cases]
    if missing or not names:
        raise ValueError(
            f"no results for {', '.join(missing) or 'any case'}; there are {', '.join(cases)}"
        )
    return {name: cases[name] for name in names}


def _baselines(cases: Files) -> dict[str, list[str]]:
    """Return the names of cases by the label of what they are beside."""
    found: dict[str, list[str]] = {}
    for name, case in cases.items():
        found.setdefault(case["baseline"]["label"], []).append(name)
    return found


def _time(
    data: dict[str, Any] | None, length: int, dtype: str, mode: str, dim: int = DIM
) -> dict[str, Any] | None:
    wanted = {"length": length, "dtype": dtype, "mode": mode, "dim": dim}
    rows = data["times"] if data else []
    return next((row for row in rows if wanted.items() <= ({"dim": DIM} | row).items()), None)


def _goal(name: str, goal: Sequence[float] | None, results: dict[str, Files]) -> str:
    """Goals, forward and with backward, and verdict, where a CPU has measured the case."""
    found = {
        machine_name(files[name]["machine"]): [
            row["ratio"]["median"]
            for mode in MODES
            if (row := _time(files[name], GOAL["length"], GOAL["dtype"], mode))
        ]
        for files in results.values()
        if name in files and files[name]["device"] == "cpu"
    }
    if goal is None or not any(found.values()):
        return ""
    missed = " and ".join(
        machine
        for machine, ratios in found.items()
        if any(ratio > most for ratio, most in zip(ratios, goal, strict=False))
    )
    return f"≤ {goal[0]:.2f} / {goal[1]:.2f}: " + (f"missed on {missed}" if missed else "met")


def _share(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    ratio = row["ratio"]
    return f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]"


def _seconds(rows: Iterable[dict[str, Any] | None]) -> str:
    """Return the baseline's time, from the least to the greatest median."""
    medians = sorted(row["baseline_seconds"]["median"] for row in rows if row)
    texts = [f"{s:.2f} s" if s >= 1 else f"{1000 * s:.3g} ms" for s in medians]
    return "1 = " + " to ".join(dict.fromkeys([texts[0], texts[-1]])) if texts else ""


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    """Cells for rows of both forms, each in both modes."""
    (fast, _, formula, _) = rows
    cells = []
    for row in rows:
        before, after = row["bytes"]
        size = f"{after / 2**20:.3g} MiB" if after < 1000 * 2**20 else f"{after / 2**30:.3g} GiB"
        length = [] if row["mode"] != MODES[0] else [str(row["lengths"][1])]
        cells += [*length, f"{size}, ×{after / before:.1f}"]
    same = fast["lengths"] == formula["lengths"]
    return [*cells, f"{formula['bytes'][1] / fast['bytes'][1]:.0f}" if same else ""]
