"""Write the assignments of a course: ``python _ext/course.py`` makes _build/course from the pages.

For each page with exercises it writes the source of an assignment for nbgrader, with solutions, and
the notebook that nbgrader generates from it for students. ``seal FOLDER`` packs problems that only
lecturers should see into course/problems.enc; ``--key`` takes such a folder, or the archive's
passphrase, and adds its problems to those of the book. ``--exercises`` takes a syllabus of the book
or a file like weeks.csv, and writes assignments with the exercises that this plan names.

A secret determines the random numbers of the hidden tests. No notebook contains it; secret.txt
stores it, so that the next call writes the same tests.
"""

from __future__ import annotations

import argparse
import ast
import base64
import csv
import getpass
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path

import nbformat
import yaml
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book import ROOT
from exercises import BOOK, EXERCISE, Exercise, read_exercises
from notebooks import set_up

TARGET, ARCHIVE = ROOT / "_build" / "course", ROOT / "course" / "problems.enc"
PASSPHRASE = "COURSE_PASSPHRASE"  # the environment variable from which `seal` takes the passphrase
SALT = 16  # bytes
SECRET = 8  # the least number of characters in the secret behind hidden tests
OPEN_POINTS = 20  # for an open exercise
PREPARED = "# Definitions that the exercises need."
STUB, TEXT_STUB = "# Your answer, instead of the three dots.", "*Your answer.*"
COLUMNS = ("assignment", "title", "exercises")  # of weeks.csv that a lecturer may edit
MARKS = ("### BEGIN SOLUTION", "### END SOLUTION", "### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")
SCHEME = ("=== BEGIN MARK SCHEME ===", "=== END MARK SCHEME ===")
VERBS = "Show|Prove|Derive|Find|Minimise|Write|Compute|Compare|Predict|Measure|Evaluate|Give|Count"
VERBS += "|Express|Sketch|Choose|Take|Design|Build|Train|Check|Solve|Describe|Explain|Bound"
CONFIG = ROOT / "course" / "nbgrader_config.py"
INTRODUCTION = """\
# {title}

{minutes} minutes, {points} points. Read the chapter first: theorems and equations are numbered as
in the book. Write your answers in their cells, run all cells from top to bottom, save, and hand in
this file under the name {name}.ipynb. You may add cells, but do not remove any.

Your code is graded by the checks that you see and by further checks with other numbers, in a new
Python process without a network. A cell may run for one minute; the whole notebook may use {memory}
GB of memory."""


# --- one assignment ------------------------------------------------------------------------------


def assignment(page: str) -> str:
    """Return the name of a page's assignment: chapter05, appendixD, positions, exam."""
    kind, _, rest = page.partition("_")
    if rest and kind.isdigit():
        return f"chapter{kind}"
    return f"appendix{kind}" if rest and len(kind) == 1 else page


def points(exercise: Exercise) -> tuple[int, int]:
    """Return the points by check and by hand: one a minute, and 20 for an open exercise.

    An answer in words beside a check earns a fifth of them, or half if the mark is not ⌨ alone. A
    problem's own rubric sets its points by hand.
    """
    total = OPEN_POINTS if exercise.open else exercise.minutes
    words = total // 5 if exercise.mark == "⌨" else total - total // 2
    by_check = 0 if not exercise.name else total - words if exercise.by_hand else total
    by_hand = exercise.rubric[0] if exercise.rubric else total - by_check
    return by_check, by_hand if exercise.by_hand else 0


