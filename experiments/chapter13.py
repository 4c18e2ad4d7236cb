"""Train what chapter 13 predicts: ``python -m experiments.chapter13``.

A quarter of an hour on one thread of a CPU. The models are those of the chapter, which trains some
of these runs again. What has finished is not repeated. The results go to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from derived_attention import (
    LassoAttention,
    MultiheadAttention,
    PositionOnlyAttention,
    RidgeAttention,
    identity_attention,
    uniform_attention,
)
from derived_book import seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

M, D, WIDTH = 32, 16, 4  # keys, their dimensions, features of a value
Layer = Callable[..., nn.Module]  # of the width D


def pose(sets: int, summed: int, device: str = "cpu") -> tuple[tuple[Tensor, ...], Tensor]:
    """Draw (queries, keys, values) and the answers, all (sets, 32, ...).

    A query is the sum of so many keys of its set, its answer the sum of their values.
    """
    keys = torch.randn(sets, M, D, device=device)
    values = torch.randn(sets, M, WIDTH, device=device)
    chosen = torch.rand(sets, M, M, device=device).argsort(-1)[..., :summed]
    c = torch.zeros(sets, M, M, device=device).scatter_(-1, chosen, 1)
    return (c @ keys, keys, values), c @ values


class Sums(nn.Module):
    """One layer between two linear maps, of the values and of the answers."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.widen, self.attend = nn.Linear(WIDTH, D), layer(D, 1)
        self.read = nn.Linear(D, WIDTH)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return answers (B, M, WIDTH)."""
        return self.read(self.mixed(q, k, v))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what is read, (B, M, D)."""
        h, _ = self.attend(q, k, self.widen(v), need_weights=False)
        return h


# --- what is trained ------------------------------------------------------------------------------

lasso = partial(LassoAttention, lam=0.1, iterations=5)
LONG = 20  # steps of the iteration, by which it has nearly converged
LAYERS: dict[str, Layer] = {
    "lasso, ρ = 10": partial(lasso, rho=10.0),
    "lasso, ρ = 1": partial(lasso, rho=1.0),
    "lasso, ρ = 1, 20 steps": partial(lasso, rho=1.0, iterations=LONG),
    "ridge": partial(RidgeAttention, lam=0.1),
    "softmax": MultiheadAttention,
    "uniform": partial(MultiheadAttention, attention=uniform_attention),
    "alone": partial(MultiheadAttention, attention=identity_attention),
    "position only": partial(PositionOnlyAttention, length=M),
}
ARMS = {name: (layer, 3) for name, layer in LAYERS.items()}
ARMS |= {f"{name}, one key": (LAYERS[name], 1) for name in ("softmax", "lasso, ρ = 1")}
bare = partial(lasso, projected=False, cross=True)  # the paper's layer has no weights
BARE = {
    "ρ = 10": (partial(bare, rho=10.0), 3),
    "ρ = 1": (partial(bare, rho=1.0), 3),
    "ρ = 1, 20 steps": (partial(bare, rho=1.0, iterations=LONG), 3),
}


def fitted(model: Sums, summed: int, device: str) -> float:
    """Return the share explained if only a linear map of what is read is fitted."""
    with torch.no_grad():
        (X, y), (Z, true) = (
            (model.mixed(*asked).flatten(0, 1), answers.flatten(0, 1))
            for asked, answers in (pose(256, summed, device), pose(512, summed, device))
        )
        X, Z = (torch.cat([H, torch.ones_like(H[:, :1])], 1).double() for H in (X, Z))
        gram = X.mT @ X + 1e-6 * len(X) * torch.eye(X.shape[1]).to(X)
        map_ = torch.linalg.solve(gram, X.mT @ y.double())
        return float(1 - (Z @ map_ - true).square().mean() / true.var())


def sums(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train a `Sums`; return the share explained, untrained too, and the sizes of projections."""
    seed_everything(seed)
    layer, summed = (ARMS | BARE)[arm]
    model = Sums(layer).to(device)
    found = {"untrained": fitted(model, summed, device)}
    optimiser = torch.optim.Adam(model.train().parameters(), lr=lr)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 30, 1 - step / steps)
        asked, answers = pose(16, summed, device)
        loss = mse_loss(model(*asked), answers)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    asked, answers = pose(512, summed, device)
    with torch.no_grad():
        found["explained"] = float(1 - mse_loss(model.eval()(*asked), answers) / answers.var())
    weights = dict(model.attend.named_parameters()).get("in_proj_weight")
    if weights is not None:
        W_q, W_k, _ = weights.detach().chunk(3)
        found |= {"a": float(W_k.norm() / D**0.5), "b": float(W_q.norm() / D**0.5)}
    return found | attention_cost(model, *(z[:1] for z in asked))


COLUMNS = [("explained", "variance explained, %", 100, 1)]
EXPERIMENTS = {
    "bare": deciding(
        "sums of three keys, layers without weights",
        sums,
        list(BARE),
        COLUMNS,
        steps=(100, 200, 400),
    ),
    "sums": deciding(
        "sums of keys, layers with projections",
        sums,
        list(ARMS),
        COLUMNS,
        steps=(400, 800, 1600),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter13", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
