"""What others can see of a tuning: NVTX ranges for Nsight Systems, and samples of the hardware over its time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import IO, Any, Final, Self

from pydantic import Field

from perfladder.errors import NotPossibleHereError
from perfladder.guard import guarded
from perfladder.models import Model

NVTX_DOMAIN: Final = "perfladder"
_START_LIMIT_S: Final = 30.0
_END_LIMIT_S: Final = 10.0
_LINES_AT_START: Final = 2
"""Which devices there are, and the first sample."""


def nvtx_range(
    name: str, *, module: str | None = None, backend: str | None = None, enabled: bool
) -> AbstractContextManager[object]:
    """A range in the domain `perfladder`, as Nsight Systems shows it: `build module:unet backend:inductor`.

    Args:
        name: What is done.
        module: Path of the module it is done for.
        backend: Name of the backend it is done with.
        enabled: Without it there is no range, and the library is not imported.
    """
    if not enabled:
        return contextlib.nullcontext()
    import nvtx

    named = {"module": module, "backend": backend}
    message = " ".join([name, *(f"{key}:{value}" for key, value in named.items() if value is not None)])
    annotation: AbstractContextManager[object] = nvtx.annotate(message, domain=NVTX_DOMAIN)
    return annotation


class HardwareSample(Model):
    """One moment of one device; of the host alone where there is no device. None where it is unknown."""

    time_ns: int = Field(description="CLOCK_MONOTONIC: `time.monotonic_ns` of any process of the machine.")
    device_index: int | None = Field(description="As the driver counts, whatever CUDA_VISIBLE_DEVICES says.")
    utilization_frac: float | None = Field(description="Of the driver's last period, in which any kernel ran.")
    memory_used_bytes: int | None = Field(description="Of the device, by anybody.")
    power_w: float | None = Field(description="Of the board.")
    host_cpu_frac: float | None = Field(
        description="CPU time of the process since the sample before, over that of the CPUs it may run on."
    )
    host_rss_bytes: int | None = Field(description="Resident memory of the process.")


class Scope(Model):
    """What was done from one time to another."""

    start_ns: int
    end_ns: int
    module: str | None = None
    graph: str | None = None
    backend: str | None = None


class MeanMax(Model):
    """Mean and largest value."""

    mean: float
    max: float


class DeviceSummary(Model):
    """One device over some time; None where the driver does not say."""

    device_index: int
    name: str
    utilization_frac: MeanMax | None
    memory_used_bytes: MeanMax | None
    power_w: MeanMax | None


class HardwareSummary(Model):
    """The hardware over some time."""

    num_samples: int = Field(description="Moments at which everything was read.")
    period_s: float
    duration_s: float | None = Field(description="From the first to the last of them; None without any.")
    host_cpu_frac: MeanMax | None
    host_rss_bytes: MeanMax | None
    devices: list[DeviceSummary]
    reason: str | None = Field(description="Why something is missing.")


class HardwareMetrics:
    """Samples of the hardware while this process works, taken by a process of its own; a context manager.

    The process ends with this one, however that ends.

    Args:
        period_s: Between two samples.
    """

    def __init__(self, *, period_s: float = 0.1) -> None:
        self.period_s = period_s
        self._no_devices: str | None = None
        self._failure: str | None = None
        self.scopes: list[Scope] = []
        self._open_scopes: list[dict[str, str | None]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._device_names: dict[int, str] = {}
        self._samples: list[HardwareSample] = []
        self._received = bytearray()
        self._num_lines = 0
        self._lock, self._has_sampled = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def reason(self) -> str | None:
        """Why something is missing."""
        return "; ".join(filter(None, (self._no_devices, self._failure))) or None

    @property
    def is_running(self) -> bool:
        """Between `start` and `stop`."""
        return self._process is not None

    def start(self) -> None:
        """Start sampling; returns once the first sample was taken.

        Raises:
            NotPossibleHereError: The sampling process does not start.
        """
        assert self._process is None, "sampling runs already"
        lifeline, self._lifeline = os.pipe()
        sampler = [sys.executable, "-P", "-m", "perfladder.tuning.hardware_sampler"]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._read_out()
        self._received.clear()
        self._has_sampled.clear()
        self._num_lines = 0
        self._process = subprocess.Popen(
            guarded([*sampler, str(os.getpid()), str(self.period_s)], lifeline),
            pass_fds=(lifeline,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # Ctrl-C reaches this process only, which then ends the sampler in order.
            start_new_session=True,
        )
        os.close(lifeline)
        self._reader = threading.Thread(target=self._receive, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self._has_sampled.wait(_START_LIMIT_S)
        if self._num_lines < _LINES_AT_START:
            told = self.stop() or f"it said nothing for {_START_LIMIT_S:g} s"
            raise NotPossibleHereError(
                f"The process that samples the hardware does not start: {told}. Set config.hardware_metrics = False "
                "to do without."
            )
        self._read_out()

    def stop(self) -> str | None:
        """Take a last sample and end the sampling process; safe to call again. Returns its error, if it had one."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"stop\n")
        try:
            code = process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        os.close(self._lifeline)
        process.wait()
        self._reader.join()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        self._errors.close()
        if code == 0:
            return None
        last = next((line for line in reversed(lines) if line.strip()), "it was ended")
        self._failure = f"sampling ended early ({last})"
        return last

    @property
    def samples(self) -> list[HardwareSample]:
        """All so far, in the order of time."""
        self._read_out()
        return list(self._samples)

    @contextlib.contextmanager
    def annotate(
        self, *, module: str | None = None, graph: str | None = None, backend: str | None = None
    ) -> Iterator[None]:
        """Say what is done in the block; blocks inside others add to what those said."""
        given = {"module": module, "graph": graph, "backend": backend}
        outer = self._open_scopes[-1] if self._open_scopes else {}
        names = {**outer, **{key: value for key, value in given.items() if value is not None}}
        start_ns = time.monotonic_ns()
        self._open_scopes.append(names)
        try:
            yield
        finally:
            self._open_scopes.pop()
            self.scopes.append(Scope(start_ns=start_ns, end_ns=time.monotonic_ns(), **names))

    def samples_of(
        self, *, module: str | None = None, graph: str | None = None, backend: str | None = None
    ) -> list[HardwareSample]:
        """The samples that were taken inside annotated blocks of these names that have ended."""
        asked = {"module": module, "graph": graph, "backend": backend}
        asked = {key: value for key, value in asked.items() if value is not None}
        spans = [s for s in self.scopes if all(getattr(s, key) == value for key, value in asked.items())]
        return [sample for sample in self.samples if any(s.start_ns <= sample.time_ns <= s.end_ns for s in spans)]

    def summary(
        self, *, module: str | None = None, graph: str | None = None, backend: str | None = None
    ) -> HardwareSummary:
        """Mean and largest value of everything, over all the time or over the annotated blocks of these names."""
        is_all = module is None and graph is None and backend is None
        samples = self.samples if is_all else self.samples_of(module=module, graph=graph, backend=backend)
        moments = {sample.time_ns: sample for sample in samples}
        reasons = [self.reason, None if samples else "no sample was taken in this time"]
        return HardwareSummary(
            num_samples=len(moments),
            period_s=self.period_s,
            duration_s=(max(moments) - min(moments)) / 1e9 if moments else None,
            host_cpu_frac=_mean_max(sample.host_cpu_frac for sample in moments.values()),
            host_rss_bytes=_mean_max(sample.host_rss_bytes for sample in moments.values()),
            devices=[_device_summary(index, name, samples) for index, name in self._device_names.items()],
            reason="; ".join(filter(None, reasons)) or None,
        )

    def _receive(self, stream: IO[bytes]) -> None:
        """Only keep what comes: reading it out waits until somebody asks, and this process is not disturbed."""
        with stream:
            while chunk := os.read(stream.fileno(), 1 << 16):
                with self._lock:
                    self._received += chunk
                self._num_lines += chunk.count(b"\n")
                if self._num_lines >= _LINES_AT_START:
                    self._has_sampled.set()
        self._has_sampled.set()

    def _read_out(self) -> None:
        """Turn the whole lines that have come into samples."""
        with self._lock:
            lines = self._received.split(b"\n")
            self._received = bytearray(lines.pop())
        for line in lines:
            self._add(json.loads(line))

    def _add(self, line: Any) -> None:
        if isinstance(line, dict):
            self._device_names = dict(line["devices"])
            self._no_devices = line["reason"]
            return
        time_ns, cpu_frac, rss_bytes, readings = line
        unknown = None, None, None
        for index, reading in zip(self._device_names or [None], readings or [unknown], strict=True):
            utilization_frac, memory_used_bytes, power_w = reading
            sample = HardwareSample(
                time_ns=time_ns,
                device_index=index,
                utilization_frac=utilization_frac,
                memory_used_bytes=memory_used_bytes,
                power_w=power_w,
                host_cpu_frac=cpu_frac,
                host_rss_bytes=rss_bytes,
            )
            self._samples.append(sample)


def _device_summary(index: int, name: str, samples: list[HardwareSample]) -> DeviceSummary:
    own = [sample for sample in samples if sample.device_index == index]
    return DeviceSummary(
        device_index=index,
        name=name,
        utilization_frac=_mean_max(sample.utilization_frac for sample in own),
        memory_used_bytes=_mean_max(sample.memory_used_bytes for sample in own),
        power_w=_mean_max(sample.power_w for sample in own),
    )


def _mean_max(values: Iterable[float | None]) -> MeanMax | None:
    known = [value for value in values if value is not None]
    return MeanMax(mean=sum(known) / len(known), max=max(known)) if known else None
