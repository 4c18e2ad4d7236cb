"""Training: determinism, resume after kill -9, damaged and foreign checkpoints, wrong input."""

import dataclasses
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from derived_attention import runtime, training
from derived_attention.attention.softmax import softmax_attention
from derived_attention.data.series import SeriesSplit, load_series
from derived_attention.models import (
    SeriesClassifier,
    SeriesRegressor,
    TokenClassifier,
    VisionTransformer,
)
from derived_attention.runtime import digest, seed_everything
from derived_attention.training import evaluate, fit, schedule


def split(n=24, seed=0):
    """Two classes that differ in the mean of one channel; lengths from 3 to 6."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    x = torch.randn(n, 6, 3, generator=generator)
    x[..., 0] += 2.0 * y[:, None]
    padding = torch.arange(6) >= torch.randint(3, 7, (n, 1), generator=generator)
    return SeriesSplit(x.masked_fill(padding[..., None], 0), padding, y)


def small(seed=0, **changes):
    seed_everything(seed)
    sizes = dict(channels=3, classes=2, length=6, dim=8, heads=2, layers=1, hidden=16)
    return SeriesClassifier(**sizes | changes)


def weights(model):
    return digest(model.state_dict())


# --- Learning -------------------------------------------------------------------------------------


def test_learns_real_series():
    data = load_series("JapaneseVowels")
    picked = torch.arange(len(data.train)) % 7 == 0  # 39 series, four or five of each speaker
    train = SeriesSplit(data.train.x[picked], data.train.padding[picked], data.train.y[picked])
    seed_everything(0)
    model = SeriesClassifier(12, 9, 26, dim=32, heads=4, hidden=64)
    before = evaluate(model, data.test)
    history = fit(model, train, epochs=25, batch_size=8)
    assert before < 0.35
    assert evaluate(model, data.test) > 0.8  # chance is 0.11
    assert history["loss"][-1] < 0.3 * history["loss"][0]
    assert history["accuracy"][-1] > 0.95


def test_history_and_mode():
    model, test = small(), split(10, seed=1)
    history = fit(model, split(), epochs=3, test=test)
    assert {name: len(values) for name, values in history.items()} == {
        "loss": 3,
        "accuracy": 3,
        "test_accuracy": 3,
    }
    assert history["test_accuracy"][-1] == evaluate(model, test)
    assert not model.training
    assert set(fit(small(), split(), epochs=1)) == {"loss", "accuracy"}


def test_loss_and_accuracy_are_means_over_series():
    """With one batch per epoch, no dropout and a tiny rate, they are those of the first weights."""
    model, train = small(dropout=0.0), split(10)
    first = small(dropout=0.0)(train.x, train.padding)
    history = fit(model, train, epochs=1, batch_size=10, lr=1e-12)
    assert history["loss"][0] == pytest.approx(nn.functional.cross_entropy(first, train.y).item())
    assert history["accuracy"][0] == (first.argmax(1) == train.y).double().mean()


def test_schedule():
    rates = [schedule(step, 340) for step in range(340)]
    assert rates[0] == pytest.approx(1 / 30) and rates[29] == 1.0 and rates[30] == 1.0
    assert max(rates) == 1.0 and min(rates) > 0
    assert rates[185] == pytest.approx(155 / 310) and rates[-1] == pytest.approx(1 / 310)
    assert rates[:30] == sorted(rates[:30]) and rates[30:] == sorted(rates[30:], reverse=True)
    for steps in (1, 2, 3, 31):
        assert all(0 < schedule(step, steps) <= 1 for step in range(steps))


def test_every_series_is_seen_once_per_epoch_in_a_new_order():
    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.seen = nn.Parameter(torch.zeros(2)), []

        def forward(self, x, padding):
            self.seen.append(x[:, 0, 0].tolist())
            return self.weight.expand(len(x), 2)

    x = torch.arange(10.0).view(10, 1, 1).expand(10, 2, 3)
    data = SeriesSplit(x, torch.zeros(10, 2, dtype=torch.bool), torch.zeros(10, dtype=torch.int64))
    orders = []
    for seed in (0, 0, 1):
        spy = Spy()
        fit(spy, data, epochs=2, batch_size=4, seed=seed)
        assert [len(batch) for batch in spy.seen] == [4, 4, 2] * 2
        epochs = [sum(spy.seen[:3], []), sum(spy.seen[3:], [])]
        assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
        assert epochs[0] != epochs[1]
        orders.append(epochs)
    assert orders[0] == orders[1] != orders[2]


# --- Determinism ----------------------------------------------------------------------------------


def test_a_seed_decides_everything():
    results = {}
    for name, init, seed in (("a", 0, 0), ("b", 0, 0), ("other init", 1, 0), ("other seed", 0, 1)):
        model = small(init)
        torch.rand(len(results))  # whatever the caller drew before does not matter
        results[name] = (weights(model), *(fit(model, split(), epochs=2, seed=seed)["loss"],))
        results[name] += (weights(model),)
    assert results["a"] == results["b"]
    assert results["a"][2] != results["other init"][2]
    assert results["a"][0] == results["other seed"][0]
    assert results["a"][2] != results["other seed"][2]


def test_neither_test_nor_bar_nor_checkpoint_has_an_influence(tmp_path, monkeypatch):
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "1")
    plain, watched = small(), small()
    fit(plain, split(), epochs=3, progress=False)
    fit(watched, split(), epochs=3, test=split(9, 1), checkpoint=tmp_path / "run.pt")
    assert weights(plain) == weights(watched)


def test_the_caller_s_generator_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    model = small()
    torch.manual_seed(5)
    fit(model, split(), epochs=1)
    assert torch.equal(torch.rand(3), expected)


# --- Resume ---------------------------------------------------------------------------------------

CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from test_training import fit, small, split
fit(small(), split(), epochs=60, test=split(9, 1), checkpoint=sys.argv[2])
"""


