"""Make tables and figures from the JSON results of ``python -m benchmarks``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from derived_book.experiment_tables import Table

SCHEMA = 2
DIM = 64  # of rows that name no D, because they are older than other widths
RESULTS = Path(__file__).parent / "results"
MODES = ("forward", "forward + backward")
GOAL: dict[str, Any] = {
    "length": 4096,
    "dtype": "float32",
}  # the rows to which the goals for CPUs apply, in each mode
NOTE = (
    "Operations are those of the matrix products, as a share of the operations that SDPA needs "
    "without a mask. The two goals are for forward and forward + backward on one thread of a CPU. "
    "A case meets its goals if it meets both on every CPU that was measured."
)

_DASHES = ((0, (4, 2)), (0, (1, 1.5)))  # for the first and the second library of a mechanism

Files = dict[str, dict[str, Any]]  # by case


def load(
    names: Iterable[str] | None = None, folder: Path = RESULTS, peers: bool = False
) -> dict[str, Files]:
    """Return results by machine and by case, those of CPUs first.

    Parameters
    ----------
    names : iterable of str, optional
        Cases; default all.
    folder : Path
        Contains a folder for each machine, with a file for each case.
    peers : bool
        Whether to read the results of other libraries instead.

    Raises
    ------
    ValueError
        If a file has another schema.
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
    """Return the name of a machine: that of its GPU, or else of its processor."""
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
    """Return each time as a share of the baseline's: median over the rounds, with quartiles.

    Parameters
    ----------
    results : dict
        As returned by `load`. Each dtype of each machine gets its own columns, in which cells
        without a measurement are empty.
    names : iterable of str, optional
        Cases; default all. Their baselines come first, with the time that counts as 1, or its
        range if it was measured several times.
    length, dim : int
        N and D.

    Returns
    -------
    header, rows
        Lists of text.

    Raises
    ------
    ValueError
        If no machine has results for one of the cases at this N and D.
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
    header = [f"time, N = {length}{size}", "baseline", "operations", "goal"]
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
    """Return the peak of the extra memory, and its growth from half that length.

    The last column divides the formula's memory by ours, if both were measured at one length.

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
    header.append("formula / our form, forward")
    rows = {label: files[names[0]]["baseline_memory"] for label, names in _baselines(files).items()}
    rows |= {data["label"]: data["memory"] for data in files.values()}
    return header, [[label, *_memory(found)] for label, found in rows.items()]


def peer_table(files: Files, length: int = GOAL["length"], dim: int = DIM) -> Table:
    """Return time and memory of other libraries as multiples of ours, in both modes.

    Parameters
    ----------
    files : dict
        Results of other libraries on one machine, by name, from `load`.
    length, dim : int
        N, or the longest below it that was measured, and D.

    Returns
    -------
    header, rows
        Lists of text.
    """
    header = ["library", "our form", "time", "memory", "function"]
    rows = []
    for data in files.values():
        reached = max(n for n in data["settings"]["lengths"] if n <= length)
        dtype = data["settings"]["dtypes"][0]
        pair = [_time(data, reached, dtype, mode, dim) for mode in MODES]
        at = f", N = {reached}" if reached < length else ""
        medians = " / ".join(f"{row['ratio']['median']:.2f}" for row in pair if row)
        memory = " / ".join(f"{row['bytes'] / row['ours_bytes']:.1f}" for row in pair if row)
        front = [f"{data['label']} ({data['version']}{at})", data["ours"]]
        rows.append([*front, medians, memory, data["differs"] or "the same"])
    return header, rows


def load_gpu(folder: Path = RESULTS) -> dict[str, Any] | None:
    """Return the newest table of ``python -m benchmarks.gpu.table``, or None if there is none."""
    found = [json.loads(path.read_text("utf8")) for path in folder.glob("gpu-table-*.json")]
    return max(found, key=lambda data: data["date"], default=None)


def gpu_table(data: dict[str, Any], lengths: Sequence[int] | None = None) -> Table:
    """Return each mechanism's time on a GPU as a share of SDPA's, and its extra memory in training.

    Parameters
    ----------
    data : dict
        What `load_gpu` returns.
    lengths : sequence of int, optional
        N of the columns; default the second and the third that were measured.

    Returns
    -------
    header, rows
        Lists of text. Mixtures are compared with SDPA with twice the heads.
    """
    lengths = list(lengths or data["lengths"][1:3])
    dim = min(data["dims"])
    by_size = {(x["label"], x["N"]): x for x in data["cells"].values() if x["D"] == dim}
    header = [f"time, D = {dim}", *(f"N = {n}, {mode}" for n in lengths for mode in MODES)]
    header += [f"MiB, N = {lengths[-1]}"]
    rows = []
    for label in dict.fromkeys(label for label, _ in by_size):
        cells = [by_size.get((label, n)) for n in lengths]
        shares = [_gpu_share(cell, mode) for cell in cells for mode in MODES]
        size = cells[-1]["times"]["ours"].get(MODES[1], {}).get("MiB") if cells[-1] else None
        rows.append([label, *shares, f"{size:.0f}" if size else "–"])
    return header, rows


def _gpu_share(cell: dict[str, Any] | None, mode: str) -> str:
    times = cell["times"] if cell else {}
    pair = [
        times.get(x, {}).get(mode, {}).get("ms") for x in ("ours", cell["beside"] if cell else "")
    ]
    return f"{pair[0] / pair[1]:.2f}" if all(pair) else "–"


def caption(files: Files) -> str:
    """Return a line that states the origin of a machine's numbers."""

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
    which = "no file names" if count == every else f"{count} of {every} files do not name"
    return f"{which} the code, which may have changed since"


