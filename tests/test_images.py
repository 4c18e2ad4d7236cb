"""Images: patches and their order, splits, standardisation, Fashion-MNIST's files."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
import torch

from derived_book.tasks.images import data as images
from derived_book.tasks.images.data import cut_patches, load_images

NAMES = images.FASHION_FILES


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Neither the reader's home, nor what is installed, nor a network is touched."""
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME", "LOCALAPPDATA", "SCIKIT_LEARN_DATA"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("DERIVED_ATTENTION_IMAGES", str(tmp_path / "images"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "share"))
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda *_, **__: pytest.fail("network"))


@pytest.mark.parametrize("patch, grid", [(1, (8, 8)), (2, (4, 4)), (4, (2, 2)), (8, (1, 1))])
def test_digits(patch, grid, tmp_path):
    data = load_images("digits", patch)
    assert (data.name, data.grid, data.classes) == ("digits", grid, 10)
    assert (data.channels, data.length) == (patch**2, 64 // patch**2)
    assert (len(data.train), len(data.test)) == (1197, 600)
    for split in (data.train, data.test):
        assert split.x.shape == (len(split), data.length, data.channels)
        assert split.x.dtype == torch.float32 and split.padding is None
        assert split.y.dtype == torch.int64 and split.y.shape == (len(split),)
    assert torch.bincount(data.train.y).min() >= 117 and torch.bincount(data.train.y).max() <= 123
    assert torch.bincount(data.test.y).min() >= 56 and torch.bincount(data.test.y).max() <= 62
    assert not list(tmp_path.iterdir())


def test_pixels_are_those_of_the_file():
    found, data = sklearn.datasets.load_digits(), load_images("digits", 2)
    train = found.images[:1197]
    for split, pixels in ((data.train, train), (data.test, found.images[1197:])):
        expected = cut_patches(torch.from_numpy(pixels), 2)
        actual = split.x.double() * train.std() + train.mean()
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert data.train.x.mean().abs() < 1e-6
    assert data.train.x.std(correction=0) == pytest.approx(1, abs=1e-6)
    assert data.train.y.tolist() + data.test.y.tolist() == found.target.tolist()


def test_patches_are_row_by_row():
    image = torch.arange(24).view(4, 6)
    patches = cut_patches(image, 2)
    assert patches.shape == (6, 4)  # two rows of three patches
    assert patches[0].tolist() == [0, 1, 6, 7]
    assert patches[1].tolist() == [2, 3, 8, 9]
    assert patches[3].tolist() == [12, 13, 18, 19]
    stack = torch.randn(2, 3, 4, 6)
    assert torch.equal(cut_patches(stack, 2)[1, 2], cut_patches(stack[1, 2], 2))


# --- Fashion-MNIST --------------------------------------------------------------------------------


def idx(array):
    """Write an array in the format of MNIST."""
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def small_set():
    generator = np.random.default_rng(0)
    x = [generator.integers(0, 256, (n, 28, 28)).astype(np.uint8) for n in (30, 20)]
    y = [np.resize(np.arange(10), n).astype(np.uint8) for n in (30, 20)]
    return x[0], y[0], x[1], y[1]


def write(folder, arrays):
    folder.mkdir(parents=True)
    for name, array in zip(NAMES, arrays, strict=True):
        (folder / f"{name}-ubyte.gz").write_bytes(idx(array))


@pytest.mark.parametrize("place", ["share/datasets/fashion-mnist", "images/fashion-mnist"])
def test_fashion_mnist_from_files(tmp_path, monkeypatch, place):
    arrays = small_set()
    monkeypatch.setattr(images, "FASHION_DIGEST", images.digest(*arrays))
    write(tmp_path / place, arrays)
    data = load_images("fashion-mnist", 7)
    assert (data.grid, data.channels, data.length, data.classes) == ((4, 4), 49, 16, 10)
    assert (len(data.train), len(data.test)) == (30, 20)
    actual, pixels = data.test.x * arrays[0].std() + arrays[0].mean(), torch.from_numpy(arrays[2])
    torch.testing.assert_close(actual, cut_patches(pixels, 7).float(), atol=1e-3, rtol=0)
    assert data.train.y.tolist() == arrays[1].tolist()


def test_other_files_are_refused(tmp_path):
    write(tmp_path / "images" / "fashion-mnist", small_set())
    with pytest.raises(ValueError, match="the files in .*fashion-mnist are not Fashion-MNIST"):
        load_images("fashion-mnist", 7)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"images cannot be written .*: set DERIVED_ATTENTION_IMAGES"):
        images._download(tmp_path / "file" / "images")


def test_download(tmp_path, monkeypatch):
    train_x, train_y, test_x, test_y = small_set()
    monkeypatch.setattr(images, "FASHION_DIGEST", images.digest(*small_set()))
    monkeypatch.setattr(images, "FASHION_TRAIN", 30)

    def fetch(name, *, version, data_home, as_frame, parser):
        assert (name, version, as_frame) == ("Fashion-MNIST", 1, False)
        assert Path(data_home) == tmp_path / "images"
        x = np.concatenate([train_x, test_x]).reshape(50, 784).astype(float)
        y = np.concatenate([train_y, test_y]).astype(str).astype(object)
        return sklearn.utils.Bunch(data=x, target=y)

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    data = load_images("fashion-mnist", 14)
    assert len(data.train) == 30 and data.test.y.tolist() == test_y.tolist()
    monkeypatch.setattr(images, "FASHION_TRAIN", 29)  # as if it came in another order
    with pytest.raises(ValueError, match="are not Fashion-MNIST in its official order"):
        load_images("fashion-mnist", 14)


def test_no_network(tmp_path, monkeypatch):
    def fetch(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    partial = tmp_path / "images" / "fashion-mnist"
    write(partial, small_set())
    (partial / f"{NAMES[3]}-ubyte.gz").unlink()  # three files of four are not the set
    with pytest.raises(ConnectionError) as caught:
        load_images("fashion-mnist", 7)
    for part in ("dataset-fashion-mnist", "Connect to a network", str(partial), "'digits'"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


FOLDER = Path(os.sep, "usr", "share", "datasets", "fashion-mnist")


@pytest.mark.skipif(
    not FOLDER.is_dir(), reason="NO dataset-fashion-mnist HERE: ITS REAL FILES ARE NOT TESTED"
)
def test_real_fashion_mnist(monkeypatch):
    monkeypatch.delenv("XDG_DATA_DIRS")
    data = load_images("fashion-mnist", 4)
    assert data.train.x.shape == (60_000, 49, 16) and data.test.x.shape == (10_000, 49, 16)
    assert torch.bincount(data.train.y).tolist() == [6000] * 10
    assert torch.bincount(data.test.y).tolist() == [1000] * 10


# --- Wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, patch, error, message",
    [
        (None, 2, TypeError, "name is None; expected a string"),
        ("cifar", 2, ValueError, "name is 'cifar'; expected one of 'digits', 'fashion-mnist'"),
        ("digits", 0, ValueError, "patch is 0; expected at least 1"),
        ("digits", 2.0, TypeError, "patch is 2.0; expected an integer"),
        ("digits", 3, ValueError, "patch is 3; expected a divisor of 8, the side of an image"),
        ("fashion-mnist", 8, ValueError, "patch is 8; expected a divisor of 28"),
    ],
)
def test_wrong_arguments(name, patch, error, message):
    with pytest.raises(error, match=message):
        load_images(name, patch)


def test_a_size_that_is_no_grid_of_patches():
    with pytest.raises(RuntimeError):
        cut_patches(torch.zeros(5, 6), 2)
