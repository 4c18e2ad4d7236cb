"""The miniature models of the book, all but one in one readable file.

`SeriesClassifier` and `SeriesRegressor` read time series, `VisionTransformer` reads images cut into
patches, `TokenClassifier` reads sequences of tokens, `TableTransformer` reads rows of a table.
`ByteLM` continues a text. `Translator` writes a sentence that it reads in another language.
`DecisionTransformer` acts. `Recaller` answers questions about pairs. `DetectionTransformer`, in
`derived_attention.tasks.detection.model`, finds the objects in an image.
`derived_attention.training.fit.fit` trains each.

A model is called with what its data are, and last with a `Config`: the sizes that all have, and how
their layers mix positions, by one rule: *a function replaces the scaled dot product, a class
replaces the layer.*

- A function ``f(q, k, v, *, attn_mask, is_causal, scale)`` works inside `MultiheadAttention`;
  ``functools.partial`` sets keywords of its own.
- A class (a subclass of ``nn.Module``, or a partial of one) is called as ``attention(dim, heads)``
  for each layer, and has the ``forward`` of ``nn.MultiheadAttention(batch_first=True)``.

Where a decoder attends what an encoder has read, layers of this package are declared to be
cross-attention, as `MultiheadAttention` describes: a class is called with ``cross=True`` as well,
if it has such an argument. So what mixes queries along their length is refused there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.attention.frame.checks import (
    Mechanism,
    check_flag,
    check_floating,
    check_positive,
)
from derived_attention.attention.frame.convention import takes
from derived_attention.attention.frame.layer import MultiheadAttention
from derived_attention.attention.softmax.fast import softmax_attention
from derived_attention.runtime import check_count, evaluating
from derived_attention.tasks.series.data import check_series, check_tokens

WEIGHTS = "the model's weights"  # in an error, where an input is of another type


@dataclasses.dataclass(frozen=True)
class Config:
    """What every model is made of, whatever it reads.

    Parameters
    ----------
    dim, heads, layers, hidden : int
        Width, heads per layer, layers, and width of the feed-forward part.
    dropout : float
    attention : callable
        A function or a class: see the rule at the top of this module.
    last : callable, optional
        What the last layer (of an encoder and of a decoder) has in its place, where it differs:
        with `derived_attention.PrimalAttention` "Primal.+" of [Chen2023].

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work. That `heads` divides `dim` is for the layer to say.

    Examples
    --------
    >>> Config(dim=32, heads=2).hidden
    128
    """

    dim: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int = 128
    dropout: float = 0.1
    attention: Mechanism = softmax_attention
    last: Mechanism | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "layers", "hidden"):
            check_count(name, getattr(self, name))
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float):
            raise TypeError(f"dropout is {self.dropout!r}; expected a number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; expected 0 <= dropout < 1")
        is_layer(self.attention)
        if self.last is not None:
            is_layer(self.last, "last")


def is_layer(attention: Mechanism, name: str = "attention") -> bool:
    """Say if `attention` is a class (or a function), by the rule above; else raise TypeError."""
    target = attention.func if isinstance(attention, functools.partial) else attention
    if isinstance(target, nn.Module) or not callable(target):  # a module would be shared by layers
        raise TypeError(f"{name} is {attention!r}; expected a function, or a class of modules")
    return isinstance(target, type) and issubclass(target, nn.Module)


def make_attention(attention: Mechanism, dim: int, heads: int, *, cross: bool = False) -> nn.Module:
    """Build one attention layer by the rule at the top of this module; else raise TypeError."""
    if is_layer(attention):
        declared = {"cross": True} if cross and takes(attention, "cross") else {}
        return attention(dim, heads, **declared)
    return MultiheadAttention(dim, heads, attention=attention, cross=cross)


class EncoderLayer(nn.Module):
    """One transformer layer, normalised after each residual by BatchNorm (post-norm).

    BatchNorm takes its statistics over batch *and* time, padded steps included, as the reference
    code of the papers does. Attention weights are not dropped out: the fused path needs them whole.
    """

    masks: dict[str, bool] = {}  # what a kind of layer says to its attention each time

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim, hidden, dropout = config.dim, config.hidden, config.dropout
        self.attention = make_attention(config.attention, dim, config.heads)
        self.feedforward = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim)
        )
        self.norm1: nn.Module = nn.BatchNorm1d(dim)
        self.norm2: nn.Module = nn.BatchNorm1d(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Map (B, T, dim) to (B, T, dim)."""
        how = dict(key_padding_mask=padding, need_weights=False)
        mixed, _ = self.attention(x, x, x, **how, **self.masks)
        x = x + self.dropout(mixed)  # (B, T, dim)
        x = self.norm1(x.flatten(0, 1)).view_as(x)
        x = x + self.dropout(self.feedforward(x))
        return self.norm2(x.flatten(0, 1)).view_as(x)

    def maps(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return the attention weights (B, H, T, T) of the forward pass."""
        how = dict(key_padding_mask=padding, average_attn_weights=False)
        return self.attention(x, x, x, **how, **self.masks)[1]


class PreNormLayer(EncoderLayer):
    """The same layer, normalised before each branch by LayerNorm, as vision transformers are."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Map (B, T, dim) to (B, T, dim)."""
        y = self.norm1(x)
        how = dict(key_padding_mask=padding, need_weights=False)
        mixed, _ = self.attention(y, y, y, **how, **self.masks)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feedforward(self.norm2(x)))

    def maps(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return the attention weights (B, H, T, T) of the forward pass."""
        return super().maps(self.norm1(x), padding)


class CausalLayer(PreNormLayer):
    """A pre-norm layer in which a step attends itself and the steps before it only."""

    masks = {"is_causal": True}


class DecoderLayer(CausalLayer):
    """A causal layer that also attends the result of an encoder, the memory, between its parts."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.cross = make_attention(config.attention, config.dim, config.heads, cross=True)
        self.norm3 = nn.LayerNorm(config.dim)

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, padding: Tensor | None
    ) -> Tensor:
        """Map (B, T, dim), with `memory` (B, S, dim) and its `padding` (B, S), to (B, T, dim)."""
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False, **self.masks)[0])
        how = dict(key_padding_mask=padding, need_weights=False)
        x = x + self.dropout(self.cross(self.norm3(x), memory, memory, **how)[0])
        return x + self.dropout(self.feedforward(self.norm2(x)))


