"""The encoder–decoder, and training it: masks, maps, batches, resume, greedy translation."""

import functools
import math

import pytest
import sacrebleu
import torch
from torch import nn

from derived_attention import translation
from derived_attention.attention.linear import linear_attention
from derived_attention.attention.mixture_layer import MixtureAttention
from derived_attention.attention.normalized import normalized_attention
from derived_attention.attention.softmax import MultiheadAttention, softmax_attention
from derived_attention.data.translation import BEGIN, END, PAD, train_vocabulary
from derived_attention.language import fit_language
from derived_attention.models import ByteLM, Translator, sinusoids
from derived_attention.runtime import digest, seed_everything
from derived_attention.training import schedule
from derived_attention.translation import (
    evaluate_translation,
    fit_translation,
    lengths,
    similar_batches,
    token_losses,
    translate,
    trim,
)

PAIRS = (
    ("Das ist gut.", "That is good."),
    ("Das ist nicht gut.", "That is not good."),
    ("Der Hund schläft.", "The dog is asleep."),
    ("Der Hund schläft heute nicht.", "The dog is not asleep today."),
    ("Wie geht es dir?", "How are you?"),
    ("Wie geht es dem Hund heute?", "How is the dog today?"),
    ("Ich habe keine Zeit.", "I have no time."),
    ("Heute habe ich Zeit für dich.", "I have time for you today."),
    ("Die Katze ist müde.", "The cat is tired."),
    ("Die Katze schläft, und der Hund ist müde.", "The cat is asleep, and the dog is tired."),
)
VOCABULARY = train_vocabulary(PAIRS, 90)
GERMAN = [german for german, _ in PAIRS]
TINY = dict(vocabulary=90, length=40, dim=16, heads=4, layers=2, hidden=32)


def translator(seed=0, **changes):
    seed_everything(seed)
    return Translator(**TINY | changes)


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


def weights(model):
    return digest(model.state_dict())


def finished_epochs(path):
    return len(torch.load(path, weights_only=True)["state"]["history"]["loss"])


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
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_no_token_has_an_influence_on_what_comes_before_it(name, mode):
    model = translator(attention=MECHANISMS[name], dropout=0.0)
    getattr(model, mode)()
    source, target = tokens(9, 4), tokens(6, 6)
    expected = model(source, target)
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
    together, maps = model(source, target), model.alignments(source, target)
    for i, (s, t) in enumerate(zip((9, 4, 7), (5, 8, 2), strict=True)):
        one, two = source[i : i + 1, :s], target[i : i + 1, :t]
        torch.testing.assert_close(together[i, :t], model(one, two)[0], rtol=1e-4, atol=1e-5)
        for many, single in zip(maps, model.alignments(one, two), strict=True):
            torch.testing.assert_close(many[i, :, :t, :s], single[0], rtol=1e-4, atol=1e-5)
        for place in range(s):
            changed = one.clone()
            changed[0, place] = 3 + (changed[0, place] - 2) % 87
            assert (model(changed, two) - model(one, two)).abs().amax((0, 2)).min() > 1e-5


@every_mechanism
def test_all_three_attentions_are_of_one_kind(name):
    model = translator(attention=MECHANISMS[name])
    layers = [layer.attention for layer in (*model.encoder, *model.decoder)]
    layers += [layer.cross for layer in model.decoder]
    assert len(set(map(id, layers))) == 6 and len({type(layer) for layer in layers}) == 1
    expected = MixtureAttention if name == "a mixture of keys" else MultiheadAttention
    assert type(layers[0]) is expected


@pytest.mark.parametrize("mode", [True, False])
def test_alignments_are_the_weights_of_the_forward_pass(mode):
    model, source, target = randomised(translator(dropout=0.5)), tokens(9, 4), tokens(5, 8)
    model.train(mode)
    maps = model.alignments(source, target)
    assert model.training is mode
    seen = []
    for layer in model.decoder:
        layer.cross.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    model.eval()(source, target)
    padding = source == PAD
    for layer, inputs, A in zip(model.decoder, seen, maps, strict=True):
        expected = layer.cross.forward(*inputs, padding, average_attn_weights=False)[1]
        torch.testing.assert_close(A, expected)
        assert A.shape == (2, 4, 8, 9) and (A[1, :, :, 4:] == 0).all()
        torch.testing.assert_close(A.sum(-1), torch.ones(2, 4, 8))


