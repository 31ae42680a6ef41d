"""Just-in-time tuning: modules of an unmodified program are found, tuned and served while it runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfladder.jit.api import disable as disable
    from perfladder.jit.api import enable as enable
    from perfladder.jit.api import enable_inspection as enable_inspection
    from perfladder.jit.api import patch_for_jit_tuning as patch_for_jit_tuning
    from perfladder.jit.api import print_hierarchy as print_hierarchy
    from perfladder.jit.api import save_report as save_report
    from perfladder.jit.api import tune_deferred as tune_deferred
    from perfladder.jit.config import jit_config as jit_config

_LAZY = {
    "disable": "api",
    "enable": "api",
    "enable_inspection": "api",
    "jit_config": "config",
    "patch_for_jit_tuning": "api",
    "print_hierarchy": "api",
    "save_report": "api",
    "tune_deferred": "api",
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"perfladder.jit.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'perfladder.jit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
