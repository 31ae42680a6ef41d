"""The ranks of a workload with `nproc` above 1, seen from one of them: its place, its device, and the start line.

perfladder starts the ranks itself, each as a session's child with the environment variables that torchrun sets:
torchrun passes no pipe on to its ranks, and ends the others of a failed rank before they can be asked where they were.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfladder.errors import InputError, NotPossibleHereError, WorkloadError
from perfladder.models import Model

if TYPE_CHECKING:
    import torch

_START_IN_NS = 10_000_000
"""From the end of the barrier to the start of a run; a barrier of two ranks on two busy CPUs took 3.9 ms (p95)."""

_SPIN_NS = 200_000
_BEYOND_DEADLINE_S = 60.0
"""A collective of ours gives up after the session's own deadline, which can say more about it."""


class RankPlace(Model):
    """Which rank of how many a process is; all are on this machine, so the rank is the local rank too.

    Attributes:
        meeting: A file through which the ranks find each other, in a private folder of its own, which is then removed.
    """

    rank: int
    world_size: int
    meeting: str

    def own_path(self, path: Path) -> Path:
        """`regions.trace.json` as this rank's `regions.rank1.trace.json`."""
        stem, _, rest = path.name.partition(".")
        return path.with_name(f"{stem}.rank{self.rank}.{rest}")


class RankGroup:
    """Lets all ranks start a run together, and agree on what follows from a measured number.

    It has a process group of its own, registered nowhere, so that it neither meets nor disturbs the workload's groups.
    """

    def __init__(self, place: RankPlace, *, timeout_s: float) -> None:
        import torch.distributed

        c10d: Any = torch.distributed
        timeout = timedelta(seconds=timeout_s + _BEYOND_DEADLINE_S)
        store = c10d.FileStore(place.meeting, place.world_size)
        store.set_timeout(timeout)
        self.place = place
        self._group = self._wait_for(
            lambda: c10d.ProcessGroupGloo(store, place.rank, place.world_size, timeout), "meet"
        )
        self._wait_for(lambda: self._group.barrier().wait(), "meet")
        if place.rank == 0:
            shutil.rmtree(Path(place.meeting).parent, ignore_errors=True)

    def start_together(self) -> None:
        """Wait until every rank is here, then until a moment that all know.

        Two CPU ranks were 2.2 ms apart when they left the barrier alone, and 1 to 9 us at such a moment (medians).
        """
        self._wait_for(lambda: self._group.barrier().wait(), "start a run together")
        moment_ns = int(self.agree(time.monotonic_ns() + _START_IN_NS))
        time.sleep(max(0, moment_ns - time.monotonic_ns() - _SPIN_NS) / 1e9)
        while time.monotonic_ns() < moment_ns:
            pass

    def agree(self, value: float) -> float:
        """Rank 0's value, on every rank: what depends on a measured number must not differ between ranks."""
        import torch

        shared = torch.tensor([value], dtype=torch.float64)
        self._wait_for(lambda: self._group.broadcast(shared, 0).wait(), "agree")
        return float(shared[0])

    def _wait_for(self, step: Callable[[], Any], what: str) -> Any:
        try:
            return step()
        except RuntimeError as error:
            raise WorkloadError(
                f"Rank {self.place.rank} could not {what} with the other ranks; one of them is gone: {error}"
            ) from error


def rank_device(name: str, device: torch.device, place: RankPlace) -> torch.device:
    """The accelerator of this rank, made the current one; a CPU is shared by all.

    Args:
        name: As the workload asks for it.
        device: What that is for a single process.

    Raises:
        InputError: The workload names one device for all ranks.
        NotPossibleHereError: There are fewer devices than ranks.
    """
    import torch

    if device.type == "cpu":
        return device
    if name != "auto" and torch.device(name).index is not None:
        raise InputError(
            f"device: {name!r} is one device, but nproc is {place.world_size}. Write {device.type!r}: each rank then "
            "uses the device of its own number."
        )
    count = torch.accelerator.device_count()
    if count < place.world_size:
        raise NotPossibleHereError(
            f"nproc: {place.world_size} ranks need {place.world_size} {device.type} devices, but there are {count}."
        )
    torch.accelerator.set_device_index(place.rank)
    return torch.device(device.type, place.rank)


def initialize_default_group(device: torch.device, timeout_s: float) -> None:
    """Make the default process group, for a call that uses collectives, unless the factory has made one."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s + _BEYOND_DEADLINE_S))
