"""Commands of perfladder that a page names, and what the command line knows of them."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
from typer.main import get_command

from perfladder.cli import app

SCRIPTS_OWN = ("exec", "init")
"""Verbs after whose first argument the options are another program's."""


class Named(NamedTuple):
    """A command as it stands on a page."""

    verb: str
    options: tuple[str, ...]
    text: str


@cache
def verbs() -> dict[str, click.Command]:
    """Every command by its words, as in `skill check`."""
    found = {}
    for name, command in get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {word}": one for word, one in inner.items()} if inner else {name: command}
    return found


def options_of(verb: str) -> set[str]:
    """The long options of a verb, without `--help`."""
    flags = {flag for parameter in verbs()[verb].params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return {flag for flag in flags if flag.startswith("--")}


def commands_on(path: Path) -> list[Named]:
    """Those in code blocks and in inline code."""
    text = path.read_text()
    blocks = re.findall(r"^```(?:console|sh|bash|text)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for line in [*lines, *re.findall(r"`([^`]+)`", prose)]:
        words = _words(line)
        if words and words[0].rpartition("/")[2] == "perfladder" and len(words) > 1 and not words[1].isupper():
            found.append(_named(words[1:], line))
    return [named for named in found if named is not None]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


def _named(words: list[str], text: str) -> Named | None:
    if words[0].startswith("--"):
        return None
    num_words = 2 if len(words) > 1 and f"{words[0]} {words[1]}" in verbs() else 1
    verb, rest = " ".join(words[:num_words]), words[num_words:]
    if verb in SCRIPTS_OWN and verb in verbs():
        rest = _own(verb, rest)
    return Named(verb, tuple(word.partition("=")[0] for word in rest if word.startswith("--")), text)


def _own(verb: str, words: list[str]) -> list[str]:
    """The words before the script or the factory."""
    takes_value = {
        flag
        for one in verbs()[verb].params
        for flag in one.opts
        if not getattr(one, "is_flag", False) and flag[0] == "-"
    }
    own, index = [], 0
    while index < len(words) and words[index].startswith("-"):
        own.append(words[index])
        index += 2 if words[index] in takes_value else 1
    return own
