"""The calling convention of every mechanism: that of PyTorch's own attention.

A family writes its mathematics as a function ``form(q, k, v, mask, scale, *, ...)``: it gets q, k
and v checked, a `Mask`, the scale as a float or None, and after the star the options of the
mechanism, which it checks itself; it returns H ``(..., N, Dv)``. `mechanism` makes a function of it
that has the arguments of ``torch.nn.functional.scaled_dot_product_attention`` and takes care of
checks, masks, dropout and shared heads. The decorator's arguments declare further properties, which
become attributes of the function: ``weights`` (or None) computes A for dropout and for a layer's
`need_weights`; ``per_key`` says that masks may not differ between queries, ``alone`` that a query's
result does not depend on other queries, ``shared`` that the form takes heads that share keys as
views; ``state`` (or None) computes the form's option `state` from the keys before the first. A
formula decorated with `in_full` runs in float32 at least.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.common.checks import (
    FLOATING,
    Mechanism,
    accumulation_dtype,
    check_callable,
    check_flag,
    check_mask,
    check_positive,
    check_probability,
    check_qkv,
    check_shape,
)
from derived_attention.common.masks import Mask, exclude_absent

HAS_SHORT_FORMS = True  # tests set it to False, to try the other forms on short sequences

# Inserted into the docstring of every mechanism, for help() and the API page.
PARAMETERS = {
    "q, k, v": """q, k, v : Tensor
    Queries ``(..., H, N, D)``, keys ``(..., H, M, D)`` and values ``(..., H, M, Dv)``, in one of
    float32, float64, bfloat16, float16. B, N and M may be 0; with no key the result is 0.""",
    "attn_mask": """attn_mask : Tensor, optional
    Broadcastable to ``(..., H, N, M)``. Boolean: True where a query may attend. Floating: added
    to the scores, finite or -inf; -8192 or below, such as ``torch.finfo(dtype).min``, counts as
    -inf. If it requires a gradient, PyTorch may store the matrix.""",
    "dropout_p": """dropout_p : float
    Probability of dropping a weight. Above 0 the (N, M) matrix A is stored; a mechanism without
    a cheaper way to compute A attends with the identity as V.""",
    "is_causal": """is_causal : bool
    Query i attends keys j ≤ i, counted from the top left where N ≠ M. Excludes `attn_mask`.""",
    "scale": """scale : float, optional
    Finite and positive; replaces 1/√D.""",
    "enable_gqa": """enable_gqa : bool
    Whether k and v may have G heads, a divisor of H; each serves H / G adjacent heads of q.""",
}
COMPONENTS = """q, k, v : Tensor
    Queries ``(..., H, N, D)``, values ``(..., H, M, Dv)``, one for each of M tokens, and keys
    ``(..., H, R, M, D)``: R ≥ 1 components for each token, which are masked together."""
PER_KEY = """attn_mask : Tensor, optional
    A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean: True
    where a key may be attended. Floating: added to the scores, finite or -inf; -8192 or below,
    such as ``torch.finfo(dtype).min``, counts as -inf."""
REST = """
Returns
-------
Tensor
    ``(..., H, N, Dv)``, in the dtype of `q`. Zeros for a query that may attend nothing.

Raises
------
TypeError
    For an argument that is not a tensor, not floating, or of another dtype than `q` (under
    autocast dtypes may differ), a mask that is neither boolean nor floating, a `scale` that is
    not a number.
ValueError
    For shapes or devices that do not match, a mask that holds NaN or +inf (not checked under
    ``torch.compile``), `attn_mask` with `is_causal`, a number out of its range.
RuntimeError, NotImplementedError
    For a second derivative, or one in forward mode, that a fused kernel does not have. The
    formula, ``..._reference``, has them all.
