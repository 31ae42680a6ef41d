"""Documents of the command line and of run directories, checked by the schemas that are published of them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def printed(verb: str, text: str) -> Any:
    """What a verb printed with `--json`, after its schema has been asked."""
    return _valid(f"{verb}.json", json.loads(text))


def written(path: Path) -> Any:
    """A file of a run directory, after its schema has been asked."""
    return _valid(f"run-directory/{path.name}", json.loads(path.read_text()))


def _valid(name: str, document: Any) -> Any:
    _validator(name).validate(document)
    return document


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / name).read_text()))
