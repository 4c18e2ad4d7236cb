"""Language models: windows of a text, bits per byte, and the text that they write."""

import math

import pytest
import torch
from kinds import text, writer
from torch import nn

from derived_attention.softmax.controls import identity_attention
from derived_book.runtime import seed_everything
from derived_book.tasks.language.loss import Windows, byte_loss, generate
from derived_book.tasks.language.model import ByteLM
from derived_book.tasks.language.sessions import (
    Sessions,
    draw_sessions,
    right_answers,
)
from derived_book.tasks.model import Config
from derived_book.training.fit import evaluate, fit


def train(model, data, steps=300, **how):
    return fit(model, Windows(data, 6, 16, steps), byte_loss, epochs=1, lr=1e-2, **how)


def bits_of(model, data, length=6, batch_size=64):
    return evaluate(model, Windows(data, length, batch_size), byte_loss)["bits"]


# --- Training and evaluation ----------------------------------------------------------------------


def test_learns_what_can_be_known_and_no_more():
    """Attention reaches 1 bit per byte; without it, a model is as good as bigram counts."""

    def alone(q, k, v, **how):
        return v

    data, test = text(4000), text(2000, 1)
    model, blind = writer(dropout=0.0), writer(dropout=0.0, attention=alone)
    for each in (model, blind):
        train(each, data)
    assert 0.95 < bits_of(model, test) < 1.1
    assert bits_of(blind, test) == pytest.approx(bigram_bits(data, test), abs=0.03)


def bigram_bits(data, test):
    """Return the bits per byte of `test`, predicted by the counts of pairs in `data`."""
    counts = torch.zeros(256, 256, dtype=torch.float64)
    ones = torch.ones(len(data) - 1, dtype=torch.float64)
    counts.index_put_((data[:-1].long(), data[1:].long()), ones, accumulate=True)
    p = counts / counts.sum(1, keepdim=True)
    return -p[test[:-1].long(), test[1:].long()].log2().mean().item()


def test_bits_are_the_mean_over_the_windows():
    """With a tiny rate and no dropout, every step has the bits of the initial weights."""
    model, seen = writer(dropout=0.0), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    data = torch.arange(200, dtype=torch.uint8)  # each window begins with its place
    history = fit(model, Windows(data, 6, 5, steps=3), byte_loss, epochs=2, lr=1e-12)
    assert [x.shape for x in seen] == [(5, 6)] * 6 and seen[0].dtype == torch.int64
    assert all(torch.equal(x, x[:, :1] + torch.arange(6)) for x in seen)
    first = writer(dropout=0.0).eval()
    losses = [nn.functional.cross_entropy(first(x).mT, x + 1).item() for x in seen]
    for bits, batch in zip(history["bits"], (losses[:3], losses[3:]), strict=True):
        assert bits == pytest.approx(sum(batch) / 3 / math.log(2), rel=1e-5)


