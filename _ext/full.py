"""Run one chapter with the papers' settings, unattended: ``python _ext/full.py 05``.

The output and the progress of the cells are printed while they run. Every finished run is stored:
if you stop the command or lose the machine, the same command resumes. The executed notebook is
written into _build/full/.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from derived_attention.common.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "_build" / "full"


class Speaking(NotebookClient):
    """A client that prints the output of cells while they run."""

    def output(self, outs, msg, display_id, cell_index):
        """Print the text of a stream, and keep every output."""
        if msg["msg_type"] == "stream":
            content = msg["content"]
            print(content["text"], end="", file=getattr(sys, content["name"]), flush=True)
        return super().output(outs, msg, display_id, cell_index)


def run(path: Path, profile: str = "full") -> int:
    """Execute a notebook in a profile; return 1 if a cell fails, else 0."""
    os.environ.update(DERIVED_ATTENTION_PROFILE=profile, DERIVED_ATTENTION_PROGRESS="1")
    notebook = nbformat.read(path, as_version=4)
    target = TARGET if profile == "full" else TARGET.with_name(profile)
    target.mkdir(parents=True, exist_ok=True)
    client = Speaking(
        notebook,
        timeout=None,
        kernel_name="python3",
        resources={"metadata": {"path": str(target)}},
    )
    failed = None
    try:
        client.execute()
    except CellExecutionError as error:
        failed = error
    finally:
        write_atomically(target / path.name, nbformat.writes(notebook).encode())
    print(failed or f"{path.stem} is done", file=sys.stderr if failed else sys.stdout)
    return int(failed is not None)


def main(arguments: list[str]) -> int:
    """Run the chapter whose number is the only argument; return 2 if there is none."""
    chapter = arguments[0] if len(arguments) == 1 else ""
    found = sorted((ROOT / "notebooks").glob(f"{chapter.zfill(2)}_*.ipynb")) if chapter else []
    if len(found) != 1:
        chapters = (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")
        known = ", ".join(sorted(p.name[:2] for p in chapters))
        print(f"CHAPTER is {chapter!r}; expected one of {known}", file=sys.stderr)
        return 2
    return run(found[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
