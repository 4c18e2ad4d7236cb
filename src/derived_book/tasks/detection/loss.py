"""Object detection: batches of scenes, the loss of DETR, and average precision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from derived_attention.common.checks import check_count
from derived_book.runtime import evaluating
from derived_book.tasks.checks import check_range, check_shape, check_type
from derived_book.tasks.detection.data import Scenes, coco_api, silence
from derived_book.tasks.detection.model import DetectionTransformer
from derived_book.training.fit import Endless, Mean, check_device

Batch = tuple[Tensor, Tensor, Tensor]  # images, boxes, labels
NO_OBJECT = 0.1  # the weight of "no object" in the cross-entropy
L1, GIOU = 5.0, 2.0  # the weights of the two errors of boxes
AREAS = (32**2, 96**2)  # pixels: the limits between small, medium and large objects
SCORES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")


@dataclasses.dataclass(frozen=True)
class SceneBatches(Endless):
    """Batches ``(images, boxes, labels)`` of scenes: drawn at random in training.

    In evaluation each scene comes once.

    Parameters
    ----------
    scenes : Scenes
        Such as those of `derived_book.make_scenes`.
    batch_size, steps : int
        Scenes in a batch, and batches in an epoch of training.
    """

    scenes: Scenes
    batch_size: int = 32
    steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("scenes", self.scenes, Scenes, "Scenes, as from make_scenes")
        if not len(self.scenes):
            raise ValueError("scenes has no images; expected at least one")

    def draw(self) -> Batch:
        """Return scenes drawn at random, with replacement."""
        return self._rows(torch.randint(len(self.scenes), (self.batch_size,)))

    def __iter__(self) -> Iterator[Batch]:
        yield from map(self._rows, torch.arange(len(self.scenes)).split(self.batch_size))

    def _rows(self, rows: Tensor) -> Batch:
        return self.scenes.images[rows], self.scenes.boxes[rows], self.scenes.labels[rows]

    def check(self, name: str, model: nn.Module) -> None:
        """Raise TypeError or ValueError unless `model` detects these classes."""
        classes = check_type("model", model, DetectionTransformer, "a DetectionTransformer").classes
        if self.scenes.classes != classes:
            actual = f"{name}.scenes has {self.scenes.classes} classes"
            raise ValueError(f"{actual}; expected {classes}, as the model has")


# --- The loss -------------------------------------------------------------------------------------


def detection_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Mean]]:
    """Return the loss of DETR: match objects with queries, then compare classes and boxes.

    In each image, `match` pairs every object with one query; the target of all other queries is "no
    object". The loss is the cross-entropy of all queries, "no object" weighted by 0.1, plus 5 times
    the L1 distance and 2 times ``1 - GIoU`` of the paired boxes: a sum over the batch, divided by
    the number of its objects. In training the losses of all layers of the decoder are added. That
    of the last layer is reported as ``"loss"``, and its parts as ``"class"``, ``"l1"`` and
    ``"giou"``. (DETR divides the cross-entropy by the sum of its weights.) A model other than a
    `DetectionTransformer` raises TypeError.
    """
    images, boxes, labels = batch
    model = check_type("model", model, DetectionTransformer, "a DetectionTransformer")
    logits, predicted = model(images, every_layer=True)
    if not model.training:
        logits, predicted = logits[-1:], predicted[-1:]
    layers = (loss_parts(*layer, boxes, labels) for layer in zip(logits, predicted, strict=True))
    parts = torch.stack([torch.stack(layer) for layer in layers])  # (layers, 3)
    n = max(1, int((labels >= 0).sum()))
    weighted = parts * parts.new_tensor([1.0, L1, GIOU])
    numbers = [weighted[-1].sum().item(), *parts[-1].tolist()]
    named = zip(("loss", "class", "l1", "giou"), numbers, strict=True)
    return weighted.sum() / n, {name: Mean(number, n) for name, number in named}


def loss_parts(
    logits: Tensor, predicted: Tensor, boxes: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of cross-entropy, L1 distance and ``1 - GIoU`` over a layer's outputs."""
    image, query, target = match(logits, predicted, boxes, labels)
    classes = labels.new_full(logits.shape[:2], logits.shape[2] - 1)
    classes[image, query] = labels[image, target]
    weight = logits.new_ones(logits.shape[2])
    weight[-1] = NO_OBJECT
    entropy = nn.functional.cross_entropy(logits.mT, classes, weight, reduction="sum")
    one, other = predicted[image, query], boxes[image, target]
    return entropy, (one - other).abs().sum(), (1 - box_giou(one, other)).sum()


