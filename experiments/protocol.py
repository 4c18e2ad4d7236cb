"""Run recorded experiments: arms and seeds of one task, run once and written for a chapter.

They train the models that the chapter's page defines (`experiments.page_models`), on the CPU with
one thread for each run unless a device is set.

`experiment` describes one that follows the protocol of appendix E. The learning rate of each arm is
chosen at the last number of steps, by the worst of three seeds that are not used again (and by
their mean if the worst tie), from a grid that grows until the best rate is inside it, and up to 0.1
for an arm that learns at no lower rate. A rate that one seed rules out is not tried with others.
Then every arm runs with every seed at each number of steps. The last number is twice the one before
it, the budget, and doubling the budget must not change the verdict.
If a run of an arm collapses after it has learned, the arm runs again at the next lower rate. An arm
that the page places below another one, or below a number, also runs for eight times the last number
of steps, and the experiment is not written if the arm is no longer below after them.

`derived_book.scores` reads the results at the budget, `derived_book.curves` those of all steps, and
`derived_book.tuning_table` shows how the rates were chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from derived_attention.common.files import write_atomically
from derived_book.experiment_tables import experiment_caption, experiment_table, rates_table
from derived_book.experiment_tables import markdown as as_markdown
from derived_book.intervals import decided
from derived_book.tasks.series.data import SeriesData, load_series
from derived_book.training.grids import run_grid
from derived_book.training.measure import machine
from derived_book.training.recorded import SCHEMA
from experiments.divergence import has_collapsed, watch_losses

SEEDS = 8
GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # all rates that may be tried
FIRST_RATES = GRID[2:5]
HIGHEST = GRID[6]  # an arm that learns at no lower rate is tried up to here
CONTROLS = ("uniform", "alone", "position only")
BLIND = CONTROLS[:2]  # they choose nothing; a layer that sees positions can equal any arm
TUNING_SEEDS = (1000, 1001, 1002)
TIE, TIE_SHARE = 0.005, 0.01  # scores tie within this, or this share of their range
LONGER, LONG_SEEDS = 8, (0, 1, 2)
POINT = 0.01  # margin above a computed limit that an arm reaches, as its score is an estimate
RULE = (
    "Each learning rate is chosen after {steps:,} steps by the {seeds}, from a grid that grows "
    "until the best rate is inside it or ties with its neighbour there, and up to 0.1 for an arm "
    "whose worst seed is no better than a layer that chooses nothing; a rate at which one of these "
    "runs collapses is not chosen"
)
FIXED = "All arms have the learning rate {rate:g}, and none is chosen"
Results = Callable[[Iterable[dict[str, Any]]], list[dict[str, Any]]]


def experiment(
    title: str,
    function: Callable[..., dict[str, float]],
    names: Sequence[str],
    columns: Sequence[Sequence[Any]],
    *,
    steps: Sequence[int],
    seeds: int | Mapping[str, int] = SEEDS,
    tuning_seeds: Sequence[int] = TUNING_SEEDS,
    rate: float | None = None,
    best: Callable[..., float] = max,
    tie: float | None = None,
    below: Mapping[str, str | float] | None = None,
    longer: Sequence[str] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Describe an experiment of the protocol.

    ``function(arm, seed, steps, lr, **settings)`` makes one run. `steps` increase, and the last is
    twice the one before it, the budget. The metric of the first column chooses learning rates and
    decides the orders in `below`; `best` is max or min of it. If `rate` is given, all arms have it.
    A mapping `seeds` gives the number of seeds of some arms, and all others have eight: one seed is
    enough for an arm that cannot do the task, as the page has computed. `tuning_seeds` choose the
    learning rates: one is enough if scores differ little between seeds. Two scores that choose
    rates tie if they differ by at most `tie`, or, without it, by the rule of `choose_rate`.

    `below` maps each arm that the page's verdict places below another arm or a number, because it
    scores worse, to this arm or number: ``{"latent 8": "full", "rank 8": 0.5}``. These arms also
    run for eight times the last number of steps. So do the arms in `longer`, for which no order is
    checked. `columns` are (metric, heading, factor, decimals); further arguments are settings,
    which all runs get.
    """
    if len(steps) < 2 or list(steps) != sorted(set(steps)) or steps[-1] != 2 * steps[-2]:
        raise ValueError(f"steps is {steps}; expected rising numbers, the last twice the budget")
    below = dict(below or {})
    arms = {*longer, *below, *(x for x in below.values() if isinstance(x, str))}
    if unknown := sorted(arms - set(names)):
        raise ValueError(f"below or longer has {unknown}; expected arms of {list(names)}")
    counts = dict.fromkeys(names, seeds) if isinstance(seeds, int) else dict(seeds)
    if unknown := sorted(counts.keys() - set(names)):
        raise ValueError(f"seeds has {unknown}; expected arms of {list(names)}")
    fewest = min((counts.get(arm, SEEDS) for arm in arms), default=len(LONG_SEEDS))
    if fewest < len(LONG_SEEDS):
        raise ValueError(f"seeds is {fewest}; expected at least {len(LONG_SEEDS)} for longer runs")
    return {
        "title": title,
        "function": function,
        "names": names,
        "columns": columns,
        "settings": settings,
        "seeds": seeds,
        "steps": list(steps),
        "tuning_seeds": tuning_seeds,
        "rate": rate,
        "best": best,
        "tie": tie,
        "below": below,
        "longer": [arm for arm in names if arm in below or arm in longer],
    }


