"""Skills for coding agents: those that come with perfladder, and what of them is installed.

What was installed is noted beside it with SHA-256 sums: so a file that its user has changed is told from an old one.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import ValidationError

from perfladder.errors import InputError
from perfladder.files import write_atomically
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.skill_places import Place

SKILL_FILE = "SKILL.md"
NOTE_FILE = ".perfladder-skill.json"


SkillStatus = Literal["current", "outdated", "changed", "missing", "installed", "updated", "removed"]


class SkillNote(Model):
    """What was installed, beside it: the sum of each file as it was written."""

    schema_version: int = SCHEMA_VERSION
    version: str
    files: dict[str, str]


class SkillState(Model):
    """One skill in one folder.

    `changed` names the files that differ from what perfladder has written; a skill is `outdated` if they all are as
    written, by another version.
    """

    name: str
    folder: str
    agents: list[str]
    status: SkillStatus
    version: str | None
    changed: list[str] = []


class SkillsResult(Model):
    """What `perfladder skill install`, `check` and `uninstall` print."""

    schema_version: int = SCHEMA_VERSION
    version: str
    root: str
    skills: list[SkillState]

    @property
    def has_drift(self) -> bool:
        """Whether something is not as this version has it."""
        return any(skill.status in ("outdated", "changed", "missing") for skill in self.skills)


class SkillLine(Model):
    """A skill that comes with perfladder."""

    name: str
    description: str
    files: list[str]
    installed_in: list[str]


class SkillList(Model):
    """What `perfladder skill list` prints."""

    schema_version: int = SCHEMA_VERSION
    version: str
    root: str
    skills: list[SkillLine]


def packaged_skills() -> dict[str, dict[str, str]]:
    """Every skill that comes with perfladder: path in its folder to text, stamped with the version."""
    data = importlib.resources.files("perfladder.skills_data")
    folders = [folder for folder in data.iterdir() if (folder / SKILL_FILE).is_file()]
    return {folder.name: dict(_files(folder)) for folder in sorted(folders, key=lambda folder: folder.name)}


def list_skills(where: Place) -> SkillList:
    """What comes with perfladder, and where of it something is installed."""
    return SkillList(
        version=_version(),
        root=str(where.root),
        skills=[
            SkillLine(
                name=name,
                description=_description(files[SKILL_FILE]),
                files=sorted(files),
                installed_in=[folder for folder in where.folders if (where.root / folder / name).is_dir()],
            )
            for name, files in packaged_skills().items()
        ],
    )


def check_skills(where: Place) -> SkillsResult:
    """Tell which installed skills are missing, of another version, or changed."""
    states = [
        _state(where.root, folder, agents, name, files)
        for folder, agents in where.folders.items()
        for name, files in packaged_skills().items()
    ]
    return SkillsResult(version=_version(), root=str(where.root), skills=states)


def install_skills(where: Place, *, is_forced: bool = False) -> SkillsResult:
    """Write all skills; what is there already as this version has it is left alone.

    Args:
        where: Which folders.
        is_forced: Also over files that the user has changed.

    Raises:
        InputError: A file has been changed, or a folder leads out of the root; then nothing is written.
    """
    found = check_skills(where)
    changed = [f"{skill.folder}/{file}" for skill in found.skills for file in skill.changed]
    if changed and not is_forced:
        raise InputError(
            "Nothing was written, since these files are not as perfladder wrote them:\n"
            + "".join(f"  {path}\n" for path in changed)
            + "Move your changes elsewhere, or give --force to write over them."
        )
    packaged = packaged_skills()
    states = []
    for skill in found.skills:
        if skill.status != "current":
            _write(where.root, skill, packaged[skill.name])
            status: SkillStatus = "installed" if skill.status == "missing" else "updated"
            skill = skill.model_copy(update={"status": status, "version": _version(), "changed": []})
        states.append(skill)
    return found.model_copy(update={"skills": states})


def uninstall_skills(where: Place, *, is_forced: bool = False) -> SkillsResult:
    """Delete what was installed and not changed since; the user's own files stay.

    Raises:
        InputError: A folder leads out of the root.
    """
    states = []
    for skill in check_skills(where).skills:
        folder = where.root / skill.folder
        note = _note(folder)
        if note is not None:
            kept = [] if is_forced else skill.changed
            for file in [*note.files, NOTE_FILE]:
                if file not in kept and (file != NOTE_FILE or not kept):
                    (folder / file).unlink(missing_ok=True)
            _drop_empty(folder)
            skill = skill.model_copy(update={"status": "changed" if kept else "removed", "changed": kept})
        states.append(skill)
    return SkillsResult(version=_version(), root=str(where.root), skills=states)


def _state(root: Path, folder: str, agents: list[str], name: str, files: Mapping[str, str]) -> SkillState:
    path = root / folder / name
    _require_inside(root, path)
    note = _note(path)
    state = SkillState(
        name=name,
        folder=f"{folder}/{name}",
        agents=agents,
        status="missing",
        version=note.version if note else None,
    )
    if not path.is_dir():
        return state
    written = dict(note.files) if note else {}
    on_disk = {file: _sum_of(root, path / file) for file in {*files, *written}}
    wanted = {file: _sum(text) for file, text in files.items()}
    changed = sorted(
        file for file, sha256 in on_disk.items() if sha256 not in (None, written.get(file), wanted.get(file))
    )
    if changed:
        return state.model_copy(update={"status": "changed", "changed": changed})
    if all(on_disk[file] == wanted[file] for file in files) and note is not None and note.files == wanted:
        return state.model_copy(update={"status": "current"})
    return state.model_copy(update={"status": "outdated" if note else "missing"})


def _write(root: Path, skill: SkillState, files: Mapping[str, str]) -> None:
    folder = root / skill.folder
    note = _note(folder)
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_inside(root, path)
        write_atomically(path, text)
    for file in set(note.files if note else ()) - set(files) - set(skill.changed):
        (folder / file).unlink(missing_ok=True)
    made = SkillNote(version=_version(), files={file: _sum(text) for file, text in files.items()})
    write_atomically(folder / NOTE_FILE, made.model_dump_json(indent=1) + "\n")


def _drop_empty(folder: Path) -> None:
    """Remove the skill's folder and those in it that hold nothing any more, and no folder above it."""
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()


