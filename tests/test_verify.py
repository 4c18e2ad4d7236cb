"""The command that tests kernels on a GPU, in Triton's interpreter."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import NO_TRITON, needs_interpreter

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
    assert verify.main(["--output", str(tmp_path), "--minutes", "0"]) == 3
    assert "Run the same command again to resume" in capsys.readouterr().out
    assert verify.main(["--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "interpreter" in said
    assert "linear    1 of 1 problems agree and repeat" in said
    (file,) = tmp_path.glob("verified-*.json")
    data = json.loads(file.read_text("utf8"))
    assert set(data["trials"]) == set(map(str, two_problems))
    assert data == json.loads(next((tmp_path / "cache").glob("verified*.json")).read_text("utf8"))
    monkeypatch.setattr(verify, "try_one", None)  # calling it would raise
    assert verify.main(["--output", str(tmp_path)]) == 0


def test_verify_tries_fla_core_on_a_gpu_where_it_is_installed(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(verify.fla, "is_installed", lambda: False)
    assert not [x for x in verify.problems(gpu) if x.kernel == "delta"]
    monkeypatch.setattr(verify.fla, "is_installed", lambda: True)
    trials = [x for x in verify.problems(gpu) if x.kernel == "delta"]
    kinds = {(x.gated, x.erase, x.dtype, x.D) for x in trials}
    assert len(kinds) == len(trials) == 12 and {x.N for x in trials} == {verify.fla.TRIED["N"]}


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
    assert "FAILED linear fp32" in said and "FAILED mlk fp32" in said
    assert "RuntimeError: out of resource: shared memory" in said


def test_verify_without_a_gpu_and_an_interpreter_says_so(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "uses_interpreter", lambda: False)
    assert verify.main([]) == 2
    assert "no GPU" in capsys.readouterr().out
