"""Train what chapter 6 predicts: ``python -m benchmarks.chapter06``.

Ten minutes on one thread of a CPU. The models are those of the chapter, which trains some of these
runs again. What has finished is not repeated. The results go to `training/recorded/`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments import command, deciding
from derived_attention import (
    Conv1DAttention,
    PositionOnlyAttention,
    Questions,
    answer_loss,
    conv1d_attention,
    evaluate,
    fit,
    make_attention,
    seed_everything,
    softmax_attention,
)
from derived_attention.tasks.run import attention_cost
from derived_attention.training.recorded import FOLDER

# --- texts: a value stands after its key ----------------------------------------------------------

PAIRS, SYMBOLS = 16, 64
HALF = torch.full((2,), 0.5)


class Reader(nn.Module):
    """One layer, one head: pairs of a key and a value, then a question for each key."""

    def __init__(self, attention: Any, positions: bool, layers: int = 1, dim: int = 64) -> None:
        super().__init__()
        self.symbols = SYMBOLS
        self.embed = nn.Embedding(2 * SYMBOLS, dim)  # keys, then values
        self.positions = nn.Parameter(positions * torch.randn(3 * PAIRS, dim))
        self.positions.requires_grad_(positions)
        self.attend = make_attention(attention, dim, 1)
        self.read = nn.Linear(dim, SYMBOLS)
        if layers > 1:
            self.before = make_attention(softmax_attention, dim, 1)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return logits (B, PAIRS, SYMBOLS) of the values of the keys that are asked for."""
        pairs = torch.stack([keys, SYMBOLS + values], 2).flatten(1)
        x = self.embed(torch.cat([pairs, asked], 1)) + self.positions
        if hasattr(self, "before"):
            x = x + self.before(x, x, x, is_causal=True, need_weights=False)[0]
        h, _ = self.attend(x, x, x, is_causal=True, need_weights=False)
        return self.read(h[:, pairs.shape[1] :])


TWO = partial(Conv1DAttention, kernel_size=2, causal=True)
READERS: dict[str, Any] = {
    "softmax": softmax_attention,
    "softmax with positions": softmax_attention,
    "taps ½, ½": partial(conv1d_attention, weight=HALF),
    "one filter": TWO,
    "two filters": partial(TWO, shared=False),
    "two layers with positions": softmax_attention,
    "position only": partial(PositionOnlyAttention, length=3 * PAIRS),
}


def answer(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train a `Reader`; return the accuracy on new texts, and the taps of learned filters."""
    seed_everything(seed)
    model = Reader(READERS[arm], "positions" in arm, 2 if arm.startswith("two layers") else 1)
    questions = partial(Questions, PAIRS, SYMBOLS)
    fit(model.to(device), questions(16, steps), answer_loss, epochs=1, lr=lr, seed=seed)
    right = evaluate(model, questions(64, 4), answer_loss)["accuracy"]
    return {"accuracy": right} | of_layer(model.cpu(), *questions(1, 1).draw()[:3])


def of_layer(model: Reader, *inputs: Tensor) -> dict[str, float]:
    """Return what the attention costs, and the taps of the learned filters, by name and place."""
    found = {k: w[0] for k, w in model.attend.named_parameters() if w.shape == (1, 2)}
    taps = {f"{k}{i}": w[i].item() for k, w in found.items() for i in range(2)}
    return attention_cost(model, *inputs) | taps


COLUMNS = [("accuracy", "right, %", 100, 1)]
EXPERIMENTS = {
    "texts": deciding(
        "values that stand after their keys",
        answer,
        list(READERS),
        COLUMNS,
        steps=(75, 150, 300, 600),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter06", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
