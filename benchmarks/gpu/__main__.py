"""Everything that wants a GPU, in steps that go on where they stopped: ``make gpu``.

Kernels are tried and timed; mechanisms with a kernel, and other libraries, are measured
beside PyTorch's attention, in bfloat16 up to 65,536 tokens; every chapter runs in the profile
``medium``. No network is needed, and whatever PyTorch is installed will do if the package runs with
it. A step that takes longer than ten minutes is stopped; it keeps what it has done, and so does a
machine that is taken away: ``make gpu`` again goes on. What each step said stands in
``benchmarks/results/gpu-<machine>.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import run
from benchmarks.cases import FUSED
from benchmarks.peers import LIBRARIES
from benchmarks.report import RESULTS, slug
from derived_book.training.measure import machine

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
MINUTES = 10  # of a step
ROUNDS = 15  # of each measurement: those of the long ones take seconds
UNFINISHED = 3  # what a step returns that has to be called again
TURNS = 12  # at most, of a step that says so


@dataclass(frozen=True)
class Step:
    """A command for this Python, and what it is called."""

    name: str
    command: tuple[str, ...]


def steps(out: Path, tiny: bool = False) -> Iterator[Step]:
    """Yield all steps; `tiny` ones are for a rehearsal without a GPU."""
    verify = ("-m", "benchmarks.gpu.verify", "--out", str(out))
    yield Step("verify", (*verify, "--minutes", str(MINUTES - 1.5)))
    sizes: tuple[str, ...] = ("--output", str(out), "--rounds", str(ROUNDS))
    if tiny:
        sizes = ("--output", str(out), "--rounds", "1", "--lengths", "16", "--dims", "8")
    for name in FUSED[:1] if tiny else FUSED:
        yield Step(f"measure {name}", ("-m", "benchmarks", "--cases", name, *sizes))
    for name in ("local_attention",) if tiny else LIBRARIES:
        yield Step(f"peers {name}", ("-m", "benchmarks", "--peers", name, *sizes))
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        yield Step(f"chapter {path.stem}", ("-m", __name__, "--chapter", str(path)))


def chapter(path: Path) -> int:
    """Run a chapter in the profile ``medium``."""
    sys.path.insert(0, str(ROOT / "_ext"))
    from full import run as execute

    return execute(path, "medium")


def call(step: Step, seconds: float) -> dict[str, Any]:
    """Run a step in a process of its own, and stop it when its time is up."""
    begin = time.monotonic()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *step.command]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a notebook's kernel ends with it
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
        "said": said.strip().splitlines()[-60:],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the steps that are not done, and print how each came out; 1 if one is not done."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--chapter"]:
        return chapter(Path(given[1]))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="steps' first words"
    )
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, without a GPU")
    options = parser.parse_args(given)
    if not (torch.cuda.is_available() or options.rehearse):
        print("There is no GPU here. --rehearse takes the same steps at tiny sizes on the CPU.")
        return 2
    file = options.output / f"gpu-{slug(machine())}.json"
    data: dict[str, Any] = json.loads(file.read_text("utf8")) if file.exists() else {}
    data |= {"machine": machine() | {"triton": run.version_of("triton")}}
    data.setdefault("steps", {})
    wanted = [x for x in steps(options.output, options.rehearse) if x.name.startswith(
        tuple(options.only))]  # fmt: skip
    for step in wanted:
        known = data["steps"].get(step.name, {})
        if known.get("state") == "done" and not options.again:
            continue
        for _ in range(TURNS if step.name == "verify" else 1):
            print(f"{step.name} …", flush=True)
            data["steps"][step.name] = found = call(step, 60 * MINUTES)
            run.save(file, data)
            print(f"{step.name}: {found['state']}, {found['seconds']:.0f} s", flush=True)
            if found["state"] != "unfinished":
                break
        if found["state"] == "failed":
            print("\n".join(f"    {line}" for line in found["said"][-3:]), flush=True)
    left = [x.name for x in wanted if data["steps"][x.name]["state"] != "done"]
    if left:
        print(f"Not done: {', '.join(left)}. The same command tries them again. {file}")
    else:
        print(f"All {len(wanted)} steps are done. {file}")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
