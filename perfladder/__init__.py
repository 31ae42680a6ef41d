"""perfladder finds why a PyTorch inference pipeline is slow, and makes it faster, with evidence.

`import perfladder as pl`; names are imported when first used, so that the command line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfladder import backend as backend
    from perfladder import kernels as kernels
    from perfladder.capturing.api import StageBenchHarness as StageBenchHarness
    from perfladder.capturing.api import capture as capture
    from perfladder.capturing.types import register_capture_type as register_capture_type
    from perfladder.comparing.runs import compare_runs as compare
    from perfladder.functional.profiler import ModuleFunctionKernelProfiler as ModuleFunctionKernelProfiler
    from perfladder.jit.api import patch_for_jit_tuning as patch_for_jit_tuning
    from perfladder.jit.config import jit_config as jit_config
    from perfladder.ladder import climb as climb
    from perfladder.marks import stage as stage
    from perfladder.profiling.api import PerformanceProfile as PerformanceProfile
    from perfladder.profiling.api import profile as profile
    from perfladder.timing.api import time_stages as time_stages
    from perfladder.trace.model import Trace as Trace
    from perfladder.tuning.checkpoint import save as save
    from perfladder.tuning.checkpoint_load import load as load
    from perfladder.tuning.config import config as config
    from perfladder.tuning.dataset import DataLoaderFactory as DataLoaderFactory
    from perfladder.tuning.dims import BatchDim as BatchDim
    from perfladder.tuning.dims import DynamicDim as DynamicDim
    from perfladder.tuning.inspect import inspect as inspect
    from perfladder.tuning.measure import AllSamplesProfilingStopStrategy as AllSamplesProfilingStopStrategy
    from perfladder.tuning.measure import NumStepsMeasuringStopStrategy as NumStepsMeasuringStopStrategy
    from perfladder.tuning.measure import ProfilingConfig as ProfilingConfig
    from perfladder.tuning.measure import StableWindowMeasuringStopStrategy as StableWindowMeasuringStopStrategy
    from perfladder.tuning.measure import (
        ThroughputSaturatedProfilingStopStrategy as ThroughputSaturatedProfilingStopStrategy,
    )
    from perfladder.tuning.module import Module as Module
    from perfladder.tuning.quality import QualityGate as QualityGate
    from perfladder.tuning.report import snapshot_tuning_data as snapshot_tuning_data
    from perfladder.tuning.strategies import FirstWinsStrategy as FirstWinsStrategy
    from perfladder.tuning.strategies import LatencyBudgetStrategy as LatencyBudgetStrategy
    from perfladder.tuning.strategies import MaxThroughputStrategy as MaxThroughputStrategy
    from perfladder.tuning.strategies import MinLatencyStrategy as MinLatencyStrategy
    from perfladder.tuning.strategies import OneBackendStrategy as OneBackendStrategy
    from perfladder.tuning.strategies import TuneStrategy as TuneStrategy
    from perfladder.tuning.timesteps import HostTimesteps as HostTimesteps
    from perfladder.tuning.tree import register_input_type as register_input_type
    from perfladder.tuning.tune import tune as tune
    from perfladder.tuning.wrap import unwrap as unwrap
    from perfladder.tuning.wrap import wrap as wrap
    from perfladder.workload import Workload as Workload
    from perfladder.workload import load_workload as load_workload

__version__ = "0.1.0"

_LAZY = {
    "AllSamplesProfilingStopStrategy": "perfladder.tuning.measure",
    "BatchDim": "perfladder.tuning.dims",
    "DataLoaderFactory": "perfladder.tuning.dataset",
    "DynamicDim": "perfladder.tuning.dims",
    "FirstWinsStrategy": "perfladder.tuning.strategies",
    "HostTimesteps": "perfladder.tuning.timesteps",
    "LatencyBudgetStrategy": "perfladder.tuning.strategies",
    "MaxThroughputStrategy": "perfladder.tuning.strategies",
    "MinLatencyStrategy": "perfladder.tuning.strategies",
    "Module": "perfladder.tuning.module",
    "ModuleFunctionKernelProfiler": "perfladder.functional.profiler",
    "NumStepsMeasuringStopStrategy": "perfladder.tuning.measure",
    "OneBackendStrategy": "perfladder.tuning.strategies",
    "PerformanceProfile": "perfladder.profiling.api",
    "ProfilingConfig": "perfladder.tuning.measure",
    "QualityGate": "perfladder.tuning.quality",
    "StableWindowMeasuringStopStrategy": "perfladder.tuning.measure",
    "StageBenchHarness": "perfladder.capturing.api",
    "ThroughputSaturatedProfilingStopStrategy": "perfladder.tuning.measure",
    "Trace": "perfladder.trace.model",
    "TuneStrategy": "perfladder.tuning.strategies",
    "Workload": "perfladder.workload",
    "capture": "perfladder.capturing.api",
    "climb": "perfladder.ladder",
    "config": "perfladder.tuning.config",
    "inspect": "perfladder.tuning.inspect",
    "load_workload": "perfladder.workload",
    "profile": "perfladder.profiling.api",
    "register_capture_type": "perfladder.capturing.types",
    "jit_config": "perfladder.jit.config",
    "load": "perfladder.tuning.checkpoint_load",
    "patch_for_jit_tuning": "perfladder.jit.api",
    "register_input_type": "perfladder.tuning.tree",
    "save": "perfladder.tuning.checkpoint",
    "snapshot_tuning_data": "perfladder.tuning.report",
    "stage": "perfladder.marks",
    "time_stages": "perfladder.timing.api",
    "tune": "perfladder.tuning.tune",
    "unwrap": "perfladder.tuning.wrap",
    "wrap": "perfladder.tuning.wrap",
}

__all__ = [
    "AllSamplesProfilingStopStrategy",
    "BatchDim",
    "DataLoaderFactory",
    "DynamicDim",
    "FirstWinsStrategy",
    "HostTimesteps",
    "LatencyBudgetStrategy",
    "MaxThroughputStrategy",
    "MinLatencyStrategy",
    "Module",
    "ModuleFunctionKernelProfiler",
    "NumStepsMeasuringStopStrategy",
    "OneBackendStrategy",
    "PerformanceProfile",
    "ProfilingConfig",
    "QualityGate",
    "StableWindowMeasuringStopStrategy",
    "StageBenchHarness",
    "ThroughputSaturatedProfilingStopStrategy",
    "Trace",
    "TuneStrategy",
    "Workload",
    "__version__",
    "backend",
    "capture",
    "climb",
    "compare",
    "config",
    "inspect",
    "jit_config",
    "kernels",
    "load",
    "load_workload",
    "patch_for_jit_tuning",
    "profile",
    "register_capture_type",
    "register_input_type",
    "save",
    "snapshot_tuning_data",
    "stage",
    "time_stages",
    "tune",
    "unwrap",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in ("backend", "kernels"):
        return importlib.import_module(f"perfladder.{name}")
    if name == "compare":
        return importlib.import_module("perfladder.comparing.runs").compare_runs
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'perfladder' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
