"""A chapter that runs unattended with the papers' settings."""

import subprocess
import sys

import nbformat
from places import ROOT

END = "this call has ended"
SCRIPT = """
import sys; from pathlib import Path
sys.path.insert(0, {ext!r}); import full
full.ROOT, full.TARGET = Path({root!r}), Path({root!r}) / "done"
for arguments in {calls!r}:
    status = full.main(arguments)
    print(status, END)
    print(END, file=sys.stderr)
"""


def run(root, *calls):
    """Run the command once for each list of arguments, all in one process.

    Return for each call the exit status, its standard output and its standard error.
    """
    code = SCRIPT.format(ext=str(ROOT / "_ext"), root=str(root), calls=calls)
    command = [sys.executable, "-c", f"END = {END!r}{code}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed, reported = (x.split(f"{END}\n")[:-1] for x in (done.stdout, done.stderr))
    return [(int(x.split()[-1]), x, y) for x, y in zip(printed, reported, strict=True)]


def test_a_chapter_runs_unattended_and_says_how_far_it_is(tmp_path):
    (tmp_path / "notebooks").mkdir()
    cells = [
        "from derived_book.runtime import start\nrun = start()",
        "import sys\nprint('so far', file=sys.stderr)",
        "print(run.pick(quick='short', full='long'))",
    ]
    for name, sources in (("05_good", cells), ("06_bad", ["x = 1", "1 / 0"])):
        notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
    good, bad, *wrong = run(tmp_path, ["5"], ["06"], ["07"], [], ["05", "06"])
    status, printed, reported = good
    assert status == 0 and "profile full" in printed and "long" in printed
    assert "so far" in reported and "05_good is done" in printed
    done = nbformat.read(tmp_path / "done" / "05_good.ipynb", as_version=4)
    assert "long" in done.cells[2].outputs[0].text
    status, _, reported = bad
    assert status == 1 and "ZeroDivisionError" in reported
    assert (tmp_path / "done" / "06_bad.ipynb").exists(), "the failed notebook was not written"
    assert [x[0] for x in wrong] == [2, 2, 2]
    assert all("expected one of 05, 06" in x[2] for x in wrong)
