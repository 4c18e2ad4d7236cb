"""Plugs: every mechanism of the registry in models of Hugging Face Transformers and of timm.

Both compute queries, keys and values themselves, and call a function for attention alone. So a plug
is the mechanism's layer without its projections, and takes concatenated heads. Its other
parameters (filters, shifts, a second key) become part of the model: they are trained, moved and
saved with it.

`equip` puts a mechanism into a model of Transformers, `equip_timm` into a vision transformer of
timm. `torch.nn.TransformerEncoderLayer` needs no plug: any layer of the registry may be its
``self_attn``.

A saved model cannot be mistaken for one with other attention. Its state dict has a record for each
layer, with the name of the mechanism in its key and the options in its value, and the configuration
that Transformers saves refers to `load`: ``from_pretrained`` alone raises an error that names
`load` and the mechanism.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.common.convention import share_heads
from derived_attention.common.masks import Mask, attended_keys, within
from derived_attention.layer import MultiheadAttention
from derived_attention.registry import MECHANISMS, PUBLIC, Entry, get_attention

PREFIX = "derived:"  # of the names under which mechanisms are registered with Transformers
SAVED = "derived_attention.plugs.load: "  # of the names in saved configurations
LENGTH = 1024  # the default number of tokens for sample options
CHILD = "derived_attention"  # name of the layer that `equip` adds to a module that attends
CROSS = re.compile("cross|encoder_attn|encdec", re.IGNORECASE)  # paths of cross-attention modules
CALLED_WITH = ("q", "k", "v", "attn_mask", "is_causal")  # arguments that are no options
REFUSED = ("softcap", "s_aux", "sinks", "output_attentions", "cache")  # no mechanism takes them
HEADS = ("num_heads", "num_attention_heads", "n_heads")  # names that models have for H, and for D
BACKENDS = ("_supports_sdpa", "_supports_attention_backend")
FEATURES = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")

# --- a layer without projections -----------------------------------------------------------------


class _Nothing(nn.Identity):
    """The output projection of a layer without projections, with its dtype and device."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", like.new_empty(0), persistent=False)


def make_heads(name: str, H: int, D: int, length: int, **options: Any) -> Any:
    """Return the layer of a mechanism without projections: H heads of D features, side by side.

    Parameters
    ----------
    name : str
        One of `list_attentions`.
    H, D, length : int
        Heads, features of each, and the number of tokens for its sample options.
    options
        Arguments of its layer, or of its function if it has no layer, that replace sample options;
        and `device` and `dtype`.

    Returns
    -------
    MultiheadAttention

    Raises
    ------
    ValueError
        For a name that is not in the registry.
    TypeError
        For an unknown option.
    """
    get_attention(name)  # raises for an unknown name
    entry = MECHANISMS[name]
    common: dict[str, Any] = {"bias": False}
    layer: Any
    if entry.layer == Entry.layer:
        common |= {key: options.pop(key) for key in ("device", "dtype") if key in options}
        known = [x for x in inspect.signature(entry.fast).parameters if x not in CALLED_WITH]
        if unknown := sorted(options.keys() - set(known)):
            raise TypeError(f"{name} has no option {', '.join(unknown)}; it has {', '.join(known)}")
        run = functools.partial(entry.plug(length, H, D), **options)
        layer = MultiheadAttention(H * D, H, attention=run, **common)
    else:
        layer = entry.make_layer(H * D, H, length, **common, **options)
    like = layer.out_proj.weight
    del layer.in_proj_weight
    layer.projected, layer.out_proj = False, _Nothing(like)
    return layer


