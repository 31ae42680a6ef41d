"""Which classes a capture may rebuild: output classes of libraries that are loaded. Nothing is imported by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from perfladder.capture.values import Node, leaves

_BASES = (("diffusers.utils.outputs", "BaseOutput"), ("transformers.utils.generic", "ModelOutput"))


def record_types() -> dict[str, type]:
    """Classes by qualified name."""
    found: dict[str, type] = {}
    for library, base in _BASES:
        root = getattr(sys.modules.get(library), base, None)
        queue = [root] if isinstance(root, type) else []
        while queue:
            kind = queue.pop()
            found[f"{kind.__module__}.{kind.__qualname__}"] = kind
            queue += kind.__subclasses__()
    return found


def not_rebuildable(nodes: Mapping[str, Node], types: Mapping[str, type]) -> dict[str, str]:
    """Paths of what cannot be rebuilt, each with the reason: not stored, or of a class that no capture may make."""
    found: dict[str, str] = {}
    for root, node in nodes.items():
        for path, leaf in leaves(node, root).items():
            if leaf.kind == "unsupported":
                found[path] = leaf.reason or "cannot be stored"
        for path, record in _records(node, root).items():
            if record.type_name not in types:
                found[path] = f"a {record.type_name} is no class that a capture may rebuild"
    return found


def _records(node: Node, path: str) -> dict[str, Node]:
    found = {path: node} if node.kind == "record" else {}
    for key, item in zip(node.keys or range(len(node.items or [])), node.items or [], strict=True):
        found.update(_records(item, f"{path}.{key}"))
    return found
