"""Measure how much of the values a layer recalls: ``python -m experiments.chapter04``.

This takes half an hour on one thread of a CPU. Each arm is one layer of attention that has to
recall every value of a sequence. The chapter predicts the largest share of the values' variance
that the layer can recall. The results are written to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from derived_attention import (
    DeltaAttention,
    MultiheadAttention,
    PositionOnlyAttention,
    RidgeAttention,
    attention_weights,
    identity_attention,
    linear_attention,
    softmax_attention,
    uniform_attention,
    window_attention,
    window_mask,
)
from derived_attention.common.convention import mechanism
from derived_attention.common.masks import Mask
from derived_book import seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import POINT, TUNING_SEEDS, command, experiment

page = chapter("04")
PAIRS, WINDOW = 32, 4
TEST_SEED, TESTED = 2**31, 16  # seed of a test's keys; its sequences, each asked in N orders


@mechanism
def masked_after(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Return softmax attention to all keys, without the weights outside a window."""
    near = window_mask(q.shape[-2], k.shape[-2], WINDOW)
    return (attention_weights(q, k, scale=scale) * near) @ v


def plug(attention: Callable[..., Tensor]) -> Callable[..., nn.Module]:
    """Return a function (dim, heads) that builds a layer with an attention."""
    return partial(MultiheadAttention, attention=attention)


LINEAR = plug(linear_attention)
QUADRATIC = plug(partial(linear_attention, feature_map=page.quadratic))
SOFTMAX = plug(softmax_attention)

# the layer, its heads, the pairs of a sequence, and the width of a network after the layer
ARMS: dict[str, tuple[Callable[..., nn.Module], int, int, int]] = {
    "softmax, 4 heads": (SOFTMAX, 4, PAIRS, 0),
    "softmax, 8 heads": (SOFTMAX, 8, PAIRS, 0),
    "linear, 1 head": (LINEAR, 1, PAIRS, 0),
    "linear, 2 heads": (LINEAR, 2, PAIRS, 0),
    "linear, 4 heads": (LINEAR, 4, PAIRS, 0),
    "linear, 8 heads": (LINEAR, 8, PAIRS, 0),
    "linear, 4 heads, 16 pairs": (LINEAR, 4, 16, 0),
    "linear, 4 heads, 64 pairs": (LINEAR, 4, 64, 0),
    "linear, 4 heads, a network": (LINEAR, 4, PAIRS, 128),
    "quadratic, 4 heads": (QUADRATIC, 4, PAIRS, 0),
    "quadratic, 8 heads": (QUADRATIC, 8, PAIRS, 0),
    "ridge, 4 heads": (RidgeAttention, 4, PAIRS, 0),
    "delta, 4 heads": (DeltaAttention, 4, PAIRS, 0),
    "window, h over the window": (plug(partial(window_attention, window=WINDOW)), 4, PAIRS, 0),
    "window, h over all keys": (plug(masked_after), 4, PAIRS, 0),
    "uniform": (plug(uniform_attention), 4, PAIRS, 0),
    "alone": (plug(identity_attention), 4, PAIRS, 0),
    "position only": (partial(PositionOnlyAttention, length=PAIRS), 4, PAIRS, 0),
}

# The numbers are the page's limits: features divided by pairs, or the share of pairs in a window.
# For one head and for quadratic features the page predicts only a share that they do not exceed.
BELOW = {
    "linear, 1 head": 0.8,
    "linear, 4 heads": 8 / PAIRS + POINT,
    "linear, 8 heads": 4 / PAIRS + POINT,
    "quadratic, 4 heads": 0.9,
    "window, h over the window": 268 / PAIRS**2,
}


class WithNetwork(page.Recall):
    """The page's `Recall`, with a residual network after its layer."""

    def __init__(self, layer: Callable[..., nn.Module], heads: int, hidden: int) -> None:
        super().__init__(layer, heads)
        dim = page.DIM
        self.read = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return answers (B, N, dim)."""
        output = super().forward(*inputs)
        return output + self.read(output)


@torch.no_grad()
def sampled(model: nn.Module, pairs: int, times: int) -> float:
    """Return an estimate of the share that any model recalls, from `times` sequences."""
    error = size = 0.0
    for _ in range(times // TESTED):
        keys, values, asked, order = page.draw(TESTED, pairs)
        wanted = values.take_along_dim(order[..., None], 1)
        error += (model(keys, values, asked) - wanted).square().sum().item()
        size += values.square().sum().item()
    return 1 - error / size


def recall(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train one layer; return the share of the values' variance that it recalls."""
    layer, heads, pairs, hidden = ARMS[arm]
    seed_everything(seed)
    model = WithNetwork(layer, heads, hidden) if hidden else page.Recall(layer, heads)
    page.train(model, pairs, steps, lr)
    cost = attention_cost(model, *page.draw(1, pairs)[:3])
    torch.manual_seed(TEST_SEED + (seed if seed in TUNING_SEEDS else 0))
    if hidden:
        return {"recalled": sampled(model, pairs, 4096)} | cost
    keys, _, _, order = page.draw(TESTED, pairs)
    shares = [
        page.share_recalled(model, keys, keys.gather(1, turned), turned)
        for turned in (order.roll(t, 1) for t in range(pairs))  # each question at each place once
    ]
    return {"recalled": torch.stack(shares).mean().item()} | cost


EXPERIMENTS = {
    "recall": experiment(
        "the share of the values that one layer recalls",
        recall,
        list(ARMS),
        [("recalled", "share recalled, %", 100, 1)],
        steps=(100, 200, 400, 800),
        below=BELOW,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter04", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
