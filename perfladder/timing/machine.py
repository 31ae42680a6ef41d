"""What in the machine's state may disturb timings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfladder.environment import Snapshot, snapshot_of
from perfladder.errors import NotPossibleHereError
from perfladder.models import ResultWarning

if TYPE_CHECKING:
    import torch

_LOW_MEMORY_FRAC = 0.1


def snapshot_warnings(snapshot: Snapshot, device: torch.device) -> list[ResultWarning]:
    """What in the machine's state before the first run may disturb the timings."""
    warnings = []
    if message := _who_else(snapshot, device):
        warnings.append(ResultWarning(code="DEVICE_SHARED", message=message))
    state = snapshot_of(snapshot, device)
    if state is not None and state.free_memory_bytes is not None and state.total_memory_bytes:
        free_frac = state.free_memory_bytes / state.total_memory_bytes
        if free_frac < _LOW_MEMORY_FRAC:
            free = f"{state.free_memory_bytes / 2**30:.1f} GiB ({free_frac:.0%})"
            message = f"Only {free} of {device} are free before the first run."
            warnings.append(ResultWarning(code="DEVICE_MEMORY_LOW", message=message))
    if message := _load(snapshot):
        warnings.append(ResultWarning(code="MACHINE_BUSY", message=message))
    return warnings


def end_warnings(snapshot: Snapshot, device: torch.device) -> list[ResultWarning]:
    """What the machine's state just after the last run tells of the runs."""
    state = snapshot_of(snapshot, device)
    if state is None or not state.throttle_reasons:
        return []
    at = f" at {state.sm_clock_mhz} MHz" if state.sm_clock_mhz else ""
    heat = f", {state.temperature_c} °C" if state.temperature_c is not None else ""
    power = f", {state.power_w:.0f} W" if state.power_w is not None else ""
    message = (
        f"{device} held its clocks down ({', '.join(state.throttle_reasons)}){at}{heat}{power} after the last run."
    )
    return [ResultWarning(code="DEVICE_THROTTLED", message=message)]


def require_idle(snapshot: Snapshot, device: torch.device) -> None:
    """Refuse to measure on a device that others use, or on a busy machine.

    Raises:
        NotPossibleHereError: Names who uses it.
    """
    reasons = [reason for reason in (_who_else(snapshot, device), _load(snapshot)) if reason]
    if reasons:
        raise NotPossibleHereError(
            f"require_idle_device: {' '.join(reasons)} Wait until it is idle, or set 'require_idle_device: false'."
        )


def _who_else(snapshot: Snapshot, device: torch.device) -> str | None:
    state = snapshot_of(snapshot, device)
    if state is None or not state.other_processes:
        return None
    others = ", ".join(f"{process.name} (pid {process.pid})" for process in state.other_processes)
    return f"Other processes use {device}: {others}. Timings and free memory depend on what they do."


def _load(snapshot: Snapshot) -> str | None:
    if not snapshot.is_busy:
        return None
    return f"The machine's load is {snapshot.load_average_1m:.1f} on {snapshot.num_cpus} CPUs; timings will be noisy."
