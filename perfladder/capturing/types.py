"""Which classes a capture may hold and rebuild: those of libraries that are loaded, and those that users register.

Nothing is imported by name: a class that is not registered when a capture is read cannot be rebuilt.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perfladder.errors import InputError

ToState = Callable[[Any], Any]
FromState = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class CaptureType:
    """How values of one class are taken apart and put together again.

    Attributes:
        kind: The class.
        to_state: Gives a value's state, in types that a capture can hold; None where its fields are the state.
        from_state: Makes a value of the class from such a state.
    """

    kind: type
    to_state: ToState | None = None
    from_state: FromState | None = None

    @property
    def name(self) -> str:
        """Qualified name of the class."""
        return type_name(self.kind)

    def rebuild(self, state: Any) -> Any:
        """Make a value: from `to_state`'s state, or from its fields by name."""
        if self.from_state is not None:
            return self.from_state(self.kind, state)
        return self.kind(**state)


def type_name(kind: type) -> str:
    """Qualified name of a class, by which a capture refers to it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def fields_of(value: Any) -> dict[str, Any] | None:
    """The named fields that a value is made of; None if it is no named tuple, dataclass or mapping by names.

    torch's own result tuples, as `torch.max` returns them, are not among them.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return dict(value)
    return None


def attributes(value: Any) -> dict[str, Any]:
    """All attributes of an object, as the state of a class that needs no more."""
    return dict(vars(value))


def with_attributes(kind: type, state: Mapping[str, Any]) -> Any:
    """An object with these attributes; its `__init__` is not called."""
    made: Any = object.__new__(kind)
    vars(made).update(state)
    return made


_registered: dict[type, CaptureType] = {}


def register_capture_type(
    kind: type, *, to_state: Callable[[Any], Any] | None = None, from_state: Callable[[Any], Any] | None = None
) -> type:
    """Let captures hold values of a class, and rebuild them where they are replayed; usable as a decorator.

    Register it in the module of your factory, so that the process that replays has it too.

    Args:
        kind: The class. Without functions an enum, a dataclass, a named tuple or a mapping is stored by its members or
            fields, and any other class by its attributes; `__init__` is then not called.
        to_state: Takes a value, returns its state in types that a capture can hold (tensors, containers, scalars).
        from_state: Takes such a state, returns a value.

    Raises:
        InputError: It is no class, or only one of the functions is given.
    """
    if not isinstance(kind, type):
        raise InputError(f"register_capture_type: expected a class, got a {type(kind).__name__}.")
    if (to_state is None) != (from_state is None):
        raise InputError(f"register_capture_type({kind.__name__}): give both to_state and from_state, or neither.")
    if to_state is not None and from_state is not None:
        make = from_state
        _registered[kind] = CaptureType(kind, to_state, lambda _, state: make(state))
    else:
        _registered[kind] = _by_structure(kind)
    return kind


def _by_structure(kind: type) -> CaptureType:
    has_fields = issubclass(kind, (enum.Enum, Mapping)) or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    return CaptureType(kind) if has_fields else CaptureType(kind, attributes, with_attributes)


def _image_state(value: Any) -> dict[str, Any]:
    return {"mode": value.mode, "size": list(value.size), "bytes": value.tobytes()}


def _image(kind: type, state: Mapping[str, Any]) -> Any:
    image = sys.modules["PIL.Image"].frombytes(state["mode"], tuple(state["size"]), state["bytes"])
    return image if type(image) is kind else image.copy()


_FAMILIES: tuple[tuple[str, str, ToState | None, FromState | None], ...] = (
    ("collections", "OrderedDict", lambda v: list(v.items()), lambda kind, state: kind(state)),
    ("diffusers.utils.outputs", "BaseOutput", None, None),
    ("diffusers.configuration_utils", "FrozenDict", dict, lambda kind, state: kind(state)),
    ("transformers.utils.generic", "ModelOutput", None, None),
    ("transformers.cache_utils", "Cache", attributes, with_attributes),
    ("transformers.cache_utils", "CacheLayerMixin", attributes, with_attributes),
    ("transformers.configuration_utils", "PreTrainedConfig", attributes, with_attributes),
    ("transformers.tokenization_utils_base", "BatchEncoding", lambda v: dict(v.data), lambda k, s: k(s)),
    ("transformers.feature_extraction_utils", "BatchFeature", lambda v: dict(v.data), lambda k, s: k(s)),
    ("PIL.Image", "Image", _image_state, _image),
)
"""Classes of libraries, with all that are derived from them; of two that fit, the later one decides."""


def capture_types() -> dict[str, CaptureType]:
    """Every class that a capture may hold now, by qualified name; what users registered goes before libraries' own."""
    import torch

    found: dict[type, CaptureType] = {}
    for library, base, to_state, from_state in _FAMILIES:
        root = getattr(sys.modules.get(library), base, None)
        for kind in _with_subclasses(root) if isinstance(root, type) else []:
            found[kind] = CaptureType(kind, to_state, from_state)
    for kind in vars(torch.return_types).values():
        if isinstance(kind, type) and issubclass(kind, tuple):
            found[kind] = CaptureType(kind, list, lambda own, state: own(state))
    found.update(_registered)
    return {known.name: known for known in found.values()}


def _with_subclasses(root: type) -> list[type]:
    found, queue = [], [root]
    while queue:
        kind = queue.pop()
        found.append(kind)
        queue += kind.__subclasses__()
    return found