def finished_epochs(path):
    return len(torch.load(path, weights_only=True)["state"]["history"]["loss"])


def test_kill_9_and_resume_to_bit_equal_weights(tmp_path, request):
    path = tmp_path / "folder" / "run.pt"
    command = [sys.executable, "-c", CHILD, str(request.path.parent), str(path)]
    for _ in range(2):  # killed twice, each time after new progress
        before = finished_epochs(path) if path.exists() else 0
        child = subprocess.Popen(command)
        while not path.exists() or finished_epochs(path) < before + 2:
            assert child.poll() is None, "the run ended before it could be killed"
            time.sleep(0.02)
        child.kill()
        assert child.wait() == -signal.SIGKILL
        assert before + 2 <= finished_epochs(path) < 60
    resumed, whole = small(), small()
    history = fit(resumed, split(), epochs=60, test=split(9, 1), checkpoint=path)
    assert history == fit(whole, split(), epochs=60, test=split(9, 1))
    assert weights(resumed) == weights(whole)


@pytest.mark.parametrize("step", [0, 1, 2, 3, 7])
def test_resume_after_an_error_anywhere(tmp_path, step):
    """Interrupted in any step of any epoch, also the very first: the same weights in the end."""

    class Stop(Exception):
        pass

    model, calls = small(), iter(range(100))

    def stop(*_):
        if next(calls) == step:
            raise Stop

    handle = model.register_forward_pre_hook(stop)
    arguments = dict(epochs=5, batch_size=12, checkpoint=tmp_path / "run.pt")
    with pytest.raises(Stop):
        fit(model, split(), **arguments)
    handle.remove()
    resumed, whole = small(), small()
    assert fit(resumed, split(), **arguments) == fit(whole, split(), epochs=5, batch_size=12)
    assert weights(resumed) == weights(whole)


def test_finished_run_returns_at_once(tmp_path):
    path, model = tmp_path / "run.pt", small()
    history = fit(model, split(), epochs=3, checkpoint=path)
    stamp, content = path.stat().st_mtime_ns, path.read_bytes()
    fresh = small()
    fresh.register_forward_pre_hook(lambda *_: pytest.fail("nothing is left to compute"))
    assert fit(fresh, split(), epochs=3, checkpoint=path) == history
    assert weights(fresh) == weights(model) and not fresh.training
    assert fit(model, split(), epochs=3, checkpoint=str(path)) == history  # the cell, run again
    assert (path.stat().st_mtime_ns, path.read_bytes()) == (stamp, content)
    assert list(tmp_path.iterdir()) == [path]


def other_attention(q, k, v, **how):
    return softmax_attention(2 * q, k, v, **how)


