"""Train detectors whose attention has no matrices: ``python -m experiments.chapter14``.

About six hours on one thread of a CPU. A run that has finished is not repeated. The results go
to the records, from where chapter 14 reads them.

A layer *without matrices* has no W_Q, W_K, W_V and no W_O. Arms that are compared differ in one
thing. The random tokens of 003, 1000 of some 850 of a picture, are 40 for the 36 here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention import LassoAttention, MultiheadAttention, identity_attention
from derived_attention.common.checks import Mechanism
from derived_attention.common.masks import Mask
from derived_book.tasks.detection.run import train_detection
from derived_book.tasks.model import Config
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

bare = partial(MultiheadAttention, projected=False)
lasso = partial(
    LassoAttention, lam=0.1, rho=10.0, iterations=5, power=5, projected=False, dictionary="value"
)


def left_out(q: Tensor, k: Tensor, v: Tensor, *args: Any, **masks: Any) -> Tensor:
    """Return zeros: what is added to them is all that is left."""
    return q.new_zeros(*q.shape[:-1], v.shape[-1])


class ByPlace(MultiheadAttention):
    """Softmax of a learned score for each head, question and place: the same for all pictures."""

    def __init__(self, *args: Any, questions: int = 6, places: int = 36, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scores = nn.Parameter(torch.zeros(self.num_heads, questions, places))

    def attend(self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask) -> Tensor:
        """Put these scores in the place of all others: (B, H, Q, D)."""
        weights = self.scores.softmax(-1)
        return weights.expand(*q.shape[:-1], -1) if v is None else weights @ v


CROSS: dict[str, Callable[..., Any] | None] = {
    "softmax": None,
    "softmax without": bare,
    "lasso, ρ = 10": lasso,
    "lasso, ρ = 1000": partial(lasso, rho=1000.0),
    "lasso, ρ = 10, with noise": partial(lasso, random_tokens=40, dropout=0.1),
    "position only": ByPlace,
    "left out": partial(bare, attention=left_out),
}
DECODER = {
    "softmax without": bare,
    "identity": partial(bare, attention=identity_attention),
    "left out": partial(bare, attention=left_out),
}


def detect(arm: str, seed: int, steps: int, lr: float, device: str, place: str) -> dict[str, float]:
    """Train a detector with that attention at one place; return its scores on new scenes."""
    config = Config(dim=64, heads=4, layers=2, hidden=128, dropout=0.0)
    layer: Any = {"cross": CROSS, "decoder": DECODER}[place][arm]
    own = {place: layer} if layer else {}
    return train_detection(config, seed=seed, steps=steps, lr=lr, device=device, **own)


COLUMNS = [
    ("AP50", "AP50", 100, 1),
    ("AP", "AP", 100, 1),
    ("gap", "test - training loss", 1, 2),
]
own = partial(deciding, steps=(1000, 2000), seeds=8, rates=(1e-3, 2e-3, 4e-3))
EXPERIMENTS = {
    "cross": own(
        "a detector whose cross-attention is replaced", detect, list(CROSS), COLUMNS, place="cross"
    ),
    "decoder": own(
        "a detector whose decoder's self-attention is replaced",
        detect,
        list(DECODER),
        COLUMNS,
        place="decoder",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter14", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
