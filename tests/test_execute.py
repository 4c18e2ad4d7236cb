"""What makes a page run again: its code, the modules it imports, the settings; and nothing else."""

import sys
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "_ext"))
import execute


@pytest.fixture
def package(tmp_path):
    """A package in which `top` imports `helper`, and `alone` imports nothing."""
    root = tmp_path / "derived_attention"
    (root / "attention").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "attention/__init__.py": "",
        "attention/softmax.py": "from derived_attention import helper\n",
        "helper.py": "VALUE = 1\n",
        "alone.py": "import math\n",
    }
    for name, text in files.items():
        (root / name).write_text(text)
    return root


def names(files, package):
    return {f.relative_to(package).as_posix() for f in files}


def test_dependencies_follow_imports_through_the_package(package):
    code = "import numpy\nfrom derived_attention.attention.softmax import softmax_attention\n"
    assert names(execute.dependencies(code, package), package) == {
        "__init__.py", "attention/__init__.py", "attention/softmax.py", "helper.py",
    }  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "import derived_attention.alone",
        "from derived_attention import alone",
        "def f():\n    from derived_attention.alone import x",
    ],
)
def test_every_way_to_import_is_seen(code, package):
    assert "alone.py" in names(execute.dependencies(code, package), package)


def page(code):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])


@pytest.fixture
def digest(package, monkeypatch):
    monkeypatch.setattr(execute, "ROOT", package.parents[0])
    (package.parents[0] / "src").symlink_to(package.parents[0])
    return lambda code, **settings: execute.digest(page(code), settings)


def test_a_change_in_an_imported_module_changes_the_digest(digest, package):
    code = "from derived_attention.attention.softmax import f"
    before = digest(code)
    (package / "helper.py").write_text("VALUE = 2\n")
    assert digest(code) != before


def test_a_change_in_another_module_does_not(digest, package):
    code = "from derived_attention.attention.softmax import f"
    before = digest(code)
    (package / "alone.py").write_text("import cmath\n")
    assert digest(code) == before


def test_code_and_settings_change_the_digest(digest):
    before = digest("x = 1", profile="quick")
    assert digest("x = 2", profile="quick") != before
    assert digest("x = 1", profile="full") != before
    assert digest("x = 1", profile="quick") == before


def test_ipython_lines_do_not_stop_the_analysis(digest):
    assert digest("%matplotlib inline\n!ls\nimport derived_attention.alone")


def test_a_failing_page_is_reported_and_not_cached(tmp_path, monkeypatch, capsys):
    (tmp_path / "book").mkdir()
    (tmp_path / "src" / "derived_attention").mkdir(parents=True)
    (tmp_path / "constraints.txt").write_text("")
    front = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n# Page\n\n"
    (tmp_path / "book" / "01_bad.md").write_text(front + "```{code-cell}\n1 / 0\n```\n")
    (tmp_path / "book" / "02_good.md").write_text(front + "```{code-cell}\nprint(6 * 7)\n```\n")
    (tmp_path / "book" / "prose.md").write_text("# No code here\n")
    for name, value in {
        "ROOT": tmp_path, "CACHE": tmp_path / "cache", "RECORD": tmp_path / "record.json",
    }.items():  # fmt: skip
        monkeypatch.setattr(execute, name, value)
    assert execute.main() == 1
    output = capsys.readouterr()
    assert "FAILED 01_bad.md" in output.err and "ZeroDivisionError" in output.err
    assert "executed 02_good.md" in output.out
    (tmp_path / "book" / "01_bad.md").write_text(front + "```{code-cell}\n1 / 1\n```\n")
    assert execute.main() == 0
    output = capsys.readouterr().out
    assert "executed 01_bad.md" in output and "02_good" not in output, "only what changed runs"
