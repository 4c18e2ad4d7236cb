"""The commands for a machine with a GPU, rehearsed without one at tiny sizes."""

from __future__ import annotations

import json

import nbformat
import pytest
import torch
from helpers import NO_TRITON, needs_interpreter

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import verify
from derived_attention.common import kernel_cases, kernels
from derived_attention.common.kernel_cases import Trial

if not kernels.available():
    pytest.skip(NO_TRITON, allow_module_level=True)
pytestmark = needs_interpreter
TINY = Trial("linear", "fp32", 20, 20, 5, 5, H=1, mask="causal")


@pytest.fixture(autouse=True)
def new_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("DERIVED_ATTENTION_KERNELS", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_problems(monkeypatch):
    chosen = [TINY, Trial("mlk", "fp32", 9, 9, 4, 4, H=1, mask="causal")]
    monkeypatch.setattr(verify, "problems", lambda device: chosen)
    return chosen


def test_verify_says_what_agrees_and_goes_on_where_it_stopped(
    two_problems, monkeypatch, capsys, tmp_path
):
    assert verify.main(["--out", str(tmp_path), "--minutes", "0"]) == 3
    assert "the same command goes on" in capsys.readouterr().out
    assert verify.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "interpreter" in said and "no times" in said
    assert "linear    1 of 1 problems agree and repeat" in said
    (file,) = tmp_path.glob("verified-*.json")
    data = json.loads(file.read_text("utf8"))
    assert set(data["trials"]) == set(map(str, two_problems))
    assert data == json.loads(next((tmp_path / "cache").glob("verified*.json")).read_text("utf8"))
    monkeypatch.setattr(verify, "try_one", None)  # calling it would raise
    assert verify.main(["--out", str(tmp_path)]) == 0


def test_verify_names_a_kernel_that_is_wrong_or_fails(two_problems, monkeypatch, capsys):
    results = kernel_cases.results

    def wrong(trial, tensors, options):
        if trial.kernel == "mlk" and options["fused"]:
            raise RuntimeError("out of resource: shared memory\nand more")
        found = results(trial, tensors, options)
        return {x: y * (1 + options["fused"] * 1e-3) for x, y in found.items()}

    monkeypatch.setattr(kernel_cases, "results", wrong)
    assert verify.main([]) == 1
    said = capsys.readouterr().out
    assert "NOT linear fp32" in said and "NOT mlk fp32" in said
    assert "RuntimeError: out of resource: shared memory" in said


def test_verify_without_a_gpu_and_an_interpreter_says_so(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "uses_interpreter", lambda: False)
    assert verify.main([]) == 2
    assert "no GPU" in capsys.readouterr().out


# --- make gpu ------------------------------------------------------------------------------------


def test_everything_for_a_gpu_is_rehearsed_and_goes_on(monkeypatch, tmp_path, capsys):
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    cells = [
        nbformat.v4.new_code_cell("from derived_book.runtime import start\nrun = start()"),
        nbformat.v4.new_code_cell("assert run.profile == 'medium'"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebooks / "00_rehearsal.ipynb")
    monkeypatch.setattr(gpu, "NOTEBOOKS", notebooks)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["--rehearse", "--output", str(tmp_path)]
    names = [step.name for step in gpu.steps(tmp_path, tiny=True)]
    assert [x.split()[0] for x in names] == ["verify", "measure", "peers", "chapter"]
    assert gpu.main(command) == 0, capsys.readouterr().out
    (file,) = tmp_path.glob("gpu-*.json")
    data = json.loads(file.read_text("utf8"))
    assert {x["state"] for x in data["steps"].values()} == {"done"}
    assert list(tmp_path.glob("verified-*.json")) and list(tmp_path.glob("*/linear_causal.json"))
    assert list(tmp_path.glob("*/peers/local_attention.json"))
    monkeypatch.setattr(gpu, "call", None)  # nothing is done again
    assert gpu.main(command) == 0


def test_a_step_that_fails_or_takes_too_long_is_tried_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "MINUTES", 0.1)
    given = {"slow": "import time; time.sleep(60)", "bad": "1 / 0", "good": "print('fine')"}
    chosen = [gpu.Step(name, ("-c", code)) for name, code in given.items()]
    monkeypatch.setattr(gpu, "steps", lambda out, tiny: chosen)
    assert gpu.main(["--rehearse", "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "ZeroDivisionError" in said and "Not done: slow, bad." in said
    chosen[0] = chosen[1] = gpu.Step("slow", ("-c", "print(1)"))
    assert gpu.main(["--rehearse", "--output", str(tmp_path)]) == 0


def test_without_a_gpu_nothing_is_measured(capsys):
    assert gpu.main([]) == 2 and "--rehearse" in capsys.readouterr().out


def test_all_that_wants_a_gpu_has_a_step(tmp_path):
    from benchmarks.cases import CASES
    from benchmarks.peers import LIBRARIES

    names = {step.name for step in gpu.steps(tmp_path)}
    assert {f"measure {x}" for x, case in CASES.items() if case.kernel} <= names
    assert {f"peers {x}" for x in LIBRARIES} <= names
    assert len([x for x in names if x.startswith("chapter")]) == len(
        list(gpu.NOTEBOOKS.glob("[0-9]*.ipynb"))
    )