def stack(kind: Callable[[Config], nn.Module], config: Config) -> nn.ModuleList:
    """Build the layers of a model, the last one with `Config.last`."""
    last = config if config.last is None else dataclasses.replace(config, attention=config.last)
    return nn.ModuleList([kind(config) for _ in range(config.layers - 1)] + [kind(last)])


class Encoder(nn.Module):
    """What the models share: layers over a sequence of T steps, and a look at their weights."""

    layers: Any  # nn.ModuleList of EncoderLayer
    config: Config
    length: int

    def attention_maps(self, x: Tensor, padding: Tensor | None = None) -> list[Tensor]:
        """Return each layer's weights (B, H, T, T); rows of padded queries mean nothing.

        A mechanism that leaves keys out has fewer columns. One that is not linear in V has no
        weights: what it makes of V = I is returned, or it raises ValueError.
        """
        with evaluating(self):
            return self._maps(self._embed(x, padding), padding)

    def _maps(self, h: Tensor, padding: Tensor | None) -> list[Tensor]:
        maps = []
        for layer in self.layers:
            maps.append(layer.maps(h, padding))
            if maps[-1] is None:
                raise ValueError(f"{type(layer.attention).__name__} has no attention weights")
            h = layer(h, padding)
        return maps

    def extra_repr(self) -> str:
        """Show what the layers do not; a checkpoint tells two models apart by this text."""
        return f"{self.config}, length={self.length}"

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Check the input and map it to (B, T, dim), positions included."""
        raise NotImplementedError


class SeriesClassifier(Encoder):
    """A transformer encoder that names the class of a multivariate time series.

    Linear projection (times √dim), learned positions, encoder layers, GELU, then one linear map of
    all steps at once, with zeros where a step is padding.

    Parameters
    ----------
    channels, classes, length : int
        C, the number of classes, and T: see `derived_attention.tasks.series.data.SeriesData`.
    config : Config

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, a wrong shape or type.

    Examples
    --------
    >>> model = SeriesClassifier(channels=12, classes=9, length=26, config=Config())
    >>> model(torch.zeros(4, 26, 12)).shape
    torch.Size([4, 9])
    """

    def __init__(self, channels: int, classes: int, length: int, config: Config) -> None:
        super().__init__()
        check_sizes(config, channels=channels, classes=classes, length=length)
        self.channels, self.classes, self.length, self.config = channels, classes, length, config
        self.embed = nn.Linear(channels, config.dim)
        self.positions = nn.Parameter(torch.empty(length, config.dim).uniform_(-0.02, 0.02))
        self.layers = stack(EncoderLayer, config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(length * config.dim, classes)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return logits (B, classes) of `x` (B, T, C); `padding` (B, T) is True where padded."""
        h = self._embed(x, padding)
        for layer in self.layers:
            h = layer(h, padding)  # (B, T, dim)
        h = self.dropout(nn.functional.gelu(h))
        if padding is not None:
            h = h.masked_fill(padding[..., None], 0.0)
        return self.head(h.flatten(1))  # (B, T * dim) -> (B, classes)

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_series(x, padding, steps=self.length, channels=self.channels)
        check_floating({WEIGHTS: self.positions, "x": x})
        h = self.embed(x) * math.sqrt(self.positions.shape[1])  # (B, T, dim)
        return self.dropout(h + self.positions)


