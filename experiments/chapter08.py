"""What cheap attentions recall, also with coarse heads: ``python -m experiments.chapter08``.

A quarter of an hour on one thread of a CPU. Each arm is one layer that is asked for values, or for
means of two neighbouring values, and chapter 8 predicts the largest share of their variance that
it can return. The results go to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention import (
    FMMAttention,
    LinformerAttention,
    LunaAttention,
    MRAAttention,
    MultiheadAttention,
    PerformerAttention,
    PositionOnlyAttention,
    identity_attention,
    multiresolution_layer,
    uniform_attention,
)
from derived_book import seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

PAIRS, DIM, HEADS, BATCH, BLOCK = 32, 32, 2, 16, 4
TEST_SEED, TESTED = 2**31, 512  # of the sequences of an evaluation; how many

Layer = Callable[..., nn.Module]
CHEAP: dict[str, Layer] = {
    "softmax": MultiheadAttention,
    "Linformer, r = 8": partial(LinformerAttention, length=PAIRS, kept=8),
    "Linformer, r = 16": partial(LinformerAttention, length=PAIRS, kept=16),
    "Luna, r = 8": partial(LunaAttention, length=8),
    "Luna, r = 16": partial(LunaAttention, length=16),
    "Performer, r = 8": partial(PerformerAttention, features=8),
    "Performer, r = 16": partial(PerformerAttention, features=16),
    "FMM, w = 2": partial(FMMAttention, window=2),
    "FMM, w = 6": partial(FMMAttention, window=6),
    "MRA-2-s, 1 block": partial(MRAAttention, block=BLOCK, kept=1, sparse=True),
    "MRA-2, 1 block": partial(MRAAttention, block=BLOCK, kept=1),
    "MRA-2, 2 blocks": partial(MRAAttention, block=BLOCK, kept=2),
}
CONTROLS: dict[str, Layer] = {
    "uniform": partial(MultiheadAttention, attention=uniform_attention),
    "alone": partial(MultiheadAttention, attention=identity_attention),
    "position only": partial(PositionOnlyAttention, length=PAIRS),
}


def coarse(layer: Layer, *scales: int) -> Layer:
    """Give a layer's heads scales: "Mrs" + its name."""
    kind, own = (layer.func, layer.keywords) if isinstance(layer, partial) else (layer, {})
    return partial(multiresolution_layer(kind), **own, scales=scales)


SMALL = [name for name in CHEAP if name.endswith(("softmax", "r = 8", "w = 2", "MRA-2, 1 block"))]
MRS = {f"Mrs + {name}": coarse(CHEAP[name], 2, 2) for name in SMALL}
MRS |= {
    "Mrs + softmax, scale 4": coarse(MultiheadAttention, 4, 4),
    "Mrs + softmax, scales 1 and 2": coarse(MultiheadAttention, 1, 2),
}
ARMS = CHEAP | MRS | CONTROLS


class Recall(nn.Module):
    """One layer of attention, from questions to pairs: queries and keys know no values."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(PAIRS, DIM)
        self.attend = layer(DIM, HEADS, bias=False)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return answers (B, N, dim), from keys and questions (B, N) and values (B, N, dim)."""
        return self.attend(self.embed(asked), self.embed(keys), values, need_weights=False)[0]


def draw(batch: int, window: int) -> tuple[Tensor, ...]:
    """Return keys (B, N), values (B, N, dim), questions, and what they ask for (B, N, dim).

    Windows of so many neighbours share a key, and so many neighbours ask for the mean of a window.
    """
    keys, asked = torch.rand(2, batch, PAIRS // window).argsort(-1)
    values = torch.randn(batch, PAIRS, DIM)
    means = values.unflatten(1, (-1, window)).mean(2)
    wanted = means.take_along_dim(keys.argsort(1).gather(1, asked)[..., None], 1)
    keys, asked, wanted = (x.repeat_interleave(window, 1) for x in (keys, asked, wanted))
    return keys, values, asked, wanted


def train(model: Recall, window: int, steps: int, lr: float) -> None:
    """Train in place, by the mean squared error."""
    optimiser = torch.optim.Adam(model.parameters())
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, steps, pct_start=0.1)
    for _ in range(steps):
        *seen, wanted = draw(BATCH, window)
        loss = (model(*seen) - wanted).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        plan.step()


@torch.no_grad()
def recalled(model: Recall, window: int) -> float:
    """Return the share of the variance of what is asked for that the layer returns."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TEST_SEED)
        *seen, wanted = draw(TESTED, window)
    return 1 - ((model(*seen) - wanted).square().sum() / wanted.square().sum()).item()


def recall(
    arm: str, seed: int, steps: int, lr: float, *, window: int, device: str
) -> dict[str, float]:
    """Train one layer; return the share of what is asked for that it recalls."""
    if device != "cpu":
        raise ValueError(
            f"device is {device!r}; expected 'cpu', on which these small runs are fast"
        )
    seed_everything(seed)
    model = Recall(ARMS[arm])
    train(model, window, steps, lr)
    return {"recalled": recalled(model, window)} | attention_cost(model, *draw(1, window)[:3])


COARSE_ARMS = [*SMALL, *(name for name in MRS if not name.endswith("1 and 2")), *CONTROLS]
COLUMNS = [("recalled", "share recalled, %", 100, 1)]
STEPS = (300, 600)
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "fine": deciding(
        "the share of single values that one layer recalls",
        recall,
        list(ARMS),
        COLUMNS,
        steps=STEPS,
        window=1,
    ),
    "coarse": deciding(
        "the share of means of two values that one layer recalls",
        recall,
        COARSE_ARMS,
        COLUMNS,
        steps=STEPS,
        window=2,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter08", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
