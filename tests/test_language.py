"""Language models: training, resume, evaluation, and the text that they write."""

import math
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from derived_attention import language
from derived_attention.data.series import SeriesSplit
from derived_attention.data.text import load_text, ngram_bits
from derived_attention.language import evaluate_language, fit_language, generate
from derived_attention.models import ByteLM, TokenClassifier
from derived_attention.runtime import digest, seed_everything
from derived_attention.training import fit, schedule


def weights(model):
    return digest(model.state_dict())


def finished_rounds(path):
    return len(torch.load(path, weights_only=True)["state"]["history"]["loss"])


def writer(seed=0, **changes):
    seed_everything(seed)
    return ByteLM(**dict(length=6, dim=8, heads=2, layers=1, hidden=16) | changes)


def text(n=500, seed=0):
    """Bytes of which each is the one before, or the next of three."""
    steps = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed))
    return (97 + steps.cumsum(0) % 3).to(torch.uint8)


@pytest.fixture
def short_rounds(monkeypatch):
    monkeypatch.setattr(language, "ROUND_STEPS", 4)


def test_learns_real_text():
    """In a second: better than single bytes can be predicted by any model without a context."""
    data = load_text("python")
    seed_everything(0)
    model = ByteLM(16, dim=32, layers=1, dropout=0.0)
    before = evaluate_language(model, data.test)
    history = fit_language(model, data.train, steps=250)
    assert before > 7
    assert evaluate_language(model, data.test) < ngram_bits(data.train, data.test, 0) - 0.5
    assert history["loss"][-1] < history["loss"][0] - 1


def test_learns_what_can_be_known():
    """Every byte of this text but the first has two possible values: 1 bit."""
    model = writer(dropout=0.0)
    fit_language(model, text(2000), steps=300)
    assert 0.95 < evaluate_language(model, text(2000, 1)) < 1.1


def test_a_model_without_context_reaches_the_bigram():
    """What attention does not bring, n-grams of order 1 have: the two scales are one."""

    def alone(q, k, v, **how):
        return v

    train, test = text(4000), text(2000, 1)
    model = writer(dropout=0.0, attention=alone)
    fit_language(model, train, steps=300)
    assert evaluate_language(model, test) == pytest.approx(ngram_bits(train, test, 1), abs=0.03)


def test_history_of_rounds(short_rounds):
    model, test = writer(), text(50, 1)
    history = fit_language(model, text(), steps=10, test=test)
    assert {name: len(values) for name, values in history.items()} == {"loss": 3, "test_loss": 3}
    assert history["test_loss"][-1] == evaluate_language(model, test)
    assert not model.training
    assert set(fit_language(writer(), text(), steps=1)) == {"loss"}


def test_loss_is_the_mean_bits_of_the_windows(short_rounds):
    """With a tiny rate and no dropout, the loss is that of the first weights."""
    model, seen = writer(dropout=0.0), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    train = torch.arange(200, dtype=torch.uint8)  # so that a window tells its place
    history = fit_language(model, train, steps=6, batch_size=5, lr=1e-12)
    assert [x.shape for x in seen] == [(5, 6)] * 6 and seen[0].dtype == torch.int64
    assert all(torch.equal(x, x[:, :1] + torch.arange(6)) for x in seen)
    first = writer(dropout=0.0).eval()
    losses = [
        nn.functional.cross_entropy(first(x).flatten(0, 1), (x + 1).flatten()).item() for x in seen
    ]
    for loss, batch in zip(history["loss"], (losses[:4], losses[4:]), strict=True):
        assert loss == pytest.approx(sum(batch) / len(batch) / math.log(2), rel=1e-5)


def test_windows_come_from_everywhere_and_differ_from_step_to_step():
    places = {}
    for seed in (0, 0, 1):
        model, seen = writer(dropout=0.0), []
        model.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0][:, 0]))
        fit_language(model, torch.arange(20, dtype=torch.uint8), steps=40, batch_size=8, seed=seed)
        places.setdefault(seed, []).append(torch.stack(seen).tolist())
    assert set(sum(places[0][0], [])) == set(range(14))  # the last byte is only predicted
    assert len(set(map(tuple, places[0][0]))) == 40
    assert places[0][0] == places[0][1] != places[1][0]


