"""A chapter that runs unattended with the papers' settings."""

import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
import sys; from pathlib import Path
sys.path.insert(0, {ext!r}); import full
full.ROOT, full.TARGET = Path({root!r}), Path({root!r}) / "done"
sys.exit(full.main({arguments!r}))
"""


def run(root, *arguments):
    code = SCRIPT.format(ext=str(ROOT / "_ext"), root=str(root), arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_chapter_runs_unattended_and_says_how_far_it_is(tmp_path):
    (tmp_path / "notebooks").mkdir()
    cells = [
        "from derived_book.runtime import start\nrun = start()",
        "import sys\nprint('so far', file=sys.stderr)",
        "print(run.pick(quick='short', full='long'))",
    ]
    for name, more in (("05_good", []), ("06_bad", ["1 / 0"])):
        cells_ = map(nbformat.v4.new_code_cell, cells + more)
        notebook = nbformat.v4.new_notebook(cells=list(cells_))
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
    good = run(tmp_path, "5")
    assert good.returncode == 0 and "profile full" in good.stdout and "long" in good.stdout
    assert "so far" in good.stderr and "05_good is done" in good.stdout
    done = nbformat.read(tmp_path / "done" / "05_good.ipynb", as_version=4)
    assert "long" in done.cells[2].outputs[0].text
    bad = run(tmp_path, "06")
    assert bad.returncode == 1 and "ZeroDivisionError" in bad.stderr
    assert (tmp_path / "done" / "06_bad.ipynb").exists(), "what was done is kept"
    for wrong in (["07"], [], ["05", "06"]):
        found = run(tmp_path, *wrong)
        assert found.returncode == 2 and "expected one of 05, 06" in found.stderr
