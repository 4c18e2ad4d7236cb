"""Tests of measurements: costs and known counts, growth of memory, and known diagnostics."""

import gc
import json
import math
import platform
from functools import partial

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F

from derived_attention import MultiheadAttention
from derived_book.training import measure
from derived_book.training.measure import (
    at_least,
    at_most,
    attention_flops,
    compare,
    count_flops,
    count_operations,
    effective_rank,
    machine,
    numerical_rank,
    peak_bytes,
    projection_flops,
    stored_bytes,
)


def qkv(n=16, m=None, dim=8, value_dim=None, heads=2, batch=1, **options):
    shapes = [(n, dim), (m or n, dim), (m or n, value_dim or dim)]
    return [torch.randn(batch, heads, *shape, **options) for shape in shapes]


def written_out(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


# Counts


@pytest.mark.parametrize(("n", "m", "p"), [(2, 3, 4), (1, 1, 1), (3, 1, 2)])
def test_operations_of_a_product_and_a_sum_are_counted_one_by_one(n, m, p):
    counts = count_operations(lambda a, b: a @ b, np.ones((n, m)), np.ones((m, p)))
    assert (counts["multiply"], counts["add"]) == (n * m * p, n * p * (m - 1))
    assert counts.total() == n * p * (2 * m - 1)
    assert count_operations(lambda a: a.sum(0), np.ones((n, p))).total() == p * (n - 1)


def test_every_kind_and_order_of_operation_is_counted():
    counts = count_operations(lambda x: [1 + x, x + 1, 1 - x, x - 1, 2 * x, x * 2, 1 / x, x / 2], 3)
    assert counts == {"add": 4, "multiply": 2, "divide": 2}
    assert count_operations(np.exp, np.ones((4, 5))) == {"exp": 20}
    assert not count_operations(lambda a: a.astype(float) * 2 + 1, np.ones(3))  # plain numbers


def test_counted_numbers_compute_and_counts_do_not_outlive_a_call():
    seen = []
    for _ in range(2):
        counts = count_operations(lambda a, b: seen.append((2 - a / b).astype(float)), [1, 3], 2)
        assert counts == {"divide": 2, "add": 2}
    np.testing.assert_allclose(seen, [[1.5, 0.5]] * 2)


@pytest.mark.parametrize(
    "unknown",
    [lambda a: a**2, lambda a: -a, np.sqrt, lambda a: a.max(), lambda a: a == 1, lambda a: a.any()],
)
def test_an_operation_that_is_not_counted_is_refused(unknown):
    with pytest.raises(TypeError):
        count_operations(unknown, np.ones(2))


@pytest.mark.parametrize("form", [written_out, F.scaled_dot_product_attention])
@pytest.mark.parametrize("shape", [{}, {"m": 24}, {"heads": 3, "batch": 2}, {"value_dim": 24}])
def test_counts_equal_pytorch_counter(form, shape):
    q, k, v = qkv(**shape)
    batch, heads, n, d = q.shape
    expected = attention_flops(n, k.shape[2], d, v.shape[3], heads=batch * heads)
    assert count_flops(lambda: form(q, k, v)) == expected > 0
    linear = torch.nn.Linear(d, 24)
    assert count_flops(lambda: linear(q[0, 0])) == projection_flops(n, d, 24)


def test_products_added_in_place_are_counted():
    a, b, c = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.zeros(2, 3, 5)
    assert count_flops(lambda: c.baddbmm_(a, b)) == count_flops(lambda: a @ b) == 2 * 2 * 3 * 4 * 5
    assert count_flops(lambda: c[0].addmm_(a[0], b[0])) == 2 * 3 * 4 * 5
    assert count_flops(lambda: a @ b[0, :, 0]) == count_flops(lambda: a @ b[0, :, :1]) == 2 * 6 * 4
    assert count_flops(lambda: a[0, 0] @ b[0, :, 0]) == 2 * 4


def test_backward_counts_five_products_fused_and_four_written_out():
    q, k, v = (x.requires_grad_() for x in qkv())
    one = attention_flops(16, 16, 8, heads=2) // 2
    for form, products in ((written_out, 4), (F.scaled_dot_product_attention, 5)):
        out = form(q, k, v).sum()
        assert count_flops(out.backward) == products * one


def test_counts_take_symbols_and_are_exact_integers():
    n, d = sympy.symbols("N D", positive=True)
    assert sympy.expand(attention_flops(n, n, d) - 4 * n**2 * d) == 0
    assert sympy.expand(attention_flops(n, n, d, 2 * d) - 6 * n**2 * d) == 0
    assert sympy.expand(projection_flops(n, d, 3 * d) - 6 * n * d**2) == 0
    assert sympy.limit(stored_bytes(n, n) / stored_bytes(n, n, fused=True) / n, n, sympy.oo) == 2
    flops = attention_flops(10**6, 10**6, 10**3 + 1, heads=7)
    assert type(flops) is int and flops == 28 * 10**12 * 1001


# Time


def test_compare_interleaves_and_gives_ratios_to_the_first():
    order = []
    functions = {name: lambda name=name: order.append(name) for name in "abc"}
    times = compare(functions, repeats=4, warmup=1, device="cpu")
    rounds = ["".join(order[i : i + 3]) for i in range(0, 15, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert {turn[0] for turn in rounds} == {"a", "b", "c"}
    assert list(times) == ["a", "b", "c"] and times["a"].ratio == 1
    assert all(0 < time.ratio < math.inf for time in times.values())


def test_compare_takes_ratios_within_rounds(monkeypatch):
    """Test a function that takes 2, 4 and 2 times as long as the first, on a slowing machine."""
    seconds = iter([1, 2, 8, 2, 10, 20])  # rounds: one two, two one, one two
    monkeypatch.setattr("derived_book.training.measure._cpu_seconds", lambda fn: next(seconds))
    times = compare({"one": print, "two": print}, repeats=3, warmup=0, device="cpu")
    assert times["two"].ratio == 2
    assert times["one"].median == 2


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"warmup": -1}])
def test_time_refuses_wrong_counts(wrong):
    with pytest.raises(ValueError, match="expected at least 1"):
        compare({"one": print}, device="cpu", **wrong)
    with pytest.raises(ValueError, match="functions is empty"):
        compare({}, device="cpu")


