"""Execute the book's pages in parallel into the cache that the Sphinx build reads.

jupyter-cache identifies a page by its code cells alone. This script also runs a page again if
anything else that its results depend on has changed: the code of the package's modules that it
imports, the data beside them, the pinned versions, Python, the profile or the device. Every page
runs in an empty folder of its own, so that no stored run shortens its time. The training runs that
it stores there are copied to RUNS, for the tests of the notebooks.

When a page ends, its outputs are stored first and its digest second. If this script is killed in
between, the next call runs the page again. A kernel ends by itself when this process does.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path

from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.cache.db import DB_NAME
from jupyter_cache.cache.main import JupyterCacheBase
from myst_nb.core.config import NbParserConfig
from myst_nb.core.read import create_nb_reader
from myst_parser.config.main import MdParserConfig
from nbclient import NotebookClient
from nbformat import NotebookNode

from derived_book.training.code_digest import Sources

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "_build" / ".jupyter_cache"
RECORD = ROOT / "_build" / "executed.json"
RUNS = ROOT / "_build" / "runs"  # a folder for each page
RUNNING = ROOT / "_build" / "running"  # where pages run
LOG = ROOT / "_build" / "kernels.log"
TIMEOUT = 900  # seconds for each cell; the profile full has no limit


def read_page(path: Path):
    """Return the page as a notebook, exactly as the Sphinx build reads it."""
    text = path.read_text("utf8")
    reader = create_nb_reader(str(path), MdParserConfig(), NbParserConfig(), text)
    return None if reader is None else reader.read(text)


def code_of(notebook) -> str:
    """Return the notebook's Python code, with the lines that only IPython understands blanked."""
    cells = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    return re.sub(r"^\s*[%!].*$", "", "\n".join(cells), flags=re.M)


def settings() -> dict[str, str]:
    """Return what results depend on besides code: versions, profile and device."""
    import torch

    return {
        "python": platform.python_version(),
        "profile": os.environ.get("DERIVED_ATTENTION_PROFILE", ""),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "constraints": (ROOT / "constraints.txt").read_text("utf8"),
    }


def digest(notebook, extra: dict[str, str]) -> str:
    """Hash everything that the page's outputs depend on."""
    page = code_of(notebook)
    folder = ROOT / "src"
    package = Sources(folder)
    modules = package.find_imports(page)
    state = hashlib.sha256(json.dumps([page, extra], sort_keys=True).encode())
    state.update(package.digest(modules, page).encode())
    homes = package.dependencies(modules)
    for file in sorted(folder.rglob("*")):  # data count for pages that use their package
        home = ".".join(file.parent.relative_to(folder).parts)
        if file.suffix in (".csv", ".json") and home in homes:
            state.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    if "from benchmarks import report" in page:  # the page shows measurements
        benchmarks = ROOT / "benchmarks"
        for file in sorted([*benchmarks.glob("*.py"), *benchmarks.rglob("results/**/*.json")]):
            state.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return state.hexdigest()


def execute(path: Path) -> tuple[NotebookNode, str, float]:
    """Run one page in an empty folder, with one thread; return the notebook, any error, seconds.

    Because pages run in parallel on busy cores, two threads each would take longer than one.
    """
    notebook = read_page(path)
    folder = RUNNING / path.stem
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "DERIVED_ATTENTION_PROGRESS": "0",
        "DERIVED_ATTENTION_RUNS": str(folder / "runs"),
    }
    resources = {"metadata": {"path": str(folder)}}
    timeout = None if os.environ.get("DERIVED_ATTENTION_PROFILE") == "full" else TIMEOUT
    client = NotebookClient(notebook, resources=resources, timeout=timeout, record_timing=False)
    error, start = "", time.time()
    with open(LOG, "ab") as log:  # output of libraries that bypasses the notebook
        try:
            client.execute(env=environment, stdout=log, stderr=log)
        except Exception as problem:  # from the page's code, or a kernel that died or did not start
            error = str(problem) or repr(problem)
    seconds = time.time() - start
    shutil.rmtree(RUNS / path.stem, ignore_errors=True)
    if (folder / "runs").exists():
        shutil.copytree(folder / "runs", RUNS / path.stem)
    return notebook, error, seconds


def load_record() -> dict[str, str]:
    """Return the digest of each page's last run."""
    try:
        record = json.loads(RECORD.read_text("utf8"))
        if isinstance(record, dict):
            return record
    except FileNotFoundError:
        return {}
    except ValueError:
        pass
    say(f"{RECORD.name}, the record of finished pages, is damaged: every page runs again.")
    return {}


def save_record(record: dict[str, str]) -> None:
    """Write the record atomically."""
    temporary = RECORD.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1, sort_keys=True), "utf8")
    os.replace(temporary, RECORD)


