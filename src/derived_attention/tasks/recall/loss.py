"""Questions about pairs, and what a model answers: associative recall (chapter 12).

`Questions` and `answer_loss` are what `derived_attention.training.fit.fit` takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from derived_attention.tasks.recall.data import check_recall_sizes, draw_recall
from derived_attention.training.fit import Endless, Mean

TEST_SEED = 2**31  # of the sequences to evaluate


@dataclasses.dataclass(frozen=True)
class Questions(Endless):
    """Sequences of `derived_attention.tasks.recall.data.draw_recall`, without end.

    A batch is ``(keys, values, asked, answers)``, each (B, N) int64. An epoch is what `steps` says.
    What is random in a step of training follows from the seed and the number of the step; the
    batches to evaluate are always the same.

    Parameters
    ----------
    pairs, symbols : int
        As in `draw_recall`.
    batch_size, steps : int
        Sequences in a batch, and batches in an epoch.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work.

    Examples
    --------
    >>> batches = Questions(pairs=32, batch_size=16)  # doctest: +SKIP
    """

    pairs: int
    symbols: int = 64
    batch_size: int = 64
    steps: int = 100

    def __post_init__(self) -> None:
        check_recall_sizes(**dataclasses.asdict(self))

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(TEST_SEED)
        for _ in range(self.steps):
            yield self.draw(generator)

    def draw(self, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Return a batch by `generator`, or by PyTorch's own."""
        drawn = draw_recall(self.batch_size, self.pairs, symbols=self.symbols, generator=generator)
        return drawn[:4]  # all but the order

    def check(self, name: str, model: nn.Module) -> None:
        """Raise TypeError or ValueError unless `model` knows as many symbols."""
        symbols = getattr(model, "symbols", None)
        if not isinstance(symbols, int):
            found = f"model.symbols is {symbols!r}"
            raise TypeError(f"{found}; expected a model that recalls, such as Recaller")
        if self.symbols != symbols:
            found = f"{name} has {self.symbols} symbols"
            raise ValueError(f"{found}; expected {symbols}, as the model")


def answer_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Mean]]:
    """Return the cross-entropy of the answers; report it as ``"loss"``, with the ``"accuracy"``.

    ``model(keys, values, asked)`` returns logits (B, N, symbols) for (B, N) int64 each.

    Raises
    ------
    ValueError
        For a result of another shape.
    """
    *asked, answers = batch
    logits = model(*asked)
    if logits.ndim != 3 or logits.shape[:2] != answers.shape:
        found = f"model returns shape {tuple(logits.shape)}"
        raise ValueError(f"{found}; expected {(*answers.shape, 'symbols')}")
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
    n, correct = answers.numel(), int((logits.argmax(-1) == answers).sum())
    return loss, {"loss": Mean(loss.item() * n, n), "accuracy": Mean(correct, n)}
