"""Run a notebook and sample how busy its process keeps the GPU.

``python -m benchmarks.gpu.busy NOTEBOOK PROFILE FILE`` writes FILE every second: the share of
samples in which the process's default stream has unfinished work. If other processes use the same
GPU, work that waits for theirs counts, too.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

EVERY = 0.01  # s between samples


def execute(path: Path, profile: str, file: Path) -> int:
    """Run a notebook, after a cell that watches the GPU; return 1 if a cell failed."""
    import nbformat

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "_ext"))
    from full import run

    notebook = nbformat.read(path, as_version=4)
    watching = f"from benchmarks.gpu.busy import watch as _watch\n_watch({str(file)!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(watching))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        nbformat.write(notebook, copy)
        return int(run(copy, profile))


def watch(file: str) -> None:
    """Sample in a thread until the process ends."""
    threading.Thread(target=_sample, args=(Path(file),), daemon=True).start()


def _sample(file: Path) -> None:
    samples = busy = 0
    while True:
        time.sleep(EVERY)
        samples += 1
        cuda: Any = sys.modules.get("torch.cuda")  # None before the notebook imports it
        if getattr(cuda, "is_initialized", bool)():
            busy += not cuda.default_stream().query()
        if samples % round(1 / EVERY) == 0:
            file.write_text(str(busy / samples))


if __name__ == "__main__":
    sys.exit(execute(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
