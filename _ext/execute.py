"""Execute the book's pages in parallel into the cache that the Sphinx build reads.

jupyter-cache knows a page by its code cells alone. This script drops a record, too, when anything
else that the results depend on has changed: the code of the package's modules that it imports, and
the data beside them, the pinned versions, Python, the profile or the device. Every page runs in an
empty folder of its own, so that its time is that of all it does. The runs that it has stored there
are kept in RUNS, for the tests of the notebook.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from myst_nb.core.config import NbParserConfig
from myst_nb.core.read import create_nb_reader
from myst_parser.config.main import MdParserConfig

from derived_attention.sources import Sources

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "_build" / ".jupyter_cache"
RECORD = ROOT / "_build" / "executed.json"
RUNS = ROOT / "_build" / "runs"  # a folder for each page
TIMEOUT = 900  # seconds a cell


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
    folder = ROOT / "src" / "derived_attention"
    package = Sources(folder)
    modules = package.imported(page)
    state = hashlib.sha256(json.dumps([page, extra], sort_keys=True).encode())
    state.update(package.digest(modules, page).encode())
    homes = package.dependencies(modules)
    for file in sorted(folder.rglob("*")):  # data, for those who use the package that they lie in
        home = ".".join(file.parent.relative_to(folder.parent).parts)
        if file.suffix in (".csv", ".json") and home in homes:
            state.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return state.hexdigest()


def execute(path: Path):
    """Run one page in an empty folder, with one thread; return it with its result.

    Pages run side by side, and two threads each on busy cores take longer than one.
    """
    os.environ.update(OMP_NUM_THREADS="1", DERIVED_ATTENTION_PROGRESS="0", PYTHONHASHSEED="0")
    notebook = read_page(path)
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        os.environ["DERIVED_ATTENTION_RUNS"] = str(runs)
        result = single_nb_execution(
            notebook, cwd=folder, allow_errors=False, timeout=TIMEOUT, meta_override=True
        )
        seconds = time.time() - start
        shutil.rmtree(RUNS / path.stem, ignore_errors=True)
        if runs.exists():
            shutil.copytree(runs, RUNS / path.stem)
    return path, notebook, result, seconds


def save_record(record: dict[str, str]) -> None:
    """Write the record atomically."""
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    temporary = RECORD.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1, sort_keys=True))
    os.replace(temporary, RECORD)


def main() -> int:
    """Execute what has changed; exit status 1 when a page failed."""
    extra = settings()
    cache = get_cache(CACHE)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    todo = []
    for path in sorted((ROOT / "book").glob("*.md")):
        notebook = read_page(path)
        if notebook is None:
            continue
        key = digest(notebook, extra)
        try:
            match = cache.match_cache_notebook(notebook)
        except KeyError:
            match = None
        if match is not None and record.get(path.stem) == key:
            continue
        if match is not None:
            cache.remove_cache(match.pk)
        todo.append((path, key))
    workers = max(1, min(os.cpu_count() or 1, len(todo)))
    failed = []
    with ProcessPoolExecutor(workers) as pool:
        jobs = [pool.submit(execute, path) for path, _ in todo]
        for job, (path, key) in zip(jobs, todo, strict=True):
            _, notebook, result, seconds = job.result()
            if result.err is not None:
                failed.append(path)
                print(f"FAILED {path.name}\n{result.exc_string}", file=sys.stderr)
                continue
            bundle = CacheBundleIn(nb=notebook, uri=str(path), data={"execution_seconds": seconds})
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
            record[path.stem] = key
            save_record(record)
            print(f"executed {path.name} in {seconds:.1f} s", flush=True)
    print(f"pages executed: {len(todo) - len(failed)}, failed: {len(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
