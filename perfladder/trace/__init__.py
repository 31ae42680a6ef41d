"""One trace as columns, from a torch.profiler window or anyone's trace file, and pure functions over it.

Names are imported when first used; only those of `record` import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Attribution": "attribution",
    "attribute": "attribution",
    "list_kernels": "kernels",
    "summarize_kernels": "kernels",
    "Label": "labels",
    "decode_label": "labels",
    "encode_label": "labels",
    "Category": "model",
    "Trace": "model",
    "key_averages": "operators",
    "operator_table": "operators",
    "record_window": "record",
    "span": "record",
    "RegionReport": "regions",
    "report_regions": "regions",
    "report_timeline": "timeline",
    "TraceWarning": "warnings",
    "WarningCode": "warnings",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
