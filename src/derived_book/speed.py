"""Figures of what ``python -m benchmarks`` has measured, from its JSON alone."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from derived_book.plot import COLORS, LABELS
from derived_book.tables import DIM, MODES, Files

UNITS = {"seconds": (1e3, "ms"), "bytes": (2**-20, "MiB")}
GREY = COLORS["reference"]
_NAMES = {label: name for name, label in LABELS.items()}
_DASHES = ((0, (4, 2)), (0, (1, 1.5)))  # of the first and the second library beside one of ours


def growth(files: Files, key: str, mode: str = MODES[0], dim: int = DIM) -> Figure:
    """Draw time ("seconds") or extra memory ("bytes") against N: ours, its peers, and SDPA.

    Two panels, without a mask and causal. Ours are solid and labelled, a library's line is dashed,
    in the colour of what it stands beside.

    Parameters
    ----------
    files : dict
        What `load` returns of the peers of one machine.
    key : str
        "seconds" or "bytes".
    mode : str
        One of `MODES`.
    dim : int
        D.
    """
    factor, unit = UNITS[key]
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 4.0), sharex=True, sharey=True)
    for ax, causal in zip(axes, (False, True), strict=True):
        chosen = [data for data in files.values() if ("causal" in data["beside"]) == causal]
        if not chosen:
            continue
        ends: dict[str, tuple[float, str]] = {}
        seen: list[str] = []
        for data in chosen:
            rows = [x for x in data["times"] if (x["mode"], x["dim"]) == (mode, dim)]
            name = data["ours"].split(",")[0]
            color = COLORS[_NAMES[name]]
            lengths = [row["length"] for row in rows]
            values = {who: [factor * _value(row[who + key]) for row in rows]
                      for who in ("", "ours_", "baseline_")}  # fmt: skip
            ax.plot(lengths, values[""], color=color, ls=_DASHES[seen.count(name)], lw=1.5)
            ax.plot(lengths, values["ours_"], color=color)
            if "SDPA" not in ends or len(lengths) > len(ax.lines[0].get_xdata()):
                ax.plot(lengths, values["baseline_"], color="black", lw=1.5)
            for label, end, hue in (
                (name, values["ours_"][-1], color), ("SDPA", values["baseline_"][-1], "black")
            ):  # fmt: skip
                if lengths[-1] == max(_lengths(chosen)) or label not in ends:
                    ends[label] = end, hue
            seen.append(name)
        ax.set(xscale="log", yscale="log", xlabel="N", title="causal" if causal else "no mask")
        ax.set_xticks(_lengths(chosen), map(str, _lengths(chosen)))
        ax.minorticks_off()
        _label(ax, ends, max(_lengths(chosen)))
    axes[0].set_ylabel(f"{'time' if key == 'seconds' else 'extra memory'}, {unit}")
    axes[0].legend(
        [Line2D([], [], color=GREY, ls=ls) for ls in ("-", *_DASHES)],
        ["ours", "a library", "another one"],
        loc="upper left",
    )
    return fig


def _share(data: dict[str, Any], length: int, dim: int, mode: str) -> list[float]:
    """Return the median ratio to SDPA's time, if there is one."""
    wanted = (length, dim, mode)
    return [
        row["ratio"]["median"]
        for row in data["times"]
        if (row["length"], row.get("dim", DIM), row["mode"]) == wanted
    ]


def _value(x: Any) -> float:
    return x["median"] if isinstance(x, dict) else x


def _lengths(chosen: list[dict[str, Any]]) -> list[int]:
    return sorted({row["length"] for data in chosen for row in data["times"]})


def _label(ax: Axes, ends: dict[str, tuple[float, str]], right: int) -> None:
    """Write names behind the ends of lines; where two would overlap, both give way."""
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


def shares(files: Files, length: int = 4096, dim: int = DIM) -> Figure:
    """Draw the time of every case as a share of SDPA's, forward and forward + backward.

    Parameters
    ----------
    files : dict
        What `load` returns of the cases of one machine.
    length, dim : int
        N and D.
    """
    names = [name for name in files if not name.endswith("_causal")]
    names.sort(key=lambda name: _share(files[name], length, dim, MODES[0])[0])
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 0.25 * len(names) + 1.0), sharey=True)
    for ax, mode in zip(axes, MODES, strict=True):
        for i, name in enumerate(names):
            for case, marker in ((name, "o"), (name + "_causal", "^")):
                ratio = _share(files[case], length, dim, mode) if case in files else []
                ax.plot(ratio, [i] * len(ratio), marker, color=COLORS[name], ms=6)
        ax.axvline(1, color=GREY, lw=1)
        ax.set(xscale="log", title=mode)
        ax.set_xticks(ticks := [0.03, 0.1, 0.3, 1, 3, 10], [f"{x:g}" for x in ticks])
        ax.minorticks_off()
        ax.grid(axis="y")
    axes[0].set_yticks(range(len(names)), [LABELS[name] for name in names])
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return fig