class Record(nn.Module):
    """Keep the name and the options of a layer in the state dict of the model that contains it.

    A state dict of another mechanism, or of none, lacks its key; one with other options is refused.
    The record is extra state, not a buffer, so that nothing averages or converts it.
    """

    def __init__(self, name: str, length: int, options: dict[str, Any], path: str = "") -> None:
        super().__init__()
        self.name, self.length, self.path = name, length, path
        self.options = {key: _encode(x) for key, x in sorted(options.items())}

    def get_extra_state(self) -> Tensor:
        """Return the record as the bytes of JSON, in a tensor."""
        text = json.dumps({key: vars(self)[key] for key in ("length", "path", "options")})
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError if `state` is the record of another layer."""
        options = _read_record(state)["options"]
        if options != self.options:
            raise ValueError(
                f"the state has {self.name} with the options {options}; expected {self.options}, "
                "as in the model: the same parameters with other options are another model"
            )

    def extra_repr(self) -> str:
        """Show the options."""
        return ", ".join(f"{key}={x}" for key, x in self.options.items())


def _add_record(layer: Any, name: str, H: int, D: int, length: int, path: str, options: Any) -> Any:
    """Add a record of the options that a layer was made with, including sample options."""
    sample = MECHANISMS[name].plug(length, H, D).keywords  # type: ignore[attr-defined]
    kept = {k: x for k, x in (sample | options).items() if k not in ("length", "device", "dtype")}
    layer.plugged, layer.sized = name, bool(layer.state_dict())
    layer.add_module(name, Record(name, length, kept, path))
    return layer


def _read_record(state: Tensor) -> dict[str, Any]:
    return json.loads(bytes(state.cpu().tolist()))


def _encode(value: Any) -> Any:
    """Return an option as JSON; other types become a dict from a type to a value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        inner = [_encode(x) for x in value]
        return inner if isinstance(value, list) else {"tuple": inner}
    if isinstance(value, dict):
        return {"dict": {key: _encode(x) for key, x in value.items()}}
    if isinstance(value, functools.partial):
        return {"partial": [_encode(x) for x in (value.func, value.args, value.keywords)]}
    name = getattr(value, "__qualname__", None)
    return {"function": f"{value.__module__}.{name}"} if name else {"other": repr(value)}


def _decode(name: str, value: Any) -> Any:
    """Invert `_encode` for the option `name`; of functions only public ones of this package."""
    if isinstance(value, list):
        return [_decode(name, x) for x in value]
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items()))
    if kind == "tuple":
        return tuple(_decode(name, inner))
    if kind == "dict":
        return {key: _decode(name, x) for key, x in inner.items()}
    if kind == "partial":
        function, args, keywords = (_decode(name, x) for x in inner)
        return functools.partial(function, *args, **keywords)
    module, _, attribute = inner.rpartition(".")
    if kind == "function" and PUBLIC.get(attribute) == module:
        return getattr(importlib.import_module(module), attribute)
    raise ValueError(
        f"the option {name} is {inner}, which cannot be loaded from a file; expected a value that "
        "can: build the model, equip it with the same options, and call load_state_dict"
    )


def _attend(
    name: str, layer: Any, x: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, causal: bool,
    cross: bool,
) -> Tensor:  # fmt: skip
    """Attend by a layer without projections: x are (B, N, H D), (B, M, H D), (B, M, H D).

    `mask` is None, or True where one may attend: (B, 1, N, M) if a mechanism takes any mask, and
    otherwise (B, 1, 1, M), which keys are present. If causal, the queries are the last N of M
    tokens.
    """
    N, M = x[0].shape[1], x[1].shape[1]
    if MECHANISMS[name].any_mask:
        merged = Mask(mask, causal and mask is None and N > 1)
        if mask is not None and not cross and mask.dtype == torch.bool:
            merged.keys = mask.any(-2).any(1, keepdim=True)  # (B, 1, M)
            merged.queries = merged.keys[..., M - N :]
        merged.cross = cross
        return layer.run(*x, merged)[0]
    if causal and N < M and not MECHANISMS[name].alone:
        raise ValueError(
            f"{name} is called with {N} queries and {M} keys, as with a cache; expected all "
            "queries at once, as the result of a query depends on earlier queries, which are not "
            "cached: pass use_cache=False"
        )
    if mask is None:
        return _run(layer, *x, causal, cross)
    return _without_padding(functools.partial(_run, layer, causal=causal, cross=cross), *x, mask)


