"""Histories of one workload as the product keeps them, made up: levels, launches, stages, kernel families, commits."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from perfladder.nightly.model import Night

START = datetime(2026, 1, 1, 2, tzinfo=UTC)
STAGES = {"encoder": 7.0, "decoder": 3.0}
MACHINE = {"cpu": "Xeon", "num_cpus": 8, "device": "cuda", "devices": ["H200"]}
SOFTWARE = {"packages": {"torch": "2.13.0"}, "driver": "580.1"}


def commit_of(place: int) -> str:
    """The commit of a night: another one each night."""
    return f"{place + 1:040x}"


def make_night(place: int, *, level: float = 1.0, slow: dict[str, float] | None = None, **fields: Any) -> Night:
    """A night of 10 ms.

    Args:
        place: How many nights were before.
        level: Factor on all times.
        slow: Factors on single stages.
        fields: What else is not as usual.
    """
    stages = {name: ms * level * (slow or {}).get(name, 1.0) for name, ms in STAGES.items()}
    total = sum(stages.values())
    run_id = f"{START + timedelta(days=place):%Y%m%dT%H%M%S}-{place:06x}"
    return Night(
        **{
            "workload": "pipe",
            "run_id": run_id,
            "run_dir": f"/runs/pipe/{run_id}",
            "started_at": (START + timedelta(days=place)).isoformat(),
            "metric": "latency_p50",
            "unit": "ms",
            "launches": [total * factor for factor in (0.998, 1.0, 1.0, 1.001, 1.004)],
            "stages_ms": stages,
            "families_us": {"gemm": 600 * stages["decoder"], "elementwise": 100 * level},
            "replayed_stage": "decoder",
            "commit": commit_of(place),
            "work": "0123456789abcdef",
            "machine": MACHINE,
            "software": SOFTWARE,
            **fields,
        }
    )


def make_nights(count: int, *, seed: int = 0, noise: float = 0.01, **fields: Any) -> list[Night]:
    """Nights that differ by noise only, all of them good."""
    generator = np.random.default_rng(seed)
    levels = np.exp(noise * generator.standard_normal(count))
    return [make_night(place, level=float(level), **{"verdict": "ok", **fields}) for place, level in enumerate(levels)]


def level_with(noise: float) -> float:
    """The factor of a night that lies so many percent above the usual level."""
    return math.exp(noise / 100)
