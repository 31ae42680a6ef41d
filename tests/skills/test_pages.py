"""Skills and the page of commands say what the command line and the policy of findings say."""

import re
import unicodedata
from pathlib import Path
from typing import get_args

import pytest
import yaml
from commands import commands_on, options_of, verbs
from recorded_runs import NAMES, make_run

from perfladder.backend import registry
from perfladder.findings import POLICY
from perfladder.report import build_report
from perfladder.tuning.tune_request import StrategyName

ROOT = Path(__file__).parents[2]
SKILLS = sorted(path.parent for path in (ROOT / "skills").glob("*/SKILL.md"))
COMMANDS = ROOT / "docs" / "profiler.md"
WRITTEN = [path for path in sorted((ROOT / "skills").rglob("*.md")) if not path.is_symlink()]
PAGES = [ROOT / "SKILL.md", COMMANDS, *WRITTEN, *sorted((ROOT / "docs" / "cases").glob("*.md"))]
SPEC_FIELDS = {"name", "description", "license", "allowed-tools", "metadata", "compatibility"}


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


def front_matter(skill: Path) -> dict[str, object]:
    _, header, _ = (skill / "SKILL.md").read_text().split("---\n", 2)
    return yaml.safe_load(header)


@named(PAGES)
def test_commands_on_a_page_exist_with_their_options(path):
    found = commands_on(path)
    for command in found:
        assert command.verb in verbs(), command.text
        assert set(command.options) <= options_of(command.verb), command.text
    assert found or path.name != "SKILL.md"


def test_every_verb_is_on_the_page_of_commands_with_every_option():
    rows = [line for line in COMMANDS.read_text().splitlines() if line.startswith("| `perfladder ")]
    for verb in verbs():
        own = [row for row in rows if re.match(rf"\| `perfladder {verb}[ `]", row)]
        assert own, verb
        assert set(re.findall(r"`(--[a-z-]+)", " ".join(own))) == options_of(verb), verb


@named(PAGES)
def test_options_in_prose_belong_to_some_verb(path):
    known = {flag for verb in verbs() for flag in options_of(verb)} | {"--help", "--its", "--options"}
    assert set(re.findall(r"`(--[a-z-]+)", path.read_text())) <= known


@named(SKILLS)
def test_a_skill_keeps_to_the_format(path):
    header = front_matter(path)
    name, description = header["name"], header["description"]
    assert set(header) <= SPEC_FIELDS
    assert name == path.name == unicodedata.normalize("NFKC", name)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    assert len(name) <= 64
    assert 0 < len(description) <= 1024
    assert "Use when" in description
    assert len((path / "SKILL.md").read_text().splitlines()) <= 210


@named(SKILLS)
def test_a_skill_says_when_to_stop_and_links_all_it_has(path):
    text = (path / "SKILL.md").read_text()
    assert re.search(r"^## .*[Ss]top$", text, re.MULTILINE)
    assert re.search(r"^## .*Report$", text, re.MULTILINE)
    for page in [*path.glob("references/*.md"), *path.glob("docs/*.md")]:
        assert f"]({page.relative_to(path)})" in text, page.name
    if path.name != "perfladder":
        assert "## When not to use it" in text
        assert "](../perfladder/docs/profiler.md)" in text


def test_the_root_skill_is_the_one_that_is_installed_and_names_the_others():
    assert (ROOT / "skills" / "perfladder" / "SKILL.md").samefile(ROOT / "SKILL.md")
    assert (ROOT / "skills" / "perfladder" / "docs" / "profiler.md").samefile(COMMANDS)
    text = (ROOT / "SKILL.md").read_text()
    assert [skill.name for skill in SKILLS if f"`{skill.name}`" not in text and skill.name != "perfladder"] == []


def test_descriptions_have_the_words_that_a_user_would_say():
    text = " ".join(str(front_matter(skill)["description"]) for skill in SKILLS).lower()
    words = ["latency", "throughput", "memory", "output cadence", "slow stage", "kernel bottleneck", "regression"]
    words += ["speed up", "bottleneck", "profile", "optimize", "quantiz", "compile", "nightly", "nsight compute"]
    assert [word for word in words if word not in text] == []


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_on_backends_has_all_of_them_and_all_strategies():
    text = (ROOT / "skills" / "tune-pipeline" / "references" / "backends.md").read_text()
    names = [name for row in cells(text) for name in re.findall(r"`([a-z_-]+)`", row[0])]
    assert sorted(names) == sorted([*registry._OWN, *get_args(StrategyName)])


def findings_page() -> dict[str, list[str]]:
    text = (ROOT / "skills" / "profile-pipeline" / "references" / "findings.md").read_text()
    return {row[0].strip("`"): row[1:] for row in cells(text)}


def test_the_skills_table_of_findings_is_the_policy():
    page = findings_page()
    assert list(page) == [row.kind for row in POLICY]
    for row in POLICY:
        skipped = ", ".join(f"`{rung}`" for rung in row.skips) or "-"
        assert page[row.kind][:3] == [", ".join(row.rungs), row.when, skipped], row.kind


@pytest.mark.parametrize("name", NAMES)
def test_findings_lead_on_by_the_command_that_the_skill_names(name, tmp_path):
    page = findings_page()
    findings = build_report(make_run(tmp_path, name)).findings
    assert findings
    for finding in findings:
        if finding.next_command is not None:
            assert f"`{' '.join(finding.next_command.split()[:2])}`" == page[finding.kind][3], finding.kind


def test_what_skills_say_of_skipped_rungs_is_the_policy():
    table = (ROOT / "skills" / "profile-pipeline" / "SKILL.md").read_text().split("| rung | question |", 1)[1]
    rungs = {"1": {"stages"}, "3": {"capture", "harness"}}
    for row in POLICY:
        if row.skips and any(rung in names for names in rungs.values() for rung in row.rungs):
            number = next(number for number, names in rungs.items() if set(row.rungs) & names)
            line = next(line for line in table.splitlines() if line.startswith(f"| {number} "))
            assert f"`{row.kind}`" in line


def test_the_card_has_every_field_of_a_reproducible_workload():
    card = (ROOT / "skills" / "profile-pipeline" / "references" / "workload-card.md").read_text()
    asked = ["commit", "model, checkpoint", "task", "input shapes", "frames", "steps", "dtype", "attention backend"]
    asked += ["devices", "warm-up", "synchronization points", "compile, caches", "metric that matters"]
    rows = [line.strip("|").split("|")[0].strip() for line in card.splitlines() if line.startswith("| ")]
    assert [field for field in asked if field not in rows] == []
