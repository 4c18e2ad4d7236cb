"""Object detection: what a `DetectionTransformer` trains on, and how good it is (chapter 14).

`SceneBatches` and `detection_loss` are what `derived_attention.training.fit.fit` takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from derived_attention.runtime import check_count, evaluating
from derived_attention.tasks.detection.data import Scenes, coco_api, silence
from derived_attention.tasks.detection.model import DetectionTransformer
from derived_attention.training.fit import Endless, Mean, check_device

Batch = tuple[Tensor, Tensor, Tensor]  # images, boxes, labels
NO_OBJECT = 0.1  # the weight of "no object" in the cross-entropy
L1, GIOU = 5.0, 2.0  # those of the boxes' two errors
AREAS = (32**2, 96**2)  # pixels, between small, medium and large objects
SCORES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")


@dataclasses.dataclass(frozen=True)
class SceneBatches(Endless):
    """Scenes, some at a time: a batch is ``(images, boxes, labels)``, rows of `Scenes`.

    To train on, scenes are drawn at random. What is random in a step of the training follows from
    the seed and its number: 8 epochs of 100 steps are one epoch of 800. To evaluate, each comes
    once.

    Parameters
    ----------
    scenes : Scenes
        Such as those of `derived_attention.tasks.detection.data.make_scenes`.
    batch_size : int
    steps : int
        How many batches an epoch of training has.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work.

    Examples
    --------
    >>> batches = SceneBatches(make_scenes(1000), batch_size=32)  # doctest: +SKIP
    """

    scenes: Scenes
    batch_size: int = 32
    steps: int = 100

    def __post_init__(self) -> None:
        for name in ("batch_size", "steps"):
            check_count(name, getattr(self, name))
        if not isinstance(self.scenes, Scenes):
            found = type(self.scenes).__name__
            raise TypeError(f"scenes is {found}; expected Scenes, as of make_scenes")
        if not len(self.scenes):
            raise ValueError("scenes has no images; expected at least one")

    def draw(self) -> Batch:
        """Return any images, one more than once if chance will."""
        return self._rows(torch.randint(len(self.scenes), (self.batch_size,)))

    def __iter__(self) -> Iterator[Batch]:
        for rows in torch.arange(len(self.scenes)).split(self.batch_size):
            yield self._rows(rows)

    def _rows(self, rows: Tensor) -> Batch:
        return self.scenes.images[rows], self.scenes.boxes[rows], self.scenes.labels[rows]

    def check(self, name: str, model: nn.Module) -> None:
        """Raise TypeError or ValueError unless `model` finds objects of these classes."""
        check_classes(f"{name}.scenes", self.scenes, check_model(model))


# --- The loss -------------------------------------------------------------------------------------


def detection_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Mean]]:
    """Return the loss of DETR: objects are matched with queries, then classes and boxes compared.

    For each image `match` pairs every object with a query of its own; to all others "no object" is
    right. The loss is the cross-entropy of all queries, "no object" weighted by 0.1, plus 5 times
    the L1 distance and 2 times ``1 - GIoU`` of the boxes that are paired: a sum over a batch,
    divided by the number of its objects. In training the losses of all layers of the decoder are
    added. Reported is that of the last one, as ``"loss"``, and of it the parts ``"class"``,
    ``"l1"`` and ``"giou"``. (DETR divides the cross-entropy by the sum of its weights.)

    Raises
    ------
    TypeError
        For a model that does not find objects.
    """
    images, boxes, labels = batch
    model = check_model(model)
    logits, found = model(images, every_layer=True)
    if not model.training:
        logits, found = logits[-1:], found[-1:]
    layers = (loss_parts(*each, boxes, labels) for each in zip(logits, found, strict=True))
    parts = torch.stack([torch.stack(each) for each in layers])  # (layers, 3)
    n = max(1, int((labels >= 0).sum()))
    weighed = parts * parts.new_tensor([1.0, L1, GIOU])
    last = parts[-1].tolist()
    numbers = {"loss": Mean(weighed[-1].sum().item(), n)}
    for name, part in zip(("class", "l1", "giou"), last, strict=True):
        numbers[name] = Mean(part, n)
    return weighed.sum() / n, numbers


def loss_parts(
    logits: Tensor, found: Tensor, boxes: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of cross-entropy, L1 distance and ``1 - GIoU`` over one layer's result."""
    image, query, thing = match(logits, found, boxes, labels)
    wanted = labels.new_full(logits.shape[:2], logits.shape[2] - 1)
    wanted[image, query] = labels[image, thing]
    weight = logits.new_ones(logits.shape[2])
    weight[-1] = NO_OBJECT
    entropy = nn.functional.cross_entropy(logits.mT, wanted, weight, reduction="sum")
    here, there = found[image, query], boxes[image, thing]
    return entropy, (here - there).abs().sum(), (1 - box_giou(here, there)).sum()


