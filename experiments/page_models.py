"""The models and tasks of a chapter as its page defines them, in code cells tagged ``model``.

A model is written once, on the page, and an experiment trains what a reader sees::

    page = chapter("12")
    page.TwoQuestions(...)

A cell tagged ``model`` has functions, classes and constants, and uses only names of other such
cells and names that the page imports, in any cell.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from derived_attention.common.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(?:---\n(.*?)^---\n)?(.*?)^```$", re.DOTALL | re.M)
LETTERS = {"P": "positions", "L": "language_model"}  # the pages of chapters that have no number
TAGS = re.compile(r"^tags: \[(.*)\]$", re.M)


@cache
def chapter(number: str, root: Path = ROOT) -> ModuleType:
    """Return a module with the models of a chapter; its number is such as "04", or "P".

    Its code is written to ``_build/page_models``. There each line has the number that it has on the
    page, so that an error names the right one.

    Raises
    ------
    ValueError
        If there is no page of this number, or no cell of it is tagged ``model``.
    """
    page = page_path(number, root)
    code = model_code(page.read_text("utf8"))
    if not code:
        raise ValueError(f"{page.name} has no code cell tagged model; expected one")
    path = root / "_build" / "page_models" / f"page_models_{number}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, code.encode())
    if str(path.parent) not in sys.path:  # where the processes of a grid import it by its name
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the keys of runs look it up
    spec.loader.exec_module(module)
    return module


def page_path(number: str, root: Path = ROOT) -> Path:
    """Return the path of a chapter's page, by its number; ValueError if there is none."""
    pages = sorted((root / "book").glob(f"{LETTERS.get(number, f'{number}_*')}.md"))
    if len(pages) != 1:
        raise ValueError(f"number is {number!r}; expected two digits such as '04', or 'P' or 'L'")
    return pages[0]


def model_code(page: str) -> str:
    """Return the model cells of a page, and the imports whose names they use, as code.

    Every other line is empty, so that lines keep their numbers. Without a cell tagged ``model``
    the result is an empty string.
    """
    imports: list[ast.Import | ast.ImportFrom] = []
    kept: set[int] = set()  # numbers of lines, from 1
    used: set[str] = set()
    for match in CELL.finditer(page):
        first = page.count("\n", 0, match.start(2))
        try:
            tree = ast.parse("\n" * first + match[2])
        except SyntaxError:  # a command of IPython
            continue
        tags = TAGS.search(match[1] or "")
        if tags and "model" in tags[1].split(", "):
            kept |= set(range(first + 1, page.count("\n", 0, match.end(2)) + 1))
            used |= {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
        else:
            imports += [x for x in tree.body if isinstance(x, ast.Import | ast.ImportFrom)]
    for statement in imports:
        names = {(x.asname or x.name).partition(".")[0] for x in statement.names}
        if names & used:
            kept |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
    lines = enumerate(page.splitlines(), 1)
    return "\n".join(line if i in kept else "" for i, line in lines) + "\n" if used else ""
