"""The observer that marks named calls: a TorchFunctionMode that is active inside the observed modules only.

A mode is seen by its own thread alone. It is entered by the outermost module's pre-hook and left by its post-hook, or,
where an exception skips hooks, when the observation ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from perfladder import _torch_private
from perfladder.functional.names import Call, describe_call
from perfladder.instrument import Observer, Site

_MAX_DEPTH: Final = 16
_PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_UNKNOWN: Final = object()

OnCall = Callable[[Call, Sequence[Any], dict[str, Any]], None]


class CallTable:
    """Describes each function once; threads may share it."""

    def __init__(self) -> None:
        self._known: dict[Any, Call | None] = {}

    def find(self, function: Callable[..., Any]) -> Call | None:
        """Return what a function is called; None if it computes nothing."""
        found: Any = self._known.get(function, _UNKNOWN)
        if found is _UNKNOWN:
            found = self._known[function] = describe_call(function)
        return found


class FunctionMode(TorchFunctionMode):
    """Puts a span around each named call; inside a functional call only functional calls get spans of their own.

    Args:
        table: What is known about functions.
        on_call: Told of each call before it is made, with the mode off.
    """

    def __init__(self, table: CallTable, on_call: OnCall | None) -> None:
        super().__init__()
        self._table = table
        self._on_call = on_call
        self._open_span = _torch_private.open_span
        self._depth = 0
        self.is_closed = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call inside its span."""
        kwargs = kwargs or {}
        if is_dynamo_compiling():  # a compiled function in a plain module is compiled anew, without marks
            return func(*args, **kwargs)
        call = None if self.is_closed else self._table.find(func)
        if call is None or (self._depth and not call.is_functional):
            return func(*args, **kwargs)
        if self._on_call is not None:
            self._on_call(call, args, kwargs)
        with self._open_span(call.label):
            # Where a tensor class overrides the function, it is to see the call itself.
            if call.revealing is None or not _PLAIN_TENSORS.issuperset(types) or self._depth >= _MAX_DEPTH:
                return func(*args, **kwargs)
            self._depth += 1
            try:
                with self:
                    return call.revealing(*args, **kwargs)
            finally:
                self._depth -= 1


class _Change(NamedTuple):
    """What entering a site has done: opened its span, and entered a mode or taken one away from `place`."""

    span: AbstractContextManager[Any]
    entered: FunctionMode | None = None
    suspended: FunctionMode | None = None
    place: int = 0


class FunctionObserver(Observer):
    """Marks the named calls inside each site, on whichever thread, and lets another observer mark the sites.

    Args:
        inner: Marks the sites themselves.
        opaque: Paths of sites whose inside runs as one graph: the mode would change what they compute with.
        on_call: Told of each named call before it is made.
    """

    def __init__(self, inner: Observer, *, opaque: Collection[str] = (), on_call: OnCall | None = None) -> None:
        self._inner = inner
        self._opaque = frozenset(opaque)
        self._on_call = on_call
        self._table = CallTable()
        self._local = threading.local()

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change:
        """Mark the site, and see to it that the mode is active inside it, or not."""
        span = self._inner.enter(site, args, kwargs)
        stack: list[FunctionMode | None] = self._local.__dict__.setdefault("stack", [])
        current = stack[-1] if stack else None
        if site.path in self._opaque:
            stack.append(None)
            if current is None:
                return _Change(span)
            return _Change(span, suspended=current, place=_torch_private.take_function_mode(current))
        if stack:
            stack.append(current)
            return _Change(span)
        mode = FunctionMode(self._table, self._on_call)
        stack.append(mode)
        mode.__enter__()
        return _Change(span, entered=mode)

    def leave(self, site: Site, token: _Change, result: Any) -> None:
        """Undo what `enter` did. From another thread, at the end of an observation, a mode can only be put to sleep."""
        stack: list[FunctionMode | None] = self._local.__dict__.get("stack", [])
        if token.entered is not None:
            token.entered.is_closed = True
            _torch_private.take_function_mode(token.entered)
        if token.suspended is not None and not token.suspended.is_closed:
            _torch_private.put_function_mode(token.suspended, token.place)
        if stack:
            stack.pop()
        self._inner.leave(site, token.span, result)
