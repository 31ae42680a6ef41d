"""The script `replay.py` beside a capture: the three files `standalone*.py` as one, with its constants."""

from __future__ import annotations

import ast
import inspect
import pprint
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from perfladder.capturing.nodes import Node
from perfladder.capturing.store import Manifest
from perfladder.capturing.types import CaptureType, capture_types, type_name, with_attributes
from perfladder.errors import CaptureError
from perfladder.files import write_atomically
from perfladder.workload import Workload

SCRIPT: Final = "replay.py"
_PARTS: Final = ("standalone_values.py", "standalone_timing.py", "standalone.py")
_CODE: Final = "# [code]\n"
_BEGIN: Final = "# [filled in for each capture]\n"
_END: Final = "# [end]\n"
_IMPORTS: Final = (ast.Import, ast.ImportFrom)
_IN_PLACE: Final = "in_place:"
_WIDTH: Final = 110
_SPECIAL: Final = {"PIL.Image.Image": "image"}
"""Forms of classes, with all that are derived from them, whose state is neither their fields nor their attributes."""


def write_script(folder: Path, manifest: Manifest, workload: Workload, base_dir: Path) -> Path:
    """Write `replay.py` into a capture's folder; it replays the capture with torch alone.

    Args:
        folder: The capture's.
        manifest: What was captured.
        workload: Whose stage it was; its factory builds the stage.
        base_dir: Where the workload's relative paths start.
    """
    before, _, rest = _source().partition(_BEGIN)
    after = rest.partition(_END)[2]
    values = _constants(manifest, workload, base_dir)
    block = "".join(f"{name} = {pprint.pformat(value, width=_WIDTH, sort_dicts=False)}\n" for name, value in values)
    path = folder / SCRIPT
    write_atomically(path, f"{before}{_BEGIN}{block}{_END}{after}")
    return path


def read_constants(folder: Path) -> dict[str, Any]:
    """The values that a capture's script was filled with, after its code was compared with what is written here.

    Raises:
        CaptureError: There is no script, or it is not what this perfladder writes.
    """
    path = folder / SCRIPT
    if path.is_symlink() or not path.is_file():
        raise CaptureError(f"{folder} has no {SCRIPT}, or it is a link. Capture the stage again.")
    ours = _source()
    before, _, rest = path.read_text(encoding="utf-8", errors="replace").partition(_BEGIN)
    block, _, after = rest.partition(_END)
    if (before, after) != (ours.partition(_BEGIN)[0], ours.partition(_END)[2]):
        raise CaptureError(
            f"{path} is not the script that this perfladder writes: it was changed, or another version wrote it. "
            "Capture the stage again."
        )
    try:
        return dict(map(_value, ast.parse(block).body))
    except (ValueError, SyntaxError) as error:
        raise CaptureError(f"{path} was changed: its values are more than values. Capture the stage again.") from error


def _value(statement: ast.stmt) -> tuple[str, Any]:
    """A name and its value; whatever else stands there would be code."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        raise ValueError(f"line {statement.lineno} is no assignment")
    return statement.targets[0].id, ast.literal_eval(statement.value)


def nvtx_range(stage: str) -> str:
    """The range that a script opens around a call, with nothing in it that ncu's filters give a meaning."""
    return f"replay_{re.sub(r'[^A-Za-z0-9_]', '_', stage)}"


def _source() -> str:
    """All parts as one script: the last one's docstring, the imports of all, and the code of all in order."""
    parts = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _PARTS]
    imports: dict[str, dict[str, None]] = {}
    for statement in (statement for part in parts for statement in ast.parse(part.partition(_CODE)[0]).body):
        names = {alias.name: None for alias in statement.names} if isinstance(statement, _IMPORTS) else {}
        if isinstance(statement, ast.Import):
            imports |= {f"import {name}": {} for name in names}
        elif isinstance(statement, ast.ImportFrom) and not str(statement.module).startswith("perfladder."):
            imports.setdefault(f"from {statement.module} import ", {}).update(names)
    lines = [text + ", ".join(sorted(names)) for text, names in imports.items()]
    lines.sort(key=_place_of_import)
    docstring = parts[-1].partition("from __future__")[0]
    at = next(index for index, line in enumerate(lines) if line.split()[1].startswith("torch"))
    head = [docstring + lines[0], "", *lines[1:at], "", *lines[at:], ""]
    return "\n".join([*head, *(part.partition(_CODE)[2] for part in parts)])


def _place_of_import(line: str) -> tuple[bool, bool, bool, str]:
    """The future goes first, then the standard library, then torch; `import x` before `from x`."""
    word, module, *_ = line.split()
    return module != "__future__", module.startswith("torch"), word == "from", line


def _constants(manifest: Manifest, workload: Workload, base_dir: Path) -> Iterator[tuple[str, Any]]:
    yield "STAGE", manifest.stage
    yield "TARGET", None if workload.target.startswith(_IN_PLACE) else workload.target
    yield "TARGET_ARGS", workload.target_args
    yield "TARGET_MODULE", _module_of_file(workload.target, base_dir)
    yield "BASE_DIR", str(base_dir.resolve())
    yield "DEVICE", manifest.device
    yield "DTYPE", workload.dtype
    yield "SEED", workload.seed
    yield "ATTENTION", workload.attention_backend
    yield "COMPILE", workload.compile.model_dump(mode="json") if workload.compile else None
    yield "NVTX_RANGE", nvtx_range(manifest.stage)
    yield "CLASSES", _classes(manifest)


def _module_of_file(target: str, base_dir: Path) -> str | None:
    """Under which name a target's file is imported here; a capture names its classes by it."""
    file_name = target.rpartition(":")[0]
    if not file_name.endswith(".py"):
        return None
    path = (base_dir / file_name).resolve()
    found = (name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == str(path))
    return next(found, path.stem)


def _classes(manifest: Manifest) -> dict[str, tuple[str, str, str]]:
    """Module, name and form of each class that the capture holds and may rebuild."""
    known = capture_types()
    roots = [*manifest.owner_state.values()]
    for call in manifest.calls:
        roots += [*call.inputs.values(), call.output, *call.owner_state.values()]
        roots += [*call.inputs_after.values(), *call.state_after.values()]
    names = sorted({name for root in roots for name in _type_names(root)} & set(known))
    return {name: (known[name].kind.__module__, known[name].kind.__qualname__, _form(known[name])) for name in names}


def _type_names(node: Node) -> Iterator[str]:
    if node.kind in ("record", "object", "class") and node.type_name:
        yield node.type_name
    for item in node.items or []:
        yield from _type_names(item)


def _form(known: CaptureType) -> str:
    """How a value is made of its state: a word that `standalone.py` knows, or `module:function`."""
    if known.from_state is None:
        return "fields"
    if known.from_state is with_attributes:
        return "attributes"
    own = inspect.getclosurevars(known.from_state).nonlocals.get("make")
    if own is not None:
        return f"{own.__module__}:{own.__qualname__}"
    return next((_SPECIAL[name] for base in known.kind.__mro__ if (name := type_name(base)) in _SPECIAL), "call")