class SeriesRegressor(SeriesClassifier):
    """The same encoder with one output: a number for each time series, in the target's units.

    The last linear map gives z, and the result is ``mean + sd · z``: with the mean and the standard
    deviation of the training targets, the network itself works on standardised targets. They and
    the result are float32 at least, also where the network runs in half precision: a number such as
    1995 ± 10 has no digits left there.

    Parameters
    ----------
    channels, length : int
        C and T.
    target : (float, float)
        Mean and standard deviation: see `derived_attention.tasks.series.data.SeriesData`.
    config : Config

    Raises
    ------
    TypeError, ValueError
        As `SeriesClassifier`; for a `target` that is not a finite mean and a positive deviation.

    Examples
    --------
    >>> model = SeriesRegressor(channels=12, length=26, target=(0.0, 1.0), config=Config())
    >>> model(torch.zeros(4, 26, 12)).shape
    torch.Size([4])
    """

    mean: Tensor
    sd: Tensor

    def __init__(
        self, channels: int, length: int, target: tuple[float, float], config: Config
    ) -> None:
        super().__init__(channels, 1, length, config)
        check_target(target)
        self.classes = 0
        for name, value in zip(("mean", "sd"), target, strict=True):
            self.register_buffer(name, torch.tensor(float(value)))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return numbers (B,) for `x` (B, T, C); `padding` (B, T) is True where padded."""
        return self.mean + self.sd * at_least_float32(super().forward(x, padding).squeeze(1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SeriesRegressor:
        """Move or cast the model, but never the target's mean and deviation to half precision."""
        mean, sd = self.mean, self.sd
        super()._apply(fn, recurse)
        if self.mean.dtype.itemsize < 4:
            self.mean, self.sd = (at_least_float32(x.to(self.mean.device)) for x in (mean, sd))
        return self