@torch.no_grad()
def match(
    logits: Tensor, found: Tensor, boxes: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Pair objects with queries, one to one in each image, at the least total cost.

    The cost of a pair is ``5 L1 - 2 GIoU - p``, with p the probability of the object's class. Of
    more objects than queries, some stay alone.

    Parameters
    ----------
    logits, found : Tensor
        (B, Q, C + 1) and (B, Q, 4), of a model.
    boxes, labels : Tensor
        (B, K, 4) and (B, K), of scenes.

    Returns
    -------
    image, query, thing : Tensor
        (m,) int64 each: object `thing` of an image belongs to a query.
    """
    costs = L1 * (found[:, :, None] - boxes[:, None]).abs().sum(-1)  # (B, Q, K)
    costs -= GIOU * box_giou(found[:, :, None], boxes[:, None])
    classes = labels.clamp(min=0)[:, None].expand(costs.shape)
    costs -= logits.softmax(-1).gather(2, classes)
    costs = costs.nan_to_num()  # what is not finite is for the loss to tell
    real = (labels >= 0).cpu().numpy()
    rows = []
    for i, cost in enumerate(costs.cpu().numpy()):
        things = np.flatnonzero(real[i])
        query, column = linear_sum_assignment(cost[:, things])
        rows.append(np.stack([np.full(len(query), i), query, things[column]]))
    image, query, thing = torch.from_numpy(np.concatenate(rows, 1)).to(labels.device)
    return image, query, thing


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
    """What a model finds in each of n images: for each of its queries one class and one box.

    Attributes
    ----------
    scores : Tensor
        (n, Q): the probability of that class.
    labels : Tensor
        (n, Q) int64, the likeliest class that is not "no object".
    boxes : Tensor
        (n, Q, 4), as in `derived_attention.tasks.detection.data.Scenes`.
    """

    scores: Tensor
    labels: Tensor
    boxes: Tensor

    def __len__(self) -> int:
        return len(self.scores)


def detect(model: nn.Module, images: Tensor, *, batch_size: int = 250) -> Detections:
    """Let `model` find the objects in `images`, in evaluation mode.

    Parameters
    ----------
    model : DetectionTransformer
    images : Tensor
        (n, 3, height, width).
    batch_size : int
        How many at a time; no influence on the result, but for rounding.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work.

    Examples
    --------
    >>> average_precision(detect(model, scenes.images), scenes)["AP50"]  # doctest: +SKIP
    """
    model = check_model(model)
    check_count("batch_size", batch_size)
    device, parts = check_device(model, None), []
    with evaluating(model):
        for some in images.split(batch_size):
            logits, boxes = model(some.to(device))
            scores, labels = logits.softmax(-1)[..., :-1].max(-1)
            parts.append((scores.cpu(), labels.cpu(), boxes.cpu()))
    return Detections(*(torch.cat(each) for each in zip(*parts, strict=True)))


def average_precision(
    detections: Detections, scenes: Scenes, *, areas: tuple[float, float] = AREAS
) -> dict[str, float]:
    """Return the average precision of MSCOCO, from 0 to 1, as `pycocotools` computes it.

    ``"AP50"`` counts a detection as right if its class is that of an object which no better
    detection has taken, and their IoU is at least 0.5; it is the mean over classes of the area
    under the curve of precision against recall. ``"AP75"`` asks for 0.75, and ``"AP"`` is the mean
    over 0.5, 0.55, ..., 0.95. ``"AP_small"``, ``"AP_medium"`` and ``"AP_large"`` are ``"AP"`` for
    objects of some sizes; NaN if there are none.

    Parameters
    ----------
    detections : Detections
        Of all images of the scenes, in the same order; of each the 100 with the highest scores
        count.
    scenes : Scenes
    areas : (float, float)
        Between small, medium and large: pixels in a box, by ``scenes.sizes``. The default is that
        of MSCOCO, for photographs of about 640 × 480.

    Raises
    ------
    TypeError, ValueError
        For detections that cannot be of these scenes, or areas that are not two in order.
    ModuleNotFoundError
        If pycocotools is not installed; says how to install it.
    """
    check_detections(detections, scenes)
    small, large = check_areas(areas)
    api = coco_api()
    with silence():
        truth = _coco(api, scenes, scenes.labels, scenes.boxes)
        found = _coco(api, scenes, detections.labels, detections.boxes, detections.scores)
        run = api.COCOeval(truth, found, "bbox")
        run.params.areaRng = [[0, 1e10], [0, small], [small, large], [large, 1e10]]
        run.evaluate()
        run.accumulate()
        run.summarize()
    values = (float(x) for x in run.stats[: len(SCORES)])
    return {name: math.nan if x == -1 else x for name, x in zip(SCORES, values, strict=True)}


def _coco(
    api: Any, scenes: Scenes, labels: Tensor, boxes: Tensor, scores: Tensor | None = None
) -> Any:
    """Return boxes in the format of MSCOCO; numbers of objects start from 1."""
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
    found = api.COCO()
    found.dataset = {
        "images": [{"id": i} for i in range(len(scenes))],
        "categories": [{"id": i, "name": name} for i, name in enumerate(scenes.names)],
        "annotations": [
            {"id": i, "iscrowd": 0} | dict(zip(columns, row, strict=True))
            for i, row in enumerate(zip(*columns.values(), strict=True), start=1)
        ],
    }
    found.createIndex()
    return found


# --- Checks ---------------------------------------------------------------------------------------


def check_model(model: nn.Module) -> DetectionTransformer:
    """Return a model that finds objects; raise TypeError if it is another."""
    if not isinstance(model, DetectionTransformer):
        raise TypeError(f"model is {type(model).__name__}; expected a DetectionTransformer")
    return model


def check_classes(name: str, scenes: Scenes, model: DetectionTransformer) -> None:
    """Raise ValueError unless the model knows the classes of the scenes."""
    if scenes.classes != model.classes:
        raise ValueError(
            f"{name} has {scenes.classes} classes; expected {model.classes}, as the model has"
        )


def check_detections(detections: Detections, scenes: Scenes) -> None:
    """Raise TypeError or ValueError unless the detections can be those of the scenes."""
    if not isinstance(detections, Detections):
        kind = type(detections).__name__
        raise TypeError(f"detections is {kind}; expected Detections, as of detect")
    if not isinstance(scenes, Scenes):
        raise TypeError(f"scenes is {type(scenes).__name__}; expected Scenes, as of make_scenes")
    if len(detections) != len(scenes):
        given = f"{len(detections)} images"
        raise ValueError(f"detections are of {given}; expected {len(scenes)}, as scenes has")
    expected = tuple(detections.scores.shape)
    for name, shape in (("labels", expected), ("boxes", (*expected, 4))):
        found = tuple(getattr(detections, name).shape)
        if found != shape:
            raise ValueError(f"detections.{name} has shape {found}; expected {shape}")
    if (detections.labels >= scenes.classes).any():
        most = int(detections.labels.max())
        raise ValueError(f"detections has a label {most}; expected less than {scenes.classes}")


def check_areas(areas: tuple[float, float]) -> tuple[float, float]:
    """Return two numbers of pixels in order; raise TypeError or ValueError if they are not."""
    if not isinstance(areas, tuple) or len(areas) != 2:
        raise TypeError(f"areas is {areas!r}; expected two numbers of pixels")
    if not 0 < areas[0] < areas[1]:
        raise ValueError(f"areas is {areas}; expected two positive numbers, the smaller one first")
    return areas
