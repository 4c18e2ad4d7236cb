"""The registry: the only list of all mechanisms, with one entry for each.

Benchmarks, plots, the API page, the contract tests and the package's public names read it. To add
a mechanism, write its module and its page, add an entry to `MECHANISMS`, and test what is special
about it: the contract tests cover the rest.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from derived_attention.common.checks import Mechanism
from derived_attention.common.convention import reference_of

Options = Callable[[int, int, int], dict[str, Any]]  # for N tokens, H heads, D features
PACKAGE = "derived_attention"


def no_options(N: int, H: int, D: int) -> dict[str, Any]:
    """Return no options."""
    return {}


def plain_keys(k: Tensor) -> Tensor:
    """Return keys (..., M, D) as they are."""
    return k


def two_keys(k: Tensor) -> Tensor:
    """Return keys (..., 2, M, D): the second has the distribution of the first."""
    return torch.stack([k, -k.flip(-2)], -3)


def two_shifts(N: int, H: int, D: int) -> dict[str, Any]:
    """Return two shifts for each head, standard normal as the keys that they are added to."""
    return {"shifts": torch.randn(H, 2, D, generator=torch.Generator().manual_seed(0))}


def four_scales(N: int, H: int, D: int) -> dict[str, Any]:
    """Return the scales 1, 2, 4 and 8, each for a quarter of the heads."""
    return {"scales": [2 ** (4 * h // H) for h in range(H)]}


def projections(N: int, H: int, D: int) -> dict[str, Any]:
    """Return two ways to average N tokens to 128, or to a quarter of them if that is less."""
    kept, generator = min(128, 1 + N // 4), torch.Generator().manual_seed(0)
    E, G = torch.randn(2, kept, N, generator=generator).softmax(-1)
    return {"key_projection": E, "value_projection": G}


def random_features(N: int, H: int, D: int) -> dict[str, Any]:
    """Return four random features for each of D, in orthogonal blocks."""
    draw = _load("linear_time.core.orthogonal_features")
    return {"projection": draw(D, 4 * D, torch.Generator().manual_seed(0))}


def two_fields_of_layer(N: int, H: int, D: int) -> dict[str, Any]:
    """Return a near field of 64 tokens to each side, and a far field of rank 2 D."""
    maps = "linear.core.elu_feature_map", "linear_time.core.flipped_elu_feature_map"
    return {"window": min(64, N // 4), "feature_maps": tuple(map(_load, maps))}


def two_fields(N: int, H: int, D: int) -> dict[str, Any]:
    """Return the same fields with their weights, which are parameters of the layer."""
    return two_fields_of_layer(N, H, D) | {"near": torch.tensor(0.5), "far": torch.tensor(0.25)}


def packed_queries(N: int, H: int, D: int) -> dict[str, Any]:
    """Return 128 queries that pack N keys, or a quarter as many if that is less."""
    generator = torch.Generator().manual_seed(0)
    return {"packed": torch.randn(min(128, 1 + N // 4), D, generator=generator)}


def primal_sizes(N: int, H: int, D: int) -> dict[str, Any]:
    """Return 30 directions, or D if that is less, and ten landmarks for each, at most N / 2."""
    s = min(30, D)
    return {"directions": s, "landmarks": min(10 * s, max(1, N // 2))}


def primal_weights(N: int, H: int, D: int) -> dict[str, Any]:
    """Return weights of the sizes in `primal_sizes`."""
    s, n = primal_sizes(N, H, D).values()
    draw = torch.Generator().manual_seed(0)
    W_e, W_r = torch.randn(2, n, s, generator=draw) / math.sqrt(n)
    return {"W_e": W_e, "W_r": W_r, "W_o": torch.randn(D, 2 * s, generator=draw) / math.sqrt(2 * s)}


def nine_taps(N: int, H: int, D: int) -> dict[str, Any]:
    """Return a filter of 3 x 3 numbers, and the grid of N tokens."""
    return {"weight": torch.linspace(0.05, 0.2, 9).view(3, 3), "grid": grid_of(N)}


def one_sink(N: int, H: int, D: int) -> dict[str, Any]:
    """Return the score of each head's sink, from -1 to 1."""
    return {"bias": torch.linspace(-1, 1, H)}


