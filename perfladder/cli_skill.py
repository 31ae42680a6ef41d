"""`perfladder skill`: the skills that come with perfladder, for the coding agents of a project or of a person."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfladder.cli_parts import Json, errors_shown, show

if TYPE_CHECKING:
    from perfladder.skill_places import Place
    from perfladder.skills import SkillList, SkillsResult

AgentNames = Annotated[
    list[str] | None,
    typer.Option(
        "--agent",
        metavar="NAME",
        help="For this agent (repeatable): agents, claude-code, codex, copilot, cursor, gemini-cli, goose, opencode or "
        "windsurf. By default those with a folder there, else agents: .agents/skills.",
    ),
]
ForUser = Annotated[
    bool, typer.Option("--user/--project", help="In your home folder, or in this repository (or folder).")
]

skill = typer.Typer(
    name="skill",
    help="Skills for coding agents: install them in a project, and see whether they are there and up to date.",
    no_args_is_help=True,
)


def add_skill_verbs(app: typer.Typer) -> None:
    """Add these verbs to the command line."""
    app.add_typer(skill)


@skill.command()
def install(
    agents: AgentNames = None,
    for_user: ForUser = False,
    force: Annotated[bool, typer.Option("--force", help="Write over files that have been changed.")] = False,
    as_json: Json = False,
) -> None:
    """Write the skills where coding agents look for them; files that you have changed are not touched."""
    with errors_shown(as_json):
        from perfladder.skills import install_skills

        result = install_skills(_place(agents, for_user), is_forced=force)
    show(result, as_json, _render)


@skill.command()
def uninstall(
    agents: AgentNames = None,
    for_user: ForUser = False,
    force: Annotated[bool, typer.Option("--force", help="Delete files that have been changed, too.")] = False,
    as_json: Json = False,
) -> None:
    """Delete what `install` wrote, and nothing else; files that you have changed stay."""
    with errors_shown(as_json):
        from perfladder.skills import uninstall_skills

        result = uninstall_skills(_place(agents, for_user), is_forced=force)
    show(result, as_json, _render)


@skill.command()
def check(agents: AgentNames = None, for_user: ForUser = False, as_json: Json = False) -> None:
    """Tell which skills are missing, old or changed; the exit code is then 1."""
    with errors_shown(as_json):
        from perfladder.skills import check_skills

        result = check_skills(_place(agents, for_user))
    show(result, as_json, _render)
    raise typer.Exit(1 if result.has_drift else 0)


@skill.command(name="list")
def list_all(agents: AgentNames = None, for_user: ForUser = False, as_json: Json = False) -> None:
    """List the skills that come with perfladder, what each is for, and where they are installed."""
    with errors_shown(as_json):
        from perfladder.skills import list_skills

        result = list_skills(_place(agents, for_user))
    show(result, as_json, _render_list)


def _place(agents: list[str] | None, for_user: bool) -> Place:
    from perfladder.skill_places import place, project_root

    root = Path.home() if for_user else project_root(Path.cwd())
    return place(root, agents or (), is_home=for_user)


def _render(result: SkillsResult) -> str:
    lines = [
        f"In {result.root}, perfladder {result.version}:",
        "",
        "| skill | status | version |",
        "| --- | --- | --- |",
    ]
    for one in result.skills:
        status = one.status + (f": {', '.join(one.changed)}" if one.changed else "")
        lines.append(f"| `{one.folder}` | {status} | {one.version or '-'} |")
    return "\n".join(lines)


def _render_list(result: SkillList) -> str:
    lines = []
    for one in result.skills:
        where = ", ".join(f"{folder}/{one.name}" for folder in one.installed_in) or "not installed here"
        lines.append(f"- **{one.name}** ({where}): {one.description}")
    return "\n".join(lines)
