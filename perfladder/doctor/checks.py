"""One function for each thing that limits a measurement: what was found, what it is needed for, and what to do."""

from __future__ import annotations

from typing import Literal

from perfladder.doctor.facts import Clocks, Disk, Facts
from perfladder.environment import Environment, Snapshot
from perfladder.models import Model
from perfladder.nsight.preflight import Preflight

Status = Literal["ok", "warning", "missing"]

_LITTLE_DISK_BYTES = 5 << 30
_NO_DISK_BYTES = 512 << 20
_LITTLE_MEMORY_BYTES = 2 << 30
_LITTLE_SHARED_MEMORY_BYTES = 1 << 30
_GIB = 2**30


class Check(Model):
    """One thing that a rung needs."""

    name: str
    status: Status
    detail: str
    needed_for: str
    fix: str | None = None


def check_accelerator(environment: Environment, facts: Facts) -> Check:
    """Whether torch sees a device, and whether it should."""
    name, needed_for = "accelerator", "device time, kernels on a GPU"
    if environment.devices:
        listed = ", ".join(f"{d.index}: {d.name} ({d.total_memory_bytes / _GIB:.0f} GiB)" for d in environment.devices)
        detail = f"{environment.accelerator} {environment.accelerator_runtime}, driver {environment.driver}: {listed}"
        return Check(name=name, status="ok", detail=detail, needed_for=needed_for)
    detail, fix = "none: workloads run on the CPU, and operators, by self time, take the place of kernels", None
    if environment.driver is not None:
        detail = f"none, although the NVIDIA driver {environment.driver} is there"
        fix = (
            "Check CUDA_VISIBLE_DEVICES, and that the driver is new enough for this torch's CUDA."
            if facts.has_cuda_build
            else "This torch is built for CPUs. Install the build for CUDA (pytorch.org has the command)."
        )
    return Check(name=name, status="warning", detail=detail, needed_for=needed_for, fix=fix)


def check_activities(environment: Environment, activities: list[str]) -> Check:
    """Whether the profiler sees both sides."""
    wanted = {"CPU"} | ({environment.accelerator.upper()} if environment.accelerator else set())
    missing = sorted(wanted - set(activities))
    return Check(
        name="profiler activities",
        status="missing" if missing else "ok",
        detail=", ".join(activities) + (f"; missing {', '.join(missing)}" if missing else ""),
        needed_for="rungs 2 and 4",
        fix="Use a build of torch with Kineto, and end other profilers of the GPU." if missing else None,
    )


def check_ncu(preflight: Preflight) -> Check:
    """Whether counters of kernels can be read."""
    name, needed_for = "Nsight Compute", "rung 5 (optional)"
    found = f"ncu {preflight.ncu_version}" if preflight.ncu_path else "no ncu"
    if preflight.obstacle is not None:
        status: Status = "missing" if preflight.obstacle == "no_permission" else "warning"
        detail = f"{found}: {preflight.reason}"
        return Check(name=name, status=status, detail=detail, needed_for=needed_for, fix=preflight.remedy)
    if preflight.holders:
        return Check(
            name=name,
            status="warning",
            detail=f"{found}, but these may hold the counters: {', '.join(preflight.holders)}",
            needed_for=needed_for,
            fix="Pause them while kernels are measured (dcgmi profile --pause), or end those that are yours.",
        )
    return Check(name=name, status="ok", detail=f"{found}, on {preflight.gpu}", needed_for=needed_for)


def check_packages(packages: dict[str, str | None]) -> Check:
    """Which optional libraries are there."""
    missing = [name for name in ("prefect", "mlflow") if packages[name] is None]
    listed = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    absent = ", ".join(name for name, version in packages.items() if not version)
    return Check(
        name="packages",
        status="warning" if missing else "ok",
        detail=f"{listed or 'none'}; not installed: {absent or 'none'}",
        needed_for="run without --plain (prefect, mlflow); built-in workloads (diffusers, transformers)",
        fix="pip install 'perfladder[all]', or add --plain." if missing else None,
    )


def check_compiler(environment: Environment, facts: Facts) -> Check:
    """Whether torch.compile can build what it generates: C++ on a CPU, and Triton's launchers on a GPU."""
    missing = [] if facts.compiler else ["a C++ compiler"]
    if environment.accelerator and not facts.has_python_headers:
        missing.append("Python.h")
    return Check(
        name="compiler",
        status="warning" if missing else "ok",
        detail=facts.compiler or "none" if not missing else f"missing: {', '.join(missing)}",
        needed_for="torch.compile, tuning with the Inductor backends",
        fix="Debian and Ubuntu: apt-get install g++ python3-dev; or set CXX." if missing else None,
    )


def check_load(snapshot: Snapshot) -> Check:
    """Whether others keep the CPUs busy."""
    is_busy = snapshot.is_busy
    return Check(
        name="machine load",
        status="warning" if is_busy else "ok",
        detail=f"load {snapshot.load_average_1m:.1f} on {snapshot.num_cpus} CPUs"
        + ("; timings will be noisy until this machine is quieter" if is_busy else ""),
        needed_for="every timing",
        fix="Wait until it is quiet; `require_idle_device: true` in the workload refuses to measure before."
        if is_busy
        else None,
    )


