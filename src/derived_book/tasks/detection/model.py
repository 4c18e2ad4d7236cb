"""A small detection transformer, in which each of three attentions can be replaced."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.common.checks import Mechanism, check_floating
from derived_book.runtime import evaluating
from derived_book.tasks.checks import check_tensor
from derived_book.tasks.model import (
    WEIGHTS,
    Config,
    Model,
    PreNormLayer,
    check_sizes,
    is_layer,
    make_attention,
    sinusoids,
)

STRIDE = 8  # pixels from one token to the next, in each direction
SCALE = 2.0  # of positions and object queries, relative to normalised tokens
TEMPERATURE = 20.0  # of positions: the ratio of the longest wave to the shortest


class DetectionTransformer(Model):
    """The detector DETR of [Carion2020] at small size: finds all objects of an image at once.

    Three convolutions of stride 2 and one more, each with BatchNorm and ReLU, make a token of every
    8 × 8 pixels. An encoder mixes the tokens; its output is the memory. Each of a few learned
    object queries predicts one object or none: in the layers of a decoder, the queries attend to
    each other, then to the memory. From each query, a linear map then predicts the class, and a
    small network the box.

    Positions are added to queries and keys, not to values. In the encoder ``q = k = x + p`` and
    ``v = x``, with twice the `sinusoids` of row and column as p. In the decoder's self-attention
    ``q = k = x + o`` and ``v = x``, where o are the object queries and x is 0 at first. In its
    cross-attention ``q = x + o``, ``k = m + p`` and ``v = m``, with m the memory. Unlike in DETR
    the layers are normalised before each branch, and the convolutions are not pretrained.

    Parameters
    ----------
    classes : int
        C, the number of classes.
    config : Config
        `layers` in the encoder, and as many in the decoder.
    queries : int
        Q, the number of object queries, and so of the objects that can be found at most.
    encoder, decoder, cross : callable, optional
        Attention of the encoder, self-attention of the decoder, and cross-attention: a function or
        a class, as in `Config`, whose attention is the default.

    Examples
    --------
    >>> model = DetectionTransformer(classes=5, config=Config(), queries=6)
    >>> logits, boxes = model(torch.zeros(2, 3, 48, 48))
    >>> logits.shape, boxes.shape
    (torch.Size([2, 6, 6]), torch.Size([2, 6, 4]))
    """

    encoder: Any  # nn.ModuleList of MemoryLayer
    decoder: Any  # nn.ModuleList of QueryLayer

    def __init__(
        self,
        classes: int,
        config: Config,
        *,
        queries: int = 6,
        encoder: Mechanism | None = None,
        decoder: Mechanism | None = None,
        cross: Mechanism | None = None,
    ) -> None:
        super().__init__()
        check_sizes(config, classes=classes, queries=queries)
        places = {"encoder": encoder, "decoder": decoder, "cross": cross}
        for name, attention in places.items():
            if attention is not None:
                is_layer(attention, name)
        self.classes, self.queries, self.config = classes, queries, config
        self.places, dim = places, config.dim
        self.stem = nn.Sequential(
            *convolution(3, dim // 4, 2),
            *convolution(dim // 4, dim // 2, 2),
            *convolution(dim // 2, dim, 2),
            *convolution(dim, dim, 1),
        )
        mix, pair, read = (attention or config.attention for attention in places.values())
        layers = range(config.layers)
        self.encoder = nn.ModuleList(MemoryLayer(config, mix) for _ in layers)
        self.decoder = nn.ModuleList(QueryLayer(config, pair, read) for _ in layers)
        self.asked = nn.Parameter(torch.empty(queries, dim).normal_(std=SCALE))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, classes + 1)
        self.locate = nn.Sequential(
            nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4)
        )

    def forward(self, images: Tensor, every_layer: bool = False) -> tuple[Tensor, Tensor]:
        """Map images (B, 3, height, width) to logits (B, Q, C + 1) and boxes (B, Q, 4).

        The last class is "no object". Boxes are ``(cx, cy, w, h)`` in (0, 1), in sides of the
        image. With `every_layer` both have a further first dimension, for the outputs of the heads
        after each layer of the decoder; the last of them are the outputs of the model.
        """
        x, positions = self._tokens(images)
        for layer in self.encoder:
            x = layer(x, positions)  # (B, T, dim)
        memory, x = self.encoder_norm(x), torch.zeros_like(self.asked).expand(len(x), -1, -1)
        features = []
        for layer in self.decoder:
            x = layer(x, self.asked, memory, positions)  # (B, Q, dim)
            features.append(x)
        h = self.decoder_norm(torch.stack(features) if every_layer else x)
        return self.classify(h), self.locate(h).sigmoid()

    def attention_maps(self, images: Tensor) -> dict[str, list[Tensor]]:
        """Return the weights of each layer at each of the three places, with their signs.

        ``"encoder"``: (B, H, T, T) with T tokens, row by row; ``"decoder"``: (B, H, Q, Q);
        ``"cross"``: (B, H, Q, T). See `derived_book.tasks.model.Encoder.attention_maps`.

        Raises
        ------
        ValueError
            For a mechanism that has no weights.
        """
        maps: dict[str, list[Tensor]] = {"encoder": [], "decoder": [], "cross": []}
        with evaluating(self):
            x, positions = self._tokens(images)
            for layer in self.encoder:
                maps["encoder"].append(layer.maps(x, positions))
                x = layer(x, positions)
            memory, x = self.encoder_norm(x), torch.zeros_like(self.asked).expand(len(x), -1, -1)
            for layer in self.decoder:
                for name, weights in layer.maps(x, self.asked, memory, positions).items():
                    maps[name].append(weights)
                x = layer(x, self.asked, memory, positions)
        for name, layers in maps.items():
            if any(weights is None for weights in layers):
                raise ValueError(f"the attention at {name} has no weights")
        return maps

    def extra_repr(self) -> str:
        """Return the configuration, and what replaces the attentions."""
        replaced = {name: attention for name, attention in self.places.items() if attention}
        return f"{self.config}, {replaced}"

    def _tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        check_tensor("images", images, "floats", ("B", 3, "height", "width"))
        check_floating({WEIGHTS: self.asked, "images": images})
        images = images.contiguous(memory_format=torch.channels_last)  # for fast convolutions
        x = self.stem(images)
        rows, columns = x.shape[2:]
        return x.flatten(2).mT, SCALE * grid_positions(rows, columns, self.config.dim).to(x)


class MemoryLayer(PreNormLayer):
    """A pre-norm layer of the encoder: positions are added to queries and keys."""

    def __init__(self, config: Config, attention: Mechanism) -> None:
        super().__init__(dataclasses.replace(config, attention=attention))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        """Map (B, T, dim), with `positions` (T, dim), to (B, T, dim)."""
        x = self._mix(x, positions)
        return x + self.dropout(self.feedforward(self.norm2(x)))

    def maps(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        """Return the attention weights (B, H, T, T) of the forward pass."""
        y = self.norm1(x)
        q = y + positions
        return self.attention(q, q, y, average_attn_weights=False)[1]

    def _mix(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.norm1(x)
        q = y + positions
        mixed, _ = self.attention(q, q, y, need_weights=False)
        return x + self.dropout(mixed)


class QueryLayer(MemoryLayer):
    """A pre-norm layer of the decoder: queries attend to each other, then to the memory."""

    def __init__(self, config: Config, attention: Mechanism, cross: Mechanism) -> None:
        super().__init__(config, attention)
        self.cross = make_attention(cross, config.dim, config.heads, cross=True)
        self.norm3 = nn.LayerNorm(config.dim)

    def forward(  # type: ignore[override]
        self, x: Tensor, asked: Tensor, memory: Tensor, positions: Tensor
    ) -> Tensor:
        """Map (B, Q, dim), object queries `asked` (Q, dim) and a memory to (B, Q, dim)."""
        x = self._mix(x, asked)
        q, k = self.norm3(x) + asked, memory + positions
        mixed, _ = self.cross(q, k, memory, need_weights=False)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feedforward(self.norm2(x)))

    def maps(  # type: ignore[override]
        self, x: Tensor, asked: Tensor, memory: Tensor, positions: Tensor
    ) -> dict[str, Tensor]:
        """Return the attention weights of the forward pass: (B, H, Q, Q) and (B, H, Q, T)."""
        decoder = super().maps(x, asked)
        q, k = self.norm3(self._mix(x, asked)) + asked, memory + positions
        cross = self.cross(q, k, memory, average_attn_weights=False)[1]
        return {"decoder": decoder, "cross": cross}


def convolution(channels: int, width: int, stride: int) -> tuple[nn.Module, ...]:
    """Return a convolution of 3 × 3 pixels, its BatchNorm, and ReLU."""
    layer = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
    return layer, nn.BatchNorm2d(width), nn.ReLU()


def grid_positions(rows: int, columns: int, dim: int) -> Tensor:
    """Return positions (rows · columns, dim): half for the row, half for the column."""
    half = math.ceil(dim / 2)
    row = sinusoids(rows, half, TEMPERATURE)[:, None].expand(-1, columns, -1)
    column = sinusoids(columns, dim - half, TEMPERATURE).expand(rows, -1, -1)
    return torch.cat([row, column], -1).flatten(0, 1)
