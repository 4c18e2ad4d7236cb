"""Experiments that are recorded: arms and seeds of one task, run once and written for a chapter.

They train on the CPU, one thread for each run, the models that the chapter's page defines
(`experiments.page_models`).

`deciding` describes one by the protocol of appendix C. Each arm gets the best of the same three
learning rates, chosen at the budget on seeds that are not used again. Then every arm runs with
every seed at each number of steps: the last is twice the budget, the one before it, and doubling
the budget may not change the verdict. `derived_book.scores` reads the results at the budget,
`derived_book.curves` those of all steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from derived_attention.common.files import write_atomically
from derived_book.experiment_tables import experiment_caption, experiment_table
from derived_book.experiment_tables import markdown as as_markdown
from derived_book.training.grids import run_grid
from derived_book.training.measure import machine
from derived_book.training.recorded import SCHEMA

SEEDS = 3
RATES = (1e-3, 3e-3, 1e-2)
TUNING_SEEDS = (1000, 1001)


def experiment(
    title: str,
    function: Callable[..., dict[str, float]],
    names: Sequence[str],
    columns: Sequence[Sequence[Any]],
    seeds: int = SEEDS,
    **settings: Any,
) -> dict[str, Any]:
    """Describe an experiment; `columns` are (metric, heading, factor, decimals)."""
    return {
        "title": title,
        "function": function,
        "names": names,
        "columns": columns,
        "seeds": seeds,
        "settings": settings,
    }


def deciding(
    title: str,
    function: Callable[..., dict[str, float]],
    names: Sequence[str],
    columns: Sequence[Sequence[Any]],
    *,
    steps: Sequence[int],
    seeds: int = 8,
    rates: Sequence[float] = RATES,
    best: Callable[..., float] = max,
    tuned_at_end: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Describe an experiment of the protocol.

    ``function(arm, seed, steps, lr, **settings)`` makes one run. `steps` rise, and the last is
    twice the one before it, the budget. `best` is max or min: which value of the first column's
    metric chooses a learning rate. With `tuned_at_end` the worst seed chooses it, at the last
    number of steps: a rate at which a run may collapse after it has learned is then too high.
    Further arguments are those of `experiment`.
    """
    if len(steps) < 2 or list(steps) != sorted(set(steps)) or steps[-1] != 2 * steps[-2]:
        raise ValueError(f"steps is {steps}; expected rising numbers, the last twice the budget")
    plan = experiment(title, function, names, columns, seeds, **settings)
    own = {"steps": list(steps), "rates": list(rates), "best": best, "tuned_at_end": tuned_at_end}
    return plan | own


def run(
    plan: dict[str, Any],
    workers: int = 1,
    kept: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Run one experiment, or read what of it has been run; return what is to be written.

    A run that is among the rows `kept` is taken from there.
    """
    settings = plan["settings"]
    metrics = {metric for metric, *_ in plan["columns"]}
    known = {_run_of(row): row for row in kept if metrics <= row.keys()}

    def results(grid: list[dict[str, Any]]) -> list[dict[str, Any]]:
        new = [x for x in grid if _run_of(x) not in known]
        rows = run_grid(plan["function"], [{**x, **settings} for x in new], workers=workers)
        done = known | {_run_of(x): row for x, row in zip(new, rows, strict=True)}
        return [{k: v for k, v in done[_run_of(x)].items() if k not in settings} for x in grid]

    grid: list[dict[str, Any]] = [
        {"arm": arm, "seed": seed} for seed in range(plan["seeds"]) for arm in plan["names"]
    ]
    more: dict[str, Any] = {}
    if "rates" in plan:
        more = _tuned(plan, results)
        grid = [
            {**x, "steps": n, "lr": more["rates"][x["arm"]]} for n in plan["steps"] for x in grid
        ]
    return {
        "schema": SCHEMA,
        "title": plan["title"],
        "device": "cpu",
        "machine": machine(),
        "settings": settings,
        "columns": plan["columns"],
        **more,
        "rows": results(grid),
    }


def _run_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a run of an experiment from its others."""
    return tuple(row.get(key) for key in ("arm", "seed", "steps", "lr"))


def kept_rows(path: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that are written at `path`, if they are of the same settings.

    Without their times, if another machine took them. Those that chose learning rates are among
    them, if the choice is the same; of their metrics there is only the one that chooses.
    """
    data = json.loads(path.read_text())
    if data["settings"] != plan["settings"]:
        raise ValueError(f"{path.name} has settings {data['settings']}; expected those of the plan")
    timed = set() if data["machine"] == machine() else {"seconds", "cpu_seconds"}
    rows = [{k: v for k, v in row.items() if k not in timed} for row in data["rows"]]
    if "rates" in plan and data.get("budget") == plan["steps"][-2]:
        unknown = dict.fromkeys(metric for metric, *_ in plan["columns"][1:])
        chosen_by = plan["columns"][0][0]
        choosing = [row for row in data["tuning"] if chosen_by in row]
        rows += [{**unknown, "steps": data["budget"], **row} for row in choosing]
    return rows


def _tuned(plan: dict[str, Any], results: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    """Choose the learning rate of each arm, by the mean over the seeds for it, or by the worst."""
    metric, budget, at_end = plan["columns"][0][0], plan["steps"][-2], plan["tuned_at_end"]
    if len(plan["rates"]) == 1:  # nothing to choose
        rates = dict.fromkeys(plan["names"], plan["rates"][0])
        return {"budget": budget, "steps": plan["steps"], "rates": rates, "tuning": []}
    grid = [
        {"arm": arm, "seed": seed, "steps": plan["steps"][-1 if at_end else -2], "lr": lr}
        for arm in plan["names"]
        for lr in plan["rates"]
        for seed in TUNING_SEEDS
    ]
    rows = results(grid)

    def score(arm: str, lr: float) -> float:
        values = [row[metric] for row in rows if (row["arm"], row["lr"]) == (arm, lr)]
        worst = min if plan["best"] is max else max
        return worst(values) if at_end else sum(values)

    rates = {arm: plan["best"](plan["rates"], key=partial(score, arm)) for arm in plan["names"]}
    kept = ("arm", "seed", *["steps"] * at_end, "lr", metric)
    tuning = [{key: row[key] for key in kept} for row in rows]
    return {"budget": budget, "steps": plan["steps"], "rates": rates, "tuning": tuning}


def command(
    prefix: str,
    experiments: dict[str, dict[str, Any]],
    folder: Path,
    text: str | None,
    arguments: Sequence[str] | None,
) -> int:
    """Run what a command line asks for of the module `prefix`, write it, and print its tables."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{prefix}", description=text)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(experiments)}")
    add = parser.add_argument
    add("--workers", type=int, default=1, help="how many processes of this machine (1)")
    add("--keep", action="store_true", help="runs of the written record; run what it lacks")
    asked = parser.parse_args(arguments)
    names = asked.names or list(experiments)
    if unknown := [name for name in names if name not in experiments]:
        parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(experiments)}")
    torch.set_num_threads(1)
    for name in names:
        path = folder / f"{prefix}_{name}_cpu.json"
        kept = kept_rows(path, experiments[name]) if asked.keep else []
        data = run(experiments[name], asked.workers, kept)
        written = json.dumps(data, indent=1) + "\n"
        write_atomically(path, written.encode())
        print(f"{experiment_caption(data)}\n\n{as_markdown(experiment_table(data))}\n", flush=True)
    return 0