"""


def mechanism(
    form: Mechanism | None = None,
    *,
    formula: Mechanism | None = None,
    checks: Mechanism | None = None,
    weights: Mechanism | None = None,
    components: bool = False,
    per_key: bool = False,
    drops: bool = False,
    alone: bool = True,
    state: Mechanism | None = None,
    shared: bool = False,
) -> Mechanism:
    """Give `form` the arguments that `softmax_attention` describes, beside its options.

    Parameters
    ----------
    form : callable
        ``form(q, k, v, mask, scale, *, ...)``, with q ``(..., N, D)``, k ``(..., M, D)`` and v
        ``(..., M, Dv)`` checked, a `Mask`, and a scale that is None if it was left out.
    formula : callable, optional
        The function in `formulas` with the arguments of `form`, from which `reference_of` the
        mechanism is made.
    checks : callable, optional
        ``checks(q, k, v, mask, scale, *, ...)`` checks the options of a call and returns a dict of
        those that `form` and `formula` get. Its defaults are those of the mechanism.
    weights : callable, optional
        ``weights(q, k, attn_mask, is_causal, *, scale, ...)`` returns A, if that is cheaper than
        ``form`` with V = I.
    components, per_key : bool
        Whether keys are ``(..., R, M, D)``, and whether a mask has to be the same for all queries.
    drops : bool
        Whether the form takes ``dropout_p`` itself, as it has no weights to drop.
    alone : bool
        Whether the result of a query depends on no other query.
    state : callable, optional
        ``state(k, v, *, state=None, ...)`` returns what a causal form with the option `state` needs
        of keys and values that came before, of a size that does not depend on their number.
    shared : bool
        Whether the form takes heads in groups, q ``(..., G, r, N, D)``, whose keys and values are
        views of one head. Otherwise ``enable_gqa`` copies the keys and values of shared heads.

    Returns
    -------
    callable
        The mechanism; without `form`, a decorator.
    """
    properties: dict[str, Any] = dict(weights=weights, per_key=per_key, alone=alone)
    properties |= dict(state=state, shared=shared)
    if form is None:
        settings: dict[str, Any] = dict(formula=formula, checks=checks)
        settings |= dict(components=components, drops=drops)
        return functools.partial(mechanism, **settings, **properties)
    run = form if checks is None else _checked(form, checks)

    @functools.wraps(form)
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> Tensor:
        if "mask" in options:  # the name that the form has for another thing
            name = attend.__name__
            raise TypeError(f"{name}() got an unexpected keyword argument 'mask'; use attn_mask")
        if v is None:  # which `prepare` takes, for weights
            raise TypeError("v is of type NoneType; expected a Tensor")
        if enable_gqa is not False:
            shares = shared and dropout_p == 0
            heads = share_heads(q, k, v, attn_mask, enable_gqa, components, views=shares)
            if heads[0].dim() > q.dim():
                q, k, v, attn_mask = heads
                H = attend(q, k, v, attn_mask, 0.0, is_causal, scale=scale, **options)
                return H.flatten(-4, -3)
            q, k, v, attn_mask = heads
        mask, scale = prepare(q, k, v, attn_mask, is_causal, scale, components)
        if dropout_p.__class__ is not float or dropout_p != 0.0:
            check_probability("dropout_p", dropout_p)
        if per_key and attn_mask is not None:
            mask.per_key()  # raises for another one
        if drops:
            options["dropout_p"] = dropout_p
        elif dropout_p > 0:
            return _attend_with_dropout(attend, q, k, v, mask, scale, options, dropout_p)
        return run(q, k, v, mask, scale, **options)

    vars(attend).update(properties, form=None if drops else run)
    attend.__signature__ = _signature(attend, checks or form)  # type: ignore[attr-defined]
    attend.__doc__ = _document(form, components, per_key)
    if formula is not None:
        kind: dict[str, Any] = dict(
            components=components, drops=drops, weights=weights, alone=alone
        )
        _add_reference(attend, formula, checks, **kind)
    return attend


def _checked(form: Mechanism, checks: Mechanism) -> Mechanism:
    """Return a form that gets its options from `checks`, which Python's errors call by its name."""
    checks.__qualname__ = form.__name__

    def run(
        q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, **options: Any
    ) -> Tensor:
        return form(q, k, v, mask, scale, **checks(q, k, v, mask, scale, **options))

    return run


def _add_reference(
    attend: Mechanism, formula: Mechanism, checks: Mechanism | None, **properties: Any
) -> None:
    """Make the reference of a mechanism, which is its formula with the calling convention."""

    @functools.wraps(checks or attend, assigned=("__module__",), updated=())
    def form(
        q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, **options: Any
    ) -> Tensor:
        if checks is not None:
            options = checks(q, k, v, mask, scale, **options)
        return in_full(formula)(q, k, v, mask, scale, **options)

    form.__doc__ = formula.__doc__
    form.__name__ = form.__qualname__ = f"{attend.__name__}_reference"
    attend.reference = mechanism(form, **properties)  # type: ignore[attr-defined]


def reference(attend: Mechanism, formula: Mechanism, **properties: Any) -> Mechanism:
    """Make the reference of a mechanism whose formula does not have the arguments of its form.

    The decorated function checks the options of a call, which its arguments declare, and returns
    those of the `formula`. `properties` are those of `mechanism`.
    """

    def decorate(checks: Mechanism) -> Mechanism:
        _add_reference(attend, formula, checks, **properties)
        return reference_of(attend)

    return decorate


def reference_of(attend: Mechanism) -> Mechanism:
    """Return the reference of a mechanism: its formula, with the same arguments."""
    return attend.reference  # type: ignore[attr-defined]


