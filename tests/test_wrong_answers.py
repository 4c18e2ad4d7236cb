"""Wrong answers to the exercises: each must fail, with a message that names what is wrong.

`wrong_answers/<page>.py` has, for each exercise with a check, answers that a student has given or
would give, each with a word of the message that it must get: ``WRONG = {"ex-01-entropy": [(code,
message), ...]}``. Of a page only the statements run that the exercise's cell needs.
"""

import ast
import builtins
import importlib.util
import re
import symtable
from functools import cache
from pathlib import Path

import pytest

from derived_attention.page.exercises import ExerciseError

BOOK, FOLDER = Path(__file__).parents[1] / "book", Path(__file__).parent / "wrong_answers"
CELL = re.compile(r"^```\{code-cell\} ipython3\n(?:---\n.*?\n---\n)?(.*?)^```", re.M | re.S)
LABEL = re.compile(r"^:label: (ex-\S+)$", re.M)
PLACEHOLDER = re.compile(r"^(\w+) = \.\.\.$", re.M)


def answers(page):
    """Return the recorded wrong answers of a page."""
    spec = importlib.util.spec_from_file_location("wrong_answers", FOLDER / f"{page}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


@cache
def exercises(page):
    """Return, by label, the cell of each exercise that has a check, and all code before it."""
    text, found, before = (BOOK / f"{page}.md").read_text("utf8"), {}, []
    for match in CELL.finditer(text):
        if PLACEHOLDER.search(match[1]):
            label = LABEL.findall(text, 0, match.start())[-1]
            assert label not in found, f"{label} has two cells with a placeholder"
            found[label] = (match[1], tuple(before))
        before.append(match[1])
    return found


def bound(statement):
    """Return the names that a statement of a page's top level binds."""
    symbols = table(statement).get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def table(tree):
    return symtable.symtable(ast.unparse(tree), "<page>", "exec")


def needed(cell, before):
    """Return the statements before a cell that bind what it reads, in their order."""
    statements = [s for code in before for s in ast.parse(magic_free(code)).body]
    chosen, asked = set(), [(len(statements), name) for name in read(ast.parse(cell))]
    while asked:
        end, name = asked.pop()
        for i in range(end - 1, -1, -1):
            if name in bound(statements[i]):
                if i not in chosen:
                    chosen.add(i)
                    asked += [(i, other) for other in read(statements[i])]
                break
    return [ast.unparse(statements[i]) for i in sorted(chosen)]


def read(tree):
    """Return the names of the page that a cell or a statement reads, and its functions when run."""
    scopes, names = [table(tree)], set()
    while scopes:
        scope = scopes.pop()
        outside = scope.get_type() == "module"
        found = (s for s in scope.get_symbols() if s.is_referenced())
        names |= {s.get_name() for s in found if outside or s.is_global()}
        scopes += scope.get_children()
    return names - set(vars(builtins))


def magic_free(code):
    return "\n".join(line for line in code.splitlines() if not line.startswith("%"))


PAGES = sorted(path.stem for path in FOLDER.glob("*.py"))
CASES = [
    pytest.param(page, label, i, id=f"{label}-{i}")
    for page in PAGES
    for label, wrong in answers(page).items()
    for i in range(len(wrong))
]


@pytest.mark.parametrize("page", PAGES)
def test_each_check_has_three_wrong_answers(page):
    counts = {label: len(wrong) for label, wrong in answers(page).items()}
    assert counts.keys() == exercises(page).keys()
    assert min(counts.values()) >= 3, counts


@pytest.mark.parametrize(("page", "label", "i"), CASES)
def test_a_wrong_answer_is_told_what_is_wrong(page, label, i, capsys):
    cell, before = exercises(page)[label]
    code, message = answers(page)[label][i]
    world = {}
    exec("\n".join(needed(cell, before)), world)
    tested = cell[: PLACEHOLDER.search(cell).start()] + code + "\n" + PLACEHOLDER.sub("", cell)
    with pytest.raises(ExerciseError, match=message):
        exec(tested, world)