def check_threads(environment: Environment, facts: Facts) -> Check:
    """Whether torch's threads have a CPU each."""
    usable = min(float(environment.num_cpus), facts.cpu_quota or float("inf"))
    cores = min(usable, facts.physical_cores or usable)
    threads = environment.torch_threads
    detail = f"{threads} torch threads; {environment.num_cpus} CPUs usable"
    if facts.physical_cores:
        detail += f", {facts.physical_cores} cores"
    if facts.cpu_quota is not None:
        detail += f", limited to {facts.cpu_quota:g} by the control group"
    is_over = threads > usable
    return Check(
        name="threads",
        status="warning" if is_over else "ok",
        detail=detail + ("; more threads than CPUs take turns, and timings jump" if is_over else ""),
        needed_for="every timing on a CPU, and the host's side of a GPU",
        fix=f"Set OMP_NUM_THREADS={max(1, int(cores))}." if is_over else None,
    )


def check_cpu_clock(snapshot: Snapshot, facts: Facts) -> Check:
    """Whether the CPUs' clocks stay up."""
    slow = [name for name in facts.governors if name not in ("performance", "schedutil")]
    clock = f"{snapshot.cpu_mhz:.0f} MHz now" if snapshot.cpu_mhz else "not told by the kernel"
    governed = f"; governor {', '.join(facts.governors)}" if facts.governors else "; set by the host of this machine"
    return Check(
        name="CPU clock",
        status="warning" if slow else "ok",
        detail=clock + governed,
        needed_for="timings that can be repeated",
        fix="As root: cpupower frequency-set -g performance." if slow else None,
    )


def check_memory(snapshot: Snapshot, facts: Facts) -> Check:
    """Whether a target fits."""
    available = snapshot.available_memory_bytes
    limit = facts.memory_limit_bytes
    is_little = min(available, limit or available) < _LITTLE_MEMORY_BYTES
    detail = f"{available / _GIB:.1f} GiB free"
    if limit is not None:
        detail += f", the control group allows {limit / _GIB:.1f} GiB"
    shared = facts.shared_memory_bytes
    is_narrow = False
    if shared is not None and shared < _LITTLE_SHARED_MEMORY_BYTES:
        is_narrow = True
        detail += f"; /dev/shm has {shared / _GIB:.2f} GiB"
    fixes = [
        *(["End what you do not need, or choose a larger machine."] if is_little else []),
        *(["For several ranks or data loaders give the container more: --shm-size=8g."] if is_narrow else []),
    ]
    return Check(
        name="memory",
        status="warning" if fixes else "ok",
        detail=detail,
        needed_for="loading the target, in two processes from rung 3 on",
        fix=" ".join(fixes) or None,
    )


def check_disk(disk: Disk) -> Check:
    """Whether traces and captures fit."""
    if not disk.is_writable:
        status, problem = "missing", "; it cannot be written to"
    elif disk.free_bytes < _NO_DISK_BYTES:
        status, problem = "missing", "; too little for a trace"
    else:
        status, problem = ("warning", "; captures may not fit") if disk.free_bytes < _LITTLE_DISK_BYTES else ("ok", "")
    places = {"runs": "--out", "temporary files": "TMPDIR", "caches": "XDG_CACHE_HOME"}
    return Check(
        name=f"disk for {disk.used_for}",
        status=status,
        detail=f"{disk.path}: {disk.free_bytes / _GIB:.1f} GiB free{problem}",
        needed_for="traces (up to some GiB), captures, builds",
        fix=f"Name another place ({places[disk.used_for]}), or free some: perfladder gc." if problem else None,
    )


def check_devices(snapshot: Snapshot, clocks: list[Clocks]) -> list[Check]:
    """Whether each GPU is one's own, and runs at full clock."""
    by_index = {found.index: found for found in clocks}
    checks = []
    for device in snapshot.devices:
        others = ", ".join(f"{p.name} (pid {p.pid})" for p in device.other_processes)
        free = f"{(device.free_memory_bytes or 0) / _GIB:.1f} GiB free"
        checks.append(
            Check(
                name=f"device {device.index}",
                status="warning" if others else "ok",
                detail=f"{free}; {'also in use by ' + others if others else 'no other process'}",
                needed_for="every timing on it",
                fix="Wait for them, or take another device (`device: cuda:1`)." if others else None,
            )
        )
        if device.index in by_index:
            checks.append(check_clocks(by_index[device.index]))
    return checks


def check_clocks(clocks: Clocks) -> Check:
    """Whether a GPU's clocks are held down or switched off between calls."""
    problems = [*(["held down: " + ", ".join(clocks.throttle_reasons)] if clocks.throttle_reasons else [])]
    fixes = [*(["Cool it, or raise its power limit; until then compare in turns only."] if problems else [])]
    if clocks.is_persistent is False:
        problems.append("persistence mode is off, so that the first call pays for waking it")
        fixes.append("As root: nvidia-smi -pm 1.")
    if clocks.is_mig:
        problems.append("it is partitioned (MIG), so that peaks are those of a part")
        fixes.append("Take an undivided GPU for peaks and rooflines.")
    detail = f"SM {clocks.sm_clock_mhz} MHz now, at most {clocks.max_sm_clock_mhz} MHz"
    return Check(
        name=f"clocks of device {clocks.index}",
        status="warning" if problems else "ok",
        detail="; ".join([detail, *problems]),
        needed_for="timings that can be repeated",
        fix=" ".join(fixes) or None,
    )