class PooledClassifier(Encoder):
    """What the next two models share: pre-norm layers, the mean over the steps, one linear map.

    With a `class_token`, a learned vector comes first in the sequence, and what the layers make of
    it takes the place of the mean.
    """

    def __init__(
        self, classes: int, length: int, config: Config, class_token: bool = False
    ) -> None:
        super().__init__()
        check_sizes(config, classes=classes, length=length)
        check_flag("class_token", class_token)
        self.classes, self.length, self.config = classes, length, config
        self.class_token = None
        if class_token:
            self.class_token = nn.Parameter(torch.empty(config.dim).normal_(std=0.5))
        self.positions = nn.Parameter(torch.empty(length, config.dim).normal_(std=0.5))
        self.layers = stack(PreNormLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, classes)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return logits (B, classes)."""
        h = self._embed(x, padding)
        for layer in self.layers:
            h = layer(h, padding)  # (B, T, dim)
        if self.class_token is not None:
            return self.head(self.norm(h[:, 0]))
        h = self.norm(h)
        if padding is None:
            return self.head(h.mean(1))
        count = (~padding).sum(1, keepdim=True).clamp(min=1)  # (B, 1)
        return self.head(h.masked_fill(padding[..., None], 0.0).sum(1) / count)


class VisionTransformer(PooledClassifier):
    """A vision transformer: names the class of an image that is a grid of patches.

    Linear patch embedding, learned positions, pre-norm layers, the mean over all patches. Without a
    class token the sequence stays a grid, so that a mechanism may convolve it or pool it in two
    dimensions, and every row of an attention map is a place in the image.

    Parameters
    ----------
    grid : (int, int)
        Rows and columns of patches. The sequence is the grid row by row: T = rows · columns.
    channels, classes : int
        Numbers in a patch, and classes: see `derived_attention.tasks.images.data.ImageData`.
    config : Config
    class_token : bool
        Whether the answer is read from a learned token before the patches, as in DeiT, and not from
        their mean. Layers see T + 1 tokens then.

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, a wrong shape or type, or
        any `padding`: an image has none.

    Examples
    --------
    >>> model = VisionTransformer(grid=(4, 4), channels=4, classes=10, config=Config())
    >>> model(torch.zeros(3, 16, 4)).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        grid: Sequence[int],
        channels: int,
        classes: int,
        config: Config,
        *,
        class_token: bool = False,
    ) -> None:
        if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
            raise TypeError(f"grid is {grid!r}; expected (rows, columns)")
        check_sizes(config, channels=channels, **{f"grid[{i}]": n for i, n in enumerate(grid)})
        super().__init__(classes, grid[0] * grid[1], config, class_token)
        self.grid, self.channels = tuple(grid), channels
        self.embed = nn.Linear(channels, config.dim)

    def extra_repr(self) -> str:
        """Show what the layers do not; a checkpoint tells two models apart by this text."""
        return f"{super().extra_repr()}, grid={self.grid}"

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_series(x, None, steps=self.length, channels=self.channels)
        if padding is not None:
            raise ValueError("padding is given; expected None, as an image has no padding")
        check_floating({WEIGHTS: self.positions, "x": x})
        h = self.embed(x) + self.positions  # (B, T, dim)
        return self.dropout(h if self.class_token is None else with_first(self.class_token, h))


class TokenClassifier(PooledClassifier):
    """A transformer encoder that names the class of a sequence of tokens.

    Embedding, learned positions, pre-norm layers, the mean over the tokens that are not padding:
    in small, the model that the papers take for the Long Range Arena.

    Parameters
    ----------
    vocabulary, classes, length : int
        Number of different tokens, of classes, and T.
    config : Config

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, a wrong shape or type, or
        a token outside the vocabulary.

    Examples
    --------
    >>> model = TokenClassifier(vocabulary=16, classes=10, length=32, config=Config())
    >>> model(torch.zeros(3, 32, dtype=torch.int64)).shape
    torch.Size([3, 10])
    """

    def __init__(self, vocabulary: int, classes: int, length: int, config: Config) -> None:
        check_sizes(config, vocabulary=vocabulary)
        super().__init__(classes, length, config)
        self.vocabulary = vocabulary
        self.embed = nn.Embedding(vocabulary, config.dim)

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_tokens(x, padding, steps=self.length, vocabulary=self.vocabulary)
        return self.dropout(self.embed(x) + self.positions)  # (B, T, dim)