def test_the_length_of_a_round_and_the_mode_before_decide_nothing(monkeypatch):
    results = set()
    for length in (3, 10):
        for mode in (True, False):
            monkeypatch.setattr(language, "ROUND_STEPS", length)
            model = writer(dropout=0.5).train(mode)
            fit_language(model, text(), steps=10, test=text(50, 1))
            results.add(weights(model))
    assert len(results) == 1


def test_dropout_follows_the_seed():
    """Where every window is the same, only dropout tells seeds apart."""
    once, again, other = (writer(dropout=0.5) for _ in range(3))
    for model, seed in ((once, 0), (again, 0), (other, 1)):
        fit_language(model, text(7), steps=4, seed=seed)
    assert weights(once) == weights(again) != weights(other)


def test_a_text_of_one_window():
    model = writer()
    fit_language(model, text(7), steps=2)
    assert evaluate_language(model, text(2)) > 0


def test_the_rate_follows_the_schedule(monkeypatch):
    rates = []
    real = language.take_step
    monkeypatch.setattr(
        language, "take_step", lambda *given: (rates.append(given[3] * given[4]), real(*given))
    )
    fit_language(writer(), text(), steps=120, lr=0.5e-3)
    assert rates == [0.5e-3 * schedule(step, 120) for step in range(120)]


