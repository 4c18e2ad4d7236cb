"""Every mechanism works in every place of every model of the book, or is refused there."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from helpers import assert_all_close, disturbed, every_mechanism, relative_errors
from torch import nn

from derived_attention.registry import MECHANISMS
from derived_book.tasks.detection.model import DetectionTransformer
from derived_book.tasks.images.model import VisionTransformer
from derived_book.tasks.language.model import ByteLM
from derived_book.tasks.model import Config
from derived_book.tasks.series.model import SeriesClassifier

B, N, E, H = 3, 12, 16, 2
GONE = torch.arange(N) >= torch.tensor([N, 7, 10])[:, None]  # True after the end of a sequence


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def integers(low, high, *shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def detector(**places):
    return DetectionTransformer(2, config(MECHANISMS["softmax"].fast), queries=5, **places)


def config(attention):
    return Config(dim=E, heads=H, layers=1, hidden=E, dropout=0.0, attention=attention)


SCENES = (numbers(B, 3, 32, 24),)  # 12 tokens
PLACES = {  # number of tokens of the attention, a maker of the model, its inputs
    "series": (N, lambda a: SeriesClassifier(3, 2, N, config(a)), (numbers(B, N, 3), GONE)),
    "patches": (N, lambda a: VisionTransformer((3, 4), 4, 2, config(a)), (numbers(B, N, 4),)),
    "bytes": (N, lambda a: ByteLM(N, config(a)), (integers(0, 256, B, N),)),
    "memory": (N, lambda a: detector(encoder=a), SCENES),
    "object queries": (5, lambda a: detector(decoder=a), SCENES),
    "object queries and memory": (N, lambda a: detector(cross=a), SCENES),
}
CAUSAL = ("bytes",)
CROSS = ("object queries and memory",)


def make(place, name, seed=0):
    """A model whose parameters and statistics are not those that it starts with."""
    length, kind, _ = PLACES[place]
    torch.manual_seed(seed)
    model = disturbed(kind(MECHANISMS[name].plug(length, H, E // H)).double())
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def belongs(place, name):
    entry = MECHANISMS[name]
    causal = entry.causal and name != "conv1d"  # its layer takes `causal` when it is made
    return (causal or place not in CAUSAL) and (entry.alone or place not in CROSS)


@torch.no_grad()
def run(model, *given):
    """The results side by side, of each example: (B, ·), and with steps (B, T, ·)."""
    out = model(*given)
    return torch.cat([x.flatten(1) for x in out], 1) if isinstance(out, tuple) else out


def places(name):
    """The places where a mechanism can be, with a model, what it reads and its result."""
    for place in PLACES:
        if belongs(place, name):
            model, given = make(place, name), PLACES[place][2]
            yield place, model, given, run(model, *given)


@every_mechanism
def test_what_does_not_belong_in_a_place_is_refused(name):
    for place in PLACES:
        if not belongs(place, name):
            with pytest.raises(ValueError, match="(is_causal|cross) is (True|given); expected"):
                run(make(place, name), *PLACES[place][2])


@every_mechanism
def test_every_model_is_saved_and_loaded(name):
    for place, model, given, out in places(name):
        other, file = make(place, name, seed=1), io.BytesIO()
        assert not torch.allclose(run(other, *given), out), place
        torch.save(model.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(run(other, *given), out), place
        assert torch.equal(run(copy.deepcopy(model), *given), out), place


@every_mechanism
def test_examples_of_a_batch_see_neither_each_other_nor_padding(name):
    for place, model, given, out in places(name):
        single = torch.cat([run(model, *(x[i : i + 1] for x in given)) for i in range(B)])
        assert_all_close([single], [out], 1e-10, place)
        if place == "series":
            x, gone = given
            there = torch.where(gone[..., None], 5 + x, x)
            assert_all_close([run(model, there, gone)], [out], 1e-10, place)
            assert_all_close([run(model, x[:1])], [out[:1]], 1e-10, place)


@every_mechanism
def test_no_model_sees_the_future(name):
    """Nor does the past depend on how long the future is: a text is written byte by byte."""
    for place, model, given, out in places(name):
        if place not in CAUSAL:
            continue
        for t in (0, 1, out.shape[1] // 2, out.shape[1] - 2):
            what, past = f"{place}, {t}", out[:, : t + 1]
            later = torch.arange(given[0].shape[1]) > t
            changed = run(model, torch.where(later, 255 - given[0], given[0]))
            assert_all_close([changed[:, : t + 1]], [past], 1e-10, what)
            assert not torch.allclose(changed, out), what
            cut = [x[:, : t + 1] for x in given]
            assert_all_close([run(model, *cut)], [past], 1e-10, f"{what}, shorter")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_the_same(place):
    """With another mechanism each; `test_contract_places` compiles the layer of every one."""
    names = [name for name in MECHANISMS if belongs(place, name)]
    name = names[(7 * list(PLACES).index(place)) % len(names)]
    model, given = make(place, name), PLACES[place][2]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    assert_all_close([run(compiled, *given)], [run(model, *given)], 1e-10, name)


# --- half precision ------------------------------------------------------------------------------


def attended(layer, x, queries, is_causal, dtype=None):
    q = x if queries is None else x[:, :queries]
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        return layer(q, x, x, need_weights=False, is_causal=is_causal)[0]


def rounded(layer, dtype):
    """A layer in float64 that rounds what it has projected."""
    layer, project = copy.deepcopy(layer), layer.project
    layer.project = lambda *part: project(*part).to(dtype).double()
    return layer


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_inputs_in_half_precision_cost_what_rounding_them_costs(name, dtype):
    """Inputs of std 12: few keys then have all of the weight, and rounding scores decides which."""
    entry = MECHANISMS[name]
    kinds = ["self"] + ["causal"] * entry.causal + ["cross"] * entry.alone
    for key in kinds:
        causal, queries = key == "causal", 5 if key == "cross" else None
        own = {"causal": causal} if name == "conv1d" else {}
        own |= {"cross": True} if key == "cross" else {}
        errors = []
        for seed in range(4):
            torch.manual_seed(seed)
            half = entry.make_layer(E, H, N, dtype=dtype, **own).eval()
            exact, single = (copy.deepcopy(half).to(d) for d in (torch.float64, torch.float32))
            x = 12 * numbers(2, N, E, seed=seed).to(dtype)
            out, least = (
                attended(layer, x.double(), queries, causal)
                for layer in (exact, rounded(exact, dtype))
            )
            found = (
                attended(half, x, queries, causal),
                attended(single, x.float(), queries, causal, dtype),
            )
            assert all(bool(y.isfinite().all()) and y.dtype == dtype for y in found), key
            errors.append(relative_errors([least, *found], [out] * 3))
        floor, *others = torch.tensor(errors).mean(0)
        assert max(others) < 3 * (floor + 4 * torch.finfo(dtype).eps), f"{name}, {key}: {errors}"


@pytest.mark.parametrize(
    "place", [p for p, (*_, given) in PLACES.items() if any(x.is_floating_point() for x in given)]
)
def test_inputs_of_another_type_than_the_model_are_refused(place):
    """By name; autocast casts them."""
    model, given = make(place, "softmax").float(), PLACES[place][2]
    with pytest.raises(TypeError, match=r"\w+ has dtype torch.float64; expected torch.float32"):
        run(model, *given)
    single = [x.float() if x.is_floating_point() else x for x in given]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(model, *single).isfinite().all()