def _run(layer: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, cross: bool) -> Tensor:
    """Run a layer; if causal, earlier queries, which are not cached, get arbitrary values."""
    N, before = q.shape[1], k.shape[1] - q.shape[1]
    if causal and before > 0 and N:
        q = torch.cat([q[:, :1].expand(-1, before, -1), q], 1)
    mask = Mask(None, causal)
    mask.cross = cross
    return layer.run(q, k, v, mask)[0][:, -N:] if N else q


def _without_padding(
    run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> Tensor:
    """Run sequences without their padding, those with the same padding together.

    So padding may be on either side, also if a mechanism depends on positions. Padded queries get
    0.
    """
    out, N, present = torch.zeros_like(q), q.shape[1], mask[:, 0, 0]  # (B, M)
    cross = run.keywords["cross"]  # type: ignore[attr-defined]
    patterns, index = present.expand(len(q), -1).unique(dim=0, return_inverse=True)
    for i, keep in enumerate(patterns):
        rows = (index == i).nonzero()  # (b, 1)
        queries = torch.arange(N, device=q.device)
        queries = queries if cross else queries[keep[len(keep) - N :]]
        keys = keep.nonzero().squeeze(-1)
        out[rows, queries] = run(q[rows, queries], k[rows, keys], v[rows, keys])
    return out


# --- Transformers --------------------------------------------------------------------------------


def register() -> None:
    """Make all mechanisms known to Transformers, as ``derived:`` and their names, for `equip`.

    Masks are registered too, as without them Transformers makes none, and padding is attended.
    """
    import transformers  # here, as timm below: each takes seconds to import, and is optional

    for name in MECHANISMS:
        forward = functools.partial(_attention_forward, name)
        transformers.AttentionInterface.register(PREFIX + name, forward)
        make_mask = functools.partial(_make_mask, name)
        transformers.AttentionMaskInterface.register(PREFIX + name, make_mask)


def equip(model: Any, name: str, length: int = LENGTH, **options: Any) -> Any:
    """Replace all attention in a model of Transformers by a mechanism, and return the model.

    Every module that attends gets the mechanism's layer, without projections, as a child: create
    the optimiser afterwards. Queries, keys, values and outputs are projected as before. If tokens
    have several keys, the second is a linear map of the first, so that a cache stores one.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Or a part of one, such as the encoder, which then has a configuration of its own.
    name : str
        One of `list_attentions`.
    length : int
        Number of tokens for sample options; the longest sequence for Linformer.
    options
        As in `make_heads`.

    Raises
    ------
    ValueError
        For a name that is not in the registry; a mechanism that is not causal in a causal model;
        a model that does not use Transformers' attention interface, or uses it only for its own
        'eager' attention; one whose number of heads cannot be found. In a forward pass: for what a
        mechanism does not support (any mask but padding, a cache, a soft cap, sinks), and for heads
        whose size does not fit the mechanism's parameters.
    """
    get_attention(name)  # raises for an unknown name
    register()
    asking = [(path, x) for path, x in model.named_modules() if _asks(x)]
    if not asking:
        kind = type(model).__name__
        raise ValueError(f"model is a {kind}; expected one that uses AttentionInterface")
    layers = [_layer_for(module, path, name, length, options) for path, module in asking]
    for (_, module), layer in zip(asking, layers, strict=True):  # after all have been made
        module.add_module(CHILD, layer)
    _configure(model, layers[0])
    return model


def _layer_for(module: Any, path: str, name: str, length: int, options: dict[str, Any]) -> Any:
    """Make the layer for a module that attends, at `path` in the equipped model."""
    causal = getattr(module, "is_causal", True)
    cross = not causal and CROSS.search(path) is not None
    _check_kind(name, causal, cross)
    _check_family(type(module))  # type: ignore[arg-type]
    H, D = _sizes(module)
    like = next(module.parameters())
    options = options | _if_taken(name, causal=causal)
    layer = make_heads(name, H, D, length, device=like.device, dtype=like.dtype, **options)
    layer.cross = cross
    return _add_record(layer, name, H, D, length, path, options).train(module.training)


def _configure(model: Any, layer: Any) -> None:
    """Write the mechanism into the configurations of a model: in memory its name, on disk `load`.

    They are copied first, as `model` may be a part of another one.
    """
    name = layer.plugged
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "_attn_implementation"):
            if id(config) not in configs:
                configs[id(config)] = copy.deepcopy(config)
                configs[id(config)]._attn_implementation = PREFIX + name
                text = f"{SAVED}{name}({layer.get_submodule(name).extra_repr()})"
                configs[id(config)].attn_implementation = text
            module.config = configs[id(config)]


