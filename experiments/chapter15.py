"""Train what chapter 15 predicts: ``python -m experiments.chapter15``.

Half an hour on one thread of a CPU. All arms share one layer, `Memory`; they differ in what it
keeps of the past. What has finished is not repeated. The results go to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from derived_book.runtime import seed_everything
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

NAMES, WRITTEN, VALUES = 64, 16, 32  # of the overwritten names
CUPS = torch.tensor([[1, 0, 2], [2, 1, 0], [0, 2, 1]])  # where each of three swaps sends a ball
STEP_SIZES = {"β < 1": 1.0, "β < 2": 2.0, "β < 2, steep": 2.0, "delta": 1.0, "gated delta": 1.0}
CLAMPED, GAIN = "β ≤ 2, clamped", {"β < 2, steep": 3.0}  # the slopes at 0 are then equal, 1.5
ERASING = (*STEP_SIZES, CLAMPED)
GATED = ("gated linear", "gated delta")
UNIT = (*ERASING, "linear", "gated linear", "ridge")  # of queries and keys with length 1


class Memory(nn.Module):
    """Queries read what an arm keeps of keys and values; `forward` returns (B, n, dim)."""

    def __init__(self, arm: str, dim: int, heads: int, width: int, length: int = 256) -> None:
        super().__init__()
        self.arm, self.heads = arm, heads
        self.q, self.k, self.v = (nn.Linear(dim, heads * width) for _ in range(3))
        self.beta, self.gate = nn.Linear(dim, heads), nn.Linear(dim, heads)
        nn.init.constant_(self.gate.bias, 3.0)  # a start at a decay of 0.95
        self.places = nn.Parameter(torch.zeros(heads, length + 1))
        self.slope, self.ridge = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.out = nn.Linear(heads * width, dim)

    def forward(self, asked: Tensor, x: Tensor, causal: bool) -> Tensor:
        """Read for `asked` (B, n, dim) what was kept of `x` (B, N, dim)."""
        q, k, v = (
            f(z).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, z in ((self.q, asked), (self.k, x), (self.v, x))
        )
        if self.arm in UNIT:
            q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        n, N = q.shape[-2], k.shape[-2]
        read = torch.arange(n) if causal else torch.full((n,), N - 1)  # when a query reads
        age = read[:, None] - torch.arange(N)
        if self.arm in UNIT:
            h = self.state(q, k, v, x, age, read)
        else:
            h = self.weights(q, k, age, causal) @ v
        return self.out(h.transpose(1, 2).flatten(-2))

    def weights(self, q: Tensor, k: Tensor, age: Tensor, causal: bool) -> Tensor:
        """Return the weights (B, H, n, N) of softmax attention or of a control."""
        if self.arm == "alone":
            return torch.eye(*age.shape).expand(*q.shape[:2], -1, -1)
        s = q @ k.mT * q.shape[-1] ** -0.5 * (self.arm not in ("uniform", "position only"))
        if self.arm == "softmax with age":
            s = s - self.slope[:, None, None] * age
        if self.arm == "position only":
            s = s + self.places[:, age.clamp(min=0)]
        return s.masked_fill(age < 0, -torch.inf).softmax(-1) if causal else s.softmax(-1)

    def state(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, age: Tensor, read: Tensor
    ) -> Tensor:
        """Read a state: its prices C, and the scores of the queries with the decay since."""
        N = k.shape[-2]
        level = torch.zeros(*k.shape[:-1])  # log of the decay up to each token (B, H, N)
        if self.arm in GATED:
            level = logsigmoid(self.gate(x)).transpose(1, 2).cumsum(-1)
        C = v
        if self.arm == "ridge":
            C = torch.linalg.solve(k @ k.mT + self.ridge.exp()[:, None, None] * torch.eye(N), v)
        if self.arm in ERASING:
            beta = self.steps(x)[..., None]
            below = torch.ones(N, N).tril(-1)
            ratio = (level[..., :, None] - level[..., None, :]).masked_fill(below == 0, 0).exp()
            A = torch.eye(N) + beta * (k @ k.mT) * ratio * below
            C = torch.linalg.solve_triangular(A, beta * v, upper=False, unitriangular=True)
        since = level[..., read, None] - level[..., None, :]
        seen = age >= 0
        return (q @ k.mT * since.masked_fill(~seen, 0).exp() * seen) @ C

    def steps(self, x: Tensor) -> Tensor:
        """Return the step sizes beta (B, H, N)."""
        free = self.beta(x).transpose(1, 2)
        if self.arm == CLAMPED:
            return (1 + 1.5 * free.tanh()).clamp(0, 2)
        return STEP_SIZES[self.arm] * (GAIN.get(self.arm, 1.0) * free).sigmoid()


# --- the tasks ------------------------------------------------------------------------------------


def pose(sets: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw the names written (B, 32), their values, the names asked for (B, 16), their newest."""
    names = torch.rand(sets, NAMES).argsort(-1)[:, :WRITTEN].repeat(1, 2)
    old = torch.randint(VALUES, (sets, WRITTEN))
    new = (old + torch.randint(1, VALUES, (sets, WRITTEN))) % VALUES  # another value
    values = torch.cat([old, new], 1)
    order = torch.rand(sets, 2 * WRITTEN).argsort(-1)
    names, values = names.gather(1, order), values.gather(1, order)
    asked = names.gather(1, torch.rand(sets, 2 * WRITTEN).argsort(-1))[:, :WRITTEN]
    same = asked[..., None] == names[:, None]
    newest = (same * torch.arange(1, 2 * WRITTEN + 1)).argmax(-1)
    return names, values, asked, values.gather(1, newest)


