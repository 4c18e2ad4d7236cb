"""Kernels with the shipped tile sizes, on problems that combine any two properties.

Other tests force small tiles, so that few tokens fill several. They miss a fault that occurs only
if a block of queries is no multiple of a block of keys, or beyond the sixteenth segment.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import NO_TRITON

from benchmarks.gpu.problems import design, repeats
from derived_attention.common import kernel_cases, kernels
from derived_attention.common.kernel_cases import Trial

if not kernels.available():
    pytest.skip(NO_TRITON, allow_module_level=True)
import triton
import triton.language as tl

from derived_attention.common import triton as engine
from derived_attention.linear import triton as linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def length(trial):
    """Return a number of tokens above one tile, but small in the interpreter, which is slow."""
    return 1000 if DEVICE == "cuda" else 37 if trial.dtype == "fp32" else 75


DESIGN = list(design(length, [(20, 24), (70, 66), (136, 130)]))


@pytest.mark.parametrize("trial", DESIGN, ids=str)
def test_kernels_are_as_exact_as_pytorch_s_form(trial):
    found = kernel_cases.compare(trial, DEVICE)
    assert found.agrees, found


@pytest.mark.parametrize(
    ("kernels", "factors"),
    [
        (("linear", "mlk"), ("kernel", "dtype", "D", "R", "strided", "own", "features")),
        (kernel_cases.PATTERNS, ("dtype", "D", "mask", "strided")),
    ],
    ids=["linear", "patterns"],
)
def test_any_two_properties_meet_in_a_problem(kernels, factors):
    chosen = [x for x in DESIGN if x.kernel in kernels]
    for a, b in itertools.combinations(factors, 2):
        met = {(getattr(x, a), getattr(x, b)) for x in chosen}
        first, second = ({getattr(x, name) for x in chosen} for name in (a, b))
        assert len(first) > 1 and met == set(itertools.product(first, second)), (a, b)


def test_states_are_carried_over_many_segments(monkeypatch):
    """`_accumulate` reads 16 segments at a time."""
    monkeypatch.setattr(linear, "SEGMENT", 16)
    monkeypatch.setattr(linear, "PROGRAMS", 1000)
    N = 16 * 20 + 5
    assert linear.segment_length(N, 1, torch.device(DEVICE)) == 16
    found = kernel_cases.compare(Trial("linear", "fp32", N, N, 5, 6, H=1, mask="causal"), DEVICE)
    assert found.agrees, found


@pytest.mark.parametrize("kernel", ["linear", "mlk"])
def test_bits_repeat_whatever_memory_held_before(kernel):
    """In its deterministic mode, PyTorch fills new memory with NaN."""
    sizes = {"N": 37, "M": 33, "D": 12, "DV": 9, "H": 1, "mask": "causal", "own": True}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert repeats(Trial(kernel, "bf16", **sizes), 10 if DEVICE == "cuda" else 2, DEVICE)
        assert kernel_cases.compare(Trial(kernel, "fp32", **sizes), DEVICE).agrees
    finally:
        torch.use_deterministic_algorithms(before)


# --- large tensors -------------------------------------------------------------------------------


def far_apart(file, shape, strides, seed):
    """Return random numbers with these strides; on a CPU, an almost empty file stores them."""
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if DEVICE == "cuda":
        far = torch.empty(last + 1, dtype=torch.bfloat16, device=DEVICE)
    else:
        with open(file, "wb") as empty:
            empty.truncate(2 * (last + 1))
        far = torch.from_file(str(file), shared=True, size=last + 1, dtype=torch.bfloat16)
    far = far.as_strided(shape, strides)
    return far.copy_(numbers.to(DEVICE))


STEP = 2**27  # numbers from row to row; heads are 2³⁰ apart, and the third begins at 2³¹


def test_numbers_beyond_two_to_the_thirty_first_are_found(tmp_path):
    shape, strides = (1, 3, 7, 16), (3 * 2**30, 2**30, STEP, 1)
    q, k, v = (far_apart(tmp_path / f"{i}", shape, strides, i) for i in range(3))
    assert sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) > 2**31
    options = {"is_causal": True}
    attend = kernel_cases.get_attention("linear")
    near = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(attend(q, k, v, fused=True, **options), attend(*near, fused=True, **options))


@triton.jit
def _offsets(x, out, length, stride, BLOCK: tl.constexpr):
    head, start = engine.place(length, BLOCK)
    at, _ = engine._tile(x + head * length * stride, start, length, stride, 16, BLOCK, 16)
    tl.store(out + tl.program_id(0), tl.max(tl.max(at.to(tl.int64), 1), 0) - x.to(tl.int64))


def test_the_place_of_a_tile_has_64_bits():
    """A row has 2²⁰ numbers and a head 2³²; the kernel computes addresses and reads nothing."""
    length, stride, block, programs = 4096, 2**20, 64, 72
    out = torch.zeros(programs, dtype=torch.int64, device=DEVICE)
    x = torch.zeros(1, dtype=torch.bfloat16, device=DEVICE)
    engine.launch(
        _offsets, (programs,), x,
        {"x": x, "out": out, "length": length, "stride": stride, "BLOCK": block,
         "num_warps": 4, "num_stages": 1},
    )  # fmt: skip
    rows = torch.arange(1, programs + 1, device=DEVICE) * block - 1
    assert torch.equal(out, 2 * (rows * stride + 15))
    assert out.max() > 2**33


# --- rounding ------------------------------------------------------------------------------------


@triton.jit
def _rounds(x, out, SIZE: tl.constexpr):
    each = tl.arange(0, SIZE)
    tl.store(out + each, engine._nearest(tl.load(x + each)))


def test_factors_in_tf32_are_rounded_to_nearest_and_not_cut_off():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, generator=generator) * torch.logspace(-30, 30, 1024)
    x[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    x, out = x.to(DEVICE), torch.empty(1024, device=DEVICE)
    engine.launch(
        _rounds, (1,), x, {"x": x, "out": out, "SIZE": 1024, "num_warps": 4, "num_stages": 1}
    )
    assert torch.equal(out[:4].isnan(), x[:4].isnan()) and torch.equal(out[:2], x[:2])
    exact, found = x[3:].double(), out[3:].double()
    digits = torch.frexp(found)[0] * 2**11
    assert torch.equal(digits, digits.round()), "more than 11 binary digits"
    assert ((found - exact).abs() <= exact.abs() * 2**-11).all()
    assert ((found - exact) * exact > 0).double().mean() > 0.4, "rounds towards 0 too often"
