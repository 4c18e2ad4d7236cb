"""Texts that store digits under letters and ask for them: the best possible score is known.

An example is ``"k=7 q=3 k?7 k=2 q?3 k?2 "``. A letter may be stored again; its last digit counts.
A model predicts the byte after a question mark only if it attends to the last place where the
letter was stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from derived_attention.common.checks import check_count
from derived_book.runtime import evaluating
from derived_book.tasks.checks import check_length
from derived_book.tasks.language.loss import check_reader
from derived_book.training.fit import Endless, check_device

TEST_SEED = 2**31  # of the sessions of an evaluation
LETTERS, DIGITS = 26, 10
STORE, ASK, SPACE = (ord(c) for c in "=? ")


def draw_sessions(
    n: int, length: int, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw `n` sessions, each cut to `length` bytes.

    With probability ½, a statement asks for one of the letters that have been stored, each as
    likely as the others (the first statement cannot ask). Otherwise it stores a random digit under
    a random letter.

    Parameters
    ----------
    n, length : int
    generator : torch.Generator, optional
        By default PyTorch's global one.

    Returns
    -------
    text : Tensor
        (n, length) uint8.
    answers : Tensor
        (n, length) bool: the bytes that follow a question mark.

    Examples
    --------
    >>> text, answers = draw_sessions(2, 24, generator=torch.Generator().manual_seed(0))
    >>> bytes(text[0].tolist())
    b'v=8 v?8 v?8 f=8 n=2 n?2 '
    """
    check_count("n", n, 1)
    check_count("length", length, 1)
    values = torch.full((n, LETTERS), -1)  # -1: not stored yet
    bytes_, answers = [], []
    for _ in range(-(-length // 4)):
        stored = values >= 0
        asks = (torch.rand(n, generator=generator) < 0.5) & stored.any(1)
        among = torch.where(asks[:, None], stored.double(), torch.ones(n, LETTERS).double())
        letter = torch.multinomial(among, 1, generator=generator)  # (n, 1)
        new = torch.randint(DIGITS, (n,), generator=generator)
        digit = torch.where(asks, values.gather(1, letter)[:, 0], new)
        values.scatter_(1, letter, digit[:, None])
        space, no = torch.full((n,), SPACE), torch.zeros(n, dtype=torch.bool)
        sign = torch.where(asks, ASK, STORE)
        bytes_ += [letter[:, 0] + ord("a"), sign, digit + ord("0"), space]
        answers += [no, no, asks, no]
    text = torch.stack(bytes_, 1)[:, :length].to(torch.uint8)
    return text, torch.stack(answers, 1)[:, :length]


@dataclasses.dataclass(frozen=True)
class Sessions(Endless):
    """Sessions of `length` bytes and the byte after them; those of an evaluation are fixed.

    A batch is ``(text,)``, (B, T + 1) int64, as that of `derived_book.Windows`.

    Parameters
    ----------
    length : int
        T, at most that of the model.
    batch_size, steps : int
        Sessions in a batch, and batches in an epoch or an evaluation.
    """

    length: int
    batch_size: int = 64
    steps: int = 8

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        generator = torch.Generator().manual_seed(TEST_SEED)
        for _ in range(self.steps):
            yield self.draw(generator)

    def draw(self, generator: torch.Generator | None = None) -> tuple[Tensor]:
        """Return a batch by `generator`, by default PyTorch's global one."""
        return (draw_sessions(self.batch_size, self.length + 1, generator=generator)[0].long(),)

    def check(self, name: str, model: nn.Module) -> None:
        """Raise TypeError or ValueError unless `model` reads as many bytes at a time."""
        check_reader(model)
        check_length(name, f"sessions of {self.length} bytes", self.length, model)


def right_answers(model: nn.Module, n: int = 512, *, seed: int = TEST_SEED + 1) -> float:
    """Return the share of answers, in `n` fixed sessions, that are a model's likeliest byte.

    Parameters
    ----------
    model : nn.Module
        A language model, such as `derived_book.ByteLM`; it reads ``model.length`` bytes.
    n : int
        Sessions.
    seed : int
        Seed of the sessions, which by default differ from those of an evaluation with `Sessions`.
    """
    device, length = check_device(model, None), check_reader(model)
    generator = torch.Generator().manual_seed(seed)
    text, answers = draw_sessions(n, length + 1, generator=generator)
    with evaluating(model):
        guesses = [
            model(rows[:, :-1].long().to(device)).argmax(-1).cpu() for rows in text.split(64)
        ]
    right = torch.cat(guesses) == text[:, 1:]
    return right[answers[:, 1:]].double().mean().item()
