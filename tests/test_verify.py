"""The commands for a machine with a GPU, rehearsed without one at tiny sizes."""

from __future__ import annotations

import json

import nbformat
import pytest
import torch
from helpers import NO_TRITON, needs_interpreter

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import verify
from derived_attention.common import kernel_cases, kernels, tuning
from derived_attention.common.kernel_cases import Trial

if not kernels.available():
    pytest.skip(NO_TRITON, allow_module_level=True)
from derived_attention.linear import triton as linear

pytestmark = needs_interpreter
CPU = torch.device("cpu")
TINY = Trial("linear", "fp32", 20, 20, 5, 5, H=1, mask="causal")


@pytest.fixture(autouse=True)
def new_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("DERIVED_ATTENTION_KERNELS", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_problems(monkeypatch):
    chosen = [TINY, Trial("mgk", "fp32", 9, 9, 4, 4, H=1)]
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
    assert set(data["trials"]) == set(map(str, two_problems)) and not data["tiles"]
    assert data == json.loads(next((tmp_path / "cache").glob("verified*.json")).read_text("utf8"))
    monkeypatch.setattr(verify, "try_one", None)  # calling it would raise
    assert verify.main(["--out", str(tmp_path)]) == 0


def test_verify_names_a_kernel_that_is_wrong_or_fails(two_problems, monkeypatch, capsys):
    def fails(*args, **options):
        raise RuntimeError("out of resource: shared memory\nand more")

    results = kernel_cases.results

    def wrong(trial, tensors, options):
        found = results(trial, tensors, options)
        return {x: y * (1 + options["fused"] * 1e-3) for x, y in found.items()}

    monkeypatch.setattr(kernel_cases, "results", wrong)
    monkeypatch.setattr("derived_attention.mixture.triton.attend", fails)
    assert verify.main([]) == 1
    said = capsys.readouterr().out
    assert "NOT linear fp32" in said and "NOT mgk fp32" in said
    assert "RuntimeError: out of resource: shared memory" in said


def test_the_fastest_tile_that_agrees_is_taken_and_used(monkeypatch, tmp_path):
    """Times are made up here: of the queries' kernel, the smaller the block, the faster."""
    monkeypatch.setattr(kernels, "TRIED", 20)
    now = {}

    def tuned(device, label, sizes):
        now[label] = tuning._forced.get(label, sizes)
        tuning._seen[label] = sizes
        return now[label]

    monkeypatch.setattr(linear, "tuned", tuned)

    def milliseconds(call):
        call()
        sizes = now["linear_outputs bf16 R=1 5 5"]
        return None if sizes["num_stages"] == 1 else sizes["C"] + sizes["num_warps"]

    monkeypatch.setattr(verify, "milliseconds", milliseconds)
    trial = Trial("linear", "bf16", 70, 70, 5, 5, H=1, mask="causal")
    record = verify.Record(CPU, tmp_path)
    with tuning.labels() as labels:
        verify.calls(trial, CPU, True)["forward"]()
    assert set(labels) == {"linear_outputs bf16 R=1 5 5", "linear_key_states bf16 R=1 5 5"}
    with tuning.forced({}):
        verify.tune(
            trial, CPU, record, lambda: "linear_outputs bf16 R=1 5 5" in record.data["tiles"]
        )
    found = record.data["tiles"]["linear_outputs bf16 R=1 5 5"]
    shipped = labels["linear_outputs bf16 R=1 5 5"]
    assert next(iter(found["milliseconds"])) == json.dumps(shipped)
    assert found["best"] == shipped | {"C": shipped["C"] // 2}
    assert None in found["milliseconds"].values()
    on_a_gpu = torch.device("cuda", 0)
    monkeypatch.setattr(tuning, "found", lambda device: {"a": {"C": 16}})
    assert tuning.tuned(on_a_gpu, "a", {"C": 64}) == {"C": 16}
    assert tuning.tuned(on_a_gpu, "b", {"C": 64}) == {"C": 64} == tuning.tuned(CPU, "a", {"C": 64})


def test_a_tile_that_is_faster_and_wrong_is_not_taken(monkeypatch):
    shipped, other = {"C": 64, "num_warps": 4}, {"C": 32, "num_warps": 4}
    monkeypatch.setattr(verify, "try_one", lambda *_: {"agrees": False, "repeats": True})
    found = {json.dumps(shipped): 2.0, json.dumps(other): 1.0}
    assert verify.fastest(TINY, CPU, "linear", shipped, found) == shipped
    monkeypatch.setattr(verify, "try_one", lambda *_: {"agrees": True, "repeats": True})
    assert verify.fastest(TINY, CPU, "linear", shipped, found) == other
    found[json.dumps(other)] = 1.99
    assert verify.fastest(TINY, CPU, "linear", shipped, found) == shipped, "that is noise"


def test_candidates_are_near_and_have_the_shipped_sizes_first():
    shipped = {"BLOCK_N": 128, "BLOCK_M": 16, "num_warps": 4, "num_stages": 1}
    first, *others = tuning.candidates(shipped)
    assert first == shipped and {"BLOCK_N": 64} == dict(others[0].items() - shipped.items())
    assert len(others) == 5
    assert all(len(x.items() - shipped.items()) == 1 for x in others)


def test_verify_without_a_gpu_and_an_interpreter_says_so(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
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
    assert list(tmp_path.glob("verified-*.json")) and list(tmp_path.glob("*/mgk.json"))
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
