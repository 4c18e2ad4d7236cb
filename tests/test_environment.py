"""The environment of `make`: what is broken is said in a line and made anew; help lists all."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "_ext"))
import environment

ROOT = Path(__file__).parents[1]
HEALTHY = "#!/bin/sh\necho 3.11\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose packages install at once; the folder's Python is a script."""
    root = tmp_path / "project"
    root.mkdir()
    for name in environment.SOURCES:
        (root / name).write_text(name)
    monkeypatch.setattr(environment, "ROOT", root)
    monkeypatch.setattr(environment, "LOG", root / "_build" / "install.log")
    monkeypatch.chdir(root)
    started = []

    def run(command):
        started.append(command)
        if "venv" in command:
            script(command[-1], HEALTHY)
            (command[-1] / "pyvenv.cfg").touch()
        return 0

    monkeypatch.setattr(environment, "run", run)
    return started


def script(folder, text):
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "python").write_text(text)
    (folder / "bin" / "python").chmod(0o755)


def made():
    folder = Path(".venv")
    assert environment.main(folder) == 0
    return folder


def test_an_environment_is_made_once_and_installed_again_when_its_list_changes(project, capsys):
    folder = made()
    assert len(project) == 3, "venv, pip, npm"
    assert re.fullmatch(r"Installing .*GB.*\n  done in \d+ s\n", capsys.readouterr().out)
    assert environment.main(folder) == 0
    assert len(project) == 3 and not capsys.readouterr().out
    (environment.ROOT / "constraints.txt").write_text("torch==9")
    assert environment.main(folder) == 0 and len(project) == 5
    (environment.ROOT / "node_modules").mkdir()
    (environment.ROOT / "node_modules" / ".package-lock.json").touch()
    assert environment.main(folder) == 0 and len(project) == 7


def dangle(folder):
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/nowhere/python")


def move(folder):
    shutil.move(folder, "moved")
    Path("moved").rename(folder)
    ready = folder / ".ready"
    ready.write_text(ready.read_text().replace(str(folder.resolve()), "/nowhere", 1))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (dangle, "no Python that runs"),
        (lambda folder: script(folder, "#!/bin/sh\nexit 1\n"), "no pip"),
        (lambda folder: script(folder, "#!/bin/sh\necho 3.9\n"), "Python 3.9, which is too old"),
        (lambda folder: (folder / ".installing").touch(), "half made"),
        (move, "moved here"),
    ],
)
def test_a_broken_environment_is_named_and_made_anew(project, capsys, damage, says):
    folder = made()
    (folder / "left").touch()
    damage(folder)
    capsys.readouterr()
    made()
    output = capsys.readouterr().out
    assert says in output and "it is made anew" in output
    assert not (folder / "left").exists() and len(project) == 6
    assert not (folder / ".installing").exists()


def test_what_is_not_ours_is_never_removed(project):
    for folder, mark in (("conda", "conda-meta"), ("other", "lib")):
        script(Path(folder), "#!/bin/sh\nexit 1\n")
        Path(folder, mark).mkdir()
        with pytest.raises(SystemExit, match="not one of this project"):
            environment.main(Path(folder))
        assert Path(folder, mark).exists() and not project
    target = Path("target")
    script(target, "#!/bin/sh\nexit 1\n")
    Path(".venv").symlink_to(target)
    made()
    assert (target / "bin").exists() and not Path(".venv").is_symlink()


def test_conda_s_environment_is_installed_into_as_it_is(project):
    conda = Path("conda")
    script(conda, HEALTHY)
    (conda / "conda-meta").mkdir()
    (conda / ".installing").touch()
    assert environment.main(conda) == 0
    assert [command[1:3] for command in project] == [["-m", "pip"], environment.NPM[:2]]


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("error: connect ECONNREFUSED 127.0.0.1:9", "cannot be reached"),
        (
            "Failed to establish a new connection: [Errno -3] NewConnectionError",
            "cannot be reached",
        ),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
    ],
)
def test_a_failed_installation_ends_with_advice_and_is_tried_again(
    project, monkeypatch, capsys, log, advice
):
    def fails(command):
        environment.LOG.write_text(f"first\n{log}\nlast\n")
        return 1

    made()
    Path("constraints.txt").write_text("")
    monkeypatch.setattr(environment, "run", fails)
    with pytest.raises(SystemExit, match=advice):
        environment.main(Path(".venv"))
    assert log in capsys.readouterr().err
    assert not Path(".venv/.installing").exists(), "what is there is whole: no need to begin anew"
    with pytest.raises(SystemExit, match=advice):
        environment.main(Path(".venv"))


def test_a_python_without_venv_is_told_how_to_get_it(project, monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="python3-venv"):
        environment.main(Path(".venv"))


def test_an_old_python_says_so_in_one_sentence(tmp_path):
    code = f"import sys; sys.version_info = (3, 9, 2); sys.argv = ['x', {str(tmp_path)!r}]; "
    code += f"exec(open({environment.__file__!r}).read())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1
    assert run.stderr.startswith("Python 3.11 or newer is needed")


def test_a_real_environment_works_and_its_output_goes_to_the_log(tmp_path, monkeypatch, capfd):
    for name in environment.SOURCES:
        (tmp_path / name).write_text("")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "LOG", tmp_path / "_build" / "install.log")
    monkeypatch.setattr(environment, "PIP", ["-m", "pip", "--version"])
    monkeypatch.setattr(environment, "NPM", ["-c", "print('noise')"])
    assert environment.main(tmp_path / ".venv") == 0
    assert "noise" in environment.LOG.read_text() and "noise" not in "".join(capfd.readouterr())
    assert environment.examine(tmp_path / ".venv") == (
        f"{sys.version_info.major}.{sys.version_info.minor}",
        "",
    )


def test_help_lists_every_target_that_is_meant_for_readers():
    output = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    targets = re.findall(r"^make (\S+) +\S.*$", output, flags=re.M)
    phony = re.search(r"^\.PHONY: (.*) FORCE$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert targets == phony[1].split() and len(output.splitlines()) == len(targets)
    assert targets[:3] == ["help", "book", "test"]
