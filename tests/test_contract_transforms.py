"""Transformed mechanisms and layers give the right result, or raise an error.

The transformations are batched gradients, ``torch.func``, checkpointing, export, the meta device,
nested tensors, quantisation and replicas. Other tests bound the growth of time and memory.
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from cases import Case, causality_of
from helpers import (
    H,
    assert_all_close,
    every_mechanism,
    relative_errors,
)
from test_contract_layers import GONE, E, N, make_layer, output, sequences
from test_contract_places import CHANGES, Called, OnViews
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from derived_attention.registry import MECHANISMS
from derived_book.training.measure import peak_bytes

WHICH = ["q", "k", "v"]


# --- derivatives ----------------------------------------------------------------------------------


@every_mechanism
def test_gradients_of_many_outputs_at_once(name):
    """``is_grads_batched`` and ``jacrev`` give a backward pass tensors that stand for many."""
    for options in causality_of(name, {}):
        case = Case(name, n=4, m=4, leading=(1, H), **options)
        for key in WHICH:
            x = case.tensors[key]
            run = lambda t, case=case, key=key: case.run(**{key: t}).sum(-1).flatten()  # noqa: E731
            out = run(x)
            loop = torch.stack([torch.autograd.grad(y, x, retain_graph=True)[0] for y in out])
            (batched,) = torch.autograd.grad(
                out, x, torch.eye(len(out), dtype=out.dtype), retain_graph=True,
                is_grads_batched=True,
            )  # fmt: skip
            with torch.no_grad():  # jacrev computes gradients itself
                found = [batched, torch.func.jacrev(run)(x.detach())]
            for jacobian in found:
                assert_all_close([jacobian.detach()], [loop], 1e-10, f"{name}, {key}")


# --- growth ---------------------------------------------------------------------------------------


class Made(TorchDispatchMode):
    """Counts the numbers that operations write, backward too: a proxy of time and of memory."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if torch.is_tensor(x)}
        for x in tree_leaves(out):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given:
                self.numel += x.numel()
        return out


# Limits of the growth for four times the length: 4 is linear, 8 is N√N, 16 is quadratic.
GROWTH = {name: 4.2 for name, entry in MECHANISMS.items() if entry.linear}
GROWTH |= {"strided": 8.4, "fixed": 8.4}


@pytest.mark.parametrize("name", GROWTH)
def test_training_grows_with_the_length_as_it_should(name):
    for options in causality_of(name, {}, {"attn_mask": torch.tensor(True)}):
        made = []
        for n in (2048, 8192):
            sizes = {"n": n, "m": n, "leading": (1, 1), "d": 32, "dv": 32}
            case = Case(name, **sizes, dtype=torch.float32, **options)
            with Made() as counter:
                case.results()
            made.append(counter.numel)
        assert made[1] / made[0] < GROWTH[name], f"{name}, {list(options)}: {made}"


@pytest.mark.parametrize("name", [x for x, entry in MECHANISMS.items() if not entry.linear])
def test_memory_is_linear_in_the_length(name):
    """Where time is not; elsewhere the test above bounds all that is written, and so the peak."""
    for options in causality_of(name, {}):
        sizes = []
        for n in (1024, 2048):
            shape = {"n": n, "m": n, "leading": (1,), "d": 16, "dv": 16}
            case = Case(name, **shape, dtype=torch.float32, **options)
            sizes.append(peak_bytes(case.results, device="cpu"))
        # Twice the length: 2 is linear, 2.83 is N√N, 4 is quadratic.
        most = 2.85 if name in ("strided", "fixed") else 2.5
        assert sizes[1] / sizes[0] <= most, f"{name}, {list(options)}: {sizes}"


# --- layers ---------------------------------------------------------------------------------------


@every_mechanism
def test_who_hands_tensors_on_does_not_change_the_layer(name):
    """Self-attention is so, too, where what was one tensor comes as three."""
    layer = make_layer(name).train()
    x = sequences().requires_grad_()

    def slopes(run):
        out = run()[~GONE]
        return out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])

    plain = slopes(lambda: output(layer, x, GONE))
    for reentrant in (False, True):
        layer.zero_grad()
        three = checkpoint(layer, x, x, x, GONE, False, use_reentrant=reentrant)[0][~GONE]
        three.square().sum().backward()
        found = [three, x.grad, *(p.grad for p in layer.parameters())]
        assert_all_close(found, plain, 1e-10, f"{name}, checkpoint, {reentrant}")
        x.grad = None
    handle = layer.register_full_backward_hook(lambda *_: None)
    assert_all_close(slopes(lambda: output(layer, x, GONE)), plain, 1e-10, f"{name}, hook")
    handle.remove()


@every_mechanism
def test_values_of_fake_tensors_are_not_looked_at(name):
    with FakeTensorMode():
        layer = MECHANISMS[name].make_layer(E, H, N)
        x = torch.randn(2, N, E)
        for mask in (None, torch.zeros(2, N), torch.zeros(2, N).bool()):
            out = layer(x, x, x, mask)[0]
            out.sum().backward()
            assert out.shape == (2, N, E)


