"""Writes a file beside its target and renames it when it is whole: whoever looks sees the old one or the new one."""

import json
import os
import uuid
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes UTF-8 text. Makes the folder if it is not there; a failure leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(values: Any, path: Path) -> None:
    """Writes plain values. Raises ValueError for NaN and infinity, which JSON does not have."""
    write_whole(path, json.dumps(values, indent=2, allow_nan=False) + "\n")