class Lookup(nn.Module):
    """Questions read a memory of records; a linear map reads what it returns."""

    def __init__(self, arm: str, dim: int = 64, width: int = 16) -> None:
        super().__init__()
        self.name, self.value = nn.Embedding(NAMES, dim), nn.Embedding(VALUES, dim)
        self.question = nn.Embedding(NAMES, dim)
        self.memory = Memory(arm, dim, 1, width)
        self.read = nn.Linear(dim, VALUES)

    def forward(self, names: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return logits (B, values, questions)."""
        x = self.name(names) + self.value(values)
        return self.read(self.memory(self.question(asked), x, causal=False)).mT


def parities(sets: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw bits (B, length), and the parity of each beginning."""
    bits = torch.randint(2, (sets, length))
    return bits, bits.cumsum(1) % 2


def shells(sets: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw a first cup and swaps (B, 1 + length), and the cup with the ball after each."""
    first, swaps = torch.randint(3, (sets, 1)), torch.randint(3, (sets, length))
    where = [first[:, 0]]
    for swap in swaps.T:
        where.append(CUPS[swap, where[-1]])
    return torch.cat([first, 3 + swaps], 1), torch.stack(where, 1)


class Reader(nn.Module):
    """One causal layer, and a map with one hidden layer that reads it at every token."""

    def __init__(self, arm: str, tokens: int, answers: int, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, dim)
        nn.init.normal_(self.embed.weight, std=0.5)  # a clamp is flat far from 0
        self.memory = Memory(arm, dim, 2, 8)
        self.read = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, answers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, answers, N)."""
        x = self.embed(tokens)
        return self.read(x + self.memory(x, x, causal=True)).mT


def learn(arm: str, seed: int, steps: int, lr: float, device: str, task: str) -> dict[str, float]:
    """Train one arm; return its accuracy on new sets: of names, or near and far."""
    seed_everything(seed)
    draw, model = shells, Reader(arm, 6, 3)
    if task == "overwritten":
        model = Lookup(arm)
    elif task == "parity":
        draw, model = parities, Reader(arm, 2, 2)
    optimiser = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 30, 1 - step / steps)
        *asked, answers = pose(32) if task == "overwritten" else draw(32, 32)
        loss = cross_entropy(model(*asked), answers)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    with torch.no_grad():
        *asked, answers = pose(500) if task == "overwritten" else draw(100, 256)
        right = (model(*asked).argmax(1) == answers).float()
    if task == "overwritten":
        return {"accuracy": float(right.mean())}
    first = right.shape[1] - 256  # of the bits or swaps
    near, far = right[:, first + 24 : first + 32], right[:, first + 224 :]
    return {"far": float(far.mean()), "near": float(near.mean())}


CONTROLS = ["uniform", "alone", "position only"]
ORDER_BLIND = ["softmax", "linear", "ridge"]
STEPS = ["β < 1", "β < 2", "β < 2, steep", CLAMPED]
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FAR = [("far", "places 225–256, right, %", 100, 1), ("near", "places 25–32, right, %", 100, 1)]
EXPERIMENTS = {
    "overwritten": deciding(
        "names that are written twice",
        learn,
        [*ORDER_BLIND, "softmax with age", "gated linear", "delta", "gated delta", *CONTROLS],
        [("accuracy", "right, %", 100, 1)],
        steps=(150, 300, 600, 1200),
        task="overwritten",
    ),
    "cups": deciding(
        "three cups and one ball",
        learn,
        [*STEPS, "softmax", *CONTROLS],
        FAR,
        steps=(400, 800, 1600),
        rates=RATES,
        task="cups",
    ),
    "parity": deciding(
        "the parity of bits",
        learn,
        [*STEPS, "gated linear", "softmax", *CONTROLS],
        FAR,
        steps=(150, 300, 600),
        rates=RATES,
        task="parity",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter15", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
