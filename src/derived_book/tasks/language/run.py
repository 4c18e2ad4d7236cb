"""Train `ByteLM` to continue a text, and load a `LanguageModel` that has been trained."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import nn

from derived_attention.common.checks import Mechanism
from derived_attention.softmax.core import softmax_attention
from derived_book.runtime import seed_everything
from derived_book.tasks.checks import check_name
from derived_book.tasks.language.data import load_text
from derived_book.tasks.language.loss import Windows, byte_loss
from derived_book.tasks.language.model import ByteLM, LanguageModel
from derived_book.tasks.language.sessions import Sessions
from derived_book.tasks.model import Config
from derived_book.training.fit import Batches, fit
from derived_book.training.recorded import FOLDER

WEIGHTS = "chapterL_softmax.safetensors"  # of `load_language_model`, among the records


def small_model(
    attention: Mechanism | type[nn.Module] = softmax_attention,
    *,
    text: str = "sessions",
    seed: int = 0,
    steps: int = 600,
    device: torch.device | str | None = None,
) -> ByteLM:
    """Train the small model that the book carries along from chapter 1, and return it.

    It has two layers of four heads, is 64 wide and reads 64 bytes. Chapters differ only in the
    mechanism: even the batches of a seed are the same.

    Parameters
    ----------
    attention : callable
        A function or a class, as in `derived_book.tasks.model.Config`.
    text : str
        ``"sessions"``, see `derived_book.draw_sessions`: the model reads each byte together
        with the three before it. Or ``"python"``, see `derived_book.load_text`: each byte is read
        alone.
    seed : int
        Of the initial weights and the batches; there is no dropout.
    steps : int
        Training steps, of 16 windows each.
    device : torch.device or str, optional
        Where to train; default, the CPU.
    """
    check_name("text", text, ("sessions", "python"))
    seed_everything(seed)
    config = Config(heads=4, dropout=0.0, attention=attention)
    train: Batches
    if text == "sessions":
        model, train = ByteLM(64, config, taps=4), Sessions(64, batch_size=16, steps=steps)
    else:
        data = load_text(text)
        model, train = ByteLM(64, config), Windows(data.train, 64, batch_size=16, steps=steps)
    fit(model.to(device), train, byte_loss, epochs=1, lr=1e-2, seed=seed)
    return model


def load_language_model(device: torch.device | str | None = None) -> LanguageModel:
    """Return the language model that the book has trained on code, with softmax attention.

    It has four layers of four heads and the width 128, and reads 256 bytes. It was trained for
    6,000 steps of eight windows on the standard library of Python 3.11 without its tests and the
    documents that `load_documents` holds out; ``python -m experiments.chapterL weights`` does so.

    Parameters
    ----------
    device : torch.device or str, optional
        Default, the CPU.
    """
    model = LanguageModel(256, Config(dim=128, heads=4, layers=4, hidden=512, dropout=0.0))
    model.load_state_dict(load_file(FOLDER / WEIGHTS))
    return model.eval().to(device)
