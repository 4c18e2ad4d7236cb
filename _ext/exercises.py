"""Read the exercises of a page: text, code, checks, solutions, and the statements that they need.

Tests of the checks and `make course` read the same source from which the book is built, so that an
assignment cannot differ from the book. No code of a page is run here.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import symtable
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pybtex.database import parse_file

from book import ROOT, chapter_name, number

BOOK, WRONG = ROOT / "book", ROOT / "tests" / "wrong_answers"
OPEN = "🔬"  # the mark of an open exercise, whose outcome is not known
CELL = re.compile(r"^```\{code-cell\} ipython3\n(?:---\n.*?\n---\n)?(.*?)^```", re.M | re.S)
MISTAKE = re.compile(  # after a lecturer's problem; the book's wrong answers are in WRONG
    r"^```\{code-cell\} ipython3\n---\ntags: \[wrong-answer\]\n---\n"
    r"# mistake: ([^\n]+)\n# message: ([^\n]+)\n(.*?)^```\n",
    re.M | re.S,
)
PLACEHOLDER = re.compile(r"^(\w+) = \.\.\.$", re.M)
EXERCISE = re.compile(r"^(:{3,})\{exercise\} ([^\n]+)\n:label: (\S+)\n(.*?)^\1$", re.M | re.S)
SOLUTION = re.compile(
    r"^(:{3,})\{solution\} (\S+)\n(.*?)^\1$|"
    r"^:::\{solution-start\} (\S+)\n[^`]*?^:::\n(.*?)^:::\{solution-end\}\n:::$",
    re.M | re.S,
)
MINUTES = re.compile(r"\s*\((\d+) min(?:utes)?(?:, \d+ points)?\)")
RUBRIC = re.compile(r"^(?:Rubric\. )?(\d+) points: (.+)$", re.M)
LONG = re.compile(r"\s*\((two hours|an hour|an afternoon)\)")
HOURS = {"an hour": 60, "two hours": 120, "an afternoon": 240}
UNSAID = 60  # minutes of an open exercise that states none
FORM = "expected the form of course/own_questions.md"  # of a page of problems


@dataclass(frozen=True)
class Mistake:
    """A recorded wrong answer, a pattern of the message that it gets, and the mistake in words."""

    code: str
    message: str
    name: str


@dataclass(frozen=True)
class Exercise:
    """One exercise of a page, with all that grading needs."""

    label: str
    number: str
    title: str
    mark: str
    text: str
    minutes: int
    name: str = ""  # of the answer, if there is a check
    before: str = ""  # what the cell does before the placeholder
    test: str = ""  # properties, and the call of the checker
    solution: str = ""
    code: str = ""  # of the solution
    mistakes: tuple[Mistake, ...] = ()
    rubric: tuple[int, str] | None = None  # points, and what they are given for
    needed: tuple[str, ...] = field(default=(), repr=False)
    prelude: tuple[tuple[str, str], ...] = ()  # on a page of problems: texts and cells before it

    @property
    def open(self) -> bool:
        """Return whether the exercise is open: its outcome is not known."""
        return OPEN in self.mark

    @property
    def by_hand(self) -> bool:
        """Return whether a person must mark the answer, or part of it."""
        return not self.name or self.mark != "⌨" or bool(re.search(r"\?(\s|$)", self.text))


def read_exercises(path: Path, first: int = 1) -> list[Exercise]:
    """Return the exercises of a page, numbered from `first`.

    An exercise of the book gets the statements of its page that it needs. An exercise on a page of
    problems, which is outside the book, gets everything before it on that page, and the statements
    that it needs from the book's page of the same name. Raise ValueError if a page lacks this form.
    """
    text, ours, page = path.read_text("utf8"), path.resolve().parent == BOOK, BOOK / path.name
    chapter = "" if ours or not page.exists() else _no_answers(page.read_text("utf8"))
    wrong = read_wrong_answers(path.stem) if ours else {}
    solutions = {m[2] or m[4]: m[3] or m[5] for m in SOLUTION.finditer(text)}
    boxes, found, prelude = list(EXERCISE.finditer(text)), [], []
    start = re.match(r".*?^# .+?$", text, re.M | re.S)
    if not start or "```" in start[0] or not 0 < len(boxes) == text.count("{exercise}"):
        raise ValueError(f"{path.name} has no title, or an exercise that cannot be read; {FORM}")
    last = start.end()
    for i, box in enumerate(boxes):
        label = box[3]
        end = boxes[i + 1].start() if i + 1 < len(boxes) else len(text)
        rest = SOLUTION.sub("", text[box.end() : end])
        if not ours:
            wrong[label] = [(m[3].strip(), m[2], m[1]) for m in MISTAKE.finditer(rest)]
            rest = MISTAKE.sub("", rest)
        cells = [cell for cell in CELL.findall(rest) if PLACEHOLDER.search(cell)]
        if len(cells) > 1:
            raise ValueError(f"{path.name}: {label} has several answer cells; expected one")
        if label not in solutions:
            raise ValueError(f"{path.name}: {label} has no solution; expected one")
        of_page = page_number(path.stem)
        number = str(i + 1) if of_page == path.stem else f"{of_page}.{first + i}"
        parts = _parts(path, box, solutions[label], number, wrong.get(label, ()))
        if cells:
            parts |= _check(cells[0], box[4], parts, CELL.findall(_no_answers(text[: box.start()])))
        if not ours:
            timed = MINUTES.search(box[4]) or LONG.search(box[4]) or OPEN in parts["mark"]
            if parts["mark"] == "⌨" and not cells or not timed:
                raise ValueError(f"{path.name}: {label} lacks its minutes or its cell; {FORM}")
            prelude += _prelude(_no_answers(text[last : box.start()]), path)
            prelude += [("code", parts.pop("before"))] if parts.get("before") else []
            run = "\n".join(code for kind, code in prelude if kind == "code")
            answers = [parts["code"], *(x.code for x in parts["mistakes"])]
            asked = [f"{run}\n{answer}\n{parts.get('test', '')}" for answer in answers]
            parts |= {"prelude": (*prelude,), "needed": (*needs_of(asked, CELL.findall(chapter)),)}
        found.append(Exercise(**parts))
        last = box.end()
    return found


def _no_answers(text: str) -> str:
    return MISTAKE.sub("", SOLUTION.sub("", text))


def _parts(path: Path, box: re.Match, solution: str, number: str, wrong: Sequence[tuple]) -> dict:
    """Return the fields that every exercise has."""
    body, solution = box[4].strip(), re.sub(r"\A:class: .*\n", "", solution).strip()
    mark = re.match(f"[✍⌨{OPEN}]*", body)[0]
    said, long = MINUTES.search(body), LONG.search(body)
    code = "\n\n".join(x.strip() for x in CELL.findall(solution))
    rubric, words = RUBRIC.search(solution), CELL.sub("", solution)
    return {
        "label": box[3],
        "number": number,
        "title": plain(box[2].strip(), path),
        "mark": mark or "✍",
        "text": plain(LONG.sub("", MINUTES.sub("", body[len(mark) :])).strip(), path),
        "minutes": int(said[1]) if said else HOURS[long[1]] if long else UNSAID,
        "solution": plain(RUBRIC.sub("", words).strip(), path),
        "code": re.sub(r"\n*^check(_properties)?\(.*\Z", "", code, flags=re.M | re.S),
        "mistakes": tuple(Mistake(*x) for x in wrong),
        "rubric": (int(rubric[1]), plain(rubric[2], path)) if rubric else None,
    }


def _check(cell: str, body: str, parts: dict, before: Sequence[str]) -> dict:
    """Return the additional fields of an exercise with a check."""
    start = PLACEHOLDER.search(cell)
    named = set(re.findall(r"`(\w+)[`(]", body)) - {start[1]}  # names in the text
    answers = [*sorted(named), *(x.code for x in parts["mistakes"]), parts["code"]]
    asked = tuple(f"{answer}\n{cell}" for answer in answers)  # answers differ in their imports
    return {
        "name": start[1],
        "before": cell[: start.start()].strip(),
        "test": cell[start.end() :].strip(),
        "needed": tuple(needs_of(asked, before, optional=frozenset(named))),
    }


def _prelude(text: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts and the cells, except cells with a placeholder."""
    last = 0
    for cell in [*CELL.finditer(text), None]:
        words = text[last : cell.start() if cell else len(text)].strip()
        if words:
            yield "markdown", plain(words, path)
        if cell:
            last = cell.end()
            if not PLACEHOLDER.search(cell[1]):
                yield "code", cell[1].strip()


