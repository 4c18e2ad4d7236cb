"""Train a `DetectionTransformer` on drawn scenes."""

from __future__ import annotations

import functools

from derived_attention.common.checks import Mechanism
from derived_book.tasks.detection.data import make_scenes
from derived_book.tasks.detection.loss import (
    SceneBatches,
    average_precision,
    detect,
    detection_loss,
)
from derived_book.tasks.detection.model import DetectionTransformer
from derived_book.tasks.model import Config
from derived_book.tasks.run import Numbers, Task, Trained, runner
from derived_book.training.fit import evaluate


@runner(steps=1200, batch_size=16, lr=1.5e-3)
def train_detection(
    config: Config,
    *,
    encoder: Mechanism | None = None,
    decoder: Mechanism | None = None,
    cross: Mechanism | None = None,
    queries: int = 6,
    train: int = 4000,
    test: int = 500,
) -> Task:
    """Train a `DetectionTransformer` on drawn scenes; return its scores on others, and the cost.

    ``"AP"``, ``"AP50"`` and ``"AP75"`` are `average_precision` of new scenes, and ``"loss"`` is
    `detection_loss` there. ``"gap"`` is this loss less that of as many scenes of the training, both
    in evaluation mode.

    Parameters
    ----------
    config, queries, encoder, decoder, cross
        As in `DetectionTransformer`.
    train, test : int
        Numbers of scenes of `derived_book.make_scenes`.
    seed, steps, batch_size, lr, eta, device
        As in `derived_book.tasks.run.runner`.
    """
    known, new = make_scenes(train), make_scenes(test, seed=1)
    model = functools.partial(
        DetectionTransformer,
        known.classes,
        config,
        queries=queries,
        encoder=encoder,
        decoder=decoder,
        cross=cross,
    )

    def scores(trained: Trained) -> Numbers:
        precision = average_precision(detect(trained.model, new.images), new)
        seen, unseen = (
            evaluate(trained.model, SceneBatches(scenes, 250), detection_loss)["loss"]
            for scenes in (known[:test], new)
        )
        shown = {name: precision[name] for name in ("AP", "AP50", "AP75")}
        return shown | {"loss": unseen, "gap": unseen - seen}

    batches = functools.partial(SceneBatches, known)
    return Task(model, (new.images[:1],), batches, detection_loss, scores)
