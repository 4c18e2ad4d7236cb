"""One softmax over several sets of keys and a sink: its formula, and the kernels of a GPU."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_all_close, output_and_gradients, tensors

from derived_attention.common.masks import causal_mask
from derived_attention.softmax.joint import backend_of, joint_softmax

B, H, R, N, M, D, DV = 2, 3, 3, 9, 7, 6, 4
SCALE = 0.3


def draw(**how):
    return tensors((B, H, N, D), (B, H, R, M, D), (B, H, M, DV), (H, 1), **how)


def formula(q, k, v, sink, is_causal):
    scores = SCALE * q.unsqueeze(-3) @ k.mT  # (B, H, R, N, M)
    if is_causal:
        scores = scores.masked_fill(~causal_mask(N, M), -torch.inf)
    scores = torch.cat([*scores.unbind(2), sink.expand(B, H, N).unsqueeze(-1)], -1)
    return sum(A @ v for A in scores.softmax(-1)[..., :-1].chunk(R, -1))


@pytest.mark.parametrize("is_causal", [False, True])
def test_sets_and_sink_share_one_softmax(is_causal):
    found = output_and_gradients(lambda *x: joint_softmax("cpu", *x, is_causal, SCALE), draw())
    expected = output_and_gradients(lambda *x: formula(*x, is_causal), draw())
    assert_all_close(found, expected, 1e-12)


def test_a_mapped_sink_is_one_more_batch():
    """The contract tests other uses of vmap."""
    q, k, v, sink = (x.detach() for x in draw())
    sinks = torch.stack([sink, sink + 1])
    run = lambda q, sink: joint_softmax("cpu", q, k, v, sink, False, SCALE)  # noqa: E731
    found = torch.func.vmap(run)(torch.stack([q, 2 * q]), sinks)
    for i in range(2):
        torch.testing.assert_close(found[i], run((1 + i) * q, sinks[i]))


def test_a_far_key_does_not_round_what_is_common():
    """Near |log Z| = 10⁵, float32 has steps of 0.008, but the weights still sum to 1."""
    q, k, v, _ = (x.detach().float() for x in draw())
    k = k - 1e5 * torch.nn.functional.normalize(q.mean(-2, keepdim=True), dim=-1).unsqueeze(-3)
    h = joint_softmax("cpu", q, k, torch.ones_like(v), None, False, 1.0)
    torch.testing.assert_close(h, torch.ones_like(h), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("flash", torch.bfloat16), ("cudnn", torch.bfloat16), ("efficient", torch.float32)],
)
def test_kernels_of_a_gpu_take_the_arguments(backend, dtype):
    """PyTorch's shape rules check each call without a GPU, forward and backward."""
    inputs = draw(dtype=dtype, device="meta")
    q, k, v, sink = inputs
    for is_causal in (False, True):
        h = joint_softmax(backend, q, k, v, sink, is_causal, SCALE)
        assert h.shape == (B, H, N, DV) and h.dtype == dtype
        slopes = torch.autograd.grad(h.sum(), inputs)
        assert [x.shape for x in slopes] == [x.shape for x in inputs]


def test_only_devices_with_a_kernel_have_a_backend():
    q, k, v, _ = draw()
    assert backend_of(q, k[:, :, 0], v, False) == "cpu"
    assert not backend_of(q.to("meta"), k[:, :, 0].to("meta"), v.to("meta"), False)
    assert not backend_of(q[..., :0, :], k[:, :, 0], v, False)
