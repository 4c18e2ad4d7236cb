"""Record the runs of chapter 5: ``python -m experiments.chapter05``.

Less than ten minutes on one thread of a CPU. One layer looks values up by keys that are drawn anew
for each sequence, with a vector added to all its tokens; the training is that of the page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from derived_attention import MultiheadAttention, NormalizedAttention, PositionOnlyAttention
from derived_book import seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

N, D, SYMBOLS = 32, 32, 64  # pairs in a sequence, width, different values
TEST = 1000  # sequences


class UnitTokens(MultiheadAttention):
    """Softmax attention whose queries and keys are made of tokens of one length, √D."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Attend; queries and keys keep their directions."""
        query, key = (F.rms_norm(x, x.shape[-1:]) for x in (query, key))
        return super().forward(query, key, value, **options)


class Recall(nn.Module):
    """Questions attend pairs: one layer, and nothing around it."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend
        self.values = nn.Embedding(SYMBOLS, D)
        self.read = nn.Linear(D, SYMBOLS)

    def forward(self, asked: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return logits of the answers, (B, N, SYMBOLS)."""
        h, _ = self.attend(asked, keys, self.values(values), need_weights=False)
        return self.read(h)


def questions(B: int, size: float, same: bool) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Draw B sequences; return a model's inputs, the answers, and the place of each asked pair."""
    one = torch.randn(1, 1, D, generator=torch.Generator().manual_seed(0))
    shared = one if same else torch.randn(B, 1, D)
    keys = torch.randn(B, N, D) + size * shared
    values = torch.rand(B, SYMBOLS).argsort(1)[:, :N]  # all different
    order = torch.rand(B, N).argsort(1)
    asked = keys.take_along_dim(order[..., None], 1)
    return (asked, keys, values), values.gather(1, order), order


def train(make: Callable[..., nn.Module], seed: int, steps: int, lr: float, **world: Any) -> Recall:
    """Train with a learning rate that rises for a tenth of the steps, and then falls to 0."""
    seed_everything(seed)
    model = Recall(make(D))
    optimiser = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min(10 * (step + 1) / steps, 1 - step / steps)
        inputs, answers, _ = questions(64, **world)
        loss = F.cross_entropy(model(*inputs).mT, answers)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


@torch.no_grad()
def test(model: Recall, **world: Any) -> dict[str, float]:
    """Return shares of questions: answered, and with the largest weight on the asked pair."""
    (asked, keys, values), answers, order = questions(TEST, **world)
    right = model(asked, keys, values).argmax(-1) == answers
    weights = model.attend(asked, keys, model.values(values), need_weights=True)[1]
    found = weights.argmax(-1) == order
    return {"accuracy": right.double().mean().item(), "found": found.double().mean().item()}


def run_once(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train one arm with one seed on the CPU; such a model gains nothing from a GPU."""
    make, world = ARMS[arm]
    model = train(make, seed, steps, lr, **world)
    beta = getattr(model.attend, "beta", None)  # where it is learned
    learned = {"learned_beta": 0.0 if beta is None else beta.item()}
    return test(model, **world) | learned | attention_cost(model, *questions(1, **world)[0])


def world(size: float, same: bool = False) -> dict[str, Any]:
    """Name the arguments of `questions` that an arm's sequences are drawn with."""
    return {"size": size, "same": same}


softmax = partial(MultiheadAttention, num_heads=1)
bn = partial(NormalizedAttention, num_heads=1)
ARMS = {
    "softmax": (softmax, world(3)),
    "Attention-BN": (bn, world(3)),
    "Attention-BN, learned β": (partial(bn, beta=0.0, learn_beta=True), world(3)),
    "softmax, tokens of one length": (partial(UnitTokens, num_heads=1), world(3)),
    "softmax, four heads": (partial(MultiheadAttention, num_heads=4), world(3)),
    "softmax, the same vector": (softmax, world(3, same=True)),
    "softmax, size 6": (softmax, world(6)),
    "Attention-BN, size 6": (bn, world(6)),
    "position only": (partial(PositionOnlyAttention, num_heads=1, length=N), world(3)),
}
COLUMNS = [("accuracy", "accuracy, %", 100, 1), ("found", "asked pair on top, %", 100, 1)]
STEPS = (125, 250, 500)
EXPERIMENTS = {
    "shared": deciding("recall with a shared vector", run_once, list(ARMS), COLUMNS, steps=STEPS),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter05", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
