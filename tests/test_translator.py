"""The encoder–decoder: masks, maps; sentences in batches, their loss, and greedy translation."""

import functools
import math

import pytest
import sacrebleu
import torch
from kinds import PAIRS, VOCABULARY, translator
from torch import nn

from derived_attention.attention.frame.layer import MultiheadAttention
from derived_attention.attention.linear.fast import linear_attention
from derived_attention.attention.mixture.layer import MixtureAttention
from derived_attention.attention.normalized.fast import normalized_attention
from derived_attention.attention.softmax.fast import softmax_attention
from derived_attention.tasks.language.model import ByteLM
from derived_attention.tasks.model import Config, sinusoids
from derived_attention.tasks.translation.data import BEGIN, END, PAD
from derived_attention.tasks.translation.loss import (
    Sentences,
    lengths,
    token_loss,
    token_losses,
    translate,
    trim,
)
from derived_attention.training.fit import evaluate, fit

GERMAN = [german for german, _ in PAIRS]
BYTES = ByteLM(40, Config())


def train(model, epochs, batch_size=5, lr=1e-2, pairs=PAIRS, **smoothing):
    loss = functools.partial(token_loss, **smoothing)
    return fit(model, Sentences(pairs, VOCABULARY, batch_size), loss, epochs=epochs, lr=lr)


def bits_of(model, pairs=PAIRS, batch_size=64):
    return evaluate(model, Sentences(pairs, VOCABULARY, batch_size), token_loss)["bits"]


def randomised(model):
    """LayerNorm and biases with numbers of their own, so that no term is an identity."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tokens(*rows):
    """Rows of different length, padded."""
    drawn = [torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in rows]
    return nn.utils.rnn.pad_sequence(drawn, batch_first=True, padding_value=PAD)


# --- The model ------------------------------------------------------------------------------------


def peer_state(ours, cross):
    """The weights of our layer under the names of PyTorch's."""
    names = {"self_attn": "attention", "norm1": "norm1", "norm2": "norm2"}
    if cross:
        names |= {"multihead_attn": "cross", "norm2": "norm3", "norm3": "norm2"}
    names |= {"linear1": "feedforward.0", "linear2": "feedforward.3"}
    return {
        f"{theirs}.{key}": value
        for theirs, name in names.items()
        for key, value in ours.get_submodule(name).state_dict().items()
    }


def test_translator_is_what_its_docstring_says():
    """The same numbers from PyTorch's own encoder and decoder layers, put together by hand."""
    model, source, target = randomised(translator()), tokens(9, 4, 7), tokens(5, 8, 2)
    options = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(8)

    def embed(x):
        return 4 * model.embed.weight[x] + model.positions[: x.shape[1]]  # 4 = √16

    memory, h = embed(source), embed(target)
    for layer in model.encoder:
        peer = nn.TransformerEncoderLayer(16, 4, 32, **options).eval()
        peer.load_state_dict(peer_state(layer, cross=False))
        memory = peer(memory, src_key_padding_mask=source == PAD)
    memory = model.encoder_norm(memory)
    for layer in model.decoder:
        peer = nn.TransformerDecoderLayer(16, 4, 32, **options).eval()
        peer.load_state_dict(peer_state(layer, cross=True))
        h = peer(h, memory, tgt_mask=mask, memory_key_padding_mask=source == PAD)
    expected = model.decoder_norm(h) @ model.embed.weight.T
    real = target != PAD
    torch.testing.assert_close(model(source, target)[real], expected[real])


