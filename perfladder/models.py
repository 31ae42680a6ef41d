"""The base of every pydantic model that crosses a module, process or file border."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from perfladder.errors import InputError
from perfladder.text import near_names

SCHEMA_VERSION = 1
"""Version of the files in a run directory; readers accept every version up to this one."""


class Model(BaseModel):
    """Frozen, and a misspelt field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ResultWarning(Model):
    """Something missing or suspicious in a result, with a stable code."""

    code: str
    message: str
    source: str = "core"


def newer_schema(text: bytes) -> int | None:
    """The schema version of a JSON document when it is above what this perfladder reads, else None."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    version = document.get("schema_version") if isinstance(document, dict) else None
    return version if isinstance(version, int) and version > SCHEMA_VERSION else None


def digest(value: object) -> str:
    """Return 16 hexadecimal digits that identify a JSON-ready value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def input_error(error: ValidationError, model: type[BaseModel], what: str) -> InputError:
    """Turn pydantic's report into one message that names each wrong field and what it accepts."""
    lines = dict.fromkeys(
        _explain(detail, model) for detail in _without_union_branches(error.errors(include_url=False))
    )
    return InputError(f"{what} is not valid:\n" + "\n".join(f"  {line}" for line in lines))


def _without_union_branches(details: list[Any]) -> list[Any]:
    """A field that accepts a word or a list fails once for each: keep the branch that got furthest."""
    deepest: dict[Any, int] = {}
    for detail in details:
        location = detail["loc"]
        deepest[location[:1]] = max(deepest.get(location[:1], 0), len(location) if _has_branch(location) else 0)
    return [d for d in details if not _has_branch(d["loc"]) or len(d["loc"]) == deepest[d["loc"][:1]]]


def _has_branch(location: tuple[Any, ...]) -> bool:
    return any(isinstance(part, str) and "[" in part and part != "[key]" for part in location)


def _explain(detail: Any, model: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in detail["loc"] if not _has_branch((part,)))
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        owner = _model_at(model, detail["loc"][:-1])
        fields = sorted(owner.model_fields) if owner else []
        return f"{path}: unknown field. {near_names(str(detail['loc'][-1]), fields, 'fields', limit=40)}"
    if kind == "missing":
        return f"{path}: required, but not given."
    if kind in ("literal_error", "enum"):
        return f"{path}: got {detail['input']!r}; accepted: {context['expected']}."
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{path}: {message} (got {_short(detail['input'])})." if path else f"{message}."


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_at(model: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel] | None:
    """Follow field names to the model that owns an unknown field."""
    current: type[BaseModel] | None = model
    for part in location:
        if current is None or part not in current.model_fields:
            return current
        annotation = current.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        current = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
    return current
