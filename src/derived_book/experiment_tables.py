"""Show an experiment of the protocol on a page: its table, its curves, its statistical power.

The protocol is that of appendix E; `experiments.protocol.experiment` records such experiments.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from scipy import optimize, stats

from derived_book.intervals import LEVEL
from derived_book.plot import COLORS, LABELS
from derived_book.training.recorded import curves, load_experiment

POWER = 0.8
Table = tuple[list[str], list[list[str]]]  # header and rows


def results_table(
    name: str,
    metric: str,
    *,
    predicted: Mapping[str, str],
    factor: float = 100,
    unit: str = "%",
    digits: int = 1,
) -> Any:
    """Return a recorded experiment as a table: what was predicted, and what each arm scores.

    A row is an arm of `predicted`, in its order. The columns are the prediction, the mean with its
    95 % interval at the budget, the mean at twice the budget, and the learning rate that was chosen
    for the arm. The line below states the number of seeds, and the difference between two arms that
    this number detects with a probability of 80 %.

    Parameters
    ----------
    name, metric
        As in `derived_book.curves`.
    predicted : mapping
        The text of the prediction for each arm to show.
    factor, unit, digits
        Values are shown times `factor`, in that unit, with so many decimals.

    Raises
    ------
    ValueError
        If `predicted` is empty, or an arm of it is not in the experiment; otherwise as in `curves`.
    """
    from IPython.display import Markdown

    data, found = load_experiment(name)[0], curves(name, metric)
    if not predicted:
        raise ValueError("predicted is empty; expected at least one arm")
    _check_arms("predicted", predicted, name, found)
    budget, twice = data["budget"], 2 * data["budget"]
    space = "" if unit == "%" else " "
    header = ["arm", "predicted", f"{budget:,} steps", f"{twice:,} steps", "learning rate"]
    rows, spreads, counts = [], [], []
    for arm, text in predicted.items():
        values = [factor * x for x in found[arm][budget]]
        later = statistics.mean(factor * x for x in found[arm][twice])
        counts.append(len(values))
        width = ""
        if len(values) > 1:
            spreads.append(statistics.stdev(values))
            width = f" ± {_half(values):.{digits}f}"
        now = f"{statistics.mean(values):.{digits}f}{width}{space}{unit}"
        rows.append([arm, text, now, f"{later:.{digits}f}{space}{unit}", f"{data['rates'][arm]:g}"])
    line = f"The table shows means over {_count(counts)} with 95 % intervals. {_rate_rule(data)}"
    if spreads:
        fewest = min(n for n in counts if n > 1)
        least = detectable(math.sqrt(statistics.mean(sd**2 for sd in spreads)), fewest)
        size = f"{least:.{max(digits, 1)}f}{space}{unit.replace('%', ' points')}"
        line += (
            f" With {fewest} seeds, a difference of {size} between two arms is detected with a "
            "probability of 80 %."
        )
    return Markdown(f"{markdown((header, rows))}\n\n{line}")


def plot_curves(ax: Any, name: str, metric: str, *, factor: float = 100, **styles: Any) -> None:
    """Draw the mean of each arm over the steps, with its 95 % interval, and mark the budget.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    name, metric, factor
        As in `results_table`.
    styles
        By arm, in the order in which arms are drawn: a colour, or the name of a mechanism of the
        registry. Arms that are not named are left out; if none is named, all are drawn.

    Raises
    ------
    ValueError
        If an arm of `styles` is not in the experiment; otherwise as in `curves`.
    """
    found = curves(name, metric)
    _check_arms("styles", styles, name, found)
    for number, arm in enumerate(styles or found):
        style = styles.get(arm, f"C{number}")
        steps = list(found[arm])
        values = [[factor * x for x in found[arm][n]] for n in steps]
        ax.errorbar(
            steps,
            [statistics.mean(x) for x in values],
            [_half(x) for x in values],
            color=COLORS.get(style, style),
            label=LABELS.get(arm, arm[0].upper() + arm[1:]),
            marker="o",
            markersize=3,
            capsize=2,
        )
    ax.axvline(load_experiment(name)[0]["budget"], color="0.6", linewidth=0.8, linestyle=":")
    ax.set_xscale("log")
    ticks = sorted({n for arm in found.values() for n in arm})
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
    ax.minorticks_off()
    ax.set_xlabel("steps of training")


def detectable(sd: float, seeds: int) -> float:
    """Return the difference of two means that Student's test finds with a probability of 80 %.

    The test is two-sided at 5 %, with `seeds` runs in each arm, whose standard deviation is `sd`.

    Raises
    ------
    ValueError
        If `seeds` is below 2 or `sd` negative.

    Examples
    --------
    >>> round(detectable(1.0, 17), 2)
    0.99
    """
    if seeds < 2 or not sd >= 0:
        raise ValueError(f"sd is {sd} and seeds {seeds}; expected sd >= 0 and seeds >= 2")
    degrees = 2 * seeds - 2
    critical = stats.t.ppf(1 - LEVEL / 2, degrees)

    def lacking(shift: float) -> float:  # SciPy's noncentral t is NaN for some arguments
        def found(x: float) -> float:
            return stats.norm.sf(critical * math.sqrt(x / degrees) - shift)

        return stats.chi2.expect(found, args=(degrees,)) - POWER

    return float(optimize.brentq(lacking, 0.1, 50.0)) * sd * math.sqrt(2 / seeds)


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


def tuning_table(name: str) -> Any:
    """Return a folded table of how the learning rates of a recorded experiment were chosen.

    A row is an arm; its columns are those of `rates_table`. The line below states the rule that the
    record follows.

    Raises
    ------
    ValueError
        If the experiment has chosen no rates; otherwise as in `derived_book.load_experiment`.
    """
    from IPython.display import Markdown

    data = load_experiment(name)[0]
    if not data.get("tuning"):
        raise ValueError(f"name is {name!r}; expected an experiment that has chosen learning rates")
    summary = f"<details><summary>How the learning rates were chosen: {data['title']}</summary>"
    table = markdown(rates_table(data))
    return Markdown(f"{summary}\n\n{table}\n\n{data['rule']}.\n\n</details>")


def rates_table(data: dict[str, Any]) -> Table:
    """Return each arm's learning rate, its score and those of its neighbours, and its collapses.

    Scores are the worst of the tuning seeds at the last number of steps; for a rate that was not
    tried with all seeds, a bound. The last column is the score after eight times as many steps;
    a record without such runs has no such column.

    Returns
    -------
    header, rows
        Lists of text; a dash is a number that the record does not have.
    """
    metric, heading, factor, digits = data["columns"][0]
    combine = {"max": min, "min": max}[data["best"]]
    header = ["arm", "learning rate", "next lower", "chosen", "next higher", "collapsed runs"]
    if data["eightfold"]:
        header.append(f"{heading}, {8 * data['steps'][-1]:,} steps")
    rows = []
    for arm, rate in data["rates"].items():
        tried: dict[float, list[float]] = {rate: []}
        for row in data["tuning"]:
            if row["arm"] == arm:
                tried.setdefault(row["lr"], []).append(factor * row[metric])
        order = sorted(tried)
        place = order.index(rate)
        near = [tried[order[i]] if 0 <= i < len(order) else [] for i in range(place - 1, place + 2)]
        seeds, bound = max(map(len, tried.values())), "≥ " if combine is max else "≤ "
        marks = ["" if len(values) == seeds else bound for values in near]
        texts = [
            f"{mark}{combine(values):.{digits}f}" if values else "–"
            for mark, values in zip(marks, near, strict=True)
        ]
        fallen = [row["lr"] for row in data["collapses"] if row["arm"] == arm]
        lost = ", ".join(f"{fallen.count(lr)} at {lr:g}" for lr in sorted(set(fallen))) or "none"
        long = [row for row in data["eightfold"] if row["arm"] == arm]
        last = _spread(long, *data["columns"][0]) if long else "–"
        rows.append([arm, f"{rate:g}", *texts, lost, last][: len(header)])
    return header, rows


def experiment_caption(data: dict[str, Any]) -> str:
    """One line on what was run, how often, and on what machine."""
    machine = data["machine"]
    where = machine["gpu"] or f"{machine['processor']}, threads: {machine['threads']}"
    settings = ", ".join(f"{key} = {value}" for key, value in data["settings"].items())
    title = f"{data['title']} ({settings})" if settings else data["title"]
    rows = [row for row in data["rows"] if row.get("steps") == data["rows"][0].get("steps")]
    return (
        f"{title}, mean ± standard deviation of "
        f"{_count(Counter(row['arm'] for row in rows).values())}; parameters and operations of all "
        f"attention layers, forward, one sequence; {where}; PyTorch {machine['torch']}, "
        f"{machine['date']}"
    )


def markdown(table: Table) -> str:
    """Write a table in Markdown."""
    header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _rate_rule(data: dict[str, Any]) -> str:
    """Return the sentence that says how a record's learning rates were chosen."""
    if not data["tuning"]:  # one rate, so that there was nothing to choose
        return "All arms have the same learning rate."
    steps = f"{data['tuning'][0]['steps']:,}"
    return f"The learning rates were chosen after {steps} steps, by the worst of other seeds."


def _check_arms(argument: str, arms: Iterable[str], name: str, found: Mapping[str, Any]) -> None:
    """Raise ValueError unless the arms of an argument are in an experiment."""
    if unknown := [arm for arm in arms if arm not in found]:
        raise ValueError(f"{argument} has {unknown}; expected arms of {name}: {', '.join(found)}")


def _count(seeds: Iterable[int]) -> str:
    """Return how many seeds arms have, such as "8 seeds" or "1 to 5 seeds"."""
    low, high = min(seeds := list(seeds)), max(seeds)
    return f"{high} seeds" if low == high else f"{low} to {high} seeds"


def _half(values: list[float]) -> float:
    """Return half the width of the 95 % interval of the mean; NaN for a single value."""
    n = len(values)
    if n < 2:
        return math.nan
    return float(stats.t.ppf(1 - LEVEL / 2, n - 1) * np.std(values, ddof=1) / math.sqrt(n))
