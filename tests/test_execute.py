"""Pages run again only if something that they use changes; kills and damage cost little."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

import execute
import make_book

EXT = Path(make_book.__file__).parent


@pytest.fixture
def package(tmp_path):
    """A package in which `softmax` imports `helper`, `alone` nothing, and `recorded` has data."""
    root = tmp_path / "src"
    files = {
        "derived_attention/__init__.py": "",
        "derived_attention/softmax.py": "from derived_attention import helper\n",
        "derived_attention/helper.py": "VALUE = 1\n",
        "derived_attention/alone.py": "import math\n",
        "derived_book/__init__.py": "",
        "derived_attention/inventory.csv": "id\n",
        "derived_book/recorded/__init__.py": "",
        "derived_book/recorded/scores.json": "[1]",
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
    return lambda code, **settings: execute.digest(page(code), settings)


SOFTMAX = "from derived_attention.softmax import f"
RECORDED = "from derived_book import recorded"


@pytest.mark.parametrize(
    ("code", "file", "text", "differs"),
    [
        (SOFTMAX, "derived_attention/helper.py", "VALUE = 2\n", True),
        (SOFTMAX, "derived_attention/helper.py", '"""What it is."""\n\nVALUE = 1  # one\n', False),
        (SOFTMAX, "derived_attention/alone.py", "import cmath\n", False),
        (SOFTMAX, "derived_attention/inventory.csv", "id\n000.eq1\n", True),
        (SOFTMAX, "derived_book/recorded/scores.json", "[2]", False),
        (RECORDED, "derived_book/recorded/scores.json", "[2]", True),
        ("import math", "derived_attention/inventory.csv", "id\n000.eq1\n", False),
    ],
)
def test_what_a_page_imports_changes_its_digest(digest, package, code, file, text, differs):
    before = digest(code)
    (package / file).write_text(text)
    assert (digest(code) != before) is differs


def test_a_page_that_shows_measurements_changes_with_them(digest, package):
    (package.parents[0] / "benchmarks" / "results").mkdir(parents=True)
    (package.parents[0] / "benchmarks" / "report.py").touch()
    file = package.parents[0] / "benchmarks" / "results" / "a.json"
    shows, others = "from benchmarks import report", "x = 1"
    before = digest(shows), digest(others)
    file.write_text("[1]")
    assert digest(shows) != before[0] and digest(others) == before[1]


def test_code_and_settings_change_the_digest(digest):
    before = digest("x = 1", profile="quick")
    assert digest("x = 2", profile="quick") != before
    assert digest("x = 1", profile="full") != before
    assert digest("x = 1", profile="quick") == before


def test_ipython_lines_do_not_stop_the_analysis(digest):
    assert digest("%matplotlib inline\n!ls\nimport derived_attention.alone")


FRONT = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n# Page\n\n"
STORE = """import os, pathlib
runs = pathlib.Path(os.environ["DERIVED_ATTENTION_RUNS"])
runs.mkdir()
(runs / "a.json").touch()"""


def write_page(root, name, code):
    (root / "book" / f"{name}.md").write_text(f"{FRONT}```{{code-cell}}\n{code}\n```\n")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A book without pages."""
    (tmp_path / "book").mkdir()
    (tmp_path / "src" / "derived_attention").mkdir(parents=True)
    (tmp_path / "constraints.txt").write_text("")
    (tmp_path / "_build").mkdir()
    monkeypatch.setattr(execute, "ROOT", tmp_path)
    for name in ("CACHE", "RECORD", "RUNS", "RUNNING", "LOG"):
        path = tmp_path / "_build" / getattr(execute, name).name
        monkeypatch.setattr(execute, name, path)
    return tmp_path


def test_a_failing_page_is_reported_and_not_cached(project, capfd):
    write_page(project, "01_bad", "1 / 0")
    write_page(project, "02_good", STORE)
    (project / "book" / "prose.md").write_text("# No code here\n")
    assert execute.main() == 1
    output = capfd.readouterr()
    assert "01_bad.md fails" in output.err and "ZeroDivisionError" in output.err
    assert re.search(r"of 2: 01_bad, .*FAILED$", output.out, flags=re.M)
    assert "of 2: 02_good, " in output.out
    assert "IPKernelApp" not in output.err + output.out, "a kernel's own lines must go to the log"
    assert [p.name for p in execute.RUNS.rglob("*")] == ["02_good", "a.json"]
    write_page(project, "01_bad", "1 / 1")
    assert execute.main() == 0
    output = capfd.readouterr().out
    assert "1 of 1: 01_bad" in output and "02_good" not in output, "only changed pages must run"
    assert execute.main() == 0
    assert capfd.readouterr().out == "No page has to run again.\n"


@pytest.fixture
def recorded(project, monkeypatch):
    """A book of two pages that have run; running another one only writes down its name."""
    ran = []

    def run(path):
        ran.append(path.stem)
        return execute.read_page(path), "", 1.0

    monkeypatch.setattr(execute, "execute", run)
    for name in ("01_a", "02_b"):
        write_page(project, name, f"x = '{name}'")
    assert execute.main() == 0
    ran.clear()
    return ran


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def results():
    return sorted(execute.CACHE.glob("executed/*/base.ipynb"))


