"""Images: patches and their order, splits, standardisation."""

import pytest
import sklearn.datasets
import torch

from derived_book.tasks.images.data import cut_patches, load_images


@pytest.mark.parametrize("patch, grid", [(1, (8, 8)), (2, (4, 4)), (4, (2, 2)), (8, (1, 1))])
def test_digits(patch, grid):
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


# --- Wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, patch, error, message",
    [
        (None, 2, TypeError, "name is None; expected a string"),
        ("cifar", 2, ValueError, "name is 'cifar'; expected 'digits'"),
        ("digits", 0, ValueError, "patch is 0; expected a whole number, at least 1"),
        ("digits", 2.0, TypeError, "patch is of type float; expected a whole number"),
        ("digits", 3, ValueError, "patch is 3; expected a divisor of 8, the side of an image"),
    ],
)
def test_wrong_arguments(name, patch, error, message):
    with pytest.raises(error, match=message):
        load_images(name, patch)


def test_a_size_that_is_no_grid_of_patches():
    with pytest.raises(RuntimeError):
        cut_patches(torch.zeros(5, 6), 2)
