"""Special properties of the delta rule: sweeps, states, gates, and its layer."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import Largest, assert_all_close
from hypothesis import given, settings
from hypothesis import strategies as st

from derived_attention import (
    DeltaAttention,
    delta_attention,
    delta_attention_reference,
    delta_state,
    plugs,
    ridge_attention,
)
from derived_attention.delta import core
from derived_attention.testing.cases import Operations, output_and_gradients

B, H, D, DV = 2, 3, 4, 5


def draw(n, m, seed=0, dtype=torch.float64, leading=(B, H)):
    """Queries, keys, values, strengths with β‖k‖² in (0, 2), decays and a state."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(*leading, *s, dtype=dtype) for s in ((n, D), (m, D), (m, DV)))
    beta = 2 * torch.rand(*leading, m, dtype=dtype) / k.square().sum(-1)
    decay = -0.3 * torch.rand(*leading, m, dtype=dtype)
    return q, k, v, beta, decay, torch.randn(*leading, DV, D, dtype=dtype)


@pytest.fixture(params=["cpu", "gpu"])
def device_way(request, monkeypatch):
    """Compute as a CPU does, or as a GPU does for a long sequence."""
    monkeypatch.setitem(core.FEW, "cpu", {"cpu": math.inf, "gpu": 0}[request.param])
    return request.param


@pytest.mark.parametrize("few", [math.inf, 0])
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 150), st.integers(0, 150), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, 9),
)  # fmt: skip
def test_chunks_equal_the_recurrence(few, n, m, causal, gated, erase, seed):
    q, k, v, beta, decay, state = (x.requires_grad_() for x in draw(n, m, seed))
    own = dict(is_causal=causal, erase=erase)

    def form(function):
        def run(q, k, v, beta, state, decay):
            given = {"decay": decay} if gated else {}
            return function(q, k, v, beta=beta, state=state, **given, **own)

        return output_and_gradients(run, [q, k, v, beta, state, decay])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(core.FEW, "cpu", few)
        found = form(delta_attention)
    assert_all_close(found, form(delta_attention_reference), 1e-9, "delta")


@pytest.mark.parametrize("C", [1, 2, 13, 16, 37, 62, 64])
def test_the_inverse_by_blocks_solves_the_system(C):
    torch.manual_seed(0)
    keys = F.normalize(torch.randn(3, C, 4, dtype=torch.float64), dim=-1)
    keys[0] = keys[0, 0]  # all keys are equal
    A = (2 * keys @ keys.mT).tril(-1)  # β = 2 reflects: entries of powers of A grow like 2^C
    eye = torch.eye(C, dtype=A.dtype)
    exact = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
    assert_all_close([core.invert_unit_lower(A)], [exact], 1e-10, "float64")
    rounded = core.invert_unit_lower(A.float()).double()
    assert (rounded - exact).norm() <= 1e-5 * exact.norm()
    A.requires_grad_()
    assert torch.autograd.gradcheck(core.invert_unit_lower, A[:1, :5, :5].tril(-1))


@pytest.mark.parametrize("gated", [False, True])
def test_reflections_of_one_key_stay_exact_in_float32(gated, device_way):
    """β = 2 turns the state round under a key, again and again."""
    q, k, v, _, decay, state = (x.float() for x in draw(300, 300))
    k = F.normalize(k, dim=-1)
    k[..., 100:250, :] = k[..., 99:100, :]
    own = dict(beta=torch.full_like(decay, 2.0), decay=decay if gated else None, state=state)
    wide = {name: None if x is None else x.double() for name, x in own.items()}
    exact = delta_attention_reference(q.double(), k.double(), v.double(), is_causal=True, **wide)
    found = delta_attention(q, k, v, is_causal=True, **own)
    assert (found - exact).norm() <= 2e-5 * exact.norm()


def test_a_chunk_takes_two_operations_at_most(device_way):
    """A GPU starts one; and no tensor has as many entries as there are pairs of tokens."""
    counts, sizes = [], []
    for n in (1024, 2048):
        q, k, v, beta, decay, _ = draw(n, n)
        with torch.no_grad(), Operations() as operations, Largest() as largest:
            delta_attention(q, k, v, is_causal=True, beta=beta)
        counts.append(operations.count)
        sizes.append(largest.numel)
    assert counts[1] - counts[0] <= {"cpu": 2, "gpu": 1}[device_way] * 16
    assert sizes[1] <= 2 * sizes[0] <= 2 * 1024 * B * H * 64


