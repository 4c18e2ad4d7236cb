"""One softmax over several sets of keys, by one call of PyTorch's flash attention for each set.

For sets r with keys k_r and values v, and a sink of score b and value 0, the equation is ::

    h_i = Σ_r Σ_j exp(s_ijr) v_j / Z_i,    Z_i = exp(b) + Σ_r Σ_j exp(s_ijr)

with s_ijr = scale · q_i·k_jr.

Flash attention returns for each set its own result o_ir and log Z_ir, so that with log Z_i, their
log-sum-exp, h_i = Σ_r exp(log Z_ir − log Z_i) o_ir. The gradient of a score is ::

    ∂L/∂s_ijr = a_ijr (g_i·v_j − g_i·h_i),    a_ijr = exp(s_ijr − log Z_i),    g_i = ∂L/∂h_i

which is what flash attention's own backward pass computes for the set r if it is given h and log Z
in place of o_r and log Z_r. No score is stored, and causality is that of the kernel. Attention
over several devices is computed in the same way (Liu et al., 2023, *Ring attention*).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.common.blocks import needs_whole, to_front
from derived_attention.common.masks import causal_mask
from derived_attention.softmax.core import kernel_widths, widen

ROWS = 32  # log Z of PyTorch's memory-efficient kernel is padded to a multiple of this
FLASH, EFFICIENT, CUDNN = 1, 2, 3  # of torch.nn.attention.SDPBackend
HALF = (torch.float16, torch.bfloat16)


def backend_of(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> str:
    """Return which kernel PyTorch would run for q, k and v, or nothing where it has none."""
    if 0 in (q.numel(), k.numel(), v.numel()) or torch.compiler.is_exporting():
        return ""  # an exported graph keeps flash attention, but not what is done for its log Z
    if q.device.type == "cpu":
        return "cpu"
    if q.device.type != "cuda":
        return ""
    if torch.compiler.is_compiling():  # which cannot ask
        return "flash" if q.dtype in HALF else ""
    with torch.autocast("cuda", enabled=False):
        Q, K, V = fit_widths(q, k, v)
        choice = torch._fused_sdp_choice(Q, K, V, None, 0.0, is_causal)
    return {FLASH: "flash", EFFICIENT: "efficient", CUDNN: "cudnn"}.get(choice, "")


def joint_softmax(
    backend: str, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, is_causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    """Return h (..., N, Dv) of q (..., N, D), R sets of keys k (..., R, M, D), and v (..., M, Dv).

    The score b of the sink is () or (H, 1). `backend` is that of `backend_of`.
    """
    Q, K, V = fit_widths(q, k.flatten(-3, -2), v)
    H: Tensor = _Joint.apply(backend, is_causal, scale, k.shape[-3], sink, Q, K, V)[0]
    return H if H.shape == v.shape == q.shape else H[..., : v.shape[-1]].reshape(*q.shape[:-1], -1)


class _Joint(torch.autograd.Function):
    """The softmax in four dimensions, k (B, H, R M, D); returns h, and log Z without gradient."""

    @staticmethod
    def forward(
        backend: str, is_causal: bool, scale: float, R: int, sink: Tensor | None, q: Tensor,
        k: Tensor, v: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        sets = [_forward(backend, q, x, v, is_causal, scale) for x in k.chunk(R, -2)]
        outs, logs = zip(*sets, strict=True)
        sinks = [] if sink is None else [sink.to(logs[0]).expand_as(logs[0])]
        each = torch.stack([*logs, *sinks])
        shares, total = each.softmax(0).unsqueeze(-1), each.logsumexp(0)
        h = shares[0] * outs[0]  # in the dtype of log Z
        for share, out in zip(shares[1:], outs[1:], strict=False):
            h = torch.addcmul(h, share, out.to(h.dtype))
        h = h.to(q.dtype)
        if is_causal and sink is None:  # all sets have one key, and nothing is to be rounded
            h[..., 0, :] = v[..., 0, :]
        return h, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.backend, ctx.is_causal, ctx.scale, ctx.R, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        sink, q, k, v, h, total = ctx.saved_tensors
        settings, grad = (ctx.is_causal, ctx.scale), grad.contiguous()
        tensors = [x for x in (sink, q, k, v) if x is not None]
        if needs_whole(grad, *tensors):
            whole = functools.partial(_whole, *settings, ctx.R)
            slopes = torch.func.vjp(whole, *tensors)[1](grad)
            return *(None,) * (4 + (sink is None)), *slopes
        sets = [
            _backward(ctx.backend, grad, q, x, v, h, total, *settings) for x in k.chunk(ctx.R, -2)
        ]
        dq, dk, dv = zip(*sets, strict=True)
        db = None
        if ctx.needs_input_grad[4]:
            away = (grad * h).sum(-1, dtype=total.dtype) * (sink - total).exp()
            db = -away.sum_to_size(sink.shape).to(sink.dtype)
        return *(None,) * 4, db, sum(dq[1:], dq[0]), torch.cat(dk, -2), sum(dv[1:], dv[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """Make the mapped dimension one with the first."""
        *settings, sink, q, k, v = inputs
        moved = [to_front(info, x, d) for x, d in zip((q, k, v), in_dims[5:], strict=True)]
        if in_dims[4] is not None:
            sink = sink.movedim(in_dims[4], 0)
            sink = sink.view(len(sink), 1, *(1,) * (3 - sink.dim()), *sink.shape[1:])
            sink = sink.expand(-1, moved[0].shape[1], -1, -1).flatten(0, 1)
        outs = _Joint.apply(*settings, sink, *(x.flatten(0, 1) for x in moved))
        return tuple(x.unflatten(0, moved[0].shape[:2]) for x in outs), (0, 0)


def _whole(is_causal: bool, scale: float, R: int, *tensors: Tensor) -> Tensor:
    """Return h with all weights in memory, which has derivatives of any order."""
    *sinks, q, k, v = tensors
    scores = scale * q @ k.mT  # (B, H, N, R M)
    if is_causal:
        past = causal_mask(q.shape[-2], v.shape[-2], q.device)
        scores = scores.masked_fill(~past.repeat(1, R), -torch.inf)
    scores = torch.cat([scores, *(b.to(q).expand(q.shape[:-1])[..., None] for b in sinks)], -1)
    return scores.softmax(-1)[..., : k.shape[-2]] @ torch.cat([v] * R, -2)


def fit_widths(q: Tensor, *others: Tensor) -> list[Tensor]:
    """Return tensors in four dimensions and of one width, as flash attention takes them."""
    D, tensors = q.shape[-1], [q, *others]
    widths, strides = {x.shape[-1] for x in tensors}, {x.stride(-1) for x in tensors}
    if q.dim() == 4 and widths == {D} and strides == {1} and (q.device.type == "cpu" or D % 8 == 0):
        return tensors
    width = max(kernel_widths(D, max(widths), q.device.type))
    return [widen(x, width, four_dims=True) for x in tensors]


def _forward(
    backend: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return o (..., N, Dv) and log Z (..., N), in float32 at least, for one set of keys."""
    ops, own = torch.ops.aten, {"scale": scale}
    if backend == "cpu":
        out, log = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, **own)
    elif backend == "flash":
        out, log = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, **own)[:2]
    elif backend == "cudnn":
        arguments = (q, k, v, None, True, 0.0, is_causal)
        out, log = ops._scaled_dot_product_cudnn_attention(*arguments, **own)[:2]
        log = log.view(out.shape[:-1])  # some releases return (B, H, N, 1)
    else:
        arguments = (q, k, v, None, True, 0.0, is_causal)
        out, log = ops._scaled_dot_product_efficient_attention(*arguments, **own)[:2]
        log = log[..., : q.shape[-2]]
    return out, log


def _backward(
    backend: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, h: Tensor, total: Tensor,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v through one set of keys."""
    ops, own = torch.ops.aten, {"scale": scale}
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout, of which there is none
    given, lengths = (grad, q, k, v), (None, None, q.shape[-2], k.shape[-2])
    if backend == "cpu":
        slopes = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, h, total, 0.0, is_causal, **own
        )
    elif backend == "flash":
        slopes = ops._scaled_dot_product_flash_attention_backward(
            *given, h, total, *lengths, 0.0, is_causal, seed, seed, **own
        )
    elif backend == "cudnn":
        slopes = ops._scaled_dot_product_cudnn_attention_backward(
            *given, h, total.unsqueeze(-1), seed, seed, None, *lengths, 0.0, is_causal, **own
        )
    else:
        padded = F.pad(total, (0, -total.shape[-1] % ROWS), value=torch.inf)
        slopes = ops._scaled_dot_product_efficient_attention_backward(
            *given, None, h, padded, seed, seed, 0.0, (True, True, True, False), is_causal, **own
        )
    dq, dk, dv = slopes[:3]
    return dq, dk, dv
