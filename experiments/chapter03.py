"""Compress key-value caches of small models by regression: ``python -m experiments.chapter03``.

This takes a quarter of an hour on one thread of a CPU. `small_model` is trained once for each seed
and number of steps, and all arms compress the same heads.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from derived_attention import softmax_attention
from derived_book import small_model
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import command, experiment

page = chapter("03")
ARMS = ["mean output"] + [rule + more for rule in page.RULES for more in ("", ", refitted")]
SHARES = {"quarter": 4, "eighth": 8, "half": 2}  # of the keys are kept; the first one decides
RATE = 1e-2  # of `small_model`
REFITTED = [f"{rule}, refitted" for rule in page.RULES]
BELOW = dict(zip(page.RULES, REFITTED, strict=True)) | dict.fromkeys(REFITTED[:3], REFITTED[3])


@functools.lru_cache(maxsize=2)
def heads(seed: int, steps: int, windows: int) -> tuple[Any, ...]:
    """Train a small model; return its cache, its later queries and its number of parameters."""
    model = small_model(softmax_attention, text="python", seed=seed, steps=steps)
    cost = attention_cost(model, torch.zeros(1, model.length, dtype=torch.int64))
    return *page.read(model, windows), cost["parameters"]


def kept(arm: str, seed: int, past: list[Tensor], n: int, ridge: float) -> tuple[Tensor, Tensor]:
    """Return the keys and values that an arm keeps; *mean output* keeps the mean as one value."""
    q, k, v = past
    if arm == "mean output":
        return k[..., :1, :], (page.weights(q, k) @ v).mean(-2, keepdim=True)
    rule, _, refitted = arm.partition(", ")
    return page.compress(page.importance(rule, *past, seed), *past, n, ridge if refitted else None)


def errors(
    arm: str, seed: int, steps: int, lr: float, windows: int, ridge: float
) -> dict[str, float]:
    """Compress all heads of one model by one arm; return the errors at both halves of queries."""
    if lr != RATE:
        raise ValueError(f"lr is {lr}; expected {RATE}, with which the small model is trained")
    past, later, parameters = heads(seed, steps, windows)
    N = past[0].shape[-2]
    products = 4 * (N // SHARES["quarter"]) * later[:, 0].numel()  # scores and answers
    found = {"parameters": parameters, "flops": 0 if arm == "mean output" else products}
    for share, parts in SHARES.items():
        cache = kept(arm, seed, past, N // parts, ridge)
        found[share] = page.error(later, past, *cache)
        found[f"{share}_fit"] = page.error(past[0], past, *cache)
    return found


EXPERIMENTS = {
    "compress": experiment(
        "the keys and values of heads, compressed",
        errors,
        ARMS,
        [(share, f"error, {share} of the keys", 100, 1) for share in SHARES],
        steps=(600, 1200),
        rate=RATE,
        best=min,
        below=BELOW,
        longer=[REFITTED[3]],
        windows=16,
        ridge=0.1,
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter03", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