def test_it_is_one_sweep_and_sweeps_end_in_ridge():
    """β = 1/(λ + ‖k‖²): Gauss–Seidel on (λ I + K Kᵀ) C = V; the next sweep starts from C."""
    q, k, v, *_ = draw(6, 9)
    lam = 0.5
    K = k @ k.mT + lam * torch.eye(9, dtype=k.dtype)
    C = torch.zeros_like(v)
    for sweep in range(400):
        for t in range(9):
            rest = (
                v[..., t, :] - (K[..., t, :, None] * C).sum(-2) + K[..., t, t, None] * C[..., t, :]
            )
            C[..., t, :] = rest / K[..., t, t, None]
        if sweep == 0:
            beta = 1 / (lam + k.square().sum(-1))
            assert_all_close([delta_state(k, v, beta=beta)], [C.mT @ k], 1e-10, "one sweep")
    solved = ridge_attention(q, k, v, lam=lam, scale=1.0)
    assert_all_close([q @ (C.mT @ k).mT], [solved], 1e-8, "ridge")


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-150])
def test_a_key_that_has_just_been_written_is_known(size, device_way):
    _, k, v, *_, state = draw(130, 130)
    k = size * k
    found = delta_attention(k, k, v, is_causal=True, state=state / size)
    assert_all_close([found], [v], 1e-9, "known")


def test_a_key_whose_square_is_no_normal_number_is_not_written():
    """Its strength 1/‖k‖² would be infinite."""
    k, v = torch.full((H, 2, D), 1e-20), torch.ones(H, 2, DV)
    k[:, 1] = 0
    for function in (delta_attention, delta_attention_reference):
        assert not function(torch.ones(H, 2, D), k, v).any()


def test_without_erasing_it_is_gated_linear_attention():
    q, k, v, beta, decay, _ = draw(40, 40)
    total = decay.cumsum(-1)
    ratio = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    expected = (q @ k.mT * ratio) @ (beta[..., None] * v)
    found = delta_attention(q, k, v, is_causal=True, beta=beta, decay=decay, erase=False)
    assert_all_close([found], [expected], 1e-10, "Mamba-2's form")
    plain = delta_attention(q, k, v, is_causal=True, erase=False)
    assert_all_close([plain], [(q @ k.mT).tril() @ v], 1e-10, "β = 1")


@pytest.mark.parametrize("beta, size", [(0.5, 0.5), (1.5, 0.5), (2.0, 1.0), (2.5, 1.5)])
def test_what_is_wrong_under_a_key_shrinks_by_1_minus_beta(beta, size):
    """Between 1 and 2 it overshoots, at 2 it is reflected, above it grows."""
    k, v = F.normalize(torch.randn(1, 1, D, dtype=torch.float64), dim=-1), torch.zeros(1, 1, DV)
    state = torch.randn(1, DV, D, dtype=torch.float64)
    after = delta_state(k, v.double(), beta=torch.tensor([[beta]]).double(), state=state)
    assert_all_close([(after @ k.mT).norm()], [size * (state @ k.mT).norm()], 1e-12, "error")


STRONG = {
    "one": lambda t: t == 10,
    "one document after the other": lambda t: t % 9 == 0,
    "first fifty": lambda t: t < 50,
    "all": lambda t: t >= 0,
}


def causal_and_last(q, k, v, beta, decay, state):
    """The formula's results, and its state after all keys, transposed."""
    own = dict(beta=beta, decay=decay, state=state)
    last = delta_attention_reference(torch.eye(D).to(q).expand(B, H, D, D), k, v, **own)
    return torch.cat([delta_attention_reference(q, k, v, is_causal=True, **own), last], -2)


def causal_and_last_in_pieces(q, k, v, beta, decay, S):
    parts = []
    for c in (slice(0, 70), slice(70, 71), slice(71, 80)):
        k_c, v_c, own = k[..., c, :], v[..., c, :], dict(beta=beta[..., c], decay=decay[..., c])
        parts.append(delta_attention(q[..., c, :], k_c, v_c, is_causal=True, state=S, **own))
        S = delta_state(k_c, v_c, state=S, **own)
    return torch.cat([*parts, S.mT.to(q.dtype)], -2)


@pytest.mark.parametrize("where", STRONG)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weak_decays_are_exact_after_strong_ones(where, dtype, device_way):
    """Results, states and all gradients are those of the recurrence in float64."""
    for strength in (50.0, 1e4, 1e9, 1e38):
        inputs = [x.to(dtype) for x in draw(80, 80)]
        inputs[4][..., STRONG[where](torch.arange(80))] = -strength
        leaves, exact = ([x.to(t).requires_grad_() for x in inputs] for t in (dtype, torch.float64))
        found = output_and_gradients(causal_and_last_in_pieces, leaves)
        for i, y in enumerate(output_and_gradients(causal_and_last, exact)):
            error, size = (found[i].double() - y).norm(), y.norm()
            assert error <= 16 * torch.finfo(dtype).eps * size, (
                f"{strength:g}: [{i}], {error / size}"
            )


def test_a_masked_key_is_not_written_and_forgets_nothing():
    q, k, v, beta, decay, _ = draw(7, 9)
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 0]).bool()
    found = delta_attention(q, k, v, keep, beta=beta, decay=decay)
    left = (x[..., keep, :] for x in (k, v))
    expected = delta_attention(q, *left, beta=beta[..., keep], decay=decay[..., keep])
    assert_all_close([found], [expected], 1e-12, "masked")


