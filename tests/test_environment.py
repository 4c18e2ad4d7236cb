"""The environment of `make`: faults are reported in a line and repaired; help lists all targets."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

import environment

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
    monkeypatch.setattr(environment, "builds", lambda: "cpu")
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.chdir(root)
    started = []

    def run(command):
        if command[1:] != environment.TRY_TORCH:
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


def made(extras="build"):
    folder = Path(".venv")
    assert environment.main(folder, extras) == 0
    return folder


def kinds(commands):
    """What was run, a word each."""
    words = {"venv": "venv", "uninstall": "uninstall", "--index-url": "torch", "-e": "pip"}
    return [next((w for k, w in words.items() if k in command), "npm") for command in commands]


def test_an_environment_is_made_once_and_installed_again_when_its_list_changes(project, capsys):
    made()
    assert kinds(project) == ["venv", "torch", "pip", "npm"]
    assert re.fullmatch(r"Installing .* 3 GB.*\n  done in \d+ s\n", capsys.readouterr().out)
    made()
    assert len(project) == 4 and not capsys.readouterr().out
    (environment.ROOT / "constraints.txt").write_text("torch==9")
    made()
    assert kinds(project[4:]) == ["torch", "pip", "npm"]
    (environment.ROOT / "node_modules").mkdir()
    (environment.ROOT / "node_modules" / ".package-lock.json").touch()
    made()
    assert len(project) == 10


def test_tests_need_more_than_the_book_and_what_is_there_stays(project):
    made("build")
    assert ".[build]" in project[2] and "--omit=dev" in project[3]
    made("dev")
    assert ".[dev]" in project[5] and "--omit=dev" not in project[6]
    made("build")
    assert len(project) == 7, "an environment with more packages suffices"
    (environment.ROOT / "constraints.txt").write_text("torch==9")
    made("build")
    assert ".[dev]" in project[8]


def test_a_kernel_s_environment_needs_no_javascript(project):
    made("book,plugs")
    assert kinds(project) == ["venv", "torch", "pip"]


def test_torch_is_chosen_by_the_machine_or_by_the_reader(project, monkeypatch):
    made()
    assert environment.CPU_BUILDS in project[1] and "--no-deps" in project[1]
    monkeypatch.setattr(environment, "builds", lambda: "pip")
    made()
    assert len(project) == 4, "an environment keeps its build of PyTorch"
    monkeypatch.setenv("TORCH", "pip")
    made()
    assert kinds(project[4:]) == ["uninstall", "pip", "npm"]
    cuda = sys.platform == "linux"
    assert ".[build]" in project[2] and (".[build,gpu]" if cuda else ".[build]") in project[5]
    monkeypatch.setenv("TORCH", "https://example.org/whl/xpu")
    made()
    assert kinds(project[7:]) == ["uninstall", "torch", "pip", "npm"]
    assert "https://example.org/whl/xpu" in project[8]


def test_a_gpu_is_found_by_its_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "GPU", (str(tmp_path / "nvidiactl"),))
    for program, builds in ((None, "cpu"), ("somewhere", "pip")):
        monkeypatch.setattr(environment.shutil, "which", lambda name, found=program: found)
        assert environment.builds() == builds
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    (tmp_path / "nvidiactl").touch()
    assert environment.builds() == "pip"


def test_without_pytorch_s_index_pip_s_own_sources_serve(project, monkeypatch, capsys):
    run, fails = environment.run, environment.CPU_BUILDS
    monkeypatch.setattr(environment, "run", lambda command: run(command) or int(fails in command))
    made()
    assert kinds(project) == ["venv", "torch", "pip", "npm"]
    assert "pip uses its default index. The build there may include CUDA" in capsys.readouterr().out


def test_builds_that_do_not_fit_are_reported_with_advice(project, monkeypatch, capsys):
    run, wrong = environment.run, [environment.TRY_TORCH]
    monkeypatch.setattr(environment, "run", lambda x: run(x) or int(x[1:] in wrong))
    made()
    message = capsys.readouterr().out
    advice = re.search(r"torchvision cannot be imported.* such as (\S+): make install", message)
    wrong.clear()
    monkeypatch.setenv("TORCH", advice[1])
    made()
    assert kinds(project[4:]) == ["uninstall", "torch", "pip", "npm"]
    assert "torchvision" not in capsys.readouterr().out


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
        (dangle, "no working Python"),
        (lambda folder: script(folder, "#!/bin/sh\nexit 1\n"), "no pip"),
        (lambda folder: script(folder, "#!/bin/sh\necho 3.9\n"), "Python 3.9, which is too old"),
        (lambda folder: (folder / ".installing").touch(), "is incomplete"),
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
    assert says in output and "Rebuilding it" in output
    assert not (folder / "left").exists() and len(project) == 8
    assert not (folder / ".installing").exists()


def test_what_is_not_ours_is_never_removed(project):
    for folder, mark in (("conda", "conda-meta"), ("other", "lib")):
        script(Path(folder), "#!/bin/sh\nexit 1\n")
        Path(folder, mark).mkdir()
        with pytest.raises(SystemExit, match="this project did not create it"):
            environment.main(Path(folder), "build")
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
    assert environment.main(conda, "build") == 0
    assert kinds(project) == ["torch", "pip", "npm"]


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("error: connect ECONNREFUSED 127.0.0.1:9", "cannot be reached"),
        ("Failed to establish: [Errno -3] NewConnectionError", "cannot be reached"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("npm error code SELF_SIGNED_CERT_IN_CHAIN", "certificate of its own"),
        ("ERROR: ResolutionImpossible: for help visit", "versions conflict"),
        ("ERROR: No matching distribution found for torch==9", "not available for this Python"),
    ],
)
def test_a_failed_installation_ends_with_advice(project, monkeypatch, capsys, log, advice):
    """The next `make` tries it again."""

    def fails(command):
        before = "$ torch\nConnection refused, Permission denied\n"  # the installation continued
        environment.LOG.write_text(f"{before}$ pip\nfirst\n{log}\nlast\n")
        return 1

    made()
    Path("constraints.txt").write_text("")
    monkeypatch.setattr(environment, "run", fails)
    with pytest.raises(SystemExit, match=advice):
        environment.main(Path(".venv"), "build")
    assert log in capsys.readouterr().err
    assert not Path(".venv/.installing").exists(), "a complete environment need not be rebuilt"
    with pytest.raises(SystemExit, match=advice):
        environment.main(Path(".venv"), "build")


def test_a_python_without_venv_is_told_how_to_get_it(project, monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="python3-venv"):
        environment.main(Path(".venv"), "build")


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
    monkeypatch.setattr(environment, "PIP", ["-c", "print('noise')"])
    monkeypatch.setattr(environment, "NPM", ["-c", "print('more noise')"])
    monkeypatch.setenv("TORCH", "pip")
    assert environment.main(tmp_path / ".venv", "build") == 0
    assert "noise" in environment.LOG.read_text() and "noise" not in "".join(capfd.readouterr())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert environment.examine(tmp_path / ".venv") == (version, "")


@pytest.mark.parametrize("given", ['pa$word "x" `id`', "it's", "a, b)"])
def test_what_is_given_to_make_reaches_the_command_as_it_is(given):
    for target, name in (("course", "KEY"), ("new", "NAME"), ("full", "CHAPTER")):
        command = ["make", "-n", "--no-print-directory", target, f"{name}={given}"]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        assert shlex.split(said.splitlines()[-1])[-1] == given


def test_help_lists_every_target_that_is_meant_for_readers():
    command = ["make", "--no-print-directory", "help"]
    output = subprocess.check_output(command, cwd=ROOT, text=True)
    targets = re.findall(r"^make (\S+) +\S.*$", output, flags=re.M)
    phony = re.search(r"^\.PHONY: (.*) FORCE$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert targets == phony[1].split() and len(output.splitlines()) == len(targets)
    assert targets[:3] == ["help", "book", "test"]
