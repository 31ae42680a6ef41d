"""Changes to a workload from the command line: `--set field=value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

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
    if not changes:
        return file
    data = file.workload.model_dump(mode="json")
    for change in changes:
        path, separator, text = change.partition("=")
        if not separator or not path:
            raise InputError(f"{option} {change!r}: expected field=value, such as measured_runs=20.")
        *parents, name = path.split(".")
        owner: Any = data
        for parent in parents:
            if not isinstance(owner.get(parent), dict):
                owner[parent] = {}
            owner = owner[parent]
        try:
            owner[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(f"{option} {change!r}: the value is not valid YAML.") from error
    return WorkloadFile(parse_workload(data, what=f"{source} with {option}"), file.base_dir)
