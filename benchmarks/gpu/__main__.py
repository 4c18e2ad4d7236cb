"""Run everything that needs a GPU, in steps that go on where they stopped: ``make gpu``.

First the table of all mechanisms, then the kernels against their formulas, then all notebooks. Each
step has a share of the minutes, and what a step leaves over goes to the next one. A step that takes
longer is stopped and keeps what it has done; so does a machine that is taken away: the same command
goes on. No network is needed, and any PyTorch with which the package runs. What each step printed
is in ``benchmarks/results/gpu-<machine>.json``.
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
REST = 12  # s between the minutes that a step is told and the time at which it is stopped
TURNS = 4  # at most, of a step that has time left and says that it is unfinished


@dataclass(frozen=True)
class Step:
    """A command for this Python, its name, and its share of the minutes."""

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
    """Call a step until it is done or the time ends."""
    for _ in range(TURNS):
        found = call(step, max(1.0, end - time.monotonic()))
        if found["state"] != "unfinished" or end - time.monotonic() < 2 * REST:
            break
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the steps that are not done, and print how each ended; return 1 if one is not done."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=9.0, help="default %(default)s")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="steps' first words"
    )
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, without a GPU")
    options = parser.parse_args(arguments)
    if not (torch.cuda.is_available() or options.rehearse):
        print("There is no GPU here. --rehearse takes the same steps at tiny sizes on the CPU.")
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
        print(f"Not done: {', '.join(left)}. The same command tries them again. {file}")
    else:
        print(f"All {len(wanted)} steps are done. {file}")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
