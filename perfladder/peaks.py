"""What a device can do at most: arithmetic by precision and memory bandwidth, measured here or from its data sheet."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pydantic import Field, ValidationError

from perfladder.files import write_atomically
from perfladder.models import SCHEMA_VERSION, Model, digest

if TYPE_CHECKING:
    import torch

_NS_PER_S: Final = 1e9
_BATCH_S: Final = 0.01
_BATCHES: Final = 3
_PRECISIONS: Final = {"float32": "float32", "tf32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_MIN_SIDE, _MAX_SIDE = 256, {"cpu": 2048}
_DEVICE_MAX_SIDE: Final = 8192
_COPY_BYTES: Final = {"cpu": 128 << 20}
_DEVICE_COPY_BYTES: Final = 1 << 30


class Peaks(Model):
    """The most that a device does: by products of square matrices and by a copy of memory, or by its data sheet."""

    schema_version: int = SCHEMA_VERSION
    device: str
    source: Literal["measured", "datasheet"]
    datasheet: str | None = Field(default=None, description="Which data sheet, and what it states.")
    compute_tflops: dict[str, float] = Field(
        description="By precision: float32, tf32, bfloat16, float16; dense, 10**12 operations a second."
    )
    bandwidth_gb_per_s: float | None = Field(description="Bytes read and written, 10**9 a second.")
    torch_version: str | None = None
    num_threads: int | None = Field(default=None, description="Of the CPU, for a CPU's peaks.")
    measured_at: str | None = None
    reason: str | None = Field(default=None, description="Why it is not measured, or not in full.")

    @property
    def label(self) -> str:
        """`measured` or `data sheet`, for a sentence."""
        return "measured" if self.source == "measured" else "data sheet"


class DataSheet(NamedTuple):
    """One device's peaks without sparsity, as NVIDIA's data sheet states them, in TFLOP/s and GB/s.

    Attributes:
        names: The names that the driver gives it, without `NVIDIA`; whole ones, since GH200 is no H200, and a part of a
            device (MIG) is not the device.
        sheet: Title of the data sheet, and what it says there.
        float32: Of the plain units.
        tf32: Of the tensor cores.
        half: BF16 and FP16 of the tensor cores.
        bandwidth_gb_per_s: Of the memory.
    """

    names: tuple[str, ...]
    sheet: str
    float32: float
    tf32: float
    half: float
    bandwidth_gb_per_s: float


# Only what a public data sheet of NVIDIA states for that very device. Where the sheet states tensor core figures with
# 2:4 sparsity alone, half of them stands here: sparsity doubles the rate. Other devices are measured, or have no peaks.
_H200: Final = "NVIDIA H200 Tensor Core GPU datasheet, SXM: FP32 67, TF32 989 and BF16 1,979 with sparsity, 4.8 TB/s"
_H100_SXM: Final = (
    "NVIDIA H100 Tensor Core GPU datasheet, SXM: FP32 67, TF32 989 and BF16 1,979 with sparsity, 3.35 TB/s"
)
_H100_PCIE: Final = (
    "NVIDIA H100 Tensor Core GPU datasheet, PCIe: FP32 51, TF32 756 and BF16 1,513 with sparsity, 2 TB/s"
)
_A100: Final = "NVIDIA A100 Tensor Core GPU datasheet: FP32 19.5, TF32 156 and BF16 312 without sparsity"
_L40S: Final = "NVIDIA L40S datasheet: FP32 91.6, TF32 183 and BF16 362.05 without sparsity, 864 GB/s"
_L4: Final = "NVIDIA L4 Tensor Core GPU datasheet: FP32 30.3, TF32 120 and BF16 242 with sparsity, 300 GB/s"
DATASHEETS: Final = (
    DataSheet(("H200",), _H200, 67.0, 989 / 2, 1979 / 2, 4800.0),
    DataSheet(("H100 80GB HBM3",), _H100_SXM, 67.0, 989 / 2, 1979 / 2, 3350.0),
    DataSheet(("H100 PCIe",), _H100_PCIE, 51.0, 756 / 2, 1513 / 2, 2000.0),
    DataSheet(("A100-SXM4-80GB",), f"{_A100}, 80GB SXM 2,039 GB/s", 19.5, 156.0, 312.0, 2039.0),
    DataSheet(("A100 80GB PCIe",), f"{_A100}, 80GB PCIe 1,935 GB/s", 19.5, 156.0, 312.0, 1935.0),
    DataSheet(("A100-SXM4-40GB", "A100-PCIE-40GB"), f"{_A100}, 40GB 1,555 GB/s", 19.5, 156.0, 312.0, 1555.0),
    DataSheet(("L40S",), _L40S, 91.6, 183.0, 362.05, 864.0),
    DataSheet(("L4",), _L4, 30.3, 120 / 2, 242 / 2, 300.0),
)


def datasheet_peaks(name: str, *, reason: str) -> Peaks | None:
    """Return the peaks that a device's data sheet states, or None for a device that is not in the table.

    Args:
        name: As the driver names it, e.g. `NVIDIA H200`.
        reason: Why they are not measured.
    """
    sheet = next((row for row in DATASHEETS if name.removeprefix("NVIDIA ") in row.names), None)
    if sheet is None:
        return None
    compute = {"float32": sheet.float32, "tf32": sheet.tf32, "bfloat16": sheet.half, "float16": sheet.half}
    return Peaks(
        device=name,
        source="datasheet",
        datasheet=sheet.sheet,
        compute_tflops=compute,
        bandwidth_gb_per_s=sheet.bandwidth_gb_per_s,
        reason=reason,
    )


def find_peaks(
    device: torch.device, cache_folder: Path | None, *, clock: Callable[[], int] = time.perf_counter_ns
) -> Peaks | None:
    """Return a device's peaks: measured before, measured now, or by its data sheet; None if there is neither.

    Args:
        device: Where the work ran. It must be free: measuring takes some hundred milliseconds of it.
        cache_folder: Where measured peaks are kept by device, torch version and threads; None keeps nothing.
        clock: Nanoseconds.
    """
    import torch

    name = device_name(device)
    num_threads = torch.get_num_threads() if device.type == "cpu" else None
    path = None
    if cache_folder is not None:
        key = digest([name, str(torch.__version__), num_threads, SCHEMA_VERSION])
        path = cache_folder / f"peaks-{key}.json"
        known = _read(path)
        if known is not None:
            return known
    try:
        peaks = measure_peaks(device, clock=clock)
    except (RuntimeError, NotImplementedError) as error:  # out of memory, or a device without these operations
        return datasheet_peaks(name, reason=f"measuring failed: {str(error).splitlines()[0]}")
    if path is not None:
        with contextlib.suppress(OSError):  # a read-only home costs the measuring again, no more
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, peaks.model_dump_json(indent=1))
    return peaks


def _read(path: Path) -> Peaks | None:
    try:
        peaks = Peaks.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return peaks if peaks.schema_version == SCHEMA_VERSION and peaks.source == "measured" else None


def device_name(device: torch.device) -> str:
    """The device as its driver, or the kernel for a CPU, names it."""
    import torch

    from perfladder.environment import cpu_name

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return cpu_name() if device.type == "cpu" else device.type


def measure_peaks(device: torch.device, *, clock: Callable[[], int] = time.perf_counter_ns) -> Peaks:
    """Measure the device: products of square matrices that grow until they fill it, and copies of a large buffer.

    The result is the best of some batches, each with one synchronization at its end.

    Raises:
        RuntimeError: The device has no memory left for the buffers, or cannot do it.
    """
    import torch

    compute, missing = {}, []
    with torch.no_grad():
        for precision, dtype in _PRECISIONS.items():
            if precision == "tf32" and device.type != "cuda":
                continue
            try:
                with _float32_as("tf32" if precision == "tf32" else "ieee", device):
                    compute[precision] = _measure_matmul(device, getattr(torch, dtype), clock)
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                missing.append(precision)
        bandwidth = _measure_copy(device, clock)
    return Peaks(
        device=device_name(device),
        source="measured",
        compute_tflops=compute,
        bandwidth_gb_per_s=bandwidth,
        torch_version=str(torch.__version__),
        num_threads=torch.get_num_threads() if device.type == "cpu" else None,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=f"not possible on this device: {', '.join(missing)}" if missing else None,
    )


@contextlib.contextmanager
def _float32_as(precision: str, device: torch.device) -> Iterator[None]:
    """How products of float32 are computed on a CUDA device, put back afterwards."""
    import torch

    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _measure_matmul(device: torch.device, dtype: torch.dtype, clock: Callable[[], int]) -> float:
    """TFLOP/s of the best square product; the side doubles until a product takes long enough to fill the device."""
    import torch

    side, best = _MIN_SIDE, 0.0
    generator = torch.Generator(device).manual_seed(0)
    while True:
        # Random numbers: products of constants draw less power, so that the clocks would stay higher than in real work.
        a = torch.rand(side, side, generator=generator, device=device).to(dtype)
        b, out = a.flip(0), torch.empty_like(a)
        seconds = _best_seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, clock)  # type: ignore[misc]
        best = max(best, 2 * side**3 / seconds / 1e12)
        if side >= _MAX_SIDE.get(device.type, _DEVICE_MAX_SIDE) or seconds * 8 > 2 * _BATCH_S:
            return best
        side *= 2


def _measure_copy(device: torch.device, clock: Callable[[], int]) -> float:
    """GB/s read and written by a copy that no cache holds."""
    import torch

    num_bytes = _COPY_BYTES.get(device.type, _DEVICE_COPY_BYTES)
    if device.type != "cpu":
        free_bytes, _ = torch.accelerator.get_memory_info(device)
        num_bytes = min(num_bytes, free_bytes // 8)
    source = torch.ones(num_bytes // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_seconds(lambda: target.copy_(source), device, clock) / 1e9


def _best_seconds(step: Callable[[], object], device: torch.device, clock: Callable[[], int]) -> float:
    """Least time of a step over some batches, after one that is not counted and tells how many make a batch."""
    import torch

    def batch(count: int) -> float:
        start = clock()
        for _ in range(count):
            step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return max(clock() - start, 1) / _NS_PER_S / count

    batch(1)  # loads kernels, touches memory
    count = min(max(1, math.ceil(_BATCH_S / batch(1))), 100)
    return min(batch(count) for _ in range(_BATCHES))
