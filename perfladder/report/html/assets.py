"""What every page carries with it: the plotting library, and data, as text that a browser unpacks."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

PLOTLY_MISSING = (
    "The plots are left out: the package plotly was not installed when this page was made. Install it with "
    "'pip install plotly' and make the page again; all numbers are in the tables."
)


def pack(data: bytes) -> str:
    """Return gzip in base64; the same data always give the same text."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode("ascii")


def pack_json(value: Any) -> str:
    """Pack JSON; numbers that are not finite become null, which plotly leaves out."""
    return pack(json.dumps(_finite(value), separators=(",", ":"), sort_keys=True, allow_nan=False).encode())


@cache
def packed_plotly() -> str | None:
    """The library's script, packed; None where the package plotly is not installed. The package is not imported."""
    path = _plotly_path()
    return pack(path.read_bytes()) if path is not None else None


def _plotly_path() -> Path | None:
    found = importlib.util.find_spec("plotly")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    return None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
