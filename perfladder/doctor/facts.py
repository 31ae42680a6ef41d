"""What this machine lets a process have, as the kernel and the driver tell it; reads only."""

from __future__ import annotations

import contextlib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from perfladder.environment import nvml_session
from perfladder.files import cache_folder
from perfladder.models import Model

_CGROUP = Path("/sys/fs/cgroup")
_GOVERNORS = Path("/sys/devices/system/cpu")


class Disk(Model):
    """A folder that is written to."""

    used_for: str
    path: str
    free_bytes: int
    is_writable: bool


class Clocks(Model):
    """How an NVIDIA GPU's clocks are set; None where the driver does not say."""

    index: int
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    is_persistent: bool | None = None
    is_mig: bool | None = None
    throttle_reasons: list[str] = []


class Facts(Model):
    """Everything that the checks look at beside environment and snapshot."""

    cpu_quota: float | None = Field(default=None, description="CPUs that the control group may use; None: no limit.")
    memory_limit_bytes: int | None = None
    physical_cores: int | None = None
    governors: list[str] = []
    shared_memory_bytes: int | None = Field(default=None, description="Size of /dev/shm.")
    compiler: str | None = None
    has_python_headers: bool = False
    has_cuda_build: bool = False
    disks: list[Disk] = []
    clocks: list[Clocks] = []


def collect_facts(variables: Mapping[str, str], folder: Path) -> Facts:
    """Look at the machine.

    Args:
        variables: Environment variables.
        folder: Where runs would be made.
    """
    import psutil
    import torch

    caches = cache_folder(variables)
    places = {"runs": folder, "temporary files": Path(tempfile.gettempdir()), **({"caches": caches} if caches else {})}
    named = variables.get("CXX")
    return Facts(
        cpu_quota=read_cpu_quota(_CGROUP),
        memory_limit_bytes=_number(_CGROUP / "memory.max"),
        physical_cores=psutil.cpu_count(logical=False),
        governors=sorted({path.read_text().strip() for path in _GOVERNORS.glob("cpu*/cpufreq/scaling_governor")}),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        compiler=next(filter(None, map(shutil.which, filter(None, (named, "g++", "clang++", "c++")))), None),
        has_python_headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        has_cuda_build=torch.version.cuda is not None or torch.version.hip is not None,
        disks=[_disk(used_for, path) for used_for, path in places.items()],
        clocks=_clocks(),
    )


def read_cpu_quota(cgroup: Path) -> float | None:
    """CPUs that a control group (of version 2, or else 1) may use at once."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us = _number(cgroup / "cpu/cpu.cfs_quota_us")
    period_us = _number(cgroup / "cpu/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _disk(used_for: str, path: Path) -> Disk:
    there = next(parent for parent in (path.resolve(), *path.resolve().parents) if parent.is_dir())
    return Disk(
        used_for=used_for,
        path=str(path),
        free_bytes=shutil.disk_usage(there).free,
        is_writable=os.access(there, os.W_OK | os.X_OK),
    )


def _clocks() -> list[Clocks]:
    from perfladder.environment import throttle_reasons

    with nvml_session() as nvml:
        if nvml is None:
            return []
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)

            def ask(name: str, *arguments: Any, handle: Any = handle) -> Any:
                with contextlib.suppress(nvml.NVMLError):
                    return getattr(nvml, name)(handle, *arguments)
                return None

            persistence, mig = ask("nvmlDeviceGetPersistenceMode"), ask("nvmlDeviceGetMigMode")
            found.append(
                Clocks(
                    index=index,
                    sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
                    max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
                    is_persistent=None if persistence is None else bool(persistence),
                    is_mig=None if mig is None else bool(mig[0]),
                    throttle_reasons=throttle_reasons(ask("nvmlDeviceGetCurrentClocksEventReasons")) or [],
                )
            )
        return found
