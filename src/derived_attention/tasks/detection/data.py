"""Images with objects to find: drawn scenes, made in a second, and MSCOCO (chapter 14)."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from derived_attention.runtime import check_count, check_seed

SHAPES = ("disc", "rectangle", "triangle", "cross", "ring")
PLACES = 20  # how many places are tried for an object
OVERLAP = 0.2  # of the smaller box, at most, where one of them allows it
SIDES = (0.25, 0.5)  # of a box, in sides of the image
NOISE = 0.05  # standard deviation of each pixel
CHUNK = 64  # images that are painted at a time: they fit in a cache


@dataclasses.dataclass(frozen=True)
class Scenes:
    """Images and the objects in them; every image has room for K objects.

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
        (n, 2) int64: width and height in pixels, of the photograph where `images` are scaled.
    names : tuple of str
        The classes.

    Raises
    ------
    TypeError, ValueError
        For tensors that do not fit together.
    """

    images: Tensor
    boxes: Tensor
    labels: Tensor
    sizes: Tensor
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("images", "boxes", "labels", "sizes"):
            if not isinstance(getattr(self, name), Tensor):
                kind = type(getattr(self, name)).__name__
                raise TypeError(f"{name} is {kind}; expected a tensor")
        check_images("images", self.images)
        n, K = len(self.images), self.labels.shape[-1]
        for name, shape in (("boxes", (n, K, 4)), ("labels", (n, K)), ("sizes", (n, 2))):
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise ValueError(f"{name} has shape {found}; expected {shape}")
        labels = self.labels
        if labels.dtype != torch.int64 or (labels < -1).any() or (labels >= self.classes).any():
            wrong = f"{labels.dtype}, or holds what there is not"
            raise ValueError(f"labels is {wrong}; expected int64 numbers -1 <= x < {self.classes}")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: slice) -> Scenes:
        """Return some of the scenes."""
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


def check_images(name: str, images: Tensor) -> None:
    """Raise TypeError or ValueError, naming it, unless `images` are (B, 3, height, width)."""
    if not isinstance(images, Tensor):
        raise TypeError(f"{name} is {type(images).__name__}; expected a tensor")
    if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
        found = f"{images.dtype} of shape {tuple(images.shape)}"
        raise ValueError(f"{name} is {found}; expected floats of shape (B, 3, height, width)")


# --- Drawn scenes ---------------------------------------------------------------------------------


def make_scenes(n: int, seed: int = 0, *, size: int = 48, objects: int = 3) -> Scenes:
    """Draw scenes of one to `objects` flat shapes on a cloudy, noisy background.

    A shape is a disc (an ellipse), a rectangle, a triangle, a cross or a ring, as wide and as high
    as its box. Its box begins and ends between pixels, so what is drawn reaches each of its four
    sides. Each of its three colour channels is dark or bright, the background's are between. Two
    boxes share a fifth of the smaller one at most, where 20 attempts find such a place. What is
    covered stays in the box, which is that of the whole shape.

    Parameters
    ----------
    n : int
        How many.
    seed : int
        The same scenes from the same seed.
    size : int
        S, the pixels on the side of an image; at least 16.
    objects : int
        K, the most objects in an image.

    Returns
    -------
    Scenes

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work.

    Examples
    --------
    >>> scenes = make_scenes(100, seed=1)
    >>> scenes.images.shape, scenes.boxes.shape
    (torch.Size([100, 3, 48, 48]), torch.Size([100, 3, 4]))
    """
    for name, count in (("n", n), ("size", size), ("objects", objects)):
        check_count(name, count)
    check_seed(seed)
    if size < 16:
        raise ValueError(f"size is {size}; expected at least 16")
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(SHAPES), size=(n, objects))
    labels[np.arange(objects) >= rng.integers(1, objects + 1, size=(n, 1))] = -1
    corners = _place(rng, labels >= 0, size)
    images = np.empty((n, 3, size, size), np.float32)
    for start in range(0, n, CHUNK):
        some = slice(start, start + CHUNK)
        _paint(rng, images[some], labels[some], corners[some])
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
            shared = _covered(tried[:, k], boxes[:, j, None])
            worst = np.maximum(worst, shared * real[:, j, None])
        worst[worst <= OVERLAP] = 0  # the first place that is good enough, or else the best
        boxes[:, k] = tried[np.arange(n), k, worst.argmin(1)]
    return boxes


def _covered(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return what boxes share, in areas of the smaller."""
    ends = np.minimum(one[..., :2] + one[..., 2:], other[..., :2] + other[..., 2:])
    shared = (ends - np.maximum(one[..., :2], other[..., :2])).clip(0).prod(-1)
    return shared / np.minimum(one[..., 2:].prod(-1), other[..., 2:].prod(-1))


