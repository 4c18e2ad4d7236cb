"""Train every mechanism on what a layer may be needed for: ``python -m experiments.chapter17``.

About five hours on one thread of a CPU. All arms share one model, `Frame`, of one layer; what a
mechanism takes of its own is what the registry says for the length of the task. A new entry of the
registry is a new row. What has finished is not repeated. The results go to the records,
from where chapter 17 reads them. ``python -m experiments.chapter17 cost`` measures what a step of
training takes at the lengths of the tasks: on a machine that does nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from derived_attention.common.files import write_atomically
from derived_attention.registry import MECHANISMS
from derived_attention.softmax.controls import (
    PositionOnlyAttention,
    identity_attention,
    uniform_attention,
)
from derived_book.runtime import seed_everything
from derived_book.tasks.model import Config, PreNormLayer
from derived_book.training import measure
from derived_book.training.recorded import FOLDER, SCHEMA
from experiments.protocol import command, deciding

NAMES, VALUES, MOST = 64, 32, 6  # MOST: the largest count that is told apart
NEAR, FAR = 2, 12  # how many tokens to the left
DIM, HEADS, HIDDEN = 64, 4, 128
CONTROLS = ["uniform", "alone", "position only"]


class Frame(nn.Module):
    """One transformer layer over N tokens that have a name, a value and a place each."""

    def __init__(self, arm: str, length: int, answers: int) -> None:
        super().__init__()
        self.name, self.value = nn.Embedding(NAMES + 1, DIM), nn.Embedding(VALUES + 1, DIM)
        self.places = nn.Parameter(torch.empty(length, DIM).normal_(std=0.5))
        own = Config(dim=DIM, heads=HEADS, hidden=HIDDEN, dropout=0.0, attention=plug(arm, length))
        self.layer, self.norm = PreNormLayer(own), nn.LayerNorm(DIM)
        self.read = nn.Linear(DIM, answers)

    def forward(self, names: Tensor, values: Tensor) -> Tensor:
        """Return logits (B, N, answers), from names and values (B, N)."""
        x = self.name(names) + self.value(values) + self.places
        return self.read(self.norm(self.layer(x, None)))


def plug(arm: str, length: int) -> Callable[..., object]:
    """Return the attention of an arm: of the registry, with its sample options, or a control."""
    if arm == "position only":
        return partial(PositionOnlyAttention, length=length)
    controls = {"uniform": uniform_attention, "alone": identity_attention}
    return controls[arm] if arm in controls else MECHANISMS[arm].plug(length, HEADS, DIM // HEADS)


# --- what a layer may be needed for ---------------------------------------------------------------
# Each draws names and values (B, N) and answers (B, N, ...), which are -1 where nothing is asked.


def ask(names: Tensor, values: Tensor, asked: Tensor, answers: Tensor) -> tuple[Tensor, ...]:
    """Put questions, names whose value is not given, behind the records."""
    blank, silent = torch.full_like(asked, VALUES), torch.full_like(names, -1)
    return (
        torch.cat([names, asked], 1),
        torch.cat([values, blank], 1),
        torch.cat([silent, answers], 1)[..., None],
    )


def look_up(sets: int, length: int) -> tuple[Tensor, ...]:
    """Which value has this name? Of 64 names 32 have a record, anywhere; all other tokens ask."""
    known, values = torch.rand(sets, NAMES).argsort(1)[:, :32], torch.randint(VALUES, (sets, 32))
    which = torch.randint(32, (sets, length))
    where = torch.rand(sets, length).argsort(1)[:, :32]
    names = known.gather(1, which).scatter(1, where, known)
    given = torch.full_like(names, VALUES).scatter(1, where, values)
    answers = values.gather(1, which).scatter(1, where, -1)
    return names, given, answers[..., None]


def newest(sets: int, length: int) -> tuple[Tensor, ...]:
    """Which value did this name get last? Each is written twice, with different values."""
    once = torch.rand(sets, NAMES).argsort(1)[:, : length // 3]
    old = torch.randint(VALUES, once.shape)
    new = (old + torch.randint(1, VALUES, once.shape)) % VALUES
    order = torch.rand(sets, 2 * once.shape[1]).argsort(1)
    written = once.repeat(1, 2).gather(1, order)
    values = torch.cat([old, new], 1).gather(1, order)
    asked = once.gather(1, torch.rand(once.shape).argsort(1))
    same = asked[..., None] == written[:, None]
    last = (same * torch.arange(1, written.shape[1] + 1)).argmax(-1)
    return ask(written, values, asked, values.gather(1, last))


def count(sets: int, length: int) -> tuple[Tensor, ...]:
    """How often does this name stand there? Records of twelve names; eight names are asked for."""
    twelve = torch.rand(sets, NAMES).argsort(1)[:, :12]
    written = twelve.gather(1, torch.randint(12, (sets, length - 8)))
    asked = twelve[:, :8]
    times = (asked[..., None] == written[:, None]).sum(-1).clamp(max=MOST)
    return ask(written, torch.randint(VALUES, written.shape), asked, times)


def places(sets: int, length: int) -> tuple[Tensor, ...]:
    """Which value stands so many tokens to the left, a few, and many? All tokens ask."""
    values = torch.randint(VALUES, (sets, length))
    answers = torch.stack([values.roll(by, 1) for by in (NEAR, FAR)], -1)
    answers[:, :NEAR], answers[:, :FAR, 1] = -1, -1
    return torch.full_like(values, NAMES), values, answers


# how it is drawn, tokens, classes of an answer, the scores
TASKS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], int, int, tuple[str, ...]]] = {
    "look_up": (look_up, 64, VALUES, ("right",)),
    "newest": (newest, 48, VALUES, ("right",)),
    "count": (count, 32, MOST + 1, ("right",)),
    "places": (places, 32, VALUES, ("near", "far")),
}
SETS, LONG, LONG_STEPS = 16, 1024, 64


def train(model: nn.Module, draw: Callable[[], tuple[Tensor, ...]], steps: int, lr: float) -> None:
    """Train in place."""
    optimiser = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 30, 1 - step / steps)
        *tokens, answers = draw()
        logits = model(*tokens).unflatten(-1, (answers.shape[-1], -1))
        loss = cross_entropy(logits.flatten(0, 2), answers.flatten(), ignore_index=-1)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()


@torch.no_grad()
def right(model: nn.Module, draw: Callable[[], tuple[Tensor, ...]]) -> list[float]:
    """Return the share of right answers to new questions, for each that a token asks."""
    found, asked = [], []
    for _ in range(16):
        *tokens, answers = draw()
        guess = model(*tokens).unflatten(-1, (answers.shape[-1], -1)).argmax(-1)
        found.append((guess == answers).sum((0, 1)))
        asked.append((answers >= 0).sum((0, 1)))
    return (torch.stack(found).sum(0) / torch.stack(asked).sum(0)).tolist()


def learn(arm: str, seed: int, steps: int, lr: float, device: str, task: str) -> dict[str, float]:
    """Train one arm on one task; return the share of right answers to new questions.

    For *look_up* the model then goes on, for 64 steps of one sequence, with 1024 tokens.
    """
    draw, length, classes, names = TASKS[task]
    seed_everything(seed)
    model = Frame(arm, length, classes * len(names))
    train(model, partial(draw, SETS, length), steps, lr)
    scores = dict(zip(names, right(model, partial(draw, SETS, length)), strict=True))
    if len(names) > 1:
        scores["both"] = sum(scores.values()) / len(names)
    if task == "look_up":
        longer = carried(model, Frame(arm, LONG, classes))
        train(longer, partial(draw, 1, LONG), LONG_STEPS, lr)
        scores["long"] = right(longer, partial(draw, 1, LONG))[0]
    size = sum(p.numel() for p in model.layer.attention.parameters())
    return scores | {"size": size}


def carried(model: nn.Module, longer: nn.Module) -> nn.Module:
    """Give what `model` has learned to a model for more tokens, where shapes agree."""
    known, fresh = model.state_dict(), longer.state_dict()
    longer.load_state_dict(
        {key: known[key] if known[key].shape == x.shape else x for key, x in fresh.items()}
    )
    return longer


ARMS = [*MECHANISMS, *CONTROLS]
RIGHT = ("right", "right, %", 100, 1)
SIZE = ("size", "parameters of the attention", 1, 0)
EXPERIMENTS = {
    "look_up": deciding(
        "a value by its name, among 64 tokens and among 1024",
        learn,
        ARMS,
        [RIGHT, ("long", "right among 1024 tokens, %", 100, 1), SIZE],
        steps=(400, 800),
        seeds=8,
        task="look_up",
    ),
    "newest": deciding(
        "the newest of two values of a name",
        learn,
        ARMS,
        [RIGHT, SIZE],
        steps=(500, 1000),
        seeds=8,
        task="newest",
    ),
    "count": deciding(
        "how often a name is written",
        learn,
        ["softmax", "mgk", "sink", "linear", "delta"],
        [RIGHT, SIZE],
        steps=(1000, 2000),
        rates=(3e-3, 6e-3),
        seeds=8,
        tuned_at_end=True,
        task="count",
    ),
    # The largest rate is chosen here, at which runs collapse after they have learned.
    "count_fast": deciding(
        "how often a name is written, at rates that let runs collapse",
        learn,
        ["softmax", *CONTROLS],
        [RIGHT, SIZE],
        steps=(1000, 2000),
        seeds=8,
        task="count",
    ),
    "places": deciding(
        "what stands 12 and 2 tokens to the left",
        learn,
        ARMS,
        [
            ("both", "right, both, %", 100, 1),
            ("far", "right, 12 to the left, %", 100, 1),
            ("near", "right, 2 to the left, %", 100, 1),
            SIZE,
        ],
        steps=(400, 800, 1600),
        seeds=5,
        task="places",
    ),
}


# --- what a step takes at these lengths -----------------------------------------------------------

BATCHES = {64: SETS, LONG: 1}  # sequences of a step, by their length


def step(arm: str, length: int) -> Callable[[], None]:
    """Return the attention layer of an arm, forward and backward, as in a step of training."""
    torch.manual_seed(0)
    layer = Frame(arm, length, VALUES).layer.attention
    x = torch.randn(BATCHES[length], length, DIM, requires_grad=True)

    def call() -> None:
        layer(x, x, x, need_weights=False)[0].sum().backward()

    return call


def cost(rounds: int = 15) -> dict[str, Any]:
    """Measure time and memory of all attention layers side by side, in rounds, on one thread."""
    rows = []
    for length in BATCHES:
        calls = {arm: step(arm, length) for arm in ARMS}
        times = measure.compare(calls, repeats=rounds, device="cpu")
        for arm, time in times.items():
            size = measure.peak_bytes(calls[arm], device="cpu")
            own = {"seconds": time.median, "ratio": time.ratio, "bytes": size}
            rows.append({"arm": arm, "seed": 0, "length": length} | own)
    return {
        "schema": SCHEMA,
        "title": "Time and memory of an attention layer in a step of training",
        "device": "cpu",
        "machine": measure.machine(),
        "settings": {"heads": HEADS, "dim": DIM, "sequences": BATCHES, "rounds": rounds},
        "columns": [("ratio", "time, softmax = 1", 1, 2), ("bytes", "MiB", 2**-20, 1)],
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all; or measure the costs."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["cost"]:
        torch.set_num_threads(1)
        written = json.dumps(cost(), indent=1) + "\n"
        write_atomically(FOLDER / "chapter17_cost_cpu.json", written.encode())
        return 0
    return command("chapter17", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
