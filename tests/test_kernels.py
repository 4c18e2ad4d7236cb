"""When a kernel runs instead of PyTorch's form, and how narrow its tiles may be."""

import importlib.machinery
import os
import subprocess
import sys
import types

import pytest
import torch
from cases import Case, causality_of
from helpers import every_mechanism, needs_triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from derived_attention.common import kernels

Q = torch.zeros(1, 2, 4, 8, device="cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def old_triton(monkeypatch):
    """Replace Triton with an empty module of version 3.2.0, which is too old."""
    old = types.ModuleType("triton")
    old.__version__, old.__spec__ = "3.2.0", importlib.machinery.ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", old)
    kernels.available.cache_clear()
    yield
    kernels.available.cache_clear()


@needs_triton
def test_nobody_has_a_kernel_who_does_not_insist():
    assert kernels.uses_interpreter() is not torch.cuda.is_available()
    with FakeTensorMode():
        on_a_gpu = torch.empty(1, 2, 4, 8, device="cuda")
    for q in (Q, on_a_gpu):
        assert (
            kernels.should_run_kernel(None, q) is False
            and kernels.should_run_kernel(False, q) is False
        )
    assert kernels.should_run_kernel(True, Q) is True


@every_mechanism
def test_nobody_needs_triton_who_does_not_insist(name, old_triton):
    for options in causality_of(name, {}):
        Case(name, **options).results()
    assert not kernels.available() and not kernels.uses_interpreter()
    with pytest.raises(ValueError, match="fused is True, and Triton .* is not installed"):
        kernels.should_run_kernel(True, Q)


@needs_triton
def test_kernels_are_interpreted_where_triton_says_so():
    code = (
        "from derived_attention.common.kernels import uses_interpreter; print(uses_interpreter())"
    )
    given = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert kernels.uses_interpreter() == (os.environ.get("TRITON_INTERPRET") == "1")


@needs_triton
def test_a_triton_that_kernels_are_not_tested_on_is_none(monkeypatch):
    for version, tested in (("3.4.0", False), ("3.10.1+git0", True)):
        kernels.available.cache_clear()
        monkeypatch.setattr("triton.__version__", version)
        assert kernels.available() is tested
    kernels.available.cache_clear()


@needs_triton
def test_who_insists_hears_what_is_missing(monkeypatch):
    monkeypatch.setattr(kernels, "uses_interpreter", lambda: False)
    with pytest.raises(ValueError, match="fused is True, and q is on cpu"):
        kernels.should_run_kernel(True, Q.cpu())
    assert kernels.should_run_kernel(None, Q) is False


def test_what_watches_operations_sees_those_of_pytorch_s_form(monkeypatch):
    q = types.SimpleNamespace(is_cuda=True, dtype=torch.float32)
    primal = types.SimpleNamespace(tangent=None)
    answers = {
        "has_concrete_values": True,
        "unpack_dual": primal,
        "uses_interpreter": False,
        "_obstacle": "",
    }
    for name, said in answers.items():
        monkeypatch.setattr(kernels, name, lambda *_, said=said: said)
    assert kernels._may_try((q,))
    with FlopCounterMode(display=False):
        assert not kernels._may_try((q,))


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "device", "capability", "width"),
    [
        (torch.bfloat16, "cuda", (9, 0), 64),
        (torch.float16, "cuda", (9, 0), 64),
        (torch.float32, "cuda", (9, 0), 16),
        (torch.bfloat16, "cuda", (8, 0), 16),
        (torch.bfloat16, "cuda", (12, 0), 16),
        (torch.bfloat16, "cpu", None, 16),
    ],
)
def test_no_tile_is_so_narrow_that_an_assembler_fails(
    dtype, device, capability, width, monkeypatch
):
    from derived_attention.common import triton as engine

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert engine.narrowest(dtype, torch.device(device)) == width
    assert engine.tile_width(24, width) == max(32, width) and engine.tile_width(100, width) == 128