def test_start_and_number_of_parameters():
    model = translator(dim=64)
    assert torch.equal(model.positions, sinusoids(40, 64)) and model.positions.requires_grad
    assert float(model.embed.weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert translator(dropout=0.0)(tokens(9), tokens(5)).std() < 2  # near the uniform distribution
    per_layer = 3 * 4 * (16 * 16 + 16) + 2 * (2 * 16 * 32 + 32 + 16) + 5 * 2 * 16
    count = sum(p.numel() for p in translator().parameters())
    assert count == (90 + 40) * 16 + 2 * per_layer + 2 * 2 * 16


def test_gradients_reach_every_parameter_of_a_translator():
    model = translator()
    plain, spread = token_losses(model, tokens(40, 3, 9), tokens(41, 7, 12))
    (plain.mean() + spread.mean()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


MECHANISMS = {
    "softmax": softmax_attention,
    "linear": linear_attention,
    "normalised": normalized_attention,
    "a class": MultiheadAttention,
    "a mixture of keys": functools.partial(MixtureAttention, priors="learned"),
}
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


@every_mechanism
def test_no_token_has_an_influence_on_what_comes_before_it(name):
    model = translator(attention=MECHANISMS[name], dropout=0.0)
    source, target = tokens(9, 4), tokens(6, 6)
    for mode in (True, False):
        expected = model.train(mode)(source, target)
        for t in range(6):
            changed = target.clone()
            changed[:, t] = 3 + (changed[:, t] - 2) % 87
            actual = model(source, changed)
            torch.testing.assert_close(actual[:, :t], expected[:, :t], rtol=0, atol=1e-6)
            assert (actual - expected).abs().amax((0, 2))[t:].min() > 1e-4


@every_mechanism
def test_padding_has_no_influence(name):
    """A sentence in a batch gives what it gives alone, and every source token matters."""
    model = translator(attention=MECHANISMS[name]).eval()
    source, target = tokens(9, 4, 7), tokens(5, 8, 2)
    together = model(source, target)
    for i, (s, t) in enumerate(zip((9, 4, 7), (5, 8, 2), strict=True)):
        one, two = source[i : i + 1, :s], target[i : i + 1, :t]
        torch.testing.assert_close(together[i, :t], model(one, two)[0], rtol=1e-4, atol=1e-5)
        for place in range(s):
            changed = one.clone()
            changed[0, place] = 3 + (changed[0, place] - 2) % 87
            assert (model(changed, two) - model(one, two)).abs().amax((0, 2)).min() > 1e-5


def test_all_three_attentions_are_of_one_kind():
    for attention, kind in ((linear_attention, MultiheadAttention), (MixtureAttention,) * 2):
        model = translator(attention=attention)
        layers = [layer.attention for layer in (*model.encoder, *model.decoder)]
        layers += [layer.cross for layer in model.decoder]
        assert len(set(map(id, layers))) == 6 and {type(layer) for layer in layers} == {kind}


def test_wrong_input_of_a_translator():
    model, source, target = translator(), tokens(9, 4), tokens(5, 8)
    late = source.flip(1)
    for name, change in (
        ("source", lambda wrong: (wrong, target)),
        ("target", lambda wrong: (source, wrong)),
    ):
        for wrong, message in (
            (source[0], r"is torch.int64 of shape \(9,\); expected int64 of shape \(B, T\)"),
            (source.int(), r"is torch.int32 of shape \(2, 9\)"),
            (source[:, :0], r"has shape \(2, 0\); expected one that is not empty"),
            (source + 87, "holds 87 to .*; expected tokens 0 <= x < 90"),
            (tokens(41, 41), "has 41 tokens in a row; expected at most 40"),
            (late, "has padding, token 0, before a token; expected it at the end"),
        ):
            with pytest.raises(ValueError, match=f"{name} {message}"):
                model(*change(wrong))
        with pytest.raises(TypeError, match=f"{name} is list; expected a tensor"):
            model(*change([[1]]))
    with pytest.raises(ValueError, match="target has 1 sentences; expected 2, as source"):
        model(source, target[:1])


def test_text_of_a_translator_names_what_it_is():
    texts = {repr(translator(**c)) for c in ({}, dict(length=7), dict(attention=linear_attention))}
    assert len(texts) == 3 and all("DecoderLayer" in text for text in texts)


# --- Training -------------------------------------------------------------------------------------


def test_ten_sentences_are_learned_by_heart():
    model = translator(dim=32, hidden=64, dropout=0.0)
    before = bits_of(model)
    history = train(model, epochs=120)
    hypotheses = translate(model, VOCABULARY, GERMAN)
    assert hypotheses == [english for _, english in PAIRS]
    assert sacrebleu.corpus_bleu(hypotheses, [hypotheses]).score == pytest.approx(100)
    assert bits_of(model) < 0.2 < 5 < before
    assert history["bits"][-1] < 0.2


def test_losses_are_those_of_pytorch():
    """With and without smoothing; rows of padding count for nothing; bits are never smoothed."""
    model, source, target = translator().eval(), tokens(9, 4, 7), tokens(5, 8, 2)
    logits, y = model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten()
    plain = nn.functional.cross_entropy(logits, y, ignore_index=PAD)
    for s in (0.0, 0.1, 0.7):
        expected = nn.functional.cross_entropy(logits, y, ignore_index=PAD, label_smoothing=s)
        loss, numbers = token_loss(model, (source, target), smoothing=s)
        torch.testing.assert_close(loss, expected)
        assert numbers["bits"].count == 4 + 7 + 1
        assert numbers["bits"].value == pytest.approx(plain.item() / math.log(2), rel=1e-5)


def test_smoothing_keeps_the_model_less_sure():
    """Where the next token is known, its probability tends to 1 - s + s/V."""
    model = translator(dropout=0.0, layers=1)
    train(model, epochs=300, batch_size=1, pairs=PAIRS[:1], smoothing=0.3)
    assert bits_of(model, PAIRS[:1]) == pytest.approx(-math.log2(0.7 + 0.3 / 90), abs=0.03)


def test_bits_are_the_sum_over_sentences():
    model = translator().eval()
    total, count = 0.0, 0
    for german, english in PAIRS:
        source, target = VOCABULARY.encode([german]), VOCABULARY.encode([english])
        log_p = model(source, target)[0].detach().log_softmax(-1)
        total -= sum(float(log_p[t, target[0, t + 1]]) for t in range(target.shape[1] - 1))
        count += target.shape[1] - 1
    for size in (1, 3, 10):
        assert bits_of(model, batch_size=size) == pytest.approx(total / count / math.log(2), 1e-5)
    history = train(translator(dropout=0.0), epochs=1, batch_size=3, lr=1e-12, smoothing=0.3)
    assert history["bits"] == [pytest.approx(total / count / math.log(2), rel=1e-5)]


def test_batches_hold_every_pair_once_and_similar_ones():
    """In training in an order by chance, which differs from epoch to epoch."""
    lines = [(n * "Hund ", (33 - n) * "dog ") for n in range(1, 33)]
    batches = Sentences([lines[i - 7] for i in range(32)], VOCABULARY, 5)
    seen = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found = list(batches.epoch(seed, 0))
        assert sorted(len(target) for _, target in found) == [2, 5, 5, 5, 5, 5, 5]
        sizes = [lengths(target) for _, target in found]
        assert len(set(torch.cat(sizes).tolist())) == 32 and len(batches) == 7
        assert all(len(size.unique()) == len(size) for size in sizes)
        assert all(size.max() - size.min() == len(size) - 1 for size in sizes)
        seen.append([size.tolist() for size in sizes])
    assert seen[0] == seen[1] != seen[2]
    for source, target in (*found, *batches):  # trimmed
        assert (source[:, -1] != PAD).any() and (target[:, -1] != PAD).any()
        assert (target[:, 0] == BEGIN).all()
    assert torch.cat([lengths(target) for _, target in batches]).diff().min() > 0
    alike = Sentences([(f"Hund {a}", "dog") for a in "aehi" * 8], VOCABULARY, 32)
    orders = [next(alike.epoch(0, e))[0].tolist() for e in range(2)]
    assert orders[0] != orders[1]  # where all are alike, chance decides


# --- Translating ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_trained():
    model = translator(dropout=0.3)
    train(model, epochs=25)
    return model


@pytest.mark.parametrize("mode", [True, False])
def test_translation_takes_the_likeliest_token_each_time(half_trained, mode):
    model, expected = half_trained.eval(), []
    for german in GERMAN:
        source, target = VOCABULARY.encode([german]), torch.tensor([[BEGIN]])
        while target[0, -1] != END and target.shape[1] < min(40, 2 * source.shape[1]):
            logits = model(source, target)[0, -1]
            logits[:END] = -torch.inf
            target = torch.cat([target, logits.argmax().view(1, 1)], 1)
        expected += VOCABULARY.decode(target)
    model.train(mode)
    assert translate(model, VOCABULARY, GERMAN) == expected and len(set(expected)) > 3
    assert model.training is mode
    for size in (1, 3):
        assert translate(model, VOCABULARY, GERMAN, batch_size=size) == expected


@pytest.mark.parametrize("length, longest", [(40, 2 * 8), (8, 8)])
def test_a_model_that_finds_no_end_is_stopped(length, longest):
    """Twice the tokens of the source, whatever else is in the batch; never padding or begin."""
    model = translator(length=length)
    favourite = VOCABULARY.encode(["D"])[0, 1]

    def logits(features):
        scores = torch.zeros(*features.shape[:-1], 90)
        scores[..., [PAD, BEGIN]], scores[..., favourite] = 9.0, 5.0
        return scores

    model.logits = logits
    sentences = [text for text in GERMAN if VOCABULARY.encode([text]).shape[1] <= length]
    assert VOCABULARY.encode(sentences[:1]).shape[1] == 8
    written = translate(model, VOCABULARY, sentences)
    assert written[0] == " ".join(["D"] * (longest - 1))
    assert written[0] == translate(model, VOCABULARY, sentences[:1])[0]
    assert len(sentences) < 3 if length == 8 else len(written[-1]) > len(written[0])


def test_trim():
    assert trim(torch.tensor([[1, 2, 0, 0], [1, 0, 0, 0]])).tolist() == [[1, 2], [1, 0]]


# --- Wrong input ----------------------------------------------------------------------------------

LONG = 20 * "Das ist "
WRONG = [
    (dict(vocabulary="abc"), TypeError, "vocabulary is str; expected a Vocabulary"),
    (dict(batch_size=2.0), TypeError, "batch_size is 2.0; expected an integer"),
    (dict(pairs=()), ValueError, "pairs is empty; expected at least one pair"),
    (dict(pairs="abc"), TypeError, "pairs is str; expected a sequence of pairs"),
    (dict(pairs=iter(PAIRS)), TypeError, "pairs is tuple_iterator; expected a sequence of pairs"),
    (dict(pairs=GERMAN), TypeError, r"pairs\[0\] is 'Das ist gut.'; expected \(source, trans"),
    (dict(pairs=[("Das", 3)]), TypeError, r"pairs\[0\] is \('Das', 3\); .*two strings"),
]


@pytest.mark.parametrize("arguments, error, message", WRONG)
def test_wrong_sentences(arguments, error, message):
    with pytest.raises(error, match=message):
        Sentences(**dict(pairs=PAIRS, vocabulary=VOCABULARY) | arguments)


def test_what_the_model_cannot_take_before_any_work():
    model = translator()
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    for wrong, error, message in (
        (nn.Linear(2, 2), TypeError, "model.length is None; expected a model such as Translator"),
        (BYTES, ValueError, "vocabulary has 90 tokens; expected 256, as the model has"),
    ):
        for call in (lambda m: train(m, 1), bits_of, lambda m: translate(m, VOCABULARY, GERMAN)):
            with pytest.raises(error, match=message):
                call(wrong)
    too_long = "has a sentence of 62 tokens; expected at most 40, the length of the model"
    for pair, side in (((LONG, "That"), "source"), (("Das", LONG), "translation")):
        with pytest.raises(ValueError, match=rf"batches \({side}\) {too_long}"):
            bits_of(model, [pair])
        with pytest.raises(ValueError, match=rf"train \({side}\) {too_long}"):
            train(model, 1, pairs=[pair])
    with pytest.raises(ValueError, match=f"sentences {too_long}"):
        translate(model, VOCABULARY, [LONG])
    for arguments, error, message in (
        (dict(sentences=()), ValueError, "sentences is empty"),
        (dict(sentences="abc"), TypeError, "sentences is str; expected a sequence"),
        (dict(vocabulary=3), TypeError, "vocabulary is int; expected a Vocabulary"),
        (dict(batch_size=0), ValueError, "batch_size is 0"),
        (dict(device="toaster"), ValueError, "device is 'toaster'"),
    ):
        with pytest.raises(error, match=message):
            translate(**dict(model=model, vocabulary=VOCABULARY, sentences=GERMAN) | arguments)


def test_wrong_smoothing_and_other_shapes():
    for wrong, error in ((1, ValueError), (math.nan, ValueError), ("much", TypeError)):
        with pytest.raises(error, match=f"smoothing is '?{wrong}"):
            train(translator(), 1, smoothing=wrong)
    model = translator()
    model.register_forward_hook(lambda _, __, logits: logits[:, -1])
    with pytest.raises(ValueError, match=r"returns shape \(10, 90\); expected \(10, \d+, V\)"):
        bits_of(model)
