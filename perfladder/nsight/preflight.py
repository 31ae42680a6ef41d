"""Whether counters of a kernel can be read here, found out before anything runs; each hindrance with its remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from perfladder.environment import nvml_session
from perfladder.models import Model
from perfladder.nsight.tool import find_ncu, find_reader

Obstacle = Literal[
    "no_nvidia_gpu",
    "no_ncu",
    "no_reader",
    "unsupported_gpu",
    "no_permission",
    "counters_in_use",
    "no_profiling_library",
    "lock_file",
]

_CAP_SYS_ADMIN: Final = 21
_PARAMS: Final = Path("/proc/driver/nvidia/params")
_STATUS: Final = Path("/proc/self/status")
_RESTRICTED: Final = "RmProfilingAdminOnly: 1"
_LEAST_CAPABILITY: Final = (7, 0)
"""Source: Nsight Compute's release notes: GPUs from Volta on."""
_HOLDERS: Final = ("nv-hostengine", "dcgm-exporter", "dcgmproftester", "nsys", "ncu", "nv-nsight-cu-cli", "dynolog")
"""Programs that read the counters themselves, or may; a driver lends them to one at a time."""

REMEDIES: Final[dict[Obstacle, str]] = {
    "no_nvidia_gpu": "Run on a machine with an NVIDIA GPU and its driver.",
    "no_ncu": (
        "Install Nsight Compute (it comes with the CUDA toolkit, or by itself from NVIDIA) and put the folder of `ncu` "
        "on the PATH."
    ),
    "no_reader": "Install NVIDIA's reader of reports: pip install 'perfladder[ncu]'.",
    "unsupported_gpu": "Use an `ncu` that lists this GPU (ncu --list-chips); newer GPUs need a newer one.",
    "no_permission": (
        "The administrator can allow it: the line `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in a file in "
        "/etc/modprobe.d, then the driver loaded anew or a reboot. Or run as root; in a container, with "
        "--cap-add SYS_ADMIN (Kubernetes: securityContext.capabilities.add). On a rented machine ask who runs it."
    ),
    "counters_in_use": (
        "Another program reads the counters. Pause it: `dcgmi profile --pause`, and `--resume` afterwards, for DCGM; "
        "end other profilers that are yours."
    ),
    "no_profiling_library": (
        "The driver's library for counters cannot be loaded here: the container or sandbox does not pass it on, or "
        "`ncu` does not fit the driver. Use NVIDIA's container runtime or a plain machine, and an `ncu` no newer than "
        "the driver's CUDA."
    ),
    "lock_file": "Remove ncu's lock file from the temporary folder if it is another user's, or set TMPDIR to your own.",
}


class Preflight(Model):
    """What stands in the way, and what was found."""

    obstacle: Obstacle | None = Field(description="The first one; None where nothing stands in the way.")
    reason: str | None = None
    remedy: str | None = None
    ncu_path: str | None = None
    ncu_version: str | None = None
    reader_folder: str | None = Field(default=None, description="Where NVIDIA's package is; None: it is installed.")
    gpu: str | None = None
    capability: str | None = None
    is_restricted: bool = Field(default=False, description="The driver lends counters to administrators only.")
    holders: list[str] = Field(default=[], description="Running programs that may hold the counters.")

    def stopped_by(self, obstacle: Obstacle, reason: str) -> Preflight:
        """The same with an obstacle in the way."""
        changes = {"obstacle": obstacle, "reason": reason, "remedy": REMEDIES[obstacle]}
        return self.model_copy(update=changes)

    @property
    def why_not(self) -> str:
        """Reason and remedy as one text."""
        return f"{self.reason} {self.remedy}"


class Gpu(Model):
    """A GPU as its driver names it."""

    name: str
    capability: tuple[int, int]
    uuid: str | None = Field(default=None, description="As torch writes it.")


def check_machine(
    gpu: Gpu | None = None, *, params: Path = _PARAMS, status: Path = _STATUS, holders: list[str] | None = None
) -> Preflight:
    """Look for everything that reading counters needs; starts nothing but `ncu --version`.

    Args:
        gpu: The GPU to profile on; None asks the driver.
        params: The driver's parameters.
        status: What tells this process's capabilities.
        holders: Programs that may hold the counters; None looks for them.
    """
    tool, gpu = find_ncu(), gpu or nvidia_gpu(0)
    reader = find_reader(tool.path if tool else None)
    found = Preflight(
        obstacle=None,
        ncu_path=tool.path if tool else None,
        ncu_version=tool.version if tool else None,
        reader_folder=str(reader.folder) if reader and reader.folder else None,
        gpu=gpu.name if gpu else None,
        capability=".".join(map(str, gpu.capability)) if gpu else None,
        is_restricted=_is_restricted(params),
        holders=running_holders() if holders is None else holders,
    )
    if gpu is None:
        return found.stopped_by("no_nvidia_gpu", "There is no NVIDIA GPU with a driver.")
    if tool is None:
        return found.stopped_by("no_ncu", "ncu (Nsight Compute) is not on the PATH.")
    if reader is None:
        return found.stopped_by("no_reader", f"ncu {tool.version} is there, but nothing that reads its reports.")
    if gpu.capability < _LEAST_CAPABILITY:
        return found.stopped_by("unsupported_gpu", f"Nsight Compute does not support {gpu.name} ({found.capability}).")
    if found.is_restricted and not _has_capability(status, _CAP_SYS_ADMIN):
        reason = (
            "The driver lends its counters to administrators only (RmProfilingAdminOnly), and this process is none."
        )
        return found.stopped_by("no_permission", reason)
    return found


def nvidia_gpu(index: int) -> Gpu | None:
    """A GPU by its number as the driver counts, or None."""
    with nvml_session() as nvml:
        if nvml is None or index >= nvml.nvmlDeviceGetCount():
            return None
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        uuid = str(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-")
        return Gpu(name=str(nvml.nvmlDeviceGetName(handle)), capability=(major, minor), uuid=uuid)


def running_holders() -> list[str]:
    """Programs that may hold the counters, with their process ids."""
    import psutil

    found = []
    for process in psutil.process_iter(["name"]):
        name = process.info["name"] or ""
        if name in _HOLDERS:
            found.append(f"{name} (pid {process.pid})")
    return sorted(found)


def _is_restricted(params: Path) -> bool:
    try:
        return _RESTRICTED in params.read_text()
    except OSError:
        return False


def _has_capability(status: Path, bit: int) -> bool:
    """Whether the process has a capability in effect, as Linux tells it; root in a container often has not."""
    try:
        lines = status.read_text().splitlines()
        effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(effective >> bit & 1)
