"""Images with objects to detect, drawn as scenes of shapes (chapter 14)."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from derived_attention.common.checks import check_count
from derived_book.runtime import check_seed
from derived_book.tasks.checks import check_range, check_tensor, needs

SHAPES = ("disc", "rectangle", "triangle", "cross", "ring")
PLACES = 20  # attempts to place an object
OVERLAP = 0.2  # the largest share of the smaller box that is covered, if an attempt succeeds
SIDES = (0.25, 0.5)  # of a box, in sides of the image
NOISE = 0.05  # standard deviation of each pixel
CHUNK = 64  # images that are painted at the same time, so that they fit in a cache


@dataclasses.dataclass(frozen=True)
class Scenes:
    """n images of S × S pixels with at most K objects each.

    Attributes
    ----------
    images : Tensor
        (n, 3, S, S) float32 in [0, 1].
    boxes : Tensor
        (n, K, 4) float32: centre, width and height ``(cx, cy, w, h)`` in sides of the image; 0
        where there is no object.
    labels : Tensor
        (n, K) int64: the class of each object; -1 where there is none.
    sizes : Tensor
        (n, 2) int64: width and height in pixels.
    names : tuple of str
        The names of the classes.
    """

    images: Tensor
    boxes: Tensor
    labels: Tensor
    sizes: Tensor
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        check_tensor("images", self.images, "floats", ("n", 3, "height", "width"))
        n = len(self.images)
        check_tensor("labels", self.labels, "int64", (n, "K"))
        check_range("labels", self.labels, self.classes, "classes", least=-1)
        check_tensor("boxes", self.boxes, "floats", (n, self.labels.shape[1], 4))
        check_tensor("sizes", self.sizes, "int64", (n, 2))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: slice) -> Scenes:
        """Return a part of the scenes."""
        images, boxes, labels, sizes = (
            x[rows] for x in (self.images, self.boxes, self.labels, self.sizes)
        )
        return Scenes(images, boxes, labels, sizes, self.names)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.names)

    @property
    def counts(self) -> Tensor:
        """The number of objects in each image, (n,)."""
        return (self.labels >= 0).sum(1)


# --- Drawn scenes ---------------------------------------------------------------------------------


def make_scenes(n: int, seed: int = 0, *, size: int = 48, objects: int = 3) -> Scenes:
    """Draw scenes of one to `objects` flat shapes on a cloudy, noisy background.

    A shape is a disc (an ellipse), a rectangle, a triangle, a cross or a ring, and fills its box,
    whose sides lie between pixels. Each of the three colour channels of a shape is dark or bright;
    those of the background are between. Two boxes share at most a fifth of the smaller one, if 20
    attempts find such places. The box of a covered shape is that of the whole shape.

    Parameters
    ----------
    n : int
        Number of scenes.
    seed : int
    size : int
        S, the pixels on the side of an image; at least 16.
    objects : int
        K, the most objects in an image.

    Examples
    --------
    >>> scenes = make_scenes(100, seed=1)
    >>> scenes.images.shape, scenes.boxes.shape
    (torch.Size([100, 3, 48, 48]), torch.Size([100, 3, 4]))
    """
    for name, count, least in (("n", n, 1), ("size", size, 16), ("objects", objects, 1)):
        check_count(name, count, least)
    check_seed(seed)
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(SHAPES), size=(n, objects))
    labels[np.arange(objects) >= rng.integers(1, objects + 1, size=(n, 1))] = -1
    corners = _place(rng, labels >= 0, size)
    images = np.empty((n, 3, size, size), np.float32)
    for start in range(0, n, CHUNK):
        rows = slice(start, start + CHUNK)
        _paint(rng, images[rows], labels[rows], corners[rows])
    low, sides = corners[..., :2], corners[..., 2:]
    boxes = np.concatenate([low + sides / 2, sides], -1) / size * (labels >= 0)[..., None]
    return Scenes(
        torch.from_numpy(images),
        torch.from_numpy(boxes.astype(np.float32)),
        torch.from_numpy(labels),
        torch.full((n, 2), size),
        SHAPES,
    )


def _place(rng: np.random.Generator, real: np.ndarray, size: int) -> np.ndarray:
    """Return boxes (n, K, 4) of whole pixels: left, top, width, height; few of them overlap."""
    n, K = real.shape
    low, high = (round(side * size) for side in SIDES)
    sides = rng.integers(low, high + 1, size=(n, K, 1, 2)).repeat(PLACES, axis=2)
    corners = (rng.random((n, K, PLACES, 2)) * (size - sides + 1)).astype(np.int64)
    tried = np.concatenate([corners, sides], -1)  # (n, K, places, 4)
    boxes = tried[:, :, 0]
    for k in range(1, K):
        worst = np.zeros((n, PLACES))
        for j in range(k):
            shared = _shared_area(tried[:, k], boxes[:, j, None])
            worst = np.maximum(worst, shared * real[:, j, None])
        worst[worst <= OVERLAP] = 0  # so that argmin takes the first that is good enough
        boxes[:, k] = tried[np.arange(n), k, worst.argmin(1)]
    return boxes


def _shared_area(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the area that boxes share, divided by the area of the smaller one."""
    ends = np.minimum(one[..., :2] + one[..., 2:], other[..., :2] + other[..., 2:])
    shared = (ends - np.maximum(one[..., :2], other[..., :2])).clip(0).prod(-1)
    return shared / np.minimum(one[..., 2:].prod(-1), other[..., 2:].prod(-1))


