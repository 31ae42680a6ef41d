"""A kernel's place under the roofline, by ncu's own counters of one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from pydantic import Field

from perfladder.models import Model

_BYTES_PER_S: Final = "dram__bytes.sum.per_second"
_BYTES_PER_CYCLE: Final = "dram__bytes.sum.peak_sustained"
_DRAM_CYCLES_PER_S: Final = "dram__cycles_elapsed.avg.per_second"
_SM_CYCLES_PER_S: Final = ("sm__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second")
_TENSOR: Final = ("sm__pipe_tensor", "sm__inst_executed_pipe_tensor", "sm__pipe_tc_")
_IN_USE: Final = 1.0


class _Precision(NamedTuple):
    """Which counters count its operations: an add and a multiplication as one, a fused one as two."""

    name: str
    letter: str


_PRECISIONS: Final = (_Precision("float32", "f"), _Precision("float64", "d"))


class RooflinePoint(Model):
    """Operations and bytes of one launch against what the device could do at the clocks of that launch."""

    precision: str = Field(description="Whose operations are counted.")
    arithmetic_intensity: float = Field(description="Operations for each byte of device memory.")
    ridge_flops_per_byte: float = Field(description="From here on compute is the lower roof.")
    compute_frac: float = Field(description="Of the peak of that precision.")
    bandwidth_frac: float = Field(description="Of the peak of device memory.")
    has_uncounted_tensor_work: bool = Field(
        description="Tensor cores were in use, whose operations these counters do not count: then it is a lower bound."
    )


def roofline_point(metrics: Mapping[str, float]) -> RooflinePoint | None:
    """The point of the precision that did most, or None where a counter is missing or nothing was counted.

    Source:
        Nsight Compute, section SpeedOfLight_RooflineChart: per cycle counts, times cycles a second.
    """
    clock = next((metrics[name] for name in _SM_CYCLES_PER_S if name in metrics), None)
    traffic = metrics.get(_BYTES_PER_S)
    peak_traffic = metrics.get(_BYTES_PER_CYCLE, 0.0) * metrics.get(_DRAM_CYCLES_PER_S, 0.0)
    if not clock or not traffic or not peak_traffic:
        return None
    points = []
    for precision in _PRECISIONS:
        per_cycle, peak_per_cycle = _operations(metrics, precision.letter), _peak(metrics, precision.letter)
        if per_cycle and peak_per_cycle:
            points.append((per_cycle, peak_per_cycle, precision.name))
    if not points:
        return None
    per_cycle, peak_per_cycle, name = max(points)
    return RooflinePoint(
        precision=name,
        arithmetic_intensity=per_cycle * clock / traffic,
        ridge_flops_per_byte=peak_per_cycle * clock / peak_traffic,
        compute_frac=per_cycle / peak_per_cycle,
        bandwidth_frac=traffic / peak_traffic,
        has_uncounted_tensor_work=any(
            name.startswith(_TENSOR) and "pct_of_peak" in name and value >= _IN_USE for name, value in metrics.items()
        ),
    )


def _operations(metrics: Mapping[str, float], letter: str) -> float | None:
    counts = [
        metrics.get(f"smsp__sass_thread_inst_executed_op_{letter}{kind}_pred_on.sum.per_cycle_elapsed")
        for kind in ("add", "mul", "fma")
    ]
    if any(count is None for count in counts):
        return None
    add, mul, fused = (count or 0.0 for count in counts)
    return add + mul + 2 * fused


def _peak(metrics: Mapping[str, float], letter: str) -> float | None:
    fused = metrics.get(f"sm__sass_thread_inst_executed_op_{letter}fma_pred_on.sum.peak_sustained")
    return None if fused is None else 2 * fused