class TableTransformer(Encoder):
    """The FT-Transformer of [Gorishniy2021]: a row of a table is a sequence of its columns.

    Each column has its own embedding: of a number x_j it is ``x_j w_j + b_j``, of a category a
    vector for each code, plus b_j. A class token comes first; pre-norm layers; LayerNorm, ReLU and
    a linear map of that token. (The original has no LayerNorm at the very beginning, and gated
    units in the feed-forward part.)

    Parameters
    ----------
    numbers : int
        How many columns are numbers; they come first.
    categories : sequence of int
        The number of codes of each other column: see `TableData`.
    classes : int
        0 for a number as the answer.
    config : Config
    target : (float, float), optional
        Mean and standard deviation of training answers that are numbers: what the model says is
        ``mean + sd · z``, in float32 at least, as in `SeriesRegressor`.

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, a wrong shape or type, a code that is none, a type
        too short for the codes, as bfloat16 is above 256, or any `padding`: a table has none.

    Examples
    --------
    >>> model = TableTransformer(numbers=6, categories=(3, 42), classes=2, config=Config())
    >>> model(torch.zeros(5, 8, 1)).shape
    torch.Size([5, 2])
    """

    channels = 1

    def __init__(
        self,
        numbers: int,
        categories: Sequence[int],
        classes: int,
        config: Config,
        target: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        super().__init__()
        sizes = {f"categories[{i}]": size for i, size in enumerate(categories)}
        check_sizes(config, length=numbers + len(sizes), **sizes)
        if classes != 0:
            check_sizes(config, classes=classes)
        check_target(target)
        self.numbers, self.categories, self.classes = numbers, tuple(categories), classes
        self.length, self.config, self.target = numbers + len(sizes), config, target

        def drawn(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, config.dim).uniform_(-1, 1) * config.dim**-0.5)

        self.class_token, self.scales, self.biases = drawn(1), drawn(numbers), drawn(self.length)
        self.codes = drawn(sum(self.categories))  # the tables of all categories, one under another
        first = torch.tensor([0, *self.categories]).cumsum(0)[:-1]
        self.first: Tensor
        self.register_buffer("first", first, persistent=False)
        self.layers = stack(PreNormLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, classes or 1)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return logits (B, classes), or numbers (B,), of rows `x` (B, T, 1)."""
        h = self._embed(x, padding)
        for layer in self.layers:
            h = layer(h, None)  # (B, 1 + T, dim)
        z = self.head(self.norm(h[:, 0]).relu())
        mean, sd = self.target
        return z if self.classes else mean + sd * at_least_float32(z.squeeze(1))

    def extra_repr(self) -> str:
        """Show what the layers do not; a checkpoint tells two models apart by this text."""
        return f"{super().extra_repr()}, categories={self.categories}, target={self.target}"

    def _embed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        check_series(x, None, steps=self.length, channels=1)
        if padding is not None:
            raise ValueError("padding is given; expected None, as a table has no padding")
        check_floating({WEIGHTS: self.scales, "x": x})
        if max(self.categories, default=0) - 1 > 2 / torch.finfo(x.dtype).eps:
            what = f"x is {x.dtype}, and a column has {max(self.categories)} codes"
            raise ValueError(f"{what}; expected float32, by autocast where half is wanted")
        numbers, given = x[:, : self.numbers], x[:, self.numbers :, 0]
        codes, most = given.long(), torch.tensor(self.categories, device=x.device)
        if ((codes < 0) | (codes >= most) | (codes != given)).any():
            raise ValueError(f"x holds a code that is none; expected codes below {self.categories}")
        found = nn.functional.embedding(codes + self.first, self.codes)  # (B, categories, dim)
        h = torch.cat([numbers * self.scales, found], 1) + self.biases  # (B, T, dim)
        return self.dropout(with_first(self.class_token[0], h))


def at_least_float32(x: Tensor) -> Tensor:
    """Return x, in float32 if it is of a shorter type."""
    return x.float() if x.dtype.itemsize < 4 else x


def with_first(token: Tensor, h: Tensor) -> Tensor:
    """Put a token (dim,) before each sequence of h: (B, T, dim) to (B, 1 + T, dim)."""
    return torch.cat([token.expand(len(h), 1, -1), h], dim=1)


def sinusoids(length: int, dim: int, temperature: float = 10_000.0) -> Tensor:
    """Return the positions (T, dim) of [Vaswani2017]: ``sin(t ω_i), cos(t ω_i)`` side by side.

    ω_i = temperature^(-2i / dim), so that a step of s turns each pair of columns by the angle
    s ω_i.
    """
    omega = temperature ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.arange(length)[:, None] * omega  # (T, dim / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :dim].contiguous()


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


class DecisionTransformer(Encoder):
    """The Decision Transformer of [Chen2021]: from what is hoped and seen so far, what to do next.

    A step t of an episode is three tokens: the return-to-go R_t, the state s_t, the action a_t.
    Each has a linear map of its own, and the learned embedding of the time t in the episode is
    added. LayerNorm, causal pre-norm layers, LayerNorm, and one linear map of the token of the
    state, which sees R_1, s_1, a_1, ..., R_t, s_t, but not a_t. (Embeddings of times start near 0
    here, so that a time that training never reached says little.)

    Parameters
    ----------
    states, actions : int
        How many numbers a state has; how many actions there are, or numbers in one.
    discrete : bool
        Whether an action is one of `actions`: the result is their logits. If it is a vector, it is
        in [-1, 1], and so is the result, by a tanh.
    length : int
        The most steps that the model reads at a time: 3 tokens each.
    config : Config
    horizon : int
        The most steps of an episode.
    scale : float
        Returns are divided by it: see `derived_attention.tasks.control.data.ControlData`.
    conditioned : bool
        False withholds the returns, which count as 0: the model clones the data's behaviour.

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, for a wrong shape or type, an action that there is
        not, or a time past the horizon.

    Examples
    --------
    >>> model = DecisionTransformer(4, 2, True, length=8, config=Config())
    >>> returns, states, actions = torch.ones(3, 5), torch.zeros(3, 5, 4), torch.arange(5) // 4
    >>> model(returns, states, actions.repeat(3, 1), torch.arange(5).repeat(3, 1)).shape
    torch.Size([3, 5, 2])
    """

    def __init__(
        self,
        states: int,
        actions: int,
        discrete: bool,
        length: int,
        config: Config,
        *,
        horizon: int = 1000,
        scale: float = 1.0,
        conditioned: bool = True,
    ) -> None:
        super().__init__()
        check_sizes(config, states=states, actions=actions, length=length, horizon=horizon)
        check_flag("discrete", discrete)
        check_flag("conditioned", conditioned)
        self.states, self.actions, self.discrete = states, actions, discrete
        self.length, self.horizon, self.config = length, horizon, config
        self.scale, self.conditioned, dim = check_positive("scale", scale), conditioned, config.dim
        self.embed_return, self.embed_state = nn.Linear(1, dim), nn.Linear(states, dim)
        self.embed_action = nn.Embedding(actions, dim) if discrete else nn.Linear(actions, dim)
        self.times = nn.Parameter(torch.empty(horizon, dim).normal_(std=0.02))
        self.first = nn.LayerNorm(dim)
        self.layers = stack(CausalLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, actions)

    def forward(self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor) -> Tensor:
        """Return logits, or actions, (B, T, actions), each from what is known when it is taken.

        Parameters
        ----------
        returns, states, actions, times : Tensor
            (B, T), (B, T, states), (B, T) int64 or (B, T, actions), (B, T) int64, T ≤ length: steps
            that follow each other. Those after an episode's end may hold anything that is allowed.
        """
        h = self._embed(returns, states, actions, times)  # type: ignore[call-arg]
        for layer in self.layers:
            h = layer(h, None)  # (B, 3T, dim)
        z = self.head(self.norm(h[:, 1::3]))
        return z if self.discrete else z.tanh()

    def attention_maps(  # type: ignore[override]
        self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor
    ) -> list[Tensor]:
        """Return each layer's weights (B, H, 3T, 3T)."""
        with evaluating(self):
            return self._maps(self._embed(returns, states, actions, times), None)

    def extra_repr(self) -> str:
        """Show what the layers do not; a checkpoint tells two models apart by this text."""
        return f"{super().extra_repr()}, scale={self.scale}, conditioned={self.conditioned}"

    def _embed(  # type: ignore[override]
        self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor
    ) -> Tensor:
        self.check_steps(returns, states, actions, times)
        given = {"returns": returns, "states": states} | (
            {} if self.discrete else {"actions": actions}
        )
        check_floating({WEIGHTS: self.times, **given})
        hoped = returns / self.scale if self.conditioned else torch.zeros_like(returns)
        parts = (
            self.embed_return(hoped[..., None]),
            self.embed_state(states),
            self.embed_action(actions),
        )
        h = torch.stack(parts, dim=2) + self.times[times][:, :, None]  # (B, T, 3, dim)
        return self.dropout(self.first(h.flatten(1, 2)))

    def check_steps(
        self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor, of: str = ""
    ) -> None:
        """Raise TypeError or ValueError, naming the argument, for steps that there cannot be."""
        given = {"returns": returns, "states": states, "actions": actions, "times": times}
        for name, value in given.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{of}{name} is {type(value).__name__}; expected a tensor")
        if times.ndim != 2 or not 0 < times.shape[1] <= self.length:
            found = f"{of}times has shape {tuple(times.shape)}"
            raise ValueError(f"{found}; expected (B, T), 0 < T <= {self.length}")
        own = () if self.discrete else (self.actions,)
        for name, more in (("returns", ()), ("states", (self.states,)), ("actions", own)):
            if given[name].shape != (*times.shape, *more):
                found = f"{of}{name} has shape {tuple(given[name].shape)}"
                raise ValueError(f"{found}; expected {(*times.shape, *more)}")
        for name, most in (("times", self.horizon), ("actions", self.actions)):
            if name == "actions" and not self.discrete:
                continue
            value = given[name]
            if value.dtype != torch.int64 or (value < 0).any() or (value >= most).any():
                found = f"{of}{name} is {value.dtype}, or holds what there is not"
                raise ValueError(f"{found}; expected int64 numbers 0 <= x < {most}")


