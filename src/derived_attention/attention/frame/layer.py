"""The multi-head layer: mix along the length, project, attend, join (chapter 1).

`MultiheadAttention` runs any mechanism with the calling convention of `softmax_attention` in H
heads. Its forward pass is written once. A layer of another kind overrides one of four steps:

- `mix` says which heads attend which keys and values: shorter ones, if it pools them;
- `project` turns a sequence into heads: several keys a token, if they are mixtures;
- `mechanism` gives the function that heads run its learned parameters;
- `attend` runs it.

Whether a layer attends its own sequence is declared when it is made, by `cross`, and never guessed.
No tensor tells: compilers, hooks, checkpointing and ``torch.func`` hand on what was one tensor as
several. `MultiheadAttention` says what follows from it.
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

from derived_attention.attention.frame.checks import (
    Mechanism,
    check_callable,
    check_count,
    check_flag,
    check_floating,
    check_no_bias,
    check_probability,
    check_shape,
)
from derived_attention.attention.frame.convention import is_per_key, parts_of, takes, weights_of
from derived_attention.attention.frame.masks import Mask
from derived_attention.attention.softmax.fast import softmax_attention

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
    - a layer is declared to be self-attention or cross-attention, by `cross`;
    - nested tensors are padded for a while: ``nn.TransformerEncoder`` makes them in evaluation;
    - an error names the argument; a mask with NaN or +inf is one.

    From PyTorch 2.9 on, ``torch.export`` takes a dynamic length with every mechanism but those
    whose tokens lie on a grid, Attention-Conv2D and CvT. The shortest one it may be is above all
    scales, and MRA-2's kept blocks; where a mechanism pools, PyTorch cannot prove what holds for
    every length, and has to be told ``prefer_deferred_runtime_asserts_over_guards=True``. What
    walks over a sequence of known length, as sparse patterns, mixtures, causal Performer, ridge and
    the lasso do, stores a matrix.

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
    cross : bool
        False: self-attention, query i and key i belong to one token. So what is padding among the
        keys is padding among the queries, Primal-Attention adds to a query its own key's score, and
        sparse coding without projections leaves a query's own key out. True: cross-attention, the
        queries are another sequence's, and none of this holds. Nothing else decides: which objects
        `query` and `key` are, or what they hold, makes no difference. Many mechanisms give the same
        numbers either way, and then no declaration is needed, as in
        ``nn.TransformerDecoderLayer.multihead_attn``; one that does not wants as many keys as
        queries, unless `cross`. Where queries are pooled or convolved together, True is an error,
        as each of them would show the others what comes after them.

    Raises
    ------
    TypeError, ValueError
        For a size that does not fit, a `dropout` outside [0, 1], `batch_first=False`, an
        `attention` that cannot be called, `cross` where queries are mixed.
    """

    # nn.TransformerEncoderLayer reads this name: False keeps it from replacing, in evaluation, our
    # forward by its own fused softmax attention, whatever the mechanism is.
    _qkv_same_embed_dim = False

    # Attributes that `extra_repr` tells.
    shown: tuple[str, ...] = ("num_heads", "kv_heads", "attention")
    refused: tuple[str, ...] = ()  # arguments of `forward` that a kind of layer does not take,
    because = ""  # and why
    weighs = True  # whether there are attention weights to return: what it computes is A V
    out_proj: Any  # Linear, or Identity
    mixes = False  # whether a kind of layer mixes along the length elsewhere than in `mix`
    alone = True  # whether what a query gets depends on no other query
    any_mask = True  # whether masks may differ between queries, if the function takes them
    paired = False  # whether cross-attention is something else, so that one has to declare it
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
        cross: bool = False,
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
        self.head_dim, self.kv_heads = D, groups
        self._declare(cross, attention)

        self.projected = projected
        self.in_proj_bias: nn.Parameter | None = None
        if projected:
            self._make_projections(bias, {"device": device, "dtype": dtype})
        else:
            self.out_proj = nn.Identity()

    def _declare(self, cross: bool, attention: Mechanism) -> None:
        """Settle what the layer attends, from what was said of it and what its function does."""
        check_flag("cross", cross)
        asks, parts = takes(attention, "cross"), list(parts_of(attention))
        self.attention = functools.partial(attention, cross=True) if asks and cross else attention
        self.cross, self.paired = cross, self.paired or asks
        self.asks = takes(attention, "query_mask")
        self.any_mask = self.any_mask and not is_per_key(attention)
        if not all(getattr(f, "alone", True) for f in (self, *parts)):
            self.mix_queries()

    def mix_queries(self) -> None:
        """Say that queries are pooled or convolved together, and refuse to attend another sequence.

        Raises
        ------
        ValueError
            With ``cross=True``.
        """
        self.alone, self.any_mask, self.paired = False, False, True
        if self.cross:
            raise ValueError(
                f"cross is True; expected False: {type(self).__name__} mixes queries along their "
                "length, and each would show the others what comes after them, as in a decoder; "
                "expected a mechanism that takes each query for itself, or query scales of 1"
            )

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
        *,
        query_padding_mask: Tensor | None = None,
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
            With `is_causal` padding is as if it were not there, on whichever side it stands, and
            what stands in its place is W_O of zeros; but where `attn_mask` is given too, or masks
            may differ between queries, it is only not attended.
        need_weights, average_attn_weights : bool
            Whether to return the weights as well, and their mean over the heads. True, PyTorch's
            default, stores (N, M) matrices. Another mechanism than softmax is asked for its A with
            the identity in the place of V, as A I = A: exact where it is linear in V, in O(N M²).
        attn_mask : Tensor, optional
            ``(N, M)``, or ``(B·H, N, M)``. Boolean: True where a query may **not** attend, the
            opposite of `softmax_attention`. Floating: added to the scores.
        is_causal : bool
            Query i attends keys j ≤ i only.
        query_padding_mask : Tensor, optional
            ``(B, N)``. True, or -inf, where a query is padding: it takes no part in what is made of
            several queries. Left out, it is `key_padding_mask` in self-attention, and in
            cross-attention all queries are there.

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
        given, padding = (query, key, value), (key_padding_mask, query_padding_mask)
        how: tuple[Any, ...] = (need_weights, attn_mask, average_attn_weights, is_causal)
        if any(isinstance(x, Tensor) and x.is_nested for x in given):
            return self._forward_nested(given, padding, how)
        return self._forward(given, *padding, *how)

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
        """Attend, as `forward` says."""
        query, key, value = given
        need_weights = need_weights and self.weighs
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        self.check(query, key, value, **masks, is_causal=is_causal, need_weights=need_weights)
        own: dict[str, Any] = {"query_padding_mask": query_padding_mask, "cross": self.cross}
        sizes = query, key, self.num_heads
        mask = Mask.of_layer(attn_mask, key_padding_mask, is_causal, *sizes, **own)
        if is_causal and key_padding_mask is not None and attn_mask is None and not self.any_mask:
            check_no_bias(
                "key_padding_mask", key_padding_mask, "causal, there is nothing to add to"
            )
            output, A = self._run_without_padding(given, mask, need_weights)
        else:
            output, A = self.run(query, key, value, mask, need_weights)
        return output, A if A is None or not average_attn_weights else A.mean(-3)

    def _run_without_padding(
        self, given: tuple[Tensor, Tensor, Tensor], mask: Mask, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend causally as if padding were not there: move it to the end, where no query looks.

        So it may stand anywhere, and forms that are causal without any mask can run. What it holds
        becomes 0, as NaN would be seen where it is multiplied by 0.
        """
        N, M = given[0].shape[-2], given[1].shape[-2]
        if self.cross or N != M:
            raise ValueError(
                f"key_padding_mask is given with is_causal=True for {N} queries and {M} keys, and "
                f"cross={self.cross}; expected self-attention: where queries are not those of the "
                "keys, this mechanism cannot leave keys out of the past"
            )
        assert mask.keys is not None
        there = mask.keys.mT  # (B, N, 1)
        order = (~there).to(torch.uint8).sort(stable=True, dim=-2).indices
        back = order.argsort(-2)
        query, key, value = (_moved(x.masked_fill(~there, 0), order) for x in given)
        moved = Mask(None, True)
        moved.keys = _moved(there, order).mT
        moved.queries = None if mask.queries is None else _moved(mask.queries.mT, order).mT
        output, A = self.run(query, key, value, moved, need_weights)
        bias = self.out_proj.bias if self.projected else None
        nothing = output.new_zeros(()) if bias is None else bias.to(output.dtype)
        output = torch.where(there, _moved(output, back), nothing)
        if A is None:
            return output, None
        there, back = (x.unsqueeze(-3).expand(A.shape[:-1] + (1,)) for x in (there, back))
        return output, _moved(_moved(A, back).mT, back).mT.masked_fill(~there, 0)

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
        self, given: tuple[Any, Any, Any], padding: tuple[Tensor | None, ...], how: tuple
    ) -> tuple[Tensor, Tensor | None]:
        """Pad nested query, key and value, attend, and cut the output to the queries again."""
        for name, x in zip(("query", "key", "value"), given, strict=True):
            if not (isinstance(x, Tensor) and x.is_nested):
                raise TypeError(f"{name} is not nested; expected all of query, key, value to be")
        for name, mask in zip(("key", "query"), padding, strict=True):
            if mask is not None:
                raise ValueError(
                    f"{name}_padding_mask is given with nested tensors; expected None: their "
                    "lengths say what is padding"
                )
        queries, keys, values = ([len(row) for row in x.unbind()] for x in given)
        if values != keys:
            raise ValueError("value has other lengths than key; expected one value for each key")
        if self.paired and not self.cross and queries != keys:
            raise ValueError(f"key has other lengths than query; {self._paired()}")
        q, k, v = (torch.nested.to_padded_tensor(x, 0.0) for x in given)
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
        names += ["cross"] if self.cross else []
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
        if self.paired and not self.cross and M != N:
            found = f"key has shape {tuple(key.shape)}, and there are {N} queries"
            raise ValueError(f"{found}; {self._paired()}")

    def _paired(self) -> str:
        """Say what is expected of self-attention."""
        other = "for cross-attention say cross=True when you make the layer"
        other = other if self.alone else "what mixes queries along their length is nothing else"
        return f"expected as many keys as queries, as this is self-attention; {other}"

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
        run = self.told(run, mask)
        if v is None:
            return weights_of(run, q, k, **mask.keywords)
        return run(q, k, v, **mask.keywords)

    def told(self, run: Mechanism, mask: Mask) -> Mechanism:
        """Say which queries are padding to a function that mixes them."""
        if mask.queries is None or not self.asks:
            return run
        return functools.partial(run, query_mask=mask.queries)

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


def _moved(x: Tensor, order: Tensor) -> Tensor:
    """Put the steps of x (..., N, E) into an order (..., N, 1)."""
    return x.gather(-2, order.expand(*order.shape[:-1], x.shape[-1]))


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