@torch.no_grad()
def match(
    logits: Tensor, predicted: Tensor, boxes: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Pair objects with queries, one to one in each image, at the least total cost.

    The cost of a pair is ``5 L1 - 2 GIoU - p``, with p the probability of the object's class. If
    there are more objects than queries, some have no pair.

    Parameters
    ----------
    logits, predicted : Tensor
        (B, Q, C + 1) and the boxes (B, Q, 4), of a model.
    boxes, labels : Tensor
        (B, K, 4) and (B, K), of scenes.

    Returns
    -------
    image, query, target : Tensor
        (m,) int64 each: `query` of `image` is paired with the object `target`.
    """
    costs = L1 * (predicted[:, :, None] - boxes[:, None]).abs().sum(-1)  # (B, Q, K)
    costs -= GIOU * box_giou(predicted[:, :, None], boxes[:, None])
    classes = labels.clamp(min=0)[:, None].expand(costs.shape)
    costs -= logits.softmax(-1).gather(2, classes)
    costs = costs.nan_to_num()  # so that `fit` reports what is not finite, by the loss
    real = (labels >= 0).cpu().numpy()
    rows = []
    for i, cost in enumerate(costs.cpu().numpy()):
        targets = np.flatnonzero(real[i])
        query, column = linear_sum_assignment(cost[:, targets])
        rows.append(np.stack([np.full(len(query), i), query, targets[column]]))
    image, query, target = torch.from_numpy(np.concatenate(rows, 1)).to(labels.device)
    return image, query, target


def box_giou(one: Tensor, other: Tensor) -> Tensor:
    """Return the generalised IoU [Rezatofighi2019] of boxes (..., 4), ``(cx, cy, w, h)``.

    ``GIoU = IoU - (hull - union) / hull``, with the area of the smallest box around both as hull:
    from -1, far apart, to 1, equal.
    """
    lows, highs = zip(*(corners(x) for x in (one, other)), strict=True)
    shared = (torch.minimum(*highs) - torch.maximum(*lows)).clamp(min=0).prod(-1)
    hull = (torch.maximum(*highs) - torch.minimum(*lows)).prod(-1)
    union = one[..., 2:].prod(-1) + other[..., 2:].prod(-1) - shared
    tiny = torch.finfo(one.dtype).tiny
    return shared / union.clamp(min=tiny) - (hull - union) / hull.clamp(min=tiny)


def corners(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the corners (..., 2) of boxes (..., 4) where x and y are lowest, and highest."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return centre - half, centre + half


# --- Detecting ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Detections:
    """The detections of a model in n images: a class and a box for each query.

    Attributes
    ----------
    scores : Tensor
        (n, Q): the probability of the class.
    labels : Tensor
        (n, Q) int64: the likeliest class other than "no object".
    boxes : Tensor
        (n, Q, 4), as in `derived_book.tasks.detection.data.Scenes`.
    """

    scores: Tensor
    labels: Tensor
    boxes: Tensor

    def __len__(self) -> int:
        return len(self.scores)


def detect(model: nn.Module, images: Tensor, *, batch_size: int = 250) -> Detections:
    """Return what `model` detects in `images`, in evaluation mode.

    Parameters
    ----------
    model : DetectionTransformer
    images : Tensor
        (n, 3, height, width).
    batch_size : int
        Changes the result by rounding only.
    """
    model = check_type("model", model, DetectionTransformer, "a DetectionTransformer")
    check_type("images", images, Tensor, "a tensor")
    check_count("batch_size", batch_size, 1)
    device, parts = check_device(model), []
    with evaluating(model):
        for batch in images.split(batch_size):
            logits, boxes = model(batch.to(device))
            scores, labels = logits.softmax(-1)[..., :-1].max(-1)
            parts.append((scores.cpu(), labels.cpu(), boxes.cpu()))
    return Detections(*(torch.cat(column) for column in zip(*parts, strict=True)))


def average_precision(detections: Detections, scenes: Scenes) -> dict[str, float]:
    """Return the average precision of MSCOCO, from 0 to 1, as `pycocotools` computes it.

    ``"AP50"`` counts a detection as correct if its IoU with an object of its class, which no better
    detection has been assigned to, is at least 0.5; it is the mean over classes of the area under
    the curve of precision against recall. ``"AP75"`` requires 0.75, and ``"AP"`` is the mean over
    0.5, 0.55, ..., 0.95. ``"AP_small"``, ``"AP_medium"`` and ``"AP_large"`` are ``"AP"`` for
    objects of these sizes, NaN if there are none: the limits are boxes of 32² and of 96² pixels,
    by ``scenes.sizes``.

    Parameters
    ----------
    detections : Detections
        Of all images of the scenes, in the same order; the 100 with the highest scores in each
        image count.
    scenes : Scenes

    Raises
    ------
    TypeError, ValueError
        For detections that do not fit the scenes.
    ModuleNotFoundError
        If pycocotools is not installed; the message says how to install it.
    """
    check_detections(detections, scenes)
    api, (small, large) = coco_api(), AREAS
    with silence():
        truth = _coco(api, scenes, scenes.labels, scenes.boxes)
        detected = _coco(api, scenes, detections.labels, detections.boxes, detections.scores)
        run = api.COCOeval(truth, detected, "bbox")
        run.params.areaRng = [[0, 1e10], [0, small], [small, large], [large, 1e10]]
        run.evaluate()
        run.accumulate()
        run.summarize()
    values = (float(x) for x in run.stats[: len(SCORES)])
    return {name: math.nan if x == -1 else x for name, x in zip(SCORES, values, strict=True)}


def _coco(
    api: Any, scenes: Scenes, labels: Tensor, boxes: Tensor, scores: Tensor | None = None
) -> Any:
    """Return boxes in the format of MSCOCO, in which objects are numbered from 1."""
    rows, places = (labels >= 0).nonzero(as_tuple=True)
    sides = scenes.sizes[rows].repeat(1, 2)
    low, high = (sides[:, :2] * x for x in corners(boxes[rows, places].double()))
    pixels = torch.cat([low, high - low], 1)
    columns: dict[str, list] = {
        "image_id": rows.tolist(),
        "category_id": labels[rows, places].tolist(),
        "bbox": pixels.tolist(),
        "area": pixels[:, 2:].prod(1).tolist(),
    }
    if scores is not None:
        columns["score"] = scores[rows, places].tolist()
    result = api.COCO()
    result.dataset = {
        "images": [{"id": i} for i in range(len(scenes))],
        "categories": [{"id": i, "name": name} for i, name in enumerate(scenes.names)],
        "annotations": [
            {"id": i, "iscrowd": 0} | dict(zip(columns, row, strict=True))
            for i, row in enumerate(zip(*columns.values(), strict=True), start=1)
        ],
    }
    result.createIndex()
    return result


def check_detections(detections: Detections, scenes: Scenes) -> None:
    """Raise TypeError or ValueError unless the detections fit the scenes."""
    check_type("detections", detections, Detections, "Detections, as from detect")
    check_type("scenes", scenes, Scenes, "Scenes, as from make_scenes")
    if len(detections) != len(scenes):
        actual = f"detections has {len(detections)} images"
        raise ValueError(f"{actual}; expected {len(scenes)}, as scenes has")
    shape = tuple(detections.scores.shape)
    check_shape("detections.labels", detections.labels, shape)
    check_shape("detections.boxes", detections.boxes, (*shape, 4))
    check_range("detections.labels", detections.labels, scenes.classes, "classes")
