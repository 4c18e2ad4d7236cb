"""Run everything that needs a GPU, in steps that can be resumed: ``make gpu``.

The steps measure the table of all mechanisms, compare the kernels with their formulas, and run all
notebooks. Each step has a share of the minutes, and unused time goes to the next one. A step that
takes longer is stopped, and its results so far are kept. The same command resumes, even if the
machine was lost. No network is needed, and any PyTorch with which the package runs is sufficient.
``benchmarks/results/gpu-<machine>.json`` contains the output of each step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import run
from benchmarks.gpu.table import UNFINISHED
from benchmarks.report import RESULTS, slug
from derived_book.training.measure import machine

ROOT = Path(__file__).resolve().parents[2]
REST = 12  # s from the end of a step's --minutes to the time at which it is stopped
TURNS = 4  # largest number of calls of a step that is unfinished and has time left


@dataclass(frozen=True)
class Step:
    """A command for this Python, with its name and its share of the minutes."""

    name: str
    command: tuple[str, ...]
    share: float


def steps(out: Path, rehearse: bool = False) -> list[Step]:
    """Return all steps; those of a rehearsal need no GPU."""
    place, tiny = ("--output", str(out)), ("--rehearse",) * rehearse
    short = ("--only", "C_claims") * rehearse
    return [
        Step("table", ("-m", "benchmarks.gpu.table", *place, *tiny), 5.5 / 9),
        Step("verify", ("-m", "benchmarks.gpu.verify", *place), 0.5 / 9),
        Step("chapters", ("-m", "benchmarks.gpu.chapters", *place, *short), 3 / 9),
    ]


def call(step: Step, seconds: float) -> dict[str, Any]:
    """Run a step in a process of its own, and stop it when its time is up."""
    begin = time.monotonic()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    minutes = ("--minutes", f"{max(0.0, seconds - REST) / 60:.2f}")
    process = subprocess.Popen(
        [sys.executable, *step.command, *minutes],
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        code = UNFINISHED
    states = {0: "done", UNFINISHED: "unfinished"}
    return {
        "state": states.get(code, "failed"),
        "seconds": round(time.monotonic() - begin, 1),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": run.commit(),
        "said": said.strip().splitlines()[-150:],
    }


def take(step: Step, end: float) -> dict[str, Any]:
    """Run a step, again while it is unfinished and time is left; return its last result."""
    for _ in range(TURNS):
        found = call(step, max(1.0, end - time.monotonic()))
        if found["state"] != "unfinished" or end - time.monotonic() < 2 * REST:
            break
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps that are not done; return 1 if one is still not done, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=9.0, help="default %(default)s")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="prefixes of step names"
    )
    parser.add_argument("--again", action="store_true", help="repeat steps that are done")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, without a GPU")
    options = parser.parse_args(arguments)
    if not (torch.cuda.is_available() or options.rehearse):
        print("No GPU was found. --rehearse runs the same steps at tiny sizes on the CPU.")
        return 2
    file = options.output / f"gpu-{slug(machine())}.json"
    data: dict[str, Any] = json.loads(file.read_text("utf8")) if file.exists() else {}
    data |= {"machine": machine() | {"triton": run.version_of("triton")}}
    data.setdefault("steps", {})
    wanted = [
        step
        for step in steps(options.output, options.rehearse)
        if step.name.startswith(tuple(options.only))
    ]
    if not wanted:
        parser.error(f"--only is {options.only}; expected first letters of table, verify, chapters")
    if options.rehearse:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    end, shares = time.monotonic(), sum(step.share for step in wanted)
    for step in wanted:
        end += 60 * options.minutes * step.share / shares
        known = data["steps"].get(step.name, {})
        if known.get("state") == "done" and not options.again:
            continue
        print(f"{step.name} …", flush=True)
        data["steps"][step.name] = found = take(step, end)
        run.save(file, data)
        print(f"{step.name}: {found['state']}, {found['seconds']:.0f} s", flush=True)
        print("\n".join(f"    {line}" for line in found["said"]), flush=True)
    left = [step.name for step in wanted if data["steps"][step.name]["state"] != "done"]
    if left:
        print(f"Not done: {', '.join(left)}. Run the same command again to resume. {file}")
    else:
        print(f"All {len(wanted)} steps are done. {file}")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