def plain(attention: Mechanism) -> Mechanism:
    """Give a mechanism the arguments of a formula."""
    check_callable("attention", attention)
    return lambda q, k, v, mask, scale: attention(q, k, v, scale=scale, **mask.keywords)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    components: bool = False,
) -> tuple[Mask, float | None]:
    """Check the arguments that all mechanisms share; return the mask, and the scale as a float.

    A call without a mask whose arguments fit is recognised at once; any other is checked one
    argument after the other.
    """
    if (
        isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
        and q.dim() > 1 and v.dim() > 1
        and q.dtype == k.dtype == v.dtype and q.dtype in FLOATING
        and q.device == k.device == v.device
        and q.shape[-1] > 0
        and k.dim() == q.dim() + components and (not components or k.shape[-3] > 0)
        and k.shape[: q.dim() - 2] == q.shape[:-2] == v.shape[:-2]
        and k.shape[-1] == q.shape[-1] and k.shape[-2] == v.shape[-2]
        and attn_mask is None and is_causal.__class__ is bool
    ):  # fmt: skip
        mask = Mask(None, is_causal)
    else:
        check_qkv(q, k, v, components)
        check_mask(attn_mask, q, k, is_causal)
        mask = Mask(None if attn_mask is None else exclude_absent(attn_mask), is_causal)
    return mask, None if scale is None else check_positive("scale", scale)