class Translator(nn.Module):
    """The encoder–decoder of [Vaswani2017], normalised before each branch: reads, then writes.

    The encoder's layers mix the tokens of the source. The decoder's layers mix the tokens of the
    target so far, causally, and attend the encoder's result: three attentions, all of one kind.
    One embedding serves source, target and output; positions start as `sinusoids` and are learned.
    Token 0 is padding, at the end of a sentence; no other token attends it.

    Parameters
    ----------
    vocabulary : int
        Number of different tokens, in both languages together.
    length : int
        The most tokens of a sentence, in either language.
    config : Config
        `layers` in the encoder, and as many in the decoder.

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, for a wrong shape or type,
        a token outside the vocabulary, or sentences that are too long.

    Examples
    --------
    >>> model = Translator(vocabulary=100, length=16, config=Config())
    >>> source, target = torch.ones(3, 7, dtype=torch.int64), torch.ones(3, 5, dtype=torch.int64)
    >>> model(source, target).shape
    torch.Size([3, 5, 100])
    """

    encoder: Any  # nn.ModuleList of PreNormLayer
    decoder: Any  # nn.ModuleList of DecoderLayer

    def __init__(self, vocabulary: int, length: int, config: Config) -> None:
        super().__init__()
        check_sizes(config, vocabulary=vocabulary, length=length)
        self.vocabulary, self.length, self.config, dim = vocabulary, length, config, config.dim
        self.embed = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)  # so that logits start near N(0, 1)
        self.positions = nn.Parameter(sinusoids(length, dim))
        self.encoder = stack(PreNormLayer, config)
        self.decoder = stack(DecoderLayer, config)
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits (B, T, V) of the token after each of `target` (B, T), given `source`."""
        return self.logits(self.decode(target, self.encode(source), source == 0))

    def encode(self, source: Tensor) -> Tensor:
        """Read tokens (B, S) int64: return the memory (B, S, dim)."""
        h, padding = self._embed("source", source), source == 0
        for layer in self.encoder:
            h = layer(h, padding)  # (B, S, dim)
        return self.encoder_norm(h)

    def decode(self, target: Tensor, memory: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the features (B, T, dim) from which `logits` finds the token after each."""
        h = self._embed("target", target)
        check_pairs(memory, target)
        for layer in self.decoder:
            h = layer(h, memory, padding)  # (B, T, dim)
        return self.decoder_norm(h)

    def logits(self, features: Tensor) -> Tensor:
        """Map (..., dim) to logits (..., V), by the embedding that reads the tokens."""
        return nn.functional.linear(features, self.embed.weight)

    def extra_repr(self) -> str:
        """Show what the layers do not; a checkpoint tells two models apart by this text."""
        return f"{self.config}, length={self.length}"

    def _embed(self, name: str, tokens: Tensor) -> Tensor:
        check_rows(name, tokens, self.vocabulary, self.length)
        h = self.embed(tokens) * math.sqrt(self.positions.shape[1])
        return self.dropout(h + self.positions[: tokens.shape[1]])  # (B, T, dim)