def test_wrong_input_of_a_translator():
    for name in TINY:
        with pytest.raises(ValueError, match=f"{name} is 0"):
            translator(**{name: 0})
    model, source, target = translator(), tokens(9, 4), tokens(5, 8)
    late = source.flip(1)
    for name, change in (
        ("source", lambda wrong: (wrong, target)),
        ("target", lambda wrong: (source, wrong)),
    ):
        for call in (model, model.alignments):
            for wrong, message in (
                (source[0], r"is torch.int64 of shape \(9,\); expected int64 of shape \(B, T\)"),
                (source.int(), r"is torch.int32 of shape \(2, 9\)"),
                (source[:, :0], r"is torch.int64 of shape \(2, 0\).*not empty"),
                (source + 87, "holds 87 to .*; expected tokens 0 <= x < 90"),
                (tokens(41, 41), "has 41 tokens in a row; expected at most 40"),
                (late, "has padding, token 0, before a token; expected it at the end"),
            ):
                with pytest.raises(ValueError, match=f"{name} {message}"):
                    call(*change(wrong))
            with pytest.raises(TypeError, match=f"{name} is list; expected a tensor"):
                call(*change([[1]]))
    with pytest.raises(ValueError, match="target has 1 sentences; expected 2, as source"):
        model(source, target[:1])


def test_text_of_a_translator_names_what_it_is():
    texts = {repr(translator(**c)) for c in ({}, dict(length=7), dict(attention=linear_attention))}
    assert len(texts) == 3 and all("DecoderLayer" in text for text in texts)


# --- Training -------------------------------------------------------------------------------------


def test_ten_sentences_are_learned_by_heart():
    model = translator(dim=32, hidden=64, dropout=0.0)
    before = evaluate_translation(model, VOCABULARY, PAIRS)
    history = fit_translation(model, VOCABULARY, PAIRS, epochs=120, batch_size=5, lr=1e-2)
    hypotheses = translate(model, VOCABULARY, GERMAN)
    assert hypotheses == [english for _, english in PAIRS]
    assert sacrebleu.corpus_bleu(hypotheses, [hypotheses]).score == pytest.approx(100)
    assert evaluate_translation(model, VOCABULARY, PAIRS) < 0.2 < 5 < before
    assert history["loss"][-1] < 0.2 and not model.training


def test_history_of_a_translator():
    model = translator()
    history = fit_translation(model, VOCABULARY, PAIRS, epochs=3, batch_size=4, test=PAIRS[:4])
    assert {name: len(values) for name, values in history.items()} == {"loss": 3, "test_loss": 3}
    assert history["test_loss"][-1] == evaluate_translation(model, VOCABULARY, PAIRS[:4])
    assert set(fit_translation(translator(), VOCABULARY, PAIRS, epochs=1)) == {"loss"}


