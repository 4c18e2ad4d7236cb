"""The inputs on which `contract` tries a mechanism, and what compares and records its results."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from derived_attention.common.checks import Mechanism
from derived_attention.registry import MECHANISMS, Entry, Options, no_options, plain_keys

COMMON = ["q", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
B, H, N, M, D, DV = 2, 3, 21, 23, 6, 5
Run = Callable[[], Any]


@dataclass
class Subject:
    """A mechanism under test, what it takes, and what has come out so far.

    The fields that it shares with `registry.Entry` mean the same; `reference` may be None.
    """

    fast: Mechanism
    reference: Mechanism | None = None
    name: str = ""
    keys: Callable[[Tensor], Tensor] = plain_keys
    options: Options = no_options
    causal: bool = True
    any_mask: bool = True
    square: bool = False
    biased: bool = True
    weights: bool = True
    ordered: bool = False
    registered: bool = False  # then error messages are compared word for word
    takes: frozenset[str] = frozenset(COMMON)
    broken: set[str] = field(default_factory=set)  # promises; and what is left for later ones:
    dtypes: list[torch.dtype] = field(default_factory=lambda: DTYPES)
    differentiable: bool = True
    masked: bool = True

    @classmethod
    def of(cls, entry: str | Entry | Subject, form: str = "fast") -> Subject:
        """Return the subject for a name or an entry of the registry: its fast form or formula."""
        if isinstance(entry, Subject):
            return entry
        entry = MECHANISMS[entry] if isinstance(entry, str) else entry
        fields = "keys options causal any_mask square biased weights ordered".split()
        flags = {key: getattr(entry, key) for key in fields}
        function = getattr(entry, form)
        return cls(function, entry.reference, function.__name__, registered=True, **flags)

    @classmethod
    def of_function(
        cls, function: Mechanism, reference: Mechanism | None, keys: Any, options: Options
    ) -> Subject:
        """Return the subject for any function; what it takes is read off or found by trying it."""
        taken = parameters_of(function)
        variadic = any(p.kind == p.VAR_KEYWORD for p in taken.values())
        takes = frozenset(COMMON if variadic or not taken else taken)
        name = getattr(function, "__name__", type(function).__name__)
        subject = cls(on_copies(function), reference, name, keys, options, takes=takes)
        subject.masked = "attn_mask" in takes
        subject.square = refuses(Case(subject, n=6, m=4).run, "k", "v", "key", "value")
        subject.weights = is_linear_in_values(subject)
        masks = {"biased": added(subject, boolean(N)), "any_mask": boolean(N, N)}
        for flag, mask in masks.items():
            setattr(subject, flag, not refuses(Case(subject, m=N, attn_mask=mask).run, "attn_mask"))
        subject.causal = not refuses(Case(subject, is_causal=True).run, "is_causal")
        subject.fast = function
        return subject

    @property
    def exact(self) -> Mechanism:
        """What it is compared with in float64, its formula or, without one, itself."""
        return self.reference or self.fast


class Case:
    """A mechanism with its sample options, on random tensors; `common` are arguments of all."""

    def __init__(
        self, mechanism: str | Entry | Subject, *, n: int = N, m: int = M,
        leading: tuple[int, ...] = (B, H), d: int = D, dv: int = DV,
        dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0, **common: Any,
    ) -> None:  # fmt: skip
        self.entry = entry = Subject.of(mechanism)
        m, dv = n if entry.square else m, dv if entry.weights else d
        shapes = (*leading, n, d), (*leading, m, d), (*leading, m, dv)
        q, k, v = tensors(*shapes, dtype=dtype, device=device, seed=seed)
        own = entry.options(max(n, m, 1), leading[-1] if leading else 1, d)
        if "grid" in own and n == 0:
            own["grid"] = (0, 4)
        own |= common
        self.tensors = {"q": q, "k": entry.keys(k.detach()).requires_grad_(), "v": v}
        for key, x in own.items():
            if key == "attn_mask" and isinstance(x, Tensor):
                self.tensors[key] = x
            elif isinstance(x, Tensor) and x.is_floating_point():
                self.tensors[key] = x.to(device, dtype).requires_grad_()
        self.options = {key: x for key, x in own.items() if key not in self.tensors}

    @property
    def further(self) -> dict[str, Any]:
        """The options that are not arguments of all."""
        given = self.tensors | self.options
        return {key: x for key, x in given.items() if key not in COMMON}

    def run(self, form: str | Mechanism = "fast", **changed: Any) -> Tensor:
        """Call a form, with other arguments where they are `changed`."""
        function = getattr(self.entry, form) if isinstance(form, str) else form
        values = {**self.tensors, **self.options, **changed}
        return function(values.pop("q"), values.pop("k"), values.pop("v"), **values)

    def results(self, form: str | Mechanism = "fast") -> tuple[Tensor, ...]:
        """Return the output, and the gradients of q, k, v, of parameters, of a floating mask."""
        if not self.entry.differentiable:
            return (self.run(form),)
        return output_and_gradients(
            lambda *values: self.run(form, **dict(zip(self.tensors, values, strict=True))),
            list(self.tensors.values()),
        )

    def with_tensors(self, change: Callable[[str, Tensor], Tensor]) -> Case:
        """Return the same with other values in the tensors: ``change(name, tensor)``."""
        other = copy.copy(self)
        other.tensors = {
            key: x
            if x.dtype == torch.bool
            else change(key, x.detach()).requires_grad_(x.requires_grad)
            for key, x in self.tensors.items()
        }
        return other

    def with_changed(self, keys: Iterable[str], change: Callable[[Tensor], Tensor]) -> Case:
        """Return the same with other values in some of q, k and v."""
        return self.with_tensors(lambda key, x: change(x) if key in keys else x)

    def double(self) -> Case:
        """Return the same in float64."""
        return self.with_tensors(lambda key, x: x.double())

    def with_other_future(self, t: int, size: float = 5) -> Case:
        """Return the same with other queries, keys and values after position t."""

        def change(x: Tensor) -> Tensor:
            late = (torch.arange(x.shape[-2]) > t)[:, None]
            return x + late * torch.linspace(-size, size, x.shape[-1]).to(x.dtype)

        return self.with_changed("qkv", change)


def keys_of(mechanism: str | Entry | Subject) -> int:
    """Return as many keys as a `Case` has."""
    return N if Subject.of(mechanism).square else M


def variants(mechanism: str | Entry | Subject, *options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return those options that a mechanism takes, and causality where it has it."""
    subject = Subject.of(mechanism)
    kept = [x for x in options if "attn_mask" not in x or subject.masked]
    return [*kept, *[{"is_causal": True}] * subject.causal]