def _note(folder: Path) -> SkillNote | None:
    try:
        note = SkillNote.model_validate_json((folder / NOTE_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    # The note is a file that anyone may edit: what it names is deleted, so it must lie in the folder.
    paths = [PurePosixPath(file) for file in note.files]
    is_inside = not any(path.is_absolute() or ".." in path.parts for path in paths)
    return note if is_inside else None


def _require_inside(root: Path, path: Path) -> None:
    if not path.resolve().is_relative_to(root.resolve()):
        raise InputError(
            f"{path} leads to {path.resolve()}, which is outside {root.resolve()}. Nothing is written there: name "
            "other agents with --agent, or give the command in the folder that it leads to."
        )


def _sum_of(root: Path, path: Path) -> str | None:
    _require_inside(root, path)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    for item in folder.iterdir():
        path = prefix + item.name
        if item.is_dir():
            yield from _files(item, f"{path}/")
        elif item.name.endswith(".md"):
            text = item.read_text(encoding="utf-8")
            yield path, _stamped(text) if path == SKILL_FILE else text


def _stamped(text: str) -> str:
    """Add the version to the front matter."""
    _, header, body = text.split("---\n", 2)
    return f'---\n{header}metadata:\n  version: "{_version()}"\n---\n{body}'


def _description(text: str) -> str:
    import yaml

    return str(yaml.safe_load(text.split("---\n", 2)[1])["description"])


def _version() -> str:
    from perfladder import __version__

    return str(__version__)
