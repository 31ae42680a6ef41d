"""The documentation says what the code does: commands, fields, codes, policy, examples and links."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from typer.main import get_command

import perfladder
from perfladder import backend, errors, kernels, workload
from perfladder.backend import registry
from perfladder.cli import app
from perfladder.comparing.model import Change, RunComparison
from perfladder.comparing.model import Verdict as ComparisonVerdict
from perfladder.errors import PerfladderError
from perfladder.findings import POLICY, Kind
from perfladder.ladder import RUNGS, climb
from perfladder.models import Model
from perfladder.nightly.model import KINDS
from perfladder.nsight.diagnosis import Verdict
from perfladder.nsight.preflight import Obstacle
from perfladder.nsight.thresholds import THRESHOLDS
from perfladder.profiling.warnings import ProfileWarningCode
from perfladder.rundir import RunRecord
from perfladder.sweep import Sweep
from perfladder.trace.rows import Row
from perfladder.trace.warnings import WarningCode
from perfladder.tuning.config import TuningSettings
from perfladder.tuning.proof_model import ProofOutcome, ProofSettings, StepSummary
from perfladder.tuning.tune_request import StrategyName
from perfladder.workload import Budget, CompileConfig, Media, TunedArchive, Workload, parse_workload

ROOT = Path(__file__).parents[1]
README, SKILL = ROOT / "README.md", ROOT / "SKILL.md"
PAGES = [README, SKILL, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "skills").glob("**/*.md"))]
SKILL_PAGES = [path for path in sorted((ROOT / "skills").glob("**/*.md")) if not path.is_symlink()]
SOURCES = [path for folder in ("perfladder", "tasks", "flows") for path in sorted((ROOT / folder).rglob("*.py"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def table_rows(path: Path) -> list[list[str]]:
    """Cells of every table row whose first cell is code, as in | `name` | ... |."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return [[cells[0].strip("`"), *cells[1:]] for cells in rows]


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def front_matter() -> tuple[dict[str, str], list[str]]:
    _, header, body = SKILL.read_text().split("---\n", 2)
    return yaml.safe_load(header), body.splitlines()


def workload_example(path: Path) -> dict[str, object]:
    examples = [data for data in map(yaml.safe_load, blocks(path, "yaml")) if "target" in data]
    assert len(examples) == 1, f"{path.name} has one whole workload"
    return examples[0]


def test_the_readmes_first_two_commands_install_and_run():
    assert [block.strip() for block in blocks(README, "bash")] == [
        'python3 -m venv .venv && .venv/bin/pip install -q ".[all]" && .venv/bin/perfladder demo',
        'python3 -m venv .venv && .venv/bin/pip install -q -e ".[test]" && .venv/bin/pytest -n 2 -m "not gpu"',
    ]


@pytest.mark.parametrize("model", [Workload, Media, CompileConfig, TunedArchive, Sweep, Budget])
def test_every_workload_field_is_documented(model):
    documented = {row[0] for row in table_rows(ROOT / "docs" / "workload.md")}
    assert set(model.model_fields) <= documented


def test_documented_fingerprints_and_defaults_are_those_of_the_code():
    rows = {row[0]: row for row in table_rows(ROOT / "docs" / "workload.md") if len(row) == 5}
    assert set(rows) == set(Workload.model_fields)
    members = {"work": workload._WORK, "configuration": workload._CONFIGURATION, "protocol": workload._PROTOCOL}
    for name, info in Workload.model_fields.items():
        fingerprint = next((kind for kind, names in members.items() if name in names), "none")
        assert rows[name][4] == fingerprint, name
        if info.is_required():
            assert rows[name][2] == "required"
        else:
            assert yaml.safe_load(rows[name][2].strip("`")) == info.get_default(call_default_factory=True), name


def test_warning_codes_in_the_documentation_are_those_in_the_code():
    used = {code for path in SOURCES for code in re.findall(r"\bcode\s*=\s*\"([A-Z][A-Z_]+)\"", path.read_text())}
    documented = [row[0] for row in table_rows(ROOT / "docs" / "warnings.md")]
    assert set(documented) == used | {str(code) for code in (*WarningCode, *ProfileWarningCode)}
    assert len(documented) == len(set(documented))


@pytest.mark.parametrize("path", [README, SKILL], ids=lambda path: path.name)
def test_workload_examples_are_valid(path):
    assert parse_workload(workload_example(path)).target.endswith(".py:build")


