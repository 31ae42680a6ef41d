"""Findings of rung 4 about passes over memory that another layout, or a compiler, saves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from perfladder.findings.background import Background, spread_text, where
from perfladder.findings.finding import Evidence, Finding
from perfladder.profiling.shares import Share
from perfladder.rungs.kernels import KernelsResult
from perfladder.trace.families import Family, is_compiled_kernel, unfused_family
from perfladder.trace.repeats import add_repeats

LAYOUT_FRAC: Final = 0.05
"""Of the kernel time, in changes of layout: from here on another layout is worth a try."""
FUSABLE_FRAC: Final = 0.2
"""Of the kernel time, in operators that a compiler could fuse: from here on it is worth a try."""
_CONVOLUTION: Final = re.compile(r"conv(?:_transpose)?([123])d")
_PASSES: Final = {
    Family.ELEMENTWISE: "elementwise operators",
    Family.COPY: "copies",
    Family.NORMALIZATION: "normalizations",
    Family.REDUCTION: "reductions",
}


def layout_conversions(result: KernelsResult, background: Background) -> list[Finding]:
    """That a part of the kernel time goes into other layouts for convolutions; on a CPU no operator tells it."""
    row = next((row for row in result.families if row.family == Family.LAYOUT and row.region_id is None), None)
    if result.kind != "kernels" or row is None or row.share < LAYOUT_FRAC:
        return []
    source, spread = where("kernels", "families"), spread_text(row, result.total_us)
    dimensions = _dimensions(result)
    backend = "eager:memory_format=channels_last"
    return [
        Finding(
            kind="layout_conversions",
            rung="kernels",
            stage=result.stage,
            claim=(
                f"In {result.stage}, {row.count} kernels a call do nothing but change the memory layout of tensors "
                f"around convolutions; they hold {row.share:.0%} of the kernel time."
            ),
            evidence=[
                Evidence(metric="layout share", value=row.share, unit="of kernel time", source=source),
                Evidence(metric="layout count", value=row.count, unit="kernels a call", source=source),
                *_pace(result),
            ],
            uncertainty=(
                f"{f'{spread}; ' if spread else ''}a share, no latency; other operators, such as normalizations, may "
                "be slower in the other layout"
            ),
            refuted_by="as many of these kernels with the model and its inputs in channels-last",
            next_experiment=(
                f"{_in_channels_last(result.stage, dimensions)}, and compare on the whole workload."
                f"{_where_the_host_waits(result, row.count)}"
            ),
            next_command=background.tune_command(result.stage, "--backend", backend) if dimensions == 2 else None,
        )
    ]


def _dimensions(result: KernelsResult) -> int:
    """Of the convolutions around which most of that time is, by the operators that are called; 2 if none says it."""
    times: Counter[int] = Counter()
    for row in result.kernels:
        match = _CONVOLUTION.search(row.outer_operator or "") if row.family == Family.LAYOUT else None
        if match is not None:
            times[int(match[1])] += round(row.total_us)
    return times.most_common(1)[0][0] if times else 2


def _in_channels_last(stage: str | None, dimensions: int) -> str:
    if dimensions == 1:
        return f"torch knows no channels-last for 1D convolutions: make those of {stage} 2D ones of height 1 in it"
    name = "channels_last_3d" if dimensions == 3 else "channels_last"
    return f"Run {stage} in torch.{name}, the layout that these kernels convert to"


def _where_the_host_waits(result: KernelsResult, count: int) -> str:
    if result.bound is None or result.bound.verdict != "host":
        return ""
    return f" The host sets the pace: {count} launches fewer may win something, the kernels' own time wins little."


def fusable_operators(result: KernelsResult, background: Background) -> list[Finding]:
    """That much of the kernel time is in operators, each with passes over memory of its own, that could be fused.

    Where the host sets the pace it is the launches that count, and the finding is one of who keeps the pace.
    """
    if result.kind != "kernels" or result.bound is None or result.bound.verdict not in ("device", "mixed"):
        return []
    parts = {family: found for family in _PASSES if (found := _unfused(result, family)).count}
    whole = _add("unfused", list(parts.values()))
    if whole.share < FUSABLE_FRAC:
        return []
    source, spread = where("kernels", "by_kernel"), spread_text(whole, result.total_us)
    listed = ", ".join(_PASSES[family] for family in parts)
    return [
        Finding(
            kind="fusable_operators",
            rung="kernels",
            stage=result.stage,
            claim=(
                f"In {result.stage}, {whole.count} kernels a call that no compiler wrote ({listed}) each read and "
                f"write memory for themselves; together they hold {whole.share:.0%} of the kernel time."
            ),
            evidence=[
                Evidence(metric="unfused share", value=whole.share, unit="of kernel time", source=source),
                Evidence(metric="unfused count", value=whole.count, unit="kernels a call", source=source),
                *(
                    Evidence(metric=f"{family} share", value=part.share, unit="of kernel time", source=source)
                    for family, part in parts.items()
                ),
                *_pace(result),
            ],
            uncertainty=(
                f"{f'{spread}; ' if spread else ''}by the kernels' names; a share, no latency: fused, they still read "
                "what goes in and write what comes out, and how much is saved is not known"
            ),
            refuted_by="a compiled run in which these operators take as long",
            next_experiment=_compile(result),
            next_command=None
            if _is_compiled(result)
            else background.tune_command(result.stage, "--backend", _inductor(result)),
        )
    ]


def _unfused(result: KernelsResult, family: Family) -> Share:
    """All kernels of a family that no compiler wrote; a Triton kernel of the program's own is written as it should be.

    Rows by kernel are complete, and those by call are not.
    """
    own = {row.kernel for row in result.kernels if row.launch_site is not None}
    return _add(family, [row for row in result.by_kernel if unfused_family(row.name) is family and row.name not in own])


def _add(name: str, rows: Sequence[Share]) -> Share:
    return Share(
        name=name,
        total_us=sum(row.total_us for row in rows),
        share=sum(row.share for row in rows),
        count=sum(row.count for row in rows),
        repeat_us=add_repeats(rows),
    )


def _is_compiled(result: KernelsResult) -> bool:
    return any(is_compiled_kernel(row.name) for row in result.by_kernel)


def _compile(result: KernelsResult) -> str:
    if _is_compiled(result):
        return (
            f"A part of {result.stage} is compiled: see what its graph breaks, or its choice of modules, leave outside "
            "(TORCH_LOGS=graph_breaks in the environment), and compare on the whole workload."
        )
    return (
        f"Compile {result.stage}: a compiler fuses most of these with each other. Compare on the whole workload, "
        "its output too."
    )


def _inductor(result: KernelsResult) -> str:
    """With CUDA graphs where the host has a part in the pace, as it would be without this finding."""
    assert result.bound is not None
    return "inductor_jit:cuda_graphs=true" if result.bound.verdict == "mixed" else "inductor_jit"


def _pace(result: KernelsResult) -> list[Evidence]:
    """How much of a plain call the device works for, which says whether kernel time counts."""
    if result.bound is None or result.bound.plain_busy_frac is None:
        return []
    return [
        Evidence(
            metric="plain_busy_frac",
            value=result.bound.plain_busy_frac,
            unit="of a call",
            source=where("kernels", "bound"),
        )
    ]
