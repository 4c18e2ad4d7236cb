"""Autograding with nbgrader: what students' code may use, and a reason for every zero.

`make course` writes an ``nbgrader_config.py`` that names what is here. In addition to what nbgrader
does itself, this module finds renamed notebooks, puts missing cells back, grades copied and split
cells, lists code that a person should read, and gives no points for an exercise that ends the
kernel, without an effect on the others. A file that cannot be read gets a message instead of marks.

Students' code runs with limits on time, memory and files. On Linux, where ordinary users may make
namespaces, it has no network, sees neither the course's folder nor other processes, and can write
to an empty folder alone. What it can still do is in the book's page "Running a course with
nbgrader".
"""

from __future__ import annotations

import ast
import atexit
import csv
import json
import logging
import math
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbconvert.exporters import NotebookExporter
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbgrader.api import Gradebook
from nbgrader.plugins import CsvExportPlugin
from nbgrader.preprocessors import (
    ClearHiddenTests,
    ClearMarkScheme,
    ClearSolutions,
    Execute,
    NbGraderPreprocessor,
)
from traitlets import Float, Integer

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
# this took. The kernel writes a space in the name of a folder as \040, which printf decodes.
HIDDEN = r"""mount --bind "$1" "$1" && mount -t tmpfs none "$0" || exit 1
while read -r _ _ _ _ place options _; do
  place=$(printf %b "$place")
  case "$place" in "$0" | "$1" | /proc | /proc/* | /sys | /sys/* | /dev | /dev/*) continue ;; esac
  mount -o "remount,bind,ro,${options#r[ow],}" "$place" || exit 1
done </proc/self/mountinfo
cd "$1" && shift && exec setpriv --bounding-set=-all --no-new-privs "$@"
"""
FENCE = "unshare --map-root-user --net --mount --pid --fork --kill-child --mount-proc".split()
# What no exercise asks for, and what could reach the checks: to be read by somebody.
STRANGE = set(
    """__builtins__ builtins check_properties check_refuses compile ctypes delattr derived_attention
    derived_book eval exec exercises exit gc get_ipython globals importlib inspect multiprocessing
    open os pathlib quit setattr shutil signal socket subprocess sys threading vars""".split()
)
TRIED = "its check was run after each of them, and the best result counts"
COPIES = {
    "answer": f"{TRIED}; if it is in words, all pieces should be read",
    "check": TRIED,
    "cell": "the first is used",
}


# --- before the notebook is run ------------------------------------------------------------------


def find_renamed(assignment: str, student: str, notebooks: list[str]) -> None:
    """Take a notebook that was handed in under another name for the one that is expected.

    nbgrader calls this for each student, with the paths of the notebooks that are there. Where
    several could be meant, it writes one that says so.
    """
    for folder in {Path(path).parent for path in notebooks}:
        ours = {path: _ours_in(path) for path in sorted(folder.glob("*.ipynb"))}
        given = [path for path in ours if not {"renamed", "ungraded"} & set(ours[path])]
        target = folder / f"{assignment}.ipynb"
        if target in given or not given:
            continue
        found = [path for path in given if ours[path].get("assignment") == assignment] or given
        if len(found) == 1:
            notebook = _read(found[0])
            _ours(notebook)["renamed"] = found[0].stem
        else:
            names = " and ".join(path.name for path in found)
            notebook = _message(f"{names} were handed in; expected one notebook, {target.name}")
        nbformat.write(notebook, target)
        notebooks[:] = [str(target)]