FOREIGN = {
    "epochs is 4 there and 5 here": dict(epochs=5),
    "batch_size is 16 there and 8 here": dict(batch_size=8),
    "lr is 0.001 there and 0.01 here": dict(lr=0.01),
    "seed is 0 there and 3 here": dict(seed=3),
    "train differs": dict(train=split(24, seed=7)),
    "test differs": dict(test=split(9, 1)),
    "initial weights differ .build the model again": dict(model=dict(seed=1)),
    "model differs": dict(model=dict(hidden=17)),
    "; model differs|: model differs": dict(model=dict(attention=other_attention)),
}


@pytest.mark.parametrize("message", FOREIGN)
def test_checkpoint_of_another_run(tmp_path, message):
    path = tmp_path / "run.pt"
    fit(small(), split(), epochs=4, checkpoint=path)
    content, arguments = path.read_bytes(), FOREIGN[message].copy()
    model, train = small(**arguments.pop("model", {})), arguments.pop("train", split())
    before = weights(model)
    with pytest.raises(ValueError, match=f"belongs to another run: .*{message}"):
        fit(model, train, **dict(epochs=4, checkpoint=path) | arguments)
    assert path.read_bytes() == content and weights(model) == before
    assert list(tmp_path.iterdir()) == [path]


def flipped(content, place):
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a checkpoint was executed",))


def other_file(content):
    import io

    buffer = io.BytesIO()
    torch.save({"weights": torch.zeros(3)}, buffer)
    return buffer.getvalue()