def source(title: str, name: str, exercises: list[Exercise], seed: int) -> nbformat.NotebookNode:
    """Return the source from which nbgrader makes an assignment, with solutions and all checks."""
    number = _course_number(seed) if any(e.prelude for e in exercises) else ""
    cells = [_text(_introduction(title, name, exercises), "introduction")]
    cells.append(_code(f"{set_up()}\n{number}".strip(), "set-up", locked=True))
    shown = set()
    for _, group in groupby(exercises, lambda e: e.number.rpartition(".")[0]):  # by page
        of_page = list(group)
        prepared = dict.fromkeys(x for e in of_page for x in (*e.needed, e.before) if x)
        if prepared:
            text = "\n".join([PREPARED, *_tidy(list(prepared))])
            cells.append(_code(text, f"{of_page[0].label}-needs", locked=True))
        for exercise in of_page:
            for i, (kind, text) in enumerate(exercise.prelude):
                place = f"{exercise.label}-before-{i}"
                new = _text(text, place) if kind != "code" else _code(text, place, locked=True)
                cells += [new] if text not in shown else []
                shown.add(text)
            cells += _cells(exercise, seed)
    ids = [cell.metadata["nbgrader"]["grade_id"] for cell in cells]
    if twice := {x for x in ids if ids.count(x) > 1}:
        raise ValueError(f"{name} contains {min(twice)!r} twice; expected each label once")
    notebook = new_notebook(cells=cells)
    notebook.metadata = {
        "derived_attention": {"assignment": name},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in cells:  # so that the same source gives the same file
        cell.id = cell.metadata["nbgrader"]["grade_id"][:64]
    return notebook


def _course_number(seed: int) -> str:
    """Return the statement that sets SEED, a number below 100 that varies lecturers' problems.

    It distinguishes a hundred courses, and reveals no more about the seed of hidden tests.
    """
    return f"SEED = {hashlib.sha256(str(seed).encode()).digest()[0] % 100}\n"


def _introduction(title: str, name: str, exercises: list[Exercise]) -> str:
    return INTRODUCTION.format(
        title=title,
        name=name,
        minutes=sum(e.minutes for e in exercises),
        points=sum(sum(points(e)) for e in exercises),
        memory=4,
    )


def _tidy(statements: list[str]) -> list[str]:
    """Return statements with the imports on top, and empty lines around definitions."""
    names: dict[str, list[str]] = {}
    others, modules = [], []
    for text in statements:
        if match := re.fullmatch(r"from (\S+) import ([^\n]+)", text):
            names.setdefault(match[1], []).append(match[2])
        elif text.startswith("import "):
            modules.append(text)
        else:
            others.append(f"\n{text}\n" if "\n" in text else text)
    taken = (f"from {module} import {', '.join(found)}" for module, found in names.items())
    return [*modules, *taken, "", *others]


def _cells(exercise: Exercise, seed: int) -> list[nbformat.NotebookNode]:
    """Return the cells of one exercise: task, answer and check, answer in words."""
    checked, by_hand = points(exercise)
    time = f"{exercise.minutes} minutes"
    worth = " + ".join(
        [f"{checked} points by the check"] * bool(checked)
        + [f"{by_hand} points by hand"] * bool(by_hand)
    )
    head = f"## Exercise {exercise.number}. {exercise.title}\n\n{exercise.mark} {worth}, {time}"
    scheme = "\n".join([SCHEME[0], *_scheme(exercise), SCHEME[1]])
    cells = [_text(f"{head}\n\n{exercise.text}\n\n{scheme}", exercise.label)]
    if exercise.name:
        answer = "\n".join([f"{exercise.name} = ...", MARKS[0], exercise.code, MARKS[1]])
        cells.append(_code(answer, f"{exercise.label}-answer", solution=True))
        cells.append(_code(_test(exercise, seed), f"{exercise.label}-check", checked, locked=True))
    if by_hand:
        words = f"{MARKS[0]}\n{exercise.solution}\n{MARKS[1]}"
        cells.append(_text(words, f"{exercise.label}-words", by_hand))
    return cells


def _scheme(exercise: Exercise) -> list[str]:
    """Return the marking scheme: points for each question, solution, known mistakes."""
    _, by_hand = points(exercise)
    lines = ["**Solution.**", "", exercise.solution]
    if by_hand:
        lines = [*_rubric(exercise, by_hand), "", "**Expected answer.**", *lines[1:]]
    if exercise.code and not exercise.name:
        lines += ["", "```python", exercise.code, "```"]
    if exercise.mistakes:
        lines += ["", "**Expected mistakes** and the messages of the check:", ""]
    for mistake in exercise.mistakes:
        what = f"{mistake.name}: " if mistake.name else ""
        code = ["```python", *mistake.code.splitlines(), "```"]
        lines += [f"- {what}*{_readable(mistake.message)}*", "", *(f"  {x}" for x in code), ""]
    return lines


def _rubric(exercise: Exercise, by_hand: int) -> list[str]:
    if exercise.rubric:
        return [f"**Rubric, {by_hand} points.** {exercise.rubric[1]}"]
    asked = [x for x in demands(exercise.text) if exercise.mark != "⌨" or x.endswith("?")]
    shares = [by_hand // len(asked) + (i < by_hand % len(asked)) for i in range(len(asked))]
    return [
        f"**Rubric, {by_hand} points.** Give all points of a line for a result with its",
        "reason, and half of them for a result alone or for a reason with a slip.",
        "",
        *(f"- {share} points: {text}" for share, text in zip(shares, asked, strict=True)),
    ]


def _readable(pattern: str) -> str:
    """Return a regular expression for a message as text, with … for its wildcards."""
    return re.sub(r"\\(.)", r"\1", re.sub(r"(?<!\\)\.[*+]\??", " … ", pattern))


def demands(text: str) -> list[str]:
    """Return the questions and instructions of an exercise, or else its whole text."""
    flat = " ".join(re.sub(r"\$\$.*?\$\$", "(formula)", text, flags=re.S).split())
    sentences = re.split(r"(?<=[.?!])\s+(?=[A-Z`*($⌨✍])", flat)
    asked = [x for x in sentences if x.endswith("?") or re.match(rf"(?:{VERBS})\b", x)]
    return asked or [flat]


def _test(exercise: Exercise, seed: int) -> str:
    """Return the check of the page, followed by the hidden tests."""
    name = exercise.name
    reason = f"{name}: there is no answer, or its cell failed"
    call = f'assert globals().get("{name}", ...) is not ..., "{reason}"'
    wrong = [x.code for x in exercise.mistakes] + [f"{name} = lambda *a, **k: None"]
    hidden = [
        MARKS[2],
        "# Test the same properties with other random numbers.",
        other_draws(exercise.test, seed),
        "# The check must still refuse wrong answers.",
        "from derived_book.exercises import check_refuses",
        f"test = {exercise.test!r}",
        *(f"check_refuses(test, [{code!r}], globals())" for code in wrong),
        MARKS[3],
    ]
    imported = "from derived_book.exercises import check, check_properties"
    return "\n".join([imported, call, "", exercise.test, *hidden])


class _Reseed(ast.NodeTransformer):
    """Change the seed of every random draw in a page's check."""

    def __init__(self, seed: int):
        self.seed = seed

    def visit_Call(self, node: ast.Call) -> ast.Call:  # noqa: N802
        """Change a call that takes a seed."""
        self.generic_visit(node)
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "check_properties":
            node.keywords.append(ast.keyword("seed", ast.Constant(self.seed)))
        elif name == "default_rng" and node.args:
            node.args = [ast.List([ast.Constant(self.seed), node.args[0]], ast.Load())]
        elif name == "manual_seed" and node.args:
            node.args = [ast.BinOp(node.args[0], ast.Add(), ast.Constant(1000 * self.seed))]
        return node


def other_draws(test: str, seed: int) -> str:
    """Return a check with other seeds for the checker, for NumPy and for PyTorch's generators."""
    return ast.unparse(ast.fix_missing_locations(_Reseed(seed).visit(ast.parse(test))))


def _code(text: str, name: str, worth: int = 0, locked: bool = False, solution: bool = False):
    cell = new_code_cell(text)
    cell.metadata = {"nbgrader": _kind(name, worth, locked, solution)}
    return cell


def _text(text: str, name: str, worth: int = 0):
    cell = new_markdown_cell(text)
    cell.metadata = {"nbgrader": _kind(name, worth, not worth, bool(worth))}
    return cell


def _kind(name: str, worth: int, locked: bool, solution: bool) -> dict:
    kind = {"grade_id": name, "schema_version": 3, "grade": worth > 0, "locked": locked}
    kind |= {"solution": solution, "task": False}
    return kind | ({"points": worth} if worth else {})


# --- the students' notebook ----------------------------------------------------------------------


def for_students(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return the notebook without solutions, hidden tests and schemes, as nbgrader generates it."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells:
        stub = STUB if cell.cell_type == "code" else TEXT_STUB
        cell.source = _cut(_cut(_cut(cell.source, *MARKS[:2], stub), *MARKS[2:]), *SCHEME).strip()
    return copy


def _cut(text: str, start: str, end: str, stub: str = "") -> str:
    pattern = rf"^{re.escape(start)}$.*?^{re.escape(end)}$"
    return re.sub(pattern, lambda _: stub, text, flags=re.M | re.S)


# --- the course ----------------------------------------------------------------------------------


def pages() -> list[str]:
    """Return the pages with assignments in the order of the book.

    Audits have none, because their exercises are questions for a seminar.
    """
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))
    found = [Path(page["file"]).name for part in toc["parts"] for page in part["chapters"]]
    return [
        name
        for name in found
        if not name.startswith("audit") and EXERCISE.search((BOOK / f"{name}.md").read_text("utf8"))
    ]


def title_of(path: Path) -> str:
    """Return the title of a page."""
    return re.search(r"^# (.+)$", path.read_text("utf8"), re.M)[1]


def course(problems: Path | None = None, plan: str = "") -> dict[str, tuple[str, list[Exercise]]]:
    """Return title and exercises by assignment: of a plan, or all but the book's open ones."""
    if problems and not any(problems.glob("*.md")):
        raise ValueError(f"{problems} contains no pages; expected files *.md")
    found = {}
    for page in pages():
        path, extra = BOOK / f"{page}.md", problems and problems / f"{page}.md"
        exercises = read_exercises(path)
        own = read_exercises(extra, len(exercises) + 1) if extra and extra.exists() else []
        chosen = [e for e in exercises if plan or not e.open]
        found[assignment(page)] = (title_of(path), chosen + own)
    for path in sorted(problems.glob("*.md")) if problems else []:
        name, of_book = assignment(path.stem), {assignment(page): page for page in pages()}
        if path.stem in of_book.values():
            continue
        if name.lower() in map(str.lower, found):
            raise ValueError(
                f"{path.name} would replace the assignment {name}; expected another name, or "
                f"{of_book.get(name, 'the name of a page')}.md to add problems to it"
            )
        found[name] = (title_of(path), read_exercises(path))
    return choose(plan, found) if plan else found


def choose(plan: str, found: dict) -> dict[str, tuple[str, list[Exercise]]]:
    """Return the assignments of a syllabus (12, 6 or 2) or of a file like weeks.csv."""
    text = (BOOK / "teaching_syllabi.md").read_text("utf8")
    section = re.search(rf"^\(syllabus-{re.escape(plan)}\)=$(.*?)(?=^\(|\Z)", text, re.M | re.S)
    if section:
        head, _, *rows = [x.split("|") for x in section[1].splitlines() if x.startswith("| ")]
        unit = head[1].strip()
        weeks = [
            (f"{unit}{i:02}", f"{unit.title()} {i}", re.findall(r"`(ex-[\w-]+)`", row[3]))
            for i, row in enumerate(rows, 1)
        ]
    elif Path(plan).is_file():
        try:
            text = Path(plan).read_text("utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"{plan} is in another encoding; expected CSV in UTF-8") from None
        weeks = [[row.get(x) or "" for x in COLUMNS] for row in csv.DictReader(io.StringIO(text))]
        weeks = [(name, title, labels.split()) for name, title, labels in weeks]
    else:
        raise ValueError(f"EXERCISES is {plan!r}; expected 12, 6, 2 or a file like weeks.csv")
    known = {e.label: e for _, exercises in found.values() for e in exercises}
    for name, label in ((name, x) for name, _, labels in weeks for x in labels if x not in known):
        near = " or ".join(get_close_matches(label, known)) or "a label, such as ex-05-rms"
        raise ValueError(f"{name} has the exercise {label!r}; expected {near}")
    names = [name for name, _, labels in weeks if labels]
    if not names or len({*names}) < len(names):
        raise ValueError(
            f"{plan} has the assignments {', '.join(names) or '(none)'}; expected each name once, "
            f"and the columns {', '.join(COLUMNS)}, separated by commas"
        )
    for name in names:
        if not re.fullmatch(r"\w[\w .-]*", name):  # it becomes the name of a file
            raise ValueError(f"{plan} has the assignment {name!r}; expected letters and digits")
    return {name: (title, [known[x] for x in labels]) for name, title, labels in weeks if labels}


def write(seed: int, assignments: dict, target: Path = TARGET) -> list[dict]:
    """Write assignments below `target`, keep nbgrader's own files there, and return the weeks."""
    rows = []
    for old in ("student", "nbgrader/source"):
        shutil.rmtree(target / old, ignore_errors=True)
    for week, (name, (title, exercises)) in enumerate(assignments.items(), 1):
        notebook = source(title, name, exercises, seed)
        _write(target / "nbgrader" / "source" / name / f"{name}.ipynb", notebook)
        _write(target / "student" / f"{name}.ipynb", for_students(notebook))
        by_check, by_hand = (sum(x) for x in zip(*map(points, exercises), strict=True))
        row = dict(zip(COLUMNS, (name, title, " ".join(e.label for e in exercises)), strict=True))
        row |= {"week": week, "minutes": sum(e.minutes for e in exercises)}
        rows.append(row | {"points by checks": by_check, "points by hand": by_hand})
    shutil.copy(CONFIG, target / "nbgrader")
    return rows


def write_weeks(target: Path, rows: list[dict]) -> None:
    """Write weeks.csv, with a row for each assignment."""
    with open(target / "weeks.csv", "w", encoding="utf8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _write(path: Path, notebook: nbformat.NotebookNode) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", "utf8")


PROVE = """
import contextlib, io, json, sys, time
wrong, begin = [], time.process_time()
for label, code in json.load(sys.stdin):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, {})
    except Exception as error:
        wrong.append(f"{label}: {type(error).__name__}: {error}")
with open("/proc/self/status") as status:  # getrusage includes the parent process
    (peak,) = (line.split()[1] for line in status if line.startswith("VmHWM"))
print(json.dumps([wrong, time.process_time() - begin, 1024 * int(peak)]))
"""


def prove(exercises: list[Exercise], seed: int) -> tuple[list[str], float, float]:
    """Run the checks of all exercises on their solutions.

    Return the failures, the computing time in seconds, and the peak memory in bytes.
    """
    todo = []
    for e in exercises:
        if e.name:
            prelude = [text for kind, text in e.prelude if kind == "code"]
            before = [_course_number(seed), *e.needed, *prelude]
            todo.append((e.label, "\n".join([*before, e.before, e.code, _test(e, seed)])))
    done = subprocess.run(
        [sys.executable, "-c", PROVE], input=json.dumps(todo), capture_output=True, text=True
    )
    if done.returncode:
        return [done.stderr.strip()[-300:]], math.nan, math.nan
    return tuple(json.loads(done.stdout.splitlines()[-1]))


# --- problems for lecturers ----------------------------------------------------------------------


def lock(passphrase: str, salt: bytes) -> Fernet:
    """Return the cipher that encrypts and decrypts with a passphrase."""
    if len(passphrase) < 12:
        count = f"{len(passphrase)} characters; expected 12 or more"
        raise ValueError(f"the passphrase has {count}")
    key = Scrypt(salt=salt, length=32, n=2**15, r=8, p=1).derive(passphrase.encode())
    return Fernet(base64.urlsafe_b64encode(key))


def seal(folder: Path, passphrase: str, archive: Path = ARCHIVE) -> None:
    """Pack the pages of a folder into an encrypted archive."""
    pages = sorted(folder.glob("*.md"))
    if not pages:
        raise ValueError(f"{folder} contains no pages; expected files *.md")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for page in pages:
            tar.add(page, page.name)
    salt = os.urandom(SALT)
    archive.write_bytes(salt + lock(passphrase, salt).encrypt(data.getvalue()))


def unseal(passphrase: str, folder: Path, archive: Path = ARCHIVE) -> None:
    """Unpack the encrypted archive into a folder."""
    if not archive.exists():
        raise ValueError(f"{archive.name} is missing; expected the archive of the problems")
    content = archive.read_bytes()
    try:
        data = lock(passphrase, content[:SALT]).decrypt(content[SALT:])
    except InvalidToken:
        raise ValueError(f"the passphrase does not open {archive.name}") from None
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        tar.extractall(folder)


def main() -> int:
    """Write the course, or seal a folder of problems; return 1 if that fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", default="write", choices=("write", "seal"))
    parser.add_argument("folder", nargs="?", type=Path, help="the folder of pages to seal")
    parser.add_argument("--seed", default="", help="the secret that determines hidden tests")
    parser.add_argument("--key", default="", help="a folder of problems, or the passphrase")
    parser.add_argument("--exercises", default="", help="12, 6, 2, or a file like weeks.csv")
    given = parser.parse_args()
    if (given.what == "seal") != (given.folder is not None):
        parser.error("`seal` needs a FOLDER of pages, and `write` takes none")
    try:
        if given.what == "seal":
            passphrase = os.environ.get(PASSPHRASE) or getpass.getpass("Passphrase: ")
            seal(given.folder, passphrase)
            print(f"Sealed: {ARCHIVE.relative_to(ROOT)}")
            return 0
        with tempfile.TemporaryDirectory() as folder:
            problems = Path(given.key) if given.key and Path(given.key).is_dir() else None
            if given.key and problems is None:
                print("KEY is not a folder, so it is used as the passphrase.", file=sys.stderr)
                problems = Path(folder)
                unseal(given.key, problems)
            assignments = course(problems, given.exercises)  # before a new secret is stored
            return make(hidden_seed(given.seed), assignments)
    except (ValueError, SyntaxError) as error:
        print(error, getattr(error, "text", ""), file=sys.stderr)
        return 1


def hidden_seed(given: str = "", target: Path = TARGET) -> int:
    """Return the seed of hidden tests from a given, stored or new secret, and store this secret."""
    path = target / "secret.txt"
    secret = given or (path.read_text("utf8") if path.exists() else secrets.token_hex(SECRET))
    if len(secret) < SECRET:
        raise ValueError(
            f"SEED has {len(secret)} characters; expected {SECRET} or more, which students cannot "
            "guess, or no SEED for a random secret"
        )
    target.mkdir(parents=True, exist_ok=True)
    path.write_text(secret, "utf8")
    return int.from_bytes(hashlib.sha256(secret.encode()).digest()[:5])


def make(seed: int, assignments: dict) -> int:
    """Write the course, and run its checks on the solutions; return 1 if a solution fails."""
    rows = write(seed, assignments)
    print(f"Written to {TARGET.relative_to(ROOT)}. Trying the checks on the solutions:", flush=True)
    failed = 0
    for row, (name, (_, exercises)) in zip(rows, assignments.items(), strict=True):
        wrong, seconds, memory = prove(exercises, seed)
        row |= {"seconds of computing": round(seconds, 1), "memory, GB": round(memory / 1e9, 2)}
        by = [f"{row[f'points by {x}']} points by {x}" for x in ("checks", "hand")]
        print(f"  {name}: {len(exercises)} exercises, {', '.join(by)}", flush=True)
        for line in wrong:
            hint = "; define it in a cell before the exercise" * ("NameError" in line)
            print(f"  {name}, {line}{hint}", file=sys.stderr, flush=True)
        failed += len(wrong)
    write_weeks(TARGET, rows)
    print("All pass." if not failed else f"{failed} fail: correct them, or choose another SEED.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
