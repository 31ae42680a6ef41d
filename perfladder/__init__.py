"""perfladder finds why a PyTorch inference pipeline is slow, and makes it faster, with evidence.

`import perfladder as pl`; names are imported when first used, so that the command line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfladder.capturing.api import StageBenchHarness as StageBenchHarness
    from perfladder.capturing.api import capture as capture
    from perfladder.capturing.types import register_capture_type as register_capture_type
    from perfladder.functional.profiler import ModuleFunctionKernelProfiler as ModuleFunctionKernelProfiler
    from perfladder.ladder import climb as climb
    from perfladder.marks import stage as stage
    from perfladder.profiling.api import PerformanceProfile as PerformanceProfile
    from perfladder.profiling.api import profile as profile
    from perfladder.timing.api import time_stages as time_stages
    from perfladder.trace.model import Trace as Trace
    from perfladder.tuning.dataset import DataLoaderFactory as DataLoaderFactory
    from perfladder.tuning.inspect import inspect as inspect
    from perfladder.workload import Workload as Workload
    from perfladder.workload import load_workload as load_workload

__version__ = "0.1.0"

_LAZY = {
    "DataLoaderFactory": "perfladder.tuning.dataset",
    "ModuleFunctionKernelProfiler": "perfladder.functional.profiler",
    "PerformanceProfile": "perfladder.profiling.api",
    "StageBenchHarness": "perfladder.capturing.api",
    "Trace": "perfladder.trace.model",
    "Workload": "perfladder.workload",
    "capture": "perfladder.capturing.api",
    "climb": "perfladder.ladder",
    "inspect": "perfladder.tuning.inspect",
    "load_workload": "perfladder.workload",
    "profile": "perfladder.profiling.api",
    "register_capture_type": "perfladder.capturing.types",
    "stage": "perfladder.marks",
    "time_stages": "perfladder.timing.api",
}

__all__ = [
    "DataLoaderFactory",
    "ModuleFunctionKernelProfiler",
    "PerformanceProfile",
    "StageBenchHarness",
    "Trace",
    "Workload",
    "__version__",
    "capture",
    "climb",
    "inspect",
    "load_workload",
    "profile",
    "register_capture_type",
    "stage",
    "time_stages",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'perfladder' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
