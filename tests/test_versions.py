"""Tests of installation elsewhere: the lock, builds of PyTorch, published files, and workflows.

Tests with a network use the public index, and ignore this machine's settings of pip and uv.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import yaml
from indexes import serving, wheel
from places import ROOT

import environment
import notebooks
import versions

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text("utf8")) for path in FILES}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Separate the logs and folders of these tests from those of `make versions`."""
    monkeypatch.setattr(versions, "BUILD", tmp_path / "versions")


@pytest.fixture
def online():
    """Skip the test if the package index cannot be reached, except in CI, where it is an error."""
    try:
        versions.run(versions.find_uv(), "--no-config", "pip", "install", "--dry-run", "--target",
                     versions.BUILD / "x", "--no-deps", "six==1.17.0", log="online")  # fmt: skip
    except versions.Failed as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"NOT TESTED: the package index cannot be reached: {error}")


# --- the lock ------------------------------------------------------------------------------------


def test_the_lock_is_what_the_public_index_resolves_to(online, tmp_path):
    copy = tmp_path / "constraints.txt"
    shutil.copy(versions.LOCK, copy)
    versions.lock(copy)
    assert copy.read_text() == versions.LOCK.read_text(), "the lock is out of date: run `make lock`"


def test_pins_that_do_not_go_together_are_noticed(online, tmp_path):
    (tmp_path / "in.txt").write_text("torch\n")
    compile_ = [versions.find_uv(), "--no-config", "pip", "compile", "--quiet", "--no-header"]
    compile_ += ["--python-platform", "x86_64-unknown-linux-gnu", tmp_path / "in.txt"]
    pins = tmp_path / "pins.txt"
    pins.write_text(lock := versions.LOCK.read_text())
    versions.run(*compile_, "--constraint", pins, log="pins")
    pins.write_text(re.sub("(?m)^triton==[^ ]*", "triton==3.9.0", lock))
    with pytest.raises(versions.Failed, match="No solution found"):
        versions.run(*compile_, "--constraint", pins, log="pins")


@pytest.mark.parametrize(
    ("platform", "python"),
    [
        ("x86_64-unknown-linux-gnu", "3.11"),
        ("x86_64-unknown-linux-gnu", "3.13"),
        ("aarch64-unknown-linux-gnu", "3.13"),
        ("aarch64-apple-darwin", "3.13"),
    ],
)
def test_every_pinned_version_has_a_wheel_for(platform, python, online, tmp_path):
    compile_ = [versions.find_uv(), "--no-config", "pip", "compile", "--quiet", "--no-header"]
    compile_ += ["--python-platform", platform, "--python-version", python, "--no-build"]
    compile_ += ["--extra", "dev", "--constraint", versions.LOCK, "pyproject.toml"]
    env = versions.settings() | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}  # what PyTorch is built for
    versions.run(*compile_, "--output-file", tmp_path / "out.txt", log="wheels", env=env)
    pins = {pin.partition(" ;")[0] for pin in versions.LOCK.read_text().splitlines()}
    got = re.findall(r"^\S+==\S+", (tmp_path / "out.txt").read_text(), flags=re.M)
    assert len(got) > 200 and set(got) <= pins


def test_no_setting_of_pip_or_uv_reaches_a_stranger(monkeypatch):
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "PYTHONPATH"):
        monkeypatch.setenv(name, "here")
    monkeypatch.setenv("PIP_CERT", "certificate")
    found = versions.settings()
    assert "here" not in found.values() and found["PIP_CERT"] == "certificate"
    assert found["PIP_CONFIG_FILE"] == os.devnull


def test_the_readme_s_example_is_found_and_runs():
    versions.BUILD.mkdir()
    versions.example(Path(sys.executable), "example")
    said = (versions.BUILD / "example.log").read_text()
    assert "MultiheadAttention(128, 8, attention=attend)" in said


# --- the builds of PyTorch -----------------------------------------------------------------------


CPU_WHEELS = [wheel("torch", "2.13.0+cpu"), wheel("torchvision", "0.28.0+cpu")]
PIP_WHEELS = [  # PyTorch's build there needs CUDA
    wheel("torch", "2.13.0", "Requires-Dist: cuda-toolkit==13.0"),
    wheel("torchvision", "0.28.0", "Requires-Dist: torch==2.13.0"),
]