@pytest.mark.slow
@pytest.mark.parametrize("path", [README, SKILL], ids=lambda path: path.name)
def test_examples_run(path, tmp_path):
    example = workload_example(path)
    code = next(block for block in blocks(path, "python") if "def build(" in block)
    (tmp_path / str(example["target"]).partition(":")[0]).write_text(code)
    smaller = {"measured_runs": 2, "warmup_runs": 1, "device": "cpu", "scenarios": {}}
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump(example | smaller))
    outcome = climb(tmp_path / "workload.yaml", runs_dir=tmp_path / "runs", until="stages")
    assert (outcome.status, outcome.exit_code) == ("done", 0)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_internal_links_resolve(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{path.name} links to {link}"


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    pages = [page for page in (ROOT / "docs").glob("*.md") if page != index]
    assert [page.name for page in pages if f"]({page.name})" not in index.read_text()] == []


def test_skill_has_a_front_matter_and_fits_its_size():
    header, body = front_matter()
    assert set(header) == {"name", "description"}
    assert header["name"] == "perfladder"
    assert "Use when" in header["description"]
    assert len(header["description"]) <= 1024
    assert 100 <= len(body) <= 200


def test_policy_in_the_documentation_is_that_of_the_code():
    skipping = [row for row in POLICY if row.skips]
    kinds = {row.kind for row in skipping}
    documented = [row for row in table_rows(ROOT / "docs" / "ladder.md") if row[0] in kinds and len(row) == 3]
    assert documented == [[row.kind, ", ".join(f"`{rung}`" for rung in row.skips), row.reason] for row in skipping]
    table = [row for row in table_rows(ROOT / "docs" / "findings.md") if row[0] in get_args(Kind)]
    assert table == [[row.kind, ", ".join(row.rungs), row.when] for row in POLICY]
    assert [row.kind for row in POLICY] == list(dict.fromkeys(row.kind for row in POLICY))
    assert {row.kind for row in POLICY} == set(get_args(Kind))


def test_skill_names_what_the_policy_skips():
    text = " ".join(SKILL.read_text().split())
    for row in POLICY:
        if not row.skips:
            continue
        clause = re.search(rf"after `{row.kind}` no ([a-z, ]+)", text)
        assert clause is not None, row.kind
        assert tuple(name.strip() for name in clause[1].split(",")) == row.skips


def test_every_rung_has_its_rows():
    ladder = (ROOT / "docs" / "ladder.md").read_text()
    for rung in RUNGS:
        assert f"| {rung.number} `{rung.name}` | {rung.question} |" in ladder
        assert f"| {rung.number} {rung.name} |" in README.read_text()
        assert rung.name in SKILL.read_text()


@pytest.mark.parametrize("path", [README, SKILL], ids=lambda path: path.name)
def test_every_exit_code_is_named(path):
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PerfladderError)]
    section = " ".join(path.read_text().split("xit codes", 1)[1].split())
    for code in {0, 1, 130, *(kind.exit_code for kind in kinds)}:
        assert re.search(rf"(\| |[:;] ){code}( \||:? )", section), code


def test_the_guide_to_tuning_has_all_settings_options_and_backends():
    guide = ROOT / "docs" / "tuning.md"
    rows = {name.strip("`"): row for row in table_rows(guide) for name in re.split(r"`, `", row[0])}
    for name, info in TuningSettings.model_fields.items():
        assert name in rows, name
        if info.default_factory is None:
            assert rows[name][1].strip("`") == str(info.default), name
    for variable in ("CACHE_DIR", "TUNING_REPORT", "NVTX", "HARDWARE_METRICS"):
        assert f"`PERFLADDER_{variable}`" in guide.read_text()
    flags = {flag for parameter in get_command(app).commands["tune"].params for flag in parameter.opts}
    section = guide.read_text().split("## The command", 1)[1].split("## Inspect", 1)[0]
    assert set(re.findall(r"`(--[a-z-]+)", section)) == {flag for flag in flags if flag.startswith("--")}
    for name, fields in backends_with_options().items():
        assert name in rows
        assert fields <= set(re.findall(r"`(\w+)`", rows[name][2])), name
    for strategy in get_args(StrategyName):
        assert f"`{strategy}`" in guide.read_text()


def test_the_pages_on_servers_and_mlflow_have_every_option():
    pages = {
        "servers.md": ("up", "gc"),
        "mlflow.md": ("sync",),
        "many-machines.md": ("sweep",),
        "nightly.md": ("nightly",),
    }
    for page, verbs in pages.items():
        text = (ROOT / "docs" / page).read_text()
        named = set(re.findall(r"`(--[a-z-]+)", text))
        for verb in verbs:
            flags = {flag for parameter in get_command(app).commands[verb].params for flag in parameter.opts}
            assert {flag for flag in flags if flag.startswith("--")} - {"--json"} <= named | {"--out"}, verb


def test_the_page_on_nights_has_every_verdict():
    assert set(KINDS) <= {row[0] for row in table_rows(ROOT / "docs" / "nightly.md")}


