"""Execute the book's pages in parallel into the cache that the Sphinx build reads.

jupyter-cache knows a page by its code cells alone. This script drops a record, too, when anything
else that the results depend on has changed: the package modules it imports, the pinned versions,
Python, the profile or the device. Every page runs in an empty folder of its own.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
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

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "_build" / ".jupyter_cache"
RECORD = ROOT / "_build" / "executed.json"
TIMEOUT = 900  # seconds a cell


def read_page(path: Path):
    """Return the page as a notebook, exactly as the Sphinx build reads it."""
    text = path.read_text("utf8")
    reader = create_nb_reader(str(path), MdParserConfig(), NbParserConfig(), text)
    return None if reader is None else reader.read(text)


def imported(source: str, package: Path) -> set[Path]:
    """Return the files of the package that `source` imports directly, with their parents."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    files: set[Path] = set()
    for name in names:
        parts = name.split(".")
        if parts[0] != package.name:
            continue
        for depth in range(1, len(parts) + 1):
            stem = package.parent.joinpath(*parts[:depth])
            files |= {f for f in (stem.with_suffix(".py"), stem / "__init__.py") if f.is_file()}
    return files


def dependencies(source: str, package: Path) -> set[Path]:
    """Return all files of the package that `source` imports, directly or through others."""
    found: set[Path] = set()
    todo = imported(source, package)
    while todo:
        file = todo.pop()
        found.add(file)
        todo |= imported(file.read_text("utf8"), package) - found
    return found


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
    code = code_of(notebook)
    package = ROOT / "src" / "derived_attention"
    files = sorted(dependencies(code, package))
    if files:  # data files that modules of the package read
        files += sorted(package.rglob("*.csv"))
    state = hashlib.sha256(json.dumps([code, extra], sort_keys=True).encode())
    for file in files:
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
        os.environ["DERIVED_ATTENTION_RUNS"] = str(Path(folder) / "runs")
        result = single_nb_execution(
            notebook, cwd=folder, allow_errors=False, timeout=TIMEOUT, meta_override=True
        )
    return path, notebook, result, time.time() - start


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