@every_mechanism
@pytest.mark.filterwarnings("ignore")
def test_layer_is_exported_with_its_gradients(name):
    """Padded, and causal where it may be; of three tensors that are one when it is called."""
    own, how = {"causal": True} if name == "conv1d" else {}, {"key_padding_mask": GONE}
    how |= {"is_causal": True} if MECHANISMS[name].causal else {}
    model, x = Called(make_layer(name, **own), **how), sequences()
    exported = torch.export.export(model, (x, x.clone(), x.clone())).module()
    results = []
    for run in (exported, model):
        out, learned = run(x, x, x)[~GONE], [p for _, p in sorted(run.named_parameters())]
        results.append([out, *torch.autograd.grad(out.square().sum(), learned)])
    assert_all_close(*results, 1e-10, name)


@every_mechanism
def test_layer_comes_from_the_meta_device_by_its_state(name):
    layer = make_layer(name)
    empty = MECHANISMS[name].make_layer(E, H, N, dtype=torch.float64, device="meta")
    with torch.no_grad():
        for x in (empty := empty.to_empty(device="cpu")).state_dict().values():
            x.fill_(math.nan)  # memory may contain anything
        for key, x in empty.named_buffers():
            assert key in empty.state_dict() or not x.is_floating_point(), f"{name}: {key} is lost"
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(output(empty.eval(), sequences()), output(layer, sequences()))


@every_mechanism
def test_layer_takes_nested_tensors(name):
    """nn.TransformerEncoder makes them of padding in evaluation, before it asks the layer."""
    layer = make_layer(name, torch.float32, heads=4)
    x, lengths = sequences(torch.float32), [N - 5, N]
    exact = output(layer, x, GONE)
    for layout in (torch.strided, torch.jagged):
        rows = [one[:n] for one, n in zip(x, lengths, strict=True)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
            out = output(layer, nested) + nested
        assert out.is_nested and out.layout == layout
        for n, one, row, wanted in zip(lengths, out.unbind(), rows, exact, strict=True):
            torch.testing.assert_close(one, wanted[:n] + row)
        A, expected = layer(nested, nested, nested)[1], layer(x, x, x, GONE)[1]
        if MECHANISMS[name].weights:
            torch.testing.assert_close(A[~GONE], expected[~GONE])
    other = torch.nested.nested_tensor([x[0, :7], x[1, :9]], layout=torch.jagged)
    if MECHANISMS[name].alone:
        cross = make_layer(name, torch.float32, heads=4, cross=True)
        out = cross(nested, other, other, need_weights=False)[0].unbind()[0]
        alone = cross(x[0, : N - 5], x[0, :7], x[0, :7], need_weights=False)[0]
        torch.testing.assert_close(out, alone)
    if layer.paired:
        with pytest.raises(
            ValueError, match="key has the lengths .*, and query .*; expected as many"
        ):
            layer(nested, other, other)
    with pytest.raises(ValueError, match="key_padding_mask is given with nested tensors"):
        layer(nested, nested, nested, GONE)
    with pytest.raises(TypeError, match="value is not nested; expected all of"):
        layer(nested, nested, x)
    other = torch.nested.nested_tensor([rows[0][:3], rows[1]], layout=torch.jagged)
    with pytest.raises(ValueError, match="value has the lengths .*; expected those of key"):
        layer(nested, nested, other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = nn.TransformerEncoderLayer(E, 4, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(block, 2).eval()
    for block in encoder.layers:
        block.self_attn = copy.deepcopy(layer)
    slow = encoder(x, src_key_padding_mask=GONE)
    with torch.no_grad():
        fast = encoder(x, src_key_padding_mask=GONE)
    assert not fast[GONE].any(), "PyTorch made no nested tensor, so this tests nothing"
    torch.testing.assert_close(fast[~GONE], slow[~GONE])


@every_mechanism
@pytest.mark.filterwarnings("ignore")
def test_layer_in_a_model_that_is_quantised_dynamically(name):
    layer = OnViews(make_layer(name, torch.float32), CHANGES["one tensor"])
    model = nn.Sequential(nn.Linear(E, E), layer, nn.Linear(E, E))
    x = sequences(torch.float32)
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert "DynamicQuantizedLinear" in repr(small)
    assert relative_errors([small(x)], [model(x).double()])[0] < 0.05


@every_mechanism
def test_replicas_use_their_own_parameters(name):
    """DataParallel gives each device a shallow copy of the modules, with other parameters."""
    layer = make_layer(name)

    def replica(module):
        copied = module._replicate_for_data_parallel()
        for key, p in module._parameters.items():  # they become plain attributes
            setattr(copied, key, None if p is None else (2 * p.detach()).requires_grad_())
        copied._modules = {key: replica(child) for key, child in module._modules.items()}
        for key, child in copied._modules.items():
            setattr(copied, key, child)
        return copied

    twice = copy.deepcopy(layer)
    with torch.no_grad():
        for p in twice.parameters():
            p.mul_(2)
    x = sequences()
    assert torch.equal(output(replica(layer), x), output(twice, x))
    assert not torch.equal(output(twice, x), output(layer, x))
