"""Autograding with nbgrader: what students' code may use, and a reason for every zero.

`make course` writes an ``nbgrader_config.py`` that names what is here. Beside what nbgrader does
itself, a renamed notebook is found, a missing cell is put back, code that needs a human eye is
listed, and an exercise that ends the kernel costs that exercise alone.

Students' code runs with limits on time, memory and files. On Linux, where ordinary users may make
namespaces, it has no network, sees neither the course's folder nor other processes, and can write
to an empty folder alone. What it can still do is in the book's page on teaching.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbgrader.preprocessors import Execute, NbGraderPreprocessor
from traitlets import Integer

log = logging.getLogger(__name__)

CPU_SECONDS = 900  # of a notebook
MEMORY = 4 * 2**30  # bytes of data; threads and libraries' code do not count
FILE = 64 * 2**20  # bytes of a file
# What a kernel is told: nothing that a hub's tokens could be among.
KEPT = """PATH HOME LANG LC_ALL TZ LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV CONDA_PREFIX
    JUPYTER_PATH JUPYTER_PREFER_ENV_PATH NBGRADER_EXECUTION TRITON_INTERPRET""".split()
# `ulimit -f` counts in half KiB, as POSIX says; the others are in KiB and seconds.
LIMITED = 'ulimit -t "$0" && ulimit -d "$1" && ulimit -f "$2" && shift 2 && exec "$@"'
# Hides the folder $0, leaves $1 as the only one that can be written, and gives the rights up that
# this took.
HIDDEN = """mount --bind "$1" "$1" && mount -t tmpfs none "$0" || exit 1
while read -r _ _ _ _ place options _; do
  case "$place" in "$0" | "$1" | /proc | /proc/* | /sys | /sys/* | /dev | /dev/*) continue ;; esac
  mount -o "remount,bind,ro,${options#r[ow],}" "$place" || exit 1
done </proc/self/mountinfo
cd "$1" && shift && exec setpriv --bounding-set=-all --no-new-privs "$@"
"""
FENCE = "unshare --map-root-user --net --mount --pid --fork --kill-child --mount-proc".split()
# What no exercise asks for, and what could reach the checks: to be read by somebody.
STRANGE = set(
    """__builtins__ builtins check_properties check_refuses compile ctypes delattr derived_attention
    eval exec exercises exit gc get_ipython globals importlib inspect multiprocessing open os
    pathlib quit setattr shutil signal socket subprocess sys threading vars""".split()
)


# --- before the notebook is run ------------------------------------------------------------------


def find_renamed(assignment: str, student: str, notebooks: list[str]) -> None:
    """Take a notebook that was handed in under another name for the one that is expected.

    nbgrader calls this for each student, with the paths of the notebooks that are there.
    """
    for folder in {Path(path).parent for path in notebooks}:
        found = {path.stem: path for path in folder.glob("*.ipynb")}
        ours = {stem: _assignment(path) for stem, path in found.items()}
        for name in set(filter(None, ours.values())) - set(found):
            others = sorted(stem for stem, of in ours.items() if of == name)
            if len(others) > 1:
                log.warning("%s: %s are all %s; expected one", folder, others, name)
                continue
            target = folder / f"{name}.ipynb"
            notebook = nbformat.read(found[others[0]], as_version=4)
            notebook.metadata["derived_attention"]["renamed"] = others[0]
            nbformat.write(notebook, target)
            notebooks.append(str(target))
            log.warning("%s: %s.ipynb is taken for %s.ipynb", folder, others[0], name)


def _assignment(path: Path) -> str | None:
    """Return the name of the assignment that a notebook is of, by its metadata."""
    try:
        metadata = json.loads(path.read_text("utf8")).get("metadata", {})
        return str(metadata["derived_attention"]["assignment"])
    except (ValueError, LookupError, AttributeError, TypeError):
        return None


class HandIn(NbGraderPreprocessor):
    """Put back what is missing, and say on top what student and lecturer should know."""

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Return the notebook with a cell of notes, if there are any."""
        given = resources["nbgrader"]
        source = Path("source", given["assignment"], f"{given['notebook']}.ipynb")
        notes = list(_order(nb)) + list(_strange(nb))
        if renamed := nb.metadata.get("derived_attention", {}).get("renamed"):
            notes.insert(0, f"It was handed in as {renamed}.ipynb.")
        if source.exists():
            notes += restore(nb, nbformat.read(source, as_version=4))
        for note in notes:
            self.log.warning("%s, %s: %s", given["student"], given["notebook"], note)
        if notes:
            text = "\n".join(["**Notes on this submission**", "", *(f"- {x}" for x in notes)])
            nb.cells.insert(0, nbformat.v4.new_markdown_cell(text))
        return nb, resources


def restore(nb: NotebookNode, source: NotebookNode) -> Iterator[str]:
    """Put back the cells of an assignment that a notebook lacks; yield a note for each.

    A cell for an answer comes back empty.
    """
    place = 0
    for cell in source.cells:
        name = grade_id(cell)
        if name is None:
            continue
        where = [i for i, other in enumerate(nb.cells) if grade_id(other) == name]
        if where:
            place = where[0] + 1
            continue
        kind = cell.metadata["nbgrader"]
        if kind["solution"]:
            cell.source = "# There was no answer." if cell.cell_type == "code" else ""
        nb.cells.insert(place, cell)
        place += 1
        what = "answer" if kind["solution"] else "check" if kind["grade"] else "cell"
        yield f"The {what} {name!r} was missing, and has been put back."


def grade_id(cell: NotebookNode) -> str | None:
    """Return the name that nbgrader knows a cell by, if it has one."""
    return cell.metadata.get("nbgrader", {}).get("grade_id")


def _order(nb: NotebookNode) -> Iterator[str]:
    """Yield a note if the cells were last run in another order than they stand in."""
    counts = [cell.get("execution_count") for cell in nb.cells if cell.cell_type == "code"]
    ran = [count for count in counts if count]
    if ran != sorted(ran):
        yield (
            "Its cells were last run in another order. They are graded from top to bottom: a name "
            "that is defined further down is not known yet. Restart the kernel and run all cells "
            "before you hand in."
        )


def _strange(nb: NotebookNode) -> Iterator[str]:
    """Yield a note for each cell of the student's that should be read by somebody."""
    for number, cell in enumerate(nb.cells, 1):
        own = not cell.metadata.get("nbgrader", {}).get("locked", False)
        if cell.cell_type == "code" and own and (found := strange(cell.source)):
            yield f"Cell {number} should be read by somebody: it has {', '.join(found)}."


def strange(code: str) -> list[str]:
    """Return what is in code that no exercise asks for, and that could reach the checks."""
    lines = [x for x in code.splitlines() if x.lstrip().startswith(("%", "!"))]
    try:
        tree = ast.parse("\n".join(x for x in code.splitlines() if x not in lines))
    except SyntaxError:
        return sorted(lines)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {x.name for x in ast.walk(tree) if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            names |= {*node.name.split("."), node.asname or ""}
        elif isinstance(node, ast.ImportFrom):
            names |= set((node.module or "").split("."))
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
            if not isinstance(node.ctx, ast.Load):  # torch.randn = ...
                lines.append(f"{ast.unparse(node)} = ...")
    dunder = {x for x in names if x.startswith("__") and x != "__init__"}
    return sorted({*lines, *(names & STRANGE), *dunder})


# --- running it ----------------------------------------------------------------------------------


def fenced(course: str, scratch: str) -> list[str]:
    """Return the start of a command that sees no course, no network, and can write to scratch."""
    return [*FENCE, "sh", "-c", HIDDEN, os.path.realpath(course), os.path.realpath(scratch)]


@cache
def fence_works() -> bool:
    """Say whether this machine lets its users put up that fence."""
    with tempfile.TemporaryDirectory() as parent:
        course, scratch, beside = (Path(parent, x) for x in ("course", "scratch", "beside"))
        course.mkdir()
        scratch.mkdir()
        (course / "marks").touch()
        test = f'test ! -e "{course}/marks" && touch here && ! touch "{beside}"'
        command = [*fenced(str(course), str(scratch)), "sh", "-c", test]
        try:
            return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


class LimitedKernel(AsyncKernelManager):
    """A kernel that is told little, and may use no more than the limits above."""

    def __init__(self, **options: Any) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="graded-", ignore_cleanup_errors=True)
        file = str(Path(self.scratch.name) / "kernel.json")
        # Sockets in a folder, since a kernel without network has no other way to answer.
        super().__init__(transport="ipc", connection_file=file, **options)

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        """Return the command of the kernel, behind those that limit it."""
        limits = [CPU_SECONDS, MEMORY // 2**10, FILE // 512]
        command = super().format_kernel_cmd(extra_arguments)
        before = fenced(os.getcwd(), self.scratch.name) if fence_works() else []
        return [*before, "sh", "-c", LIMITED, *map(str, limits), *command]

    async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
        """Start it in an empty folder, with none of the variables that could hold a secret."""
        wanted = ("OMP_", "MKL_", "CUDA_", "DERIVED_ATTENTION_")
        kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith(wanted)}
        kept |= dict.fromkeys(("TMPDIR", "IPYTHONDIR"), self.scratch.name)
        options |= {"env": {"OMP_NUM_THREADS": "1", **kept}, "cwd": self.scratch.name}
        await super().start_kernel(**options)


class Run(Execute):
    """Run a notebook from top to bottom; a cell that ends the kernel, or has to be ended, fails."""

    timeout = Integer(60, help="Seconds of a cell.").tag(config=True)

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("kernel_manager_class", LimitedKernel)
        super().__init__(*args, **options)
        self.interrupt_on_timeout, self.shutdown_kernel = False, "immediate"
        if not fence_works():
            self.log.warning(
                "This machine does not let its users make namespaces: students' code runs with "
                "the network, and with access to this folder. Grade a copy, in a container."
            )

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict, index: int
    ) -> tuple[NotebookNode, dict]:
        """Execute one cell; after the end of the kernel begin with a new one."""
        try:
            cell, resources = super().preprocess_cell(cell, resources, index)
            if reason := _cut_short(cell):
                _fail(cell, reason)
            return cell, resources
        except CellTimeoutError:
            reason = f"the cell took longer than {self.timeout} s, and was stopped"
        except DeadKernelError:
            reason = "the cell ended Python: by itself, or for want of memory or time"
        self.log.warning("cell %s: %s", grade_id(cell) or index + 1, reason)
        _fail(cell, f"{reason}. What it defined is lost to the cells below")
        self._begin_again(index)
        return cell, resources

    def _begin_again(self, index: int) -> None:
        """Start a kernel, and run the locked cells that prepare the exercises."""
        self._cleanup_kernel()
        self.create_kernel_manager()
        self.start_new_kernel()
        self.start_new_kernel_client()
        for number, cell in enumerate(self.nb.cells[:index]):
            kind = cell.metadata.get("nbgrader", {})
            if cell.cell_type == "code" and kind.get("locked") and not kind.get("grade"):
                self.execute_cell(cell.copy(), number, store_history=False)


def _fail(cell: NotebookNode, reason: str) -> None:
    """Give a cell an error, for which there are no points."""
    error = {"ename": "Stopped", "evalue": reason, "traceback": [f"Stopped: {reason}."]}
    cell.outputs.append(nbformat.v4.new_output("error", **error))


def _cut_short(cell: NotebookNode) -> str:
    """Return what is wrong if a check raised no error, and did not come to its end, either."""
    if not cell.metadata.get("nbgrader", {}).get("grade") or "check_refuses(" not in cell.source:
        return ""
    if any(output.output_type == "error" for output in cell.outputs):
        return ""
    said = "".join(x.text for x in cell.outputs if x.output_type == "stream")
    whole = said.count("Correct.") >= 2  # for the check that students see, and for the hidden one
    return "" if whole else "the check was not run to its end"
