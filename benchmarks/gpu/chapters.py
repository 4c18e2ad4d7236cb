"""Run all notebooks on this machine's GPU, in parallel: ``python -m benchmarks.gpu.chapters``.

Chapters, audits and appendices run in the profile ``medium``, with a process for every second core
and a time limit for each notebook. When one ends, its seconds are stored with the share of them in
which its process kept the GPU busy. ``--device cpu`` hides the GPU, so that the table shows which
notebooks are faster without it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import run
from benchmarks.report import RESULTS, slug
from derived_book.experiment_tables import Table, markdown
from derived_book.training.measure import machine

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
PROFILE = "medium"
UNFINISHED = 3  # exit status if the command has to be repeated
LINES = 20  # last lines of a notebook's output that are kept


@dataclass
class Running:
    """A notebook that is being executed."""

    path: Path
    device: str
    folder: Path
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Start the process, which has a session of its own and writes into two files."""
        search = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": search, "PYTHONUNBUFFERED": "1"}
        if self.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self.log, self.busy = (self.folder / f"{self.path.stem}.{x}" for x in ("log", "busy"))
        command = [sys.executable, "-m", "benchmarks.gpu.busy", str(self.path), PROFILE]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.busy)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def found(self, limit: float, stop: bool) -> dict[str, Any] | None:
        """Return the result, or None while it runs; end it after `limit` seconds, or at `stop`."""
        seconds = time.monotonic() - self.start
        code = self.process.poll()
        if code is None and not (stop or seconds > limit):
            return None
        if code is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its kernel ends when it has no parent
            self.process.wait()
        state = {None: "stopped", 0: "done"}.get(code, "failed")
        said = self.log.read_text("utf8", "replace").strip().splitlines()[-LINES:]
        share = float(self.busy.read_text()) if self.busy.exists() else None
        return {
            "state": state,
            "seconds": round(seconds, 1),
            "busy": share if self.device == "cuda" else None,
            "commit": run.commit(),
            "said": said if state != "done" else [],
        }


def run_all(
    paths: Sequence[Path], device: str, processes: int, limit: float, end: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run notebooks in parallel; yield the name and the result of each when it ends."""
    waiting, running = list(paths), list[Running]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            stop = time.monotonic() > end
            while waiting and len(running) < processes and not stop:
                running.append(Running(waiting.pop(0), device, Path(folder)))
            for one in list(running):
                if (found := one.found(limit, stop)) is not None:
                    running.remove(one)
                    yield one.path.stem, found
            if stop and not running:
                return
            time.sleep(0.2)


def table(chapters: dict[str, Any]) -> Table:
    """Return a table of seconds on the GPU and on the CPU, and of how busy the GPU was."""
    rows = []
    for name, found in sorted(chapters.items()):
        gpu, cpu = found.get("cuda", {}), found.get("cpu", {})
        both = [x["seconds"] for x in (gpu, cpu) if x.get("state") == "done"]
        share = gpu.get("busy")
        rows.append(
            [name, gpu.get("state", "–")]
            + [f"{x['seconds']:.0f}" if x else "–" for x in (gpu, cpu)]
            + [f"{100 * share:.0f} %" if share is not None else "–"]
            + ["–" if len(both) < 2 else "CPU" if both[1] < both[0] else "GPU"]
        )
    head = ["notebook", "state, GPU", "seconds, GPU", "seconds, CPU", "GPU busy", "faster on"]
    return head, rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the notebooks that are not done; return 1 if one failed, or 3 if one is unfinished."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.chapters", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=4.0, help="default %(default)s")
    parser.add_argument(
        "--limit", type=float, default=150.0, help="seconds for a notebook; default %(default)s"
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="name prefixes")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--again", action="store_true", help="repeat those that are done")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    file = options.output / f"gpu-chapters-{slug(machine())}.json"
    data: dict[str, Any] = json.loads(file.read_text("utf8")) if file.exists() else {}
    data |= {"machine": machine(), "profile": PROFILE}
    chapters: dict[str, Any] = data.setdefault("chapters", {})

    def known(path: Path) -> dict[str, Any]:
        return dict(chapters.get(path.stem, {}).get(device, {}))

    paths = [
        path
        for path in sorted(NOTEBOOKS.glob("*.ipynb"))
        if path.stem.startswith(tuple(options.only))
        and (options.again or known(path).get("state") != "done")
    ]
    paths.sort(key=lambda path: -known(path).get("seconds", 0))  # the longest first
    processes, end = max(1, (os.cpu_count() or 2) // 2), time.monotonic() + 60 * options.minutes
    for name, found in run_all(paths, device, processes, options.limit, end):
        chapters.setdefault(name, {})[device] = found
        run.save(file, data)
        print(f"{name}: {found['state']}, {found['seconds']:.0f} s", flush=True)
        if found["state"] == "failed":
            print("\n".join(f"    {line}" for line in found["said"][-3:]), flush=True)
    print(markdown(table(chapters)))
    states = [known(path).get("state") for path in paths]
    if "failed" in states:
        return 1
    return UNFINISHED * any(state != "done" for state in states)


if __name__ == "__main__":
    sys.exit(main())