def few_blocks(N: int, H: int, D: int) -> dict[str, Any]:
    """Return blocks of about √N tokens, at most 32, and how many others are kept, at most 4."""
    block = min(32, near_root(N))
    return {"block": block, "kept": max(1, min(4, -(-N // block) - 2))}


def near_root(N: int) -> int:
    """Return the largest power of two up to √N, about the cheapest stride of sparse patterns."""
    return 1 << (N.bit_length() - 1) // 2


def grid_of(N: int) -> tuple[int, int]:
    """Return rows and columns of the squarest image of N pixels."""
    rows = next(r for r in range(math.isqrt(N), 0, -1) if N % r == 0)
    return rows, N // rows


@dataclass(frozen=True)
class Entry:
    """A mechanism: its names, its modules, the arguments it takes and the properties it has."""

    label: str  # in tables and legends
    color: str  # in figures: a contrast of 3:1 on white and on dark pages
    chapter: int  # the chapter that uses it first
    # The fast form: a function, or ``"module.name"`` in derived_attention, imported when used.
    function: Mechanism | str
    # The layer, as ``"module.name"``. MultiheadAttention is given the function.
    layer: str = "layer.MultiheadAttention"
    # How its keys are made of keys (..., M, D), and sample options; tensors in them are parameters.
    keys: Callable[[Tensor], Tensor] = plain_keys
    options: Options = no_options
    layer_options: Options | None = None  # of the layer, if other than those of the function
    sample: str = ""  # the options in words, for tables
    causal: bool = True  # takes is_causal=True
    any_mask: bool = False  # takes masks that differ between queries, not only masks over keys
    square: bool = False  # takes only as many keys as queries
    alone: bool = True  # the result of a query does not depend on the other queries
    placed: bool = False  # the result of a query depends on its position
    ordered: bool = False  # the order of keys matters, even without a causal mask
    linear: bool = False  # its time grows linearly with N
    biased: bool = True  # takes any floating mask, which is added to scores; else only 0 and -inf
    weights: bool = True  # computes A V, so that there are weights; else v has D features, as q
    averages: bool = True  # its weights sum to 1 over the keys, for any parameters
    # For benchmarks: heads of SDPA that one of its heads is compared with; the largest shares of
    # SDPA's time, "full" and "causal" (forward, and forward + backward; N = 4096, float32, one
    # thread of a CPU); the longest N at which the memory of the formula is measured, beside 2N.
    heads: int = 1
    goals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    reference_length: int = 1024

    @property
    def fast(self) -> Mechanism:
        """The fast form."""
        return _load(self.function) if isinstance(self.function, str) else self.function

    @property
    def reference(self) -> Mechanism:
        """The formula."""
        return reference_of(self.fast)

    def plug(self, N: int, H: int, D: int) -> Callable[..., Any]:
        """Return its layer, or its function if it has no layer, with the sample options."""
        options = (self.layer_options or self.options)(N, H, D)
        has_layer = self.layer != Entry.layer
        return functools.partial(_load(self.layer) if has_layer else self.fast, **options)

    def make_layer(self, embed_dim: int, num_heads: int, N: int, **options: Any) -> torch.nn.Module:
        """Build its layer with the sample options for N tokens, and other options."""
        plug = self.plug(N, num_heads, embed_dim // num_heads)
        if self.layer != Entry.layer:
            return plug(embed_dim, num_heads, **options)
        return _load(self.layer)(embed_dim, num_heads, attention=plug, **options)


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


_SPARSE, _BN, _CONV = "#966e14", "#009664", "#c8788c"

# fmt: off
MECHANISMS: dict[str, Entry] = {
    "softmax": Entry("Softmax", "#1e8cf0", 1, "softmax.core.softmax_attention", any_mask=True),
    "linear": Entry("Linear", "#f06e0a", 4, "linear.core.linear_attention", linear=True,
        goals={"causal": (0.12, 0.15)}),
    "window": Entry("Window", _SPARSE, 4, "sparse.core.window_attention",
        options=lambda N, H, D: {"window": min(64, N // 4)},
        sample="64 to each side", placed=True, linear=True, goals={"full": (0.09, 0.10)},
        ordered=True),
    "strided": Entry("Strided", _SPARSE, 4, "sparse.core.strided_attention",
        options=lambda N, H, D: {"stride": near_root(N)},
        sample="every √N-th", placed=True, goals={"full": (0.15, 0.15)}, ordered=True),
    "fixed": Entry("Fixed", _SPARSE, 4, "sparse.core.fixed_attention",
        options=lambda N, H, D: {"stride": near_root(N)},
        sample="blocks of √N", placed=True, goals={"full": (0.10, 0.10)}, ordered=True),
    "bn": Entry("Attention-BN", _BN, 5, "batch_norm.core.normalized_attention",
        layer="batch_norm.layer.NormalizedAttention", sample="recentred", any_mask=True,
        goals={"full": (1.05, 1.05), "causal": (1.10, 1.10)}, reference_length=128),
    "bn_full": Entry("Attention-BN, full", _BN, 5, "batch_norm.core.normalized_attention",
        layer="batch_norm.layer.NormalizedAttention",
        options=lambda N, H, D: {"eps": 1e-5}, any_mask=True,
        goals={"full": (1.05, 1.05), "causal": (1.10, 1.10)}, reference_length=128),
    "sh": Entry("Attention-SH", "#aa32b4", 5, "scaled_heads.core.scaled_heads_attention",
        layer="scaled_heads.layer.ScaledHeadsAttention",
        options=four_scales, biased=False,
        sample="scales 1, 2, 4, 8", causal=False, goals={"full": (0.52, 0.52)}, ordered=True),
    "bn_sh": Entry("Attention-BN+SH", "#6ea046", 5, "scaled_heads.core.normalized_scaled_heads_attention",  # noqa: E501
        layer="scaled_heads.layer.NormalizedScaledHeadsAttention",
        options=four_scales, biased=False,
        sample="scales 1, 2, 4, 8", causal=False, goals={"full": (0.52, 0.52)},
        reference_length=128, ordered=True),
    "conv1d": Entry("Attention-Conv1D", _CONV, 6, "convolutional.core.conv1d_attention",
        layer="convolutional.layer.Conv1DAttention",
        options=lambda N, H, D: {"weight": torch.linspace(0.1, 0.3, 5)}, layer_options=no_options,
        sample="5 taps", alone=False, goals={"full": (1.10, 1.10)}, ordered=True),
    "conv2d": Entry("Attention-Conv2D", _CONV, 6, "convolutional.core.conv2d_attention",
        layer="convolutional.layer.Conv2DAttention",
        options=nine_taps, layer_options=lambda N, H, D: {"grid": grid_of(N)},
        sample="3×3 taps", causal=False, square=True, alone=False, ordered=True),
    "mrs": Entry("MrsHA", "#e65aaa", 7, "multiresolution.core.multiresolution_attention",
        layer="multiresolution.layer.MultiresolutionAttention",
        options=four_scales, biased=False,
        sample="scales 1, 2, 4, 8", alone=False, goals={"full": (0.38, 0.38)}, ordered=True),
    "linformer": Entry("Linformer", "#a0643c", 8, "linear_time.core.linformer_attention",
        layer="linear_time.layer.LinformerAttention",
        options=projections,
        layer_options=lambda N, H, D: {"length": N, "kept": min(128, 1 + N // 4)},
        sample="128 kept", causal=False, averages=False, linear=True, goals={"full": (0.10, 0.10)},
        ordered=True),
    "performer": Entry("Performer", "#8250dc", 8, "linear_time.core.performer_attention",
        layer="linear_time.layer.PerformerAttention",
        options=random_features, layer_options=lambda N, H, D: {"features": 4 * D},
        sample="4 D features", linear=True, goals={"full": (0.35, 0.35), "causal": (0.80, 0.60)},
        reference_length=64),
    "fmm": Entry("FMM", "#5aa000", 8, "linear_time.core.fmm_attention",
        layer="linear_time.layer.FMMAttention",
        options=two_fields, layer_options=two_fields_of_layer,
        sample="64 to each side, 2 maps", averages=False, placed=True, linear=True,
        goals={"full": (0.32, 0.32), "causal": (0.60, 0.60)}, ordered=True),
    "luna": Entry("Luna", "#468c8c", 8, "linear_time.core.luna_attention",
        layer="linear_time.layer.LunaAttention",
        options=packed_queries, layer_options=lambda N, H, D: {"length": min(128, 1 + N // 4)},
        sample="128 packed", causal=False, linear=True, goals={"full": (0.15, 0.15)}),
    "mra": Entry("MRA-2", "#d25a78", 8, "mra.core.mra_attention",
        layer="mra.layer.MRAAttention",
        options=lambda N, H, D: {"block": min(32, near_root(N)), "kept": 4},
        sample="4 blocks of 32", causal=False, alone=False, goals={"full": (0.25, 0.25)},
        ordered=True),
    "mgk": Entry("MGK", "#6e6e0a", 9, "mixture.core.mixture_attention",
        layer="mixture.layer.MixtureAttention", keys=two_keys, sample="2 keys", any_mask=True,
        heads=2, goals={"full": (0.97, 1.05), "causal": (1.05, 1.10)}, reference_length=2048),
    "hard_mgk": Entry("MGK, hard E-step", "#d21e64", 9, "mixture.core.hard_mixture_attention",
        layer="mixture.layer.MixtureAttention", keys=two_keys,
        layer_options=lambda N, H, D: {"hard": True},
        sample="2 keys", any_mask=True, heads=2, goals={"full": (1.10, 1.15)},
        reference_length=2048),
    "smgk": Entry("sMGK", "#b48c64", 10, "mixture.shifted.shifted_mixture_attention",
        layer="mixture.layer.MixtureAttention",
        options=two_shifts, layer_options=lambda N, H, D: {"shifted": True},
        sample="2 shifts", any_mask=True, heads=2, goals={"full": (1.00, 1.00)},
        reference_length=2048),
    "mlk": Entry("MLK", "#505afa", 10, "mixture.core.linear_mixture_attention",
        layer="mixture.layer.MixtureAttention", keys=two_keys,
        layer_options=lambda N, H, D: {"linear": True},
        sample="2 keys", linear=True, heads=2, goals={"causal": (0.12, 0.13)}),
    "primal": Entry("Primal-Attention", "#e6001e", 12, "primal.core.primal_attention",
        layer="primal.layer.PrimalAttention", options=primal_weights,
        layer_options=primal_sizes,
        sample="30 directions", square=True, linear=True, biased=False, weights=False,
        averages=False, goals={"full": (0.05, 0.05)}, ordered=True),
    "ridge": Entry("Ridge", "#d214c8", 13, "sparse_coding.core.ridge_attention",
        layer="sparse_coding.layer.RidgeAttention", linear=True, biased=False, averages=False,
        goals={"full": (0.10, 0.10)}, reference_length=128),
    "lasso": Entry("Lasso, by ADMM", "#147878", 13, "sparse_coding.core.lasso_attention",
        layer="sparse_coding.layer.LassoAttention", sample="5 steps", biased=False, averages=False,
        goals={"full": (7.0, 10.0)}, reference_length=128),
    "delta": Entry("Delta rule", "#7878a0", 15, "delta.core.delta_attention",
        layer="delta.layer.DeltaAttention", linear=True, biased=False, averages=False,
        goals={"causal": (0.30, 0.40)}, reference_length=128, ordered=True),
    "sink": Entry("Sink", "#1482b4", 16, "softmax.sink.sink_attention",
        layer="softmax.sink.SinkAttention", options=one_sink, layer_options=no_options,
        sample="a key of value 0", any_mask=True, averages=False,
        goals={"full": (1.15, 1.20), "causal": (1.20, 1.20)}),
    "selected": Entry("Selected", "#a05ad2", 16, "selected.core.selected_attention",
        options=few_blocks, sample="4 blocks of 32", placed=True,
        goals={"full": (0.35, 0.25), "causal": (0.60, 0.40)}, ordered=True),
}
# fmt: on

# Other public names, by module.
_OTHERS = {
    "convolutional.core": ("mixing_matrix_1d",),
    "convolutional.layer": ("CvTAttention",),
    "delta.core": ("delta_state",),
    "linear_time.core": ("flipped_elu_feature_map", "orthogonal_features"),
    "common.filters": ("downsample", "upsample"),
    "common.pooling": ("ConvolutionPooling",),
    "registry": ("MECHANISMS", "get_attention", "list_attentions"),
    "sparse_coding.admm": ("admm", "printed_admm"),
    "testing.contract": ("check_mechanism",),
    "formulas": ("signed_power", "soft_threshold"),
    "layer": ("MultiheadAttention",),
    "common.masks": ("causal_mask",),
    "linear.core": ("elu_feature_map", "linear_attention_weights", "linear_state"),
    "mixture.core": ("em_priors", "responsibilities"),
    "mixture.shifted": ("shifted_keys",),
    "mra.core": ("mra_attention_weights",),
    "multiresolution.layer": ("multiresolution_layer",),
    "primal.core": (
        "cosine_feature_map",
        "ksvd_objective",
        "ksvd_objectives",
        "primal_scores",
    ),
    "softmax.controls": ("PositionOnlyAttention", "identity_attention", "uniform_attention"),
    "softmax.core": ("attention_weights",),
    "softmax.sink": ("sink_attention_weights",),
    "sparse_coding.core": ("RidgeState", "ridge_state"),
    "sparse.core": ("fixed_mask", "strided_mask", "window_mask"),
}


def _public() -> dict[str, str]:
    """Return the module of every public name."""
    modules = {name: module for module, names in _OTHERS.items() for name in names}
    for entry in MECHANISMS.values():
        assert isinstance(entry.function, str)  # as all are that are written here
        for path in (entry.function, f"{entry.function}_reference", entry.layer):
            module, _, name = path.rpartition(".")
            modules[name] = module
    return {name: f"{PACKAGE}.{module}" for name, module in modules.items()}


PUBLIC = _public()


def list_attentions() -> list[str]:
    """Return the names that `get_attention` accepts, in the order of the chapters.

    Examples
    --------
    >>> list_attentions()[:2]
    ['softmax', 'linear']
    """
    return list(MECHANISMS)


def get_attention(name: str) -> Mechanism:
    """Return a mechanism by its name: a function with the arguments of `softmax_attention`.

    Raises
    ------
    ValueError
        For a name that is not one of `list_attentions`.

    Examples
    --------
    >>> get_attention("mgk").__name__
    'mixture_attention'
    """
    if not isinstance(name, str) or name not in MECHANISMS:
        near = difflib.get_close_matches(str(name), MECHANISMS, 1)
        nearest = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"name is {name!r}; expected one of {', '.join(MECHANISMS)}{nearest}")
    return MECHANISMS[name].fast
