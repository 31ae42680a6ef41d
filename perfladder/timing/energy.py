"""Energy of a run, where something on the machine counts it: the GPU's own counter, its power, or the CPU's RAPL."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field

from perfladder.environment import nvml_session
from perfladder.errors import NotPossibleHereError
from perfladder.models import Model
from perfladder.target import LoadedTarget
from perfladder.timing.timer import Clock

if TYPE_CHECKING:
    import torch

EnergySource = Literal["nvml_total_energy", "nvml_power_samples", "rapl"]

RAPL_FOLDER = Path("/sys/class/powercap")

_WINDOW_S = 2.0
"""Runs are repeated for at least this long: the counters move in steps of up to about 0.1 s."""

_POWER_PERIOD_S = 0.02
_UJ_PER_J = 1e6


class EnergyRequest(Model):
    """Runs of the workload's own inputs, repeated until the counters can resolve them."""


class Energy(Model):
    """All that the counter saw, idle power included. None with a reason where nothing counts it."""

    energy_j_per_run: float | None = None
    energy_j_per_item: float | None = None
    mean_power_w: float | None = None
    source: EnergySource | None = None
    covers: str | None = Field(default=None, description="Whose energy it is.")
    num_runs: int = 0
    window_s: float | None = Field(default=None, description="Over which it was counted, preparation of runs included.")
    reason: str | None = None


class Meter(Protocol):
    """Counts energy since it was opened."""

    source: EnergySource
    covers: str

    def read_j(self) -> float:
        """Energy so far, in J; never less than at the reading before."""
        ...


def measure_energy(loaded: LoadedTarget, request: EnergyRequest, *, clock: Clock = time.perf_counter_ns) -> Energy:
    """Run the workload, with nothing observed, for at least two seconds between two readings.

    Raises:
        WorkloadError: The workload raised.
    """
    try:
        with open_meter(loaded.device) as meter:
            return energy_of_runs(lambda: _run(loaded), meter, loaded.workload.items_per_call, clock)
    except NotPossibleHereError as error:
        return Energy(reason=str(error))


def energy_of_runs(run: Callable[[], None], meter: Meter, items_per_call: int, clock: Clock) -> Energy:
    """Repeat `run` until the window is long enough, reading the meter after each (a counter may wrap)."""
    start_ns, start_j, num_runs = clock(), meter.read_j(), 0
    while num_runs == 0 or (clock() - start_ns) / 1e9 < _WINDOW_S:
        run()
        num_runs += 1
        end_j = meter.read_j()
    window_s = (clock() - start_ns) / 1e9
    return Energy(
        energy_j_per_run=(end_j - start_j) / num_runs,
        energy_j_per_item=(end_j - start_j) / (num_runs * items_per_call),
        mean_power_w=(end_j - start_j) / window_s,
        source=meter.source,
        covers=meter.covers,
        num_runs=num_runs,
        window_s=window_s,
    )


@contextlib.contextmanager
def open_meter(device: torch.device) -> Iterator[Meter]:
    """The meter of a torch device.

    Raises:
        NotPossibleHereError: Nothing here counts its energy, with the reason.
    """
    if device.type == "cpu":
        yield RaplMeter(RAPL_FOLDER)
        return
    if device.type != "cuda":
        raise NotPossibleHereError(f"no energy counter is known for devices of type {device.type!r}")
    with nvml_session() as nvml:
        if nvml is None:
            raise NotPossibleHereError("NVML, which counts the energy of a GPU, is not there")
        handle = _nvml_handle(nvml, device)
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except nvml.NVMLError as error:
            with NvmlPowerMeter(nvml, handle, because=str(error)) as meter:
                yield meter
        else:
            yield NvmlEnergyMeter(nvml, handle)