DAMAGE = {
    "empty": lambda content: b"",
    "text": lambda content: b"no checkpoint",
    "half": lambda content: content[: len(content) // 2],
    "end cut off": lambda content: content[:-1],
    "start cut off": lambda content: content[100:],
    "zeros": lambda content: bytes(len(content)),
    "another file of torch.save": other_file,
    "pickled code": lambda content: pickle.dumps(Evil(), protocol=2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint(tmp_path, damage):
    path = tmp_path / "run.pt"
    fit(small(), split(), epochs=2, checkpoint=path)
    content = DAMAGE[damage](path.read_bytes())
    path.write_bytes(content)
    model = small()
    before = weights(model)
    with pytest.raises(ValueError, match="run.pt is damaged, or is no checkpoint of fit. It was"):
        fit(model, split(), epochs=2, checkpoint=path)
    assert path.read_bytes() == content and weights(model) == before


def test_a_flipped_bit_of_a_weight_is_noticed(tmp_path):
    """PyTorch itself does not look: every bit of one tensor's bytes, found in the file."""
    path, model = tmp_path / "run.pt", small()
    fit(model, split(), epochs=2, checkpoint=path)
    content = path.read_bytes()
    at = content.index(model.head.weight.detach().numpy().tobytes())
    for place in (at, at + 3, at + 17):
        path.write_bytes(flipped(content, place))
        torch.load(path, weights_only=True)
        with pytest.raises(ValueError, match="run.pt is damaged"):
            fit(small(), split(), epochs=2, checkpoint=path)
    path.write_bytes(content)
    fit(small(), split(), epochs=2, checkpoint=path)


def test_failed_save_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    real, calls = runtime.os.replace, []

    def replace(*names):
        calls.append(names)
        if len(calls) == 3:
            raise OSError("disk full")
        real(*names)

    monkeypatch.setattr(runtime.os, "replace", replace)
    with pytest.raises(OSError, match="disk full"):
        fit(small(), split(), epochs=5, checkpoint=path)
    assert finished_epochs(path) == 2 and list(tmp_path.iterdir()) == [path]
    resumed, whole = small(), small()
    fit(resumed, split(), epochs=5, checkpoint=path)
    fit(whole, split(), epochs=5)
    assert weights(resumed) == weights(whole)


# --- Images, tokens, numbers ----------------------------------------------------------------------


def images(n=24, seed=0):
    """Two classes that differ in one patch of six; no padding."""
    y = torch.arange(n) % 2
    x = torch.randn(n, 6, 4, generator=torch.Generator().manual_seed(seed))
    x[:, 2] += 2.0 * y[:, None]
    return SeriesSplit(x, None, y)


def tokens(n=24, seed=0):
    """Two classes: is the first token below 4 or not? Lengths from 3 to 6."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 8, (n, 6), generator=generator)
    padding = torch.arange(6) >= torch.randint(3, 7, (n, 1), generator=generator)
    return SeriesSplit(x.masked_fill(padding, 0), padding, (x[:, 0] >= 4).long())


def numbers(n=24, seed=0):
    """The mean of a channel over the real steps, in large units far from 0."""
    series = split(n, seed)
    real = ~series.padding
    y = 1000 + 50 * (series.x[..., 0] * real).sum(1) / real.sum(1)
    return SeriesSplit(series.x, series.padding, y)


TINY = dict(dim=8, heads=2, layers=1, hidden=16)


def vision(seed=0):
    seed_everything(seed)
    return VisionTransformer((2, 3), 4, 2, **TINY)


def reader(seed=0):
    seed_everything(seed)
    return TokenClassifier(8, 2, 6, **TINY)


def regressor(seed=0, **changes):
    seed_everything(seed)
    y = numbers().y
    target = (float(y.mean()), float(y.std(correction=0)))
    return SeriesRegressor(3, 6, target, **TINY | changes)


KINDS = {"images": (vision, images), "tokens": (reader, tokens), "numbers": (regressor, numbers)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_learned(kind):
    make, data = KINDS[kind]
    metric = "rmse" if kind == "numbers" else "accuracy"
    model = make()
    before = evaluate(model, data(200, 1))
    history = fit(model, data(200), epochs=12, test=data(200, 1), lr=2e-2)
    assert set(history) == {"loss", metric, f"test_{metric}"}
    assert history[f"test_{metric}"][-1] == evaluate(model, data(200, 1))
    assert history["loss"][-1] < 0.6 * history["loss"][0]
    after = history[f"test_{metric}"][-1]
    assert after < 0.5 * before if kind == "numbers" else after > 0.9 > before


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_resumes_to_bit_equal_weights(tmp_path, kind):
    make, data = KINDS[kind]
    arguments = dict(epochs=4, test=data(9, 1), checkpoint=tmp_path / "run.pt")

    class Stop(Exception):
        pass

    model, calls = make(), iter(range(100))

    def stop(module, _):
        if module.training and next(calls) == 5:  # the second batch of the third epoch
            raise Stop

    model.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        fit(model, data(), **arguments)
    assert finished_epochs(tmp_path / "run.pt") == 2
    resumed, whole = make(), make()
    history = fit(resumed, data(), **arguments)
    assert history == fit(whole, data(), epochs=4, test=data(9, 1))
    assert weights(resumed) == weights(whole) != weights(make())
    again = make()
    assert fit(again, data(), **arguments) == history and weights(again) == weights(whole)


def test_loss_of_numbers_is_that_of_standardised_targets():
    model, train = regressor(dropout=0.0), numbers(10)
    first = regressor(dropout=0.0)(train.x, train.padding)
    mean, sd = train.y.mean(), train.y.std(correction=0)
    expected = nn.functional.mse_loss((first - mean) / sd, (train.y - mean) / sd)
    history = fit(model, train, epochs=1, batch_size=10, lr=1e-12)
    assert history["loss"][0] == pytest.approx(expected.item(), rel=1e-4)
    assert history["rmse"][0] == pytest.approx((first - train.y).square().mean().sqrt().item())


def test_units_of_the_target_change_nothing_but_the_units():
    """The same in thousandths: as many steps of the same size, and errors 1000 times as large."""
    train, test = numbers(), numbers(9, 1)
    small_unit = [dataclasses.replace(part, y=1000 * part.y) for part in (train, test)]
    model, other = regressor(), regressor()
    with torch.no_grad():
        other.mean *= 1000
        other.sd *= 1000
    history = fit(model, train, epochs=3, test=test)
    scaled = fit(other, small_unit[0], epochs=3, test=small_unit[1])
    assert scaled["loss"] == pytest.approx(history["loss"], rel=1e-3)
    assert scaled["test_rmse"] == pytest.approx([1000 * e for e in history["test_rmse"]], rel=1e-3)


def test_rmse_by_hand_and_in_batches():
    model, data = regressor(), numbers(11)
    errors = model.eval()(data.x, data.padding) - data.y
    assert evaluate(model, data) == pytest.approx(errors.square().mean().sqrt().item())
    for size in (1, 4, 11):
        assert evaluate(model, data, batch_size=size) == pytest.approx(evaluate(model, data))


def test_constant_targets():
    data = numbers(8)
    data = SeriesSplit(data.x, data.padding, torch.full((8,), 3.0))
    history = fit(regressor(), data, epochs=2)
    assert all(map(torch.tensor(0.0).lt, torch.tensor(history["loss"])))


@pytest.mark.parametrize(
    "make, data, message",
    [
        (regressor, split(), "train.y is torch.int64 of shape .24,.; expected floats of shape"),
        (vision, dataclasses.replace(images(), y=torch.zeros(24)), "train.y is .* expected int64"),
        (reader, SeriesSplit(tokens().x + 1, None, tokens().y), "train.x holds .* 0 <= x < 8"),
        (reader, SeriesSplit(tokens().x.int(), None, tokens().y), "train.x is torch.int32"),
        (reader, split(), "train.x is torch.float32 of shape .24, 6, 3.; expected int64"),
        (vision, split(), "train.x is .*; expected floats of shape .n, 6, 4."),
    ],
)
def test_targets_and_tokens_that_do_not_fit(make, data, message):
    model = make()
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=message):
        fit(model, data)


def test_numbers_must_be_finite_and_one_for_each_series():
    data = numbers()
    spoilt_y = data.y.clone()
    spoilt_y[3] = torch.nan
    with pytest.raises(ValueError, match="split.y holds NaN"):
        evaluate(regressor(), SeriesSplit(data.x, data.padding, spoilt_y))
    with pytest.raises(ValueError, match=r"train.y is .*\(24, 1\); expected floats .*\(24,\)"):
        fit(regressor(), SeriesSplit(data.x, data.padding, data.y[:, None]))

    class Column(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(3, 1)

        def forward(self, x, padding):
            return self.map(x[:, 0])  # (B, 1), which PyTorch would spread over all targets

    for call in (fit, evaluate):
        with pytest.raises(ValueError, match=r"model returns shape \(\d+, 1\) for .* numbers; exp"):
            call(Column(), data)
        model = regressor()
        del model.classes  # so that nothing is known of it before it runs
        with pytest.raises(ValueError, match=r"model returns shape \(\d+,\) for .* classes; exp"):
            call(model, split())


# --- Wrong input ----------------------------------------------------------------------------------


def spoilt(field, change):
    good = split()
    return dataclasses.replace(good, **{field: change(getattr(good, field))})


def set_value(tensor, value):
    tensor = tensor.clone()
    tensor[3, 2, 1] = value
    return tensor


WRONG = [
    (dict(epochs=0), ValueError, "epochs is 0; expected at least 1"),
    (dict(epochs=2.0), TypeError, "epochs is 2.0; expected an integer"),
    (dict(batch_size=-4), ValueError, "batch_size is -4"),
    (dict(batch_size=True), TypeError, "batch_size is True"),
    (dict(lr=0), ValueError, "lr is 0"),
    (dict(lr=float("nan")), ValueError, "lr is nan"),
    (dict(lr=float("inf")), ValueError, "lr is inf"),
    (dict(lr="fast"), TypeError, "lr is 'fast'"),
    (dict(seed=-1), ValueError, "seed is -1"),
    (dict(seed=0.5), TypeError, "seed is 0.5"),
    (dict(device="cuda:99"), ValueError, "device is 'cuda:99'"),
    (dict(device="toaster"), ValueError, "device is 'toaster'"),
    (dict(train=None), TypeError, "train is NoneType; expected a SeriesSplit"),
    (dict(test=[1]), TypeError, "test is list"),
    (dict(train=spoilt("x", lambda x: set_value(x, torch.nan))), ValueError, "train.x holds NaN"),
    (dict(test=spoilt("x", lambda x: set_value(x, torch.inf))), ValueError, "test.x holds NaN or"),
    (dict(train=spoilt("x", lambda x: x[:, :, 0])), ValueError, "train.x is torch.float32 of sh"),
    (dict(train=spoilt("x", lambda x: x.tolist())), TypeError, "train.x is list"),
    (dict(train=spoilt("x", lambda x: x[:-1])), ValueError, "train.padding is"),
    (dict(train=spoilt("padding", lambda p: p.float())), ValueError, "train.padding is torch.flo"),
    (dict(train=spoilt("padding", lambda p: p.tolist())), TypeError, "train.padding is list"),
    (dict(train=spoilt("y", lambda y: y.int())), ValueError, "train.y is torch.int32"),
    (dict(train=spoilt("y", lambda y: y[1:])), ValueError, "train.y is torch.int64 of shape"),
    (dict(train=spoilt("y", lambda y: y.tolist())), TypeError, "train.y is list"),
    (dict(train=spoilt("y", lambda y: y + 1)), ValueError, "train.y holds 1 to 2; expected .* < 2"),
    (dict(test=spoilt("y", lambda y: y - 1)), ValueError, "test.y holds -1 to 0"),
    (dict(train=spoilt("y", lambda y: y.float())), ValueError, "train.y is torch.float32 .* int64"),
    (dict(train=spoilt("x", lambda x: x[..., 0].long())), ValueError, "train.x is torch.int64"),
]


@pytest.mark.parametrize("arguments, error, message", WRONG, ids=[w[2] for w in WRONG])
def test_wrong_arguments_before_any_work(tmp_path, arguments, error, message):
    model = small()
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    before = weights(model)
    with pytest.raises(error, match=message):
        fit(model, **dict(train=split(), checkpoint=tmp_path / "run.pt") | arguments)
    assert weights(model) == before and not list(tmp_path.iterdir())


def test_empty_split_and_no_model():
    good = split()
    empty = SeriesSplit(good.x[:0], good.padding[:0], good.y[:0])
    with pytest.raises(ValueError, match="train is empty"):
        fit(small(), empty)
    with pytest.raises(ValueError, match="split is empty"):
        evaluate(small(), empty)
    with pytest.raises(TypeError, match="model is function; expected a torch.nn.Module"):
        fit(split, good)


def test_non_finite_loss_names_epoch_and_step():
    model = small()
    calls = iter(range(100))

    def spoil(_, __, logits):
        return logits * torch.nan if next(calls) == 4 else logits

    model.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match="loss is nan .* epoch 2, step 2 of 3; a smaller"):
        fit(model, split(), epochs=5, batch_size=8)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_non_finite_gradient_is_noticed_too():
    model = small()
    model.head.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(FloatingPointError, match="gradient has norm (inf|nan) in epoch 1, step 1"):
        fit(model, split())


# --- Evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False])
def test_evaluate(mode):
    model, data = small().train(mode), split(11)
    accuracy = evaluate(model, data)
    assert model.training is mode
    expected = (small().eval()(data.x, data.padding).argmax(1) == data.y).double().mean()
    assert accuracy == expected
    assert all(evaluate(model, data, batch_size=size) == accuracy for size in (1, 4, 11))
    with pytest.raises(ValueError, match="batch_size is 0"):
        evaluate(model, data, batch_size=0)
    with pytest.raises(ValueError, match="split.x holds NaN"):
        evaluate(model, spoilt("x", lambda x: set_value(x, torch.nan)))


def test_no_bar_is_left_behind(monkeypatch, capfd):
    monkeypatch.delenv("DERIVED_ATTENTION_PROGRESS", raising=False)
    fit(small(), split(), epochs=2)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "1")
    fit(small(), split(), epochs=2)
    shown = capfd.readouterr()
    assert "epochs" in shown.err and shown.out == "" and "\n" not in shown.err


def test_checkpoint_holds_no_code(tmp_path):
    fit(small(), split(), epochs=1, checkpoint=tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert set(saved) == {"run", "state", "digest"}
    assert training.digest(saved["run"], saved["state"]) == saved["digest"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: CUDA IS NOT TESTED")
def test_cuda_trains_and_a_checkpoint_moves_between_devices(tmp_path):
    path, model = tmp_path / "run.pt", small()
    history = fit(model, split(), epochs=8, device="cuda", checkpoint=path, test=split(9, 1))
    assert next(model.parameters()).is_cuda and history["loss"][-1] < history["loss"][0]
    assert evaluate(model, split(9, 1)) == history["test_accuracy"][-1]
    on_cpu = small()
    assert fit(on_cpu, split(), epochs=8, checkpoint=path, test=split(9, 1)) == history
    assert weights(on_cpu) == weights(model) and not next(on_cpu.parameters()).is_cuda