@pytest.mark.parametrize("step", [0, 1, 4, 5, 9])
def test_language_model_resumes_after_an_error_anywhere(tmp_path, short_rounds, step):
    class Stop(Exception):
        pass

    model, calls = writer(), iter(range(100))

    def stop(module, _):
        if module.training and next(calls) == step:
            raise Stop

    handle = model.register_forward_pre_hook(stop)
    arguments = dict(steps=10, test=text(50, 1), checkpoint=tmp_path / "run.pt")
    with pytest.raises(Stop):
        fit_language(model, text(), **arguments)
    handle.remove()
    assert (finished_rounds(tmp_path / "run.pt") if step >= 4 else 0) == step // 4
    resumed, whole = writer(), writer()
    history = fit_language(resumed, text(), **arguments)
    assert history == fit_language(whole, text(), steps=10, test=text(50, 1))
    assert weights(resumed) == weights(whole) != weights(writer())
    again = writer()
    again.register_forward_pre_hook(lambda *_: pytest.fail("nothing is left to compute"))
    assert fit_language(again, text(), **arguments) == history and weights(again) == weights(whole)


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from test_language import fit_language, language, text, writer
language.ROUND_STEPS = 4
fit_language(writer(), text(), steps=400, checkpoint=sys.argv[2])
"""


def test_language_model_survives_kill_9(tmp_path, request, short_rounds):
    path = tmp_path / "folder" / "run.pt"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(request.path.parent), str(path)])
    while not path.exists() or finished_rounds(path) < 3:
        assert child.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert 3 <= finished_rounds(path) < 100
    resumed, whole = writer(), writer()
    history = fit_language(resumed, text(), steps=400, checkpoint=path)
    assert history == fit_language(whole, text(), steps=400)
    assert weights(resumed) == weights(whole)


FOREIGN = {
    "steps is 8 there and 9 here": dict(steps=9),
    "lr is 0.01 there and 0.1 here": dict(lr=0.1),
    "seed is 0 there and 3 here": dict(seed=3),
    "train differs": dict(train=text(seed=7)),
    "test differs": dict(test=text(9)),
    "model differs": dict(model=dict(length=5)),
    "initial weights differ .build the model again": dict(model=dict(seed=1)),
}


@pytest.mark.parametrize("message", FOREIGN)
def test_checkpoint_of_another_language_model(tmp_path, message):
    path = tmp_path / "run.pt"
    fit_language(writer(), text(), steps=8, checkpoint=path)
    content, arguments = path.read_bytes(), FOREIGN[message].copy()
    model, train = writer(**arguments.pop("model", {})), arguments.pop("train", text())
    with pytest.raises(ValueError, match=f"belongs to another run: .*{message}"):
        fit_language(model, train, **dict(steps=8, checkpoint=path) | arguments)
    assert path.read_bytes() == content


def test_language_training_leaves_the_caller_alone(monkeypatch, tmp_path, capfd):
    torch.manual_seed(5)
    expected = torch.rand(3)
    plain, watched = writer(), writer()
    torch.manual_seed(5)
    fit_language(plain, text(), steps=3)
    assert torch.equal(torch.rand(3), expected)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "1")
    fit_language(watched, text(), steps=3, test=text(50, 1), checkpoint=tmp_path / "run.pt")
    assert weights(plain) == weights(watched)
    assert "rounds" in capfd.readouterr().err


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("n", [2, 6, 7, 8, 13, 40])
def test_every_byte_but_the_first_is_predicted_once(n, mode):
    model, data = writer().train(mode), text(n)
    bits = evaluate_language(model, data)
    assert model.training is mode
    model.eval()
    expected = 0.0
    for i in range(1, n):
        window = data[(i - 1) // 6 * 6 : i].long()[None]  # from the start of its window of 6
        expected -= model(window)[0, -1].log_softmax(0)[data[i].long()].item() / math.log(2)
    assert bits == pytest.approx(expected / (n - 1), rel=1e-5)
    for size in (1, 2, 3):
        assert evaluate_language(model, data, batch_size=size) == pytest.approx(bits)


WRONG = [
    (dict(steps=0), ValueError, "steps is 0; expected at least 1"),
    (dict(batch_size=2.0), TypeError, "batch_size is 2.0; expected an integer"),
    (dict(lr=-1), ValueError, "lr is -1; expected a positive number"),
    (dict(seed=-1), ValueError, "seed is -1"),
    (dict(device="toaster"), ValueError, "device is 'toaster'"),
    (dict(model=SeriesSplit), TypeError, "model is type; expected a torch.nn.Module"),
    (dict(model=nn.Linear(2, 2)), TypeError, "model.length is None; expected a language model"),
    (dict(train="abc"), TypeError, "train is str; expected a tensor"),
    (dict(train=text().long()), ValueError, r"train is torch.int64 .*; expected uint8 of shape"),
    (dict(train=text(6)), ValueError, "train has 6 bytes; expected at least 7"),
    (dict(test=text(1)), ValueError, "test has 1 bytes; expected at least 2"),
    (dict(test=text()[None]), ValueError, r"test is torch.uint8 of shape \(1, 500\)"),
]


@pytest.mark.parametrize("arguments, error, message", WRONG)
def test_wrong_language_arguments_before_any_work(tmp_path, arguments, error, message):
    model = writer()
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    with pytest.raises(error, match=message):
        fit_language(**dict(model=model, train=text(), checkpoint=tmp_path / "run.pt") | arguments)
    assert not list(tmp_path.iterdir())


def test_wrong_language_evaluation():
    for arguments, error, message in (
        (dict(text=text(1)), ValueError, "text has 1 bytes; expected at least 2"),
        (dict(batch_size=0), ValueError, "batch_size is 0"),
        (dict(model=nn.Linear(2, 2)), TypeError, "model.length is None"),
    ):
        with pytest.raises(error, match=message):
            evaluate_language(**dict(model=writer(), text=text()) | arguments)


def test_other_shapes_and_infinities_of_a_language_model():
    model = writer()
    model.register_forward_hook(lambda _, __, logits: logits[:, -1])
    for call in (fit_language, evaluate_language):
        with pytest.raises(
            ValueError, match=r"returns shape \(\d+, 256\); expected \(\d+, 6, 256\)"
        ):
            call(model, text())
    model, calls = writer(), iter(range(100))
    model.register_forward_hook(lambda _, __, y: y * torch.nan if next(calls) == 4 else y)
    with pytest.raises(FloatingPointError, match="loss is nan .* in step 5 of 9; a smaller lr"):
        fit_language(model, text(), steps=9)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: CUDA IS NOT TESTED")
def test_cuda_trains_a_language_model(tmp_path, short_rounds):
    model, arguments = writer(dropout=0.0), dict(steps=40, test=text(50, 1))
    history = fit_language(model, text(), device="cuda", checkpoint=tmp_path / "c.pt", **arguments)
    assert next(model.parameters()).is_cuda
    on_cpu = fit_language(writer(dropout=0.0), text(), **arguments)
    assert history["test_loss"] == pytest.approx(on_cpu["test_loss"], rel=1e-2)


# --- Checkpoints of another trainer ---------------------------------------------------------------


def classes(n=24):
    x = torch.randint(0, 8, (n, 6), generator=torch.Generator().manual_seed(0))
    return SeriesSplit(x, None, (x[:, 0] >= 4).long())


def test_the_trainers_refuse_each_other_s_checkpoints(tmp_path):
    path = tmp_path / "run.pt"
    reader = TokenClassifier(8, 2, 6, dim=8, heads=2, layers=1, hidden=16)
    for make, other, words in (
        (
            lambda: fit_language(writer(), text(), steps=2, checkpoint=path),
            lambda: fit(reader, classes(), epochs=1, checkpoint=path),
            "fit_language there and fit here",
        ),
        (
            lambda: fit(reader, classes(), epochs=1, checkpoint=path),
            lambda: fit_language(writer(), text(), steps=2, checkpoint=path),
            "fit there and fit_language here",
        ),
    ):
        path.unlink(missing_ok=True)
        make()
        content = path.read_bytes()
        with pytest.raises(ValueError, match=f"belongs to another run: trainer is {words}. It was"):
            other()
        assert path.read_bytes() == content


def test_a_damaged_checkpoint_names_the_trainer(tmp_path):
    (tmp_path / "run.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is damaged, or is no checkpoint of fit_language. It was"):
        fit_language(writer(), text(), steps=2, checkpoint=tmp_path / "run.pt")


# --- Writing --------------------------------------------------------------------------------------


def test_a_trained_model_writes_on():
    """In the text each byte follows the one before; a window is enough to see it."""
    model = writer(dropout=0.0)
    fit_language(model, torch.tensor([97, 98, 99], dtype=torch.uint8).repeat(100), steps=150)
    for temperature in (0.0, 0.1):
        assert generate(model, "c", 12, temperature=temperature) == "cabcabcabcabc"
    assert generate(model, "bcabcabcab", 3) == "bcabcabcabcab"


def test_what_is_drawn_follows_softmax_seed_and_temperature():
    model, logits = writer(), torch.full((256,), -torch.inf)
    logits[97:99] = torch.tensor([0.0, math.log(3.0)])
    model.register_forward_hook(lambda _, inputs, __: logits.expand(*inputs[0].shape, 256))
    written = generate(model, "x", 2000, temperature=1.0)
    assert written[0] == "x" and written[1:].count("b") == pytest.approx(1500, abs=5 * 375**0.5)
    assert written == generate(model, "x", 2000, temperature=1.0)
    assert written != generate(model, "x", 2000, temperature=1.0, seed=1)
    cooler = generate(model, "x", 2000, temperature=0.5)  # odds 9 : 1
    assert cooler[1:].count("b") == pytest.approx(1800, abs=5 * 180**0.5)
    assert generate(model, "x", 3) == "xbbb"


def test_a_window_is_as_long_as_it_can_be():
    model, seen = writer(), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].tolist()))
    generate(model, "abcd", 5)
    assert seen[0] == list(b"abcd") and list(map(len, seen)) == [4, 5, 6, 6, 6]
    for before, after in zip(seen, seen[1:], strict=False):
        assert before[-5:] == after[:-1]


@pytest.mark.parametrize("mode", [True, False])
def test_writing_leaves_mode_and_generator_alone(mode):
    model, same = writer(dropout=0.5).train(mode), writer(dropout=0.5)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert generate(model, "Ä", 4, temperature=1.0) == generate(same, "Ä", 4, temperature=1.0)
    assert torch.equal(torch.rand(3), expected) and model.training is mode


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(prompt=b"x"), TypeError, "prompt is bytes; expected a string"),
        (dict(prompt=""), ValueError, "prompt is empty; expected at least one character"),
        (dict(n=0), ValueError, "n is 0; expected at least 1"),
        (dict(temperature="hot"), TypeError, "temperature is 'hot'; expected a number"),
        (dict(temperature=-1), ValueError, "temperature is -1; expected 0 or more"),
        (dict(temperature=math.nan), ValueError, "temperature is nan"),
        (dict(seed=-1), ValueError, "seed is -1"),
        (dict(model=nn.Linear(2, 2)), TypeError, "model.length is None"),
    ],
)
def test_wrong_writing_before_any_work(arguments, error, message):
    model = writer()
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    with pytest.raises(error, match=message):
        generate(**dict(model=model, prompt="x", n=2) | arguments)
