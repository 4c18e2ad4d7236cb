"""Train what chapter 16 predicts: ``python -m experiments.chapter16``.

Half an hour on one thread of a CPU. One head looks values up by their names, and the arms differ
in what is kept of the past, or in how it is weighted. What has finished is not repeated. The
results go to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from derived_book.runtime import seed_everything
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

PAIRS, TESTED = 12, 2000  # of a sequence; sequences
WIDTH, SYMBOLS, TAU = 16, 32, 2.0  # of `absent`: features of names and values; names; common part
LATENT_NAMES, LATENT_WIDTH = 24, 12  # of `rank`: names, and numbers of a value


# --- questions without an answer ------------------------------------------------------------------


def pose(sets: int) -> tuple[Tensor, ...]:
    """Draw names (B, N), values (B, N, Dv) with a common part, questions (B, N) and answers.

    Each question has an answer with probability ½: else the name is not there, and the answer 0.
    """
    order = torch.rand(sets, SYMBOLS).argsort(1)
    names, others = order[:, :PAIRS], order[:, PAIRS : 2 * PAIRS]
    common = TAU * torch.randn(sets, 1, WIDTH)
    values = common + torch.randn(sets, PAIRS, WIDTH)
    turned = torch.rand(sets, PAIRS).argsort(1)
    there = torch.rand(sets, PAIRS) < 0.5
    asked = torch.where(there, names.gather(1, turned), others)
    answers = values.take_along_dim(turned[..., None], 1) * there[..., None]
    return names, values, asked, answers


class Reader(nn.Module):
    """One head: names give queries and keys, and a linear map reads the sum of values."""

    def __init__(self, arm: str) -> None:
        super().__init__()
        self.arm = arm
        self.key, self.query = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(SYMBOLS, WIDTH)
        self.others = nn.ModuleList(nn.Embedding(SYMBOLS, WIDTH) for _ in range(2))
        self.gate = nn.Embedding(SYMBOLS, WIDTH)  # of the output, by the query
        self.bias, self.lam = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(0.5))
        self.places = nn.Parameter(torch.zeros(PAIRS, PAIRS))
        self.read = nn.Linear(WIDTH, WIDTH)

    def weights(self, asked: Tensor, names: Tensor) -> Tensor:
        """Return the weights (B, N, N) of the arm."""
        q, k = self.query(asked), self.key(names)
        s = q @ k.mT * WIDTH**-0.5
        if self.arm == "alone":
            return torch.eye(PAIRS).expand_as(s)
        if self.arm in ("uniform", "position only"):
            s = 0 * s + (self.places if self.arm == "position only" else 0)
        if self.arm in ("sink", "off by one"):
            bias = self.bias if self.arm == "sink" else 0 * self.bias
            return torch.cat([s, bias.expand_as(s[..., :1])], -1).softmax(-1)[..., :-1]
        if self.arm == "ridge":
            G = k.mT @ k + self.bias.exp() * torch.eye(WIDTH)
            return torch.linalg.solve(G, q.mT).mT @ k.mT
        if self.arm == "differential":
            other_q, other_k = (f(z) for f, z in zip(self.others, (asked, names), strict=True))
            return s.softmax(-1) - self.lam * (other_q @ other_k.mT * WIDTH**-0.5).softmax(-1)
        return s.softmax(-1)

    def forward(self, names: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return answers (B, N, Dv)."""
        answer = self.read(self.weights(asked, names) @ values)
        if self.arm == "softmax, gated output":
            answer = answer * 2 * self.gate(asked).sigmoid()
        return answer


# --- what a latent cache of r numbers holds -------------------------------------------------------


def pairs(sets: int) -> tuple[Tensor, ...]:
    """Draw names (B, N), values (B, N, Dv), questions (B, N), each asked for once, and answers."""
    names = torch.rand(sets, LATENT_NAMES).argsort(1)[:, :PAIRS]
    values = torch.randn(sets, PAIRS, LATENT_WIDTH)
    turned = torch.rand(sets, PAIRS).argsort(1)
    answers = values.take_along_dim(turned[..., None], 1)
    return names, values, names.gather(1, turned), answers


class Latent(nn.Module):
    """A cache of r numbers a token, of which keys and values are made; or a cache in two parts.

    The query is absorbed: it meets the cached numbers themselves, and a linear map reads them.
    """

    def __init__(self, arm: str) -> None:
        super().__init__()
        self.arm = arm
        split = arm == "6 + 6"
        r = 6 if split else int(arm.removeprefix("r = ")) if arm.startswith("r") else WIDTH
        self.query, self.name = nn.Embedding(LATENT_NAMES, r), nn.Embedding(LATENT_NAMES, r)
        self.down = nn.Linear(LATENT_WIDTH, r, bias=False)
        self.split, self.places = split, nn.Parameter(torch.zeros(PAIRS, PAIRS))
        self.sharpness = nn.Parameter(torch.tensor(3.0))  # names on a circle need large scores
        for table in (self.query, self.name):
            nn.init.normal_(table.weight, std=0.3)
        self.read = nn.Linear(r, LATENT_WIDTH)

    def forward(self, names: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return answers (B, N, Dv)."""
        name, value = self.name(names), self.down(values)
        cache = (name, value) if self.split else (name + value,) * 2  # (B, N, r): keys, values
        s = self.sharpness.exp() * self.query(asked) @ cache[0].mT
        if self.arm == "alone":
            return self.read(cache[1])
        if self.arm in ("uniform", "position only"):
            s = 0 * s + (self.places if self.arm == "position only" else 0)
        return self.read(s.softmax(-1) @ cache[1])


def look_up(
    arm: str, seed: int, steps: int, lr: float, device: str, experiment: str
) -> dict[str, float]:
    """Train one arm; return the explained share of the answers' size, on new sequences."""
    seed_everything(seed)
    draw, model = (pose, Reader(arm)) if experiment == "absent" else (pairs, Latent(arm))
    model.to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 30, 1 - step / steps)
        *given, answers = draw(64)
        loss = (model(*given) - answers).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        *given, answers = draw(TESTED)
        error = (model(*given) - answers).square().sum() / answers.square().sum()
    return {"explained": 1 - float(error)}


CONTROLS = ["uniform", "alone", "position only"]
ABSENT = ["softmax", "softmax, gated output", "differential", "sink", "off by one", "ridge"]
EXPLAINED = [("explained", "explained, %", 100, 1)]
EXPERIMENTS = {
    "absent": deciding(
        "questions of which half have no answer",
        look_up,
        [*ABSENT, *CONTROLS],
        EXPLAINED,
        steps=(250, 500, 1000, 2000),
        experiment="absent",
    ),
    "rank": deciding(
        "a cache of r numbers for each token",
        look_up,
        [*(f"r = {r}" for r in (2, 4, 6, 8, 12, 14, 16)), "6 + 6", *CONTROLS],
        EXPLAINED,
        steps=(500, 1000, 2000),
        experiment="rank",
    ),
    "rank_longer": deciding(
        "the same with eight times as many steps",
        look_up,
        [f"r = {r}" for r in (6, 8, 12, 14)],
        EXPLAINED,
        steps=(4000, 8000),
        rates=(3e-3, 1e-2, 3e-2),
        seeds=5,
        tuned_at_end=True,
        experiment="rank",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter16", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
