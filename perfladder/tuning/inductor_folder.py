"""Where Inductor keeps its files: torch takes the folder from the environment only, which all threads share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
_lock = threading.Lock()
_wanted: dict[object, Path] = {}
_before: str | None = None


@contextmanager
def inductor_cache(folder: Path) -> Iterator[None]:
    """Let Inductor keep its files in a folder inside the block.

    Blocks of several threads may overlap: the one that was entered last decides, and after all of them the environment
    is what it was before the first.
    """
    global _before
    with _lock:
        if not _wanted:
            _before = os.environ.get(_VARIABLE)
        _wanted[token := object()] = folder
        _apply()
    try:
        yield
    finally:
        with _lock:
            del _wanted[token]
            _apply()


def _apply() -> None:
    value = str([*_wanted.values()][-1]) if _wanted else _before
    if value is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = value
