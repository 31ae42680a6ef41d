"""`perfladder skill`: where skills are written, what is never overwritten, and that nothing leaves the project."""

import json
import os
from pathlib import Path

import pytest
import yaml
from documents import printed
from typer.testing import CliRunner

from perfladder import __version__, skills
from perfladder.cli import app
from perfladder.errors import InputError
from perfladder.skill_places import AGENTS, place

DOCS = Path(__file__).parents[2] / "docs" / "skills.md"
NAMES = ["compare-runs", "kernel-deep-dive", "nightly-profiling", "perfladder", "profile-pipeline", "tune-pipeline"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "project" / "src").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "project" / "src")
    return tmp_path / "project"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def run(*words, verb="skill-install"):
    done = CliRunner().invoke(app, ["skill", *words, "--json"])
    return done.exit_code, printed("error" if done.exit_code == 2 else verb, done.stdout)


def test_all_skills_come_with_the_package_complete():
    packaged = skills.packaged_skills()
    assert list(packaged) == NAMES
    for name, texts in packaged.items():
        assert yaml.safe_load(texts["SKILL.md"].split("---\n")[1])["metadata"] == {"version": __version__}
        assert name == "perfladder" or any(path.startswith("references/") for path in texts)
    assert "docs/profiler.md" in packaged["perfladder"]