def weights_of(attention: Mechanism, q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """Return A (..., N, M): the result for V = I, which is A if the mechanism is linear in V."""
    compute = getattr(attention, "weights", None)
    if compute is not None:
        return compute(q, k, **options)
    identity = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    return attention(q, k, identity.expand(*q.shape[:-2], -1, -1), **options)


def unwrap(attention: Mechanism) -> tuple[Mechanism, dict[str, Any]]:
    """Return the function under the partials of a mechanism, and the options that they add."""
    options: dict[str, Any] = {}
    while isinstance(attention, functools.partial):
        options = attention.keywords | options
        attention = attention.func
    return attention, options


def state_of(attention: Mechanism, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Return the state of a mechanism after keys and values, with those options that it takes."""
    function, own = unwrap(attention)
    compute = function.state  # type: ignore[attr-defined]
    options = own | options
    return compute(k, v, **{name: x for name, x in options.items() if takes(compute, name)})


def has_state(attention: Mechanism) -> bool:
    """Return whether a mechanism, or what it is a partial of, has a state."""
    return getattr(unwrap(attention)[0], "state", None) is not None


def _attend_with_dropout(
    attention: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None,
    options: dict[str, Any], dropout_p: float,
) -> Tensor:  # fmt: skip
    """Return A V with some weights of A dropped, which no fused kernel stores."""
    if options.pop("fused", None):
        raise ValueError(
            "fused is True, and dropout_p is above 0; expected dropout_p=0, or fused False or "
            "None: dropout needs the stored weights"
        )
    if options.pop("state", None) is not None:
        raise ValueError(
            "state is given, and dropout_p is above 0; expected dropout_p=0: the keys that a state "
            "sums up have no weights to drop"
        )
    A = weights_of(attention, q, k, **mask.keywords, scale=scale, **options)
    return F.dropout(A, dropout_p) @ v.to(A.dtype)


def parts_of(attention: Mechanism) -> Iterator[Mechanism]:
    """Yield the functions of a mechanism: under its partials, and those given as ``attention``."""
    function, options = unwrap(attention)
    if callable(inner := options.get("attention")):
        yield from parts_of(inner)
    yield function


def call(
    attention: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, /,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Call a mechanism on what is checked already: its form, if it is one of this library.

    Another function gets the arguments of PyTorch's attention.
    """
    form = getattr(attention, "form", None)
    if form is None or (mask.given is not None and attention.per_key):  # type: ignore[attr-defined]
        return attention(q, k, v, scale=scale, **mask.keywords, **options)
    return form(q, k, v, mask, scale, **options)


def is_short(q: Tensor, k: Tensor, most: int) -> bool:
    """Return whether there are so few queries and keys that their matrix is cheaper than none."""
    return HAS_SHORT_FORMS and q.shape[-2] <= most >= k.shape[-2]


def is_per_key(attention: Mechanism) -> bool:
    """Return whether a mechanism takes only masks that are the same for all queries."""
    return any(getattr(part, "per_key", False) for part in parts_of(attention))


def takes(function: Mechanism, name: str) -> bool:
    """Return whether a function or a class has an argument of that name."""
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # some built-in functions have no signature
        return False


def share_heads(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, enable_gqa: bool = True,
    components: bool = False, *, views: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Give k and v, which may have fewer heads than q, as many heads: by copies.

    With `views`, heads that share a key become a dimension, q (..., G, r, N, D), instead, in which
    k and v are expanded, and so does the mask.

    Raises
    ------
    TypeError, ValueError
        If `enable_gqa` is not a flag, or the heads of q are no multiple of those of k or v.
    """
    check_flag("enable_gqa", enable_gqa)
    repeats = []
    for name, x, at in (("k", k, -3 - components), ("v", v, -3)):
        if not isinstance(x, Tensor) or not isinstance(q, Tensor) or x.dim() < -at or q.dim() < 3:
            return q, k, v, attn_mask  # `prepare` raises the error
        H, G = q.shape[-3], x.shape[at]
        if G != H and (G == 0 or H % G):
            raise ValueError(f"{name} has {G} heads; expected a divisor of {H}, the heads of q")
        repeats.append(1 if G == H else H // G)
    *batch, _, _, D = q.shape
    check_shape("k", k, (*batch, *k.shape[-3 - components : -1], D), "batch and D of q")
    check_shape("v", v, (*batch, v.shape[-3], k.shape[-2], v.shape[-1]), "batch of q and M of k")
    r = repeats[0]
    if not views or r == 1 or repeats[1] != r:
        k = k if r == 1 else k.repeat_interleave(r, -3 - components)
        return q, k, v if repeats[1] == 1 else v.repeat_interleave(repeats[1], -3), attn_mask
    if isinstance(attn_mask, Tensor) and attn_mask.dim() > 2:
        if attn_mask.shape[-3] not in (1, q.shape[-3]):
            check_mask(attn_mask, q, k)  # raises
        by_head = attn_mask.shape[-3] == q.shape[-3]
        attn_mask = attn_mask.unflatten(-3, (-1, r)) if by_head else attn_mask.unsqueeze(-3)
    k, v = (x.unsqueeze(-3).expand(*x.shape[:-2], r, *x.shape[-2:]) for x in (k, v))
    return q.unflatten(-3, (-1, r)), k, v, attn_mask


def scaled(q: Tensor, scale: float | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return q times the scale, or 1/√D if it is None, in a dtype, or in float32 at least."""
    return (scale or 1 / math.sqrt(q.shape[-1])) * q.to(dtype or accumulation_dtype(q))


def extend(x: Tensor, after: int, dim: int = -2, value: float = 0.0, before: int = 0) -> Tensor:
    """Append `after` slices of a constant to x along `dim`, and prepend `before`; or return x.

    A negative `after` drops the last slices. ``F.pad`` fails for empty tensors in some releases of
    PyTorch, and copies for a gradient.
    """
    parts = [x.narrow(dim, 0, x.shape[dim] + after) if after < 0 else x]
    shape = list(x.shape)
    if before > 0:
        shape[dim] = before
        parts.insert(0, x.new_full(shape, value))
    if after > 0:
        shape[dim] = after
        parts.append(x.new_full(shape, value))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Switch autocast off in a with block, so that float32 sums stay in float32."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def in_full(form: Mechanism) -> Mechanism:
    """Let a formula compute in float32 at least, with its options, and return the dtype of q."""

    @functools.wraps(form)
    def run(
        q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, **options: Any
    ) -> Tensor:
        dtype = accumulation_dtype(q)
        for name, x in options.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                options[name] = x.to(dtype)
        with full_precision(q.device):
            return form(q.to(dtype), k.to(dtype), v.to(dtype), mask, scale, **options).to(q.dtype)

    return run


def _signature(attend: Mechanism, form: Mechanism) -> inspect.Signature:
    """Return the common arguments and the options of `form`."""
    common = inspect.signature(attend, follow_wrapped=False).parameters.values()
    shared = [p for p in common if p.kind != p.VAR_KEYWORD]
    names = {p.name for p in shared}
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    every = inspect.signature(form).parameters.values()
    options = [p for p in every if p.name not in names and p.kind in kinds]
    return inspect.Signature([*shared, *options], return_annotation="Tensor")


def _document(form: Mechanism, components: bool, per_key: bool) -> str:
    """Put the common arguments, result and errors into the docstring of a form."""
    text, name = inspect.cleandoc(form.__doc__ or ""), form.__name__
    text, mark, examples = text.partition("Examples\n--------\n")
    if name.endswith("_reference"):
        fast = name.removesuffix("_reference")
        return f"{text}\n\nIts arguments, result and errors are described in `{fast}`.\n"
    title = "Parameters\n----------\n"
    before, _, options = text.partition(title)
    options, _, after = options.partition("\n\n")
    common = dict(PARAMETERS)
    common |= {"q, k, v": COMPONENTS} if components else {}
    common |= {"attn_mask": PER_KEY} if per_key else {}
    lines = options.splitlines()
    replaced = {line.partition(" :")[0] for line in lines if not line.startswith(" ")}
    entries = [entry for key, entry in common.items() if key not in replaced]
    parameters = "\n".join([*entries, options]).rstrip()
    text = f"{before.rstrip()}\n\n{title}{parameters}\n{REST}\n{after}".rstrip()
    return f"{text}\n\n{mark}{examples}".rstrip() + "\n"
