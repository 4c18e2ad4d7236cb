"""The generated notebooks: they match the pages, contain no solutions, and run."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from places import ROOT

from execute import RUNS, read_page
from notebooks import name_cells

CHAPTERS = sorted(page.stem for page in (ROOT / "book").glob("[0-9][0-9]_*.md"))
KINDS = ("[A-Z]_*", "audit_*", "positions", "language_model")  # pages with code, not chapters
OTHERS = [page for kind in KINDS for page in (ROOT / "book").glob(f"{kind}.md")]
NAMES = CHAPTERS + sorted(page.stem for page in OTHERS)
SYNTAX = re.compile(r"\{(eq|prf:ref|numref|cite|cite:t|term|doc|ref|measured)\}`|^:::|^```\{", re.M)


def notebook(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.exists(), f"{path.name} is missing: run make notebooks"
    return nbformat.read(path, as_version=4)


def code(book):
    return [cell.source.strip() for cell in book.cells if cell.cell_type == "code"]


def page_cells(name):
    """Yield each code cell of a page, and whether it is part of a solution."""
    inside = False
    for cell in read_page(ROOT / "book" / f"{name}.md").cells:
        if cell.cell_type == "code":
            yield cell.source.strip(), inside
        elif marks := re.findall(r"solution-(start|end)", cell.source):
            inside = marks[-1] == "start"


def test_every_chapter_has_a_notebook_and_nothing_else_is_there():
    assert sorted(p.stem for p in (ROOT / "notebooks").iterdir()) == NAMES


def test_a_new_cell_leaves_the_ids_of_all_others_as_they_are():
    def ids(*sources):
        cells = [{"cell_type": "code", "source": [source]} for source in sources]
        name_cells(cells)
        return [cell["id"] for cell in cells]

    one, two, again = ids("x = 1", "x = 2", "x = 1")
    assert again == f"{one}-2" and one != two
    assert ids("new", "x = 1", "x = 2", "x = 1")[1:] == [one, two, again]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_in_step_with_its_page(name):
    built = ROOT / "_build" / "notebooks" / f"{name}.ipynb"
    assert built.exists(), "the book is not built: run make book"
    committed = (ROOT / "notebooks" / f"{name}.ipynb").read_text("utf8")
    assert committed == built.read_text("utf8"), "out of step: run make notebooks"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_valid_and_holds_no_outputs_no_solutions_no_syntax_of_the_site(name):
    book = notebook(name)
    nbformat.validate(book)
    for cell in book.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
        else:
            assert not SYNTAX.search(cell.source), cell.source
            assert "Solution to" not in cell.source


@pytest.mark.parametrize("name", NAMES)
def test_its_code_is_the_page_s_code_less_solutions_after_a_set_up_cell(name):
    set_up, *cells = code(notebook(name))
    assert set_up.startswith("# Set-up")
    kept = [source for source, inside in page_cells(name) if not inside]
    assert [re.sub(r"\A#@title .+\n", "", cell) for cell in cells] == kept


@pytest.mark.parametrize("name", NAMES)
def test_folded_code_is_a_form_with_a_title_on_colab_and_no_other_code_is(name):
    cells = [cell for cell in notebook(name).cells if cell.cell_type == "code"]
    hidden = [cell for cell in cells if cell.metadata.get("jupyter", {}).get("source_hidden")]
    assert name not in CHAPTERS or len(hidden) > 5
    assert [cell for cell in cells if cell.metadata.get("cellView") == "form"] == hidden
    assert [cell for cell in cells if re.match(r"#@title \S.*\n", cell.source)] == hidden


@pytest.mark.parametrize("name", NAMES)
def test_colab_gives_a_gpu_to_those_that_use_one(name):
    book = notebook(name)
    uses = any("run.device" in cell for cell in code(book))
    assert (book.metadata.get("accelerator") == "GPU") == uses


@pytest.mark.parametrize("name", CHAPTERS)
def test_exercises_are_numbered_and_every_check_waits_for_an_answer(name):
    book = notebook(name)
    text = "\n".join(c.source for c in book.cells if c.cell_type == "markdown")
    numbers = re.findall(r"\*\*Exercise (\d+)\.(\d+)", text)
    chapter = str(int(name[:2]))
    assert numbers == [(chapter, str(i)) for i in range(1, len(numbers) + 1)]
    assert len(numbers) >= 6
    checks = [c for c in code(book) if re.search(r"^\s*check(_properties)?\(", c, re.M)]
    assert checks and all("..." in cell for cell in checks)


def names(source):
    """Return the names that a cell defines, and those that it reads."""
    tree = ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    defined = {x.id for x in found if isinstance(x.ctx, ast.Store)}
    defined |= {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.ClassDef)}
    return defined, {x.id for x in found if isinstance(x.ctx, ast.Load)}


@pytest.mark.parametrize("name", NAMES)
def test_without_solutions_the_other_cells_run_as_they_do_on_the_page(name):
    """The build has run the page, and no cell reads a name that only a solution defines."""
    solved, known = set(), set()
    for source, inside in page_cells(name):
        defined, read = names(source)
        if inside:
            solved |= defined - known
        else:
            assert not (read - defined) & solved, source
            known |= defined


def test_one_runs_from_top_to_bottom_in_an_empty_folder(tmp_path):
    """The notebook reads the runs that the build has stored for the page, so it trains again only
    what a cell trains outside of `run_grid`."""
    name, folder, done = "02_duality", tmp_path / "empty", tmp_path / "done.ipynb"
    folder.mkdir()
    runs = Path(shutil.copytree(RUNS / name, tmp_path / "runs"))
    of_the_build = set(runs.rglob("*.json"))
    assert of_the_build
    (folder / f"{name}.ipynb").write_text((ROOT / "notebooks" / f"{name}.ipynb").read_text("utf8"))
    settings = {"DERIVED_ATTENTION_RUNS": str(runs), "DERIVED_ATTENTION_PROGRESS": "0"}
    # In a separate process, because the event loops of nbclient and Playwright conflict.
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", f"{name}.ipynb"]
    command += ["--output", str(done), "--ExecutePreprocessor.timeout=900"]
    env = os.environ | settings
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    book = nbformat.read(done, as_version=4)
    assert "Not attempted yet" in json.dumps([cell.get("outputs", []) for cell in book.cells])
    assert set(runs.rglob("*.json")) == of_the_build, "the notebook repeats runs of its page"
    leftovers = {p.name for p in folder.iterdir()} - {f"{name}.ipynb"}
    assert not leftovers, f"the notebook leaves files behind: {leftovers}"
