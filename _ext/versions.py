"""Lock the versions of the dependencies, and test the package with versions from the public index.

``python3 versions.py lock`` writes constraints.txt: the dependencies in pyproject.toml, resolved
for every system and Python at once. ``dist`` builds the files for the package index. ``stranger``
installs the package with pip as a new user would, and runs README.md's example. ``lowest``,
``locked`` and ``latest`` test the package with those versions on each available Python. All ignore
this machine's settings for pip and uv, except those that say how to reach the index.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

from environment import CPU_BUILDS, TORCH, builds

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "_build" / "versions"
LOCK = ROOT / "constraints.txt"
HEADER = """\
# Versions that `make` and CI test with, written by `make lock`; ranges for everybody else are in
# pyproject.toml.
"""
PYTHONS = ("3.11", "3.12", "3.13")
RESOLUTIONS = {
    "lowest": ["--resolution", "lowest-direct"],
    "locked": ["--constraint", LOCK],
    "latest": ["--resolution", "highest"],
}
# The promises of every mechanism and layer, and a chapter that solves, differentiates and plots.
TESTS = ("contract", "contract_layers", "contract_transforms", "layer", "softmax")
CHAPTER = "02_duality"
REACH = ("PIP_CERT", "PIP_PROXY")  # the settings of pip that say how to reach the index


class Failed(Exception):
    """Raised if a command or a check fails; for a command, the message ends with its log's path."""


def settings() -> dict[str, str]:
    """Return the environment variables without settings of pip, uv and Python, except REACH."""
    own = ("PIP_", "UV_", "PYTHON", "VIRTUAL_ENV", "CONDA_")
    kept = {k: v for k, v in os.environ.items() if k in REACH or not k.startswith(own)}
    nothing = {"XDG_CONFIG_HOME": os.devnull, "XDG_CONFIG_DIRS": os.devnull}
    if shutil.which("pyenv"):  # its commands, such as python3.12, work only for these versions
        found = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True)
        nothing["PYENV_VERSION"] = ":".join(reversed(found.stdout.split()))
    return kept | nothing | {"PIP_CONFIG_FILE": os.devnull, "MPLBACKEND": "agg"}


def run(*command, log: str, **options) -> str:
    """Run a command without this machine's settings; append its output to a log and return it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    options = {"cwd": ROOT, "env": settings(), "stdin": subprocess.DEVNULL} | options
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([str(x) for x in command], **both, **options)
    path = BUILD / f"{log}.log"
    with open(path, "a", encoding="utf8") as file:
        file.write(f"$ {' '.join(map(str, command))}\n{done.stdout}\n")
    if done.returncode:
        lines = done.stdout.strip().splitlines()[-12:]
        raise Failed("\n".join([*lines, f"(log: {os.path.relpath(path, ROOT)})"]))
    return done.stdout


def find_uv() -> Path:
    """Return uv: beside this Python, on the path, or else installed into a folder of its own."""
    beside = Path(sys.executable).with_name("uv")
    found = beside if beside.exists() else shutil.which("uv")
    if found:
        return Path(found)
    folder = BUILD / "uv"
    if not (folder / "bin" / "uv").exists():
        run(sys.executable, "-m", "venv", folder, log="uv")
        run(folder / "bin" / "python", "-m", "pip", "install", "uv", log="uv")
    return folder / "bin" / "uv"


def lock(output: Path = LOCK, upgrade: bool = False) -> None:
    """Write the locked versions; without `upgrade`, keep those in `output` where possible."""
    compile_ = [find_uv(), "pip", "compile", "--universal", "--fork-strategy", "fewest"]
    compile_ += ["--python-version", PYTHONS[0], "--all-extras", "--no-annotate", "--no-header"]
    compile_ += ["--upgrade"] if upgrade else []
    run(*compile_, "--quiet", "pyproject.toml", "--output-file", output, log="lock")
    output.write_text(HEADER + output.read_text("utf8"), "utf8")


@functools.cache
def dist() -> list[Path]:
    """Build the wheel and the source archive, check both with twine, and return their paths."""
    folder = ROOT / "_build" / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    run(find_uv(), "build", "--build-constraints", LOCK, "--out-dir", folder, log="dist")
    files = sorted(x for x in folder.iterdir() if x.suffix in (".whl", ".gz"))
    run(find_uv(), "tool", "run", "twine", "check", "--strict", *files, log="dist")
    print(*(f"{x.relative_to(ROOT)}, {x.stat().st_size / 1e6:.1f} MB" for x in files), sep="\n")
    return files


# --- a stranger ----------------------------------------------------------------------------------


def stranger() -> None:
    """Resolve .[book,dev] with pip, install the core from its sources, and run README's example."""
    print("Installing from the public index, without this machine's settings:", flush=True)
    _, sources = dist()
    folder = BUILD / "stranger"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder, log="stranger")
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--no-input", "-c", LOCK]
    start = time.time()
    said = run(*pip, "--dry-run", "--ignore-installed", ".[book,dev]", log="stranger")
    names = re.search(r"^Would install (.*)$", said, flags=re.M)[1].split()
    print(
        f"  pip resolves .[book,dev]: {len(names)} packages, {time.time() - start:.0f} s",
        flush=True,
    )
    start = time.time()
    if backend():
        run(*pip, "--no-deps", "--index-url", CPU_BUILDS, TORCH[0], log="stranger")
    run(*pip, sources, log="stranger")
    run(python, "-m", "pip", "check", log="stranger")
    took = f"{size(folder)}, {time.time() - start:.0f} s"
    print(f"  the core installed from {sources.name}, {describe(python)}: {took}", flush=True)
    example(python, "stranger")
    print("  README's example runs")
    shutil.rmtree(folder)


