"""The delta rule by fla-core: its convention, tested with stand-ins, and when it runs.

The kernels need a GPU. A stand-in takes the arguments of a kernel and computes the documented
recurrence token by token; another test compares it with the formulas that fla-core ships.
"""

import importlib
import inspect
import re
import types

import pytest
import torch
from helpers import assert_all_close, needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from test_delta import draw

from derived_attention import DeltaAttention, delta_attention, delta_state
from derived_attention.common import kernel_selftest, kernels
from derived_attention.common.kernel_cases import Trial
from derived_attention.delta import fla as engine
from derived_attention.delta.core import delta_attention_reference
from derived_attention.testing.cases import output_and_gradients

NAMES = ("delta_rule", "gated_delta_rule", "simple_gla")
modules = [pytest.importorskip(f"fla.ops.{name}") for name in NAMES]
KERNELS = {name: getattr(x, f"chunk_{name}") for name, x in zip(NAMES, modules, strict=True)}


def recurrence(name):
    """A function with the arguments of a kernel of fla-core, tokens before heads."""

    def kernel(*, q, k, v, beta=None, g=None, scale=None, initial_state=None,
               output_final_state=False):  # fmt: skip
        assert (beta is None) == (name == "simple_gla") and (g is None or name != "delta_rule")
        (B, T, H, K), V = q.shape, v.shape[-1]
        assert k.shape == q.shape and v.shape == (B, T, H, V) and q.dtype == k.dtype == v.dtype
        assert all(x is None or x.shape == (B, T, H) for x in (beta, g))
        S = v.new_zeros(B, H, K, V) if initial_state is None else initial_state
        assert S.shape == (B, H, K, V) and S.is_contiguous()
        out = []
        for t in range(T):
            k_t, u = k[:, t, :, :, None].to(S.dtype), v[:, t, :, None]
            S = S if g is None else g[:, t, :, None, None].exp() * S
            if name != "simple_gla":
                u = beta[:, t, :, None, None] * (u - k_t.mT @ S)
            S = S + k_t * u
            out.append((q[:, t, :, None].to(S.dtype) @ S).squeeze(-2))
        out = torch.stack(out, 1) * (K**-0.5 if scale is None else scale)
        return out.to(q.dtype), S if output_final_state else None

    return kernel


def install(patch, change=None):
    """Let stand-ins run, on any device and in any dtype; `change` may spoil their results."""
    calls = []

    def counted(name):
        def run(**given):
            calls.append(name)
            found = recurrence(name)(**given)
            return found if change is None else change(*found)

        return run

    for name, module in zip(NAMES, modules, strict=True):
        patch.setattr(module, f"chunk_{name}", counted(name))
    patch.setattr(engine, "_obstacle", lambda *tensors: "")
    patch.setattr(kernels, "_obstacle", lambda tensors: "")
    return calls


@pytest.fixture
def stand_ins(monkeypatch):
    return install(monkeypatch)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(), (3,), (2, 3), (2, 1, 3)]), st.integers(1, 7), st.integers(1, 7),
    st.sampled_from(["causal", "full", "keys"]), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([None, 0.5]),
)  # fmt: skip
def test_results_and_gradients_are_those_of_the_formula(
    leading, n, m, masking, gated, erase, given_state, scale
):
    leaves = [x.requires_grad_() for x in draw(n, m, leading=leading)]
    own = {"erase": erase, "scale": scale, "is_causal": masking == "causal"}
    if masking == "keys":
        own["attn_mask"] = torch.arange(m) % 3 != 1

    def form(function, **more):
        def run(q, k, v, beta, decay, state):
            options = {"beta": beta} | ({"decay": decay} if gated else {})
            options |= {"state": state} if given_state else {}
            unused = 0 * sum(x.sum() for x in (beta, decay, state))
            return function(q, k, v, **options, **own, **more) + unused

        return output_and_gradients(run, leaves)

    with pytest.MonkeyPatch.context() as patch:
        calls = install(patch)
        found = form(delta_attention, fused=True)
    kernel = "simple_gla" if not erase else "gated_delta_rule" if gated else "delta_rule"
    assert calls == [kernel]
    assert_all_close(found, form(delta_attention_reference), 1e-10, kernel)


