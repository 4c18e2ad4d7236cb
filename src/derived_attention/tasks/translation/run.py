"""Train a `Translator` from German to English."""

from __future__ import annotations

import functools

import torch

from derived_attention.tasks.model import Config
from derived_attention.tasks.run import Numbers, Task, Trained, runner
from derived_attention.tasks.translation.data import load_translation, train_vocabulary
from derived_attention.tasks.translation.loss import Sentences, token_loss, translate
from derived_attention.tasks.translation.model import Translator
from derived_attention.training.fit import evaluate

LENGTH = 128  # tokens of a sentence, at most


@runner(epochs=10, batch_size=32, lr=4e-3)
def train_translation(config: Config, *, pieces: int = 4000) -> Task:
    """Train a `Translator` from German to English; return its scores on the test part, and cost.

    ``"bleu"`` and ``"chrf"`` are those of `sacrebleu`, of greedy translations; ``"bits"`` per token
    depend on `pieces`. The cost is that of a sentence of 16 tokens into another of 16.

    Parameters
    ----------
    config : Config
        Its attention serves all three attentions of the model.
    pieces : int
        Size of the vocabulary that `train_vocabulary` learns from the training part.
    seed, epochs, batch_size, lr, eta, device
        As in `derived_attention.tasks.run.runner`.
    """
    data = load_translation("ding")
    vocabulary = train_vocabulary(data.train, pieces)
    model = functools.partial(Translator, len(vocabulary), LENGTH, config)

    def scores(trained: Trained) -> Numbers:
        from sacrebleu import corpus_bleu, corpus_chrf  # takes half a second to import

        german, english = zip(*data.test, strict=True)
        written = translate(trained.model, vocabulary, german)
        bleu, chrf = (f(written, [english]).score for f in (corpus_bleu, corpus_chrf))
        test = evaluate(trained.model, Sentences(data.test, vocabulary), token_loss)
        return {"bleu": bleu, "chrf": chrf} | test

    inputs = tuple(torch.ones(2, 1, 16, dtype=torch.int64))
    batches = functools.partial(Sentences, data.train, vocabulary)
    return Task(model, inputs, batches, token_loss, scores)
