"""Sections around the measurements: findings, workload and environment, warnings, files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from perfladder.findings import Evidence, Finding
from perfladder.report.html.blocks import Block, Card, Cell, Code, Column, Facts, Line, Link, Section, Table, Text, Tone
from perfladder.report.html.run_data import SECTION_OF_RUNG, RunData, listed, name, number, numbers
from perfladder.text import clause

_KIB = 1 << 10


def findings_section(run: RunData) -> Section:
    """Each claim with its evidence, linked to where the numbers stand and to the file they come from."""
    report = run.report
    if not report.findings:
        return Section(
            id="findings",
            title="Findings",
            blocks=[
                Text(
                    line=["There are none: no rung was finished, or what was measured allows no claim."], role="absent"
                )
            ],
        )
    blocks: list[Block] = [_card(run, index, finding) for index, finding in enumerate(report.findings, 1)]
    if report.run.stopped_because:
        blocks.append(Text(line=[f"The ladder was not climbed further: {report.run.stopped_because}"], role="note"))
    return Section(id="findings", title="Findings", blocks=blocks)


def _card(run: RunData, index: int, finding: Finding) -> Card:
    evidence = [_evidence(run, row) for row in finding.evidence]
    return Card(
        id=f"finding-{index}",
        label=f"{index} · {finding.rung}",
        title=finding.claim,
        rows=[
            ("Evidence", evidence or [["See the rung's result."]]),
            ("Uncertainty", [[_sentence(finding.uncertainty)]]),
            ("Refuted by", [[_sentence(finding.refuted_by)]]),
            ("Next", [[finding.next_experiment]]),
        ],
        command=finding.next_command,
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{clause(text[1:])}."


def _evidence(run: RunData, row: Evidence) -> Line:
    file, _, place = row.source.partition(":")
    rung = file.removesuffix(".json")
    line: Line = [Code(text=row.metric), f" = {row.value:.4g} {row.unit} ("]
    if rung in SECTION_OF_RUNG:
        line += [Link(text=place.strip() or rung, href=f"#{_section_of(rung, place)}"), " in "]
    path = run.report.artifacts.get(f"{rung} result")
    return [*line, Link(text=file, href=run.link(path)) if path else Code(text=file), ")"]


def _section_of(rung: str, place: str) -> str:
    """The section in which that field is shown."""
    field = place.strip()
    if rung == "stages":
        if "memory" in field or field.endswith("_bytes"):
            return "memory"
        if field in ("saturation", "concurrency", "cold_start", "energy", "throughput"):
            return "load"
    if rung in ("regions", "kernels") and field.startswith(("host", "idle", "residual.host", "waits")):
        return "idle"
    return SECTION_OF_RUNG[rung]


def workload_section(run: RunData) -> Section:
    """What ran, on what."""
    report = run.report
    work = report.workload
    rows: list[tuple[str, Line]] = [
        ("target", [Code(text=work.target)]),
        ("model, task", [f"{work.model or '–'}, {work.task or '–'}"]),
        ("inputs", [Code(text=json.dumps(work.model_dump(mode="json")["inputs"], ensure_ascii=False))]),
        ("metric", [f"{work.metric}, {work.measured_runs} measured runs after {work.warmup_runs} to warm up"]),
    ]
    if seen := report.observed:
        shapes = "".join(f", {path} {shape}" for path, shape in seen.output_shapes.items())
        rows += [
            (
                "output",
                [f"{seen.output_type}{shapes}" + (f", {seen.num_items} items streamed" if seen.num_items else "")],
            ),
            ("synchronization", ["; ".join(seen.synchronization_points)]),
        ]
    blocks: list[Block] = [Facts(rows=rows)]
    if report.environment is not None:
        blocks.append(Facts(rows=_environment(run)))
    else:
        blocks.append(
            Text(line=["The target was not loaded, so that nothing is known of the environment."], role="absent")
        )
    return Section(id="workload", title="Workload and environment", blocks=blocks)


def _environment(run: RunData) -> list[tuple[str, Line]]:
    info = run.report.environment
    assert info is not None
    env, prints = info.environment, info.fingerprints
    dirty = " (with uncommitted changes)" if info.git.dirty else ""
    rows: list[tuple[str, Line]] = [
        ("device, dtype", [f"{info.device}, {', '.join(info.dtypes) or '–'}"]),
        ("target", [Code(text=info.target_type), f", {info.num_parameters:,} parameters"]),
        ("attention", [info.attention_backend]),
        ("compiled", listed(info.compiled_modules) if info.compiled_modules else ["nothing"]),
        ("commit", [Code(text=info.git.commit), dirty] if info.git.commit else ["no git repository"]),
        (
            "machine",
            [
                f"{env.cpu}, {env.num_cpus} CPUs, {env.torch_threads} torch threads, "
                f"{env.total_memory_bytes / 2**30:.0f} GiB"
            ],
        ),
    ]
    for device in env.devices:
        rows.append(("accelerator", [f"{device.name}, {device.total_memory_bytes / 2**30:.0f} GiB"]))
    rows += [("driver", [f"{env.driver}, runtime {env.accelerator_runtime or '–'}"])] if env.driver else []
    versions = ", ".join(f"{package} {version}" for package, version in env.packages.items())
    digests: Line = []
    for title in ("work", "configuration", "protocol"):
        digests += [f"{title} ", Code(text=getattr(prints, title).digest), ", "]
    return [
        *rows,
        ("versions", [f"Python {env.python}, {versions}"]),
        ("system", [env.system]),
        ("fingerprints", [*digests, "environment ", Code(text=env.fingerprint)]),
    ]


def warnings_section(run: RunData) -> Section:
    """What is missing or suspicious, rung by rung."""
    found = [(line.name, warning) for line in run.report.rungs for warning in line.warnings]
    blocks: list[Block] = []
    if found:
        rows = [[Cell(text=rung), name(warning.code), Cell(text=warning.message)] for rung, warning in found]
        blocks.append(
            Table(
                caption="Warnings of the rungs",
                columns=[Column(title=title) for title in ("rung", "code", "message")],
                rows=rows,
            )
        )
    else:
        blocks.append(Text(line=["No rung has warned."]))
    rows = [
        [
            Cell(text=line.name),
            Cell(text=line.status.replace("_", " "), tone=_TONES[line.status]),
            number(line.duration_s, None if line.duration_s is None else f"{line.duration_s:.1f}"),
            Cell(text=line.reason or "–"),
        ]
        for line in run.report.rungs
    ]
    if rows:
        blocks.append(
            Table(
                caption="How the rungs ended",
                columns=[
                    Column(title="rung"),
                    Column(title="status"),
                    *numbers("took", unit="s"),
                    Column(title="reason"),
                ],
                rows=rows,
            )
        )
    return Section(id="warnings", title="Warnings and rungs", blocks=blocks)


_TONES: Mapping[str, Tone] = {"done": "good", "failed": "bad", "skipped": "neutral", "not_applicable": "neutral"}


def files_section(run: RunData) -> Section:
    """The files that all of this was made from."""
    folder = Path(run.report.run_dir)
    rows = [
        [Cell(text=title), Cell(text=path, is_code=True, href=run.link(path)), _size(folder / path)]
        for title, path in run.report.artifacts.items()
    ]
    note = "Links lead to the run directory by a relative path: they work on this machine, and not on pages of MLflow."
    return Section(
        id="files",
        title="Files",
        blocks=[
            Text(line=[note, " Traces open in Perfetto."]),
            Table(
                caption="Files of the run",
                columns=[Column(title="what"), Column(title="file"), *numbers("size", unit="KiB")],
                rows=rows,
                num_shown=40,
            ),
        ],
    )


def _size(path: Path) -> Cell:
    try:
        return number(path.stat().st_size / _KIB)
    except OSError:
        return number(None)