def page_number(name: str) -> int | str:
    """Return the number with which a page's theorems and exercises begin, or else its name."""
    return number(f"book/{name}") or name


def read_wrong_answers(page: str) -> dict[str, list[tuple[str, str, str]]]:
    """Return a page's recorded wrong answers by exercise: code, pattern of the message, mistake."""
    path = WRONG / f"{page}.py"
    if not path.exists():
        return {}
    spec = importlib.util.spec_from_file_location("wrong_answers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    comments = _comments(path)
    assigned = (x for x in ast.parse(path.read_text("utf8")).body if isinstance(x, ast.Assign))
    value = next(x.value for x in assigned if ast.unparse(x.targets[0]) == "WRONG")
    return {
        key.value: [
            (code, message, comments.get(node.lineno) or comments.get(node.lineno - 1, ""))
            for node, (code, message) in zip(answers.elts, module.WRONG[key.value], strict=True)
        ]
        for key, answers in zip(value.keys, value.values, strict=True)
    }


def _comments(path: Path) -> dict[int, str]:
    """Return the comments of a file by line number."""
    with tokenize.open(path) as file:
        tokens = tokenize.generate_tokens(file.readline)
        return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


# --- which statements of a page a cell needs -----------------------------------------------------


def needs_of(
    cells: Sequence[str], before: Sequence[str], optional: frozenset[str] = frozenset()
) -> list[str]:
    """Return the statements of `before` that define the names which `cells` read, in their order.

    For names in `optional`, only functions, classes and imports are taken, not computed values.
    """
    statements = [x for code in before for x in _statements(code)]
    chosen: set[int] = set()
    asked = [(len(statements), name) for cell in cells for name in _reads_of_all(cell)]
    while asked:
        end, name = asked.pop()
        for i in range(end - 1, -1, -1):
            text, binds, reads, is_definition = statements[i]
            if name in binds:
                if i not in chosen and (is_definition or name not in optional):
                    chosen.add(i)
                    asked += [(i, other) for other in reads]
                break
    return [statements[i][0] for i in sorted(chosen)]


@cache
def _statements(code: str) -> list[tuple[str, set[str], set[str], bool]]:
    """Return a cell's statements, the names each binds and reads, and if it is a definition."""
    code, found = "\n".join(x for x in code.splitlines() if not x.startswith("%")), []
    for node in ast.parse(code).body:
        definition = isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom))
        found += [(text, *_names(text), definition) for text in _sources(code, node)]
    return found


