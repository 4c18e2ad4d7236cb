"""Small problems on which the kernels are held against PyTorch's form.

A `Trial` names a kernel and what its compiler has to know: dtype, widths, kind of mask. `compare`
runs it with and without the kernel, and both against PyTorch's form in float64. The tests run many
of them in Triton's interpreter, ``python -m benchmarks.gpu.verify`` runs all on a GPU (both take
them from `benchmarks.gpu.problems`), and `derived_attention.common.kernels` runs one at the first
call that wants a kernel.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from derived_attention.common.kernels import NAMES, uses_interpreter
from derived_attention.registry import MECHANISMS, get_attention

DTYPES = {name: dtype for dtype, name in NAMES.items()}  # "bf16", "fp16", "fp32"
PATTERNS = ("window", "strided", "fixed")  # by PyTorch's FlexAttention
LIBRARIES = {"delta": "fla-core"}  # by kernels of another library
# Few numbers, each a sum over all pairs of terms of both signs: whose error is small is chance.
PARAMETERS = {"dpriors"}
MASKS = ("", "causal", "keys")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One problem: a kernel by its mechanism's name, a dtype, sizes, and what is unusual.

    Attributes
    ----------
    kernel : str
        A name of the registry: ``"linear"``, ``"mlk"``, one of `PATTERNS` or of `LIBRARIES`.
    dtype : str
        ``"bf16"``, ``"fp16"``, ``"fp32"``, or ``"fp64"``, which the interpreter has.
    N, M, D, DV, B, H, R : int
        Queries, keys, features of a key and of a value, sequences, heads, components.
    mask : str
        One of `MASKS`; in ``"keys"`` one head of several has a query without a key.
    strided : bool
        Whether heads are slices of the features of a layer.
    own : bool
        Whether each head has its own priors.
    features : bool
        Of linear attention: whether φ is a function of PyTorch, which leaves a query without keys.
    gated, erase : bool
        Of the delta rule: whether there are decays, and whether it erases.
    """

    kernel: str
    dtype: str
    N: int = 300
    M: int = 300
    D: int = 64
    DV: int = 64
    B: int = 1
    H: int = 2
    R: int = 2
    mask: str = ""
    strided: bool = False
    own: bool = False
    features: bool = False
    gated: bool = False
    erase: bool = True

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        usual = {f.name: f.default for f in dataclasses.fields(self)}
        shown = [k if x is True else f"{k}={x}" for k, x in given.items() if x != usual[k]]
        return " ".join([self.kernel, self.dtype, *shown[2:]])

    @property
    def engine(self) -> str:
        """Name what runs the problem, as a message does."""
        engines = dict.fromkeys(PATTERNS, "FlexAttention") | LIBRARIES
        return engines.get(self.kernel, "the Triton kernel")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Errors of the output and of each gradient, as shares of their norms, in three ways.

    Of the kernel; of PyTorch's form in the same dtype; and of exact arithmetic on arguments that
    are rounded once more. PyTorch's form may keep all sums and factors in float32, and then has no
    error but that of its result; no kernel that multiplies in half precision is better than the
    third. That has, besides, the error of a result that is rounded and, on a GPU, of sums in
    float32 that are taken one term at a time.
    """

    trial: Trial
    kernel: dict[str, float]
    pytorch: dict[str, float]
    rounded: dict[str, float]

    @property
    def worst(self) -> float:
        """Return the largest error of the kernel as a share of what it may be."""
        # FlexAttention rounds scores once more, and fla-core the states of chunks, among others.
        factor = 2 if self.trial.engine == "the Triton kernel" else 4
        allowed = {x: factor * max(self.pytorch[x], self.rounded[x]) for x in self.kernel}
        for x in PARAMETERS & allowed.keys():
            allowed[x] *= 8
        shares = [y / allowed[x] if y else 0.0 for x, y in self.kernel.items()]
        return math.inf if any(map(math.isnan, shares)) else max(shares)

    @property
    def agrees(self) -> bool:
        """Whether no error is larger than it may be."""
        return self.worst <= 1


def dtype_of(trial: Trial) -> torch.dtype:
    """Return the dtype of the tensors of a trial."""
    return DTYPES.get(trial.dtype, torch.float64)


def inputs(trial: Trial, device: Any = "cpu", seed: int = 0) -> tuple[dict[str, Tensor], Any]:
    """Return q, k, v and what is learned, which gets gradients, and the other arguments."""
    generator = torch.Generator("cpu").manual_seed(seed)
    B, N, M, H, R = trial.B, trial.N, trial.M, trial.H, trial.R
    dtype = dtype_of(trial)
    cpu: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": "cpu"}

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, **cpu).to(device, dtype)

    def positive(*shape: int) -> Tensor:
        made = torch.rand(shape, **cpu) + 0.5
        return made.to(device, torch.promote_types(dtype, torch.float32))

    keys = (R,) if trial.kernel == "mlk" else ()
    shapes = {"q": (B, H, N, trial.D), "k": (B, H, *keys, M, trial.D), "v": (B, H, M, trial.DV)}
    made = {x: random(*shape) for x, shape in shapes.items()}
    if trial.strided:  # (1, N, H, D) in memory
        made = {x: y.transpose(1, -2).contiguous().transpose(1, -2) for x, y in made.items()}
    options: dict[str, Any] = {}
    if trial.kernel in PATTERNS:
        options |= MECHANISMS[trial.kernel].options(N, H, trial.D)
    elif trial.own and trial.kernel == "mlk" and R > 1:  # one prior divides out
        made["priors"] = positive(H, R)
    if trial.kernel == "delta":
        options["erase"] = trial.erase
        made["beta"] = positive(B, H, M) / made["k"].square().sum(-1)  # of β‖k‖² from .5 to 1.5
        made["state"] = random(B, H, trial.DV, trial.D)
        if trial.gated:
            made["decay"] = positive(B, H, M).mul_(-0.02)
    if trial.features:
        options["feature_map"] = torch.relu
        made["k"][..., : min(N, M) // 3, :] = -1  # no feature: the first queries have no key
    options |= masked(trial, device, generator)
    return made, options


def masked(trial: Trial, device: Any, generator: torch.Generator) -> dict[str, Any]:
    """Return the arguments that mask keys."""
    if trial.mask in ("", "causal"):
        return {"is_causal": trial.mask == "causal"}
    keep = torch.rand((trial.B, trial.H, 1, trial.M), generator=generator) > 0.4
    if trial.B * trial.H > 1:
        keep[-1, -1] = False
    return {"attn_mask": keep.to(device)}


def results(trial: Trial, tensors: dict[str, Tensor], options: Any) -> dict[str, Tensor]:
    """Return the output and the gradients of a fixed linear functional of it, by their names."""
    names = list(tensors)
    tensors = {x: y.detach().requires_grad_() for x, y in tensors.items()}
    out = get_attention(trial.kernel)(**tensors, **options)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype)
    slopes = torch.autograd.grad((out * weights.view_as(out)).sum(), [tensors[x] for x in names])
    return {"out": out.detach()} | {f"d{x}": s for x, s in zip(names, slopes, strict=True)}


def compare(trial: Trial, device: Any = "cpu", seed: int = 0) -> Comparison:
    """Run a trial with the kernel and without, and compare both with float64."""
    tensors, options = inputs(trial, device, seed)
    exact = {x: y.detach().double() for x, y in tensors.items()}
    double = options | {"fused": False}
    truth = results(trial, exact, double)
    runs = [
        results(trial, tensors, options | {"fused": True}),
        results(trial, tensors, options | {"fused": False}),
        results(trial, rounded(exact, dtype_of(trial)), double),
    ]
    kernel, pytorch, other = ({x: error(run[x], truth[x]) for x in truth} for run in runs)
    # The result itself is rounded, too: by a number between −1 and 1 times the unit.
    sums = unit(torch.float32) * math.sqrt(max(trial.N, trial.M))
    last = (unit(dtype_of(trial)) + (0 if uses_interpreter() else sums)) / math.sqrt(3)
    return Comparison(trial, kernel, pytorch, {x: y + last for x, y in other.items()})


def unit(dtype: torch.dtype) -> float:
    """Return the largest error of rounding to a dtype, as a share.

    The interpreter cuts numbers off for bfloat16, which is twice as much.
    """
    cut = dtype == torch.bfloat16 and uses_interpreter()
    return torch.finfo(dtype).eps / (1 if cut else 2)


def rounded(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return float64 tensors with random errors as large as those of rounding to that dtype."""
    generator = torch.Generator("cpu").manual_seed(1)
    return {
        name: x * (1 + unit(dtype) * (2 * torch.rand(x.shape, generator=generator) - 1).to(x))
        for name, x in tensors.items()
    }


def error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference as a share of the norm, or itself where that is 0."""
    size = exact.norm()
    return float((found.double() - exact).norm() / torch.where(size > 0, size, 1.0))
