"""A language model on bytes."""

from __future__ import annotations

from torch import Tensor, nn

from derived_attention.tasks.checks import check_no_padding, check_tokens
from derived_attention.tasks.model import (
    CausalLayer,
    Config,
    Encoder,
    check_sizes,
    sinusoids,
    stack,
)


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

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_tokens(x, padding, vocabulary=self.vocabulary)
        check_no_padding(padding, "a text")
        if x.shape[1] > self.length:
            raise ValueError(f"x has {x.shape[1]} bytes in a row; expected at most {self.length}")
        tokens = self.embed(x)  # (B, T, dim)
        if self.before is not None:
            earlier = self.before.kernel_size[0] - 1
            tokens = tokens + self.before(nn.functional.pad(tokens.mT, (earlier, 0))).mT
        return self.dropout(tokens + self.positions[: x.shape[1]])
