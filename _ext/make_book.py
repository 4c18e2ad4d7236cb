"""Build the book: run the pages that changed, let Sphinx render all, and say how far it is."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "_build"
LOG = BUILD / "build.log"
DOCTREES = BUILD / ".doctrees"
OPTIONS = ("-W", "-n", "--keep-going")
RENDERING = BUILD / ".rendering"  # there while Sphinx writes what a kill leaves half written
PHASES = {"reading sources... [": "reading the pages", "writing output... [": "writing the pages"}
REPORTED = re.compile(r"^(ledger|wheel): ")
COLOR = re.compile(r"\x1b\[[\d;]*m")
PROBLEM = re.compile(r"WARNING|ERROR|Error:|Exception:")


def render() -> int:
    """Let Sphinx make the HTML; on failure show what it complained about."""
    if RENDERING.exists():
        print("The last rendering was stopped midway: it begins anew.", flush=True)
        shutil.rmtree(BUILD / "html", ignore_errors=True)
        shutil.rmtree(DOCTREES, ignore_errors=True)
    print("Rendering the HTML: about a minute.", flush=True)
    RENDERING.touch()
    start = time.time()
    status = follow([Path(sys.executable).with_name("jupyter-book"), "build", ROOT, *OPTIONS])
    RENDERING.unlink()
    lines = LOG.read_text("utf8", "replace").splitlines()
    if status == 0:
        print(f"  done in {time.time() - start:.0f} s", *filter(REPORTED.match, lines), sep="\n")
        return 0
    # A failed build forgets what it has read, so that its warnings appear again the next time.
    shutil.rmtree(DOCTREES, ignore_errors=True)
    problems = [line for line in lines if PROBLEM.search(line)] or lines
    problems = problems[-20:] + [f"Rendering failed. All output: {LOG.relative_to(ROOT)}"]
    print("\n".join(problems), file=sys.stderr)
    return 1


def follow(command: list) -> int:
    """Run a command with its output in the log, and say when a phase of it begins."""
    said = set()
    with (
        open(LOG, "w", encoding="utf8") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf8",
            errors="replace",
        ) as process,
    ):
        for line in process.stdout:
            line = COLOR.sub("", line)
            log.write(line)
            log.flush()
            for phase in PHASES:
                if phase in line and phase not in said:
                    said.add(phase)
                    print(f"  {PHASES[phase]}", flush=True)
    return process.returncode


def stop(*_) -> None:
    """End at once, kernels too: each ends when it sees that this process is gone."""
    print("\nStopped. Finished pages are kept, and the next `make book` resumes.")
    sys.stdout.flush()
    os._exit(130)


def main() -> int:
    """Build the book; exit status 1 when a page fails or Sphinx has a warning."""
    signal.signal(signal.SIGINT, stop)
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit("Another `make` builds the book in this folder: wait until it has ended.")
        import execute  # here: it takes a second to load, and Ctrl-C must work before

        return execute.main() or render()


if __name__ == "__main__":
    sys.exit(main())
