"""Names and values as MLflow accepts them: a reversible spelling of names, and flat keys for nested values."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable

from pydantic import JsonValue

MAX_NAME_CHARS = 250
"""MLflow refuses longer names of metrics and params (measured on 3.17)."""

_REFUSED = re.compile(r"_(?=x)|[^A-Za-z0-9_. :\-]")
"""What is spelt: characters that MLflow refuses, and an underscore that would look like the start of a spelling."""

_SPELT = re.compile(r"_x([0-9a-f]*)_")
_CUT = "_xcut_"


def slug(name: str) -> str:
    """Spell a name with what MLflow accepts: other characters become their code point, as in `down_x28_0_x29_`.

    Slashes divide a name into parts and stay; `unslug` gives the name back, unless it was too long and had to be cut.
    """
    spelt = "/".join(_slug_part(part) for part in name.split("/"))
    if len(spelt) <= MAX_NAME_CHARS:
        return spelt
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return spelt[: MAX_NAME_CHARS - len(_CUT) - len(digest)] + _CUT + digest


def unslug(spelt: str) -> str:
    """The name that `slug` has spelt.

    Raises:
        ValueError: It was cut; the artifact with the names has it.
    """
    if _CUT in spelt:
        raise ValueError(f"{spelt} was too long and is cut")
    return _SPELT.sub(lambda match: chr(int(match.group(1), 16)) if match.group(1) else "", spelt)


def slugs(names: Iterable[str]) -> dict[str, str]:
    """Spell many names, each by its own slug.

    Raises:
        ValueError: Two names share one.
    """
    owners: dict[str, str] = {}
    for name in names:
        spelt = slug(name)
        if owners.setdefault(spelt, name) != name:
            raise ValueError(f"{name!r} and {owners[spelt]!r} are both written {spelt!r}")
    return {name: spelt for spelt, name in owners.items()}


def flatten(value: JsonValue, prefix: str = "") -> dict[str, str]:
    """Nested values under dotted keys: mappings and lists of mappings are entered, other lists become JSON text."""
    if isinstance(value, dict) and value:
        items = [(f"{prefix}.{key}" if prefix else key, inner) for key, inner in value.items()]
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        items = [(f"{prefix}.{index}", inner) for index, inner in enumerate(value)]
    else:
        return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
    return {key: text for path, inner in items for key, text in flatten(inner, path).items()}


def _slug_part(part: str) -> str:
    """An empty part, or one of dots only, would be read as a path."""
    if not part.strip("."):
        return "".join(map(_spell, part)) or "_x_"
    return _REFUSED.sub(lambda match: _spell(match.group()), part)


def _spell(char: str) -> str:
    return f"_x{ord(char):x}_"
