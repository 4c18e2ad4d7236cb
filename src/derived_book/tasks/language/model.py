"""A language model on bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from derived_attention.common.checks import check_shape
from derived_book.tasks.checks import check_no_padding, check_tokens
from derived_book.tasks.model import CausalLayer, Config, Encoder, check_sizes, sinusoids, stack


class Read(NamedTuple):
    """What `ByteLM.step` keeps of the bytes so far: nothing, at the start of a text."""

    seen: int = 0  #: bytes
    last: Tensor | None = None  #: (B, taps - 1, dim), the last embeddings, if there are more taps
    layers: tuple[Any, ...] = ()  #: the state of each layer's attention


START = Read()


class ByteLM(Encoder):
    """A language model on bytes: logits of the next byte from the bytes so far.

    Embedding, positions that start as `sinusoids` and are learned (which makes "one byte back" easy
    to find), causal pre-norm layers, LayerNorm and one linear map at every step. Row t of the
    result depends on ``x[:, : t + 1]`` only. A mechanism that cannot be causal raises its own error
    in the forward pass.

    Parameters
    ----------
    length : int
        T, the most bytes that the model reads at a time.
    config : Config
    taps : int
        With more than 1, a causal convolution of the embeddings by as many taps is added to them:
        each byte is read together with the ``taps - 1`` before it.

    Examples
    --------
    >>> model = ByteLM(length=64, config=Config())
    >>> model(torch.zeros(3, 64, dtype=torch.int64)).shape
    torch.Size([3, 64, 256])
    """

    vocabulary = 256

    def __init__(self, length: int, config: Config, taps: int = 1) -> None:
        super().__init__()
        check_sizes(config, length=length, taps=taps)
        self.length, self.config = length, config
        self.embed = nn.Embedding(self.vocabulary, config.dim)
        self.positions = nn.Parameter(sinusoids(length, config.dim))
        self.layers = stack(CausalLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, self.vocabulary)
        self.before = nn.Conv1d(config.dim, config.dim, taps) if taps > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, T, 256) of the byte after each of `x` (B, T) int64, T ≤ length."""
        return self.head(self.norm(self._run(self._embed(x, None))))

    @property
    def has_state(self) -> bool:
        """Whether `step` can be called: whether the attention of every layer has a state."""
        return all(layer.has_state for layer in self.layers)

    def step(self, x: Tensor, read: Read = START) -> tuple[Tensor, Read]:
        """Return logits (B, n, 256) after each of the next bytes `x`, and what has been read.

        A text in pieces has the logits of the whole text, up to rounding, and the time of a piece
        does not depend on how many bytes came before it.

        Parameters
        ----------
        x : Tensor
            (B, n) int64.
        read : Read
            What the last call returned; left out for the first bytes.

        Raises
        ------
        TypeError, ValueError
            As in the forward pass; for more than `length` bytes in all, a `read` of another batch,
            or a model whose `has_state` is False.
        """
        h, last = self._read(x, None, read)
        states = []
        for layer, state in zip(self.layers, read.layers or [None] * len(self.layers), strict=True):
            h, state = layer.step(h, state)
            states.append(state)
        return self.head(self.norm(h)), Read(read.seen + x.shape[1], last, tuple(states))

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        return self._read(x, padding, START)[0]

    def _read(self, x: Tensor, padding: Tensor | None, read: Read) -> tuple[Tensor, Tensor | None]:
        """Return features (B, n, dim) of the next bytes, and the last embeddings."""
        check_tokens(x, padding, vocabulary=self.vocabulary)
        check_no_padding(padding, "a text")
        (B, n), end = x.shape, read.seen + x.shape[1]
        if end > self.length:
            after = f", after {read.seen}" if read.seen else ""
            raise ValueError(
                f"x has {n} bytes in a row{after}; expected at most {self.length - read.seen}"
            )
        tokens, last = self.embed(x), read.last  # (B, n, dim)
        if self.before is not None:
            shape = (B, self.before.kernel_size[0] - 1, self.config.dim)
            last = tokens.new_zeros(shape) if last is None else last
            check_shape("read.last", last, shape, "those of one batch")
            both = torch.cat([last, tokens], 1)
            last = both[:, n:]
            tokens = tokens + self.before(both.mT).mT if n else tokens
        return self.dropout(tokens + self.positions[read.seen : end]), last