def load(folder: str | os.PathLike[str], kind: Any = None, **arguments: Any) -> Any:
    """Load a model of Transformers that was equipped and saved by its ``save_pretrained``.

    Parameters
    ----------
    folder : path
        The folder of the saved model, with its weights in one or several safetensors files.
    kind : class, optional
        The model's class, such as ``transformers.LlamaForCausalLM``; if left out, the saved one.
    arguments
        Arguments of ``from_pretrained``, such as `dtype` and `device_map`.

    Returns
    -------
    transformers.PreTrainedModel
        Equipped as it was, in evaluation mode.

    Raises
    ------
    ValueError
        For a folder without such a model, a mechanism or option that this version does not have,
        an option that cannot be loaded (a function of another package), and as in `equip`.
    TypeError
        If `kind` is not a class of models.

    Examples
    --------
    >>> plugs.equip(model, "window", window=8).save_pretrained("mine")  # doctest: +SKIP
    >>> model = plugs.load("mine")  # doctest: +SKIP
    """
    import transformers

    register()
    records, states = _read_plugs(Path(folder))
    if not records:
        raise ValueError(
            f"folder is {folder}, where no model.safetensors has an attention of {CHILD}; expected "
            "one written by save_pretrained of an equipped model"
        )
    config = getattr(kind, "config_class", transformers.AutoConfig).from_pretrained(folder)
    if kind is None:
        kind = getattr(transformers, next(iter(config.architectures or []), ""), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise TypeError(
            f"kind is {kind!r}, and {folder} was saved by {config.architectures}; expected a class "
            "of models, such as transformers.LlamaForCausalLM"
        )
    config._attn_implementation = None
    ignored = [*(kind._keys_to_ignore_on_load_unexpected or ()), rf"\.{CHILD}\."]
    quiet: Any = type(kind.__name__, (kind,), {"_keys_to_ignore_on_load_unexpected": ignored})
    model = quiet.from_pretrained(folder, config=config, **arguments)
    model.__class__ = kind
    parts = {}
    for path, saved in _saved_paths(model, records, folder).items():
        name, record = records[saved]
        inner = path if saved == record["path"] else record["path"]  # in what was equipped
        module = model.get_submodule(path)
        options = {key: _decode(key, x) for key, x in record["options"].items()}
        try:
            layer = _layer_for(module, inner, name, record["length"], options)
            layer.load_state_dict(states[saved])
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"{folder} has {name} with the options {record['options']}, which this version of "
                f"{CHILD} does not accept: {error}"
            ) from error
        module.add_module(CHILD, layer)
        parts[path.removesuffix(inner).rstrip(".")] = layer
    for part in sorted(parts, key=len):  # a part may have another mechanism than the whole
        _configure(model.get_submodule(part), parts[part])
    return model


def _read_plugs(folder: Path) -> tuple[dict[str, tuple[str, dict]], dict[str, dict[str, Tensor]]]:
    """Return the names and records of the plugs in a folder, and their state dicts, by path."""
    from safetensors import safe_open

    records: dict[str, tuple[str, dict]] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (it is no dict)
                path, separator, inner = key.partition(f".{CHILD}.")
                if separator:
                    states.setdefault(path, {})[inner] = tensors.get_tensor(key)
                    name, is_record, _ = inner.rpartition("._extra_state")
                    if is_record:
                        records[path] = name, _read_record(states[path][inner])
    for name, _ in records.values():
        if name not in MECHANISMS:
            raise ValueError(
                f"{folder} has the mechanism {name!r}; expected one of this version of {CHILD}: "
                f"{', '.join(MECHANISMS)}"
            )
    return records, states