@pytest.mark.parametrize(
    ("damage", "says", "pages"),
    [
        (lambda: cut(execute.RECORD), "executed.json", 2),
        (lambda: execute.RECORD.write_text("[]"), "executed.json", 2),
        (lambda: (execute.CACHE / "global.db").write_text("no database"), "cache of", 2),
        (lambda: (execute.CACHE / "global.db").write_text(""), "cache of", 2),
        (lambda: cut(execute.CACHE / "global.db"), "cache of", 2),
        (lambda: shutil.rmtree(execute.CACHE), "01_a, 02_b", 2),
        (lambda: cut(results()[0]), "missing or damaged", 1),
        (lambda: shutil.rmtree(results()[0].parent), "missing or damaged", 1),
        (lambda: results()[0].write_text("{}"), "missing or damaged", 1),
    ],
)
def test_damaged_results_are_named_and_made_anew(recorded, capsys, damage, says, pages):
    damage()
    capsys.readouterr()
    assert execute.main() == 0
    assert says in capsys.readouterr().out and len(recorded) == pages
    recorded.clear()
    assert execute.main() == 0 and not recorded
    assert len(results()) == 2


def test_the_longest_page_runs_first(project):
    for name, code in {"01_a": "x = 1", "02_b": "x = 1 " + "+ 1" * 50, "03_c": "x = 1"}.items():
        write_page(project, name, code)
    paths = sorted((project / "book").glob("*.md"))
    assert [p.stem for p in execute.longest_first(paths, {})][0] == "02_b"
    known = {"01_a": 50.0, "02_b": 10.0, "03_c": 70.0}
    assert [p.stem for p in execute.longest_first(paths, known)] == ["03_c", "01_a", "02_b"]


HOLD = """import os, pathlib, time
folder = pathlib.Path({folder!r})
(folder / "started.tmp").write_text(str(os.getpid()))
(folder / "started.tmp").rename(folder / "started")
while (folder / "hold").exists():
    time.sleep(0.05)"""


def wait_until(condition, seconds=30):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "the condition was not met in time"
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="NOT TESTED: there is no /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_keeps_what_has_ended_and_leaves_no_kernel(project, capsys, number):
    (project / "_ext").mkdir()
    for name in ("make_book.py", "execute.py"):
        shutil.copy(EXT / name, project / "_ext")
    (project / "hold").touch()
    write_page(project, "01_long", HOLD.format(folder=str(project)) + "\n" * 99)
    write_page(project, "02_short", "1 + 1")
    command = [sys.executable, project / "_ext" / "make_book.py"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command, start_new_session=True, **how)
    wait_until((project / "started").exists)
    wait_until(execute.RECORD.exists)
    os.killpg(run.pid, number)
    output, _ = run.communicate(timeout=30)
    if number == signal.SIGINT:
        assert run.returncode == 130 and "Stopped." in output and "Traceback" not in output
    kernel = int((project / "started").read_text())
    wait_until(lambda: not alive(kernel))
    (project / "hold").unlink()
    assert execute.main() == 0
    assert "1 of 1: 01_long" in capsys.readouterr().out


def test_a_rendering_that_was_stopped_midway_begins_anew(tmp_path, monkeypatch, capsys):
    places = {"ROOT": "", "BUILD": "", "LOG": "build.log", "RENDERING": ".rendering"}
    for name, place in {**places, "DOCTREES": ".doctrees"}.items():
        monkeypatch.setattr(make_book, name, tmp_path / place)
    (tmp_path / ".doctrees").mkdir()
    seen = []

    def follow(command):
        seen.append(((tmp_path / ".doctrees").exists(), (tmp_path / ".rendering").exists()))
        (tmp_path / "build.log").write_text("ledger: 1 of 2\nother\na.md:3: WARNING: no\n")
        return len(seen) == 3

    monkeypatch.setattr(make_book, "follow", follow)
    assert make_book.render() == 0 and seen == [(True, True)]
    assert capsys.readouterr().out.endswith("s\nledger: 1 of 2\n")
    (tmp_path / ".rendering").touch()
    assert make_book.render() == 0 and seen[1] == (False, True)
    assert "stopped midway" in capsys.readouterr().out
    (tmp_path / ".doctrees").mkdir()
    assert make_book.render() == 1
    assert not (tmp_path / ".doctrees").exists(), "otherwise the warning would not appear again"
    assert capsys.readouterr().err.splitlines()[:1] == ["a.md:3: WARNING: no"]


def test_two_builds_of_one_folder_do_not_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(make_book, "BUILD", tmp_path)
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="Another `make`"):
            make_book.main()


def test_the_log_has_no_colours_and_each_phase_is_named_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_book, "LOG", tmp_path / "build.log")
    monkeypatch.setattr(make_book, "ROOT", tmp_path)
    color = "\033[01m{}\033[39;49;00m{}"
    lines = [("writing output... ", "")]  # for translations, though there are none
    lines += [("reading sources... ", "[ 50%] a"), ("reading sources... ", "[100%] b")]
    text = "\n".join(color.format(*line) for line in [*lines, ("writing output... ", "[ 50%] a")])
    assert make_book.follow([sys.executable, "-c", f"print({text!r}); raise SystemExit(3)"]) == 3
    assert capsys.readouterr().out == "  reading the pages\n  writing the pages\n"
    assert "\033" not in (tmp_path / "build.log").read_text()
