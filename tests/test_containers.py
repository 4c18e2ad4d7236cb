"""Containers, tested without running one: files, versions, users, targets and ports."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.specifiers import SpecifierSet
from places import PROJECT, ROOT

import environment
from derived_attention import __version__

MAKEFILE = (ROOT / "Makefile").read_text("utf8")
KNOWN = set("ARG CMD COPY ENV EXPOSE FROM RUN USER WORKDIR".split())


def instructions():
    """Return the Dockerfile's instructions and their arguments, in order."""
    text = (ROOT / "Dockerfile").read_text("utf8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def value(kind):
    return [rest for name, rest in instructions() if name == kind]


def copied(until="make install"):
    """Return (sources, target) of the files that are there when a command runs."""
    found = []
    for name, rest in instructions():
        if name == "RUN" and until in rest:
            return found
        if name == "COPY":
            *sources, target = [x for x in rest.split() if not x.startswith("--")]
            found.append((sources, target))
    raise AssertionError(f"no step runs {until}")


def python_of(text):
    return re.search(r"python(?::|=|>=|-version: \"?)(\d+\.\d+)", text)[1]


def test_every_line_is_an_instruction_and_the_first_is_from():
    lines = instructions()
    assert lines[0][0] == "FROM" and not {name for name, _ in lines} - KNOWN
    assert all(len(line) == 2 for line in lines)
    for rest in value("CMD"):
        assert isinstance(json.loads(rest), list), "a shell would not pass on the signal to stop"


def test_what_is_copied_is_there_and_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text("utf8").split()
    for sources, _ in copied():
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] not in ignored
    assert {".git", ".venv", "_build", "node_modules"} <= set(ignored)
    assert (["."], ".") not in copied(), "a changed page would cause a new installation"


@pytest.fixture
def context(tmp_path):
    """Lay out what the image holds before its environment is made."""
    for sources, target in copied():
        folder = tmp_path / target
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder, dirs_exist_ok=True)
            else:
                folder.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, folder)
    return tmp_path


def test_the_copied_files_are_enough_to_install(context):
    assert not [x for x in environment.SOURCES if not (context / x).exists()]
    said = subprocess.check_output(["make", "-n", "install"], cwd=context, text=True)
    assert "_ext/environment.py" in said
    metadata = ProjectMetadata(str(context), PluginManager())
    metadata.validate_fields()  # needs the README, the licence and the version
    assert metadata.version == __version__


def test_all_name_the_same_python_and_it_is_a_tested_one():
    places = ".github/workflows/tests.yml binder/environment.yml environment.yml Dockerfile".split()
    versions = {place: python_of((ROOT / place).read_text("utf8")) for place in places}
    assert len(set(versions.values())) == 1, versions
    version = versions["Dockerfile"]
    assert version in SpecifierSet(PROJECT["requires-python"])
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    head = (ROOT / "constraints.txt").read_text("utf8")
    assert "torch==" in head, "constraints.txt must pin torch for the image"


def test_torch_is_one_that_the_installer_knows():
    (default,) = value("ARG")
    name, _, build = default.partition("=")
    assert name == "TORCH" and f"{name}=${name}" in value("ENV")[0]
    assert build in ("cpu", "pip")


def test_the_image_ends_as_its_user_with_targets_that_exist():
    lines = instructions()
    user = lines.index(("USER", "reader"))
    assert "useradd --create-home reader" in value("RUN")[0]
    assert all(name != "USER" for name, _ in lines[user + 1 :])
    told = [*value("RUN")[1:], " ".join(json.loads(value("CMD")[0]))]
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, flags=re.M))
    assert {x.split()[1] for x in told if x.startswith("make ")} <= targets
    assert all("--chown=reader" in x for x in value("COPY"))


def test_the_devcontainer_is_the_same_machine():
    folder = ROOT / ".devcontainer"
    settings = json.loads((folder / "devcontainer.json").read_text("utf8"))
    assert (folder / settings["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (folder / settings["build"]["context"]).resolve() == ROOT
    assert settings["workspaceFolder"] == value("WORKDIR")[-1]
    assert f"target={settings['workspaceFolder']}," in settings["workspaceMount"]
    assert settings["remoteUser"] == value("USER")[-1]
    assert settings["forwardPorts"] == [int(x) for x in value("EXPOSE")]
    command, target = settings["postCreateCommand"].split()
    assert command == "make" and re.search(rf"^{target}:", MAKEFILE, flags=re.M)


def test_binder_runs_its_script_and_conda_s_file_is_one():
    script = ROOT / "binder" / "postBuild"
    assert script.stat().st_mode & 0o111, "Binder runs the script only if it is executable"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    command = f'_ext/environment.py "$NB_PYTHON_PREFIX" {environment.LEVELS[0]}'
    assert command in script.read_text("utf8")
    conda = yaml.safe_load((ROOT / "binder" / "environment.yml").read_text("utf8"))
    assert conda["dependencies"] == ["python=3.11", "pip"], "postBuild must install everything else"