def test_without_an_agents_folder_they_go_where_any_agent_looks(project):
    code, result = run("install")
    assert code == 0
    assert {skill["folder"] for skill in result["skills"]} == {f".agents/skills/{name}" for name in NAMES}
    text = (project / ".agents/skills/perfladder/SKILL.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["name"] == "perfladder"


def test_agents_in_use_get_them_each_in_its_own_folder_once(project):
    for sign in (".claude", ".codex", ".goose", ".github"):
        (project / sign).mkdir()
    _, result = run("install")
    agents = {skill["folder"].rsplit("/", 1)[0]: skill["agents"] for skill in result["skills"]}
    # A .github folder says nothing of Copilot: nearly every repository has one.
    assert agents == {".claude/skills": ["claude-code"], ".agents/skills": ["codex", "goose"]}
    _, result = run("install", "--agent", "copilot", "--agent", "cursor")
    assert {skill["folder"].rsplit("/", 1)[0] for skill in result["skills"]} == {".github/skills", ".cursor/skills"}


def test_for_a_person_they_go_to_the_home_folder(project, tmp_path):
    _, result = run("install", "--user", "--agent", "opencode")
    assert result["root"] == str(tmp_path / "home")
    assert {skill["folder"].rsplit("/", 1)[0] for skill in result["skills"]} == {".config/opencode/skills"}
    (tmp_path / "home/.copilot").mkdir()
    _, result = run("install", "--user")
    assert {skill["folder"].rsplit("/", 1)[0] for skill in result["skills"]} == {
        ".config/opencode/skills",
        ".copilot/skills",
    }
    assert (tmp_path / "home/.config/opencode/skills/tune-pipeline/SKILL.md").is_file()
    assert files(project) == {}


def test_check_tells_what_is_missing_old_or_changed(project):
    assert run("check", verb="skill-check")[0] == 1
    run("install")
    code, result = run("check", verb="skill-check")
    assert (code, {skill["status"] for skill in result["skills"]}) == (0, {"current"})
    folder = project / ".agents/skills"
    (folder / "compare-runs/SKILL.md").write_text("mine")
    (folder / "tune-pipeline/SKILL.md").unlink()
    make_old(folder / "nightly-profiling")
    code, result = run("check", verb="skill-check")
    found = {skill["name"]: (skill["status"], skill["changed"]) for skill in result["skills"]}
    assert code == 1
    assert found["compare-runs"] == ("changed", ["SKILL.md"])
    assert found["tune-pipeline"] == ("outdated", [])
    assert found["nightly-profiling"] == ("outdated", [])
    assert found["perfladder"] == ("current", [])


def make_old(folder: Path) -> None:
    """As an earlier version would have written it, with a file that is no more."""
    (folder / "SKILL.md").write_text("---\nname: old\n---\n")
    (folder / "references" / "gone.md").write_text("gone")
    note = json.loads((folder / skills.NOTE_FILE).read_text())
    note["version"] = "0.0.1"
    for name in ("SKILL.md", "references/gone.md"):
        note["files"][name] = skills._sum((folder / name).read_text())
    (folder / skills.NOTE_FILE).write_text(json.dumps(note))


def test_an_old_version_is_replaced_with_what_it_no_longer_has(project):
    run("install")
    whole = files(project)
    make_old(project / ".agents/skills/nightly-profiling")
    _, result = run("install")
    assert [skill["name"] for skill in result["skills"] if skill["status"] == "updated"] == ["nightly-profiling"]
    assert files(project) == whole


@pytest.mark.parametrize("was_installed", [True, False], ids=["changed", "of the user's own"])
def test_a_file_of_the_users_is_not_overwritten_unless_forced(project, was_installed):
    if was_installed:
        run("install")
    mine = project / ".agents/skills/compare-runs/SKILL.md"
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    before = files(project)
    code, document = run("install")
    assert code == 2
    assert ".agents/skills/compare-runs/SKILL.md" in document["error"]["message"]
    assert files(project) == before
    assert run("install", "--force")[0] == 0
    assert mine.read_text() != "mine"
    assert run("check", verb="skill-check")[0] == 0


def test_uninstall_leaves_what_the_user_wrote_and_nothing_else(project):
    (project / ".claude").mkdir()
    run("install")
    folder = project / ".claude/skills"
    (folder / "compare-runs/SKILL.md").write_text("mine")
    (folder / "perfladder/notes.md").write_text("mine too")
    run("uninstall", verb="skill-uninstall")
    assert set(files(project)) == {
        f".claude/skills/compare-runs/{skills.NOTE_FILE}",
        ".claude/skills/compare-runs/SKILL.md",
        ".claude/skills/perfladder/notes.md",
    }
    assert (project / ".claude").is_dir()


@pytest.mark.parametrize("link", [".claude", ".claude/skills", ".claude/skills/perfladder"])
def test_nothing_is_written_through_a_link_that_leads_out(project, tmp_path, link):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (project / link).parent.mkdir(parents=True, exist_ok=True)
    (project / link).symlink_to(elsewhere)
    for words in (["install", "--force"], ["check"], ["uninstall", "--force"]):
        code, document = run(*words, "--agent", "claude-code")
        assert code == 2
        assert "outside" in document["error"]["message"]
    assert files(elsewhere) == {}


def test_a_note_that_names_files_outside_deletes_none(project):
    run("install")
    folder = project / ".agents/skills/compare-runs"
    victim = project / "victim.md"
    victim.write_text("keep")
    note = json.loads((folder / skills.NOTE_FILE).read_text())
    note["files"]["../../../victim.md"] = skills._sum("keep")
    (folder / skills.NOTE_FILE).write_text(json.dumps(note))
    run("install", "--force")
    run("uninstall", "--force", verb="skill-uninstall")
    assert victim.read_text() == "keep"


def test_a_link_inside_the_project_is_followed(project):
    (project / ".agents/skills").mkdir(parents=True)
    (project / ".claude").mkdir()
    os.symlink("../.agents/skills", project / ".claude/skills")
    assert run("install", "--agent", "claude-code")[0] == 0
    assert (project / ".agents/skills/perfladder/SKILL.md").is_file()


def test_an_unknown_agent_is_refused_with_those_there_are(project):
    with pytest.raises(InputError, match=r"no agent 'claude'.*'claude-code'"):
        place(project, ["claude"])


def test_list_tells_what_each_skill_is_for_and_where_it_is(project):
    run("install")
    _, result = run("list", verb="skill-list")
    assert [skill["name"] for skill in result["skills"]] == NAMES
    assert all(skill["installed_in"] == [".agents/skills"] and skill["description"] for skill in result["skills"])
    shown = CliRunner().invoke(app, ["skill", "list"]).stdout
    assert ".agents/skills/tune-pipeline" in shown


def test_the_page_on_skills_has_every_agent_with_its_folders_and_source():
    rows = [line.strip("|").split("|") for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    page = {cells[0].strip(" `"): [cell.strip(" `") for cell in cells[1:]] for cells in rows}
    for name, agent in AGENTS.items():
        assert page[name] == [agent.sign, agent.project, f"~/{agent.user}", agent.source]