@pytest.fixture
def index():
    with serving(cpu=CPU_WHEELS, pip=PIP_WHEELS) as server:
        yield server


def test_the_build_for_cpus_comes_from_its_index_and_stays(index, tmp_path, monkeypatch, capfd):
    url, log = index.url, tmp_path / "install.log"
    for name in [x for x in os.environ if x.startswith("PIP_")]:
        monkeypatch.delenv(name)
    pip = {"CONFIG_FILE": os.devnull, "INDEX_URL": f"{url}/pip", "RETRIES": "0"}
    for name, value in pip.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "LOG", log)
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\ntorchvision==0.28.0\n")
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages = [python, *environment.PIP, "torch>=2.5", "torchvision>=0.20"]

    monkeypatch.setattr(environment, "CPU_BUILDS", "http://127.0.0.1:9/cpu")  # no server
    environment.install_torch(python, "cpu")
    assert "pip uses its default index" in capfd.readouterr().out
    assert environment.run(packages) == 1 and "cuda-toolkit" in log.read_text(), "no CUDA build"

    monkeypatch.setattr(environment, "CPU_BUILDS", f"{url}/cpu")
    environment.install_torch(python, "cpu")
    assert environment.run(packages) == 0, log.read_text()
    code = "import torch, torchvision; print(torch.__version__, torchvision.__version__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2.13.0+cpu 0.28.0+cpu\n" and not capfd.readouterr().out


# --- what is published ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a folder with the wheel and the sources that `make dist` builds."""
    target = tmp_path_factory.mktemp("dist")
    build = f"from hatchling import build as b; b.build_wheel({str(target)!r}); "
    build += f"b.build_sdist({str(target)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    return target


def test_sources_hold_what_the_wheel_is_made_from_and_make_the_same_wheel(built, tmp_path):
    (sources,) = built.glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        archive.extractall(tmp_path)
    (root,) = (x for x in tmp_path.iterdir() if x.name.startswith("derived_attention-"))
    expected = set("CHANGELOG.md CITATION.cff LICENSE PKG-INFO README.md".split())
    expected |= {"pyproject.toml", ".gitignore"} | {
        x.relative_to(ROOT).as_posix()
        for x in (ROOT / "src").rglob("*")
        if x.is_file() and "__pycache__" not in x.parts and "egg-info" not in str(x)
    }
    assert {x.relative_to(root).as_posix() for x in root.rglob("*") if x.is_file()} == expected
    build = "from hatchling import build; build.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=root, check=True, capture_output=True)
    assert (root / notebooks.WHEEL).read_bytes() == (built / notebooks.WHEEL).read_bytes()


# --- elsewhere -----------------------------------------------------------------------------------


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands():
    """Yield the place and the text of all that workflows, images and Binder run."""
    for name, workflow in WORKFLOWS.items():
        for step in steps(workflow):
            yield name, step.get("run", "")
    for name in ("Dockerfile", ".devcontainer/devcontainer.json", ".ci/run", "binder/postBuild"):
        yield name, (ROOT / name).read_text("utf8")


def test_actions_are_named_by_their_commit_and_get_no_more_rights_than_they_need():
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for step in steps(workflow):
            if uses := step.get("uses"):
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", uses), f"{name}: {uses}"
                checkout = uses.startswith("actions/checkout@")
                assert not checkout or step["with"]["persist-credentials"] is False
    assert WORKFLOWS["book"]["jobs"]["build"]["permissions"]["pages"] == "read"
    publish = WORKFLOWS["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["if"] == "needs.build.outputs.ours == 'true'"


def test_what_others_run_is_what_make_offers():
    targets = re.search(r"^\.PHONY: (.*) FORCE$", (ROOT / "Makefile").read_text(), flags=re.M)
    found = set()
    for place, text in commands():
        for target in re.findall(r"""(?:^|[\s"&{])make"?,? "?([a-z]+)\b""", text, flags=re.M):
            assert target in targets[1].split() or target == "git", f"{place}: make {target}"
            found.add(target)
    assert {"test", "dist", "pdf", "versions", "links", "install", "lab"} <= found | {"test"}
    assert any("make pdf zip" in text for _, text in commands())
    assert any("bash .ci/run" in text for place, text in commands() if place == "tests")