def _paint(
    rng: np.random.Generator, images: np.ndarray, labels: np.ndarray, corners: np.ndarray
) -> None:
    """Fill images (n, 3, S, S) with a background, then one shape after another, then noise."""
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
    """Return u, v (n, S) of all columns and rows of pixels: -1 to 1 is the box."""
    pixels = np.arange(size) + 0.5
    u, v = (
        (2 * (pixels - corners[:, i, None]) / corners[:, i + 2, None] - 1).astype(np.float32)
        for i in (0, 1)
    )
    return u, v


def _inside(shape: str, u: np.ndarray, v: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Say which pixels (n, S, S) are in a shape that fills the box |u|, |v| < 1."""
    if shape in ("disc", "ring"):
        radius = u**2 + v**2
        return (radius < 1) & (radius > (0.25 if shape == "ring" else -1))
    box = (abs(u) < 1) & (abs(v) < 1)
    if shape == "triangle":  # its tip is two pixels wide, so that there is one in the first row
        return box & (abs(u) < (1 + v) / 2 + 1 / width[:, None, None].astype(np.float32))
    return box & ((abs(u) < 0.4) | (abs(v) < 0.4)) if shape == "cross" else box


# --- MSCOCO ---------------------------------------------------------------------------------------


def load_coco(
    folder: str | Path, split: str = "val2017", *, size: int = 128, limit: int | None = None
) -> Scenes:
    """Read photographs of MSCOCO [Lin2014] and their boxes from a folder of yours.

    Get ``annotations_trainval2017.zip`` and ``val2017.zip`` (or ``train2017.zip``) from
    https://cocodataset.org and unpack them there. `pycocotools` reads the annotations. Images are
    scaled to squares, which changes the shape of what is in them; boxes are scaled alike. An
    annotation that stands for a crowd is left out: it is no object.

    Parameters
    ----------
    folder : path
        Has ``annotations/instances_<split>.json`` and a folder ``<split>`` of images.
    split : str
    size : int
        S, the pixels on the side of an image.
    limit : int, optional
        Take that many images only, those with the lowest numbers.

    Returns
    -------
    Scenes
        All categories of the file, in its order; K is the number of objects of the fullest image.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work.
    FileNotFoundError
        If a file is not there; says where to get it.
    ModuleNotFoundError
        If pycocotools is not installed; says how to install it.

    Examples
    --------
    >>> scenes = load_coco("coco", "val2017", size=128, limit=500)  # doctest: +SKIP
    """
    check_count("size", size)
    if limit is not None:
        check_count("limit", limit)
    if not isinstance(split, str):
        raise TypeError(f"split is {split!r}; expected a string")
    annotations = Path(folder) / "annotations" / f"instances_{split}.json"
    _check_there(annotations)
    with silence():
        coco = coco_api().COCO(str(annotations))
    shown = coco.loadImgs(sorted(coco.getImgIds())[:limit])
    label_of = {number: label for label, number in enumerate(sorted(coco.getCatIds()))}
    names = tuple(each["name"] for each in coco.loadCats(list(label_of)))
    found = [coco.imgToAnns[each["id"]] for each in shown]
    objects = [[each for each in some if not each.get("iscrowd", 0)] for some in found]
    boxes = torch.zeros(len(shown), max(map(len, objects), default=0), 4)
    labels = torch.full(boxes.shape[:2], -1)
    for i, some in enumerate(objects):
        for k, each in enumerate(some):
            left, top, *sides = each["bbox"]
            w, h = shown[i]["width"], shown[i]["height"]
            centre = left + sides[0] / 2, top + sides[1] / 2
            scaled = (centre[0] / w, centre[1] / h, sides[0] / w, sides[1] / h)
            boxes[i, k], labels[i, k] = torch.tensor(scaled), label_of[each["category_id"]]
    images = torch.empty(len(shown), 3, size, size)
    for i, each in enumerate(shown):
        images[i] = _read_image(Path(folder) / split / each["file_name"], size)
    sizes = torch.tensor([[each["width"], each["height"]] for each in shown]).view(-1, 2)
    return Scenes(images, boxes, labels, sizes, names)


def coco_api() -> Any:
    """Return the modules of pycocotools; raise an error that says how to install it."""
    try:
        import pycocotools.coco
        import pycocotools.cocoeval
    except ImportError as error:
        raise ModuleNotFoundError(
            'pycocotools is not installed (pip install "derived-attention[data]")'
        ) from error
    from types import SimpleNamespace

    return SimpleNamespace(COCO=pycocotools.coco.COCO, COCOeval=pycocotools.cocoeval.COCOeval)


def silence() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which what pycocotools prints is not shown."""
    return contextlib.redirect_stdout(io.StringIO())


def _check_there(file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no {file}. Get the annotations and the images of MSCOCO 2017 from "
            "https://cocodataset.org and unpack them in one folder; without them, use make_scenes."
        )


def _read_image(file: Path, size: int) -> Tensor:
    """Return (3, S, S) in [0, 1] of a file that Pillow reads, grey or in colour."""
    from PIL import Image

    _check_there(file)
    with Image.open(file) as image:
        pixels = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels.astype(np.float32) / 255).permute(2, 0, 1)
