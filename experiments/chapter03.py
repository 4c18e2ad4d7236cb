"""Compress key-value caches of small models by regression: ``python -m experiments.chapter03``.

A quarter of an hour on one thread of a CPU. Each model of `small_model` is trained once for each
number of steps; all arms then see the same heads. What is refitted, where, and what is measured is
chapter 3's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from derived_attention import softmax_attention
from derived_book import load_text, small_model
from derived_book.tasks.language.data import TextData
from derived_book.tasks.run import attention_cost
from derived_book.training.measure import recorded
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

RULES = ("random", "most recent", "largest prices", "attention mass")
ARMS = ["mean output"] + [rule + more for rule in RULES for more in ("", ", refitted")]
SHARES = {"quarter": 4, "eighth": 8, "half": 2}  # of the keys are kept; the first one decides
RATE = 1e-2  # of `small_model`
Cache = tuple[Tensor, Tensor, Tensor]


def small_text() -> TextData:
    """Return the text that the models read."""
    return load_text("python")


@functools.lru_cache(maxsize=2)
def heads(seed: int, steps: int, windows: int, device: str) -> tuple[Cache, int]:
    """Train a small model; return its q, k and v (layers, windows, H, L, D), and its parameters."""
    model = small_model(softmax_attention, text="python", seed=seed, steps=steps, device=device)
    model = model.cpu().eval()
    text, L = small_text().test, model.length
    step = (len(text) - L) // windows
    rows = torch.stack([text[i * step : i * step + L] for i in range(windows)]).long()
    with torch.no_grad(), recorded(model) as calls:
        model(rows)
    q, k, v = (torch.stack([call[i].double() for call in calls]) for i in range(3))
    return (q, k, v), attention_cost(model, rows[:1])["parameters"]


def weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the softmax weights (…, n, N) of all queries over all keys."""
    return (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1)


def importance(rule: str, q: Tensor, k: Tensor, v: Tensor, seed: int) -> Tensor:
    """Return a number for each key (…, N); those with the largest are kept."""
    if rule == "attention mass":
        return weights(q, k).sum(-2)
    if rule == "largest prices":  # h(k_j)·‖v_j‖, of keys whose mean is subtracted
        k = k - k.mean(-2, keepdim=True)
        log_h = torch.logsumexp(k @ k.mT / k.shape[-1] ** 0.5, -1)
        return log_h + v.norm(dim=-1).log()
    if rule == "most recent":
        return torch.arange(k.shape[-2]).expand(k.shape[:-1])
    return torch.rand(k.shape[:-1], generator=torch.Generator().manual_seed(seed))


def outputs(arm: str, seed: int, cache: Cache, later: Tensor, kept: int, ridge: float) -> Tensor:
    """Return what the compressed head answers the later queries; `cache` has the earlier ones."""
    q, k, v = cache
    truth = weights(q, k) @ v
    if arm == "mean output":
        return truth.mean(-2, keepdim=True).expand(later.shape)
    rule, _, refitted = arm.partition(", ")
    chosen = importance(rule, q, k, v, seed).topk(kept, -1).indices
    chosen = chosen[..., None].expand(*chosen.shape, k.shape[-1])
    k, v = k.gather(-2, chosen), v.gather(-2, chosen)
    if refitted:
        A = weights(q, k)
        gram = A.mT @ A + ridge * torch.eye(kept, dtype=A.dtype)
        v = v + torch.linalg.solve(gram, A.mT @ (truth - A @ v))
    return weights(later, k) @ v


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Return the error over the spread of the outputs, for each head over all windows, averaged."""
    spread = truth - truth.mean(-2, keepdim=True)
    parts = [z.square().sum((1, 3, 4)) for z in (found - truth, spread)]  # (layers, H)
    return (parts[0] / parts[1]).sqrt().mean().item()


def compress(
    arm: str, seed: int, steps: int, lr: float, windows: int, ridge: float, device: str
) -> dict[str, float]:
    """Compress all heads of one model by one arm; return the errors where they are asked later."""
    if lr != RATE:
        raise ValueError(f"lr is {lr}; expected {RATE}, with which the small model is trained")
    (q, k, v), parameters = heads(seed, steps, windows, device)
    N = q.shape[-2] // 2  # the first half has been read, the second half asks
    cache = (q[..., :N, :], k[..., :N, :], v[..., :N, :])
    later = q[..., N:, :]
    truth = [weights(z, cache[1]) @ cache[2] for z in (later, cache[0])]
    products = 4 * (N // SHARES["quarter"]) * later[:, 0].numel()  # scores and answers
    errors = {"parameters": parameters, "flops": 0 if arm == "mean output" else products}
    for share, parts in SHARES.items():
        answer = functools.partial(outputs, arm, seed, cache, kept=N // parts, ridge=ridge)
        errors[share] = relative_error(answer(later), truth[0])
        errors[f"{share}_fit"] = relative_error(answer(cache[0]), truth[1])
    return errors


EXPERIMENTS = {
    "compress": deciding(
        "the keys and values of heads, compressed",
        compress,
        ARMS,
        [(share, f"error, {share} of the keys", 100, 1) for share in SHARES],
        steps=(150, 300, 600, 1200),
        rates=(RATE,),
        best=min,
        windows=16,
        ridge=0.1,
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter03", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
