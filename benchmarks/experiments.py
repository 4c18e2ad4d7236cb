"""Experiments that are recorded: arms and seeds of one task, run once and written for a chapter."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from derived_attention.page.tables import experiment_caption, experiment_table
from derived_attention.page.tables import markdown as as_markdown
from derived_attention.runtime import write_atomically
from derived_attention.training.cluster import Ray, Workers
from derived_attention.training.grids import run_grid
from derived_attention.training.measure import machine
from derived_attention.training.recorded import SCHEMA

SEEDS = 3


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


def run(plan: dict[str, Any], device: str, workers: int | Workers = 1) -> dict[str, Any]:
    """Run one experiment, or read what of it has been run; return what is to be written."""
    settings = plan["settings"] | {"device": device}
    grid = [
        {"arm": arm, "seed": seed, **settings}
        for seed in range(plan["seeds"])
        for arm in plan["names"]
    ]
    results = run_grid(plan["function"], grid, workers=workers)
    rows = [{k: v for k, v in row.items() if k not in settings} for row in results]
    return {
        "schema": SCHEMA,
        "title": plan["title"],
        "device": device,
        "machine": machine(),
        "settings": plan["settings"],
        "columns": plan["columns"],
        "rows": rows,
    }


def command(
    prefix: str,
    experiments: dict[str, dict[str, Any]],
    folder: Path,
    text: str | None,
    arguments: Sequence[str] | None,
) -> int:
    """Run what a command line asks for of the module `prefix`, write it, and print its tables."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{prefix}", description=text)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(experiments)}")
    add = parser.add_argument
    add("--workers", default="1", help="how many processes of this machine (1), or: ray")
    add("--address", help="of the Ray cluster: auto, if this machine is part of it")
    add("--gpus", type=float, default=0, help="that Ray gives to each run (0)")
    asked = parser.parse_args(arguments)
    names = asked.names or list(experiments)
    if unknown := [name for name in names if name not in experiments]:
        parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(experiments)}")
    if asked.workers != "ray" and not asked.workers.isdecimal():
        parser.error(f"--workers is {asked.workers}; expected a number, or ray")
    if asked.workers != "ray" and (asked.address or asked.gpus):
        parser.error("--address and --gpus are Ray's; expected --workers ray beside them")
    if asked.workers == "ray":
        workers: int | Workers = Ray(asked.address, num_gpus=asked.gpus)
        device = "cuda" if asked.gpus else "cpu"
    else:
        workers, device = int(asked.workers), "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    for name in names:
        data = run(experiments[name], device, workers)
        written = json.dumps(data, indent=1) + "\n"
        write_atomically(folder / f"{prefix}_{name}_{device}.json", written.encode())
        print(f"{experiment_caption(data)}\n\n{as_markdown(experiment_table(data))}\n", flush=True)
    return 0