def open_cache() -> tuple[JupyterCacheBase, dict[str, float]]:
    """Return the cache and the seconds that its pages took; clear it if its database is damaged."""
    cache = get_cache(CACHE)
    try:
        cache.db.dispose()  # the access to `db` creates a missing database
        with closing(sqlite3.connect(CACHE / DB_NAME)) as database:
            sound = database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        records = sorted(cache.list_cache_records(), key=lambda record: record.created)
    except (RuntimeError, sqlite3.DatabaseError):  # no tables, or not a database
        sound = False
    if not sound:
        say("The cache of the pages' outputs is damaged and has been cleared.")
        cache.clear_cache()
        return get_cache(CACHE), {}
    return cache, {Path(r.uri).stem: r.data["execution_seconds"] for r in records}


def has_outputs(cache: JupyterCacheBase, notebook: NotebookNode) -> bool:
    """Return whether the cache contains all outputs of the page."""
    try:
        match = cache.match_cache_notebook(notebook)
        found = cache.get_cache_bundle(match.pk).nb
        return len(found.cells) == sum(cell.cell_type == "code" for cell in notebook.cells)
    except (KeyError, TypeError, ValueError, AttributeError):  # missing, truncated, not a notebook
        return False


def store(cache: JupyterCacheBase, path: Path, notebook: NotebookNode, seconds: float) -> None:
    """Put an executed page into the cache."""
    _, name = cache.create_hashed_notebook(notebook)
    shutil.rmtree(CACHE / "executed" / name, ignore_errors=True)  # left by a killed run
    bundle = CacheBundleIn(nb=notebook, uri=str(path), data={"execution_seconds": seconds})
    cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


def find_outdated(cache: JupyterCacheBase, record: dict[str, str]) -> dict[Path, str]:
    """Return the pages whose outputs are missing or out of date, with their digests."""
    extra, todo, lost = settings(), {}, []
    for path in sorted((ROOT / "book").glob("*.md")):
        notebook = read_page(path)
        if notebook is None:
            continue
        key = digest(notebook, extra)
        fresh = record.get(path.stem) == key
        if fresh and has_outputs(cache, notebook):
            continue
        todo[path] = key
        lost += [path.stem] if fresh else []
    if lost:
        say(f"These pages run again, because outputs are missing or damaged: {', '.join(lost)}.")
    return todo


def longest_first(paths: Iterable[Path], known: dict[str, float]) -> list[Path]:
    """Sort pages by the time of their last run; new pages come first, the largest at the start."""
    times = {path: (known.get(path.stem, math.inf), path.stat().st_size) for path in paths}
    return sorted(times, key=times.__getitem__, reverse=True)


def shorten(error: str) -> str:
    """Return the last 30 lines of a traceback, without colours."""
    return "\n".join(re.sub(r"\x1b\[[\d;]*m", "", error).splitlines()[-30:])


def say(line: str) -> None:
    """Print a line without delay, also into a pipe."""
    print(line, flush=True)


def run_all(paths: Iterable[Path], known: dict[str, float]) -> Iterator[tuple]:
    """Run pages in parallel, the longest first; yield each with its result when it ends.

    Threads suffice, because each only waits for its page's kernel, a process of its own.
    """
    todo = longest_first(paths, known)
    total, workers = len(todo), min(os.cpu_count() or 1, len(todo))
    say(f"Running {total} page{'s' * (total > 1)}, {workers} at a time; this takes some minutes.")
    shutil.rmtree(RUNNING, ignore_errors=True)  # left by a killed run
    LOG.write_bytes(b"")
    with ThreadPoolExecutor(workers) as pool:
        jobs = {pool.submit(execute, path): path for path in todo}
        for done, job in enumerate(as_completed(jobs), start=1):
            notebook, error, seconds = job.result()
            yield jobs[job], notebook, error, seconds
            failed = ", FAILED" * bool(error)
            say(f"  {done} of {total}: {jobs[job].stem}, {seconds:.0f} s{failed}")
    shutil.rmtree(RUNNING, ignore_errors=True)


def main() -> int:
    """Execute the pages that have changed; return 1 if one fails, else 0."""
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, not the user's
    cache, known = open_cache()
    record = load_record()
    todo = find_outdated(cache, record)
    if not todo:
        say("No page has to run again.")
        return 0
    failed = 0
    for path, notebook, error, seconds in run_all(todo, known):
        if error:
            failed += 1
            print(f"{path.name} fails:\n{shorten(error)}", file=sys.stderr, flush=True)
        else:
            store(cache, path, notebook, seconds)
            record[path.stem] = todo[path]
            save_record(record)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
