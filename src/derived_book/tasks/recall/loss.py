"""Associative recall: pairs of a key and a value, and a question for each key (chapter 6).

The answer is the value of the pair whose key is asked for, which one layer of softmax attention can
look up. Each sequence has new pairs, so that a model cannot memorise them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from derived_book.tasks.checks import check_output
from derived_book.tasks.supervised import cross_entropy
from derived_book.training.fit import Endless, Mean

TEST_SEED = 2**31  # of the sequences of an evaluation


@dataclasses.dataclass(frozen=True)
class Questions(Endless):
    """Sequences of distinct keys with any values; each key is asked for, in random order.

    A batch is ``(keys, values, asked, answers)``, each (B, N) int64: `answers` are the values of
    the pairs whose keys are `asked`. The sequences of an evaluation are always the same.

    Parameters
    ----------
    pairs : int
        N.
    symbols : int
        Number of different keys, at least N, and of different values.
    batch_size, steps : int
        Sequences in a batch, and batches in an epoch or an evaluation.
    """

    pairs: int
    symbols: int = 64
    batch_size: int = 64
    steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs > self.symbols:
            raise ValueError(
                f"pairs is {self.pairs}; expected at most {self.symbols}, the number of symbols"
            )

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(TEST_SEED)
        for _ in range(self.steps):
            yield self.draw(generator)

    def draw(self, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Return a batch by `generator`, by default PyTorch's global one."""
        B, N = self.batch_size, self.pairs
        keys = torch.rand(B, self.symbols, generator=generator).argsort(1)[:, :N]  # all different
        values = torch.randint(self.symbols, (B, N), generator=generator)
        order = torch.rand(B, N, generator=generator).argsort(1)
        return keys, values, keys.gather(1, order), values.gather(1, order)

    def check(self, name: str, model: nn.Module) -> None:
        """Raise TypeError or ValueError unless `model` knows as many symbols."""
        symbols = getattr(model, "symbols", None)
        if not isinstance(symbols, int):
            raise TypeError(f"model.symbols is {symbols!r}; expected its number of symbols")
        if self.symbols != symbols:
            expected = f"{symbols}, as the model has"
            raise ValueError(f"{name} has {self.symbols} symbols; expected {expected}")


def answer_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Mean]]:
    """Return the cross-entropy of the answers; report it as ``"loss"``, with the ``"accuracy"``.

    ``model(keys, values, asked)`` returns logits (B, N, symbols) for (B, N) int64 each; another
    shape raises ValueError.
    """
    *asked, answers = batch
    logits = model(*asked)
    check_output(logits, (*answers.shape, "symbols"))
    return cross_entropy(logits.flatten(0, 1), answers.flatten())
