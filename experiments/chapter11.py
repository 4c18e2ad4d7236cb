"""Train what chapter 11 predicts: ``python -m experiments.chapter11``.

Five minutes on one thread of a CPU. The models are those of the chapter, which trains some
of these runs again. What has finished is not repeated. The results go to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from derived_attention import (
    MultiheadAttention,
    PositionOnlyAttention,
    identity_attention,
    uniform_attention,
)
from derived_book import measure, seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

N, SYMBOLS = 32, 64  # tokens; symbols of each kind
GROUPS = (4, 8, 16, 32)
CUTS = (1, 2, 4, 8, 16, 32)
Layer = Callable[[int], nn.Module]  # of the width of a token


def pose(sets: int, groups: int, device: str = "cpu") -> tuple[tuple[Tensor, ...], Tensor]:
    """Draw ((groups' names, values, marks, groups asked for, noise), answers), each (B, N).

    Groups are of one size, and each is asked for by as many questions. One member of a group is
    marked: its value is the answer. The noise is a symbol of a question that says nothing.
    """

    def shuffled() -> Tensor:
        return torch.rand(sets, N, device=device).argsort(-1) % groups

    name = torch.rand(sets, SYMBOLS, device=device).argsort(-1)[:, :groups]
    member, asked = shuffled(), shuffled()
    values, noise = torch.randint(SYMBOLS, (2, sets, N), device=device)
    own = member[:, None] == torch.arange(groups, device=device)[:, None]  # (B, groups, N)
    first = (torch.rand(sets, 1, N, device=device) * own).argmax(-1)  # (B, groups)
    marks = torch.zeros_like(values).scatter(1, first, 1)
    answers = values.gather(1, first.gather(1, asked))
    return (name.gather(1, member), values, marks, name.gather(1, asked), noise), answers


class Groups(nn.Module):
    """One layer: questions attend to tokens, and a linear map reads what the layer returns."""

    def __init__(self, attend: Layer, dim: int = 64) -> None:
        super().__init__()
        self.names, self.questions, self.values, self.noise = (
            nn.Embedding(SYMBOLS, dim) for _ in range(4)
        )
        self.marks, self.attend = nn.Embedding(2, dim), attend(dim)
        self.read = nn.Linear(dim, SYMBOLS)

    def forward(self, names: Tensor, values: Tensor, marks: Tensor, *asked: Tensor) -> Tensor:
        """Return logits (B, SYMBOLS, N)."""
        tokens = self.names(names) + self.values(values) + self.marks(marks)
        questions = self.questions(asked[0]) + self.noise(asked[1])
        h, _ = self.attend(questions, tokens, tokens, need_weights=False)
        return self.read(h).mT


def truncated(q: Tensor, k: Tensor, v: Tensor, *, rank: int, **_: object) -> Tensor:
    """Attend with the best approximation, of that rank, of the softmax map."""
    A = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    U, sigma, Vh = torch.linalg.svd(A)
    return (U * sigma[..., None, :])[..., :rank] @ (Vh[..., :rank, :] @ v)


def ranks(model: nn.Module, inputs: Sequence[Tensor]) -> dict[str, float]:
    """Return the effective rank, in the median, of the map, and with queries turned together."""
    with torch.no_grad(), measure.recorded(model) as calls:
        model.eval()(*inputs)
    q, k = calls[0].q.double(), calls[0].k.double() / calls[0].q.shape[-1] ** 0.5
    turn = torch.linalg.qr(torch.randn(q.shape[-1], q.shape[-1]).to(q))[0]
    found = {"rank": q @ k.mT, "turned": q @ turn @ k.mT}
    return {
        name: float(measure.effective_rank(S.softmax(-1)).median()) for name, S in found.items()
    }


# --- what is trained ------------------------------------------------------------------------------

one_head = partial(MultiheadAttention, num_heads=1)
LAYERS: dict[str, Layer] = {
    "softmax": one_head,
    "uniform": partial(one_head, attention=uniform_attention),
    "alone": partial(one_head, attention=identity_attention),
    "position only": partial(PositionOnlyAttention, num_heads=1, length=N),
}
ARMS = {
    f"{layer}, {groups} groups": (layer, groups)
    for layer in LAYERS
    for groups in (GROUPS if layer == "softmax" else (4, 32))
}


def look_up(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train a `Groups`; return its accuracy and, of softmax, ranks and accuracies of cut maps."""
    seed_everything(seed)
    layer, groups = ARMS[arm]
    model = Groups(LAYERS[layer]).to(device)
    found = {}
    if layer == "softmax":
        before = ranks(model, pose(64, groups, device)[0])
        found["untrained"] = before["rank"]
    optimiser = torch.optim.Adam(model.train().parameters(), lr=lr)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 30, 1 - step / steps)
        asked, answers = pose(16, groups, device)
        loss = cross_entropy(model(*asked), answers)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    asked, answers = pose(256, groups, device)
    found["accuracy"] = right(model.eval(), asked, answers)
    if layer == "softmax":
        found |= ranks(model, asked)
        attend: Any = model.attend
        whole = attend.attention
        for rank in CUTS:
            attend.attention = partial(truncated, rank=rank)
            found[f"cut {rank}"] = right(model, asked, answers)
        attend.attention = whole
    return found | attention_cost(model, *(z[:1] for z in asked))


def right(model: nn.Module, asked: Sequence[Tensor], answers: Tensor) -> float:
    """Return the share of right answers."""
    with torch.no_grad():
        return float((model(*asked).argmax(1) == answers).float().mean())


COLUMNS = [("accuracy", "right, %", 100, 1)]
EXPERIMENTS = {
    "groups": deciding(
        "tokens in groups, of which one member answers",
        look_up,
        list(ARMS),
        COLUMNS,
        steps=(200, 400, 800),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter11", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
