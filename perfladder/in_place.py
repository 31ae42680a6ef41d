"""An object that is already there, as in a notebook, as a loaded target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from perfladder.errors import InputError
from perfladder.object_parts import named_modules_of
from perfladder.target import LoadedTarget
from perfladder.workload import parse_workload


def wrap_object(obj: Any, inputs: Mapping[str, Any] | None, **fields: Any) -> LoadedTarget:
    """Give an object and the inputs of its call the form in which rungs take a target.

    Args:
        obj: What to call: a pipeline, a module, any callable, or an object with a method.
        inputs: Keyword arguments of the call; tensors and other objects are taken as they are.
        fields: Fields of the workload, such as `call` and `seed`.

    Raises:
        InputError: A field is wrong, or the inputs do not fit the call.
    """
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InputError(f"inputs: expected a mapping of keyword arguments, got a {type(inputs).__name__}.")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", type(obj).__name__).lstrip("._-") or "object"
    workload = parse_workload({"name": name, "target": "in_place:object", "device": device_of(obj), **fields})
    return LoadedTarget.of(obj, workload, inputs=inputs or {})


def device_of(obj: Any) -> str:
    """Where the object's weights are; an object without any runs where torch would by default."""
    for _, module in named_modules_of(obj):
        for parameter in module.parameters():
            if parameter.device.type != "meta":
                return str(parameter.device)
    return "auto"