class NvmlEnergyMeter:
    """The counter that the driver keeps for a GPU (Volta and later), in steps of 1 mJ."""

    source: EnergySource = "nvml_total_energy"
    covers = "the whole GPU board, whoever uses it"

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read_j(self) -> float:
        """Energy since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000


class NvmlPowerMeter:
    """The GPU's power, read every 20 ms by a thread and added up; a context manager.

    Args:
        nvml: The initialised binding.
        handle: The device.
        because: Why the better counter cannot serve.

    Raises:
        NotPossibleHereError: The driver does not tell the power either.
    """

    source: EnergySource = "nvml_power_samples"

    def __init__(self, nvml: Any, handle: Any, *, because: str) -> None:
        self.covers = f"the whole GPU board, whoever uses it, from samples of its power ({because})"
        self._nvml, self._handle = nvml, handle
        self._energy_j = 0.0
        self._lock, self._end = threading.Lock(), threading.Event()
        try:
            self._last = time.monotonic(), self._power_w()
        except nvml.NVMLError as error:
            raise NotPossibleHereError(f"the driver tells neither energy nor power of this GPU: {error}") from error
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> NvmlPowerMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def read_j(self) -> float:
        """Energy since the meter was made: the trapezoids between samples."""
        with self._lock:
            now_s, power_w = time.monotonic(), self._power_w()
            self._energy_j += (now_s - self._last[0]) * (power_w + self._last[1]) / 2
            self._last = now_s, power_w
            return self._energy_j

    def _sample(self) -> None:
        while not self._end.wait(_POWER_PERIOD_S):
            with contextlib.suppress(self._nvml.NVMLError):
                self.read_j()

    def _power_w(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000


class RaplMeter:
    """The CPU packages' own counters, and their memory where it has one.

    Raises:
        NotPossibleHereError: There are none, or only root may read them.

    Source:
        Linux, Documentation/power/powercap/powercap.rst.
    """

    source: EnergySource = "rapl"

    def __init__(self, folder: Path) -> None:
        domains = sorted(folder.glob("intel-rapl:*")) if folder.is_dir() else []
        self._domains = {domain: self._name(domain) for domain in domains}
        # psys holds the packages, and core and uncore lie within one.
        wanted = [domain for domain, name in self._domains.items() if name.startswith("package") or name == "dram"]
        if not wanted:
            raise NotPossibleHereError(f"this machine has no RAPL counters for its CPUs in {folder}")
        self._last_uj: dict[Path, int] = {}
        self._energy_uj = 0
        try:
            self._range_uj = {domain: int((domain / "max_energy_range_uj").read_text()) for domain in wanted}
            self._last_uj = {domain: self._read_uj(domain) for domain in wanted}
        except OSError as error:
            raise NotPossibleHereError(
                f"the RAPL counter {error.filename} cannot be read ({error.strerror}); on most systems only root may"
            ) from error
        names = ", ".join(self._domains[domain] for domain in wanted)
        self.covers = f"{names} of the whole machine, whoever uses it"

    def read_j(self) -> float:
        """Energy since the meter was made; to be read before a counter wraps twice (some ten minutes at full power)."""
        for domain, last_uj in self._last_uj.items():
            now_uj = self._read_uj(domain)
            self._energy_uj += now_uj - last_uj + (self._range_uj[domain] if now_uj < last_uj else 0)
            self._last_uj[domain] = now_uj
        return self._energy_uj / _UJ_PER_J

    @staticmethod
    def _read_uj(domain: Path) -> int:
        return int((domain / "energy_uj").read_text())

    @staticmethod
    def _name(domain: Path) -> str:
        try:
            return (domain / "name").read_text().strip()
        except OSError:
            return ""


def _run(loaded: LoadedTarget) -> None:
    loaded.prepare_run()
    loaded.run()
    loaded.synchronize()


def _nvml_handle(nvml: Any, device: torch.device) -> Any:
    """NVML's handle of a torch device, whose index may be another there (CUDA_VISIBLE_DEVICES)."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        if uuid is not None:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return nvml.nvmlDeviceGetHandleByIndex(device.index or 0)
    except nvml.NVMLError as error:
        raise NotPossibleHereError(f"NVML does not know {device} (uuid {uuid}): {error}") from error