@pytest.mark.parametrize("gated", [False, True])
def test_a_state_is_that_of_the_chunks(gated, stand_ins, monkeypatch):
    _, k, v, beta, decay, state = draw(9, 9)
    own = dict(beta=beta, decay=decay if gated else None, state=state)
    mask = torch.arange(9) != 4
    expected = delta_state(k, v, mask, **own)
    assert not stand_ins
    monkeypatch.setattr(engine, "runs", lambda *given: True)
    assert_all_close([delta_state(k, v, mask, **own)], [expected], 1e-12, "state")
    assert len(stand_ins) == 1
    default = delta_state(k, v)  # β = 1/‖k‖², no state
    monkeypatch.undo()
    assert_all_close([default], [delta_state(k, v)], 1e-12, "defaults")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_widened_before_the_kernel(dtype, monkeypatch):
    q, k, v, beta, *_ = draw(9, 9, dtype=dtype)
    seen = {}
    install(monkeypatch)
    run = modules[1].chunk_gated_delta_rule
    monkeypatch.setattr(
        modules[1], "chunk_gated_delta_rule", lambda **given: seen.update(given) or run(**given)
    )
    decay = -torch.full((9,), 1e38)
    out = delta_attention(q, k, v, is_causal=True, beta=beta, decay=decay, fused=True)
    assert out.dtype == dtype
    assert {seen[x].dtype for x in "qkv"} == {dtype}
    assert {seen[x].dtype for x in ("beta", "g", "initial_state")} == {torch.float32}
    assert seen["g"].min() > -200 and bool((seen["g"].exp() == 0).all()), "sums lose weak decays"
    assert seen["scale"] == 1.0, "the scale must be passed: fla-core's default is 1/√D"


@pytest.mark.parametrize("name", NAMES)
def test_fla_core_has_these_arguments(name):
    known = inspect.signature(inspect.unwrap(KERNELS[name])).parameters
    passed = {"q", "k", "v", "scale", "initial_state", "output_final_state"}
    passed |= {"delta_rule": {"beta"}, "gated_delta_rule": {"beta", "g"}, "simple_gla": {"g"}}[name]
    assert passed <= known.keys()
    assert {x for x, y in known.items() if y.default is y.empty} - {"kwargs"} <= passed


@pytest.mark.parametrize("state_given", [False, True])
def test_stand_ins_are_fla_core_s_own_formulas(state_given):
    naive = importlib.import_module(
        "fla.ops.gated_delta_rule.naive"
    ).naive_recurrent_gated_delta_rule
    q, k, v, beta, decay, state = draw(9, 9, dtype=torch.float32, leading=(2,))
    tokens = [x.unsqueeze(2) for x in (q, k, v)]  # (B, T, 1, ·)
    own = dict(beta=beta[..., None], initial_state=state.mT[:, None].contiguous())
    own |= dict(output_final_state=True) | ({} if state_given else {"initial_state": None})
    own |= dict(zip("qkv", tokens, strict=True))
    g = decay[..., None]
    assert_all_close(recurrence("gated_delta_rule")(g=g, **own), naive(g=g, **own), 1e-5, "gated")
    still = naive(g=torch.zeros_like(g), **own)
    assert_all_close(recurrence("delta_rule")(**own), still, 1e-5, "not gated")


# --- when it runs ---------------------------------------------------------------------------------

HALF = dict(is_cuda=True, dtype=torch.bfloat16, shape=(2, 3, 64), device="cuda:0")


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({}, ""),
        ({"is_cuda": False, "device": "cpu"}, "q is on cpu; expected a CUDA device"),
        ({"dtype": torch.float32}, "dtypes torch.float32, .* expected one of 16 bits"),
        ({"shape": (2, 3, 257)}, "q or v has 257 features; expected at most 256"),
    ],
)
def test_what_keeps_it_from_running(change, obstacle, monkeypatch):
    monkeypatch.setattr(engine, "is_installed", lambda: True)
    q = types.SimpleNamespace(**HALF | change)
    assert re.fullmatch(f".*{obstacle}" if obstacle else "", engine._obstacle(q, q, q))
    other = types.SimpleNamespace(**HALF | {"dtype": torch.float16})
    assert "dtypes" in engine._obstacle(types.SimpleNamespace(**HALF), other, other)
    monkeypatch.setattr(engine, "is_installed", lambda: False)
    assert engine._obstacle(q, q, q) == "fla-core is not installed"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "a compiler traces" in engine._obstacle(q, q, q)
    assert engine.runs(None, types.SimpleNamespace(**HALF), q, q, True, True, None) is False


def test_who_insists_is_told_what_is_missing():
    q, k, v, *_ = draw(5, 5)
    with pytest.raises(ValueError, match="fused is True, and q is on cpu; .*PyTorch's form"):
        delta_attention(q, k, v, is_causal=True, fused=True)
    with pytest.raises(TypeError, match="fused is of type str"):
        delta_attention(q, k, v, fused="yes")
    with pytest.raises(ValueError, match="fused is True, and dropout_p is above 0"):
        delta_attention(q, k, v, dropout_p=0.5, fused=True)


