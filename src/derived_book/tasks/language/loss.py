"""Text, byte by byte: batches for a language model, its loss, and the text that it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from derived_attention.common.checks import check_count
from derived_book.runtime import check_seed, evaluating
from derived_book.tasks.checks import check_length, check_number, check_output, check_type
from derived_book.tasks.language.data import check_text, decode, encode
from derived_book.training.fit import Bits, Endless, Mean, check_device


@dataclasses.dataclass(frozen=True)
class Windows(Endless):
    """Windows of a text: `length` bytes to read, and the byte after each.

    A batch is ``(windows,)``, (B, T + 1) int64. In training, windows begin at random places. In
    evaluation, the text is cut into consecutive windows (the last one may be shorter), so that
    every byte but the first is predicted once. The first byte of a window has one byte of context,
    the last has all: longer windows give fewer bits.

    Parameters
    ----------
    text : Tensor
        (n,) uint8, n > T: see `derived_book.load_text`.
    length : int
        T, at most that of the model.
    batch_size, steps : int
        Windows in a batch, and batches in an epoch of training.
    """

    text: Tensor
    length: int
    batch_size: int = 64
    steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("text", self.text, self.length + 1)

    def draw(self) -> tuple[Tensor]:
        """Return windows from random places."""
        places = torch.randint(len(self.text) - self.length, (self.batch_size, 1))
        return (self.text[places + torch.arange(self.length + 1)].long(),)  # (B, T + 1)

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        cut = (len(self.text) - 1) // self.length * self.length  # bytes read in whole windows
        windows = self.text[: cut + 1].unfold(0, self.length + 1, self.length)  # (n, T + 1)
        for rows in windows.split(self.batch_size):
            yield (rows.long(),)
        if cut < len(self.text) - 1:
            yield (self.text[None, cut:].long(),)

    def check(self, name: str, model: nn.Module) -> None:
        """Raise TypeError or ValueError unless `model` reads as many bytes at a time."""
        check_reader(model)
        check_length(name, f"windows of {self.length} bytes", self.length, model)


def byte_loss(model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, dict[str, Mean]]:
    """Return the cross-entropy of each next byte; report it as ``"bits"`` per byte.

    ``model(x)`` returns logits (B, T, 256) of the byte after each of x (B, T) int64; another shape
    raises ValueError.
    """
    x, y = batch[0][:, :-1], batch[0][:, 1:]
    logits = model(x)
    check_output(logits, (*x.shape, 256))
    nats = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return nats.mean(), {"bits": Bits(nats.detach().double().sum(), len(nats))}


def generate(
    model: nn.Module, prompt: str, n: int, *, temperature: float = 0.0, seed: int = 0
) -> str:
    """Return `prompt` and the `n` bytes that `model` writes after it, as text.

    Parameters
    ----------
    model : nn.Module
        As in `byte_loss`. It reads the last ``model.length`` bytes each time, in evaluation mode.
    prompt : str
        At least one character.
    n : int
    temperature : float
        A byte is drawn from the softmax of ``logits / temperature``; at 0 the likeliest is taken.
    seed : int
        Of the draws. The global random generators are left as they were.
    """
    device, length = check_device(model, None), check_reader(model)
    check_type("prompt", prompt, str, "a string")
    if not prompt:
        raise ValueError("prompt is empty; expected at least one character")
    check_count("n", n, 1)
    check_number("temperature", temperature, least=0)
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same on every machine
    text = encode(prompt)
    with evaluating(model):
        for _ in range(n):
            logits = model(text[-length:].long().to(device)[None])[0, -1].cpu()  # (256,)
            if temperature == 0:
                byte = logits.argmax(0, keepdim=True)
            else:
                byte = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
            text = torch.cat([text, byte.to(torch.uint8)])
    return decode(text)


def check_reader(model: nn.Module) -> int:
    """Return the most bytes that `model` reads; raise TypeError if it has no such length."""
    length = getattr(model, "length", None)
    if not isinstance(length, int):
        raise TypeError(f"model.length is {length!r}; expected a language model, such as ByteLM")
    return length
