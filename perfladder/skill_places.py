"""Where coding agents look for skills, in a project and in a home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from perfladder.errors import InputError
from perfladder.text import near_names


class Agent(NamedTuple):
    """Where a coding agent looks for skills.

    Attributes:
        sign: A folder in a project that tells that the agent is in use there; in a home the one above `user` does too.
        project: Its skills in a project, from the project's root.
        user: Its skills for all projects, from the home folder.
        source: The page that says so.
    """

    sign: str
    project: str
    user: str
    source: str


AGENTS: Mapping[str, Agent] = {
    "agents": Agent(
        ".agents", ".agents/skills", ".agents/skills", "agentskills.io/client-implementation/adding-skills-support"
    ),
    "claude-code": Agent(".claude", ".claude/skills", ".claude/skills", "code.claude.com/docs/en/skills"),
    "codex": Agent(".codex", ".agents/skills", ".agents/skills", "developers.openai.com/codex/skills"),
    "copilot": Agent(
        ".github/skills",
        ".github/skills",
        ".copilot/skills",
        "docs.github.com/en/copilot/how-tos/copilot-on-github/customize-copilot/customize-cloud-agent/add-skills",
    ),
    "cursor": Agent(".cursor", ".cursor/skills", ".cursor/skills", "cursor.com/docs/context/skills"),
    "gemini-cli": Agent(".gemini", ".gemini/skills", ".gemini/skills", "geminicli.com/docs/cli/using-agent-skills"),
    "goose": Agent(".goose", ".agents/skills", ".config/agents/skills", "block.github.io/goose/docs/mcp/skills-mcp"),
    "opencode": Agent(".opencode", ".opencode/skills", ".config/opencode/skills", "opencode.ai/docs/skills"),
    "windsurf": Agent(
        ".windsurf", ".windsurf/skills", ".codeium/windsurf/skills", "docs.windsurf.com/windsurf/cascade/skills"
    ),
}
"""By the name that `--agent` takes. Cursor, Copilot, Gemini CLI and OpenCode read `.agents/skills` of a project too."""


class Place(NamedTuple):
    """Where skills are installed: a project or a home, and which of its agents are meant."""

    root: Path
    is_home: bool
    agents: tuple[str, ...]

    @property
    def folders(self) -> dict[str, list[str]]:
        """Folder of skills, from the root, to the agents that read it."""
        found: dict[str, list[str]] = {}
        for name in self.agents:
            agent = AGENTS[name]
            found.setdefault(agent.user if self.is_home else agent.project, []).append(name)
        return found


def project_root(start: Path) -> Path:
    """The nearest folder from here upwards that is a repository; without one, this one."""
    start = start.resolve()
    return next((folder for folder in (start, *start.parents) if (folder / ".git").exists()), start)


def place(root: Path, agents: Sequence[str] = (), *, is_home: bool = False) -> Place:
    """Where to install: for the agents that are named, else for those in use there, else for any.

    Raises:
        InputError: There is no such agent.
    """
    for name in agents:
        if name not in AGENTS:
            raise InputError(f"--agent: there is no agent {name!r}. {near_names(name, AGENTS, 'agents')}")
    in_use = tuple(
        name
        for name, agent in AGENTS.items()
        if (root / agent.sign).is_dir() or (is_home and (root / agent.user).parent.is_dir())
    )
    return Place(root, is_home, tuple(agents) or in_use or ("agents",))
