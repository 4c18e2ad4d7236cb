"""Build the book: execute changed pages, render all with Sphinx, and print the progress."""

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
RENDERING = BUILD / ".rendering"  # exists while Sphinx writes, and after a kill
PHASES = {"reading sources... [": "reading the pages", "writing output... [": "writing the pages"}
REPORTED = re.compile(r"^(ledger|wheel): ")
COLOR = re.compile(r"\x1b\[[\d;]*m")
PROBLEM = re.compile(r"WARNING|ERROR|Error:|Exception:")


def render() -> int:
    """Render the HTML with Sphinx; print its warnings and return 1 if it fails."""
    if RENDERING.exists():
        print("The last rendering was stopped midway, so all pages are rendered again.", flush=True)
        shutil.rmtree(BUILD / "html", ignore_errors=True)
        shutil.rmtree(DOCTREES, ignore_errors=True)
    print("Rendering the HTML: about two minutes.", flush=True)
    RENDERING.touch()
    start = time.time()
    status = follow([Path(sys.executable).with_name("jupyter-book"), "build", ROOT, *OPTIONS])
    RENDERING.unlink()
    lines = LOG.read_text("utf8", "replace").splitlines()
    if status == 0:
        print(f"  done in {time.time() - start:.0f} s", *filter(REPORTED.match, lines), sep="\n")
        return 0
    # Delete what a failed build has read, so that the next one repeats its warnings.
    shutil.rmtree(DOCTREES, ignore_errors=True)
    problems = [line for line in lines if PROBLEM.search(line)] or lines
    problems = problems[-20:] + [f"Rendering failed. All output: {LOG.relative_to(ROOT)}"]
    print("\n".join(problems), file=sys.stderr)
    return 1


def follow(command: list) -> int:
    """Run a command, log its output, print when a phase begins, and return the exit status."""
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
    """Exit at once; each kernel ends by itself when it notices that this process has ended."""
    print("\nStopped. Finished pages are kept, and the next `make book` resumes.")
    sys.stdout.flush()
    os._exit(130)


def main() -> int:
    """Build the book; return 1 if a page fails or Sphinx gives a warning, else 0."""
    signal.signal(signal.SIGINT, stop)
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit("Another `make` is building the book in this folder: wait until it has ended.")
        import execute  # late, because loading takes a second, and Ctrl-C must work before

        return execute.main() or render()


if __name__ == "__main__":
    sys.exit(main())
