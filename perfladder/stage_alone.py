"""A stage without the rest of its pipeline, still at its own path, so that the rest can be freed."""

from __future__ import annotations

from typing import Any

from perfladder.object_parts import attribute_at
from perfladder.sites import resolve_site


class Holder:
    """Stands where the pipeline and its containers were: has the stage's owner as an attribute, and nothing else."""

    @property
    def content(self) -> Any:
        """The stage's owner."""
        (inner,) = vars(self).values()
        return inner.content if isinstance(inner, Holder) else inner


def stage_alone(obj: Any, path: str) -> Any:
    """An object that has at `path` what `obj` has there.

    It is `obj` itself where the stage is the whole, or one of its own methods, and where the path names no attribute (a
    mark in the user's code). What of the rest the stage refers to by itself stays alive with it.

    Raises:
        InputError: There is no such stage.
    """
    site = resolve_site(obj, path, field_name="stage")
    parts = path.split(".") if path else []
    owner_path = parts if site.is_module or site.method == "__call__" else parts[:-1]
    if site.is_mark or site.owner is obj or not owner_path:
        return obj
    root = holder = Holder()
    for part in owner_path[:-1]:
        inner = Holder()
        setattr(holder, part, inner)
        holder = inner
    setattr(holder, owner_path[-1], attribute_at(obj, ".".join(owner_path), field_name="stage"))
    return root
