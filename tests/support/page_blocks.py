"""Fenced blocks of the documentation, with what the page says about running them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("python", "console", "sh", "bash", "yaml", "json", "ini", "toml", "dockerfile", "diff", "text")
SHELLS = ("console", "sh", "bash")
REASONS = (
    "changes the machine",
    "installs packages",
    "needs a GPU",
    "needs a server",
    "needs another machine",
    "needs code of yours",
    "needs runs of yours",
    "takes minutes",
)
"""Why a block is not run; a page says it as `<!-- not run: REASON -->` before the block."""

_FENCE = re.compile(r"^( *)```(\S*) *\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- *(not run|runs with|exits): *(.*?) *-->")
_NAME = r"`([\w.-]+\.(?:py|yaml|json|toml|ini|txt|sh))`"
_FILE = re.compile(rf"(?:{_NAME}|(?:^|\. ){_NAME},[^`\n]*):\n*$", re.MULTILINE)
"""A file's name and a colon; or a sentence that begins with it, as "`my_pipe.yaml`, beside it:"."""
_PROGRAM = re.compile(r"^(?:\.venv/bin/)?perfladder$")
_CODE = re.compile(r"(?<!`)`(perfladder [^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: Path of the page from the repository's root.
        line: Where its fence begins, from 1.
        language: What stands behind the fence.
        text: Without the fences and their indentation.
        file: The file that it shows, as in "`my_pipe.py`:" just before it; None if it shows none.
        marks: `not run`, `runs with` and `exits` of the comments just before it.
    """

    page: str
    line: int
    language: str
    text: str
    file: str | None
    marks: dict[str, str]

    @property
    def where(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether there is something to run, and no reason against it."""
        return "not run" not in self.marks and self.file is None and self.language in ("python", *SHELLS)

    @property
    def commands(self) -> list[str]:
        """Commands of a shell block as they are shown: after `$` in a console, else each line that is no comment."""
        if self.language not in SHELLS:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line[2:].strip() for line in lines if line.startswith("$ ")]
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]

    @property
    def commands_to_run(self) -> list[str]:
        """The same, those of perfladder with the options that shorten them here."""
        options = self.marks.get("runs with")
        if options is None:
            return self.commands
        return [_with_options(command, options) for command in self.commands]


def split(command: str) -> list[str]:
    """Arguments of a command of perfladder, its name among them; empty for other commands."""
    arguments = shlex.split(command, comments=True)
    return arguments if arguments and _PROGRAM.match(arguments[0]) else []


def _with_options(command: str, options: str) -> str:
    """A command of perfladder with more options just behind its verb: what follows a script's name is the script's."""
    arguments = split(command)
    return f"{shlex.join(arguments[:2])} {options} {shlex.join(arguments[2:])}" if arguments else command


def blocks_of(path: Path, root: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text, found, end = path.read_text(), [], 0
    for match in _FENCE.finditer(text):
        # Only what stands between this block and the one before it, and only its last paragraph and comments.
        before = text[end : match.start()].rstrip(" ")
        marks, rest = {}, before.rstrip()
        while rest.endswith("-->"):
            rest, _, comment = rest.rpartition("<!--")
            mark = _MARK.fullmatch("<!--" + comment)
            if mark:
                marks[mark[1]] = mark[2]
            rest = rest.rstrip()
        file = _FILE.search(rest[-200:] + "\n")
        lines = match[3].splitlines()
        found.append(
            Block(
                page=str(path.relative_to(root)),
                line=text.count("\n", 0, match.start()) + 1,
                language=match[2],
                text="\n".join(line.removeprefix(match[1]) for line in lines) + "\n",
                file=file[1] or file[2] if file and match[2] not in SHELLS else None,
                marks=marks,
            )
        )
        end = match.end()
    return found


def inline_commands(path: Path) -> list[str]:
    """Commands of perfladder that stand in a sentence."""
    return _CODE.findall(_FENCE.sub("", path.read_text()))
