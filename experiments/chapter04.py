"""How much of the values a layer recalls, for chapter 4: ``python -m experiments.chapter04``.

A quarter of an hour on one thread of a CPU. Each arm is one layer of attention that is asked for
every value of a sequence, and the chapter predicts the largest share of their variance that it can
return. The results go to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from derived_attention import (
    DeltaAttention,
    MultiheadAttention,
    PositionOnlyAttention,
    RidgeAttention,
    attention_weights,
    identity_attention,
    linear_attention,
    softmax_attention,
    uniform_attention,
    window_attention,
    window_mask,
)
from derived_attention.common.convention import mechanism
from derived_attention.common.masks import Mask
from derived_book import seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

SYMBOLS, DIM, PAIRS, BATCH, WINDOW = 64, 32, 32, 16, 4
TEST_SEED, TESTED = 2**31, 16  # of the keys of an evaluation; sequences, each asked in N orders


def quadratic(x: Tensor) -> Tensor:
    """Return all products of two coordinates, from (..., D) to (..., D²)."""
    return (x[..., :, None] * x[..., None, :]).flatten(-2)


@mechanism
def masked_after(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Attend all keys, and drop the weights outside a window: h sums over all keys."""
    near = window_mask(q.shape[-2], k.shape[-2], WINDOW)
    return (attention_weights(q, k, scale=scale) * near) @ v


def plug(attention: Callable[..., Tensor]) -> Callable[..., nn.Module]:
    """Return what makes a layer of an attention."""
    return partial(MultiheadAttention, attention=attention)


LINEAR = plug(linear_attention)
QUADRATIC = plug(partial(linear_attention, feature_map=quadratic))
SOFTMAX = plug(softmax_attention)

# the layer, its heads, the pairs of a sequence, and the width of a network after the layer
ARMS: dict[str, tuple[Callable[..., nn.Module], int, int, int]] = {
    "softmax, 4 heads": (SOFTMAX, 4, PAIRS, 0),
    "softmax, 8 heads": (SOFTMAX, 8, PAIRS, 0),
    "linear, 1 head": (LINEAR, 1, PAIRS, 0),
    "linear, 2 heads": (LINEAR, 2, PAIRS, 0),
    "linear, 4 heads": (LINEAR, 4, PAIRS, 0),
    "linear, 8 heads": (LINEAR, 8, PAIRS, 0),
    "linear, 4 heads, 16 pairs": (LINEAR, 4, 16, 0),
    "linear, 4 heads, 64 pairs": (LINEAR, 4, 64, 0),
    "linear, 4 heads, a network": (LINEAR, 4, PAIRS, 128),
    "quadratic, 4 heads": (QUADRATIC, 4, PAIRS, 0),
    "quadratic, 8 heads": (QUADRATIC, 8, PAIRS, 0),
    "ridge, 4 heads": (RidgeAttention, 4, PAIRS, 0),
    "delta, 4 heads": (DeltaAttention, 4, PAIRS, 0),
    "window, h over the window": (plug(partial(window_attention, window=WINDOW)), 4, PAIRS, 0),
    "window, h over all keys": (plug(masked_after), 4, PAIRS, 0),
    "uniform": (plug(uniform_attention), 4, PAIRS, 0),
    "alone": (plug(identity_attention), 4, PAIRS, 0),
    "position only": (partial(PositionOnlyAttention, length=PAIRS), 4, PAIRS, 0),
}


