"""How a wrapper around a module tells that perfladder manages it, so that whoever measures need not know its class.

A wrapper carries three attributes:

- `perfladder_managed`: `"aot"` for one made by `wrap`, `"jit"` for a module that just-in-time tuning has patched;
- `perfladder_name`: the name it was given;
- `perfladder_state`: `"tuned"`, `"recording"` or `"passthrough"`, as of now;

and, where it is a wrapper of its own class, the wrapped module as `module`.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

ManagedBy = Literal["aot", "jit"]
WrapperState = Literal["tuned", "recording", "passthrough", "unknown"]

_STATES: Final[dict[str, WrapperState]] = {state: state for state in ("tuned", "recording", "passthrough")}


@runtime_checkable
class ManagedModule(Protocol):
    """What a wrapper of ours has beside being a module."""

    perfladder_managed: ManagedBy
    perfladder_name: str
    perfladder_state: str


class Managed(NamedTuple):
    """A wrapper's answer at one moment; another state than the known ones is `unknown`; the type is what is wrapped."""

    by: ManagedBy
    name: str
    state: WrapperState
    module_type: str


def managed_state(module: Any) -> Managed | None:
    """Return what a wrapper tells of itself, or None if the object is no wrapper of ours."""
    by = getattr(module, "perfladder_managed", None)
    if by not in ("aot", "jit"):
        return None
    state = getattr(module, "perfladder_state", None)
    name = getattr(module, "perfladder_name", None)
    inner = getattr(module, "module", None)
    # A transparent proxy shows the wrapped module's class as its own.
    kind = module.__class__ if inner is None else inner.__class__
    module_type = f"{kind.__module__}.{kind.__qualname__}"
    return Managed(by, str(name or kind.__name__), _STATES.get(str(state), "unknown"), module_type)