def _ours_in(path: Path) -> dict:
    """Return what the metadata in a notebook's file contain for this module."""
    try:
        return dict(json.loads(path.read_bytes())["metadata"]["derived_attention"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _ours(nb: NotebookNode) -> dict:
    """Return the same for a notebook that has been read; it can be changed."""
    if not isinstance(nb.metadata.get("derived_attention"), dict):
        nb.metadata["derived_attention"] = NotebookNode()
    return nb.metadata["derived_attention"]


def _message(reason: str) -> NotebookNode:
    """Return a notebook that only says why there is nothing to grade."""
    return new_notebook(metadata={"derived_attention": {"ungraded": reason}})


def _read(path: Path) -> NotebookNode:
    """Return the notebook in a file of any Unicode encoding, or one that says what is wrong."""
    try:
        data = path.read_bytes()
        if not data.strip():
            return _message("the file is empty")
        nb = nbformat.reads(json.dumps(json.loads(data)), as_version=4)
        nb.nbformat_minor = max(nb.nbformat_minor, 5)  # from which on cells have names
        _, nb = nbformat.validator.normalize(nb)
        _ours(nb)
        for cell in nb.cells:
            cell.source.split()
            cell.metadata.get("nbgrader")
        return nb
    except Exception as error:  # a file can contain anything
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return _message(f"the file cannot be read as a notebook ({what[:100]})")


class Reader(NotebookExporter):
    """Read what was handed in, whatever it is; print a table of the marks at the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.began = time.monotonic()
        self.rows: list[dict[str, str]] = []
        nothing = "Nothing new to grade; --force grades again."
        atexit.register(lambda: print(_table(self.rows) or nothing, flush=True))

    def from_file(
        self, file_stream: Any, resources: dict | None = None, **options: Any
    ) -> tuple[NotebookNode, dict]:
        """Convert a notebook; what cannot be read becomes one that says so."""
        nb = _read(Path(file_stream.name))
        return self.from_notebook_node(nb, resources=resources, **options)


class HandIn(NbGraderPreprocessor):
    """Mend what nbgrader cannot grade, and say on top what student and lecturer should know."""

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Return the notebook with a cell of notes, if there are any."""
        given = resources["nbgrader"]
        path = Path("source", given["assignment"], f"{given['notebook']}.ipynb")
        source = nbformat.read(path, as_version=4)
        released = deepcopy(source)
        for clear in (ClearSolutions, ClearHiddenTests, ClearMarkScheme):
            released, _ = clear(parent=self).preprocess(released, {})
        notes = list(_order(nb))
        if renamed := _ours(nb).get("renamed"):
            notes.insert(0, f"It was handed in as {renamed}.ipynb.")
        changes = list(restore(nb, source, released))
        if reason := _ours(nb).get("ungraded"):
            changes = [f"It has not been graded: {reason}. Save the notebook and hand it in again."]
        notes += [*changes, *_strange(nb)]
        if notes:
            text = "\n".join(["**Notes on this submission**", "", *(f"- {x}" for x in notes)])
            nb.cells.insert(0, new_markdown_cell(text))
        return nb, resources


def restore(nb: NotebookNode, source: NotebookNode, released: NotebookNode) -> Iterator[str]:
    """Give each cell of an assignment its metadata and its place; yield a note for each change.

    A missing cell comes back as it was released, and a locked one with its text. If a cell was
    copied or split, one piece keeps its name, of an answer the first that was worked on; the others
    stay as cells of the student's. Where an answer or its check is there more than once, the check
    is put behind each of them, for `keep_best` to choose.
    """
    cells = {
        name: (cell, given)
        for cell, given in zip(source.cells, released.cells, strict=True)
        if (name := grade_id(cell))
    }
    found: dict[str | None, list[NotebookNode]] = {name: [] for name in (None, *cells)}
    for cell in nb.cells:
        found[next((x for x in (grade_id(cell), cell.get("id")) if x in cells), None)].append(cell)
        for key in ("nbgrader", "derived_attention"):
            cell.metadata.pop(key, None)
    if not any(found[x] for x, (cell, _) in cells.items() if cell.metadata["nbgrader"]["grade"]):
        _ours(nb).setdefault("ungraded", "it has none of this assignment's answers and checks")
    place = 0
    for name, (cell, given) in cells.items():
        kind, copies = cell.metadata["nbgrader"], found[name]
        what = "answer" if kind["solution"] else "check" if kind["grade"] else "cell"
        changed = [x.source.split() != given.source.split() for x in copies]
        if not copies:
            nb.cells.insert(place, given)
            kept = given
            yield f"The {what} {name!r} was missing, and has been put back."
        else:
            kept = copies[changed.index(kind["solution"]) if len(set(changed)) > 1 else 0]
        if kind["locked"] and copies and all(changed):
            yield f"The {what} {name!r} had been changed, and has been put back."
        if len(copies) > 1:
            yield f"The {what} {name!r} is there {len(copies)} times: {COPIES[what]}."
        kept.metadata["nbgrader"] = deepcopy(kind)
        if kind["locked"]:
            kept.source = cell.source
        place = _index(nb, kept) + 1
    for name, (cell, _) in cells.items():
        pieces = found.get(f"{name.removesuffix('-check')}-answer", []), found[name]
        if name.endswith("-check") and max(map(len, pieces)) > 1:
            for piece in (x for x in (*pieces[0], *pieces[1]) if grade_id(x) != name):
                trial = new_code_cell(cell.source, metadata={"derived_attention": {"trial": name}})
                nb.cells.insert(_index(nb, piece) + 1, trial)


def keep_best(nb: NotebookNode) -> None:
    """Let a check that passed behind one of several pieces count; remove those put there."""
    trials = [cell for cell in nb.cells if _trial(cell)]
    passed = {_trial(cell): cell.outputs for cell in trials if not _errors(cell)}
    for cell in nb.cells:
        if (name := grade_id(cell)) and name in passed:
            cell.outputs = passed[name]
    nb.cells = [cell for cell in nb.cells if not _trial(cell)]


def _trial(cell: NotebookNode) -> str:
    """Return the name of the check that `restore` has put into this cell, if it did."""
    return cell.metadata.get("derived_attention", {}).get("trial", "")


def _errors(cell: NotebookNode) -> list[NotebookNode]:
    return [output for output in cell.get("outputs", ()) if output.output_type == "error"]


def _index(nb: NotebookNode, cell: NotebookNode) -> int:
    """Return the place of this very cell: a copy is equal to it."""
    return next(i for i, other in enumerate(nb.cells) if other is cell)


def grade_id(cell: NotebookNode) -> str | None:
    """Return the name that nbgrader knows a cell by, if it has one."""
    kind = cell.metadata.get("nbgrader")
    name = kind.get("grade_id") if isinstance(kind, dict) else None
    return name if isinstance(name, str) else None


def _order(nb: NotebookNode) -> Iterator[str]:
    """Yield a note if the cells were last run in another order than they stand in."""
    counts = [cell.get("execution_count") for cell in nb.cells if cell.cell_type == "code"]
    ran = [count for count in counts if count]
    if ran != sorted(ran):
        yield (
            "Its cells were last run in another order. They are graded from top to bottom: a cell "
            "cannot use a name that is defined below it. Restart the kernel and run all cells "
            "before you hand in."
        )


def _strange(nb: NotebookNode) -> Iterator[str]:
    """Yield a note for each cell of the student's that the lecturer should read."""
    cells = [cell for cell in nb.cells if not _trial(cell)]
    for number, cell in enumerate(cells, 2):  # behind the cell of notes
        own = not cell.metadata.get("nbgrader", {}).get("locked", False)
        if cell.cell_type == "code" and own and (found := strange(cell.source)):
            yield f"Read cell {number} yourself: it uses {', '.join(found)}."


def strange(code: str) -> list[str]:
    """Return what is in code that no exercise asks for, and that could reach the checks."""
    lines = [x for x in code.splitlines() if x.lstrip().startswith(("%", "!"))]
    try:
        tree = ast.parse("\n".join(x for x in code.splitlines() if x not in lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: too deep
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


def fence_command(course: str, scratch: str) -> list[str]:
    """Return the start of a command that sees no course, no network, and can write to scratch."""
    return [*FENCE, "sh", "-c", HIDDEN, os.path.realpath(course), os.path.realpath(scratch)]


@cache
def fence_works() -> bool:
    """Return whether this machine lets its users put up that fence."""
    with tempfile.TemporaryDirectory() as parent:
        course, scratch, beside = (Path(parent, x) for x in ("course", "scratch", "beside"))
        course.mkdir()
        scratch.mkdir()
        (course / "marks").touch()
        test = f'test ! -e "{course}/marks" && touch here && ! touch "{beside}"'
        command = [*fence_command(str(course), str(scratch)), "sh", "-c", test]
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
        before = fence_command(os.getcwd(), self.scratch.name) if fence_works() else []
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

    def preprocess(
        self, nb: NotebookNode, resources: dict | None = None, km: Any = None
    ) -> tuple[NotebookNode, dict | None]:
        """Run the notebook, unless there is nothing to grade."""
        reason = _ours(nb).get("ungraded")
        if not reason:
            nb, resources = super().preprocess(nb, resources, km)
            keep_best(nb)
        for cell in nb.cells if reason else ():
            if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("grade"):
                _fail(cell, f"not graded: {reason}")
        return nb, resources

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict, index: int
    ) -> tuple[NotebookNode, dict]:
        """Execute one cell; after the end of the kernel begin with a new one."""
        try:
            cell, resources = super().preprocess_cell(cell, resources, index)
            if _is_check(cell):
                _hide(cell)
                if reason := _cut_short(cell):
                    _fail(cell, reason)
            return cell, resources
        except CellTimeoutError:
            reason = f"the cell took longer than {self.timeout} s, and was stopped"
        except DeadKernelError:
            reason = "the cell ended Python: by itself, or for want of memory or time"
        _fail(cell, f"{reason}. The cells below cannot use what it defined")
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


def _is_check(cell: NotebookNode) -> bool:
    """Return whether a cell is a check with hidden tests."""
    graded = cell.metadata.get("nbgrader", {}).get("grade") or _trial(cell)
    return bool(graded) and "check_refuses(" in cell.source


def _fail(cell: NotebookNode, reason: str) -> None:
    """Give a cell an error, for which there are no points."""
    error = {"ename": "Stopped", "evalue": reason, "traceback": [f"Stopped: {reason}."]}
    cell.outputs.append(new_output("error", **error))


def _hide(cell: NotebookNode) -> None:
    """Leave only the message of an error: the lines around it are hidden tests."""
    for output in _errors(cell):
        output.traceback = output.traceback[-1:]


def _cut_short(cell: NotebookNode) -> str:
    """Return what is wrong if a check raised no error, and did not come to its end, either."""
    said = "".join(x.text for x in cell.outputs if x.output_type == "stream")
    whole = said.count("Correct.") >= 2  # for the check that students see, and for the hidden one
    return "" if whole or _errors(cell) else "the check was not run to its end"


# --- the marks -----------------------------------------------------------------------------------


class Summary(NbGraderPreprocessor):
    """Print a line on each student: marks, why an exercise has none, and what a human must do."""

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Return the notebook as it is."""
        given, reader = resources["nbgrader"], self.parent
        place = given["notebook"], given["assignment"], given["student"]
        with Gradebook(given["db_url"]) as gradebook:
            grades = gradebook.find_submission_notebook(*place).grades
            checks = [g for g in grades if g.name.endswith("-check")]
            short = _short(g.name for g in checks)
            points = {short[g.name]: g.auto_score or 0 for g in checks}
            total, unread = (
                sum(g.max_score for g in checks),
                sum(g.needs_manual_grade for g in grades),
            )
        notes = [x[2:] for x in nb.cells[0].source.splitlines() if x.startswith("- ")]
        said = [f"{sum(points.values()):g} of {total:g} points by checks"]
        if not (reason := _ours(nb).get("ungraded")):
            said += [f"{unread} to mark by hand"] * bool(unread)
            said += _zeros(nb, short)
        said += [note.partition(". ")[0].rstrip(".") for note in notes]
        students = sorted(Path(folder).parent.name for folder in reader.parent.assignments)
        row = {"student": place[2], **{name: f"{x:g}" for name, x in points.items()}}
        row |= {f"of {total:g}": "-" if reason else f"{sum(points.values()):g}"}
        reader.rows.append(row | {"by hand": str(unread), "notes": str(len(notes))})
        done = students.index(place[2]) + 1
        left = (time.monotonic() - reader.began) / len(reader.rows) * (len(students) - done) / 60
        time_left = f" ({math.ceil(left)} min left)" if left else ""
        print(f"{done} of {len(students)}{time_left}, {place[2]}: {'; '.join(said)}", flush=True)
        return nb, resources


def _zeros(nb: NotebookNode, short: dict[str, str]) -> Iterator[str]:
    """Yield why checks have failed: first those without an answer, then each error."""
    errors = {grade_id(cell): x.evalue or x.ename for cell in nb.cells for x in _errors(cell)[:1]}
    failed = {x: errors.get(x.replace("-check", "-answer"), errors[x]) for x in errors if x}
    failed = {short[x]: reason for x, reason in failed.items() if x in short}
    empty = [name for name, reason in failed.items() if "there is no answer" in reason]
    if empty:
        yield f"no answer to {', '.join(empty)}"
    yield from (
        f"{x}: {shorten(y, 90, placeholder=' …')}" for x, y in failed.items() if x not in empty
    )


def _short(checks: Iterable[str]) -> dict[str, str]:
    """Return the last part of each name, rms for ex-05-rms-check; ex-05-rms if two share it."""
    names = {check: check.removesuffix("-check") for check in checks}
    last = {check: name.split("-", 2)[-1] for check, name in names.items()}
    times = Counter(last.values())
    return {check: last[check] if times[last[check]] == 1 else names[check] for check in names}


def _table(rows: list[dict[str, str]]) -> str:
    """Return rows as a table in aligned columns."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pairs = (zip(line, widths, strict=True) for line in lines)
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in pair).rstrip() for pair in pairs
    )


class Grades(CsvExportPlugin):
    """Export the marks; who has not been graded gets no number, and a note that says why."""

    late = Float(0, help="Percent of the marks that each day of delay costs.").tag(config=True)

    def export(self, gradebook: Gradebook) -> None:
        """Write the table of nbgrader, with a column of notes; what is late loses what it must."""
        course = Path(self.parent.coursedir.root)
        for assignment in gradebook.assignments:
            for folder in course.glob(f"submitted/*/{assignment.name}"):
                gradebook.update_or_create_student(folder.parent.name)
            for submission in assignment.submissions:  # marks by hand and extensions are newer
                days = math.ceil(submission.total_seconds_late / 86400)
                for nb in submission.notebooks:
                    nb.late_submission_penalty = nb.score * min(1, self.late / 100 * days)
        gradebook.db.commit()
        super().export(gradebook)
        path = Path(self.to or "grades.csv")
        with open(path, newline="") as file:
            header, *rows = csv.reader(file)
        numbers = [header.index(x) for x in ("raw_score", "late_submission_penalty", "score")]
        student, assignment = map(header.index, ("student_id", "assignment"))
        order = [x.name for x in gradebook.assignments]
        rows.sort(key=lambda row: (order.index(row[assignment]), row[student]))
        for row in rows:
            row.append(_why_ungraded(course, row[student], row[assignment]))
            for i in numbers if row[-1] else ():
                row[i] = ""
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([[*header, "note"], *rows])


def _why_ungraded(course: Path, student: str, assignment: str) -> str:
    """Return why a student has no marks for an assignment; nothing if there are marks."""
    graded = course / "autograded" / student / assignment / f"{assignment}.ipynb"
    if graded.exists():
        return _ours_in(graded).get("ungraded", "")
    there = [x.name for x in (course / "submitted" / student / assignment).glob("*")]
    if any(name.endswith(".ipynb") for name in there):
        return "it has not been graded: run `nbgrader autograde`, and read its messages"
    return f"there is no notebook among {', '.join(there)}" if there else "nothing was handed in"
