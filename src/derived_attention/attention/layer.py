"""The multi-head layer: mix along the length, project, attend, join (chapter 1).

`MultiheadAttention` runs any mechanism with the calling convention of `softmax_attention` in H
heads. Its forward pass is written once. A layer of another kind overrides one of four steps:

- `mix` says which heads attend which keys and values: shorter ones, if it pools them;
- `project` turns a sequence into heads: several keys a token, if they are mixtures;
- `mechanism` gives the function that heads run its learned parameters;
- `attend` runs it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from derived_attention.attention.checks import (
    Mechanism,
    check_callable,
    check_count,
    check_flag,
    check_floating,
    check_probability,
    check_shape,
)
from derived_attention.attention.convention import weights_of
from derived_attention.attention.masks import Mask
from derived_attention.attention.softmax import softmax_attention

QUERY, KEY, VALUE = range(3)
Heads = slice | list[int]
ALL = slice(None)


class Group(NamedTuple):
    """Heads that attend alike, and what they attend."""

    heads: Heads
    key: Tensor  # (B, M', kdim), not projected yet
    value: Tensor  # (B, M', vdim)
    mask: Mask  # over the M' keys
    base: Mechanism  # what these heads run, before `mechanism` has seen it
    spread: Callable[[Tensor], Tensor] | None = None  # weights (..., N, M') to those of M steps
    query: Tensor | None = None  # (B, N', embed_dim), where these heads have fewer queries
    restore: Callable[[Tensor], Tensor] | None = None  # (..., N', ·) to (..., N, ·); linear


class MultiheadAttention(nn.Module):
    """Attention in H heads, with the interface and the parameters of ``nn.MultiheadAttention``.

    ``MultiHead(X) = Concat(H_1, ..., H_H) W_Oᵀ`` with ``H_h = attention(X W_Qᵀ, X W_Kᵀ, X W_Vᵀ)``
    on the h-th slice of D columns, D = embed_dim / H unless you say another `head_dim`.
    ``load_state_dict`` takes what PyTorch's layer has saved, and the results are the same. These
    are the differences:

    - a query that may attend nothing gets zeros from its heads, where PyTorch's layer gives NaN;
    - ``is_causal=True`` needs no `attn_mask`, and where there is one, both hold;
    - sequences are batch first, and arguments after `bias` are keywords;
    - there is no `add_bias_kv` and no `add_zero_attn`;
    - nested tensors are padded for a while: ``nn.TransformerEncoder`` makes them in evaluation;
    - an error names the argument; a mask with NaN or +inf is one.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width of the layer, and number of heads H, which divides it where `head_dim` is left out.
    dropout : float
        Probability of dropping an attention weight in training. Any value above 0 makes the layer
        store the (N, M) matrix in training, at the cost that `need_weights` has in `forward`.
    bias : bool
        Whether the projections have biases.
    kdim, vdim : int, optional
        Features of key and value; `embed_dim` where left out.
    batch_first : bool
        True; there is no other layout here.
    attention : callable
        A mechanism with the calling convention of `softmax_attention`; a module's parameters
        become the layer's.
    head_dim : int, optional
        D, the features of a head; the output projection maps H D features to `embed_dim`.
    kv_heads : int, optional
        Number G of heads that keys and values have, which divides H: head h attends with those of
        head ``h // (H / G)``. 1 is multi-query attention [Shazeer2019]; H where left out.
    projected : bool
        False: there are no projections and no parameters. Head h is the h-th slice of the features,
        and so is its output; `bias` has no meaning, and sizes cannot differ from `embed_dim`.

    Raises
    ------
    TypeError, ValueError
        For a size that does not fit, a `dropout` outside [0, 1], `batch_first=False`, an
        `attention` that cannot be called.
    """

    # nn.TransformerEncoderLayer reads this name: False keeps it from replacing, in evaluation, our
    # forward by its own fused softmax attention, whatever the mechanism is.
    _qkv_same_embed_dim = False

    shown: tuple[str, ...] = (
        "num_heads",
        "kv_heads",
        "attention",
    )  # attributes that `extra_repr` tells
    refused: tuple[str, ...] = ()  # arguments of `forward` that a kind of layer does not take,
    because = ""  # and why
    weighs = True  # whether there are attention weights to return: what it computes is A V
    out_proj: Any  # Linear, or Identity
    mixes = False  # whether a kind of layer mixes along the length elsewhere than in `mix`
    bare = True  # whether it may be without projections; a kind of layer has to say so itself

    def __init_subclass__(cls) -> None:
        """Give a subclass the signature of its own arguments, and of those that it hands on."""
        found: dict[str, inspect.Parameter] = {}
        for kind in (k for k in reversed(cls.__mro__) if issubclass(k, MultiheadAttention)):
            found |= inspect.signature(vars(kind).get("__init__", kind.__init__)).parameters
        named = [p for p in found.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        del named[0]  # self
        cls.__signature__ = inspect.Signature(sorted(named, key=lambda p: p.kind))  # type: ignore
        cls.bare = vars(cls).get("bare", False)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        attention: Mechanism = softmax_attention,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        projected: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if embed_dim < 1 or num_heads < 1 or (head_dim is None and embed_dim % num_heads):
            raise ValueError(
                f"embed_dim is {embed_dim} and num_heads {num_heads}; "
                "expected positive numbers, embed_dim a multiple of num_heads"
            )
        D = embed_dim // num_heads if head_dim is None else check_count("head_dim", head_dim, 1)
        groups = num_heads if kv_heads is None else check_count("kv_heads", kv_heads, 1)
        if num_heads % groups:
            raise ValueError(f"kv_heads is {kv_heads}; expected a divisor of num_heads {num_heads}")
        check_probability("dropout", dropout)
        if not batch_first:
            raise ValueError(
                "batch_first is False; expected True: inputs here are (batch, length, features), "
                "so transpose the first two dimensions of yours"
            )
        check_callable("attention", attention)
        self._check_projected(projected, (kdim, vdim, D * num_heads, groups * D), embed_dim)
        super().__init__()
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first = batch_first
        self.attention = attention
        self.head_dim, self.kv_heads = D, groups

        self.projected = projected
        self.in_proj_bias: nn.Parameter | None = None
        if projected:
            self._make_projections(bias, {"device": device, "dtype": dtype})
        else:
            self.out_proj = nn.Identity()

    def _check_projected(self, projected: bool, sizes: tuple, embed_dim: int) -> None:
        check_flag("projected", projected)
        if not projected and not self.bare:
            kind = type(self).__name__
            raise ValueError(f"projected is False; expected True for {kind}, which learns more")
        if not projected and not {*sizes} <= {None, embed_dim}:
            raise ValueError(
                "projected is False; expected kdim, vdim, head_dim and kv_heads to be left out: "
                f"all are slices of {embed_dim} features"
            )

    def _make_projections(self, bias: bool, factory: dict[str, Any]) -> None:
        """Draw the same weights in the same order as PyTorch's layer, for each seed."""
        D, H, G = self.head_dim, self.num_heads, self.kv_heads
        # And of the same type, which dynamic quantisation leaves alone: its weight is looked at.
        self.out_proj = NonDynamicallyQuantizableLinear(H * D, self.embed_dim, bias=bias, **factory)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(nn.init.xavier_uniform_(torch.empty(*shape, **factory)))

        self._widths = (H * D, G * D, G * D)  # of all queries, keys and values
        if self.kdim == self.vdim == self.embed_dim:
            self.in_proj_weight = weight(sum(self._widths), self.embed_dim)
        else:
            self.q_proj_weight = weight(H * D, self.embed_dim)
            self.k_proj_weight = weight(G * D, self.kdim)
            self.v_proj_weight = weight(G * D, self.vdim)
        zeros = torch.zeros(sum(self._widths), **factory)
        self.in_proj_bias = nn.Parameter(zeros) if bias else None
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and `value`.

        Parameters
        ----------
        query, key, value : Tensor
            ``(B, N, embed_dim)``, ``(B, M, kdim)``, ``(B, M, vdim)``, or all three without B, or
            nested.
        key_padding_mask : Tensor, optional
            ``(B, M)``. Boolean: True where a key is padding, not to be attended. Floating: added,
            and padding where it is -8192 or below: -inf, or ``torch.finfo(dtype).min``.
        need_weights, average_attn_weights : bool
            Whether to return the weights as well, and their mean over the heads. True, PyTorch's
            default, stores (N, M) matrices. Another mechanism than softmax is asked for its A with
            the identity in the place of V, as A I = A: exact where it is linear in V, in O(N M²).
        attn_mask : Tensor, optional
            ``(N, M)``, or ``(B·H, N, M)``. Boolean: True where a query may **not** attend, the
            opposite of `softmax_attention`. Floating: added to the scores.
        is_causal : bool
            Query i attends keys j ≤ i only.

        Returns
        -------
        output : Tensor
            ``(B, N, embed_dim)``, nested where `query` is.
        weights : Tensor or None
            ``(B, N, M)`` if averaged, else ``(B, H, N, M)``; after dropout, as in PyTorch.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what it was and what was expected.
        """
        given = (query, key, value)
        how = (need_weights, attn_mask, average_attn_weights, is_causal)
        if any(isinstance(x, Tensor) and x.is_nested for x in given):
            return self._forward_nested(given, key_padding_mask, how)
        return self._forward(given, key_padding_mask, None, *how)

    def _forward(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as `forward` says, and know which queries are padding where that is known."""
        query, key, value = given
        need_weights = need_weights and self.weighs
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        self.check(query, key, value, **masks, is_causal=is_causal, need_weights=need_weights)
        mask = Mask.of_layer(attn_mask, key_padding_mask, is_causal, query, key, self.num_heads)
        if query_padding_mask is not None:
            mask.queries = ~query_padding_mask.unsqueeze(-2)  # (B, 1, N)
        output, A = self.run(query, key, value, mask, need_weights)
        return output, A if A is None or not average_attn_weights else A.mean(-3)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `forward` does, with a mask that is made; inputs are not checked.

        Returns the output, and the weights (B, H, N, M) where they are asked for.
        """
        outputs, maps, groups = [], [], []
        q = None  # (B, H, N, D)
        for group in self.mix(query, key, value, mask):
            heads = group.heads
            if group.query is not None:
                q_h = self.project(QUERY, group.query, heads)
            else:
                q = self.project(QUERY, query, ALL) if q is None else q
                q_h = pick(q, heads)
            k, v = self.project(KEY, group.key, heads), self.project(VALUE, group.value, heads)
            run = self.mechanism(group.base, heads)
            H, A = self._attend(run, q_h, k, v, group.mask, need_weights)
            outputs.append(H)  # (B, H', N, D)
            maps.append(A if A is None or group.spread is None else group.spread(A))
            groups.append(group)
        output = self._join(outputs, groups)
        return output, in_order(maps, self._order(groups)) if need_weights else None

    def _forward_nested(
        self, given: tuple[Any, Any, Any], key_padding_mask: Tensor | None, how: tuple
    ) -> tuple[Tensor, Tensor | None]:
        """Pad nested query, key and value, attend, and cut the output to the queries again."""
        for name, x in zip(("query", "key", "value"), given, strict=True):
            if not (isinstance(x, Tensor) and x.is_nested):
                raise TypeError(f"{name} is not nested; expected all of query, key, value to be")
        if key_padding_mask is not None:
            raise ValueError(
                "key_padding_mask is given with nested tensors; expected None: their lengths say "
                "what is padding"
            )
        queries, keys, values = ([len(row) for row in x.unbind()] for x in given)
        if values != keys:
            raise ValueError("value has other lengths than key; expected one value for each key")
        padded = {id(x): torch.nested.to_padded_tensor(x, 0.0) for x in given}
        q, k, v = (padded[id(x)] for x in given)  # self-attention stays so
        output, A = self._forward((q, k, v), _beyond(keys, k), _beyond(queries, q), *how)
        rows = [x[:length] for x, length in zip(output, queries, strict=True)]
        if given[0].layout == torch.jagged:
            return torch.nested.nested_tensor_from_jagged(torch.cat(rows), given[0].offsets()), A
        return torch.nested.as_nested_tensor(rows), A

    def extra_repr(self) -> str:
        """Show what the parameters do not; a checkpoint tells two layers apart by this text."""
        kinds = reversed(type(self).__mro__)
        names = [name for kind in kinds for name in vars(kind).get("shown", ())]
        names += ["dropout"] if self.projected and self.dropout else []
        names += [] if self.projected else ["projected"]
        return ", ".join(f"{name}={_text(getattr(self, name))}" for name in names)

    # --- the steps, for layers of other kinds to override ----------------------------------------

    def check(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> None:
        """Check the inputs of `forward`; `given` are its masks, `is_causal` and `need_weights`."""
        refuse(given, self.refused, self.because)
        inputs = {"query": query, "key": key, "value": value}
        weights = {"the layer's weights": self.out_proj.weight} if self.projected else {}
        check_floating({**weights, **inputs})
        if query.dim() not in (2, 3):
            raise ValueError(
                f"query has shape {tuple(query.shape)}; expected (batch, length, features), "
                "or (length, features) for one sequence"
            )
        *batch, N, _ = query.shape
        M = key.shape[-2] if key.dim() > 1 else "M"
        check_shape("query", query, (*batch, N, self.embed_dim), "the last size is embed_dim")
        check_shape("key", key, (*batch, M, self.kdim), "the batch of query, and kdim features")
        meaning = "batch and length of key, vdim features"
        check_shape("value", value, (*batch, M, self.vdim), meaning)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Iterator[Group]:
        """Mix `key` and `value` along their length: yield all heads, in groups that attend alike.

        Here there is one group, and nothing is mixed.
        """
        yield Group(ALL, key, value, mask, self.attention)

    def project(self, part: int, x: Tensor, heads: Heads) -> Tensor:
        """Project query, key or value (part 0, 1, 2) for some heads: (B, N, ·) to (B, H', N, D)."""
        if not self.projected:
            return pick(x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2), heads)
        if self.kdim == self.vdim == self.embed_dim:
            weight = self.in_proj_weight.split(self._widths)[part]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[part]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)[part]
        return self.to_heads(x, weight, bias, heads)

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Give the function that these heads run what the layer has learned."""
        return base

    def attend(self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask) -> Tensor:
        """Return H (B, H', N, D); A (B, H', N, M) where v is None."""
        if v is None:
            return weights_of(run, q, k, **mask.keywords)
        return run(q, k, v, **mask.keywords)

    # --- what they share -------------------------------------------------------------------------

    def to_heads(self, x: Tensor, weight: Tensor, bias: Tensor | None, heads: Heads) -> Tensor:
        """Project x by those rows of `weight` that some heads own or share, and cut it into heads.

        `weight` is ``(G D, ·)`` for G heads, of which H / G neighbours share each.
        """
        D, r = self.head_dim, self.num_heads * self.head_dim // len(weight)
        if isinstance(heads, slice):
            x = F.linear(x, weight, bias).unflatten(-1, (-1, D)).transpose(-3, -2)
            return x if r == 1 else x.repeat_interleave(r, -3)
        wanted = [h // r for h in heads]
        rows = sorted(set(wanted))
        weight = pick(weight.unflatten(0, (-1, D)), rows, at=0).flatten(0, 1)
        bias = None if bias is None else pick(bias.unflatten(0, (-1, D)), rows, at=0).flatten()
        x = F.linear(x, weight, bias).unflatten(-1, (-1, D)).transpose(-3, -2)
        return x if rows == wanted else x[..., [rows.index(h) for h in wanted], :, :]

    def _join(self, outputs: list[Tensor], groups: list[Group]) -> Tensor:
        """Join the heads' outputs by W_O: (B, N, embed_dim).

        Heads with fewer queries are projected first and restored to N after: that is less work, and
        the same, as both are linear.
        """
        if not self.projected:
            pairs = zip(outputs, groups, strict=True)
            outputs = [H if group.restore is None else group.restore(H) for H, group in pairs]
        if not self.projected or all(group.restore is None for group in groups):
            heads = in_order(outputs, self._order(groups))
            return self.out_proj(heads.transpose(-3, -2).flatten(-2))
        columns = self.out_proj.weight.unflatten(-1, (self.num_heads, -1))  # (embed_dim, H, D)
        joined: Any = 0 if self.out_proj.bias is None else self.out_proj.bias
        for H, group in zip(outputs, groups, strict=True):
            weight = pick(columns, group.heads, at=-2).flatten(-2)
            part = F.linear(H.transpose(-3, -2).flatten(-2), weight)
            joined = joined + (part if group.restore is None else group.restore(part))
        return joined.to(part.dtype)  # under autocast that of a product, not of the bias

    def _order(self, groups: list[Group]) -> list[int]:
        every = range(self.num_heads)
        return [
            h for g in groups for h in (every[g.heads] if isinstance(g.heads, slice) else g.heads)
        ]

    def _attend(
        self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return H, and A where it is asked for, or needed for dropout."""
        drop = self.dropout if self.training else 0.0
        if not need_weights and drop == 0:
            return self.attend(run, q, k, v, mask), None
        A = F.dropout(self.attend(run, q, k, None, mask), drop)
        return A @ v, A  # (B, H', N, M) @ (B, H', M, D)


