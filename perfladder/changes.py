"""Changes to a workload: `--set field=value`, and fields that vary from one climb to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import JsonValue

from perfladder.errors import InputError
from perfladder.workload import WorkloadFile, parse_workload


def with_changes(file: WorkloadFile, changes: Sequence[str], *, source: str, option: str = "--set") -> WorkloadFile:
    """Apply `field=value` to a workload; values are YAML, fields may be dotted.

    Args:
        file: The workload.
        changes: In the order in which they are applied.
        source: What the user called the workload.
        option: What the user typed the changes after.

    Raises:
        InputError: A change has another form, or the workload is not valid with it.
    """
    pairs = [parse_change(change, option=option) for change in changes]
    return with_fields(file, pairs, what=f"{source} with {option}")


def parse_change(change: str, *, option: str) -> tuple[str, JsonValue]:
    """Take `field=value` apart; the value is YAML.

    Raises:
        InputError: It has another form.
    """
    path, separator, text = change.partition("=")
    if not separator or not path:
        raise InputError(f"{option} {change!r}: expected field=value, such as measured_runs=20.")
    try:
        value: JsonValue = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{option} {change!r}: the value is not valid YAML.") from error
    return path, value


def with_fields(
    file: WorkloadFile, fields: Sequence[tuple[str, JsonValue]] | Mapping[str, JsonValue], *, what: str
) -> WorkloadFile:
    """The workload with other values in some of its fields, which may be dotted.

    Raises:
        InputError: The workload is not valid with them; `what` is how the message calls it.
    """
    pairs = list(fields.items()) if isinstance(fields, Mapping) else fields
    if not pairs:
        return file
    data = file.workload.model_dump(mode="json")
    for path, value in pairs:
        *parents, name = path.split(".")
        owner: Any = data
        for parent in parents:
            if not isinstance(owner.get(parent), dict):
                owner[parent] = {}
            owner = owner[parent]
        owner[name] = value
    return WorkloadFile(parse_workload(data, what=what), file.base_dir)