def test_a_measure_must_be_told_the_device():
    """Require `device`: a CPU function measured on the GPU takes 0 bytes and 0 seconds."""
    for measured in (partial(compare, {"one": print}), partial(peak_bytes, print)):
        with pytest.raises(TypeError, match="device"):
            measured()


# Memory


def test_peak_counts_what_lives_at_once():
    def fn():
        a = torch.empty(1000)  # 4000 bytes
        b = torch.empty(2000)  # + 8000
        del a
        c = torch.empty(500)  # - 4000 + 2000
        return b, c

    kept = torch.empty(10_000)
    assert peak_bytes(fn, device="cpu") == 12_000
    assert peak_bytes(lambda: kept, device="cpu") == 0
    assert peak_bytes(lambda: kept + 1, device="cpu") in range(40_000, 40_100)


def test_no_garbage_is_freed_while_a_peak_is_measured():
    seen = []
    peak_bytes(lambda: seen.append(gc.isenabled()), device="cpu")
    assert seen == [True, False] and gc.isenabled()


def test_peak_leaves_the_first_call_out():
    sizes = iter([1000, 10])
    assert peak_bytes(lambda: torch.empty(next(sizes)), device="cpu") == 40
    assert next(sizes, None) is None


def test_peak_sees_buffers_inside_kernels():
    """Test the fused form, which stores its output, a number per query and a tile of scores."""
    q, k, v = qkv(n=256, dim=32)
    peak = peak_bytes(lambda: F.scaled_dot_product_attention(q, k, v), device="cpu")
    assert peak > q.numel() * 4 + stored_bytes(256, 256, 2, fused=True)


def test_memory_of_scores_grows_fourfold_and_of_the_fused_form_does_not():
    growth = {}
    for form in (written_out, F.scaled_dot_product_attention):
        peaks = []
        for n in (1024, 2048):
            q, k, v = qkv(n=n, dim=32)
            peaks.append(peak_bytes(lambda q=q, k=k, v=v, f=form: f(q, k, v), device="cpu"))
            if form is written_out:  # the count, except for the stored scale
                assert 0 <= peaks[-1] - stored_bytes(n, n, heads=2) < 64
        growth[form] = peaks[1] / peaks[0]
    assert growth[written_out] == pytest.approx(4, rel=0.01)
    assert growth[F.scaled_dot_product_attention] < 2.5


def test_measuring_memory_writes_nothing_and_errors_pass(capfd):
    peak_bytes(lambda: torch.empty(10), device="cpu")
    with pytest.raises(RuntimeError, match="shape"):
        peak_bytes(lambda: torch.empty(2, 3) @ torch.empty(2, 3), device="cpu")
    print("still here")
    out, err = capfd.readouterr()
    assert (out, err) == ("still here\n", "")


# The machine