def _first(files: Files) -> dict[str, Any]:
    return next(iter(files.values()))


def _choose(results: dict[str, Files], names: Iterable[str] | None) -> Files:
    """Return the cases `names`, each as described by the first machine that has it."""
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
    """Return the names of cases by the label of their baseline."""
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
    """Return both goals and the verdict, or "" if there is no goal or no result of a CPU."""
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
    """Return the baseline's time, from the smallest to the largest median."""
    medians = sorted(row["baseline_seconds"]["median"] for row in rows if row)
    texts = [f"{s:.2f} s" if s >= 1 else f"{1000 * s:.3g} ms" for s in medians]
    return "1 = " + " to ".join(dict.fromkeys([texts[0], texts[-1]])) if texts else ""


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    """Return the cells for both forms, each in both modes."""
    (fast, _, formula, _) = rows
    cells = []
    for row in rows:
        before, after = row["bytes"]
        size = f"{after / 2**20:.3g} MiB" if after < 1000 * 2**20 else f"{after / 2**30:.3g} GiB"
        length = [] if row["mode"] != MODES[0] else [str(row["lengths"][1])]
        cells += [*length, f"{size}, ×{after / before:.1f}"]
    same = fast["lengths"] == formula["lengths"]
    return [*cells, f"{formula['bytes'][1] / fast['bytes'][1]:.0f}" if same else ""]


# --- figures -------------------------------------------------------------------------------------


def growth(files: Files) -> Any:
    """Draw the time of a forward pass against N, without a mask and causal: ours, peers and SDPA.

    Our lines are solid and labelled. A library's line is dashed or dotted, in the colour of ours.

    Parameters
    ----------
    files : dict
        Results of other libraries on one machine, by name, from `load`.
    """
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    from derived_book.plot import COLORS, LABELS

    names = {label: name for name, label in LABELS.items()}
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 4.0), sharex=True, sharey=True)
    for ax, causal in zip(axes, (False, True), strict=True):
        chosen = [data for data in files.values() if ("causal" in data["beside"]) == causal]
        every = sorted({row["length"] for data in chosen for row in data["times"]})
        ends: dict[str, tuple[float, str]] = {}
        seen: list[str] = []
        for data in sorted(chosen, key=lambda data: len(data["times"])):
            rows = [row for row in data["times"] if row["mode"] == MODES[0]]
            name = data["ours"].split(",")[0]
            color = COLORS[names[name]]
            for who, label, hue, style in (
                ("", "", color, _DASHES[seen.count(name)]),
                ("ours_", name, color, "-"),
                ("baseline_", "SDPA", "black", "-"),
            ):
                times = [1000 * row[who + "seconds"]["median"] for row in rows]
                ax.plot([row["length"] for row in rows], times, color=hue, ls=style, lw=1.5)
                if label:
                    ends[label] = times[-1], hue
            seen.append(name)
        ax.set(xscale="log", yscale="log", xlabel="N", title="causal" if causal else "no mask")
        ax.set_xticks(every, map(str, every))
        ax.minorticks_off()
        _label(ax, ends, every[-1])
    axes[0].set_ylabel("time, ms")
    axes[0].legend(
        [Line2D([], [], color=COLORS["reference"], ls=ls) for ls in ("-", *_DASHES)],
        ["ours", "a library", "a second library"],
        loc="upper left",
    )
    return fig


def _label(ax: Any, ends: dict[str, tuple[float, str]], right: int) -> None:
    """Write names to the right of lines, and move names apart that would overlap."""
    import numpy as np

    low, high = np.log10(ax.get_ylim())
    gap, names = (high - low) / 16, sorted(ends, key=lambda name: ends[name][0])
    places = np.log10([ends[name][0] for name in names])
    for _ in range(100):
        overlap = np.clip(gap - np.diff(places), 0, None) / 2
        places[1:] += overlap / 2
        places[:-1] -= overlap / 2
    for name, place in zip(names, places, strict=True):
        ax.annotate(name, (right, 10**place), (6, 0), textcoords="offset points",
                    color=ends[name][1], va="center", annotation_clip=False)  # fmt: skip


def shares(files: Files, length: int = 4096, dim: int = DIM) -> Any:
    """Draw the time of every case as a share of its baseline's, forward and forward + backward.

    Parameters
    ----------
    files : dict
        Results of one machine, by case, from `load`.
    length, dim : int
        N and D.
    """
    import matplotlib.pyplot as plt

    from derived_book.plot import COLORS, LABELS

    def ratios(name: str, mode: str) -> list[float]:
        row = _time(files.get(name), length, GOAL["dtype"], mode, dim)
        return [row["ratio"]["median"]] if row else []

    names = [name for name in files if not name.endswith("_causal")]
    names.sort(key=lambda name: ratios(name, MODES[0]))
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 0.25 * len(names) + 1.0), sharey=True)
    for ax, mode in zip(axes, MODES, strict=True):
        for i, name in enumerate(names):
            for case, marker in ((name, "o"), (name + "_causal", "^")):
                ratio = ratios(case, mode)
                ax.plot(ratio, [i] * len(ratio), marker, color=COLORS[name], ms=6)
        ax.axvline(1, color=COLORS["reference"], lw=1)
        ax.set(xscale="log", title=mode, xlabel="time, baseline = 1")
        ax.set_xticks(ticks := [0.03, 0.1, 0.3, 1, 3, 10], [f"{x:g}" for x in ticks])
        ax.minorticks_off()
        ax.grid(axis="y")
    axes[0].set_yticks(range(len(names)), [LABELS[name] for name in names])
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return fig