def _paint(
    rng: np.random.Generator, images: np.ndarray, labels: np.ndarray, corners: np.ndarray
) -> None:
    """Paint a background, then one shape after another, then noise on images (n, 3, S, S)."""
    n, size = len(images), images.shape[-1]
    clouds = rng.uniform(0.25, 0.75, (n, 3, 4, 4)).astype(np.float32)
    images[:] = _interpolation(size, 4) @ clouds @ _interpolation(size, 4).T
    bright = rng.integers(2, size=(n, labels.shape[1], 3))
    colours = (bright * 0.75 + rng.uniform(0, 0.25, bright.shape)).astype(np.float32)
    for k in range(labels.shape[1]):
        u, v = _own_coordinates(corners[:, k], size)
        for label in range(len(SHAPES)):
            rows = np.flatnonzero(labels[:, k] == label)
            inside = _inside(SHAPES[label], u[rows, None], v[rows, :, None], corners[rows, k, 2])
            np.copyto(inked := images[rows], colours[rows, k, :, None, None], where=inside[:, None])
            images[rows] = inked
    images += NOISE * rng.standard_normal(images.shape, np.float32)
    np.clip(images, 0, 1, out=images)


def _interpolation(size: int, knots: int) -> np.ndarray:
    """Return the matrix (size, knots) that interpolates linearly between values at knots."""
    where = np.linspace(0, knots - 1, size)[:, None]
    return (1 - np.abs(where - np.arange(knots))).clip(0).astype(np.float32)


def _own_coordinates(corners: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return coordinates u, v (n, S) of all columns and rows of pixels: the box is -1 to 1."""
    pixels = np.arange(size) + 0.5
    u, v = (
        (2 * (pixels - corners[:, i, None]) / corners[:, i + 2, None] - 1).astype(np.float32)
        for i in (0, 1)
    )
    return u, v


def _inside(shape: str, u: np.ndarray, v: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return True for the pixels (n, S, S) in a shape that fills the box |u|, |v| < 1."""
    if shape in ("disc", "ring"):
        radius = u**2 + v**2
        return (radius < 1) & (radius > (0.25 if shape == "ring" else -1))
    box = (abs(u) < 1) & (abs(v) < 1)
    if shape == "triangle":  # its tip is two pixels wide, so that the first row has a pixel
        return box & (abs(u) < (1 + v) / 2 + 1 / width[:, None, None].astype(np.float32))
    return box & ((abs(u) < 0.4) | (abs(v) < 0.4)) if shape == "cross" else box


# --- pycocotools, which computes the average precision -------------------------------------------


def coco_api() -> Any:
    """Return the modules of pycocotools; raise ModuleNotFoundError if it is not installed."""
    with needs("pycocotools"):
        import pycocotools.coco
        import pycocotools.cocoeval
    return SimpleNamespace(COCO=pycocotools.coco.COCO, COCOeval=pycocotools.cocoeval.COCOeval)


def silence() -> contextlib.AbstractContextManager[Any]:
    """Return a context that hides the output of pycocotools."""
    return contextlib.redirect_stdout(io.StringIO())
