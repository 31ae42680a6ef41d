"""`@stage("name")` and `with stage("name"):` mark stages in the user's own code; nearly free when nothing observes.

Stage timing observes marks by itself; any other observer of `perfladder.instrument` can.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from torch.compiler import is_dynamo_compiling

from perfladder import instrument
from perfladder.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])

_marks = instrument._MARKS


class stage:  # noqa: N801 (used like a function)
    """Mark a stage: a decorator for functions, coroutine functions, generators and async generators, or a `with` block.

    Marks of the same name are one stage, wherever they are. Of a decorated generator or coroutine each resumption is a
    span of its own, so that waiting for the consumer or the event loop is not counted; a `with` block with a `yield` or
    `await` inside counts that too. Inside a function that `torch.compile` has compiled there is nothing to observe, and
    a mark there changes no guard and breaks no graph.

    Args:
        name: What the stage is called in results.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    # That Dynamo traces is asked first: then the table of observers is no part of the compiled code's guards.

    def __enter__(self) -> Self:
        if not is_dynamo_compiling() and _marks.watchers:
            instrument.enter_mark(_checked(self.name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not is_dynamo_compiling() and _marks.watchers:
            instrument.leave_mark(self.name)

    def __call__(self, function: F) -> F:
        """Decorate a function or method of any kind.

        Raises:
            InputError: It is a class, or something that cannot be called, such as a `classmethod` object.
        """
        name = _checked(self.name)
        if isinstance(function, type) or not callable(function):
            raise InputError(
                f"stage({name!r}) marks functions and methods, not a {type(function).__name__}; "
                "write it below @classmethod and @staticmethod, directly above 'def'."
            )
        instrument.mark_site(name)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def marked_coroutine(*args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling() or not _marks.watchers:
                    return await function(*args, **kwargs)
                return await instrument.call_marked(name, function, args, kwargs)

            return marked_coroutine  # type: ignore[return-value]

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not _marks.watchers:
                return function(*args, **kwargs)
            return instrument.call_marked(name, function, args, kwargs)

        return marked  # type: ignore[return-value]


def _checked(name: object) -> str:
    if not isinstance(name, str) or not name or name == "*":
        raise InputError(f"stage() needs a name, as in @stage('decode'); got {name!r}.")
    return name