def _text(value: Any) -> str:
    """Return an option as text, the same in every process: of functions the names."""
    if isinstance(value, functools.partial):
        given = [_text(x) for x in value.args]
        given += [f"{key}={_text(x)}" for key, x in value.keywords.items()]
        return f"{_text(value.func)}({', '.join(given)})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, nn.Module):  # it is a part of the layer, and shown as one
        return type(value).__name__
    return getattr(value, "__qualname__", None) or str(value)


def _beyond(lengths: list[int], x: Tensor) -> Tensor:
    """Return (B, N), True where a sequence of x (B, N, ·) has ended."""
    steps = torch.arange(x.shape[1], device=x.device)
    return steps >= torch.tensor(lengths, device=x.device)[:, None]


def pick(x: Tensor, heads: Heads, at: int = -3) -> Tensor:
    """Take some heads, dimension `at`: a view where they are neighbours."""
    if not isinstance(heads, slice) and len(heads) == heads[-1] - heads[0] + 1:
        heads = slice(heads[0], heads[-1] + 1)
    where = (heads,) if at == 0 else (..., heads, *(ALL,) * (-1 - at))
    return x if heads == ALL else x[where]


def in_order(parts: list, order: list[int]) -> Tensor:
    """Put the heads of all groups back into their order."""
    if len(parts) == 1:
        return parts[0]
    joined = torch.cat(parts, -3)
    if order == sorted(order):
        return joined
    return joined[..., [order.index(h) for h in range(len(order))], :, :]


def refuse(given: dict[str, Any], names: tuple[str, ...], because: str) -> None:
    """Raise ValueError for those arguments of `forward` that a layer does not take."""
    for name in names:
        if given.get(name) is not None and given[name] is not False:
            expected = "None" if isinstance(given[name], Tensor) else "False"
            raise ValueError(f"{name} is given; expected {expected}: {because}")