class Recall(nn.Module):
    """One layer of attention, from questions to pairs; a network reads its outputs, if asked for.

    Queries and keys are embeddings of symbols, and know nothing of the values.
    """

    def __init__(self, layer: Callable[..., nn.Module], heads: int, hidden: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, DIM)
        self.attend = layer(DIM, heads, bias=False)
        self.read = None
        if hidden:
            self.read = nn.Sequential(nn.Linear(DIM, hidden), nn.GELU(), nn.Linear(hidden, DIM))

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return answers (B, N, dim), from keys and questions (B, N) and values (B, N, dim)."""
        output = self.attend(self.embed(asked), self.embed(keys), values, need_weights=False)[0]
        return output if self.read is None else output + self.read(output)


def draw(batch: int, pairs: int) -> tuple[Tensor, ...]:
    """Return distinct keys (B, N), values (B, N, dim), questions and the order that asks for all.

    Question i asks for pair ``order[:, i]``.
    """
    keys = torch.rand(batch, SYMBOLS).argsort(1)[:, :pairs]
    values = torch.randn(batch, pairs, DIM)
    order = torch.rand(batch, pairs).argsort(1)
    return keys, values, keys.gather(1, order), order


def wanted(values: Tensor, order: Tensor) -> Tensor:
    """Return the value that each question asks for."""
    return values.take_along_dim(order[..., None], 1)


def train(model: Recall, pairs: int, steps: int, lr: float) -> None:
    """Train in place, by the mean squared error."""
    optimiser = torch.optim.Adam(model.parameters())
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, steps, pct_start=0.1)
    for _ in range(steps):
        keys, values, asked, order = draw(BATCH, pairs)
        loss = (model(keys, values, asked) - wanted(values, order)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        plan.step()


@torch.no_grad()
def recalled(model: Recall, keys: Tensor, asked: Tensor, order: Tensor) -> Tensor:
    """Return the share of the variance of random values that the layer returns, by sequence (B).

    It is the mean over all values, exactly: the answers are Σ_h A^h V M^hᵀ, with M^h = W_O^h W_V^h.
    """
    layer, pairs = model.attend, keys.shape[1]
    questions, tokens = model.embed(asked), model.embed(keys)
    A = layer(questions, tokens, tokens, average_attn_weights=False)[1]  # (B, H, N, N)
    W_V = layer.in_proj_weight[-DIM:].unflatten(0, (layer.num_heads, -1))  # (H, Dv, dim)
    M = torch.einsum("dhe,hef->hdf", layer.out_proj.weight.unflatten(1, (layer.num_heads, -1)), W_V)
    found = A.take_along_dim(order[:, None, :, None], -1).sum((-2, -1))  # tr(A^h Pᵀ): (B, H)
    right = (found * M.diagonal(dim1=-2, dim2=-1).sum(-1)).sum(-1)
    size = torch.einsum("bhij,bgij,hde,gde->b", A, A, M, M)
    return (2 * right - size) / (pairs * DIM)


@torch.no_grad()
def sampled(model: Recall, pairs: int, times: int) -> float:
    """Return the same, estimated from so many sequences."""
    error = size = 0.0
    for _ in range(times // TESTED):
        keys, values, asked, order = draw(TESTED, pairs)
        error += (model(keys, values, asked) - wanted(values, order)).square().sum().item()
        size += values.square().sum().item()
    return 1 - error / size


def recall(arm: str, seed: int, steps: int, lr: float, *, device: str) -> dict[str, float]:
    """Train one layer; return the share of the values' variance that it recalls."""
    if device != "cpu":
        raise ValueError(
            f"device is {device!r}; expected 'cpu', on which these small runs are fast"
        )
    layer, heads, pairs, hidden = ARMS[arm]
    seed_everything(seed)
    model = Recall(layer, heads, hidden)
    train(model, pairs, steps, lr)
    cost = attention_cost(model, *draw(1, pairs)[:3])
    torch.manual_seed(TEST_SEED)
    if hidden:
        return {"recalled": sampled(model, pairs, 4096)} | cost
    keys, _, _, order = draw(TESTED, pairs)
    shares = [
        recalled(model, keys, keys.gather(1, turned), turned)
        for turned in (order.roll(t, 1) for t in range(pairs))  # each question at each place once
    ]
    return {"recalled": torch.stack(shares).mean().item()} | cost


EXPERIMENTS = {
    "recall": deciding(
        "the share of the values that one layer recalls",
        recall,
        list(ARMS),
        [("recalled", "share recalled, %", 100, 1)],
        steps=(100, 200, 400, 800),
        seeds=8,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter04", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
