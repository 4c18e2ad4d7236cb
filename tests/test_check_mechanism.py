"""`check_mechanism` finds mistakes: each breaks the promise that it concerns, and no other."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from derived_attention import check_mechanism, softmax_attention, softmax_attention_reference
from derived_attention.common.checks import (
    check_flag,
    check_floating,
    check_mask,
    check_positive,
    check_probability,
    check_qkv,
)
from derived_attention.common.convention import share_heads
from derived_attention.testing.contract import PROMISES

WRONG = {}  # name: the function, the promise that it breaks, and words of the report
QUICK = [name for name in PROMISES if name not in ("compile", "memory")]


def breaks(promise, words):
    """A wrong mechanism: what is wrong is done to softmax attention, which keeps every promise."""

    def enter(function):
        def attend(
            q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
        ):
            rest = {"scale": scale, "enable_gqa": enable_gqa}
            return function(q, k, v, attn_mask, dropout_p, is_causal, **rest)

        WRONG[function.__name__] = functools.wraps(function, updated=())(attend), promise, words
        del attend.__wrapped__  # so that the signature is that of `attend`
        return function

    return enter


@breaks("masks over keys", "torch.bool, other masked keys: the output is wrong by")
def ignores_the_mask(q, k, v, attn_mask, *rest, **options):
    return softmax_attention(q, k, v, None, *rest, **options)


@breaks("masks over keys", "torch.float64 (23,): the output is wrong by")
def takes_numbers_of_a_mask_for_zeros(q, k, v, attn_mask, *rest, **options):
    if isinstance(attn_mask, torch.Tensor) and attn_mask.is_floating_point():
        attn_mask = attn_mask.masked_fill(attn_mask > -8192, 0)
    return softmax_attention(q, k, v, attn_mask, *rest, **options)


@breaks("masks per query", "torch.bool (21, 23): the output is wrong by")
def takes_the_first_query_s_mask(q, k, v, attn_mask, *rest, **options):
    if isinstance(attn_mask, torch.Tensor) and attn_mask.dim() > 1:
        attn_mask = attn_mask[..., :1, :]
    return softmax_attention(q, k, v, attn_mask, *rest, **options)


@breaks("causality", "6 queries, 6 keys: what comes after position 0 changes the output")
def sees_one_key_too_many(q, k, v, attn_mask, dropout_p, is_causal, **options):
    if is_causal is True and attn_mask is None:
        attn_mask, is_causal = torch.ones(q.shape[-2], k.shape[-2]).bool().tril(1), False
    return softmax_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)


@breaks("causality", "21 queries, 23 keys: the output is wrong by")
def sees_one_key_too_few(q, k, v, attn_mask, dropout_p, is_causal, **options):
    if is_causal is True and attn_mask is None:
        attn_mask, is_causal = torch.ones(q.shape[-2], k.shape[-2]).bool().tril(-1), False
        attn_mask[:1, :1] = True
    return softmax_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)


@breaks("scale", "scale 0.3: the output is wrong by")
def loses_the_scale(*args, scale, **options):
    return softmax_attention(*args, **options)


@breaks("values", "as usual: the output is wrong by")
def is_off_by_a_factor(q, k, v, *rest, scale, **options):
    other = math.sqrt(2) if scale is None else 1.0
    return softmax_attention(q, k, v, *rest, scale=scale, **options) * other


@breaks("values", "D = 128: the output is wrong by")
def is_off_for_wide_heads(q, k, v, *rest, **options):
    return softmax_attention(q, k, v, *rest, **options) * (1.1 if q.shape[-1] > 64 else 1)


@breaks("values", "70 queries, 200 keys: the output is wrong by")
def is_off_for_many_more_keys_than_queries(q, k, v, *rest, **options):
    out = softmax_attention(q, k, v, *rest, **options)
    return out * (1.1 if q.shape[-2] > 50 and k.shape[-2] > 2 * q.shape[-2] else 1)


@breaks("dtypes", "the output of 200 tokens in torch.bfloat16 is wrong by")
def is_off_for_long_texts_in_bfloat16(q, k, v, *rest, **options):
    out = softmax_attention(q, k, v, *rest, **options)
    return out * (1.2 if out.dtype == torch.bfloat16 and q.shape[-2] > 64 else 1)


@breaks("dead rows", "the output holds NaN or infinity")
def divides_zero_by_zero(q, k, v, attn_mask, *rest, **options):
    out = softmax_attention(q, k, v, attn_mask, *rest, **options)
    if attn_mask is None or not k.shape[-2]:
        return out
    absent = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
    return out.masked_fill(torch.atleast_2d(absent).all(-1, keepdim=True), math.nan)


class Slope(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, by):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx, slope):
        return slope * ctx.by, None


@breaks("gradients", "as usual: the gradient of q is wrong by")
def has_a_wrong_backward(q, k, v, *rest, **options):
    return Slope.apply(softmax_attention(q, k, v, *rest, **options), 2)


@breaks("dtypes", "the output is torch.float32 where q is torch.bfloat16")
def returns_float32(q, k, v, *rest, **options):
    out = softmax_attention(q, k, v, *rest, **options)
    return out.to(torch.promote_types(out.dtype, torch.float32))


@breaks("spread", "the error of one rounding")
def sums_in_half_precision(q, k, v, attn_mask, dropout_p, is_causal, **options):
    out = softmax_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)
    if out.dtype not in (torch.bfloat16, torch.float16) or k.shape[-2] < 64 or is_causal:
        return out
    products = (q[..., i, None] * k[..., None, :, i] for i in range(q.shape[-1]))
    return (sum(products) / q.shape[-1] ** 0.5).softmax(-1) @ v


@breaks("inputs", "q is written to")
def writes_to_its_input(q, k, v, *rest, scale, **options):
    check_floating({"q": q})
    root = max(q.shape[-1], 1) ** -0.5 if scale is None else check_positive("scale", scale)
    return softmax_attention(q.mul_(root), k, v, *rest, scale=1.0, **options)


@breaks("dropout", "p = 0.3: equal columns of v come out unequal")
def drops_outputs(q, k, v, attn_mask, dropout_p, *rest, **options):
    return F.dropout(softmax_attention(q, k, v, attn_mask, 0.0, *rest, **options), dropout_p)


@breaks("shared heads", "raises ValueError: k has shape (2, 2, 23, 6); expected (2, 4")
def ignores_shared_heads(*args, enable_gqa, **options):
    return softmax_attention(*args, **options)


@breaks("memory of shared heads", "2 heads of k and v for 8 of q take 2.00 copies of v more")
def copies_shared_heads(q, k, v, *rest, enable_gqa, **options):
    check_flag("enable_gqa", enable_gqa)
    if enable_gqa:
        _, k, v, _ = share_heads(q, k, v)
    return softmax_attention(q, k, v, *rest, **options)


WRONG["copies_shared_heads"][0].shared = True  # as a function declares that it can share heads


@breaks("empty inputs", "raises IndexError: no key")
def crashes_without_keys(q, k, v, *rest, **options):
    out = softmax_attention(q, k, v, *rest, **options)
    if out.numel() and not k.shape[-2]:
        raise IndexError("no key")
    return out


@breaks("calling convention", "raises ZeroDivisionError: always (test_check_mechanism.py, line")
def crashes(*args, **options):
    raise ZeroDivisionError("always")


@breaks("bad arguments", "raises RuntimeError: something failed")
def says_only_that_it_failed(*args, **options):
    try:
        return softmax_attention(*args, **options)
    except ValueError as error:
        raise RuntimeError("something failed") from error


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_breaks_the_promise_it_is_about_and_no_other(name, capsys):
    function, promise, words = WRONG[name]
    report = check_mechanism(function, softmax_attention_reference, promises=QUICK)
    assert report.failed == [promise] and not report.passed, str(report)
    (broken,) = (x for x in report.results if x.verdict == "BROKEN")
    assert words in broken.text and PROMISES[promise].check.__doc__ in str(broken), str(broken)
    assert capsys.readouterr().out.strip() == str(report)
    assert f"{name}: " in repr(report)


def by_hand(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """Softmax attention as it may be written in a notebook: right, but it stores A."""
    check_flag("enable_gqa", enable_gqa)
    if enable_gqa:
        _, k, v, _ = share_heads(q, k, v)
    check_floating({"q": q, "k": k, "v": v})
    check_qkv(q, k, v)
    check_mask(attn_mask, q, k, is_causal)
    check_probability("dropout_p", dropout_p)
    root = q.shape[-1] ** -0.5 if scale is None else check_positive("scale", scale)
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).mT * root
    keep = torch.ones_like(scores, dtype=torch.bool)
    if is_causal:
        keep = keep.tril()
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = keep & attn_mask
    elif attn_mask is not None:
        keep = keep & (attn_mask > -8192)
        scores = scores + attn_mask.to(dtype).masked_fill(attn_mask <= -8192, 0)
    alive = keep.any(-1, keepdim=True)
    scores = scores.masked_fill(~keep & alive, -math.inf)
    A = scores.softmax(-1).masked_fill(~alive, 0)
    return (F.dropout(A, dropout_p) @ v.to(A.dtype)).to(q.dtype)


def test_a_right_one_written_by_hand_keeps_all_promises_but_memory():
    report = check_mechanism(by_hand, softmax_attention_reference, verbose=False)
    assert report.failed == ["memory"], str(report)
    (refused,) = (x for x in report.results if x.verdict == "refused")
    assert refused.promise == "memory of shared heads"
    assert {x.verdict for x in report.results} == {"kept", "BROKEN", "refused"}
    alone = check_mechanism(by_hand, promises=QUICK, verbose=False)
    assert alone.passed
    untried = [x.promise for x in alone.results if x.verdict == "untried"]
    assert untried == [name for name in QUICK if "formula" in PROMISES[name].needs]


def test_a_function_of_q_k_and_v_alone():
    def plain(query, key, value):
        return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value

    report = check_mechanism(plain, softmax_attention_reference, promises=QUICK, verbose=False)
    verdicts = {x.promise: x.verdict for x in report.results}
    assert report.failed == ["calling convention", "spread", "bad arguments"], str(report)
    not_taken = [name for name in QUICK if PROMISES[name].argument]
    assert [x for x, verdict in verdicts.items() if verdict == "not taken"] == not_taken


@pytest.mark.parametrize("name", ["ignores_the_mask", "has_a_wrong_backward"])
def test_without_a_formula(name):
    report = check_mechanism(WRONG[name][0], promises=QUICK, verbose=False)
    expected = {"ignores_the_mask": "masks over keys", "has_a_wrong_backward": "finite differences"}
    assert report.failed == [expected[name]], str(report)


def drops_gradients_of_late_keys(q, k, v, *rest, **options):
    k = torch.cat([k[..., :64, :], k[..., 64:, :].detach()], -2)
    return softmax_attention(q, k, v, *rest, **options)


def averages_over_the_batch(q, k, v, *rest, **options):
    out = softmax_attention(q, k, v, *rest, **options)
    return out.mean(0, keepdim=True).expand(out.shape) if out.dim() > 3 else out


@pytest.mark.parametrize(
    ("function", "first", "words"),
    [
        (
            drops_gradients_of_late_keys,
            "finite differences",
            "200 keys: the gradient of k is wrong by",
        ),
        (averages_over_the_batch, "batch", "sequence 0 alone: the output is wrong by"),
    ],
)
def test_without_a_formula_the_first_message_names_the_fault(function, first, words):
    some = ["batch", "order of keys", "finite differences", "dropout"]
    report = check_mechanism(function, promises=some, verbose=False)
    assert report.failed[0] == first, str(report)
    assert words in next(x.text for x in report.results if x.promise == first)


# --- limits: sizes inside a limit pass, and sizes outside fail ------------------------------------


def after(change):
    def attend(size, *given, **options):
        return change(softmax_attention(*given, **options), size)

    return attend


def stores_a_share_of_the_weights(size, q, k, v, *rest, **options):
    q.new_empty(int(size * q.shape[-2] * k.shape[-2]))
    return softmax_attention(q, k, v, *rest, **options)


def drops_a_share(size, q, k, v, attn_mask=None, dropout_p=0.0, *rest, **options):
    def attend(v):
        return softmax_attention(q, k, v, attn_mask, 0.0, *rest, **options)

    if dropout_p in (0, 1):
        return attend(v) * (1 - dropout_p)
    A = attend(torch.eye(k.shape[-2], dtype=v.dtype).expand(*v.shape[:-1], -1))
    return torch.where(torch.rand(A.shape) < dropout_p + size, 0, A / (1 - dropout_p)) @ v


# the promise, the change, a size inside the limit, and a size outside
LIMITS = [
    ("values", after(lambda x, by: x + by), 0.7e-10, 2.5e-10),
    ("dtypes", after(lambda x, by: x * (1 + by * torch.finfo(x.dtype).eps)), 2, 7),
    ("dtypes", after(lambda x, by: Slope.apply(x, 1 + by * torch.finfo(x.dtype).eps)), 9, 24),
    ("autocast", after(lambda x, by: x * (1 + by * torch.is_autocast_enabled("cpu"))), 0.02, 0.05),
    ("large scores", after(lambda x, by: x + by * (x.dtype == torch.float64)), 0.7e-8, 2.5e-8),
    ("memory", stores_a_share_of_the_weights, 0.45, 0.6),
    ("dropout", drops_a_share, 0.03, 0.08),
]


@pytest.mark.parametrize(("promise", "function", "inside", "outside"), LIMITS)
def test_a_limit_is_where_it_is_said_to_be(promise, function, inside, outside):
    verdicts = []
    for size in (inside, outside):
        mechanism = functools.partial(function, size)
        report = check_mechanism(
            mechanism, softmax_attention_reference, promises=[promise], verbose=False
        )
        verdicts += [x.verdict for x in report.results]
    assert verdicts == ["kept", "BROKEN"]


def test_what_is_neither_compiled_nor_mapped_nor_derived_twice():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            return slope.detach()

    def breaking(q, k, v):
        print(float(q.sum()))
        return Once.apply((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)

    some = ["gradients", "compile", "vmap", "further derivatives"]
    report = check_mechanism(breaking, softmax_attention_reference, promises=some, verbose=False)
    assert report.failed == some[1:], str(report)


def test_it_takes_options_keys_and_flags():
    def scaled(q, k, v, *, weight):
        return (q @ (weight * k[..., 0, :, :]).mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    def formula(q, k, v, *, weight):
        return softmax_attention_reference(q, weight * k[..., 0, :, :], v)

    options = {"options": lambda N, H, D: {"weight": torch.linspace(1, 2, D)}}
    options |= {"keys": lambda k: torch.stack([k, k], -3), "verbose": False}
    some = ["values", "gradients", "scale"]
    report = check_mechanism(scaled, formula, promises=some, **options)
    assert [x.verdict for x in report.results] == ["kept", "kept", "not taken"], str(report)
    wrong = check_mechanism(scaled, lambda q, k, v: 1 / 0, promises=some[:1], **options)
    assert [x.verdict for x in wrong.results] == ["untried"] and wrong.passed
    report = check_mechanism(by_hand, promises=["dropout"], verbose=False, weights=False)
    assert report.results[0].verdict == "untried"


def test_it_says_the_same_each_time_and_leaves_random_numbers_as_they_were(monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", None)  # it seeds GPUs too
    state = torch.get_rng_state()
    reports = [check_mechanism("softmax", promises=["dropout", "dtypes"]) for _ in range(2)]
    assert reports[0] == reports[1] and reports[0].passed
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        (("sofmax",), {}, ValueError, "name is 'sofmax'; expected one of softmax, "),
        ((3,), {}, TypeError, "mechanism is 3; expected a name"),
        ((by_hand,), {"promises": ["speed"]}, ValueError, "'speed' is unknown; expected one of"),
        ((by_hand,), {"quick": True}, ValueError, "'quick' is unknown; expected one of causal"),
        ((by_hand,), {"causal": "no"}, TypeError, "causal is 'no'; expected True or False"),
        ((by_hand,), {"verbose": 1}, TypeError, "verbose is 1; expected True or False"),
        (("softmax", by_hand), {}, ValueError, "formula, options or keys are given"),
        (("softmax",), {"keys": abs}, ValueError, "formula, options or keys are given"),
        ((by_hand, "softmax"), {}, TypeError, "formula is 'softmax'; expected a function"),
        ((by_hand,), {"promises": "dropout"}, TypeError, "promises is 'dropout'; expected a list"),
    ],
)
def test_what_it_cannot_check_is_named(arguments, options, error, match):
    with pytest.raises(error, match=match):
        check_mechanism(*arguments, **options)


def test_pytorch_s_own_attention_can_be_checked():
    report = check_mechanism(F.scaled_dot_product_attention, by_hand, promises=QUICK, verbose=False)
    assert report.failed == ["masks over keys", "bad arguments"], str(report)
    assert "IndexError: Dimension out of range" in str(report)  # for a mask of shape (M,)