def test_machine_can_be_stored_and_names_no_host():
    facts = machine()
    keys = ["processor", "cores", "threads", "gpu", "driver", "torch", "python", "date"]
    assert list(facts) == keys
    assert facts["processor"] and facts["cores"] >= 1 and facts["threads"] >= 1
    assert (facts["gpu"] is None) == (not torch.cuda.is_available())
    assert len(facts["date"]) == 10
    assert platform.node() not in json.dumps(facts).split('"')


# Maps


def test_ranks_of_known_maps():
    maps = torch.stack([torch.eye(6), torch.full((6, 6), 1 / 6), torch.zeros(6, 6)])
    assert numerical_rank(maps, 1e-6).tolist() == [6, 1, 0]
    assert effective_rank(maps).tolist() == pytest.approx([6, 1, 0])
    assert numerical_rank(torch.diag(torch.tensor([1, 0.1, 0.01])), 0.05) == 2
    p = torch.tensor([3.0, 1.0]) / 4
    known = torch.diag(torch.tensor([3.0, 1.0]))
    assert effective_rank(known) == pytest.approx(float(torch.exp(-(p * p.log()).sum())))


def test_rank_of_a_low_rank_map_in_single_precision():
    A = torch.rand(30, 4) @ torch.rand(4, 20)
    assert numerical_rank(A, 1e-5) == 4
    assert 1 < effective_rank(A) < 4


BAD = [
    (lambda: numerical_rank(torch.ones(3), 0.1), "at least 2 axes"),
    (lambda: numerical_rank(torch.eye(3), 1.0), "tol is"),
    (lambda: numerical_rank(torch.eye(3), math.nan), "tol is"),
    (lambda: effective_rank(torch.empty(2, 0, 3)), "one entry"),
    (lambda: effective_rank(torch.full((2, 2), math.nan)), "expected finite"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_maps_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_recorded_gives_what_layers_hand_to_their_mechanisms():
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(MultiheadAttention(8, 2) for _ in range(2))
    x, keep = torch.randn(1, 5, 8), layers[0].attention
    expected = layers[1](*[layers[0](x, x, x, need_weights=False)[0]] * 3, need_weights=False)[0]
    with measure.record_calls(layers) as calls:
        for y in (x, 2 * x):
            first = layers[0](y, y, y, is_causal=True, need_weights=False)[0]
            assert first.requires_grad
        y = layers[0](x, x, x, need_weights=False)[0]
        second = layers[1](y, y, y, need_weights=False)[0]
    torch.testing.assert_close(second, expected, rtol=0, atol=0)
    assert len(calls) == 4 and layers[0].attention is keep
    call = calls[0]
    assert call.options["is_causal"] and not call.q.requires_grad
    torch.testing.assert_close(calls[1].k - calls[0].k, calls[0].k, rtol=0, atol=1e-6)
    own = keep(*call[:3], **call.options).transpose(1, 2).flatten(2)
    causal = layers[0](x, x, x, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(layers[0].out_proj(own), causal)
    layers[0](x, x, x, need_weights=False)
    assert len(calls) == 4, "a call after the block was recorded"


def test_recorded_ends_with_an_error_and_says_where_nothing_is_to_record():
    layer = MultiheadAttention(8, 2)
    keep = layer.attention
    with pytest.raises(RuntimeError, match="stop"), measure.record_calls(layer):
        raise RuntimeError("stop")
    assert layer.attention is keep
    with pytest.raises(ValueError, match="model is a Linear; expected a layer whose attention"):
        with measure.record_calls(torch.nn.Linear(2, 2)):
            pass


# Bounds in prose


def test_bounds_are_rounded_to_the_side_on_which_they_stay_true():
    assert [at_least(0.5153), at_most(0.5153)] == ["0.51", "0.52"]
    assert [at_least(-1.234, 1), at_most(-1.234, 1)] == ["-1.3", "-1.2"]
    assert [at_least(0.3, 1), at_most(0.3, 1), at_most(np.float32(2.0), 0)] == ["0.3", "0.3", "2"]
    exact = [at_least(0.1 + 0.2, 1), at_most(0.1 + 0.2, 1), at_most(0.7 - 0.6, 1)]
    assert exact == ["0.3", "0.3", "0.1"]
    assert [at_least(1e-9), at_most(1e-9), at_most(-1e-9)] == ["0.00", "0.01", "0.00"]
    for x in np.random.default_rng(0).normal(size=200) * 10:
        low, high = float(at_least(x)), float(at_most(x))
        assert low <= x <= high and high - low < 0.0101
    for x in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            at_least(x)
