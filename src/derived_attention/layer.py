"""The multi-head layer: mix along the length, project, attend, join (chapter 1).

`MultiheadAttention` runs any mechanism with the calling convention of `softmax_attention` in H
heads. Its forward pass is written once. The layer of a family overrides one or more of four steps:

- `mix` yields groups of heads with the keys and values that they attend, shorter if it pools them;
- `project` turns a sequence into heads, with several keys for each token if they are mixtures;
- `mechanism` gives a group's function its learned parameters;
- `attend` runs that function.

Whether a layer attends its own sequence is declared when it is made, by `cross`. It cannot be
inferred from the tensors: compilers, hooks, checkpointing and ``torch.func`` pass on one tensor as
several. `MultiheadAttention` says what follows from it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from derived_attention.common.checks import (
    FLOATING,
    Mechanism,
    check_callable,
    check_count,
    check_flag,
    check_flags,
    check_floating,
    check_no_bias,
    check_probability,
    check_shape,
)
from derived_attention.common.convention import (
    has_state,
    is_per_key,
    parts_of,
    state_of,
    takes,
    unwrap,
    weights_of,
)
from derived_attention.common.masks import Mask
from derived_attention.softmax.core import softmax_attention

QUERY, KEY, VALUE = range(3)
Heads = slice | list[int]
ALL = slice(None)
AS_PROJECTED: Any = None  # instead of heads: the kv_heads of the projection, not repeated


class Group(NamedTuple):
    """Heads that attend the same keys by the same function."""

    heads: Heads
    key: Tensor  # (B, M', kdim), not projected yet
    value: Tensor  # (B, M', vdim)
    mask: Mask  # over the M' keys
    base: Mechanism  # their function, without the parameters that `mechanism` adds
    spread: Callable[[Tensor], Tensor] | None = None  # weights (..., N, M') to those of M steps
    query: Tensor | None = None  # (B, N', embed_dim), if these heads have fewer queries
    restore: Callable[[Tensor], Tensor] | None = None  # (..., N', ·) to (..., N, ·), and 1 to 1


class MultiheadAttention(nn.Module):
    """Attention in H heads, with the interface and the parameters of ``nn.MultiheadAttention``.

    ``MultiHead(X) = Concat(H_1, ..., H_H) W_Oᵀ`` with ``H_h = attention(X W_Qᵀ, X W_Kᵀ, X W_Vᵀ)``
    on the h-th slice of D columns, D = embed_dim / H unless `head_dim` is given.
    ``load_state_dict`` takes the state of PyTorch's layer, and the results agree. These are the
    differences between the layers:

    - a query that may attend nothing gets zeros from its heads, where PyTorch's layer gives NaN;
    - ``is_causal=True`` needs no `attn_mask`, and if there is one, both hold;
    - sequences are batch first, and arguments after `bias` are keywords;
    - there is no `add_bias_kv` and no `add_zero_attn`;
    - a layer is declared to be self-attention or cross-attention, by `cross`;
    - nested tensors, which ``nn.TransformerEncoder`` makes in evaluation, are padded internally;
    - a mask with NaN or +inf is an error;
    - NaN and infinity in padded tokens count as 0 and reach neither outputs nor gradients of other
      tokens, where in PyTorch's layer 0 times NaN makes every output NaN. Tokens that are excluded
      only by `attn_mask` or by causality have to be finite, as in PyTorch's layer.

    ``torch.export`` fixes a layer to the lengths of its example, because most mechanisms compute in
    chunks or windows, and their number is part of the exported program.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width of the layer, and number of heads H, which divides it if `head_dim` is left out.
    dropout : float
        Probability of dropping an attention weight in training. Any value above 0 makes the layer
        store the (N, M) matrix in training, at the cost that `need_weights` has in `forward`.
    bias : bool
        Whether the projections have biases.
    kdim, vdim : int, optional
        Features of key and value; `embed_dim` if left out.
    batch_first : bool
        True; no other layout is supported.
    attention : callable
        A mechanism with the calling convention of `softmax_attention`; a module's parameters
        become the layer's.
    head_dim : int, optional
        D, the features of a head; the output projection maps H D features to `embed_dim`.
    kv_heads : int, optional
        Number G of heads of keys and values, a divisor of H: head h uses the keys and values of
        head ``h // (H / G)``. 1 is multi-query attention [Shazeer2019]; H if left out.
    projected : bool
        False: there are no projections and no parameters. Head h is the h-th slice of the features,
        and so is its output; `bias` has no meaning, and sizes cannot differ from `embed_dim`.
    cross : bool
        False: self-attention, query i and key i belong to one token. So a padded key is a padded
        query, Primal-Attention adds to a query its own key's score, and sparse coding without
        projections leaves a query's own key out. True: cross-attention, the queries belong to
        another sequence, and none of this holds. Only this argument decides, not whether `query`
        and `key` are one tensor. Many mechanisms give the same numbers either way, and then no
        declaration is needed, as in ``nn.TransformerDecoderLayer.multihead_attn``; the others
        expect as many keys as queries unless `cross` is True. Mechanisms that pool or convolve
        queries refuse True, as queries would depend on later ones.

    Raises
    ------
    TypeError, ValueError
        For sizes that do not match, a `dropout` outside [0, 1], `batch_first=False`, an
        `attention` that is not callable, or `cross` with a mechanism that mixes queries.

    Examples
    --------
    >>> layer = MultiheadAttention(16, 4, attention=linear_attention)
    >>> x = torch.randn(2, 10, 16)
    >>> output, _ = layer(x, x, x, need_weights=False, is_causal=True)
    >>> output.shape
    torch.Size([2, 10, 16])
    """

    # nn.TransformerEncoderLayer reads this name: False keeps it from replacing this forward pass,
    # in evaluation, by its own fused softmax attention, whatever the mechanism is.
    _qkv_same_embed_dim = False

    # What the layer of a family declares:
    shown: tuple[str, ...] = ("num_heads", "kv_heads", "attention")  # attributes in `extra_repr`
    refused: tuple[str, ...] = ()  # arguments of `forward` that it does not take,
    because = ""  # and the reason
    weighs = True  # whether it computes A V, so that there are weights to return
    mixes = False  # whether it mixes along the length elsewhere than in `mix`
    alone = True  # whether the result of a query depends on no other query
    any_mask = True  # whether masks may differ between queries, if the function takes them
    paired = False  # whether self- and cross-attention differ, so that `cross` matters
    bare = True  # whether it works without projections; not inherited
    decodes = True  # whether `step` is right, if the function has a state; not inherited
    out_proj: Any  # Linear, or Identity

    def __init_subclass__(cls) -> None:
        """Give a subclass the signature of its own arguments and of those that it passes on."""
        parameters: dict[str, inspect.Parameter] = {}
        for kind in (k for k in reversed(cls.__mro__) if issubclass(k, MultiheadAttention)):
            parameters |= inspect.signature(vars(kind).get("__init__", kind.__init__)).parameters
        named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        del named[0]  # self
        cls.__signature__ = inspect.Signature(sorted(named, key=lambda p: p.kind))  # type: ignore
        cls.bare, cls.decodes = (vars(cls).get(name, False) for name in ("bare", "decodes"))

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
        D, G = _head_sizes(embed_dim, num_heads, head_dim, kv_heads)
        check_probability("dropout", dropout)
        check_flags(bias=bias, batch_first=batch_first)
        if not batch_first:
            raise ValueError(
                "batch_first is False; expected True: inputs are (batch, length, features)"
            )
        check_callable("attention", attention)
        self._check_projected(projected, (kdim, vdim, D * num_heads, D * G), embed_dim)
        super().__init__()
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim = embed_dim if kdim is None else check_count("kdim", kdim, 1)
        self.vdim = embed_dim if vdim is None else check_count("vdim", vdim, 1)
        self.batch_first = batch_first
        self.head_dim, self.kv_heads = D, G
        self._declare(cross, attention)

        self.projected = projected
        self.in_proj_bias: nn.Parameter | None = None
        if projected:
            self._make_projections(bias, {"device": device, "dtype": dtype})
        else:
            self.out_proj = nn.Identity()

    def _declare(self, cross: bool, attention: Mechanism) -> None:
        """Set what follows from `cross` and from the attributes of the function."""
        check_flag("cross", cross)
        differs, parts = takes(attention, "cross"), list(parts_of(attention))
        self.attention = (
            functools.partial(attention, cross=True) if differs and cross else attention
        )
        self.cross, self.paired = cross, self.paired or differs
        self.takes_query_mask = takes(attention, "query_mask")
        self.any_mask = self.any_mask and not is_per_key(attention)
        if not all(getattr(f, "alone", True) for f in (self, *parts)):
            self.mix_queries()

    def mix_queries(self) -> None:
        """Declare that queries are pooled or convolved together, which excludes `cross`.

        Raises
        ------
        ValueError
            With ``cross=True``.
        """
        self.alone, self.any_mask, self.paired = False, False, True
        if self.cross:
            raise ValueError(
                f"cross is True; expected False: {type(self).__name__} mixes queries along their "
                "length, so that in a decoder they would depend on later ones; use a mechanism "
                "that treats each query alone, or query scales of 1"
            )

    def _check_projected(self, projected: bool, sizes: tuple, embed_dim: int) -> None:
        check_flag("projected", projected)
        if not projected and not self.bare:
            kind = type(self).__name__
            raise ValueError(f"projected is False; expected True for {kind}, which has parameters")
        if not projected and not {*sizes} <= {None, embed_dim}:
            raise ValueError(
                "projected is False; expected kdim, vdim, head_dim and kv_heads to be left out: "
                f"heads are slices of the {embed_dim} features"
            )

    def _make_projections(self, bias: bool, factory: dict[str, Any]) -> None:
        """Draw the same weights in the same order as PyTorch's layer, for each seed."""
        D, H, G = self.head_dim, self.num_heads, self.kv_heads
        # Of the same type as PyTorch's, which dynamic quantisation leaves alone, as we read weight.
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
            With `is_causal` the result is that of the sequence without its padding, on whichever
            side that is, and padded positions get the bias of W_O. With `attn_mask`, or a
            mechanism with any mask, padded keys are only excluded.
        need_weights, average_attn_weights : bool
            Whether to return the weights as well, and their mean over the heads. True, PyTorch's
            default, stores (N, M) matrices. A mechanism without a shorter way computes A with the
            identity for V, as A I = A, in O(N M²); that is exact if it is linear in V.
        attn_mask : Tensor, optional
            ``(N, M)``, or ``(B·H, N, M)``. Boolean: True where a query may **not** attend, the
            opposite of `softmax_attention`. Floating: added to the scores. Refused by mechanisms
            with masks over keys only, such as linear attention. Without B: ``(H, N, M)``.
        is_causal : bool
            Query i attends keys j ≤ i only.
        query_padding_mask : Tensor, optional
            ``(B, N)``. True, or -inf, where a query is padding: it is left out when queries are
            pooled or convolved. If None, it is `key_padding_mask` in self-attention, and no query
            is padding in cross-attention.

        Returns
        -------
        output : Tensor
            ``(B, N, embed_dim)``, nested where `query` is.
        weights : Tensor or None
            ``(B, N, M)`` if averaged, else ``(B, H, N, M)``; after dropout, as in PyTorch. None
            without `need_weights`, and for a mechanism without weights (Primal-Attention).

        Raises
        ------
        TypeError, ValueError
            Naming the argument, its value and what was expected.
        """
        check_flags(
            is_causal=is_causal,
            need_weights=need_weights,
            average_attn_weights=average_attn_weights,
        )
        inputs = (query, key, value)
        if any([isinstance(x, Tensor) and x.is_nested for x in inputs]):
            padding = (key_padding_mask, query_padding_mask)
            rest = (need_weights, attn_mask, average_attn_weights, is_causal)
            return self._forward_nested(inputs, padding, rest)
        need_weights = need_weights and self.weighs
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        self.check(query, key, value, **masks, is_causal=is_causal, need_weights=need_weights)
        mask = Mask.of_layer(
            attn_mask, key_padding_mask, is_causal, query, key, self.num_heads,
            query_padding_mask=query_padding_mask, cross=self.cross,
        )  # fmt: skip
        if is_causal and key_padding_mask is not None and attn_mask is None and not self.any_mask:
            because = "with is_causal=True there are no scores to which it could be added"
            check_no_bias("key_padding_mask", key_padding_mask, because)
            output, A = self._run_without_padding(inputs, mask, need_weights)
        else:
            output, A = self.run(*_zero_padding(mask, *inputs), mask, need_weights)
        return output, A if A is None or not average_attn_weights else A.mean(-3)

    def _run_without_padding(
        self, inputs: tuple[Tensor, Tensor, Tensor], mask: Mask, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend causally with the padding moved to the end, where no query attends it.

        So padding may be anywhere, and the mechanism needs no mask. Its numbers become 0, as a NaN
        would remain when it is multiplied by 0.
        """
        N, M = inputs[0].shape[-2], inputs[1].shape[-2]
        if self.cross or N != M:
            raise ValueError(
                f"key_padding_mask is given with is_causal=True for {N} queries and {M} keys, and "
                f"cross={self.cross}; expected self-attention: in cross-attention this mechanism "
                "cannot leave keys out of the past"
            )
        assert mask.keys is not None
        present = mask.keys.mT  # (B, N, 1)
        order = (~present).to(torch.uint8).sort(stable=True, dim=-2).indices
        back = order.argsort(-2)
        query, key, value = (_reorder(x.masked_fill(~present, 0), order) for x in inputs)
        moved = Mask(None, True)
        moved.keys = _reorder(present, order).mT
        moved.queries = None if mask.queries is None else _reorder(mask.queries.mT, order).mT
        output, A = self.run(query, key, value, moved, need_weights)
        bias = self.out_proj.bias if self.projected else None
        of_zeros = output.new_zeros(()) if bias is None else bias.to(output.dtype)
        output = torch.where(present, _reorder(output, back), of_zeros)
        if A is None:
            return output, None
        present, back = (x.unsqueeze(-3).expand(A.shape[:-1] + (1,)) for x in (present, back))
        return output, _reorder(_reorder(A, back).mT, back).mT.masked_fill(~present, 0)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `forward` does, with a `Mask`; inputs are not checked.

        Returns the output, and the weights (B, H, N, M) if `need_weights`.
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
            run = self.mechanism(group.base, heads)
            shares = self.kv_heads != self.num_heads and self._shares(run, heads, need_weights)
            of_keys = AS_PROJECTED if shares else heads
            k, v = self.project(KEY, group.key, of_keys), self.project(VALUE, group.value, of_keys)
            H, A = self._attend(run, q_h, k, v, group.mask, need_weights)
            outputs.append(H)  # (B, H', N, D)
            maps.append(A if A is None or group.spread is None else group.spread(A))
            groups.append(group)
        output = self._join(outputs, groups)
        return output, in_order(maps, self._order(groups)) if need_weights else None

    @property
    def has_state(self) -> bool:
        """Whether `step` can be called: causal self-attention by a mechanism that has a state."""
        return self.decodes and not self.cross and has_state(self.attention)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Attend causally from the next tokens of a sequence, given the state of those before.

        Calls for successive pieces return the outputs of ``forward(x, x, x, is_causal=True)`` for
        the whole sequence, up to rounding, and the time of a call does not depend on the number of
        earlier tokens. No weights are dropped, and no fused kernel runs.

        Parameters
        ----------
        x : Tensor
            The next n tokens, ``(B, n, embed_dim)`` or ``(n, embed_dim)``.
        state
            The state that the last call returned; None for the first tokens.

        Returns
        -------
        output : Tensor
            ``(B, n, embed_dim)``.
        state
            The mechanism's state after these tokens, such as the one that `linear_state` returns.

        Raises
        ------
        TypeError, ValueError
            As `forward`; for a state of other sizes; for a layer whose `has_state` is False.
        """
        if not self.has_state:
            name = getattr([*parts_of(self.attention)][-1], "__name__", "a function")
            raise ValueError(
                f"{type(self).__name__} with {name} has no state; expected a causal mechanism that "
                "has one, such as linear_attention, in self-attention"
            )
        self.check(x, x, x, is_causal=True)
        mask = Mask.of_layer(None, None, True, x, x, self.num_heads)
        (group,) = self.mix(x, x, x, mask)
        base = self.mechanism(group.base, group.heads)
        after = []

        def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            options |= {"fused": False} if takes(base, "fused") else {}
            after.append(state_of(base, k, v, state=state, **options))
            return base(q, k, v, state=state, **options)

        parts = enumerate((x, group.key, group.value))
        q, k, v = (self.project(part, y, ALL) for part, y in parts)
        H = self.attend(run, q, k, v, group.mask)
        return self._join([H], [group]), after[0]

    def _forward_nested(
        self, inputs: tuple[Any, Any, Any], padding: tuple[Tensor | None, ...], rest: tuple
    ) -> tuple[Tensor, Tensor | None]:
        """Pad nested query, key and value, attend, and cut the output to the queries again."""
        for name, x in zip(("query", "key", "value"), inputs, strict=True):
            if not (isinstance(x, Tensor) and x.is_nested):
                raise TypeError(f"{name} is not nested; expected all of query, key, value to be")
        for name, mask in zip(("key", "query"), padding, strict=True):
            if mask is not None:
                raise ValueError(
                    f"{name}_padding_mask is given with nested tensors; expected None: their "
                    "lengths define the padding"
                )
        queries, keys, values = ([len(row) for row in x.unbind()] for x in inputs)
        if values != keys:
            raise ValueError(f"value has the lengths {values}; expected those of key, {keys}")
        if self.paired and not self.cross and queries != keys:
            raise ValueError(
                f"key has the lengths {keys}, and query {queries}; {self._expected_inputs()}"
            )
        q, k, v = (torch.nested.to_padded_tensor(x, 0.0) for x in inputs)
        output, A = self.forward(
            q, k, v, _beyond(keys, k), *rest, query_padding_mask=_beyond(queries, q)
        )
        rows = [x[:length] for x, length in zip(output, queries, strict=True)]
        if inputs[0].layout == torch.jagged:
            return torch.nested.nested_tensor_from_jagged(torch.cat(rows), inputs[0].offsets()), A
        return torch.nested.as_nested_tensor(rows), A

    def extra_repr(self) -> str:
        """Return the options as text, for the layer's `repr`; it is the same in every process."""
        kinds = reversed(type(self).__mro__)
        names = [name for kind in kinds for name in vars(kind).get("shown", ())]
        names += ["dropout"] if self.projected and self.dropout else []
        names += [] if self.projected else ["projected"]
        names += ["cross"] if self.cross else []
        return ", ".join(f"{name}={_text(getattr(self, name))}" for name in names)

    # --- the steps, for layers of other kinds to override ----------------------------------------

    def check(self, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> None:
        """Check the inputs of `forward`; `masks` include `is_causal` and `need_weights`."""
        if self.refused:
            refuse(masks, self.refused, self.because)
        if self._fits(query, key, value):
            return
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
            actual = f"key has shape {tuple(key.shape)}, and there are {N} queries"
            raise ValueError(f"{actual}; {self._expected_inputs()}")

    def _fits(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether no closer look at the inputs is necessary."""
        if not (
            isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
            and query.dim() in (2, 3) and query.dim() == key.dim() == value.dim()
        ):  # fmt: skip
            return False
        *batch, N, E = query.shape
        dtype, device = query.dtype, query.device
        weight = self.out_proj.weight if self.projected else query
        return (
            dtype in FLOATING and dtype == key.dtype == value.dtype == weight.dtype
            and device == key.device == value.device == weight.device
            and (E, key.shape[-1], value.shape[-1]) == (self.embed_dim, self.kdim, self.vdim)
            and key.shape[:-1] == value.shape[:-1] and [*key.shape[:-2]] == batch
            and (key.shape[-2] == N or not self.paired or self.cross)
        )  # fmt: skip

    def _expected_inputs(self) -> str:
        """Return what self-attention expects, for messages."""
        advice = "for cross-attention make the layer with cross=True"
        advice = advice if self.alone else "a layer that mixes queries has no cross-attention"
        return f"expected as many keys as queries, as this is self-attention; {advice}"

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Iterable[Group]:
        """Return all heads in groups, with the `key` and `value` that they attend, mixed or pooled.

        Here there is one group, and nothing is mixed.
        """
        return (Group(ALL, key, value, mask, self.attention),)

    def project(self, part: int, x: Tensor, heads: Heads) -> Tensor:
        """Project query, key or value (part 0, 1, 2) for some heads: (B, N, ·) to (B, H', N, D).

        With `AS_PROJECTED` instead of heads, return the G heads of the projection: (B, G, N, D).
        """
        if not self.projected:
            return pick(x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2), heads)
        if self.kdim == self.vdim == self.embed_dim:
            weight = self.in_proj_weight.split(self._widths)[part]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[part]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)[part]
        return self.to_heads(x, weight, bias, heads)

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Return the function that these heads run: `base` with the layer's parameters."""
        return base

    def attend(self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask) -> Tensor:
        """Return H (B, H', N, D), or A (B, H', N, M) if v is None."""
        if mask.queries is not None:
            run = self.with_query_mask(run, mask)
        if v is None:
            return weights_of(run, q, k, **mask.keywords)
        shared = {"enable_gqa": True} if q.dim() > 2 and q.shape[-3] != v.shape[-3] else {}
        return run(q, k, v, attn_mask=mask.given, is_causal=mask.is_causal, **shared)

    def _shares(self, run: Mechanism, heads: Heads, need_weights: bool) -> bool:
        """Return whether `attend` gets keys and values with fewer heads than queries, uncopied."""
        if heads != ALL or need_weights or not getattr(unwrap(run)[0], "shared", False):
            return False
        names = "attend", "_attend"  # a layer that overrides them wants a key for each head
        own = any(getattr(type(self), x) is not getattr(MultiheadAttention, x) for x in names)
        return not (own or (self.training and self.dropout))

    def with_query_mask(self, run: Mechanism, mask: Mask) -> Mechanism:
        """Give a function that mixes queries the mask that says which of them are padding."""
        if mask.queries is None or not self.takes_query_mask:
            return run
        return functools.partial(run, query_mask=mask.queries)

    # --- what they share -------------------------------------------------------------------------

    def to_heads(self, x: Tensor, weight: Tensor, bias: Tensor | None, heads: Heads) -> Tensor:
        """Project x by the rows of `weight` that belong to these heads: (..., H', N, D).

        `weight` is ``(G D, ·)`` for G heads, each shared by H / G neighbours.
        """
        D, r = self.head_dim, self.num_heads * self.head_dim // len(weight)
        if heads is AS_PROJECTED or isinstance(heads, slice):
            x = F.linear(x, weight, bias).unflatten(-1, (-1, D)).transpose(-3, -2)
            return x if r == 1 or heads is AS_PROJECTED else x.repeat_interleave(r, -3)
        wanted = [h // r for h in heads]
        rows = sorted(set(wanted))
        weight = pick(weight.unflatten(0, (-1, D)), rows, at=0).flatten(0, 1)
        bias = None if bias is None else pick(bias.unflatten(0, (-1, D)), rows, at=0).flatten()
        x = F.linear(x, weight, bias).unflatten(-1, (-1, D)).transpose(-3, -2)
        return x if rows == wanted else x[..., [rows.index(h) for h in wanted], :, :]

    def _join(self, outputs: list[Tensor], groups: list[Group]) -> Tensor:
        """Join the heads' outputs by W_O: (B, N, embed_dim).

        Heads that all have the same fewer queries are restored to N after it, which is less work.
        """
        pairs = [(H, group.restore) for H, group in zip(outputs, groups, strict=True)]
        after = pairs[0][1] if len(pairs) == 1 else None
        if after is None:
            outputs = [H if restore is None else restore(H) for H, restore in pairs]
        heads = in_order(outputs, self._order(groups))
        joined = self.out_proj(heads.transpose(-3, -2).flatten(-2))
        return joined if after is None else after(joined)

    def _order(self, groups: list[Group]) -> list[int]:
        every = range(self.num_heads)
        return [
            h for g in groups for h in (every[g.heads] if isinstance(g.heads, slice) else g.heads)
        ]

    def _attend(
        self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return H, and A if it is asked for or needed for dropout."""
        drop = self.dropout if self.training else 0.0
        if not need_weights and drop == 0:
            return self.attend(run, q, k, v, mask), None
        A = F.dropout(self.attend(run, q, k, None, mask), drop)
        return A @ v, A  # (B, H', N, M) @ (B, H', M, D)


def _head_sizes(E: int, H: int, head_dim: int | None, kv_heads: int | None) -> tuple[int, int]:
    """Check the sizes of a layer; return the features of a head, and the heads of keys."""
    check_count("embed_dim", E, 1)
    check_count("num_heads", H, 1)
    if head_dim is None and E % H:
        raise ValueError(f"embed_dim is {E} and num_heads {H}; expected a multiple of num_heads")
    D = E // H if head_dim is None else check_count("head_dim", head_dim, 1)
    G = H if kv_heads is None else check_count("kv_heads", kv_heads, 1)
    if H % G:
        raise ValueError(f"kv_heads is {kv_heads}; expected a divisor of num_heads {H}")
    return D, G


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """Put the steps of x (..., N, E) into an order (..., N, 1)."""
    return x.gather(-2, order.expand(*order.shape[:-1], x.shape[-1]))


def _zero_padding(
    mask: Mask, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Set padded keys and values to 0, and in padded queries only what is no finite number.

    A weight of 0 would not remove a NaN of a value, and in the backward pass a NaN of a query would
    reach all keys. Other numbers of padded queries stay, as their results are PyTorch's.
    """
    if mask.queries is not None:
        query = torch.where(mask.queries.mT, query, query.nan_to_num(0.0, 0.0, 0.0))
    if mask.keys is not None:
        absent = ~mask.keys.mT
        cleaned = key.masked_fill(absent, 0)
        key, value = cleaned, cleaned if value is key else value.masked_fill(absent, 0)
    return query, key, value


def _text(value: Any) -> str:
    """Return an option as text that is the same in every process: functions by their names."""
    if isinstance(value, functools.partial):
        arguments = [_text(x) for x in value.args]
        arguments += [f"{key}={_text(x)}" for key, x in value.keywords.items()]
        return f"{_text(value.func)}({', '.join(arguments)})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, nn.Module):  # a child of the layer, which its repr shows
        return type(value).__name__
    return getattr(value, "__qualname__", None) or str(value)


def _beyond(lengths: list[int], x: Tensor) -> Tensor:
    """Return (B, N), True after the end of each sequence in x (B, N, ·)."""
    steps = torch.arange(x.shape[1], device=x.device)
    return steps >= torch.tensor(lengths, device=x.device)[:, None]


def pick(x: Tensor, heads: Heads, at: int = -3) -> Tensor:
    """Return those heads of x, which are its dimension `at`; a view if they are neighbours."""
    if not isinstance(heads, slice) and len(heads) == heads[-1] - heads[0] + 1:
        heads = slice(heads[0], heads[-1] + 1)
    index = (heads,) if at == 0 else (..., heads, *(ALL,) * (-1 - at))
    return x if heads == ALL else x[index]


def in_order(parts: list, order: list[int]) -> Tensor:
    """Concatenate the heads of all groups, sorted by their number."""
    if len(parts) == 1:
        return parts[0]
    joined = torch.cat(parts, -3)
    if order == sorted(order):
        return joined
    return joined[..., [order.index(h) for h in range(len(order))], :, :]


def refuse(masks: dict[str, Any], names: tuple[str, ...], because: str) -> None:
    """Raise ValueError for arguments of `forward` that a layer does not take."""
    for name in names:
        value = masks.get(name)
        if value is not None and value is not False:
            expected = "None" if isinstance(value, Tensor) else "False"
            raise ValueError(f"{name} is given; expected {expected}: {because}")