def test_losses_are_those_of_pytorch():
    """With and without smoothing; rows of padding count for nothing."""
    model, source, target = translator().eval(), tokens(9, 4, 7), tokens(5, 8, 2)
    plain, spread = token_losses(model, source, target)
    logits, y = model(source, target[:, :-1]), target[:, 1:].flatten()
    assert plain.shape == spread.shape == (4 + 7 + 1,)
    for s in (0.0, 0.1, 0.7):
        expected = nn.functional.cross_entropy(
            logits.flatten(0, 1), y, ignore_index=PAD, label_smoothing=s
        )
        torch.testing.assert_close(((1 - s) * plain + s * spread).mean(), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_loss_is_the_mean_bits_per_token(smoothing):
    """With a tiny rate and no dropout, the loss is that of the first weights, not smoothed."""
    model = translator(dropout=0.0)
    expected = evaluate_translation(model, VOCABULARY, PAIRS)
    options = dict(epochs=1, batch_size=3, lr=1e-12, smoothing=smoothing)
    history = fit_translation(model, VOCABULARY, PAIRS, **options)
    assert history["loss"] == [pytest.approx(expected, rel=1e-5)]


def test_smoothing_keeps_the_model_less_sure():
    """Where the next token is known, its probability tends to 1 - s + s/V."""
    options = dict(epochs=300, batch_size=1, lr=1e-2)
    model = translator(dropout=0.0, layers=1)
    fit_translation(model, VOCABULARY, PAIRS[:1], smoothing=0.3, **options)
    bits = evaluate_translation(model, VOCABULARY, PAIRS[:1])
    assert bits == pytest.approx(-math.log2(0.7 + 0.3 / 90), abs=0.03)


def test_evaluation_is_the_sum_over_sentences():
    model = translator().train()
    bits = evaluate_translation(model, VOCABULARY, PAIRS)
    assert model.training
    model.eval()
    total, count = 0.0, 0
    for german, english in PAIRS:
        source, target = VOCABULARY.encode([german]), VOCABULARY.encode([english])
        log_p = model(source, target)[0].detach().log_softmax(-1)
        total -= sum(float(log_p[t, target[0, t + 1]]) for t in range(target.shape[1] - 1))
        count += target.shape[1] - 1
    assert bits == pytest.approx(total / count / math.log(2), rel=1e-5)
    for size in (1, 3, 10):
        assert evaluate_translation(model, VOCABULARY, PAIRS, batch_size=size) == (
            pytest.approx(bits, rel=1e-6)
        )


def test_batches_hold_every_pair_once_and_similar_ones():
    source, target = tokens(*range(2, 34)), tokens(*range(33, 1, -1))
    order = torch.arange(32).roll(7)
    pairs = source[order], target[order]
    seen = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        batches = similar_batches(pairs, 5)
        assert sorted(torch.cat(batches).tolist()) == list(range(32))
        assert sorted(map(len, batches)) == [2, 5, 5, 5, 5, 5, 5]
        for rows in batches:
            assert lengths(pairs[1][rows]).max() - lengths(pairs[1][rows]).min() == len(rows) - 1
        seen.append([rows.tolist() for rows in batches])
    assert seen[0] == seen[1] != seen[2]
    alike = tokens(*[5] * 32), tokens(*[6] * 32)  # where all are alike, chance decides
    assert similar_batches(alike, 8)[0].sort()[0].tolist() != list(range(8))


def test_batches_differ_from_epoch_to_epoch_and_are_trimmed():
    model, seen = translator(), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    fit_translation(model, VOCABULARY, PAIRS, epochs=2, batch_size=4)
    assert [len(source) for source, _ in seen].count(4) == 4 and len(seen) == 6
    for source, target in seen:
        assert (source[:, -1] != PAD).any() and (target[:, 0] == BEGIN).all()
        assert source.shape[1] < 30 or (source != PAD).sum(1).max() == source.shape[1]
    epochs = [[source.tolist() for source, _ in seen[i : i + 3]] for i in (0, 3)]
    assert epochs[0] != epochs[1]


def test_the_rate_follows_the_schedule(monkeypatch):
    rates, real = [], translation.take_step
    monkeypatch.setattr(
        translation, "take_step", lambda *given: (rates.append(given[3] * given[4]), real(*given))
    )
    fit_translation(translator(), VOCABULARY, PAIRS, epochs=20, batch_size=4, lr=0.5e-3)
    assert rates == [0.5e-3 * schedule(step, 60) for step in range(60)]


def test_a_seed_decides_everything():
    results = {}
    for name, init, seed in (("a", 0, 0), ("b", 0, 0), ("other init", 1, 0), ("other seed", 0, 1)):
        model = translator(init)
        torch.rand(len(results))  # whatever the caller drew before does not matter
        fit_translation(model, VOCABULARY, PAIRS, epochs=2, seed=seed)
        results[name] = weights(model)
    assert results["a"] == results["b"] and len(set(results.values())) == 3


def test_translator_s_training_leaves_the_caller_alone(monkeypatch, tmp_path, capfd):
    plain, watched = translator(), translator()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fit_translation(plain, VOCABULARY, PAIRS, epochs=2)
    translate(plain, VOCABULARY, GERMAN[:2])
    assert torch.equal(torch.rand(3), expected)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "1")
    options = dict(test=PAIRS[:3], checkpoint=tmp_path / "run.pt")
    fit_translation(watched, VOCABULARY, PAIRS, epochs=2, **options)
    assert weights(plain) == weights(watched)
    assert "epochs" in capfd.readouterr().err


