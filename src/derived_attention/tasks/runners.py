"""One model on one task: build it, train it, and say what it scores and what it costs.

Each function trains one miniature from one seed, and returns numbers that JSON can hold, so that
`derived_attention.training.grids.run_grid` can run a grid of them. `config` goes to the model: see
`derived_attention.tasks.model.Config`. Half the heads at the same width of a head:
``Config(heads=2, attention=functools.partial(MultiheadAttention, head_dim=16))``.

For a model with Primal-Attention, `eta` is the weight of the objective of kernel SVD in the loss,
as in `derived_attention.training.fit.Regularised`; 0 leaves it out.

Beside its scores each returns the cost of all its attention layers, projections included:
``"parameters"``, and ``"flops"``, the operations of one forward pass over one full sequence, as
`derived_attention.training.measure.count_flops` finds them in what really runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from derived_attention.attention.frame.checks import Mechanism
from derived_attention.attention.frame.layer import MultiheadAttention
from derived_attention.attention.softmax.fast import softmax_attention
from derived_attention.runtime import evaluating, seed_everything
from derived_attention.tasks.control.data import load_control
from derived_attention.tasks.control.loss import Trajectories, action_loss, rollout
from derived_attention.tasks.detection.data import make_scenes
from derived_attention.tasks.detection.loss import (
    SceneBatches,
    average_precision,
    detect,
    detection_loss,
)
from derived_attention.tasks.detection.model import DetectionTransformer
from derived_attention.tasks.images.data import load_images
from derived_attention.tasks.language.data import load_text, make_topics
from derived_attention.tasks.language.loss import Windows, byte_loss
from derived_attention.tasks.listops.data import SHORT, make_listops
from derived_attention.tasks.model import (
    ByteLM,
    Config,
    DecisionTransformer,
    Recaller,
    SeriesClassifier,
    TableTransformer,
    TokenClassifier,
    Translator,
    VisionTransformer,
)
from derived_attention.tasks.recall.loss import Questions, answer_loss
from derived_attention.tasks.series.data import SeriesSplit, load_series
from derived_attention.tasks.supervised import Examples, class_loss, number_loss
from derived_attention.tasks.tables.data import load_table
from derived_attention.tasks.translation.data import load_translation, train_vocabulary
from derived_attention.tasks.translation.loss import Sentences, token_loss, translate
from derived_attention.training.fit import Loss, Regularised, evaluate, fit
from derived_attention.training.measure import count_flops

TRANSLATION_LENGTH = 128  # tokens of a sentence, at most
TEST_BATCHES = 8  # of 64 sequences of associative recall

Device = torch.device | str | None
Numbers = dict[str, float]


def language(
    config: Config,
    *,
    seed: int = 0,
    text: str = "python",
    length: int = 32,
    steps: int = 1000,
    batch_size: int = 16,
    lr: float = 1e-2,
    eta: float = 0.0,
    device: Device = None,
) -> Numbers:
    """Train a `ByteLM`; return ``"bits"`` per byte of the test part of `text`, and the cost.

    Parameters
    ----------
    config : Config
    text : str
        As in `derived_attention.tasks.language.data.load_text`.
    length, steps, batch_size
        As in `derived_attention.tasks.language.loss.Windows`.
    seed, lr, device
        As in `derived_attention.training.fit.fit`; the seed is also that of the initial weights.
    """
    data = load_text(text)
    seed_everything(seed)
    model = ByteLM(length, config)
    cost = attention_cost(model, torch.zeros(1, length, dtype=torch.int64))
    train = Windows(data.train, length, batch_size, steps)
    fit(model, train, regularised(byte_loss, eta), epochs=1, lr=lr, seed=seed, device=device)
    return evaluate(model, Windows(data.test, length), byte_loss) | cost


def small_model(
    attention: Mechanism | type[nn.Module] = softmax_attention,
    *,
    seed: int = 0,
    steps: int = 600,
    device: Device = None,
) -> ByteLM:
    """Train the small model that the book carries along from chapter 1, and return it.

    Two layers of four heads, of width 64, read 64 bytes of Python's documentation. All but the
    mechanism is the same in every chapter, the windows of a seed too. Its score on the test part:
    ``evaluate(model, Windows(load_text("python").test, 64), byte_loss)["bits"]``.

    Parameters
    ----------
    attention : callable
        A function or a class, as in `derived_attention.tasks.model.Config`.
    seed, device
        As in `derived_attention.training.fit.fit`; the seed is also that of the initial weights.
    steps : int
        Of 16 windows each.

    Examples
    --------
    >>> model = small_model(linear_attention)  # doctest: +SKIP
    >>> generate(model, "The function ", 40)  # doctest: +SKIP
    """
    seed_everything(seed)
    model = ByteLM(64, Config(heads=4, dropout=0.0, attention=attention))
    train = Windows(load_text("python").train, 64, batch_size=16, steps=steps)
    fit(model, train, byte_loss, epochs=1, lr=1e-2, seed=seed, device=device)
    return model


def series(
    config: Config,
    name: str,
    *,
    seed: int = 0,
    epochs: int = 20,
    batch_size: int = 16,
    lr: float = 1e-3,
    eta: float = 0.0,
    device: Device = None,
) -> Numbers:
    """Train a `SeriesClassifier`; return test ``"accuracy"`` after the last epoch, and the cost.

    ``"best"`` is the highest test accuracy of all epochs, which an epoch chosen on the test set
    would claim.

    Parameters
    ----------
    config : Config
    name : str
        As in `derived_attention.tasks.series.data.load_series`.
    seed, epochs, lr, device
        As in `derived_attention.training.fit.fit`; the seed is also that of the initial weights.
    batch_size : int
    """
    data = load_series(name)
    seed_everything(seed)
    model = SeriesClassifier(data.channels, data.classes, data.length, config)
    cost = attention_cost(model, torch.zeros(1, data.length, data.channels))
    how: dict[str, Any] = {"epochs": epochs, "lr": lr, "seed": seed, "device": device}
    return _accuracy(model, data, batch_size, eta, **how) | cost


def listops(
    config: Config,
    *,
    seed: int = 0,
    sizes: dict[str, Any] = SHORT,
    epochs: int = 6,
    batch_size: int = 128,
    lr: float = 8e-3,
    eta: float = 0.0,
    device: Device = None,
) -> Numbers:
    """Train a `TokenClassifier` on ListOps; return ``"accuracy"``, ``"best"`` as `series` does.

    Parameters
    ----------
    config : Config
    sizes : dict
        Keyword arguments of `derived_attention.tasks.listops.data.make_listops`, such as `SHORT`.
    seed, epochs, lr, device
        As in `derived_attention.training.fit.fit`; the seed is also that of the initial weights.
    batch_size : int
    """
    data = make_listops(**sizes)
    seed_everything(seed)
    model = TokenClassifier(data.vocabulary, data.classes, data.length, config)
    cost = attention_cost(model, torch.ones(1, data.length, dtype=torch.int64))
    how: dict[str, Any] = {"epochs": epochs, "lr": lr, "seed": seed, "device": device}
    return _accuracy(model, data, batch_size, eta, **how) | cost


def images(
    config: Config,
    name: str,
    *,
    patch: int,
    seed: int = 0,
    class_token: bool = False,
    epochs: int = 20,
    batch_size: int = 32,
    lr: float = 2e-3,
    eta: float = 0.0,
    device: Device = None,
) -> Numbers:
    """Train a `VisionTransformer`; return ``"accuracy"``, ``"best"`` as `series` does.

    Parameters
    ----------
    config : Config
    name, patch
        As in `derived_attention.tasks.images.data.load_images`.
    class_token : bool
        As in `VisionTransformer`.
    seed, epochs, lr, device
        As in `derived_attention.training.fit.fit`; the seed is also that of the initial weights.
    batch_size : int
    """
    data = load_images(name, patch)
    seed_everything(seed)
    model = VisionTransformer(
        data.grid, data.channels, data.classes, config, class_token=class_token
    )
    cost = attention_cost(model, torch.zeros(1, data.length, data.channels))
    how: dict[str, Any] = {"epochs": epochs, "lr": lr, "seed": seed, "device": device}
    return _accuracy(model, data, batch_size, eta, **how) | cost


def topics(
    config: Config,
    *,
    seed: int = 0,
    length: int = 128,
    train: int = 4000,
    test: int = 2000,
    epochs: int = 4,
    batch_size: int = 32,
    lr: float = 3e-3,
    eta: float = 0.0,
    device: Device = None,
) -> Numbers:
    """Train a `TokenClassifier` on bytes to name a text's topic; return as `series` does.

    Parameters
    ----------
    config : Config
    length, train, test
        As in `derived_attention.tasks.language.data.make_topics`.
    seed, epochs, lr, device
        As in `derived_attention.training.fit.fit`; the seed is also that of the initial weights.
    batch_size : int
    """
    data = make_topics(length, train, test)
    seed_everything(seed)
    model = TokenClassifier(data.vocabulary, data.classes, data.length, config)
    cost = attention_cost(model, torch.zeros(1, length, dtype=torch.int64))
    how: dict[str, Any] = {"epochs": epochs, "lr": lr, "seed": seed, "device": device}
    return _accuracy(model, data, batch_size, eta, **how) | cost


def table(
    config: Config,
    name: str,
    *,
    seed: int = 0,
    rows: int | None = None,
    epochs: int = 7,
    batch_size: int = 256,
    lr: float = 1e-3,
    device: Device = None,
) -> Numbers:
    """Train a `TableTransformer`; return ``"accuracy"`` or ``"rmse"`` of the test part, and cost.

    The score is that after the last epoch: nothing is selected, and the validation part is not
    used. The cost is that of one row.

    Parameters
    ----------
    config : Config
    name : str
        As in `derived_attention.tasks.tables.data.load_table`.
    rows : int, optional
        Train on the first rows of the training part only.
    seed, epochs, lr, device
        As in `derived_attention.training.fit.fit`; the seed is also that of the initial weights.
    batch_size : int
    """
    data = load_table(name)
    target = data.target or (0.0, 1.0)
    seed_everything(seed)
    model = TableTransformer(data.numbers, data.categories, data.classes, config, target)
    cost = attention_cost(model, torch.zeros(1, data.length, 1))
    loss = class_loss if data.classes else functools.partial(number_loss, variance=target[1] ** 2)
    train = Examples(SeriesSplit(data.train.x[:rows], None, data.train.y[:rows]), batch_size)
    fit(model, train, loss, epochs=epochs, lr=lr, seed=seed, device=device)
    score = evaluate(model, Examples(data.test, 2048), loss)
    metric = "accuracy" if data.classes else "rmse"
    return {metric: score[metric]} | cost


def translation(
    config: Config,
    *,
    seed: int = 0,
    pieces: int = 4000,
    epochs: int = 10,
    batch_size: int = 32,
    lr: float = 4e-3,
    device: Device = None,
) -> Numbers:
    """Train a `Translator` from German to English; return its scores on the test part.

    ``"bleu"`` and ``"chrf"`` are those of `sacrebleu`, of greedy translations; ``"bits"`` per token
    depend on `pieces`. The cost is that of a sentence of 16 tokens into another of 16.

    Parameters
    ----------
    config : Config
        Its attention serves all three of the model.
    pieces : int
        Size of the vocabulary that `train_vocabulary` learns from the training part.
    seed, epochs, lr, device
        As in `derived_attention.training.fit.fit`; the seed is also that of the initial weights.
    batch_size : int
    """
    from sacrebleu import corpus_bleu, corpus_chrf  # half a second, which other tasks need not wait

    data = load_translation("ding")
    vocabulary = train_vocabulary(data.train, pieces)
    seed_everything(seed)
    model = Translator(len(vocabulary), TRANSLATION_LENGTH, config)
    cost = attention_cost(model, *torch.ones(2, 1, 16, dtype=torch.int64))
    train = Sentences(data.train, vocabulary, batch_size)
    fit(model, train, token_loss, epochs=epochs, lr=lr, seed=seed, device=device)
    german, english = zip(*data.test, strict=True)
    written = translate(model, vocabulary, german)
    scores = {
        "bleu": corpus_bleu(written, [english]).score,
        "chrf": corpus_chrf(written, [english]).score,
    }
    return scores | evaluate(model, Sentences(data.test, vocabulary), token_loss) | cost


def recall(
    config: Config,
    *,
    seed: int = 0,
    pairs: int = 32,
    symbols: int = 64,
    steps: int = 500,
    batch_size: int = 16,
    lr: float = 1e-2,
    eta: float = 0.0,
    device: Device = None,
) -> Numbers:
    """Train a `Recaller`; return ``"accuracy"`` of its answers after the last step, and the cost.

    Parameters
    ----------
    config : Config
    pairs, symbols, steps, batch_size
        As in `Questions`. A guess is right once in `symbols` times.
    seed, lr, device
        As in `derived_attention.training.fit.fit`; the seed is also that of the initial weights.
    """
    seed_everything(seed)
    model = Recaller(symbols, config)
    cost = attention_cost(model, *torch.zeros(3, 1, pairs, dtype=torch.int64))
    train = Questions(pairs, symbols, batch_size, steps)
    fit(model, train, regularised(answer_loss, eta), epochs=1, lr=lr, seed=seed, device=device)
    score = evaluate(model, Questions(pairs, symbols, 64, TEST_BATCHES), answer_loss)
    return {"accuracy": score["accuracy"]} | cost


def control(
    config: Config,
    name: str,
    quality: str,
    *,
    seed: int = 0,
    transitions: int = 20_000,
    velocities: bool = True,
    length: int = 10,
    steps: int = 500,
    batch_size: int = 64,
    lr: float = 2e-3,
    conditioned: bool = True,
    eta: float = 0.0,
    episodes: int = 20,
    device: Device = None,
) -> Numbers:
    """Train a `DecisionTransformer` on episodes of others, then ask it for the expert's return.

    ``"return"`` is the mean of the episodes that it plays, ``"score"`` the same in per cent, from a
    random policy to the expert. ``"loss"`` is that of test episodes. ``"data"`` and ``"best"`` are
    the mean and the highest score of the episodes that it has learned from.

    Parameters
    ----------
    config : Config
    name, quality, transitions, velocities
        As in `load_control`; the data do not depend on the seed.
    seed, lr, device
        As in `fit`; the seed is also that of the initial weights, and of
        the starts of the episodes that are played.
    length, steps, batch_size
        As in `derived_attention.tasks.control.loss.Trajectories`.
    conditioned : bool
        As in `DecisionTransformer`: False is behaviour cloning.
    episodes : int
        How many to play.
    """
    data = load_control(name, quality, transitions, velocities=velocities)
    seed_everything(seed)
    model = DecisionTransformer(
        data.states,
        data.actions,
        data.discrete,
        length,
        config,
        horizon=data.horizon,
        scale=data.scale,
        conditioned=conditioned,
    )
    window = next(iter(Trajectories(data.train, length, 1)))
    cost = attention_cost(model, *window[:4])
    train = Trajectories(data.train, length, batch_size, steps)
    fit(model, train, regularised(action_loss, eta), epochs=1, lr=lr, seed=seed, device=device)
    returns, totals = rollout(model, data, episodes=episodes, seed=seed), data.train.totals
    value = sum(returns) / episodes
    scores = {"return": value, "score": data.score(value)}
    of_data = {"data": data.score(float(totals.mean())), "best": data.score(float(totals.max()))}
    error = evaluate(model, Trajectories(data.test, length), action_loss)["loss"]
    return scores | {"loss": error} | of_data | cost


def detection(
    config: Config,
    *,
    seed: int = 0,
    encoder: Mechanism | None = None,
    decoder: Mechanism | None = None,
    cross: Mechanism | None = None,
    path_dropout: str | None = None,
    queries: int = 6,
    train: int = 4000,
    test: int = 500,
    steps: int = 1200,
    batch_size: int = 16,
    lr: float = 1.5e-3,
    device: Device = None,
) -> Numbers:
    """Train a `DetectionTransformer` on drawn scenes; return its scores on others, and the cost.

    ``"AP"``, ``"AP50"`` and ``"AP75"`` are `average_precision` of new scenes, and ``"loss"`` is
    `detection_loss` there. ``"gap"`` is this loss less that of as many scenes that the model has
    seen, both in evaluation mode.

    Parameters
    ----------
    config, queries, encoder, decoder, cross, path_dropout
        As in `DetectionTransformer`.
    seed, lr, device
        As in `fit`; the seed is also that of the initial weights. The
        scenes do not depend on it.
    train, test : int
        How many scenes, as `derived_attention.tasks.detection.data.make_scenes` draws them.
    steps, batch_size
        As in `derived_attention.tasks.detection.loss.SceneBatches`.
    """
    known, new = make_scenes(train), make_scenes(test, seed=1)
    seed_everything(seed)
    model = DetectionTransformer(
        known.classes,
        config,
        queries=queries,
        encoder=encoder,
        decoder=decoder,
        cross=cross,
        path_dropout=path_dropout,
    )
    cost = attention_cost(model, new.images[:1])
    batches = SceneBatches(known, batch_size, steps)
    fit(model, batches, detection_loss, epochs=1, lr=lr, seed=seed, device=device)
    scores = average_precision(detect(model, new.images), new)
    seen, unseen = (
        evaluate(model, SceneBatches(some, 250), detection_loss)["loss"]
        for some in (known[:test], new)
    )
    shown = {name: scores[name] for name in ("AP", "AP50", "AP75")}
    return shown | {"loss": unseen, "gap": unseen - seen} | cost


def regularised(loss: Loss, eta: float) -> Loss:
    """Return `loss` with the objective of kernel SVD added, unless `eta` is 0."""
    return Regularised(loss, eta) if eta else loss


def _accuracy(model: nn.Module, data: Any, batch_size: int, eta: float, **how: Any) -> Numbers:
    train, test = Examples(data.train, batch_size), Examples(data.test)
    curve = fit(model, train, regularised(class_loss, eta), test=test, **how)["test_accuracy"]
    return {"accuracy": curve[-1], "best": max(curve)}


def attention_cost(model: nn.Module, *inputs: torch.Tensor) -> Numbers:
    """Return the ``"parameters"`` and ``"flops"`` of the attention layers of a model.

    Parameters
    ----------
    model : nn.Module
        Its attention layers are those of its modules that are a `MultiheadAttention`.
    inputs : Tensor
        What the model is called with; `flops` are those of that call, in evaluation mode.

    Raises
    ------
    ValueError
        If there is no attention layer.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    if not layers:
        raise ValueError(f"model {type(model).__name__} has no MultiheadAttention; expected one")
    calls: list[tuple[nn.Module, Any, Any]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
        for layer in layers
    ]
    with evaluating(model):
        try:
            model(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
        runs = (functools.partial(layer, *args, **how) for layer, args, how in calls)
        flops = sum(map(count_flops, runs))
    parameters = {id(p): p.numel() for layer in layers for p in layer.parameters()}
    return {"parameters": sum(parameters.values()), "flops": flops}