def _sources(code: str, node: ast.stmt) -> list[str]:
    """Return the text of a statement with its decorators; split a from-import into single names."""
    if isinstance(node, ast.ImportFrom):
        return [f"from {node.module} import {ast.unparse(alias)}" for alias in node.names]
    first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
    lines = code.splitlines()[first - 1 : node.end_lineno]
    alone = ast.parse("\n".join(lines)).body
    return ["\n".join(lines) if len(alone) == 1 else ast.unparse(node)]


def _names(code: str) -> tuple[set[str], set[str]]:
    """Return the global names that a statement binds, and those that it reads."""
    binds, reads, tables = set(), set(), [symtable.symtable(code, "page", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        whole = table.get_type() == "module"
        for symbol in table.get_symbols():
            if whole and (symbol.is_assigned() or symbol.is_imported()):
                binds.add(symbol.get_name())
            if symbol.is_referenced() and (whole or symbol.is_global()):
                reads.add(symbol.get_name())
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            reads |= {node.target.id} & binds
        if isinstance(node, ast.For):  # a loop sets its variable before anything reads it
            reads -= {x.id for x in ast.walk(node.target) if isinstance(x, ast.Name)}
    return binds, reads - set(vars(builtins))


def _reads_of_all(code: str) -> set[str]:
    """Return the global names that code reads and has not bound itself before."""
    bound: set[str] = set()
    asked: set[str] = set()
    for _, binds, reads, definition in _statements(code):
        asked |= reads - bound - (binds if definition else set())
        bound |= binds
    return asked


# --- from the book's syntax to that of notebooks -------------------------------------------------

NUMBERED = re.compile(
    r"^:{3,}\{(?:prf:)?(\w+)\}.*\n(?::(?!:|label).*\n)*(?::label: (\S+))?|"
    r"\$\$ \((eq-[\w-]+)\)|^\s+name: (fig-[\w-]+)",
    re.M,
)
ROLE = re.compile(r"\{([\w:]+)\}`([^`]+)`")
EACH = "theorem definition lemma proposition corollary algorithm exercise".split()


@cache
def numbers() -> dict[str, str]:
    """Return by label the name of each theorem, equation, figure, exercise: "Theorem 5.2"."""
    found = {}
    for path in sorted(BOOK.glob("*.md")):
        counts: dict[str, int] = {}
        for kind, label, equation, figure in NUMBERED.findall(path.read_text("utf8")):
            kind = "equation" if equation else "figure" if figure else kind
            if kind not in (*EACH, "equation", "figure"):
                continue
            counts[kind] = counts.get(kind, 0) + 1
            name = f"{page_number(path.stem)}.{counts[kind]}"
            word = {"equation": f"({name})", "figure": f"Fig. {name}"}
            found[label or equation or figure] = word.get(kind, f"{kind.capitalize()} {name}")
    return found


def plain(text: str, path: Path) -> str:
    """Return a text of the book for a notebook: references become numbers and names."""
    text = re.sub(r"^\$\$ \((eq-[\w-]+)\)$", r"$$", text, flags=re.M)
    box = re.compile(r"^(:{3,})\{[\w:]+\} ?([^\n]*)\n((?::\w+:[^\n]*\n)*)(.*?)^\1$", re.M | re.S)
    text = box.sub(lambda m: f"**{m[2]}.** {m[4].strip()}" if m[2] else m[4].strip(), text)
    return ROLE.sub(lambda m: _role(m[1], m[2], path), text)


def _role(role: str, target: str, path: Path) -> str:
    if titled := re.fullmatch(r"(.+?)\s*<(.+)>", target):
        return titled[1]
    if role in ("prf:ref", "eq", "ref", "numref"):
        if target not in numbers():
            raise ValueError(f"{path.name} refers to {target!r}; expected a label of the book")
        return numbers()[target]
    page = (BOOK / f"{target}.md").exists()
    if role == "doc" and not page or role == "chapter" and not (page and number(f"book/{target}")):
        raise ValueError(f"{path.name} refers to {target!r}; expected a page of the book")
    if role in ("cite", "cite:t", "cite:p") and target not in _references():
        raise ValueError(f"{path.name} cites {target!r}; expected an entry of references.bib")
    if role == "chapter":
        return chapter_name(f"book/{target}")
    if role == "doc":
        title = re.search(r"^# (.+)$", (BOOK / f"{target}.md").read_text("utf8"), re.M)[1]
        return f"*{title}*"
    if role in ("cite", "cite:t", "cite:p"):
        entry = _references()[target]
        last = [" ".join(x.last_names) for x in entry.persons["author"]]
        names = " and ".join(last) if len(last) < 3 else f"{last[0]} *et al.*"
        year = entry.fields["year"]
        return f"{names} [{year}]" if role == "cite:t" else f"[{names}, {year}]"
    if role == "term":
        return target
    raise ValueError(f"{path.name} has the role {role!r}; expected one that a notebook can show")


@cache
def _references():
    return parse_file(BOOK / "references.bib").entries
