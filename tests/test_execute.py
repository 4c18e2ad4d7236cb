"""What makes a page run again: its code, the modules it imports, the settings; and nothing else."""

import sys
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "_ext"))
import execute


@pytest.fixture
def package(tmp_path):
    """A package in which `softmax` imports `helper`, `alone` nothing, and `recorded` has data."""
    root = tmp_path / "derived_attention"
    files = {
        "__init__.py": "",
        "attention/__init__.py": "",
        "attention/softmax.py": "from derived_attention import helper\n",
        "helper.py": "VALUE = 1\n",
        "alone.py": "import math\n",
        "inventory.csv": "id\n",
        "recorded/__init__.py": "",
        "recorded/scores.json": "[1]",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def page(code):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])


@pytest.fixture
def digest(package, monkeypatch):
    monkeypatch.setattr(execute, "ROOT", package.parents[0])
    (package.parents[0] / "src").symlink_to(package.parents[0])
    return lambda code, **settings: execute.digest(page(code), settings)


SOFTMAX = "from derived_attention.attention.softmax import f"
RECORDED = "from derived_attention import recorded"


@pytest.mark.parametrize(
    ("code", "file", "text", "differs"),
    [
        (SOFTMAX, "helper.py", "VALUE = 2\n", True),
        (SOFTMAX, "helper.py", '"""What it is."""\n\nVALUE = 1  # one\n', False),
        (SOFTMAX, "alone.py", "import cmath\n", False),
        (SOFTMAX, "inventory.csv", "id\n000.eq1\n", True),
        (SOFTMAX, "recorded/scores.json", "[2]", False),
        (RECORDED, "recorded/scores.json", "[2]", True),
        ("import math", "inventory.csv", "id\n000.eq1\n", False),
    ],
)
def test_what_a_page_imports_changes_its_digest(digest, package, code, file, text, differs):
    before = digest(code)
    (package / file).write_text(text)
    assert (digest(code) != before) is differs


def test_code_and_settings_change_the_digest(digest):
    before = digest("x = 1", profile="quick")
    assert digest("x = 2", profile="quick") != before
    assert digest("x = 1", profile="full") != before
    assert digest("x = 1", profile="quick") == before


def test_ipython_lines_do_not_stop_the_analysis(digest):
    assert digest("%matplotlib inline\n!ls\nimport derived_attention.alone")


STORE = """import os, pathlib
runs = pathlib.Path(os.environ["DERIVED_ATTENTION_RUNS"])
runs.mkdir()
(runs / "a.json").touch()"""


def test_a_failing_page_is_reported_and_not_cached(tmp_path, monkeypatch, capsys):
    (tmp_path / "book").mkdir()
    (tmp_path / "src" / "derived_attention").mkdir(parents=True)
    (tmp_path / "constraints.txt").write_text("")
    front = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n# Page\n\n"
    (tmp_path / "book" / "01_bad.md").write_text(front + "```{code-cell}\n1 / 0\n```\n")
    (tmp_path / "book" / "02_good.md").write_text(front + f"```{{code-cell}}\n{STORE}\n```\n")
    (tmp_path / "book" / "prose.md").write_text("# No code here\n")
    for name, value in {
        "ROOT": tmp_path, "CACHE": tmp_path / "cache", "RECORD": tmp_path / "record.json",
        "RUNS": tmp_path / "runs",
    }.items():  # fmt: skip
        monkeypatch.setattr(execute, name, value)
    assert execute.main() == 1
    output = capsys.readouterr()
    assert "FAILED 01_bad.md" in output.err and "ZeroDivisionError" in output.err
    assert "executed 02_good.md" in output.out
    assert [p.name for p in (tmp_path / "runs").rglob("*")] == ["02_good", "a.json"]
    (tmp_path / "book" / "01_bad.md").write_text(front + "```{code-cell}\n1 / 1\n```\n")
    assert execute.main() == 0
    output = capsys.readouterr().out
    assert "executed 01_bad.md" in output and "02_good" not in output, "only what changed runs"
