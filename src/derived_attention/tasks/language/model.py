"""Model language."""

from __future__ import annotations

from torch import Tensor, nn

from derived_attention.tasks.model import (
    CausalLayer,
    Config,
    Encoder,
    check_sizes,
    sinusoids,
    stack,
)
from derived_attention.tasks.series.data import check_tokens


class ByteLM(Encoder):
    """A language model on bytes: from the bytes so far, logits of the next one.

    Embedding, positions that start as `sinusoids` and are learned (so that "one byte back" is easy
    to find), causal pre-norm layers, LayerNorm, one linear map at every step.
    Row t of the result depends on ``x[:, : t + 1]`` only, if the mechanism is causal when it is
    called with ``is_causal=True``. One that cannot be raises its own error in the forward pass.

    Parameters
    ----------
    length : int
        T, the most bytes that the model reads at a time.
    config : Config

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, for a wrong shape or type,
        a number that is no byte, or any `padding`: a text has none.

    Examples
    --------
    >>> model = ByteLM(length=64, config=Config())
    >>> model(torch.zeros(3, 64, dtype=torch.int64)).shape
    torch.Size([3, 64, 256])
    """

    vocabulary = 256

    def __init__(self, length: int, config: Config) -> None:
        super().__init__()
        check_sizes(config, length=length)
        self.length, self.config = length, config
        self.embed = nn.Embedding(self.vocabulary, config.dim)
        self.positions = nn.Parameter(sinusoids(length, config.dim))
        self.layers = stack(CausalLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, self.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, T, 256) of the byte after each of `x` (B, T) int64, T ≤ length."""
        h = self._embed(x, None)
        for layer in self.layers:
            h = layer(h, None)  # (B, T, dim)
        return self.head(self.norm(h))

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_tokens(x, padding, vocabulary=self.vocabulary)
        if padding is not None:
            raise ValueError("padding is given; expected None, as a text has no padding")
        if x.shape[1] > self.length:
            raise ValueError(f"x has {x.shape[1]} bytes in a row; expected at most {self.length}")
        return self.dropout(self.embed(x) + self.positions[: x.shape[1]])  # (B, T, dim)