def seeds_of(plan: Mapping[str, Any], arm: str) -> range:
    """Return the seeds of the runs of an arm."""
    seeds = plan["seeds"]
    return range(seeds if isinstance(seeds, int) else seeds.get(arm, SEEDS))


def run(
    plan: dict[str, Any],
    workers: int = 1,
    kept: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Make or read the runs of one experiment; return the contents of its record.

    A run that is among the rows `kept` is taken from there.
    """
    settings = plan["settings"]
    metrics = {metric for metric, *_ in plan["columns"]}
    known = {_run_of(row): row for row in kept if metrics | {"collapsed"} <= row.keys()}
    function = watched(plan["function"], metrics)

    def results(grid: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        grid = list(grid)
        new = [x for x in grid if _run_of(x) not in known]
        rows = run_grid(function, [{**x, **settings} for x in new], workers=workers)
        known.update((_run_of(x), row) for x, row in zip(new, rows, strict=True))
        return [{k: v for k, v in known[_run_of(x)].items() if k not in settings} for x in grid]

    return {
        "schema": SCHEMA,
        "title": plan["title"],
        "device": settings.get("device", "cpu"),
        "machine": machine(),
        "settings": settings,
        "columns": plan["columns"],
        **_decided(plan, results),
    }


def watched(
    function: Callable[..., dict[str, float]], metrics: Iterable[str]
) -> Callable[..., dict[str, float]]:
    """Return a function that also returns whether its run collapsed, as ``"collapsed"``, 0 or 1.

    If `fit` stops a run because its loss is not finite, all metrics are NaN.
    """

    @functools.wraps(function)
    def watched_run(**config: Any) -> dict[str, float]:
        with watch_losses() as losses:
            try:
                found = function(**config)
            except FloatingPointError:
                found = dict.fromkeys(metrics, math.nan)
                losses.append(math.nan)
        return {**found, "collapsed": int(has_collapsed(losses))}

    return watched_run


def load_series_for(seed: int, name: str) -> SeriesData:
    """Load a set of series; for a tuning seed, without its test split.

    A quarter of the training split, another one for each seed, is then the test split. So the
    series that choose learning rates are not those of the page's scores.
    """
    data = load_series(name)
    if seed not in TUNING_SEEDS:
        return data
    held = torch.arange(len(data.train)) % 4 == seed % 4
    train, test = (
        dataclasses.replace(
            data.train, **{k: x if x is None else x[rows] for k, x in vars(data.train).items()}
        )
        for rows in (~held, held)
    )
    return dataclasses.replace(data, train=train, test=test)


def _run_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values that identify a run of an experiment."""
    return tuple(row.get(key) for key in ("arm", "seed", "steps", "lr"))


def kept_rows(path: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of the record at `path`, if there is one.

    ValueError is raised if its settings differ from the plan's.

    Times are left out unless this machine wrote the record today, with as many threads. In a run
    that chose a learning rate, only the metric of this choice is known. `run` repeats a run that
    has no ``"collapsed"``.
    """
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    if data["settings"] != json.loads(json.dumps(plan["settings"])):  # tuples are lists there
        raise ValueError(f"{path.name} has settings {data['settings']}; expected those of the plan")
    timed = set() if data["machine"] == machine() else {"seconds", "cpu_seconds"}
    rows = [*data["rows"], *data.get("eightfold", [])]
    rows = [{k: v for k, v in row.items() if k not in timed} for row in rows]
    unknown = dict.fromkeys(metric for metric, *_ in plan["columns"][1:])
    return rows + [unknown | row for row in data.get("tuning", [])]


def _decided(plan: dict[str, Any], results: Results) -> dict[str, Any]:
    """Choose the rates, make all runs and the longer ones; return their part of the record."""
    steps, fixed, metric = plan["steps"], plan["rate"], plan["columns"][0][0]
    first, *more = map(str, plan["tuning_seeds"])
    seeds = f"worst of the seeds {', '.join((first, *more))}, and by their mean where the worst tie"
    seeds = seeds if more else f"seed {first}"
    rule = FIXED.format(rate=fixed) if fixed else RULE.format(steps=steps[-1], seeds=seeds)
    tuning = [] if fixed else _tuned(plan, results)
    rates = {arm: fixed or rate_of(plan, tuning, arm)[0] for arm in plan["names"]}
    own = {arm: seeds_of(plan, arm) for arm in plan["names"]}
    rows, lost = _steady(plan, results, plan["names"], steps, own, rates)
    long = dict(rates)  # a longer run may need a lower rate than the others of its arm
    eightfold, more = _steady(
        plan,
        results,
        plan["longer"],
        [LONGER * steps[-1]],
        dict.fromkeys(plan["longer"], LONG_SEEDS),
        long,
    )
    fallen = [*(row for row in tuning if row["collapsed"]), *lost, *more]
    identity = ("arm", "seed", "steps", "lr")
    return {
        "budget": steps[-2],
        "steps": steps,
        "rule": rule,
        "best": plan["best"].__name__,
        "rates": rates,
        "at_bound": [] if fixed else [a for a, lr in rates.items() if lr in (GRID[0], GRID[-1])],
        "tuning": [{key: row[key] for key in (*identity, metric, "collapsed")} for row in tuning],
        "collapses": [{key: row[key] for key in identity} for row in fallen],
        "rows": rows,
        "eightfold": eightfold,
    }


def _tuned(plan: dict[str, Any], results: Results) -> list[dict[str, Any]]:
    """Make runs of each arm until its learning rate is chosen, and return these runs."""
    rows: list[dict[str, Any]] = []
    while asked := [run for arm in plan["names"] for run in _next_runs(plan, rows, arm)]:
        rows += results(asked)
    return sorted(rows, key=lambda row: (plan["names"].index(row["arm"]), row["lr"], row["seed"]))


def _next_runs(plan: dict[str, Any], rows: list[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    """Return the runs that an arm needs next to choose its rate, or none if it is chosen.

    Each rate is tried with the first seed, and the most promising one with all. The worst seed
    decides, so a rate needs no further runs if one of its seeds is worse than all of another rate.
    """
    seeds, tried = plan["tuning_seeds"], _tried(plan, rows, arm)
    asked = [(lr, seeds[:1]) for lr in FIRST_RATES if lr not in tried]
    if not asked:
        worst = {lr: min(scores) for lr, scores in tried.items()}
        whole = [x for lr, x in worst.items() if len(tried[lr]) == len(seeds)]
        bar = max(whole, default=-math.inf) - _tolerance(worst.values(), plan["tie"])
        left = [lr for lr in tried if len(tried[lr]) < len(seeds) and -math.inf < worst[lr] >= bar]
        if left:
            lr = max(left, key=lambda rate: worst[rate])
            asked = [(lr, seeds[len(tried[lr]) :])]
        elif more := rate_of(plan, rows, arm)[1]:
            asked = [(more, seeds[:1])]
    steps = plan["steps"][-1]
    return [
        {"arm": arm, "seed": seed, "steps": steps, "lr": lr} for lr, own in asked for seed in own
    ]


def rate_of(
    plan: dict[str, Any], rows: list[dict[str, Any]], arm: str
) -> tuple[float, float | None]:
    """Return the best rate that was tried of an arm, and the one to try before that is final.

    They are those of `choose_rate`, except if at each rate some seed of the arm scores no better
    than the mean of a layer that chooses nothing. Such an arm may learn only at a higher rate, so
    all rates up to 0.1 are tried.
    """
    tried = _tried(plan, rows, arm)
    best, more = choose_rate(tried, plan["tie"])
    others = [_tried(plan, rows, other) for other in BLIND if other in plan["names"]]
    control = max((sum(x) / len(x) for z in others for x in z.values()), default=-math.inf)
    learned = max(map(min, tried.values())) > control + TIE
    if more is None and arm not in CONTROLS and not learned and max(tried) < HIGHEST:
        more = GRID[GRID.index(max(tried)) + 1]
    return best, more


def _tried(plan: dict[str, Any], rows: list[dict[str, Any]], arm: str) -> dict[float, list[float]]:
    """Return the scores of an arm at each rate: larger is better, and -inf is a collapse."""
    metric, sign = plan["columns"][0][0], 1 if plan["best"] is max else -1
    scores: dict[float, list[float]] = {}
    for row in rows:
        if row["arm"] == arm:
            failed = row["collapsed"] or math.isnan(row[metric])
            scores.setdefault(row["lr"], []).append(-math.inf if failed else sign * row[metric])
    return scores


def choose_rate(
    scores: Mapping[float, Sequence[float]], tie: float | None = None
) -> tuple[float, float | None]:
    """Return the best of the rates that were tried, and the one to try before that is final.

    The best rate is the one whose worst score is best; of those that tie, the one with the best
    mean. It is final if it is not at an edge. If it is at an edge, but its inner neighbour ties
    with it in both numbers, the neighbour is chosen and final. Two scores tie if they differ by at
    most `tie`, or, if this is None, by at most 0.005 or 1 % of the range of the arm's worst scores.
    A rate at the end of `GRID` is final.

    Parameters
    ----------
    scores : mapping
        The scores of at least two rates of `GRID` without a gap: larger is better, and -inf is a
        collapse.
    """
    rates = sorted(scores)
    worst, mean = ({r: f(scores[r]) for r in rates} for f in (min, lambda x: sum(x) / len(x)))
    tolerance = _tolerance(worst.values(), tie)
    near = [rate for rate in rates if worst[rate] >= max(worst.values()) - tolerance]
    best = max(near, key=lambda rate: mean[rate])
    if rates[0] < best < rates[-1]:
        return best, None
    inner, side = (rates[1], -1) if best == rates[0] else (rates[-2], 1)
    if inner in near and mean[best] - mean[inner] <= tolerance:
        return inner, None
    place = GRID.index(best) + side
    return best, GRID[place] if 0 <= place < len(GRID) else None


def _tolerance(scores: Iterable[float], tie: float | None) -> float:
    """Return the largest difference at which two of an arm's scores tie."""
    if tie is not None:
        return tie
    finite = [x for x in scores if math.isfinite(x)] or [0.0]
    return max(TIE, TIE_SHARE * (max(finite) - min(finite)))


def _steady(
    plan: dict[str, Any],
    results: Results,
    arms: Sequence[str],
    steps: Sequence[int],
    seeds: Mapping[str, Sequence[int]],
    rates: dict[str, float],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run arms at their rates; while a run of an arm collapses, lower its rate in `rates`.

    Return the last runs of each arm, and all runs that collapsed.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    collapses: list[dict[str, Any]] = []
    while arms:
        new = results(
            {"arm": arm, "seed": seed, "steps": n, "lr": rates[arm]}
            for n in steps
            for seed in range(max(len(seeds[arm]) for arm in arms))
            for arm in arms
            if seed in seeds[arm]
        )
        rows |= {(row["steps"], row["seed"], row["arm"]): row for row in new}
        fallen = [row for row in new if row["collapsed"]]
        collapses += fallen
        again = dict.fromkeys(row["arm"] for row in fallen)
        arms = [] if plan["rate"] else [arm for arm in again if rates[arm] > GRID[0]]
        rates |= {arm: GRID[GRID.index(rates[arm]) - 1] for arm in arms}
    return list(rows.values()), collapses


def changed_orders(data: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """Return a sentence for each arm whose longer runs do not support its order in `below`.

    They are compared by pairs of seeds with the runs of the other arm: its longer ones, if there
    are any, otherwise those of the last number of steps. Because three seeds decide little, an
    order that their interval leaves open is supported if at least half of the difference after the
    last number of steps remains.
    """
    if not plan.get("below"):
        return []
    metric, sign = plan["columns"][0][0], 1 if plan["best"] is max else -1
    steps, found = plan["steps"][-1], []

    def scores(arm: str, rows: list[dict[str, Any]]) -> list[float]:
        rows = [row for row in rows if row["arm"] == arm]
        return [sign * row[metric] for seed in LONG_SEEDS for row in rows if row["seed"] == seed]

    last = [row for row in data["rows"] if row["steps"] == steps]
    for arm, other in plan["below"].items():
        mine, before = scores(arm, data["eightfold"]), scores(arm, last)
        theirs = earlier = [sign * other] * len(mine) if not isinstance(other, str) else []
        if isinstance(other, str):
            earlier = scores(other, last)
            theirs = scores(other, data["eightfold"]) or earlier
        word, left = "open", -math.inf
        if all(map(math.isfinite, mine + theirs)):
            word = decided(mine, theirs, paired=True)
            left = sum(theirs) - sum(mine)
        if word != "behind" and not left >= (sum(earlier) - sum(before)) / 2 > 0:
            means = " against ".join(f"{sign * sum(x) / len(x):.3g}" for x in (mine, theirs))
            found.append(
                f"`below` places {arm} below {other}; after {LONGER * steps:,} steps it is {word} "
                f"({metric} {means}, {len(mine)} seeds)"
            )
    return found


def command(
    prefix: str,
    experiments: dict[str, dict[str, Any]],
    folder: Path,
    text: str | None,
    arguments: Sequence[str] | None,
) -> int:
    """Run the experiments that a command line names, write their records, print their tables."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{prefix}", description=text)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"one or more of {', '.join(experiments)}; default: all",
    )
    add = parser.add_argument
    add("--workers", type=int, default=1, help="number of processes (default 1)")
    add("--keep", action="store_true", help="reuse recorded runs, and make the missing ones")
    asked = parser.parse_args(arguments)
    names = asked.names or list(experiments)
    if unknown := [name for name in names if name not in experiments]:
        parser.error(f"names has {', '.join(unknown)}; expected some of {', '.join(experiments)}")
    torch.set_num_threads(1)
    refused = False
    for name in names:
        plan = experiments[name]
        run_by = sys.modules["__main__"].__spec__  # None for a script
        if plan["function"].__module__ == "__main__" and run_by:  # other processes import it
            module = importlib.import_module(run_by.name)
            plan = plan | {"function": getattr(module, plan["function"].__name__)}
        path = folder / f"{prefix}_{name}_{plan['settings'].get('device', 'cpu')}.json"
        data = run(plan, asked.workers, kept_rows(path, plan) if asked.keep else [])
        changed = changed_orders(data, plan)
        if not changed:
            write_atomically(path, (json.dumps(data, indent=1) + "\n").encode())
        print(f"{experiment_caption(data)}\n\n{as_markdown(experiment_table(data))}\n")
        if "rates" in data:
            print(f"{data['rule']}.\n\n{as_markdown(rates_table(data))}\n")
        for line in changed:
            print(f"{path.name} is not written: {line}.")
        refused = refused or bool(changed)
        sys.stdout.flush()
    return int(refused)