def test_without_fla_core_chunks_run(stand_ins, monkeypatch):
    q, k, v, *_ = draw(5, 5)
    out = delta_attention(q, k, v, is_causal=True)
    assert torch.equal(out, delta_attention(q, k, v, is_causal=True, fused=False))
    assert not stand_ins, "fla-core must not run without a GPU"
    empty = delta_attention(q[:0], k[:0], v[:0], is_causal=True, fused=True)
    assert empty.shape == (0, *v.shape[1:]) and not stand_ins


def test_second_derivatives_are_refused(stand_ins):
    q, k, v, *_ = (x.requires_grad_() for x in draw(5, 5))
    out = delta_attention(q, k, v, is_causal=True, fused=True)
    torch.autograd.grad(out.sum(), q, retain_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only; expected fused=False"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_a_compiled_call_is_one_graph_of_our_own(monkeypatch):
    def never(*args, **options):
        raise AssertionError("fla-core runs in a compiled graph")

    monkeypatch.setattr(engine, "attend", never)
    q, k, v, *_ = draw(5, 5, dtype=torch.float32)
    run = torch.compile(delta_attention, backend="eager", fullgraph=True)
    out = run(q, k, v, is_causal=True)
    torch.testing.assert_close(out, delta_attention(q, k, v, is_causal=True))


@pytest.fixture
def as_on_a_gpu(monkeypatch, tmp_path):
    """A new machine whose CPU counts as a GPU."""
    monkeypatch.setenv("DERIVED_ATTENTION_KERNELS", str(tmp_path))
    monkeypatch.setattr(kernel_selftest, "_verdicts", {})
    monkeypatch.setattr(kernels, "_may_try", lambda tensors: True)
    monkeypatch.setattr(kernels, "GPUS", ("cpu",))
    monkeypatch.setattr(engine, "TRIED", {"N": 20, "M": 20, "H": 1})
    runs = engine.runs

    def on_a_gpu(fused, q, *rest):  # `runs` reads the tensor's device
        return runs(fused, OnAGpu(q), *rest) if fused is None else runs(fused, q, *rest)

    class OnAGpu(torch.Tensor):
        is_cuda = True

        def __new__(cls, x):
            return x.as_subclass(cls)

    monkeypatch.setattr(engine, "runs", on_a_gpu)


def call(**own):
    leaves = [x.float().requires_grad_() for x in draw(30, 30)]
    return output_and_gradients(
        lambda q, k, v, b, g, S: delta_attention(
            q, k, v, beta=b, decay=g, state=S, is_causal=True, **own
        ),
        leaves,
    )


def fails_backward(out, state):
    """As fla-core does in the gated backward pass on Hopper with some versions of Triton."""
    (out if state is None else state).register_hook(raise_error)
    return out, state


def raise_error(grad):
    raise RuntimeError("Triton < 3.7.1 on Hopper GPUs produces incorrect results\nand more lines")


@needs_triton
def test_it_runs_by_default_where_it_agrees(monkeypatch, as_on_a_gpu):
    calls = install(monkeypatch)
    found = call()
    tried = len(calls)
    assert tried == 2 and set(calls) == {"gated_delta_rule"}, "expected a trial, then the call"
    call()
    assert len(calls) == tried + 1, "the verdict must be kept"
    assert_all_close(found, call(fused=False), 1e-4, "fla-core")


@needs_triton
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda out, state: (1.05 * out, state), "is not exact enough"),
        (fails_backward, "does not run .RuntimeError: Triton < 3.7.1 on Hopper"),
    ],
)
def test_chunks_run_where_it_disagrees_or_fails(change, said, monkeypatch, as_on_a_gpu):
    calls = install(monkeypatch, change)
    with pytest.warns(RuntimeWarning, match=f"fla-core for delta fp32 .*gated {said}") as seen:
        found = call()
        again = call()
    assert len(seen) == 1 and len(calls) == 1
    for x in (found, again):
        assert_all_close(x, call(fused=False), 0, "our chunks must run without an error")


def test_a_trial_names_what_it_tries():
    assert Trial("delta", "bf16").engine == "fla-core"
    assert str(Trial("delta", "bf16", gated=True, erase=False)) == "delta bf16 gated erase=False"


def test_the_layer_keeps_half_precision_under_autocast():
    layer, seen = DeltaAttention(8, 2, gated=True), []
    layer.attention = lambda q, k, v, *rest, **own: (
        seen.append({q.dtype, k.dtype, v.dtype}) or delta_attention(q, k, v, *rest, **own)
    )
    x = torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x, x, x, is_causal=True, need_weights=False)
    assert seen == [{torch.bfloat16}]