def test_windows_come_from_everywhere_and_differ_from_step_to_step():
    places = []
    for seed, steps in ((0, 40), (0, 8), (1, 40)):
        batches = Windows(torch.arange(20, dtype=torch.uint8), 6, batch_size=8, steps=steps)
        found = [w for e in range(40 // steps) for (w,) in batches.epoch(seed, e)]
        assert len(batches) == steps and {w.shape for w in found} == {(8, 7)}
        places.append([tuple(w[:, 0].tolist()) for w in found])
    assert set(sum(places[0], ())) == set(range(14))  # the last byte is only predicted
    assert len(set(places[0])) == 40
    assert places[0] == places[1] != places[2]  # whatever the length of an epoch


@pytest.mark.parametrize("n", [7, 8, 13, 40])
def test_every_byte_but_the_first_is_predicted_once(n):
    model, data = writer().eval(), text(n)
    expected = 0.0
    for i in range(1, n):
        window = data[(i - 1) // 6 * 6 : i].long()[None]  # from the start of its window of 6
        expected -= model(window)[0, -1].log_softmax(0)[data[i].long()].item() / math.log(2)
    for size in (1, 2, 3, 64):
        found = bits_of(model, data, batch_size=size)
        assert found == pytest.approx(expected / (n - 1), rel=1e-5)


def test_wrong_windows():
    for arguments, error, message in (
        (dict(text="abc"), TypeError, "text is str; expected a tensor"),
        (dict(text=text().long()), ValueError, "text is torch.int64 .*; expected uint8 of shape"),
        (dict(text=text()[None]), ValueError, r"text is torch.uint8 of shape \(1, 500\)"),
        (dict(text=text(6)), ValueError, "text has 6 bytes; expected at least 7"),
        (dict(steps=0), ValueError, "steps is 0; expected a whole number, at least 1"),
    ):
        with pytest.raises(error, match=message):
            Windows(**dict(text=text(), length=6) | arguments)
    for name, call in (("train", train), ("batches", bits_of)):
        with pytest.raises(TypeError, match="model.length is None; expected a language model, suc"):
            call(nn.Linear(2, 2), text())
        found = f"{name} has windows of 6 bytes; expected at most 5, the length of the model"
        with pytest.raises(ValueError, match=found):
            call(writer(length=5), text())


def test_other_shapes():
    model = writer()
    model.register_forward_hook(lambda _, __, logits: logits[:, -1])
    for call in (train, bits_of):
        with pytest.raises(ValueError, match=r"returns shape \(\d+, 256\); expected \(\d+, 6, 256"):
            call(model, text())


# --- Text generation ------------------------------------------------------------------------------


def test_a_trained_model_writes_on():
    """In this text each byte determines the next one."""
    model = writer(dropout=0.0)
    train(model, torch.tensor([97, 98, 99], dtype=torch.uint8).repeat(100), steps=150)
    for temperature in (0.0, 0.1):
        assert generate(model, "c", 12, temperature=temperature) == "cabcabcabcabc"
    assert generate(model, "bcabcabcab", 3) == "bcabcabcabcab"


class Coin(nn.Module):
    """A model that always gives b three times the probability of a."""

    length = 6

    def forward(self, x):
        logits = torch.full((*x.shape, 256), -torch.inf)
        logits[..., 97:99] = torch.tensor([0.0, math.log(3.0)])
        return logits


def test_what_is_drawn_follows_softmax_seed_and_temperature():
    model = Coin()
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
        (dict(n=0), ValueError, "n is 0; expected a whole number, at least 1"),
        (dict(temperature="hot"), TypeError, "temperature is 'hot'; expected a number"),
        (dict(temperature=-1), ValueError, "temperature is -1; expected a finite number, at least"),
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


# --- Sessions -------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A model that predicts sessions by their rule, from a dictionary of the stored digits."""

    length = 40

    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        p = torch.zeros(*x.shape, 256, dtype=torch.float64)
        for row, read in zip(p, x.tolist(), strict=True):
            notes = {}
            for t, byte in enumerate(map(chr, read)):
                if t % 4 == 0:
                    new = (0.5 if notes else 1) / 26
                    old = 0.5 / len(notes) if byte in notes else 0
                    row[t, ord("=")], row[t, ord("?")] = new / (new + old), old / (new + old)
                elif byte == "=":
                    row[t, 48:58] = 0.1
                elif byte == "?":
                    row[t, ord(notes[chr(read[t - 1])])] = 1
                elif t % 4 == 2:
                    notes[chr(read[t - 2])] = byte
                    row[t, ord(" ")] = 1
                else:
                    row[t, 97:123] = 0.5 / 26
                    for name in notes:
                        row[t, ord(name)] += 0.5 / len(notes)
        return p.log()


def test_sessions_follow_their_rule():
    """By the rule, every byte has a positive probability, and every answer is right."""
    sessions, reader = Sessions(40, batch_size=32, steps=3), Reader()
    (texts,) = zip(*sessions, strict=True)
    most = (math.log2(26) + 1 + math.log2(10)) / 4  # a letter, a sign and a digit in four bytes
    assert 1 < evaluate(reader, sessions, byte_loss)["bits"] < most
    assert right_answers(reader, 64) == 1
    again = next(iter(sessions))[0]
    assert torch.equal(again, texts[0]) and not torch.equal(texts[0], texts[1])
    text, answers = draw_sessions(2000, 41)
    assert torch.equal(answers[:, 1:], text[:, :-1] == ord("?"))
    assert answers[:, 10].double().mean().item() == pytest.approx(0.5, abs=0.05)


def test_a_convolution_reads_the_bytes_before_and_no_others():
    seed_everything(0)
    model = ByteLM(12, Config(dim=8, heads=2, attention=identity_attention), taps=4).eval()
    x = torch.randint(256, (1, 12))
    for t in range(12):
        other = x.clone()
        other[0, t] = (x[0, t] + 1) % 256
        changed = (model(x) - model(other)).abs().amax(-1)[0] > 1e-6
        assert changed.nonzero()[:, 0].tolist() == list(range(t, min(t + 4, 12)))


def test_what_cannot_be_a_session_is_refused():
    with pytest.raises(ValueError, match="length is 0"):
        draw_sessions(2, 0)
    with pytest.raises(ValueError, match="sessions of 16 bytes"):
        fit(writer(), Sessions(16, 2, 1), byte_loss, epochs=1, lr=1e-2)
    with pytest.raises(TypeError, match="model.length is None; expected a language model"):
        evaluate(nn.Linear(2, 2), Sessions(16, 2, 1), byte_loss)
