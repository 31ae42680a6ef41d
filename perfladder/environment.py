"""Where a workload runs: what is stable (the fingerprint), and what moves (the snapshot beside it)."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue

from perfladder.models import Model, digest

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "numpy", "diffusers", "transformers", "torchao", "triton", "safetensors", "perfladder")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_NUM_THREADS")


class Device(Model):
    """One accelerator as its driver names it."""

    index: int
    name: str
    uuid: str | None = None
    total_memory_bytes: int
    capability: str | None = None


class DeviceProcess(Model):
    """A process that holds memory on an accelerator."""

    pid: int
    name: str
    memory_bytes: int | None = None


class DeviceSnapshot(Model):
    """The moving state of one accelerator; None where the driver does not say."""

    index: int
    uuid: str | None = None
    total_memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    utilization_frac: float | None = None
    throttle_reasons: list[str] | None = Field(default=None, description="Why its clocks are held down just now.")
    other_processes: list[DeviceProcess] = []


class Snapshot(Model):
    """Load and clocks at one moment: never part of a fingerprint."""

    load_average_1m: float
    num_cpus: int = Field(default=1, description="CPUs of the whole machine, which the load average counts.")
    available_memory_bytes: int
    cpu_mhz: float | None = Field(default=None, description="Mean clock of the CPUs.")
    torch_threads: int | None = None
    devices: list[DeviceSnapshot] = []

    @property
    def is_busy(self) -> bool:
        """Whether more than half of the machine's CPUs had work over the last minute."""
        return self.load_average_1m > 0.5 * self.num_cpus


class Environment(Model):
    """What stays the same from run to run on one machine."""

    python: str
    packages: dict[str, str]
    system: str
    cpu: str
    num_cpus: int
    total_memory_bytes: int
    torch_threads: int
    torch_interop_threads: int
    thread_variables: dict[str, str]
    accelerator: str | None
    driver: str | None
    accelerator_runtime: str | None
    devices: list[Device]

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits over everything here."""
        return digest(self.model_dump(mode="json"))


class GitState(Model):
    """The commit of the folder that holds the user's code; None outside a repository."""

    commit: str | None
    dirty: bool

    def as_configuration(self) -> dict[str, JsonValue]:
        """The fields that join the configuration fingerprint."""
        return {"commit": self.commit, "dirty": self.dirty}


def collect_environment(variables: Mapping[str, str]) -> Environment:
    """Describe this process and machine; imports torch.

    Args:
        variables: The process's environment variables (only thread settings are read).
    """
    import psutil
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return Environment(
        python=platform.python_version(),
        packages=installed_versions(_PACKAGES),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)),
        total_memory_bytes=psutil.virtual_memory().total,
        torch_threads=torch.get_num_threads(),
        torch_interop_threads=torch.get_num_interop_threads(),
        thread_variables={name: variables[name] for name in _THREAD_VARIABLES if name in variables},
        accelerator=accelerator.type if accelerator else None,
        driver=nvidia_driver(),
        accelerator_runtime=torch.version.cuda or getattr(torch.version, "hip", None),
        devices=_devices(accelerator.type) if accelerator else [],
    )


def take_snapshot() -> Snapshot:
    """Read load and clocks now; costs a few milliseconds and touches no CUDA context."""
    import psutil

    torch = sys.modules.get("torch")
    return Snapshot(
        load_average_1m=os.getloadavg()[0],
        num_cpus=os.cpu_count() or 1,
        available_memory_bytes=psutil.virtual_memory().available,
        cpu_mhz=_cpu_mhz(),
        torch_threads=torch.get_num_threads() if torch is not None else None,
        devices=_nvidia_snapshots(),
    )


def snapshot_of(snapshot: Snapshot, device: torch.device) -> DeviceSnapshot | None:
    """The state of a torch device, whose index may not be the driver's (CUDA_VISIBLE_DEVICES); None without one."""
    if device.type != "cuda":
        return None
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    by_uuid = [state for state in snapshot.devices if state.uuid and uuid and state.uuid.endswith(uuid)]
    return next(iter(by_uuid or snapshot.devices[device.index or 0 :]), None)


