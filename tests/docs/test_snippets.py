"""Every command and every piece of Python in the README and in docs runs, or its page says why it does not."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from page_blocks import LANGUAGES, REASONS, Block, blocks_of, inline_commands, split
from typer.main import get_command

from perfladder.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for path in PAGES for block in blocks_of(path, ROOT)]
RUN_PAGES = list(dict.fromkeys(block.page for block in BLOCKS if block.is_run))
HELP = (
    "Give the page what the block needs, let it run shorter with `<!-- runs with: OPTIONS -->`, say what it exits with "
    f"by `<!-- exits: N -->`, or mark it `<!-- not run: REASON -->`, where REASON is one of: {', '.join(REASONS)}."
)


def chosen(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def parsed(arguments: list[str]) -> click.Context:
    """The command line's own reading of a command; nothing is run."""
    group = get_command(app)
    _, command, rest = group.resolve_command(click.Context(group), arguments)
    assert command is not None
    return command.make_context(command.name, rest)


def as_typed(arguments: list[str]) -> list[str]:
    """Its arguments, without what follows the command in the shell."""
    end = next((at for at, part in enumerate(arguments) if part in ("|", "&&", "||", ">", "&", ";")), len(arguments))
    return arguments[1:end]


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_every_block_has_a_language_and_known_marks(page):
    for block in BLOCKS:
        if block.page != page:
            continue
        assert block.language in LANGUAGES, f"{block.where}: give the block a language, one of {', '.join(LANGUAGES)}"
        reason = block.marks.get("not run")
        assert reason is None or reason in REASONS, f"{block.where}: not run: {reason}. {HELP}"
        assert block.marks.get("exits", "0").isdigit(), f"{block.where}: exits takes a number"
        is_shown = block.language == "text" and "$ perfladder" in block.text
        assert not is_shown, f"{block.where}: a block that shows a command is a `console` block. {HELP}"


@pytest.mark.parametrize("block", chosen("console", "sh", "bash"), ids=lambda block: block.where)
def test_commands_in_blocks_have_existing_verbs_and_options(block):
    assert block.commands, f"{block.where} holds no command; a console block has them after `$ `"
    for command in {*block.commands, *block.commands_to_run}:
        if arguments := split(command):
            try:
                parsed(as_typed(arguments))
            except click.UsageError as error:
                pytest.fail(f"{block.where}: {command}: {error.format_message()}")


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_commands_in_sentences_have_existing_verbs_and_options(page):
    group = get_command(app)
    for command in inline_commands(ROOT / page):
        _, verb, *rest = command.split()
        if verb.startswith("-"):
            continue
        assert verb in group.commands, f"{page}: {command}"
        known = {flag for parameter in group.commands[verb].params for flag in parameter.opts} | {"--help"}
        own = rest[: next((at + 1 for at, part in enumerate(rest) if part.endswith(".py")), len(rest))]
        flags = {part.strip("[],").partition("=")[0] for part in own if part.startswith("--")}
        assert flags <= known, f"{page}: {command}"


@pytest.mark.parametrize("block", chosen("python"), ids=lambda block: block.where)
def test_python_blocks_compile_and_use_existing_names(block):
    for node in ast.walk(ast.parse(block.text, block.where)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("perfladder"):
            for alias in node.names:
                assert is_there(node.module, alias.name), f"{block.where}: {ast.unparse(node)}"
        if isinstance(node, ast.Attribute) and (path := dotted(node)).startswith("pl."):
            found: object = importlib.import_module("perfladder")
            for name in path.split(".")[1:]:
                assert hasattr(found, name), f"{block.where}: {path}"
                found = getattr(found, name)


def is_there(module: str, name: str) -> bool:
    """Whether an import finds a name in a module, or a module of that name below it."""
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression that is only that; else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


@pytest.mark.parametrize("block", chosen("yaml", "json"), ids=lambda block: block.where)
def test_data_blocks_are_valid(block):
    (yaml.safe_load if block.language == "yaml" else json.loads)(block.text)


def test_the_pages_together_run_the_main_verbs():
    """What is left out is printed, and a verb that every page leaves out is noticed."""
    for block in BLOCKS:
        if "not run" in block.marks:
            print(f"{block.where}: not run: {block.marks['not run']}")
    verbs = {arguments[1] for block in BLOCKS if block.is_run for c in block.commands if (arguments := split(c))}
    assert {"run", "exec", "init", "tune", "capture", "replay", "kernels", "doctor"} <= verbs


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN_PAGES)
def test_the_blocks_of_a_page_run_in_order(page, tmp_path):
    steps = [step for block in BLOCKS if block.page == page for step in steps_of(block)]
    (tmp_path / ".venv").symlink_to(sys.prefix)
    home = tmp_path.parent / f"{tmp_path.name}-home"
    home.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PERFLADDER_", "MLFLOW_"))}
    variables |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_DATA_HOME": str(home / "data"),
    }
    runner = Path(__file__).parents[1] / "support" / "run_page.py"
    ended = subprocess.run(
        [sys.executable, "-P", str(runner)],
        input=json.dumps(steps),
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    print(ended.stdout)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}\n{HELP}"


def steps_of(block: Block) -> list[dict[str, str]]:
    """What the page's process does for a block."""
    if block.file is not None:
        return [{"kind": "file", "where": block.where, "name": block.file, "text": block.text}]
    if not block.is_run:
        return []
    if block.language == "python":
        return [{"kind": "python", "where": block.where, "text": block.text}]
    exits = block.marks.get("exits", "0")
    return [{"kind": "sh", "where": block.where, "text": text, "exits": exits} for text in block.commands_to_run]
