"""Folders between sessions, and writes that a crash cannot leave half done."""

from __future__ import annotations

import os
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