# --- Resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 3, 4, 8])
def test_translator_resumes_after_an_error_anywhere(tmp_path, step):
    class Stop(Exception):
        pass

    model, calls = translator(), iter(range(100))

    def stop(module, _):
        if module.training and next(calls) == step:
            raise Stop

    handle = model.register_forward_pre_hook(stop)
    options = dict(epochs=3, batch_size=4, test=PAIRS[:4])  # three batches an epoch
    arguments = options | dict(checkpoint=tmp_path / "run.pt")
    with pytest.raises(Stop):
        fit_translation(model, VOCABULARY, PAIRS, **arguments)
    handle.remove()
    assert (finished_epochs(tmp_path / "run.pt") if step >= 3 else 0) == step // 3
    resumed, whole = translator(), translator()
    history = fit_translation(resumed, VOCABULARY, PAIRS, **arguments)
    assert history == fit_translation(whole, VOCABULARY, PAIRS, **options)
    assert weights(resumed) == weights(whole) != weights(translator())
    again = translator()
    again.register_forward_pre_hook(lambda *_: pytest.fail("nothing is left to compute"))
    assert fit_translation(again, VOCABULARY, PAIRS, **arguments) == history
    assert weights(again) == weights(whole)


FOREIGN = {
    "epochs is 2 there and 3 here": dict(epochs=3),
    "smoothing is 0.1 there and 0.2 here": dict(smoothing=0.2),
    "seed is 0 there and 3 here": dict(seed=3),
    "train differs": dict(train=PAIRS[1:]),
    "test differs": dict(test=PAIRS[:2]),
    "train differs; ": dict(vocabulary=train_vocabulary(PAIRS[::-1] + PAIRS[:4], 90), test=None),
    "model differs": dict(model=dict(attention=linear_attention)),
    "initial weights differ .build the model again": dict(model=dict(seed=1)),
}


@pytest.mark.parametrize("message", FOREIGN)
def test_checkpoint_of_another_translator(tmp_path, message):
    arguments = dict(vocabulary=VOCABULARY, train=PAIRS, epochs=2, checkpoint=tmp_path / "run.pt")
    first = arguments | (dict(test=PAIRS[:4]) if "train differs; " in message else {})
    fit_translation(translator(), **first)
    content, changes = (tmp_path / "run.pt").read_bytes(), FOREIGN[message].copy()
    model = translator(**changes.pop("model", {}))
    with pytest.raises(ValueError, match=f"belongs to another run: .*{message}"):
        fit_translation(model, **arguments | changes)
    assert (tmp_path / "run.pt").read_bytes() == content


def test_checkpoint_of_another_trainer(tmp_path):
    path, text = tmp_path / "run.pt", torch.arange(50, dtype=torch.uint8)
    fit_language(ByteLM(6, dim=8, heads=2, layers=1), text, steps=2, checkpoint=path)
    with pytest.raises(ValueError, match="trainer is fit_language there and fit_translation here"):
        fit_translation(translator(), VOCABULARY, PAIRS, checkpoint=path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="damaged, or is no checkpoint of fit_translation. It was"):
        fit_translation(translator(), VOCABULARY, PAIRS, checkpoint=path)


# --- Translating ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_trained():
    model = translator(dropout=0.3)
    fit_translation(model, VOCABULARY, PAIRS, epochs=25, batch_size=5, lr=1e-2)
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

