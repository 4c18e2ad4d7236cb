"""Record the runs of chapter 5: ``python -m experiments.chapter05``.

This takes a quarter of an hour on one thread of a CPU. One layer looks up values by keys that are
drawn for each sequence, and one vector is added to all tokens of a sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from derived_attention import MultiheadAttention, NormalizedAttention, PositionOnlyAttention
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import POINT, command, experiment

page = chapter("05")


class UnitTokens(MultiheadAttention):
    """Softmax attention whose queries and keys are computed from tokens of one length, √D."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Attend with rescaled tokens, which keep their directions."""
        query, key = (F.rms_norm(x, x.shape[-1:]) for x in (query, key))
        return super().forward(query, key, value, **options)


@torch.no_grad()
def asked_on_top(model: nn.Module, **world: Any) -> float:
    """Return the share of questions whose largest weight is that of the asked pair."""
    (asked, keys, values), _, order = page.questions(1000, **world)
    weights = model.attend(asked, keys, model.values(values), need_weights=True)[1]
    return (weights.argmax(-1) == order).double().mean().item()


def run_once(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train one arm with one seed; return its accuracy, and what it has learned."""
    make, world = ARMS[arm]
    model = page.train(make, seed, steps, lr, **world)
    with torch.random.fork_rng(devices=[]):
        accuracy = page.accuracy(model, **world)
    found = asked_on_top(model, **world)  # of the same questions
    beta = getattr(model.attend, "beta", None)  # where it is learned
    learned = {"learned_beta": 0.0 if beta is None else beta.item()}
    cost = attention_cost(model, *page.questions(1, **world)[0])
    return {"accuracy": accuracy, "found": found} | learned | cost


bn = partial(NormalizedAttention, num_heads=1)
ARMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "softmax": (page.softmax, {"size": 3}),
    "Attention-BN": (bn, {"size": 3}),
    "Attention-BN, learned β": (partial(bn, beta=0.0, learn_beta=True), {"size": 3}),
    "softmax, tokens of one length": (partial(UnitTokens, num_heads=1), {"size": 3}),
    "softmax, four heads": (partial(MultiheadAttention, num_heads=4), {"size": 3}),
    "softmax, the same vector": (page.softmax, {"size": 3, "same": True}),
    "softmax, size 6": (page.softmax, {"size": 6}),
    "Attention-BN, size 6": (bn, {"size": 6}),
    "position only": (
        partial(PositionOnlyAttention, num_heads=1, length=page.PAIRS),
        {"size": 3},
    ),
}
COLUMNS = [("accuracy", "accuracy, %", 100, 1), ("found", "asked pair on top, %", 100, 1)]
STEPS = (125, 250, 500)
BELOW = {  # the numbers are the theorem's ceilings, and the score of a guess
    "softmax": page.ceiling(3) + POINT,
    "softmax, four heads": page.ceiling(3),
    "softmax, size 6": page.ceiling(6) + POINT,
    "position only": 1 / page.PAIRS + POINT,
}
EXPERIMENTS = {
    "shared": experiment(
        "recall with a shared vector", run_once, list(ARMS), COLUMNS, steps=STEPS, below=BELOW
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter05", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
