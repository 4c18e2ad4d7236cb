"""Tiny models, data and losses of every kind for the tests of the trainer and the tasks."""

import torch

from derived_book.runtime import digest, seed_everything
from derived_book.tasks.detection.data import Scenes
from derived_book.tasks.detection.loss import SceneBatches, detection_loss
from derived_book.tasks.detection.model import DetectionTransformer
from derived_book.tasks.images.model import VisionTransformer
from derived_book.tasks.language.loss import Windows, byte_loss
from derived_book.tasks.language.model import ByteLM
from derived_book.tasks.model import Config
from derived_book.tasks.series.data import SeriesSplit
from derived_book.tasks.series.model import SeriesClassifier
from derived_book.tasks.supervised import Examples, class_loss

SIZES = dict(dim=8, heads=2, layers=1, hidden=16)


def weights(model):
    return digest(model.state_dict())


# --- Data -----------------------------------------------------------------------------------------


def series(n=24, seed=0):
    """Return series of two classes that differ in the mean of one channel; lengths 3 to 6."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    x = torch.randn(n, 6, 3, generator=generator)
    x[..., 0] += 2.0 * y[:, None]
    padding = torch.arange(6) >= torch.randint(3, 7, (n, 1), generator=generator)
    return SeriesSplit(x.masked_fill(padding[..., None], 0), padding, y)


def images(n=24, seed=0):
    """Return images of two classes that differ in one of six patches, without padding."""
    y = torch.arange(n) % 2
    x = torch.randn(n, 6, 4, generator=torch.Generator().manual_seed(seed))
    x[:, 2] += 2.0 * y[:, None]
    return SeriesSplit(x, None, y)


def scenes(n=24, seed=0):
    """Return scenes with a bright square in a quarter; two of three have a dark one in another."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(n)])
    corners = 8 * torch.stack([places % 2, places // 2], -1)  # (n, 2, 2)
    labels = torch.tensor([0, 1]).repeat(n, 1)
    labels[::3, 1] = -1
    images = 0.5 + 0.05 * torch.randn(n, 3, 16, 16, generator=generator)
    for i, k in (labels >= 0).nonzero().tolist():
        x, y = corners[i, k].tolist()
        images[i, :, y : y + 8, x : x + 8] = 1.0 - k
    boxes = torch.cat([(corners + 4) / 16, torch.full((n, 2, 2), 0.5)], -1)
    boxes[labels < 0] = 0
    return Scenes(images, boxes, labels, torch.full((n, 2), 16), ("bright", "dark"))


def text(n=500, seed=0):
    """Return letters a, b, c: each repeats the previous one or is the next (1 bit per byte)."""
    steps = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed))
    return (97 + steps.cumsum(0) % 3).to(torch.uint8)


# --- Models ---------------------------------------------------------------------------------------


def classifier(seed=0, **changes):
    seed_everything(seed)
    return SeriesClassifier(3, 2, 6, Config(**SIZES | changes))


def vision(seed=0, **changes):
    seed_everything(seed)
    return VisionTransformer((2, 3), 4, 2, Config(**SIZES | changes))


def writer(seed=0, length=6, **changes):
    seed_everything(seed)
    return ByteLM(length, Config(**SIZES | changes))


def detector(seed=0, **changes):
    seed_everything(seed)
    own = {"cross": changes.pop("cross", None)}
    return DetectionTransformer(2, Config(**SIZES | changes), queries=3, **own)


# --- For each kind: model, batches of n examples, loss, and the names of its reported numbers -----

KINDS = {
    "series": (classifier, lambda n: Examples(series(), n), class_loss, {"loss", "accuracy"}),
    "images": (vision, lambda n: Examples(images(), n), class_loss, {"loss", "accuracy"}),
    "text": (writer, lambda n: Windows(text(), 6, n, steps=3), byte_loss, {"bits"}),
    "scenes": (
        detector,
        lambda n: SceneBatches(scenes(), n, steps=3),
        detection_loss,
        {"loss", "class", "l1", "giou"},
    ),
}
SMALL = 8  # batch size: 24 examples make 3 batches
