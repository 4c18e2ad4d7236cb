"""Folders between sessions, and writes that a crash cannot leave half done."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path


def cache_dir(kind: str) -> Path:
    """Return the folder that keeps `kind` (``runs``, ``series``) between sessions.

    It is ``DERIVED_ATTENTION_<KIND>`` if that is set, otherwise ``derived-attention/<kind>`` in the
    user's cache folder (``XDG_CACHE_HOME``). This function does not create it.
    """
    chosen = os.environ.get(f"DERIVED_ATTENTION_{kind.upper()}", "")
    if chosen:
        return Path(chosen).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "derived-attention" / kind


def make_folder(folder: Path, instead: str) -> None:
    """Create a folder; raise OSError, which says what to do `instead`, if no file can be written.

    Whether one can is tried, since permissions do not say it for every file system and user.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"{folder} cannot be written ({error.strerror}); expected a folder for new files: "
            f"{instead}"
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old file or the new one.

    The bytes are written to a temporary file in the same folder (created if necessary) and flushed
    to the disk; then the file is renamed to `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