class Recaller(nn.Module):
    """A transformer encoder that answers questions about pairs, as in associative recall.

    A pair is one token, the sum of its key's and its value's embedding; a question is one token,
    its key's embedding plus one that all questions share. First all pairs, then all questions;
    no positions, as their order says nothing; pre-norm layers, LayerNorm, and a linear map of the
    questions.

    Parameters
    ----------
    symbols : int
        Number of different keys, and of different values.
    config : Config

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, for a wrong shape or type, or a symbol that is none.

    Examples
    --------
    >>> model = Recaller(symbols=64, config=Config())
    >>> keys, values, asked = torch.zeros(3, 2, 7, dtype=torch.int64)
    >>> model(keys, values, asked).shape
    torch.Size([2, 7, 64])
    """

    def __init__(self, symbols: int, config: Config) -> None:
        super().__init__()
        check_sizes(config, symbols=symbols)
        self.symbols, self.config = symbols, config
        self.keys = nn.Embedding(symbols, config.dim)
        self.values = nn.Embedding(symbols, config.dim)
        self.question = nn.Parameter(torch.empty(config.dim).normal_())
        self.layers = stack(PreNormLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, symbols)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return logits (B, Q, symbols) of the values of `asked` (B, Q), given pairs (B, N)."""
        check_recall(self.symbols, keys=keys, values=values, asked=asked)
        pairs = self.keys(keys) + self.values(values)  # (B, N, dim)
        questions = self.keys(asked) + self.question  # (B, Q, dim)
        h = self.dropout(torch.cat([pairs, questions], 1))
        for layer in self.layers:
            h = layer(h, None)
        return self.head(self.norm(h[:, keys.shape[1] :]))

    def extra_repr(self) -> str:
        """Show what the layers do not; a checkpoint tells two models apart by this text."""
        return f"{self.config}, symbols={self.symbols}"


def check_rows(name: str, tokens: Tensor, vocabulary: int, length: int) -> None:
    """Raise TypeError or ValueError, naming it, unless `tokens` are (B, T ≤ length) < vocabulary.

    A sentence has at least one token before its padding.
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} is {type(tokens).__name__}; expected a tensor")
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or tokens.numel() == 0:
        found = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        raise ValueError(f"{name} is {found}; expected int64 of shape (B, T), not empty")
    if tokens.shape[1] > length:
        raise ValueError(f"{name} has {tokens.shape[1]} tokens in a row; expected at most {length}")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        found = f"{int(tokens.min())} to {int(tokens.max())}"
        raise ValueError(f"{name} holds {found}; expected tokens 0 <= x < {vocabulary}")
    if (tokens[:, 0] == 0).any() or ((tokens[:, :-1] == 0) & (tokens[:, 1:] != 0)).any():
        raise ValueError(f"{name} has padding, token 0, before a token; expected it at the end")