def example(python: Path, log: str) -> None:
    """Run the example in README.md in an empty folder, with the installed package."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf8"), flags=re.S)[1]
    empty = BUILD / "empty"
    empty.mkdir(exist_ok=True)
    run(python, "-c", code, log=log, cwd=empty)


def backend() -> list[str]:
    """Return uv's option for PyTorch's CPU build, if it is wanted and its index can be reached."""
    if (os.environ.get("TORCH") or builds()) != "cpu":
        return []
    try:
        urllib.request.urlopen(CPU_BUILDS + "/torch/", timeout=15).close()
    except OSError:
        return []
    return ["--torch-backend", "cpu"]


def describe(python: Path) -> str:
    """Return the installed versions of Python, torch and numpy."""
    code = "import numpy, platform, torch; print(platform.python_version(), torch.__version__, "
    code += "numpy.__version__)"
    return "Python {}, torch {}, numpy {}".format(*run(python, "-c", code, log="x").split())


def size(folder: Path) -> str:
    """Return the size of a folder's files in GB."""
    files = (x.stat().st_size for x in folder.rglob("*") if x.is_file() and not x.is_symlink())
    return f"{sum(files) / 1e9:.1f} GB"


# --- lowest, locked, latest ----------------------------------------------------------------------


def trial(resolution: str, python: str) -> str:
    """Test the wheel with one choice of versions on one Python; return a line of results."""
    name, uv = f"{resolution}-{python}", [find_uv(), "--no-config"]
    folder, listed = BUILD / name, BUILD / f"{name}.txt"
    shutil.rmtree(folder, ignore_errors=True)
    for old in (listed, BUILD / f"{name}.log"):
        old.unlink(missing_ok=True)
    try:
        run(*uv, "venv", "--python", python, folder, log=name)
    except Failed:
        return f"{resolution:8}Python {python}: not available here"
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    dev = dev["optional-dependencies"]["dev"]
    (BUILD / "tests.in").write_text("\n".join(x for x in dev if x.startswith(("pytest", "hypo"))))
    start, inside = time.time(), folder / "bin" / "python"
    # Only wheels, so that versions without a wheel for this Python are skipped.
    compile_ = [*uv, "pip", "compile", "--python", inside, "--no-build", *RESOLUTIONS[resolution]]
    compile_ += [*backend(), "--extra", "book", "pyproject.toml", BUILD / "tests.in"]
    run(*compile_, "--quiet", "--output-file", listed, log=name)
    into = [*uv, "pip", "install", "--python", inside, *backend()]
    run(*into, "--no-build", "-r", listed, log=name)
    run(*into, "--no-deps", dist()[0], log=name)
    run(*uv, "pip", "check", "--python", inside, log=name)
    line = f"{resolution:8}{describe(inside)}; {size(folder)}, {time.time() - start:.0f} s"
    example(inside, name)
    files = [f"tests/test_{x}.py" for x in TESTS]
    test = [inside, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", *files]
    said = run(*test, log=name, env=settings() | {"OMP_NUM_THREADS": "1"})
    line += f"; example, {said.strip().splitlines()[-1].strip('= ')}"
    start = time.time()
    chapter = ROOT / "notebooks" / f"{CHAPTER}.ipynb"
    run(inside, "-m", "IPython", "--colors=NoColor", chapter, log=name, cwd=BUILD / "empty")
    shutil.rmtree(folder)
    return f"{line}; {CHAPTER}, {time.time() - start:.0f} s"


def main() -> int:
    """Run the named actions in turn; report failures, and return 1 if there were any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    single = {"lock": lambda: lock(upgrade=given.upgrade), "dist": dist, "stranger": stranger}
    parser.add_argument("what", nargs="+", choices=(*single, *RESOLUTIONS))
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="versions of Python to test")
    parser.add_argument("--upgrade", action="store_true", help="lock the newest versions")
    given, failed = parser.parse_args(), []
    for what in given.what:
        for python in ("",) if what in single else given.python:
            try:
                if what in single:
                    single[what]()
                else:
                    print(trial(what, python), flush=True)
            except Failed as error:
                failed.append(f"{what} {python}".strip())
                print(f"{failed[-1]} failed:\n{error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