def _saved_paths(model: Any, records: dict[str, Any], folder: Any) -> dict[str, str]:
    """Return for each module that attends the path under which it was saved.

    The paths in a model with a head have one more part than in one without it.
    """
    asking = [path for path, x in model.named_modules() if _asks(x)]
    saved = {}
    for path in asking:
        similar = [x for x in records if f".{x}".endswith(f".{path}") or path.endswith(f".{x}")]
        if path in records or len(similar) == 1:
            saved[path] = path if path in records else similar[0]
    lost = sorted(records.keys() - set(saved.values()))
    if lost and len(saved) < len(asking):
        raise ValueError(
            f"{folder} has attention of {CHILD} at {', '.join(lost)}, where a "
            f"{type(model).__name__} has none; expected the class that was saved"
        )
    return saved


def _asks(module: nn.Module) -> bool:
    """Return whether a module uses Transformers' attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


@functools.lru_cache
def _check_family(kind: Any) -> None:
    """Refuse a class whose models Transformers runs with their own attention alone."""
    models = [x for x in vars(sys.modules[kind.__module__]).values() if hasattr(x, BACKENDS[0])]
    if models and not any(getattr(x, flag) for x in models for flag in BACKENDS):
        raise ValueError(
            f"model has attention of the class {kind.__name__}, which Transformers runs with its "
            "own 'eager' code alone; expected a model that also takes attn_implementation='sdpa': "
            "other models do not use the interface's masks"
        )


def _sizes(module: Any) -> tuple[int, int]:
    """Return heads and features of each, which every call compares with its query."""
    sources = (module, getattr(module, "config", None))
    found = (getattr(source, name, None) for source in sources for name in HEADS)
    H = next((x for x in found if isinstance(x, int)), None)
    D = next((vars(module)[name] for name in FEATURES if name in vars(module)), None)
    widths = [x.in_features for x in module.children() if isinstance(x, nn.Linear)]
    if not (H and D) and not ((H or D) and widths):
        raise ValueError(
            f"model has attention of the class {type(module).__name__}, whose heads or features "
            f"are unknown; expected attributes such as {HEADS[0]} and {FEATURES[1]}: set them "
            "before equip, or equip another part of the model"
        )
    H = H or widths[-1] // (D or 1)  # the last linear map joins the heads
    D = D or widths[-1] // H
    return int(H), int(D) + getattr(module, "head_dim_padding", 0)


def _if_taken(name: str, **options: Any) -> dict[str, Any]:
    """Return the options that the mechanism's layer has."""
    entry = MECHANISMS[name]
    taken = inspect.signature(entry.plug(1, 1, 1)).parameters if entry.layer != Entry.layer else {}
    return {key: x for key, x in options.items() if key in taken}


def _check_kind(name: str, causal: bool, cross: bool) -> None:
    """Refuse causality, or cross-attention, for a mechanism that does not have it."""
    entry = MECHANISMS[name]
    if causal and not entry.causal:
        raise ValueError(
            f"{name} is in a causal model; expected {_able(lambda x: x.causal)}, or an encoder: "
            f"{name} combines keys, later ones too, in the same way for every query"
        )
    if cross and (entry.placed or not entry.alone):
        able = _able(lambda x: x.causal and x.alone and not x.placed)
        raise ValueError(
            f"{name} is in cross-attention; expected {able}, or the encoder alone: with {name} "
            "the result of a query depends on its position among the keys"
        )


def _able(can: Callable[[Entry], bool]) -> str:
    return "one of " + ", ".join(name for name, entry in MECHANISMS.items() if can(entry))