def test_transformers_has_the_same_gated_delta_rule():
    plugs.mend_torchvision()
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, _, decay, _ = draw(100, 100, dtype=torch.float32)
    q, k, beta = F.normalize(q, dim=-1), F.normalize(k, dim=-1), torch.rand(B, H, 100)
    ours = delta_attention(q, k, v, is_causal=True, beta=beta, decay=decay, scale=D**-0.5)
    moved = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        own = dict(g=decay.transpose(1, 2), beta=beta.transpose(1, 2))
        own |= dict(initial_state=None, output_final_state=True)
        form = inspect.unwrap(getattr(module, name))  # without the wrapper that looks for a kernel
        theirs, state = form(*moved, **own)
        assert_all_close([ours], [theirs.transpose(1, 2)], 1e-5, name)  # theirs sums in float32
        assert_all_close([delta_state(k, v, beta=beta, decay=decay)], [state.mT], 1e-5, name)


@pytest.mark.parametrize("kind, most", [("sigmoid", 1), ("double", 2), ("clamped", 2)])
def test_the_layer_s_strengths(kind, most):
    torch.manual_seed(0)
    layer, x, seen = DeltaAttention(8, 2, beta=kind, gated=True), 9 * torch.randn(2, 50, 8), []
    layer.attention = lambda *args, **own: seen.append((args, own)) or delta_attention(*args, **own)
    layer(x, x, x, is_causal=True, need_weights=False)
    ((q, k, _), own) = seen[0][0][:3], seen[0][1]
    assert own["beta"].shape == own["decay"].shape == (2, 2, 50) and bool((own["decay"] < 0).all())
    assert 0 <= own["beta"].min() < 0.2 and most - 0.2 < own["beta"].max() <= most
    assert kind != "clamped" or bool((own["beta"] == 2).any() and (own["beta"] == 0).any())
    assert_all_close([q.norm(dim=-1), k.norm(dim=-1)], [torch.ones(2, 2, 50)] * 2, 1e-5, "norms")


@pytest.mark.parametrize(
    "own, error, words",
    [
        ({"beta": 0.5}, TypeError, "beta is of type float; expected a floating Tensor"),
        ({"beta": torch.ones(7)}, ValueError, r"beta has shape \(7,\); .*one number per key"),
        ({"state": torch.ones(2, 2)}, ValueError, r"state has shape \(2, 2\)"),
        ({"decay": -torch.ones(9, device="meta")}, ValueError, "decay is on device meta; expected"),
        ({"attn_mask": torch.ones(9)}, ValueError, "attn_mask has numbers other than 0"),
        ({"attn_mask": torch.full((9,), torch.nan)}, ValueError, "attn_mask contains NaN"),
        ({"attn_mask": torch.ones(7).bool()}, ValueError, r"attn_mask has shape \(7,\)"),
        ({"attn_mask": torch.ones(9).long()}, TypeError, "attn_mask has dtype torch.int64"),
        ({"attn_mask": torch.ones(5, 9).bool()}, ValueError, r"attn_mask has shape \(5, 9\)"),
        ({"v": torch.ones(B, H, 8, DV)}, ValueError, r"v has shape \(2, 3, 8, 5\)"),
        ({"v": torch.ones(1, H, 9, DV)}, ValueError, r"v has shape \(1, 3, 9, 5\)"),
        ({"v": torch.ones(B, H, 9, DV).double()}, TypeError, "v has dtype torch.float64"),
        ({"v": torch.ones(B, H, 9, DV, device="meta")}, ValueError, "v is on device meta"),
        ({"v": [1.0]}, TypeError, "v is of type list; expected a Tensor"),
    ],
)
def test_wrong_arguments(own, error, words):
    """Of the attention, the formula and the state."""
    q, k, v, *_ = draw(5, 9, dtype=torch.float32)
    for function in (delta_attention, delta_attention_reference):
        with pytest.raises(error, match=words):
            function(q, **{"k": k, "v": v, **own})
    with pytest.raises(error, match=words):
        delta_state(**{"k": k, "v": v, **own})


@pytest.mark.parametrize("absent", [-torch.inf, torch.finfo(torch.float32).min, -1e4])
def test_a_state_reads_a_floating_mask_as_the_attention_does(absent):
    q, k, v, beta, decay, _ = draw(5, 9)
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 0]).bool()
    mask = torch.zeros(9).masked_fill(~keep, absent)
    own = dict(beta=beta, decay=decay)
    S = delta_state(k, v, mask, **own)
    assert_all_close([S], [delta_state(k, v, keep, **own)], 0, "boolean")
    assert_all_close([q @ S.mT], [delta_attention(q, k, v, mask, **own)], 1e-12, "the attention")


def test_wrong_options_of_the_layer():
    with pytest.raises(ValueError, match="beta is 'tanh'; expected one of sigmoid, double"):
        DeltaAttention(8, 2, beta="tanh")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_takes_tokens_of_zeros_in_half_precision(dtype):
    layer, x = DeltaAttention(8, 2, bias=False, dtype=dtype), torch.ones(1, 5, 8, dtype=dtype)
    gone = torch.arange(5)[None] > 2
    short = layer(*[x[:, :3]] * 3, need_weights=False)[0]
    torch.testing.assert_close(layer(x, x, x, gone, need_weights=False)[0][:, :3], short)