def test_the_guide_to_comparing_has_all_options_verdicts_and_fields():
    guide = (ROOT / "docs" / "compare.md").read_text()
    flags = {flag for parameter in get_command(app).commands["compare"].params for flag in parameter.opts}
    section = guide.split("## The command", 1)[1].split("## What may be compared", 1)[0]
    assert set(re.findall(r"`(--[a-z-]+)", section)) == {flag for flag in flags if flag.startswith("--")}
    verdicts = {name for row in table_rows(ROOT / "docs" / "compare.md") for name in re.split(r"`, `", row[0])}
    assert set(get_args(ComparisonVerdict)) <= verdicts
    named = set(re.findall(r"`([a-z_]+)(?:\[\])?`", guide))
    assert set(Change.model_fields) <= named
    untold = {"schema_version", "perfladder_version", "created_at", "workload", "method", "min_effect", "protocol"}
    untold |= {"aa_noise_floor", "metric_name"}
    assert set(RunComparison.model_fields) - untold <= named


def test_the_page_of_kernel_providers_has_all_of_them_and_all_options():
    page = ROOT / "docs" / "kernel-providers.md"
    rows = {row[0].partition("(")[0]: row for row in table_rows(page)}
    kinds = [
        getattr(kernels, name) for name in kernels.__all__ if name.endswith("Provider") and name != "KernelProvider"
    ]
    for kind in kinds:
        assert f"({', '.join(kind.config_class.model_fields.keys() - {'mode'})})" in rows[kind.__name__][0]
    section = page.read_text().split("## Kernels that somebody else writes", 1)[1]
    flags = {flag for parameter in get_command(app).commands["kernels"].params for flag in parameter.opts}
    assert set(re.findall(r"^\| .*`(--[a-z-]+)", section, re.MULTILINE)) <= flags
    assert {flag for flag in flags if flag.startswith("--")} <= set(re.findall(r"`(--[a-z-]+)", section))
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


def test_the_page_on_nsight_compute_has_every_limit_option_verdict_and_obstacle():
    page = ROOT / "docs" / "ncu.md"
    rows = {name.strip("`"): row for row in table_rows(page) for name in re.split(r"`, `", row[0])}
    for threshold in THRESHOLDS:
        number = f"{threshold.limit:g} {threshold.unit}"
        assert rows[threshold.name][1:] == [f"`{threshold.metric}`", number, threshold.says, threshold.source]
    flags = {flag for parameter in get_command(app).commands["ncu"].params for flag in parameter.opts}
    assert {name for name in rows if name.startswith("--")} == {flag for flag in flags if flag.startswith("--")}
    assert {*get_args(Verdict), *get_args(Obstacle)} <= set(rows)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in page.read_text()


def backends_with_options() -> dict[str, set[str]]:
    kinds = [
        backend.TorchEagerBackend,
        backend.TorchInductorJitBackend,
        backend.TorchAOBackend,
        backend.KernelSelectorBackend,
        backend.TensorRTBackend,
    ]
    return {kind.name: set(kind.config_class.model_fields) - {"memory_format"} for kind in kinds}


def words_of(annotation: object) -> set[str]:
    """The texts that a field may have, of a `Literal` at any depth."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return set(inner)
    return {word for one in inner for word in words_of(one)}


def all_models() -> list[type[BaseModel]]:
    for module in pkgutil.walk_packages(perfladder.__path__, "perfladder."):
        is_left_out = module.name.split(".")[1] in ("tasks", "flows", "workloads", "worker", "guard")
        # Importing that one switches just-in-time tuning on.
        if not is_left_out and module.name != "perfladder.jit.enable":
            importlib.import_module(module.name)
    found, queue = [], [*Model.__subclasses__(), *Row.__subclasses__()]
    while queue:
        found.append(queue.pop())
        queue += found[-1].__subclasses__()
    return found


def test_every_result_field_is_in_the_run_directory_page():
    text = (ROOT / "docs" / "run-directory.md").read_text()
    named = set(re.findall(r"`(?:[a-z_]+\[?\]?\.)*([a-z_0-9]+)(?:\[\])?`", text))
    for rung in RUNGS:
        assert set(rung.result_type.model_fields) <= named, rung.name
    assert set(RunRecord.model_fields) <= named
    for model in (ProofOutcome, StepSummary, ProofSettings):
        assert set(model.model_fields) <= named, model


@pytest.mark.parametrize("path", [SKILL, *SKILL_PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_the_skills_exist(path):
    models = all_models()
    known = {name for model in models for name in model.model_fields} | set(registry._OWN)
    known |= {word for model in models for field in model.model_fields.values() for word in words_of(field.annotation)}
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for quoted in re.findall(r"`([^`]+)`", text):
        for name in re.findall(r"[a-z]+(?:_[a-z0-9]+)+", quoted):
            is_file = re.search(rf"{name}\.(py|yaml|json)", quoted) or quoted.startswith(("call: ", "aten::"))
            assert is_file or name in known, name
