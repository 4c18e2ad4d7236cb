"""Tests of `fit`: learning, determinism, precision, and wrong input.

Properties of every kind of data are tested with all of `kinds.KINDS`.
"""

import pytest
import torch
from kinds import KINDS, SMALL, classifier, series, weights

from derived_book.runtime import evaluating
from derived_book.tasks.supervised import Examples, class_loss
from derived_book.training import fit as training
from derived_book.training.fit import Bits, Mean, evaluate, fit, schedule

every_kind = pytest.mark.parametrize("kind", KINDS)


def batches(n=8, seed=0):
    return Examples(series(seed=seed), n)


def fit_series(model=None, train=None, **how):
    return fit(model or classifier(), train or batches(), class_loss, **dict(epochs=3) | how)


def untouched():
    """Return a model whose call fails the test."""
    model = classifier()
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    return model


# --- Learning -------------------------------------------------------------------------------------


@every_kind
def test_every_kind_is_learned_and_reported(kind):
    make, data, loss, names = KINDS[kind]
    model, test = make(), data(100)
    before = evaluate(model, test, loss)
    history = fit(model, data(SMALL), loss, epochs=40, test=test, lr=2e-2)
    assert history.keys() == names | {f"test_{name}" for name in names}
    assert {len(values) for values in history.values()} == {40}
    after = {name: history[f"test_{name}"][-1] for name in names}
    assert after == evaluate(model, test, loss) and before.keys() == names
    if "accuracy" in names:
        assert after["accuracy"] > 0.9 > before["accuracy"]
    else:
        assert all(after[name] < 0.6 * before[name] for name in names)
    assert not any(module.training for module in model.modules())
    assert set(fit(make(), data(100), loss, epochs=1)) == names


def test_schedule(monkeypatch):
    rates = [schedule(step, 340) for step in range(340)]
    assert rates[0] == pytest.approx(1 / 30) and rates[29] == 1.0 and rates[30] == 1.0
    assert max(rates) == 1.0 and min(rates) > 0
    assert rates[185] == pytest.approx(155 / 310) and rates[-1] == pytest.approx(1 / 310)
    assert rates[:30] == sorted(rates[:30]) and rates[30:] == sorted(rates[30:], reverse=True)
    for steps in (1, 2, 3, 31):
        assert all(0 < schedule(step, steps) <= 1 for step in range(steps))
    taken, real = [], torch.optim.Adam.step
    spy = lambda self: (taken.append(self.param_groups[0]["lr"]), real(self))  # noqa: E731
    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    fit_series(epochs=20, lr=0.5e-3)
    assert taken == [0.5e-3 * schedule(step, 60) for step in range(60)]


def test_reported_numbers_add_up():
    parts = ((3.0, 2), (1.0, 2))
    for kind, value in ((Mean, 1.0), (Bits, 1.4426950408889634)):
        first, second = (kind(*part) for part in parts)
        assert type(first + second) is kind and (first + second).value == pytest.approx(value)


# --- Determinism ----------------------------------------------------------------------------------


@every_kind
def test_a_seed_decides_everything_and_nothing_else_does(kind, monkeypatch):
    """The caller's random numbers, test data, bar and mode do not matter."""
    make, data, loss, _ = KINDS[kind]
    results = {}
    for name, init, seed in (("a", 0, 0), ("b", 0, 0), ("other init", 1, 0), ("other seed", 0, 1)):
        model = make(init).train(name == "a")
        torch.manual_seed(len(results))
        expected = torch.rand(3)
        torch.manual_seed(len(results))
        how = dict(epochs=2, seed=seed)
        if name == "b":
            monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "1")
            how |= dict(test=data(100))
        fit(model, data(SMALL), loss, **how)
        assert torch.equal(torch.rand(3), expected)  # the caller's generator is unchanged
        results[name] = weights(model)
    assert results["a"] == results["b"] and len(set(results.values())) == 3


