"""Images to classify, cut into patches: each image is a sequence of tokens on a grid."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from derived_attention.common.checks import check_count
from derived_book.tasks.checks import check_name
from derived_book.tasks.series.data import SeriesSplit

DIGITS_TRAIN = 1197  # of 1797
DIGITS_SIDE = 8  # pixels


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images as sequences of patches.

    Attributes
    ----------
    name : str
    train, test : derived_book.tasks.series.data.SeriesSplit
        `x` is (n, T, C): token t is the patch in row ``t // columns``, column ``t % columns`` of
        the grid, and its C numbers are the pixels of the patch row by row. `padding` is None.
    grid : (int, int)
        Rows and columns of patches.
    channels, classes, length : int
        C = patch · patch, the number of classes, and T = rows · columns.
    """

    name: str
    train: SeriesSplit
    test: SeriesSplit
    grid: tuple[int, int]
    channels: int
    classes: int
    length: int


def load_images(name: str, patch: int) -> ImageData:
    """Load a set of grey images, cut into patches of `patch` × `patch` pixels.

    All pixels are standardised by one mean and one standard deviation, those of the training
    images.

    - ``"digits"``: 1 797 handwritten digits of 8 × 8 pixels, shipped with scikit-learn. They are
      the test part of a set of UCI, written by 13 people; who wrote which is not recorded. Without
      an official split, the first 1 197 in the order of the file are for training and the last 600
      for the test, 56 to 62 of each class. Similar digits are close together in the file, as if it
      were ordered by writer: most writers of the test are new, which makes it harder than a random
      split.

    Parameters
    ----------
    name : str
        ``"digits"``.
    patch : int
        Pixels on the side of a patch, a divisor of the side of the images.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument.

    Examples
    --------
    >>> data = load_images("digits", patch=2)
    >>> data.train.x.shape, data.grid
    (torch.Size([1197, 16, 4]), (4, 4))
    """
    check_name("name", name, ["digits"])
    check_count("patch", patch, 1)
    if DIGITS_SIDE % patch:
        raise ValueError(
            f"patch is {patch}; expected a divisor of {DIGITS_SIDE}, the side of an image"
        )
    from sklearn.datasets import load_digits

    digits = load_digits()
    train = digits.images[:DIGITS_TRAIN]
    pixels = torch.from_numpy(((digits.images - train.mean()) / train.std()).astype(np.float32))
    x, y = cut_patches(pixels, patch), torch.from_numpy(digits.target.astype(np.int64))
    parts = (slice(DIGITS_TRAIN), slice(DIGITS_TRAIN, None))
    known, new = (SeriesSplit(x[part], None, y[part]) for part in parts)
    side = DIGITS_SIDE // patch
    return ImageData(name, known, new, (side, side), patch * patch, 10, side * side)


def cut_patches(images: torch.Tensor, patch: int) -> torch.Tensor:
    """Cut images (..., rows · p, columns · p) into patches (..., rows · columns, p · p)."""
    rows = images.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))  # (..., R, p, C, p)
    return rows.transpose(-3, -2).flatten(-2).flatten(-3, -2)