def _attention_forward(
    name: str, module: Any, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend as Transformers asks: q (B, H, N, D), k and v (B, G, M, D), to (B, N, H, D)."""
    B, H, N, D = query.shape
    position_bias = others.pop("position_bias", None)
    _check_others(name, others, value, D)
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    if attention_mask is not None:  # a static cache is longer than its contents
        key, value = (x[..., : attention_mask.shape[-1], :] for x in (key, value))
    mask = _with_bias(name, attention_mask, position_bias, causal, N, key.shape[-2])
    layer: Any = getattr(module, CHILD, None)
    cross = not causal and (N != key.shape[-2] or getattr(layer, "cross", False))
    _check_kind(name, causal, cross)
    if layer is None or layer.plugged != name:
        raise ValueError(
            f"model has attention of the class {type(module).__name__} without {name}; expected "
            f"derived_attention.plugs.equip(model, {name!r}) before its first use"
        )
    if getattr(layer, "causal", causal) != causal:
        raise ValueError(
            f"is_causal is {causal}; expected {layer.causal}, as when the model was equipped with "
            f"{name}, for its filters"
        )
    if layer.num_heads != H or (layer.head_dim != D and layer.sized):
        raise ValueError(
            f"query has {H} heads of {D} features; expected {layer.num_heads} of {layer.head_dim}, "
            f"as in the attributes of {type(module).__name__} when it was equipped with {name}: "
            "correct them before equip, or choose a mechanism without parameters, such as softmax"
        )
    layer.dropout, layer.training, layer.head_dim = dropout, module.training, D
    if scaling is not None and not math.isclose(scaling, D**-0.5):
        query = query * (scaling * math.sqrt(D))
    _, key, value, _ = share_heads(query, key, value)
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (query, key, value))  # (B, ·, H D)
    return _attend(name, layer, (q, k, v), mask, causal, cross).unflatten(-1, (H, D)), None


def _check_others(name: str, others: dict[str, Any], value: Tensor, D: int) -> None:
    """Refuse arguments that change the attention in a way that this mechanism does not have."""
    window = others.get("sliding_window")
    given = {key: others.get(key) for key in REFUSED}
    refused = {key: x for key, x in given.items() if x is not None and x is not False}
    if window is not None and not MECHANISMS[name].any_mask:
        refused["sliding_window"] = window
    for key, x in refused.items():
        shown = x if isinstance(x, (int, float)) else type(x).__name__
        raise ValueError(
            f"{key} is {shown}; expected None: {name} does not support it; choose a configuration "
            "or a model without it"
        )
    if value.shape[-1] != D:
        raise ValueError(
            f"value has {value.shape[-1]} features; expected {D}, as query has: choose a "
            "configuration in which they are equal"
        )


def _with_bias(
    name: str, mask: Tensor | None, bias: Tensor | None, causal: bool, N: int, M: int
) -> Tensor | None:
    """Check a mask, and merge it with the position bias of T5."""
    any_mask = MECHANISMS[name].any_mask
    if bias is not None and not any_mask:
        raise ValueError(
            f"position_bias is given; expected None: {name} has no scores to which it is added"
        )
    if bias is not None:
        dense = Mask(mask, causal and mask is None).dense(N, M, bias.device)
        bias = bias[..., :M]
        return bias if dense is None else within(attended_keys(dense), bias)
    padding = mask is None or (mask.dtype == torch.bool and mask.shape[-3:-1] == (1, 1))
    if mask is not None and not any_mask and not padding:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected "
            f"a padding mask (B, M): {name} takes no other mask"
        )
    return mask


def _make_mask(
    name: str, batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0,
    kv_offset: int = 0, mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None, **others: Any,
) -> Tensor | None:  # fmt: skip
    """Make the mask that `_attention_forward` takes, or None without padding.

    If a mechanism takes any mask, it is (B, 1, N, M), as for PyTorch's own attention. Otherwise it
    is (B, 1, 1, M) for the M tokens so far, and does not contain causality.
    """
    from transformers import masking_utils as masks

    causal = mask_function is None or mask_function is masks.causal_mask_function
    if MECHANISMS[name].any_mask:
        others["allow_is_causal_skip"] = others.get("allow_is_causal_skip", True) and (
            q_length == kv_length
        )
        function = masks.causal_mask_function if causal else mask_function
        others |= {"attention_mask": attention_mask, "mask_function": function}
        return masks.sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **others)
    if not causal and mask_function is not masks.bidirectional_mask_function:
        raise ValueError(
            f"the model's mask is neither causal nor full, but a window, a chunk, packed sequences "
            f"or another function; expected padding alone: {name} takes no other mask"
        )
    filled = int(q_offset) + q_length - kv_offset if causal else kv_length
    present = masks.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if present is None:
        present = torch.ones(1, kv_length, dtype=torch.bool, device=others.get("device", "cpu"))
    present = present[:, :filled].bool()
    if filled == kv_length and bool(present.all()):
        return None
    return present.expand(batch_size, -1)[:, None, None]


# --- timm ----------------------------------------------------------------------------------------


def mend_torchvision() -> None:
    """Make torchvision, and so timm, importable if its compiled operators do not load.

    They do not load if it was built for another device than PyTorch. Its Python part then fails at
    the first operator that it registers, unless the operator has a schema. No transformer uses
    these operators. If torchvision works, this does nothing.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


class TimmAttention(nn.Module):
    """The attention of a block of timm's vision transformer, with another mechanism inside.

    Its projections, norms and dropout are those of the module it replaces, under the same names.
    """

    qkv: Any
    q_norm: Any
    k_norm: Any
    attn_drop: Any
    proj: Any
    proj_drop: Any

    def __init__(self, attn: Any, name: str, layer: Any) -> None:
        super().__init__()
        for key, child in attn.named_children():
            self.add_module(key, child)
        self.name, self.sizes = name, (attn.num_heads, attn.head_dim)
        self.gate = getattr(attn, "gate", None)
        self.norm = getattr(attn, "norm", nn.Identity())
        self.add_module(CHILD, layer)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend from all tokens (B, N, C) to all of them."""
        if attn_mask is not None or is_causal:
            raise ValueError("attn_mask or is_causal is given; expected neither for images")
        q, k, v = self.qkv(x).unflatten(-1, (3, *self.sizes)).unbind(2)  # (B, N, H, D)
        layer: Any = self.get_submodule(CHILD)
        layer.dropout = self.attn_drop.p
        heads = (self.q_norm(q).flatten(2), self.k_norm(k).flatten(2), v.flatten(2))
        out = self.norm(_attend(self.name, layer, heads, None, False, False))
        out = out if self.gate is None else out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


def equip_timm(model: Any, name: str, **options: Any) -> Any:
    """Replace the attention in all blocks of a vision transformer of timm, and return it.

    Weights and their names stay; the parameters of the mechanism are added. A layer that needs them
    gets the grid of patches (``conv2d``) and whether there is a class token, which is not pooled.

    Parameters
    ----------
    model : timm.models.VisionTransformer
    name : str
        One of `list_attentions`.
    options
        As in `make_heads`.

    Raises
    ------
    ValueError
        For a name that is not in the registry, a model without such blocks, or several tokens
        before the patches with a mechanism that depends on the grid.
    """
    from timm.layers import Attention

    get_attention(name)  # raises for an unknown name
    paths = [path for path, x in model.named_modules() if type(x) is Attention]
    first = getattr(model, "num_prefix_tokens", None)
    size = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if not paths or first is None or size is None:
        lacks = "timm's Attention" if not paths else "prefix tokens before one grid of patches"
        raise ValueError(
            f"model is a {type(model).__name__} without {lacks}; expected a VisionTransformer "
            "that is not equipped yet"
        )
    grid = tuple(size)
    places = _if_taken(name, grid=grid, class_token=first > 0)
    if "class_token" in places and first > 1:
        raise ValueError(f"model has {first} tokens before its patches; expected 0 or 1 for {name}")
    options = places | options
    for path in paths:
        attn = model.get_submodule(path)
        like = {"device": attn.qkv.weight.device, "dtype": attn.qkv.weight.dtype}
        H, D, length = attn.num_heads, attn.head_dim, first + math.prod(grid)
        layer = make_heads(name, H, D, length, **options, **like)
        _add_record(layer, name, H, D, length, "", options)
        parent, _, last = path.rpartition(".")
        replacement = TimmAttention(attn, name, layer).train(attn.training)
        setattr(model.get_submodule(parent), last, replacement)
    return model
