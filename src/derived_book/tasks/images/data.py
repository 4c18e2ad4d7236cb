"""Images to classify, cut into patches: each image is a sequence of tokens on a grid.

The digits come with scikit-learn. Fashion-MNIST comes from Debian's package, or is downloaded.
"""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import torch

from derived_attention.common.files import cache_dir
from derived_book.runtime import check_count, digest, make_folder
from derived_book.tasks.checks import check_name, system_paths
from derived_book.tasks.series.data import SeriesSplit

Pixels = tuple[np.ndarray, np.ndarray]  # uint8 images (n, side, side), and labels (n,)

DIGITS_TRAIN = 1197  # of 1797
FASHION_TRAIN = 60_000  # of 70 000
# Of pixels and labels in the official order.
FASHION_DIGEST = "ea9cb075810c322cb76d409b9eaa62176bbf02041562ed1b5489d4d4ea7533b7"
FASHION_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


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
    - ``"fashion-mnist"``: 60 000 and 10 000 pictures of clothes, 28 × 28 pixels, official split.
      From Debian's package ``dataset-fashion-mnist`` where it is installed, otherwise downloaded
      once from OpenML to ``cache_dir("images")``.

    Parameters
    ----------
    name : str
        ``"digits"`` or ``"fashion-mnist"``.
    patch : int
        Pixels on the side of a patch, a divisor of the side of the images.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument; for files that are not Fashion-MNIST.
    ConnectionError
        If Fashion-MNIST is not installed and cannot be downloaded.

    Examples
    --------
    >>> data = load_images("digits", patch=2)
    >>> data.train.x.shape, data.grid
    (torch.Size([1197, 16, 4]), (4, 4))
    """
    loaders = {"digits": _digits, "fashion-mnist": _fashion_mnist}
    check_name("name", name, loaders)
    check_count("patch", patch)
    side = {"digits": 8, "fashion-mnist": 28}[name]
    if side % patch:
        raise ValueError(f"patch is {patch}; expected a divisor of {side}, the side of an image")
    train, test = loaders[name]()
    mean, sd = train[0].mean(), train[0].std()

    def split(images: np.ndarray, labels: np.ndarray) -> SeriesSplit:
        x = torch.from_numpy(((images - mean) / sd).astype(np.float32))
        return SeriesSplit(cut_patches(x, patch), None, torch.from_numpy(labels.astype(np.int64)))

    grid = (side // patch, side // patch)
    return ImageData(name, split(*train), split(*test), grid, patch * patch, 10, grid[0] * grid[1])


def cut_patches(images: torch.Tensor, patch: int) -> torch.Tensor:
    """Cut images (..., rows · p, columns · p) into patches (..., rows · columns, p · p)."""
    rows = images.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))  # (..., R, p, C, p)
    return rows.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _digits() -> tuple[Pixels, Pixels]:
    from sklearn.datasets import load_digits

    digits, cut = load_digits(), DIGITS_TRAIN
    return (digits.images[:cut], digits.target[:cut]), (digits.images[cut:], digits.target[cut:])


def _fashion_mnist() -> tuple[Pixels, Pixels]:
    """Read an installed copy, or download one; raise ValueError if it is another set."""
    downloads = cache_dir("images")
    for folder in (downloads / "fashion-mnist", *system_paths("datasets/fashion-mnist")):
        files = [folder / f"{name}-ubyte.gz" for name in FASHION_FILES]
        if all(file.is_file() for file in files):
            train_x, train_y, test_x, test_y = map(_read_idx, files)
            return _checked((train_x, train_y), (test_x, test_y), folder)
    return _download(downloads)


def _read_idx(file: Path) -> np.ndarray:
    """Read the format of MNIST: two zeros, 8 for bytes, the number of sizes, sizes, pixels."""
    content = gzip.decompress(file.read_bytes())
    sizes = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


def _download(folder: Path) -> tuple[Pixels, Pixels]:
    from sklearn.datasets import fetch_openml

    make_folder(folder, "set DERIVED_ATTENTION_IMAGES")
    try:
        fashion = fetch_openml(
            "Fashion-MNIST", version=1, data_home=folder, as_frame=False, parser="pandas"
        )
    except Exception as error:
        raise ConnectionError(
            "Fashion-MNIST is not installed and could not be downloaded. Connect to a network, "
            "install Debian's package dataset-fashion-mnist, or put its four files *-ubyte.gz in "
            f"{folder / 'fashion-mnist'}. Without them, use 'digits'."
        ) from error
    x = fashion.data.reshape(-1, 28, 28).astype(np.uint8)
    y, cut = fashion.target.astype(np.uint8), FASHION_TRAIN
    return _checked((x[:cut], y[:cut]), (x[cut:], y[cut:]), folder)


def _checked(train: Pixels, test: Pixels, where: Path) -> tuple[Pixels, Pixels]:
    if digest(*train, *test) != FASHION_DIGEST:
        raise ValueError(f"the files in {where} are not Fashion-MNIST in its official order")
    return train, test
