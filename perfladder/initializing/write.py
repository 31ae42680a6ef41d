"""A workload file for a target: examined in a process of its own, written with comments, and read back."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, JsonValue

from perfladder.changes import with_changes
from perfladder.errors import InputError
from perfladder.files import write_atomically
from perfladder.initializing.examine import Examined, ExamineRequest, examine
from perfladder.markdown import templates
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.scripts.workload import script_workload
from perfladder.session import Session
from perfladder.workload import Workload, WorkloadFile, load_workload, parse_workload

_DOCS = "docs/workload.md"
_LONG_RUN_S = 10.0


class InitResult(Model):
    """What was written, and what was found."""

    schema_version: int = SCHEMA_VERSION
    path: str
    does_run: bool = Field(description="Whether a call was made with these inputs, and returned.")
    found: Examined
    next_command: str | None


def init_workload(
    target: str,
    arguments: Sequence[str] = (),
    *,
    output: Path | None = None,
    changes: Sequence[str] = (),
    function: str | None = None,
    nth: int = 1,
    is_replaced: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> InitResult:
    """Examine a target, and write a workload file for it.

    Args:
        target: `file.py:factory`, `module:factory`, or a script.
        arguments: Of the script.
        output: The file; by default the workload's name in the current folder.
        changes: `field=value`, as `--set` takes them; inputs given here are not guessed.
        function: For a script: whose call.
        nth: For a script: which of its calls.
        is_replaced: Whether a file that is there is written over.
        tell: Shows one line of progress.

    Raises:
        InputError: The target is not there, or the file is; or a factory is given a script's arguments.
        WorkloadError: The target does not load.
    """
    is_script = ":" not in target and target.endswith(".py")
    if is_script:
        file = script_workload(target, arguments, function=function, nth=nth, changes=changes)
    elif arguments:
        raise InputError(
            f"{' '.join(arguments)!r}: a factory takes no arguments here. Options stand before the target: "
            f"perfladder init --set inputs.x=1 {target}. Arguments of the factory are --set target_args.NAME=VALUE."
        )
    else:
        file = _factory_workload(target, changes)
    path = (output or Path(f"{file.workload.name}.yaml")).resolve()
    if path.exists() and not is_replaced:
        raise InputError(f"{path} is there already. Choose another with --output, or write over it with --force.")
    tell("loading the target, and calling it once")
    with Session(file, log_path=None, environment=None) as session:
        found = session.call(examine, ExamineRequest(), timeout_s=file.workload.timeout_s)
    workload = _settled(file, found, path.parent)
    text = _render(workload, found, path.name, is_script=is_script)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    load_workload(path)
    does_run = found.error is None
    return InitResult(
        path=str(path),
        does_run=does_run,
        found=found,
        next_command=f"perfladder run {os.path.relpath(path)}" if does_run else None,
    )


def _factory_workload(target: str, changes: Sequence[str]) -> WorkloadFile:
    module, separator, factory = target.rpartition(":")
    if not separator or not module or not factory:
        raise InputError(
            f"{target!r}: expected file.py:factory or module:factory, where factory() returns the object to profile; "
            "or a script, whose name ends in .py."
        )
    last = Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._")
    fields: dict[str, JsonValue] = {"name": name[:80] or "workload", "target": target}
    return with_changes(WorkloadFile(parse_workload(fields), Path.cwd()), list(changes), source=target)


def _settled(file: WorkloadFile, found: Examined, folder: Path) -> Workload:
    """The workload with what was found; a file is named from the folder that the workload file is in."""
    workload = file.workload
    changes: dict[str, Any] = {"call": found.call, "inputs": found.inputs}
    module, _, factory = workload.target.rpartition(":")
    if module.endswith(".py"):
        changes["target"] = f"{os.path.relpath(file.base_dir / module, folder)}:{factory}"
    if found.run_s is not None and found.run_s > _LONG_RUN_S:
        changes |= {"warmup_runs": 1, "measured_runs": 5}
    return workload.model_copy(update=changes)


def _render(workload: Workload, found: Examined, file_name: str, *, is_script: bool) -> str:
    parameters = [parameter for parameter in found.parameters if parameter.name not in found.inputs]
    text = (
        templates("perfladder.initializing", _yaml, _yaml_block)
        .get_template("workload.yaml.jinja")
        .render(
            docs=_DOCS,
            file_name=file_name,
            workload=workload,
            found=found,
            is_script=is_script,
            missing=[parameter for parameter in parameters if parameter.is_required],
            others=[parameter for parameter in parameters if not parameter.is_required],
        )
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _yaml(value: JsonValue) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def _yaml_block(value: dict[str, JsonValue]) -> str:
    lines = [f"{_yaml(name)}: {_yaml(inner)}" for name, inner in value.items()]
    return textwrap.indent("\n".join(lines), "  ")