WRONG = [
    (dict(epochs=0), ValueError, "epochs is 0; expected at least 1"),
    (dict(batch_size=2.0), TypeError, "batch_size is 2.0; expected an integer"),
    (dict(lr=-1), ValueError, "lr is -1; expected a positive number"),
    (dict(smoothing=1), ValueError, "smoothing is 1; expected 0 <= smoothing < 1"),
    (dict(smoothing=math.nan), ValueError, "smoothing is nan"),
    (dict(smoothing="much"), TypeError, "smoothing is 'much'; expected a number"),
    (dict(seed=-1), ValueError, "seed is -1"),
    (dict(device="toaster"), ValueError, "device is 'toaster'"),
    (dict(model=Translator), TypeError, "model is type; expected a torch.nn.Module"),
    (dict(model=nn.Linear(2, 2)), TypeError, "model.length is None; expected a model such as Tra"),
    (dict(model=ByteLM(40)), ValueError, "vocabulary has 90 tokens; expected 256, as the model"),
    (dict(vocabulary="abc"), TypeError, "vocabulary is str; expected a Vocabulary"),
    (dict(train=()), ValueError, "train is empty; expected at least one pair"),
    (dict(train="abc"), TypeError, "train is str; expected a sequence of pairs"),
    (dict(train=iter(PAIRS)), TypeError, "train is tuple_iterator; expected a sequence of pairs"),
    (dict(train=GERMAN), TypeError, r"train\[0\] is 'Das ist gut.'; expected \(source, trans"),
    (dict(train=[("Das", 3)]), TypeError, r"train\[0\] is \('Das', 3\); .*two strings"),
    (dict(test=()), ValueError, "test is empty"),
    (
        dict(test=[(20 * "Das ist ", "That")]),
        ValueError,
        r"test \(source\) has a sentence of 62 tokens; expected at most 40, the length of the mod",
    ),
    (
        dict(train=[("Das", 20 * "That is ")]),
        ValueError,
        r"train \(translation\) has a sentence of",
    ),
]


@pytest.mark.parametrize("arguments, error, message", WRONG)
def test_wrong_translation_arguments_before_any_work(tmp_path, arguments, error, message):
    model = translator()
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    given = dict(model=model, vocabulary=VOCABULARY, train=PAIRS, checkpoint=tmp_path / "run.pt")
    with pytest.raises(error, match=message):
        fit_translation(**given | arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call, name", [(evaluate_translation, "pairs"), (translate, "sentences")])
def test_wrong_evaluation_and_translation(call, name):
    given = {"model": translator(), "vocabulary": VOCABULARY}
    given[name] = PAIRS if name == "pairs" else GERMAN
    for arguments, error, message in (
        ({name: ()}, ValueError, f"{name} is empty"),
        ({name: "abc"}, TypeError, f"{name} is str; expected a sequence"),
        (dict(batch_size=0), ValueError, "batch_size is 0"),
        (dict(device="toaster"), ValueError, "device is 'toaster'"),
        (dict(model=ByteLM(40)), ValueError, "vocabulary has 90 tokens; expected 256"),
    ):
        with pytest.raises(error, match=message):
            call(**given | arguments)


def test_other_shapes_and_infinities_of_a_translator():
    model = translator()
    model.register_forward_hook(lambda _, __, logits: logits[:, -1])
    for call in (fit_translation, evaluate_translation):
        with pytest.raises(ValueError, match=r"returns shape \(10, 90\); expected \(10, \d+, V\)"):
            call(model, VOCABULARY, PAIRS)
    model, calls = translator(), iter(range(100))
    model.register_forward_hook(lambda _, __, y: y * torch.nan if next(calls) == 4 else y)
    with pytest.raises(FloatingPointError, match="loss is nan .* in epoch 2, step 2 of 3; a small"):
        fit_translation(model, VOCABULARY, PAIRS, batch_size=4)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: CUDA IS NOT TESTED")
def test_cuda_trains_a_translator(tmp_path):
    options = dict(epochs=10, batch_size=4, test=PAIRS)
    model, path = translator(dropout=0.0), tmp_path / "run.pt"
    fitted = fit_translation(model, VOCABULARY, PAIRS, device="cuda", checkpoint=path, **options)
    assert next(model.parameters()).is_cuda
    on_cpu = fit_translation(translator(dropout=0.0), VOCABULARY, PAIRS, **options)
    assert fitted["test_loss"] == pytest.approx(on_cpu["test_loss"], rel=1e-2)
    again = translator(dropout=0.0)
    fit_translation(again, VOCABULARY, PAIRS, checkpoint=path, **options)
    assert translate(again, VOCABULARY, GERMAN) == translate(model, VOCABULARY, GERMAN)