# --- random inputs --------------------------------------------------------------------------------


def tensors(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0, device: Any = "cpu"
) -> list[Tensor]:
    """Return random leaves that require a gradient, the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def boolean(*shape: int, seed: int = 1) -> Tensor:
    """Return a random boolean mask whose rows all keep at least one key."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    return mask | (torch.arange(shape[-1]) == 0)


def added(
    mechanism: str | Entry | Subject, keep: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return a floating mask, -inf where `keep` is False; with a gradient where it may have one."""
    biased = Subject.of(mechanism).biased
    bias = tensors(keep.shape, seed=4)[0].detach().to(dtype) * biased
    return bias.masked_fill(~keep, -math.inf).requires_grad_(biased)


def written_as_numbers(keep: Tensor) -> Iterator[Tensor]:
    """Yield the masks, 0 where `keep` is True, that libraries write in each dtype."""
    for dtype in DTYPES:
        least = torch.finfo(dtype).min
        for number in (-math.inf, least, -1e30, -1e9, -1e4):
            if number >= least or number == -math.inf:
                yield torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, number)


# --- results --------------------------------------------------------------------------------------


def output_and_gradients(
    function: Mechanism, inputs: list[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of a fixed linear functional of it."""
    leaves = [x for x in inputs if x.requires_grad]
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    loss = (out * weights.view_as(out)).sum()
    return out, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def relative_errors(results: Any, exact: Any) -> list[float]:
    """Return the norms of the differences, as shares of the norms."""
    pairs = zip(results, exact, strict=True)
    return [float((x.double() - y).detach().norm() / y.detach().norm()) for x, y in pairs]


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations, each of which is a launch on a GPU; views cost nothing there."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class Held(TorchDispatchMode):
    """Follows how many bytes are held by tensors made meanwhile; `peak` is the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._storages = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x._cdata for x in _storages_of([args, kwargs])}
        results = func(*args, **(kwargs or {}))
        for key, (storage, _) in list(self._storages.items()):
            if storage.expired():
                del self._storages[key]
        for x in _storages_of(results):
            if x._cdata not in given:
                self._storages[x._cdata] = StorageWeakRef(x), x.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return results


def _storages_of(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Called(TorchDispatchMode):
    """Sees PyTorch's own kernel for softmax, which has, on a CPU, a first derivative only."""

    fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused |= "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


# --- what a function takes ------------------------------------------------------------------------


def parameters_of(function: Mechanism) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function; none where Python does not know them."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in functions
        return {}


def on_copies(function: Mechanism) -> Mechanism:
    """Hand a function copies of its inputs, as it writes to them."""

    def run(*args: Any, **options: Any) -> Tensor:
        copies = [x.clone() if isinstance(x, Tensor) else x for x in args]
        return function(*copies, **options)

    return run


def refuses(run: Run, *names: str) -> bool:
    """Return whether a call raises TypeError or ValueError that has one of these names."""
    try:
        run()
    except (TypeError, ValueError) as error:
        return any(re.search(rf"\b{name}\b", str(error)) for name in names)
    except Exception:  # the promises say what it was
        return False
    return False


def is_linear_in_values(subject: Subject) -> bool:
    """Return whether a function is A V, for values of any width; True where it cannot be called."""
    case = Case(subject)
    if refuses(case.run, "v", "value"):
        return False
    v = case.tensors["v"].detach()
    try:
        with torch.no_grad():
            both, one, other = (case.run(v=x) for x in (v + v.cos(), v, v.cos()))
    except Exception:  # the promises say what it was
        return True
    return both.shape == one.shape and torch.allclose(both, one + other, rtol=1e-6, atol=1e-6)
