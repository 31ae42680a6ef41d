"""The pages on measuring and on doctor name code, fields and checks that exist."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

from perfladder.doctor.checks import check_clocks
from perfladder.doctor.examine import examine
from perfladder.doctor.facts import Clocks
from perfladder.models import Model
from perfladder.trace.rows import Row

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"`([a-z_0-9/]+\.py)(?:: ([\w., ]+))?`")


def defined_in(path: Path) -> set[str]:
    """Functions, classes, and methods of classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_code_that_measuring_names_is_there():
    found = CODE.findall((ROOT / "docs" / "measuring.md").read_text())
    assert len(found) > 40
    for file, names in found:
        path = ROOT / "perfladder" / file
        assert path.is_file(), file
        assert set(filter(None, names.split(", "))) <= defined_in(path), f"{file}: {names}"


def test_fields_that_measuring_names_are_there():
    for module in ("rungs", "timing", "trace", "tuning", "comparing", "capturing"):
        package = importlib.import_module(f"perfladder.{module}")
        for found in pkgutil.iter_modules(package.__path__, f"perfladder.{module}."):
            importlib.import_module(found.name)
    kinds, fields = [Model, Row], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        fields |= set(getattr(kind, "model_fields", {})) | set(getattr(kind, "__annotations__", {}))
    rows = re.findall(r"^\| .*\| ([^|]+) \|$", (ROOT / "docs" / "measuring.md").read_text(), flags=re.MULTILINE)
    paths = {path for row in rows for path in re.findall(r"`([a-z_\[\].]+)`", row) if not path.endswith(".json")}
    assert len(paths) > 60
    assert {part.removesuffix("[]") for path in paths for part in path.split(".")} <= fields


def test_every_check_of_doctor_has_its_row(tmp_path):
    text = (ROOT / "docs" / "doctor.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    examination = examine({}, tmp_path)
    names = {check.name for check in examination.checks} | {check_clocks(Clocks(index=0)).name}
    # The list of caches depends on the variables of whoever asks, that of devices on the machine.
    assert {re.sub(r"\d+$", "0", name) for name in names} <= documented
    assert documented - names <= {"device 0", "disk for caches"}
