"""Kernels run by default only where they agreed with PyTorch's form on this machine."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from helpers import NO_TRITON, tensors

from derived_attention import get_attention
from derived_attention.common import kernel_cases, kernel_selftest, kernels
from derived_attention.common.kernel_cases import Trial

if not kernels.available():
    pytest.skip(NO_TRITON, allow_module_level=True)
from derived_attention.linear import triton as linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = torch.device(DEVICE)
SMALL = Trial("linear", "fp32", 20, 20, 5, 5, mask="causal")


@pytest.fixture(autouse=True)
def new_machine(monkeypatch, tmp_path):
    """Start without verdicts, treat the interpreter as a GPU, and return the folder of verdicts."""
    monkeypatch.setenv("DERIVED_ATTENTION_KERNELS", str(tmp_path))
    monkeypatch.setattr(kernel_selftest, "_verdicts", {})
    monkeypatch.setattr(kernels, "_may_try", lambda tensors: True)
    monkeypatch.setattr(kernels, "GPUS", ("cpu",))
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "TRIED", 20)
    return tmp_path


@pytest.fixture
def another_process(monkeypatch):
    """Return a function that forgets the verdicts in memory but not those on disk."""
    return lambda: monkeypatch.setattr(kernel_selftest, "_verdicts", {})


def qkv(kernel, n=9, d=5):
    q, k, v = tensors((1, 2, n, d), (1, 2, n, d), (1, 2, n, d), dtype=torch.float32, device=DEVICE)
    return q, (torch.stack([k, -k], -3) if kernel == "mlk" else k), v


def call(kernel, **options):
    return get_attention(kernel)(*qkv(kernel), is_causal=True, **options)


def launched(monkeypatch):
    """Return a list that collects the length of each launch, which is `TRIED` in a trial."""
    seen = []
    launch = linear.launch

    def counted(kernel, grid, device_of, arguments):
        seen.append(arguments["N"] if "N" in arguments else None)
        return launch(kernel, grid, device_of, arguments)

    monkeypatch.setattr(linear, "launch", counted)
    return seen


@pytest.mark.parametrize("kernel", ["linear", "mlk"])
def test_kernel_that_agrees_is_tried_once(kernel, monkeypatch, another_process, new_machine):
    seen = launched(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = call(kernel)
        tried = seen.count(kernels.TRIED)
        assert tried and seen[-1] == 9
        torch.testing.assert_close(out, call(kernel, fused=False), rtol=1e-4, atol=1e-5)
        for forget in (lambda: None, another_process):
            forget()
            call(kernel)
            assert seen.count(kernels.TRIED) == tried and seen[-1] == 9
    assert len(list(new_machine.iterdir())) == 1


def lies(*args, **options):
    return true(*args, **options) * 1.001


true = linear.causal_sums


def does_not_compile(*args, **options):
    raise RuntimeError("PassManager::run failed\nand many lines more")


@pytest.mark.parametrize(
    ("attend", "said"),
    [(lies, "is not exact enough"), (does_not_compile, "does not run .RuntimeError: PassManager")],
)
def test_kernel_that_lies_or_fails_is_replaced(attend, said, monkeypatch, another_process):
    monkeypatch.setattr(linear, "causal_sums", attend)
    exact = call("linear", fused=False)
    message = f"kernel for linear fp32 .*{said}.*Please report"
    with pytest.warns(RuntimeWarning, match=message) as seen:
        assert torch.equal(call("linear"), exact)
        assert torch.equal(call("linear"), exact)
    assert len(seen) == 1
    another_process()
    monkeypatch.setattr(kernel_selftest, "compare", None)  # a verdict on disk needs no new trial
    with pytest.warns(RuntimeWarning, match=said):
        assert torch.equal(call("linear"), exact)
    if attend is lies:
        assert not torch.equal(call("linear", fused=True), exact), "fused=True must run the kernel"
    else:
        with pytest.raises(RuntimeError, match="PassManager"):
            call("linear", fused=True)


def test_a_kernel_that_harms_the_gpu_ends_this_process_and_no_other(monkeypatch, another_process):
    monkeypatch.setattr(linear, "causal_sums", does_not_compile)
    monkeypatch.setattr(kernel_selftest, "usable", lambda device: False)
    with pytest.raises(RuntimeError, match="kernel for linear fp32 .*cannot use the GPU.*Start it"):
        call("linear")
    monkeypatch.setattr(kernel_selftest, "usable", None)
    monkeypatch.setattr(kernel_selftest, "compare", None)  # calling either would raise
    another_process()
    with pytest.raises(TypeError):
        call("linear")
    monkeypatch.setattr(kernel_selftest, "usable", lambda device: True)
    another_process()
    with pytest.warns(RuntimeWarning, match="PyTorch's form runs in its place"):
        assert torch.equal(call("linear"), call("linear", fused=False))


def test_a_trial_without_memory_says_nothing_of_the_kernel(monkeypatch, new_machine):
    def full(*args):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(kernel_selftest, "compare", full)
    assert torch.equal(call("linear"), call("linear", fused=False))
    monkeypatch.undo()
    assert not list(new_machine.iterdir()) and not kernel_selftest._verdicts


def test_nothing_is_tried_that_the_kernel_cannot_do(monkeypatch):
    monkeypatch.setattr(kernel_selftest, "is_trusted", None)  # calling it would raise
    q, _, v = qkv("linear")
    get_attention("linear")(q, q, v)  # not causal
    get_attention("linear")(q, q, v, is_causal=True, feature_map=torch.square)
    wide = torch.zeros(1, 2, 3, 257, device=DEVICE)
    get_attention("linear")(wide, wide, wide, is_causal=True)


def test_a_trial_is_like_the_call_and_the_caller_s_modes_do_not_touch_it(monkeypatch):
    seen = []
    monkeypatch.setattr(kernel_selftest, "is_trusted", lambda trial, *_: bool(seen.append(trial)))
    sizes = {"N": kernels.TRIED, "M": kernels.TRIED, "D": 5, "DV": 5}
    call("linear")
    call("mlk", priors=torch.ones(2, 2, device=DEVICE))
    assert seen == [Trial(x, "fp32", **sizes, mask="causal") for x in ("linear", "mlk")]
    trial = Trial("linear", "fp32", **sizes, mask="causal")
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16), torch.device("meta"):
        assert kernel_selftest.fault_of(trial, HERE) == ""
    assert torch.equal(state, torch.get_rng_state())


def test_other_kernels_or_compilers_are_tried_again(monkeypatch):
    names = {kernel_selftest.place_of(HERE)}
    monkeypatch.setattr("triton.__version__", "99.0")
    names.add(kernel_selftest.place_of(HERE))
    monkeypatch.setattr(kernel_selftest, "digest", lambda: "others")
    names.add(kernel_selftest.place_of(HERE))
    assert len(names) == 3


def test_a_file_that_is_broken_is_none(new_machine):
    for text in ("{", "[]"):
        kernel_selftest.file_of("trusted", HERE).write_text(text)
        kernel_selftest._verdicts.clear()
        assert kernel_selftest.is_trusted(SMALL, HERE)


def test_the_yardstick_is_exact(monkeypatch):
    """A result that is off by a little more than rounding is not accepted, nor is NaN."""
    results = kernel_cases.results
    for fault, agrees in ((0, True), (1e-5, False), (float("nan"), False)):

        def wrong(trial, tensors, options, fault=fault):
            found = results(trial, tensors, options | {"fused": False})
            return {x: y * (1 + fault * options["fused"]) for x, y in found.items()}

        monkeypatch.setattr(kernel_cases, "results", wrong)
        assert kernel_cases.compare(SMALL, DEVICE).agrees is agrees


# --- stored verdicts ------------------------------------------------------------------------------

ONE, OTHER = (Trial("linear", "fp32", N=9, M=9, D=d, DV=5, H=1) for d in (5, 6))


def test_a_verdict_leaves_those_of_other_problems_in_the_file(monkeypatch, another_process):
    monkeypatch.setattr(kernel_selftest, "fault_of", lambda trial, device: "")
    assert kernel_selftest.is_trusted(ONE, HERE) and kernel_selftest.is_trusted(OTHER, HERE)
    another_process()
    monkeypatch.setattr(kernel_selftest, "fault_of", None)  # calling it would raise
    assert kernel_selftest.is_trusted(ONE, HERE) and kernel_selftest.is_trusted(OTHER, HERE)


def test_what_may_not_be_tried_now_is_not_trusted_and_not_tried(monkeypatch):
    monkeypatch.setattr(kernel_selftest, "fault_of", lambda *_: pytest.fail("a trial was run"))
    assert not kernel_selftest.is_trusted(ONE, HERE, first=False)
    monkeypatch.setattr(kernel_selftest, "fault_of", lambda trial, device: "")
    assert kernel_selftest.is_trusted(ONE, HERE)
    assert kernel_selftest.is_trusted(ONE, HERE, first=False)


@pytest.mark.parametrize("folder", kernel_selftest.SOURCES)
def test_the_digest_of_kernels_reads_every_folder(folder, monkeypatch):
    before = kernel_selftest.digest()
    read = Path.read_bytes
    changed = lambda file: read(file) + b"#" * (f"/{folder}/" in file.as_posix())  # noqa: E731
    monkeypatch.setattr(Path, "read_bytes", changed)
    kernel_selftest.digest.cache_clear()
    try:
        assert kernel_selftest.digest() != before
    finally:
        monkeypatch.undo()
        kernel_selftest.digest.cache_clear()
