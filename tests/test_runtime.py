"""Tests of seeds, device, profile, progress, safe files."""

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from derived_attention.common import files
from derived_book import runtime


def test_start_prints_one_line_and_seeds(monkeypatch, capsys):
    monkeypatch.setenv("DERIVED_ATTENTION_PROFILE", "quick")
    draws = []
    for seed in (3, 3, 4):
        run = runtime.start(seed=seed)
        draws.append((torch.rand(1).item(), np.random.rand(), random.random()))  # noqa: NPY002
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(run.device.type)
    assert "profile quick · torch " in lines[0] and "thread" in lines[0] and "+" not in lines[0]
    assert run.seed == 4


def test_profile_is_the_argument_s_the_environment_s_or_the_device_s(monkeypatch):
    values = {"quick": 1, "medium": 2, "full": 3}
    for name, value in values.items():
        monkeypatch.setenv("DERIVED_ATTENTION_PROFILE", name)
        assert runtime.start().pick(**values) == value
        for other in values:
            assert runtime.start(profile=other).pick(**values) == values[other]
            assert runtime.current_profile() == other
    assert runtime.start(profile="medium").pick(quick=1, full=3) == 1
    monkeypatch.delenv("DERIVED_ATTENTION_PROFILE")
    runtime.start()
    for has_cuda, name in ((False, "quick"), (True, "medium")):  # `full` is never the default
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        assert runtime.current_profile() == name


def test_one_thread_unless_the_usual_variable_asks_for_more():
    code = "import torch; from derived_book import runtime; runtime.start()\n"
    code += "runtime.start(); print(torch.get_num_threads())"
    for asked in ("", "2"):
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        environment |= {"OMP_NUM_THREADS": asked} if asked else {}
        command = [sys.executable, "-c", code]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        *lines, threads = run.stdout.splitlines()
        assert threads == (asked or "1") and lines[0] == lines[1]
        assert f"· {threads} thread" in lines[0]
        many = runtime._OFFERED > 1 or (os.cpu_count() or 1) > 1
        assert ("OMP_NUM_THREADS=" in lines[0]) == (not asked and many)


def test_wrong_environment_and_seed_are_named(monkeypatch):
    monkeypatch.setenv("DERIVED_ATTENTION_PROFILE", "fast")
    with pytest.raises(ValueError, match="DERIVED_ATTENTION_PROFILE is 'fast'"):
        runtime.start()
    with pytest.raises(ValueError, match="profile is 'fast'; expected 'quick', 'medium' or 'full'"):
        runtime.start(profile="fast")
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "yes")
    with pytest.raises(ValueError, match="DERIVED_ATTENTION_PROGRESS is 'yes'"):
        runtime.shows_progress()
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match="seed is"):
            runtime.seed_everything(seed)
    for seed in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="seed is"):
            runtime.seed_everything(seed)


def drain(progress):
    with progress as steps:
        return list(steps)


def test_progress_is_silent_unless_somebody_can_see_it(monkeypatch, capfd):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.delenv("DERIVED_ATTENTION_PROGRESS", raising=False)
    assert not runtime.shows_progress()  # pytest captures standard error
    assert drain(runtime.progress(range(3), "steps")) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Terminal())
        assert runtime.shows_progress()
        patch.setenv("DERIVED_ATTENTION_PROGRESS", "0")
        assert not runtime.shows_progress()
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "1")
    assert drain(runtime.progress(range(3), "steps", show=False)) == [0, 1, 2]
    assert capfd.readouterr().err == ""
    assert drain(runtime.progress(range(3), "steps")) == [0, 1, 2]
    shown = capfd.readouterr().err
    assert "steps" in shown and "3" in shown
    assert shown.endswith("\r") and not shown.rsplit("\r", 2)[1].strip()  # wiped at the end


def test_bar_is_wiped_after_an_error_and_the_inner_steps_stand_behind_it(monkeypatch, capfd):
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "1")
    for _ in range(2):
        with pytest.raises(KeyError), runtime.progress(range(2), "outer") as steps:
            for _ in steps:
                assert drain(runtime.progress(range(7), "inner")) == list(range(7))
                raise KeyError
        shown = capfd.readouterr().err
        assert "outer" in shown and "inner 0/7" in shown and "\n" not in shown
        assert shown.endswith("\r") and not shown.rsplit("\r", 2)[1].strip()


def test_progress_is_wanted_in_a_notebook(monkeypatch):
    IPython = pytest.importorskip("IPython")
    monkeypatch.delenv("DERIVED_ATTENTION_PROGRESS", raising=False)
    kernel = type("Shell", (), {"kernel": object()})()
    monkeypatch.setattr(IPython, "get_ipython", lambda: kernel)
    assert runtime.shows_progress()


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("DERIVED_ATTENTION_RUNS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_dir("runs") == tmp_path / "derived-attention" / "runs"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert files.cache_dir("runs").is_absolute()
    assert files.cache_dir("runs").is_relative_to(Path.home())
    monkeypatch.setenv("DERIVED_ATTENTION_RUNS", str(tmp_path / "mine"))
    assert files.cache_dir("runs") == tmp_path / "mine"
    assert list(tmp_path.iterdir()) == []


def test_write_creates_the_folder_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a" / "b"
    files.write_atomically(path, b"one")
    files.write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "file"
    files.write_atomically(path, b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_digest_tells_values_apart():
    Pair, Other = (dataclasses.make_dataclass(x, ("left", "right")) for x in ("Pair", "Other"))
    zero = torch.zeros(2, 3)
    values = [
        *(zero, zero.T, zero.double(), zero[:, :2], torch.ones(2, 3), torch.zeros(())),
        *(torch.zeros(0), torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bfloat16)),
        *(np.zeros(2), np.zeros(2, dtype=np.float32), np.array(["a", "b"]), np.float32(1)),
        *(None, True, 1, 1.0, "1", b"1", float("nan"), 1j, (), [[]], {}, {"a": 1}, {"a": 2}),
        *(["ab", "c"], ["a", "bc"], [["a"], "b"], [["a", "b"]], torch.device("cpu"), torch.float32),
        *(Pair(1, 2), Other(1, 2), Pair(2, 1), Pair(zero, 2)),
    ]
    digests = [runtime.digest(value) for value in values]
    assert len(set(digests)) == len(values)
    assert runtime.digest(1, 2) != runtime.digest(12)


def test_digest_depends_on_content_only():
    x = torch.arange(6.0).view(2, 3)
    assert runtime.digest(x) == runtime.digest(x.T.contiguous().T)
    assert runtime.digest({"x": x}) == runtime.digest({"x": x.clone().requires_grad_()})
    with pytest.raises(TypeError, match="digest of object"):
        runtime.digest([object()])
    with pytest.raises(TypeError, match="digest of ndarray"):
        runtime.digest(np.array([object()]))
