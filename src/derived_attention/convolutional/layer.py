"""Layers with the filters of convolutional attention, and CvT's projections (chapter 6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.common.checks import Mechanism, check_count, check_flag
from derived_attention.common.masks import Mask
from derived_attention.common.pooling import blank
from derived_attention.convolutional.core import (
    check_grid,
    check_places,
    convolve,
    convolve_grid,
    taps_before,
)
from derived_attention.layer import Heads, MultiheadAttention


class _ConvolvedAttention(MultiheadAttention):
    """The base of Attention-Conv1D and -Conv2D: filters for each head."""

    shown: tuple[str, ...] = ("filters", "shared")
    because = "a convolved key depends on its neighbours, and is the same for every query"
    mixes = True
    alone = False
    causal, sides = False, 1

    def __init__(self, *args: Any, kernel_size: int, shared: bool, **options: Any) -> None:
        size = (check_count("kernel_size", kernel_size, 1),) * self.sides
        check_flag("shared", shared)
        super().__init__(*args, **options)
        start = self.out_proj.weight.new_zeros(self.num_heads, *size)
        centre: tuple[Any, ...] = (slice(None), *(taps_before(s, self.causal) for s in size))
        start[centre] = 1  # the identity
        self.weight = nn.Parameter(start)
        self.key_weight = None if shared else nn.Parameter(start.clone())
        self.filters, self.shared = tuple(start.shape), shared

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve (B, H, N, D) with the filters of each head."""
        return convolve(x, weight, self.causal)

    def attend(self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask) -> Tensor:
        """Convolve queries and keys first."""
        q = self.convolve(blank(q, mask.queries), self.weight)
        weight = self.weight if self.key_weight is None else self.key_weight
        return super().attend(run, q, self.convolve(blank(k, mask.keys), weight), v, mask)


class Conv1DAttention(_ConvolvedAttention):
    """Attention-Conv1D in H heads, with the interface of `MultiheadAttention`.

    It adds filters ``weight`` (H, s), and ``key_weight`` unless `shared`. A filter starts as the
    identity, so that the layer starts as softmax attention. Padded keys and queries count as 0 in a
    convolution. The forward pass takes no `attn_mask`; padding goes into `key_padding_mask`.

    Parameters
    ----------
    kernel_size : int
        s, at least 1.
    shared : bool
        Whether queries and keys have one filter, as in the derivation of eq. 45.
    causal : bool
        Whether the filters end at the position itself. `is_causal` of the forward pass has to be
        the same.
    """

    shown = ("causal",)
    refused = ("attn_mask",)

    def __init__(
        self,
        *args: Any,
        kernel_size: int = 5,
        shared: bool = True,
        causal: bool = False,
        **options: Any,
    ) -> None:
        check_flag("causal", causal)
        self.causal = causal
        super().__init__(*args, kernel_size=kernel_size, shared=shared, **options)

    def check(self, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> None:
        """Check that `is_causal` is the layer's `causal` as well."""
        super().check(query, key, value, **masks)
        if masks["is_causal"] != self.causal:
            raise ValueError(
                f"is_causal is {masks['is_causal']}; expected {self.causal}, as the layer was made "
                f"with causal={self.causal} for its filters"
            )


class _OnGrid(MultiheadAttention):
    """A layer whose tokens lie on a grid, after a class token if there is one."""

    shown: tuple[str, ...] = ("grid", "class_token")
    mixes = True

    def __init__(
        self, *args: Any, grid: tuple[int, int], class_token: bool = False, **options: Any
    ) -> None:
        grid = check_grid(grid, least=1)
        check_flag("class_token", class_token)
        super().__init__(*args, **options)
        self.grid, self.class_token = grid, class_token

    def check(self, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> None:
        """Check that all tokens have a place on the grid as well."""
        super().check(query, key, value, **masks)
        check_places({"query": query, "key": key}, self.grid, self.class_token, False)


class Conv2DAttention(_OnGrid, _ConvolvedAttention):
    """Attention-Conv2D in H heads, with the interface of `MultiheadAttention`.

    Its filters (H, s, s) start as in `Conv1DAttention`. Its forward pass takes neither `attn_mask`
    nor `is_causal`.

    Parameters
    ----------
    grid, class_token
        As in `conv2d_attention`.
    kernel_size, shared
        As in `Conv1DAttention`.
    """

    refused = ("attn_mask", "is_causal")
    sides = 2

    def __init__(
        self, *args: Any, kernel_size: int = 3, shared: bool = True, **options: Any
    ) -> None:
        super().__init__(*args, kernel_size=kernel_size, shared=shared, **options)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve (B, H, N, D) on the grid."""
        check_places({"the sequence": x}, self.grid, self.class_token, False)
        return convolve_grid(x, weight, self.grid, self.class_token)


class CvTAttention(_OnGrid):
    """Convolutional projections, as in the vision transformer CvT of [Wu2021], then attention.

    Queries, keys and values are each ``BatchNorm(Conv(X)) Wᵀ``: a convolution on the grid with a
    filter for each feature, without bias, then the linear map of `MultiheadAttention`. That is what
    remark 7 of [Nguyen2023] means. Eq. 44 as printed has the feature map Φ of the kernel instead of
    BatchNorm and W, and no stride. Unlike eq. 43, it convolves before it projects, features do not
    share a filter, and values are convolved too. The attention weights it returns are those of the
    keys that the stride leaves, with a class token first. Its forward pass takes neither masks nor
    `is_causal`.

    Parameters
    ----------
    grid : (int, int)
        Rows and columns of the tokens of query and key, each at least 1.
    class_token : bool
        Whether one more token comes first, which is not convolved.
    kernel_size : int
        s, at least 1: filters are s x s.
    kv_stride : int
        Step of the filters of keys and values along both sides of the grid: with 2 there are
        ⌈N_H / 2⌉ ⌈N_W / 2⌉ of them.
    """

    refused = ("key_padding_mask", "attn_mask", "is_causal")
    because = _ConvolvedAttention.because
    alone = False

    def __init__(
        self, *args: Any, kernel_size: int = 3, kv_stride: int = 1, **options: Any
    ) -> None:
        s = check_count("kernel_size", kernel_size, 1)
        step = check_count("kv_stride", kv_stride, 1)
        super().__init__(*args, **options)
        like = {"device": self.out_proj.weight.device, "dtype": self.out_proj.weight.dtype}
        widths = ((self.embed_dim, 1), (self.kdim, step), (self.vdim, step))
        self.convolutions = nn.ModuleList(_depthwise(E, s, stride, **like) for E, stride in widths)

    def project(self, part: int, x: Tensor, heads: Heads) -> Tensor:
        """Convolve query, key or value (B, N, E) or (N, E) on its grid first."""
        first, convolution = int(self.class_token), self.convolutions[part]
        image = x[..., first:, :].mT.unflatten(-1, self.grid)  # (B, E, N_H, N_W)
        image = convolution(image) if x.dim() > 2 else convolution(image[None])[0]
        x = torch.cat([x[..., :first, :], image.flatten(-2).mT], -2)
        return super().project(part, x, heads)


def _depthwise(E: int, s: int, stride: int, **factory: Any) -> nn.Sequential:
    """Build a convolution with a filter for each of E features, "same" padding, and BatchNorm."""
    left, right = taps_before(s), s - 1 - taps_before(s)
    return nn.Sequential(
        nn.ZeroPad2d((left, right, left, right)),
        nn.Conv2d(E, E, s, stride, groups=E, bias=False, **factory),
        nn.BatchNorm2d(E, **factory),
    )