# --- Precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "chosen"), [((7, 5), "float16"), ((6, 0), "float32"), ((9, 0), "bfloat16")]
)
def test_a_gpu_decides_the_precision(monkeypatch, capability, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for asked in (None, "auto"):
        assert training.chosen_precision(asked, classifier(), gpu) == chosen
        assert training.chosen_precision(asked, classifier(), cpu) == "float32"
        assert training.chosen_precision(asked, classifier().double(), gpu) == "float32"
    assert training.chosen_precision("float32", classifier(), gpu) == "float32"


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_products_are_taken_in_the_precision_and_weights_are_not(precision):
    models, histories, seen = {}, {}, set()
    for how in ("float32", precision):
        models[how] = classifier(dropout=0.0)
        watch = lambda layer, _, y: seen.add((layer.training, y.dtype))  # noqa: E731
        hook = models[how].layers[0].feedforward[0].register_forward_hook(watch)
        histories[how] = fit_series(models[how], epochs=15, precision=how, lr=2e-2)["loss"]
        hook.remove()
        assert seen == {(True, getattr(torch, how))}, "a training step used another precision"
        seen.clear()
        assert {p.dtype for p in models[how].parameters()} == {torch.float32}
    assert histories[precision] != histories["float32"]
    assert histories[precision][0] == pytest.approx(histories["float32"][0], rel=5e-2)
    assert histories[precision][-1] < 0.5 * histories[precision][0]


def test_a_scaled_gradient_that_overflows_leaves_a_step_out():
    """The scale is halved until the gradient fits; a gradient that never fits ends the run."""
    model = classifier()
    model.head.weight.register_hook(lambda g: g.half().float())  # as if computed in float16
    scales = []
    real = torch.amp.GradScaler.update
    with pytest.MonkeyPatch.context() as patch:
        spy = lambda self: (real(self), scales.append(self.get_scale()))  # noqa: E731
        patch.setattr(torch.amp.GradScaler, "update", spy)
        big = lambda m, b: (2**8 * class_loss(m, b)[0], class_loss(m, b)[1])  # noqa: E731
        fit_series(model, epochs=10, precision="float16")
        assert scales[-1] <= 2.0**16
        fit(model, batches(), big, epochs=10, precision="float16")
    assert scales[-1] < 2.0**16 and all(bool(p.isfinite().all()) for p in model.parameters())
    model.head.weight.register_hook(lambda g: g / 0.0)
    with pytest.raises(FloatingPointError, match="gradient has norm (inf|nan) in epoch"):
        fit_series(model, epochs=40, precision="float16")


# --- Evaluation -----------------------------------------------------------------------------------


@every_kind
def test_evaluation_leaves_the_model_alone(kind):
    make, data, loss, names = KINDS[kind]
    for mode in (True, False):
        model = make(dropout=0.5).train(mode)
        before, found = weights(model), evaluate(model, data(100), loss)
        assert model.training is mode and weights(model) == before and found.keys() == names
        for size in (1, 3, 10):  # neither batch size nor dropout matters
            assert evaluate(model, data(size), loss) == pytest.approx(found, rel=1e-5)


def test_evaluating_restores_the_mode_of_every_module():
    model = classifier()
    model.layers[0].eval()  # frozen on purpose
    modes = [module.training for module in model.modules()]
    with pytest.raises(KeyError), evaluating(model) as same:
        assert same is model and not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise KeyError
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()


# --- Wrong input ----------------------------------------------------------------------------------

WIDE = dict(precision="bfloat16", model=untouched().double())
WRONG = [
    (dict(epochs=0), ValueError, "epochs is 0; expected a whole number, at least 1"),
    (dict(precision=16), TypeError, "precision is 16; expected a string or None"),
    (dict(precision="half"), ValueError, "precision is 'half'; expected one of auto, float32, b"),
    (WIDE, ValueError, "precision is 'bfloat16', and the model has parameters of torch.float64"),
    (dict(lr=0), ValueError, "lr is 0"),
    (dict(lr=float("nan")), ValueError, "lr is nan"),
    (dict(lr=float("inf")), ValueError, "lr is inf"),
    (dict(lr="fast"), TypeError, "lr is 'fast'"),
    (dict(seed=-1), ValueError, "seed is -1"),
    (dict(model=series), TypeError, "model is function; expected a torch.nn.Module"),
    (dict(train=series()), TypeError, "train is SeriesSplit; expected Batches, such as Examples"),
    (dict(test=[1]), TypeError, "test is list; expected Batches"),
    (dict(loss="accuracy"), TypeError, "loss is 'accuracy'; expected a function loss.model, batch"),
]


@pytest.mark.parametrize("arguments, error, message", WRONG, ids=[w[2] for w in WRONG])
def test_wrong_arguments_before_any_work(arguments, error, message):
    model = untouched()
    with pytest.raises(error, match=message):
        fit(**dict(model=model, train=batches(), loss=class_loss, epochs=1) | arguments)
    assert weights(model) == weights(classifier())


def test_wrong_evaluation():
    with pytest.raises(TypeError, match="batches is SeriesSplit; expected Batches"):
        evaluate(untouched(), series(), class_loss)
    with pytest.raises(TypeError, match="loss is None"):
        evaluate(untouched(), batches(), None)


def test_what_is_not_finite_names_epoch_and_step():
    model, calls = classifier(), iter(range(100))
    model.register_forward_hook(lambda _, __, y: y * torch.nan if next(calls) == 4 else y)
    with pytest.raises(FloatingPointError, match="loss is nan .* epoch 2, step 2; a smal"):
        fit_series(model)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    model = classifier()
    model.head.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(FloatingPointError, match="gradient has norm (inf|nan) in epoch 1, step 1"):
        fit_series(model)


def test_no_bar_is_left_behind(monkeypatch, capfd):
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "1")
    fit_series()
    shown = capfd.readouterr()
    assert "epochs" in shown.err and shown.out == "" and "\n" not in shown.err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: CUDA IS NOT TESTED")
@every_kind
def test_cuda_trains_as_the_cpu_does(kind):
    make, data, loss, names = KINDS[kind]
    model, alone, train = make(dropout=0.0), make(dropout=0.0), data(SMALL)
    how = dict(epochs=8, lr=1e-2, test=data(100))
    history = fit(model.to("cuda"), train, loss, **how)
    assert next(model.parameters()).is_cuda
    on_cpu = fit(alone, train, loss, **how)
    for name in names - {"accuracy"}:
        assert history[f"test_{name}"] == pytest.approx(on_cpu[f"test_{name}"], rel=5e-2)