def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that are installed, from their metadata; imports none of them."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def git_state(folder: Path) -> GitState:
    """Ask git for the commit of `folder`; no repository or no git is `commit=None`."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return GitState(commit=commit, dirty=bool(commit and git("status", "--porcelain", "--untracked-files=no")))


def nvidia_driver() -> str | None:
    """The NVIDIA driver's version, or None without one."""
    with nvml_session() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml else None


def cpu_name() -> str:
    """The CPU's model as the kernel names it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpu_mhz() -> float | None:
    """Mean clock of all CPUs as the kernel tells it; None where it does not."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        clocks = [float(line.split(":", 1)[1]) for line in lines if line.startswith("cpu MHz")]
        return round(sum(clocks) / len(clocks), 1) if clocks else None
    return None


def _devices(accelerator: str) -> list[Device]:
    import torch

    backend = getattr(torch, accelerator)
    devices = []
    for index in range(torch.accelerator.device_count()):
        properties = backend.get_device_properties(index)
        capability = ".".join(
            str(part) for part in (getattr(properties, "major", ""), getattr(properties, "minor", ""))
        )
        devices.append(
            Device(
                index=index,
                name=properties.name,
                uuid=str(properties.uuid) if hasattr(properties, "uuid") else None,
                total_memory_bytes=properties.total_memory,
                capability=capability.strip(".") or None,
            )
        )
    return devices


@contextlib.contextmanager
def nvml_session() -> Any:
    """Yield an initialised NVML binding, or None where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _nvidia_snapshots() -> list[DeviceSnapshot]:
    with nvml_session() as nvml:
        if nvml is None:
            return []
        return [_nvidia_snapshot(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _nvidia_snapshot(nvml: Any, index: int) -> DeviceSnapshot:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any) -> Any:
        """One reading; a driver or a virtual machine may not offer it."""
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:
            return None

    memory, utilization = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
    power_mw, family = ask("nvmlDeviceGetPowerUsage"), _own_family()
    return DeviceSnapshot(
        index=index,
        uuid=ask("nvmlDeviceGetUUID"),
        total_memory_bytes=memory.total if memory else None,
        free_memory_bytes=memory.free if memory else None,
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=power_mw / 1000 if power_mw is not None else None,
        utilization_frac=utilization.gpu / 100 if utilization else None,
        throttle_reasons=throttle_reasons(ask("nvmlDeviceGetCurrentClocksEventReasons")),
        other_processes=[
            DeviceProcess(pid=process.pid, name=_process_name(process.pid), memory_bytes=process.usedGpuMemory)
            for process in ask("nvmlDeviceGetComputeRunningProcesses") or []
            if process.pid not in family
        ],
    )


_THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clocks event reasons (nvml.h) that hold a busy GPU back; being idle, or a user's clocks, do not."""


def throttle_reasons(bits: int | None) -> list[str] | None:
    """What holds a GPU's clocks down, from the bits that NVML gives."""
    if bits is None:
        return None
    return [reason for bit, reason in _THROTTLE_REASONS.items() if bits & bit]


def _own_family() -> set[int]:
    """This process, its ancestors and its descendants: the ladder's own processes are no foreign load."""
    import psutil

    own = psutil.Process()
    with contextlib.suppress(psutil.Error):
        parents = own.parents()
        # In a session's child the other children of whoever started the guard belong to the same ladder.
        is_guarded = bool(parents) and str(Path(__file__).with_name("guard.py")) in parents[0].cmdline()
        root = parents[1] if is_guarded and len(parents) > 1 else own
        return {own.pid, *(p.pid for p in parents), *(p.pid for p in root.children(recursive=True))}
    return {own.pid}


def _process_name(pid: int) -> str:
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "unknown"