def check_pairs(memory: Tensor, target: Tensor) -> None:
    """Raise ValueError unless there are as many targets as sources."""
    if len(memory) != len(target):
        raise ValueError(f"target has {len(target)} sentences; expected {len(memory)}, as source")


def check_recall(symbols: int, **given: Tensor) -> None:
    """Raise TypeError or ValueError, naming it, unless all are (B, N) int64, symbols there are."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; expected a tensor")
        if x.ndim != 2 or x.dtype != torch.int64 or x.numel() == 0:
            found = f"{x.dtype} of shape {tuple(x.shape)}"
            raise ValueError(f"{name} is {found}; expected int64 of shape (B, N), not empty")
        if x.min() < 0 or x.max() >= symbols:
            found = f"{int(x.min())} to {int(x.max())}"
            raise ValueError(f"{name} holds {found}; expected symbols 0 <= x < {symbols}")
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    if shapes["keys"] != shapes["values"] or shapes["keys"][0] != shapes["asked"][0]:
        raise ValueError(f"shapes are {shapes}; expected a value for each key, and equal B")


def check_target(target: tuple[float, float]) -> None:
    """Raise TypeError or ValueError unless `target` is a finite mean and a positive deviation."""
    if not isinstance(target, tuple) or len(target) != 2:
        raise TypeError(f"target is {target!r}; expected (mean, standard deviation)")
    if not (math.isfinite(target[0]) and 0 < target[1] < math.inf):
        raise ValueError(f"target is {target}; expected a finite mean and a deviation above 0")


def check_sizes(config: Config, **sizes: int) -> None:
    """Raise TypeError or ValueError, naming it, for a size below 1 or a `config` that is none."""
    for name, size in sizes.items():
        check_count(name, size)
    if not isinstance(config, Config):
        raise TypeError(f"config is {config!r}; expected a Config, such as Config(dim=64)")
