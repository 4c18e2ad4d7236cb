"""Execute the book's pages in parallel into the cache that the Sphinx build reads.

jupyter-cache knows a page by its code cells alone. This script runs it again, too, when anything
else that the results depend on has changed: the code of the package's modules that it imports, and
the data beside them, the pinned versions, Python, the profile or the device. Every page runs in an
empty folder of its own, so that its time is that of all it does. The runs that it has stored there
are kept in RUNS, for the tests of the notebook.

A page is recorded as soon as it ends, its outputs first. Whenever this script is killed, the next
one finds either both or runs the page again; and a kernel ends by itself when this process does.
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
TIMEOUT = 900  # seconds a cell; the profile full takes the time that it takes


def read_page(path: Path):
    """Return the page as a notebook, exactly as the Sphinx build reads it."""
    text = path.read_text("utf8")
    reader = create_nb_reader(str(path), MdParserConfig(), NbParserConfig(), text)
    return None if reader is None else reader.read(text)


def code_of(notebook) -> str:
    """Return the notebook's Python, with IPython's own lines blanked."""
    cells = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    return re.sub(r"^\s*[%!].*$", "", "\n".join(cells), flags=re.M)


def settings() -> dict[str, str]:
    """Return what a result depends on beside code: versions, profile and device."""
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
    for file in sorted(folder.rglob("*")):  # data, for those who use the package that they lie in
        home = ".".join(file.parent.relative_to(folder).parts)
        if file.suffix in (".csv", ".json") and home in homes:
            state.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    if "from benchmarks import report" in page:  # a page that shows what was measured
        benchmarks = ROOT / "benchmarks"
        for file in sorted([*benchmarks.glob("*.py"), *benchmarks.rglob("results/**/*.json")]):
            state.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return state.hexdigest()


def execute(path: Path) -> tuple[NotebookNode, str, float]:
    """Run one page in an empty folder, with one thread; return it, what went wrong, and its time.

    Pages run side by side, and two threads each on busy cores take longer than one.
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
    with open(LOG, "ab") as log:  # what libraries write past the notebook
        try:
            client.execute(env=environment, stdout=log, stderr=log)
        except Exception as problem:  # of the page's code, or a kernel that died or did not start
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
    say(f"{RECORD.name}, which says what has run, is damaged: every page runs again.")
    return {}


def save_record(record: dict[str, str]) -> None:
    """Write the record atomically."""
    temporary = RECORD.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1, sort_keys=True), "utf8")
    os.replace(temporary, RECORD)


def open_cache() -> tuple[JupyterCacheBase, dict[str, float]]:
    """Return the cache, and how long the pages in it took; a damaged database is made anew."""
    cache = get_cache(CACHE)
    try:
        cache.db.dispose()  # the first look at it makes the database where there is none
        with closing(sqlite3.connect(CACHE / DB_NAME)) as database:
            sound = database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        records = sorted(cache.list_cache_records(), key=lambda record: record.created)
    except (RuntimeError, sqlite3.DatabaseError):  # no tables, or no database at all
        sound = False
    if not sound:
        say("The store of the pages' results is damaged; it is made anew.")
        cache.clear_cache()
        return get_cache(CACHE), {}
    return cache, {Path(r.uri).stem: r.data["execution_seconds"] for r in records}


def has_outputs(cache: JupyterCacheBase, notebook: NotebookNode) -> bool:
    """Return whether the cache holds the page's outputs, in one piece."""
    try:
        match = cache.match_cache_notebook(notebook)
        found = cache.get_cache_bundle(match.pk).nb
        return len(found.cells) == sum(cell.cell_type == "code" for cell in notebook.cells)
    except (KeyError, TypeError, ValueError, AttributeError):  # not there, cut off, no notebook
        return False


def store(cache: JupyterCacheBase, path: Path, notebook: NotebookNode, seconds: float) -> None:
    """Put an executed page into the cache."""
    _, name = cache.create_hashed_notebook(notebook)
    shutil.rmtree(CACHE / "executed" / name, ignore_errors=True)  # what a kill may have left
    bundle = CacheBundleIn(nb=notebook, uri=str(path), data={"execution_seconds": seconds})
    cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


def find_outdated(cache: JupyterCacheBase, record: dict[str, str]) -> dict[Path, str]:
    """Return the pages whose outputs are not those of this code, with their digests."""
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
        say(f"Missing or damaged results, whose pages run again: {', '.join(lost)}.")
    return todo


def longest_first(paths: Iterable[Path], known: dict[str, float]) -> list[Path]:
    """Sort pages by what their last run took; those that never ran come first, by their size."""
    times = {path: (known.get(path.stem, math.inf), path.stat().st_size) for path in paths}
    return sorted(times, key=times.__getitem__, reverse=True)


def shorten(error: str) -> str:
    """Return the end of a traceback, without colours."""
    return "\n".join(re.sub(r"\x1b\[[\d;]*m", "", error).splitlines()[-30:])


def say(line: str) -> None:
    """Print a line at once, whoever reads."""
    print(line, flush=True)


def run_all(paths: Iterable[Path], known: dict[str, float]) -> Iterator[tuple]:
    """Run pages side by side, the longest first; yield each with its result as it ends.

    A thread of this process does no more than wait for the page's own process, its kernel.
    """
    todo = longest_first(paths, known)
    total, workers = len(todo), min(os.cpu_count() or 1, len(todo))
    say(f"Running {total} page{'s' * (total > 1)}, {workers} at a time: some minutes.")
    shutil.rmtree(RUNNING, ignore_errors=True)  # what a kill may have left
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
    """Execute what has changed; exit status 1 when a page failed."""
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, not one of the home
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
